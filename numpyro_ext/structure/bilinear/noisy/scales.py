r"""Noise, cut points and hyperpriors of a side that are latent, found behind a bilinear form with ordered categories.

With all other sites held, a form is a function of each of its hyperparameters. A site of variances whose elements
divide predictors *and* cut points of their cells by their roots is noise: with :math:`a \sim N(\eta, \gamma)` and a
category that says between which cut points :math:`a` lies, both are divided by :math:`\sqrt\gamma`. A Gaussian site
whose elements are added to the cut points makes these; sites that move the prior means, or scale the prior variances,
of the vectors of a side are its hyperpriors. Which element does what is found by moving all elements of a site by
different amounts, and what was found is compared with the form at another random point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ....potentials.families.ordinal import CumulativeProbitPotential
from ..form import GaussianSide
from ..reading import BilinearReading
from .form import Cuts, NoiseSites, NoisyBilinear, Scale, SideHyper
from .priors import FormAt, PriorSearch

_SPREAD = 0.3


class _Seen(NamedTuple):
    """Values of a form that hyperparameters move."""

    coefficients: dict[str, np.ndarray]
    thresholds: np.ndarray
    means: tuple[np.ndarray, np.ndarray]
    variances: tuple[np.ndarray, np.ndarray]


def find_noise(
    reading: BilinearReading, form_at: FormAt, free: tuple[str, ...], fixed: Mapping[str, object]
) -> tuple[NoisyBilinear, NoiseSites]:
    """The noise, cut points and hyperpriors behind a reading.

    :param BilinearReading reading: of the model.
    :param form_at: from values of all hyperparameters to the form.
    :param free: hyperparameters that are to be found in one of these places.
    :param fixed: values of all others.
    :return: arrays, and the names of the sites that they are of.
    :raises ModelStructureError: naming the first site that has none of these places, and why.

    Cost: some three evaluations of the form for each site.
    """
    return _Search(reading, form_at, free, fixed).found()


class _Search(PriorSearch):
    def __init__(
        self, reading: BilinearReading, form_at: FormAt, free: tuple[str, ...], fixed: Mapping[str, object]
    ) -> None:
        super().__init__(reading, form_at, free, fixed)
        form = self.form
        if not isinstance(form.potential, CumulativeProbitPotential):
            raise self.refusal(
                free[0],
                f"the factors of {list(reading.factor_names)} are {type(form.potential).__name__}, and noise and cut "
                "points are integrated over for OrderedProbit alone",
            )
        for side, prior in zip(reading.sides, (form.rows, form.columns), strict=True):
            if not isinstance(prior, GaussianSide) or prior.precision.ndim != 2:
                raise self.refusal(free[0], f"the vectors of {list(side)} depend on each other")
        if np.any(np.asarray(form.weight) != 1.0):
            raise self.refusal(free[0], "observations are scaled (handlers.scale)")
        self.label = form.potential.label

    taken = (
        "Noise variances with inverse gamma priors (or precisions with gamma priors) that divide predictor and cut "
        "points of OrderedProbit by their roots are, and so are Gaussian cut points, and means and variances of the "
        "vectors of a side."
    )

    def look(self, hyper: Mapping[str, object]) -> _Seen:
        form = self.form_at({n: jnp.asarray(v) for n, v in hyper.items()})
        potential: Any = form.potential
        parts = {"coupling": form.coupling, "row": form.row_linear, "column": form.column_linear}
        sides: Any = form.rows, form.columns
        return _Seen(
            {**{k: np.asarray(v) for k, v in parts.items()}, "offset": np.asarray(form.offset)[:, None]},
            np.asarray(potential.thresholds),
            tuple(np.asarray(s.mean) for s in sides),  # type: ignore[arg-type]
            tuple(1.0 / np.asarray(s.precision) for s in sides),  # type: ignore[arg-type]
        )

    def found(self) -> tuple[NoisyBilinear, NoiseSites]:
        start = dict(self.start)
        positive = [n for n in self.free if not self.is_gaussian(n)]
        start.update({n: np.ones_like(self.start[n]) for n in positive})  # units in which scales are one
        base = self.look(start)
        scales: dict[str, Scale] = {}
        precisions = set()
        cuts: dict[str, np.ndarray] = {}
        side_means: list[tuple[str, np.ndarray] | None] = [None, None]
        side_variances: list[tuple[str, Scale] | None] = [None, None]
        parents = []
        for name in self.free:
            # no two alike, and none so near to one that in single precision nothing seems to move
            amounts = 1.25 + np.sort(self.rng.random(start[name].size))
            elements = amounts.reshape(start[name].shape)
            if self.is_gaussian(name):
                seen = self.look({**start, name: start[name] + elements})
                if not np.array_equal(seen.thresholds, base.thresholds):
                    cuts[name] = amounts
                elif any(not np.array_equal(x, y) for x, y in zip(seen.means, base.means, strict=True)):
                    index, side = self.one_side(
                        name, [x - y for x, y in zip(seen.means, base.means, strict=True)], amounts, 0.0
                    )
                    if side_means[side] is not None:
                        raise self.refusal(name, "the means of a side have two such sites")
                    side_means[side] = (name, index)
                else:
                    parents.append(name)
                continue
            shape, rate, is_precision = self.gamma_prior(name)
            factors = 1.0 / elements if is_precision else elements
            if is_precision:
                precisions.add(name)
            seen = self.look({**start, name: start[name] * factors})
            if not np.array_equal(seen.thresholds, base.thresholds):
                with np.errstate(divide="ignore", invalid="ignore"):
                    ratio = np.where(base.thresholds == 0.0, np.nan, (base.thresholds / seen.thresholds) ** 2)
                index = self.matched(name, self.first_known(ratio), amounts)
                scales[name] = Scale(jnp.asarray(index), jnp.asarray(shape), jnp.asarray(rate))
            else:
                ratios = [x / y for x, y in zip(seen.variances, base.variances, strict=True)]
                index, side = self.one_side(name, ratios, amounts, 1.0)
                if side_variances[side] is not None:
                    raise self.refusal(name, "the variances of a side have two such sites")
                side_variances[side] = (name, Scale(jnp.asarray(index), jnp.asarray(shape), jnp.asarray(rate)))
        if len(cuts) > 1:
            raise self.refusal(next(iter(cuts)), f"cut points are sums of several sites, {list(cuts)}")
        noise, made, element = np.ones(len(base.thresholds)), None, None
        cut_name, parent = next(iter(cuts), None), None
        zero = start if cut_name is None else {**start, cut_name: np.zeros_like(start[cut_name])}
        known = self.look(zero).thresholds
        if cut_name is not None:
            slope = self.look({**zero, cut_name: np.ones_like(start[cut_name])}).thresholds - known
            if np.any(slope <= 0.0) or np.any(np.abs(slope - slope[:, :1]) > self.tolerance * np.abs(slope)):
                raise self.refusal(cut_name, "boundaries of one cell see it with different weights")
            amounts = cuts[cut_name]
            moved = self.look({**zero, cut_name: amounts.reshape(start[cut_name].shape)}).thresholds
            element = self.matched(cut_name, (moved - known) / slope, amounts)
            noise = 1.0 / slope[:, 0] ** 2
            known = known / slope[:, :1]
            made, parent = self.prior_of_cuts(cut_name, element, parents, start)
        left = [n for n in parents if n != parent]
        if left:
            raise self.refusal(left[0], "nothing was found that it moves")
        form = self.form_at({n: jnp.asarray(v) for n, v in start.items()})
        unit = jnp.asarray(np.sqrt(noise))[:, None]

        def plain(x: Array) -> Array:
            return x if np.all(noise == 1.0) or not x.shape[-1] else x * unit

        cells = form._replace(
            coupling=plain(form.coupling),
            row_linear=plain(form.row_linear),
            column_linear=plain(form.column_linear),
            offset=form.offset * unit[:, 0],
        )
        sides = [self.side_of(s, base, side_means[s], side_variances[s], start) for s in range(2)]
        noisy = NoisyBilinear(
            cells,
            self.label,
            jnp.asarray(noise),
            jnp.asarray(known),
            tuple(scales.values()),
            made,
            (sides[0], sides[1]),
        )
        names = NoiseSites(
            tuple(scales),
            cut_name,
            parent,
            tuple(None if m is None else m[0] for m in side_means),  # type: ignore[arg-type]
            tuple(None if v is None else v[0] for v in side_variances),  # type: ignore[arg-type]
            frozenset(precisions),
        )
        self.compare(noisy, names)
        return noisy, names

    # Priors

    def prior_of_cuts(
        self, name: str, element: np.ndarray, parents: list[str], start: dict[str, Any]
    ) -> tuple[Cuts, str | None]:
        """The prior of cut points, and the site of their prior means."""
        mean, variance = self.normal_prior(name, start)
        parent = None
        found: tuple[Any, Array, Array] = (None, jnp.zeros((0,)), jnp.zeros((0,)))
        for candidate in parents:
            amounts = 1.0 + np.sort(self.rng.random(start[candidate].size))
            moved = {**start, candidate: start[candidate] + amounts.reshape(start[candidate].shape)}
            change = self.normal_prior(name, moved)[0] - mean
            if np.allclose(change, 0.0, atol=self.tolerance):
                continue
            if parent is not None:
                raise self.refusal(candidate, f"the prior means of '{name}' have two such sites")
            index = self.matched(candidate, change, amounts)
            mean = mean - start[candidate].reshape(-1)[index]
            self.check_root(candidate)
            own = self.normal_prior(candidate, start)
            parent, found = candidate, (jnp.asarray(index), jnp.asarray(own[0]), jnp.asarray(own[1]))
        if parent is None:
            self.check_root(name)
        return Cuts(jnp.asarray(element), jnp.asarray(mean), jnp.asarray(variance), *found), parent

    def side_of(
        self,
        side: int,
        base: _Seen,
        mean: tuple[str, np.ndarray] | None,
        variance: tuple[str, Scale] | None,
        start: dict[str, Any],
    ) -> SideHyper:
        """The priors of the vectors of a side, taken apart."""
        known, nothing = base.means[side], jnp.zeros((0,))
        mean_parts: tuple[Any, Array, Array] = (None, nothing, nothing)
        if mean is not None:
            name, index = mean
            known = known - np.append(start[name].reshape(-1), 0.0)[index]
            self.check_root(name)
            own = self.normal_prior(name, start)
            mean_parts = (jnp.asarray(index), jnp.asarray(own[0]), jnp.asarray(own[1]))
        variance_parts: tuple[Any, Array, Array] = (None, nothing, nothing)
        if variance is not None:
            variance_parts = tuple(variance[1])  # type: ignore[assignment]
        return SideHyper(jnp.asarray(known), jnp.asarray(base.variances[side]), *mean_parts, *variance_parts)

    # Which element does what

    def matched(self, name: str, changes: np.ndarray, amounts: np.ndarray, unmoved: float | None = None) -> np.ndarray:
        """The element whose amount each change is; one behind the last where nothing changed.

        :raises ModelStructureError: if a change is none of the amounts.
        """
        order = np.searchsorted(amounts, changes).clip(0, len(amounts) - 1)
        below = (order - 1).clip(0)
        nearest = np.where(np.abs(amounts[below] - changes) < np.abs(amounts[order] - changes), below, order)
        is_same = np.abs(amounts[nearest] - changes) <= 10.0 * self.tolerance
        if unmoved is not None:
            is_still = np.abs(changes - unmoved) <= 10.0 * self.tolerance
            nearest, is_same = np.where(is_still, len(amounts), nearest), is_same | is_still
        if not np.all(is_same):
            raise self.refusal(name, "what it moves is no single element of it in each cell or vector")
        return nearest

    def first_known(self, ratios: np.ndarray) -> np.ndarray:
        """The first number of each row that is one."""
        at = np.argmax(np.isfinite(ratios), axis=1)
        return np.where(np.isfinite(ratios).any(1), ratios[np.arange(len(ratios)), at], 1.0)

    def one_side(
        self, name: str, changes: list[np.ndarray], amounts: np.ndarray, unmoved: float
    ) -> tuple[np.ndarray, int]:
        """The side of which a site moves the prior, and which of its elements each component has."""
        moved = [bool(np.any(np.abs(x - unmoved) > 10.0 * self.tolerance)) for x in changes]
        if sum(moved) != 1:
            where = "both sides" if all(moved) else "neither the cells nor a side"
            raise self.refusal(name, f"it moves {where}")
        side = moved.index(True)
        return self.matched(name, changes[side], amounts, unmoved), side

    # Comparison

    def compare(self, noisy: NoisyBilinear, names: NoiseSites) -> None:
        """Compare what was found with the form at another point.

        :raises ModelStructureError: naming the part that differs.
        """
        hyper = dict(self.start)
        for name in self.free:
            move = _SPREAD * self.rng.standard_normal(hyper[name].shape)
            hyper[name] = hyper[name] + move if self.is_gaussian(name) else hyper[name] * np.exp(move)
        seen, expected = self.look(hyper), form_parts(noisy, names, hyper)

        def check(what: str, one: np.ndarray, other: np.ndarray) -> None:
            one, other = np.broadcast_arrays(one, other)
            size = np.max(np.abs(other), initial=1.0)
            if not np.all(np.abs(one - other) <= 100.0 * self.tolerance * size):
                involved = names.names[0]
                raise self.refusal(involved, f"with {list(names.names)} the {what} are another function than these are")

        for part, value in expected.coefficients.items():
            check(f"coefficients of the predictors ({part})", value, seen.coefficients[part])
        check("cut points", expected.thresholds, seen.thresholds)
        for side in range(2):
            check("prior means of the vectors", expected.means[side], seen.means[side])
            check("prior variances of the vectors", expected.variances[side], seen.variances[side])


def form_parts(noisy: NoisyBilinear, names: NoiseSites, hyper: Mapping[str, object]) -> _Seen:
    """Coefficients, cut points and priors of the form at values of the latent sites."""

    def of(name: str) -> np.ndarray:
        value = np.asarray(hyper[name], float).reshape(-1)
        return 1.0 / value if name in names.precisions else value

    noise = np.asarray(noisy.noise)
    for name, scale in zip(names.scales, noisy.scales, strict=True):
        noise = noise * of(name)[np.asarray(scale.group)]
    root = np.sqrt(noise)[:, None]
    thresholds = np.asarray(noisy.thresholds)
    if names.cuts is not None and noisy.cuts is not None:
        thresholds = thresholds + of(names.cuts)[np.asarray(noisy.cuts.element)]
    cells = noisy.cells
    parts = {"coupling": cells.coupling, "row": cells.row_linear, "column": cells.column_linear}
    coefficients = {k: np.asarray(v) / root if v.shape[-1] else np.asarray(v) for k, v in parts.items()}
    coefficients["offset"] = np.asarray(cells.offset)[:, None] / root
    means, variances = [], []
    for side, mean, variance in zip(noisy.sides, names.means, names.variances, strict=True):
        means.append(np.asarray(side.mean) + (0.0 if mean is None else np.append(of(mean), 0.0)[side.mean_index]))
        factor = 1.0 if variance is None else np.append(of(variance), 1.0)[side.variance_index]
        variances.append(np.asarray(side.variance) * factor)
    return _Seen(coefficients, thresholds / root, (means[0], means[1]), (variances[0], variances[1]))
