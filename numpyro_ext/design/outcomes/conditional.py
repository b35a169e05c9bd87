"""Draws of the hyperparameters of a Gaussian field, at each of which the field is conditioned exactly: on the data, or,
where its elements at hand were drawn, on these."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.pytree import PyTree
from ...compilation.store import shared
from ...infer.front.state import EngineState
from ...infer.gaussian.algorithms.algorithm import Algorithm
from ...infer.gaussian.algorithms.held_sites import gaussian_sites
from ...infer.gaussian.algorithms.posterior import GaussianPosterior
from ...infer.gaussian.answers.prediction import Slices, observed_parts
from ...infer.gaussian.engine import Engine
from ...infer.gaussian.marginal.exact import Exact
from ...infer.gaussian.runs.run import GaussianRun
from ...linalg.gaussian.prior import DiagonalPrior, FlatPrior
from ...potentials import GaussianPotential
from ...structure import LatentGaussianReading, ModelStructureError
from ...structure.latent_gaussian import LatentGaussian
from .drawn_sites import latents_among
from .draws import PosteriorDraws
from .focus import Focus, Interest, as_focus, joint_covariance, rows_of_elements, variance_left
from .outlooks import GaussianOutlook
from .points import Points, check_no_others, outlooks_at

_INSTEAD = "Fit an engine on a Gaussian field, such as EP or INLA, and ask it with this focus, or leave focus out."


def outlooks_given_draws(
    draws: PosteriorDraws,
    focus: Focus | None,
    at: Callable[[Conditioned, GaussianRun], tuple[GaussianRun, Any]],
    rng_key: Array,
) -> dict[str, GaussianOutlook]:
    """Observations as mixtures over draws of the hyperparameters, of which the field at each is a nuisance or of
    interest: what all draws together know of it is there in closed form, with no draws within draws.

    Where some of the data has other than Gaussian noise, the field is not known in closed form given these. Without a
    focus it is given its own draw then, from which its values elsewhere, as of a process at other inputs, are Gaussian.
    That costs a factorisation of old and new elements for each draw.

    :param PosteriorDraws draws: of a model whose field is Gaussian given the others; draws of the field are used where
        the data does not tell it.
    :param focus: as for :func:`~numpyro_ext.design.expected_information_gain`.
    :param at: from an engine and its run to the run that holds the observations that are looked at, and the part of
        them that is new.
    :param rng_key: for the check of the reading.
    :raises ValueError: if the field is not known exactly at each draw: why, and what to do.
    """
    engine = Conditioned(draws, has_focus=focus is not None)
    engine.run(rng_key, *draws.args, **draws.kwargs)
    fitted = engine._finished()
    assert isinstance(fitted, GaussianRun)  # as it makes no others
    interest = as_focus(fitted, focus, tuple(fitted.reading.hyper))
    run, slices = at(engine, fitted)
    interest = interest.moved(fitted.reading, run.reading)
    weights, hyper = engine.points(fitted.reading.hyper)
    if interest.is_about_hyper and len(weights) == 1:
        raise ValueError(
            f"All draws of {sorted(hyper)} are equal, and know nothing of their uncertainty: a chain that did not move?"
        )
    if engine.is_on_field:
        points = _points_on_field(fitted.reading, run.reading, engine, slices)
    else:
        points = _points(run.reading, interest, weights, hyper)
    found, others = outlooks_at(run.reading, points, interest, slices)
    check_no_others(others)
    size = draws.effective_sample_size or 1.0 / float(jnp.sum(jnp.square(points.weights)))
    return {name: dataclasses.replace(outlook, effective_sample_size=size) for name, outlook in found.items()}


class Conditioned(Engine):
    """The field of a model at a draw of its hyperparameters: a reading of the model with its data, at other draws too.

    :param PosteriorDraws draws: with the arguments of the fit that they are from.
    :param bool has_focus: whether something is a nuisance.
    :raises ValueError: if these arguments are not known.
    """

    is_on_field = False
    """True if the field is known by its own draws, and not by the data."""

    def __init__(self, draws: PosteriorDraws, *, has_focus: bool) -> None:
        super().__init__(draws.model, progress_bar=False)
        self._has_focus = has_focus
        if not (draws.args or draws.kwargs) and inspect.signature(draws.model).parameters:
            raise ValueError(
                "A focus, and new members, need the data that the draws have seen: give the arguments of the fit, "
                "draws_of(..., args=(x, y))."
            )
        self._drawn = latents_among(draws.model, draws.samples, (draws.args, draws.kwargs))
        self._weights = draws.weights
        self._num_draws = draws.num_draws

    def points(self, names: Iterable[str]) -> tuple[np.ndarray, dict[str, Array]]:
        """Weights that are not zero, and values of some sites there; equal draws are one point."""
        names = list(names)
        weights = np.full(self._num_draws, 1.0 / self._num_draws) if self._weights is None else self._weights
        # a column of zeros besides: there may be nothing that draws could differ in
        columns = [np.reshape(self._drawn[name], (self._num_draws, -1)) for name in names]
        table = np.concatenate([np.zeros((self._num_draws, 1)), *columns], axis=1)
        _, first, place = np.unique(table, axis=0, return_index=True, return_inverse=True)
        total = np.bincount(place.reshape(-1), np.asarray(weights, float))
        kept = total > 0.0
        return total[kept] / total.sum(), {name: self._drawn[name][first[kept]] for name in names}

    def _start(
        self, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object], init_state: EngineState | None
    ) -> GaussianRun:
        try:
            reading = self._read(rng_key, args, kwargs)
        except ModelStructureError as error:
            raise ValueError(
                "A focus, and new members, need some unknowns given others, which draws have in a model with a "
                f"Gaussian field. Here {error}"
            ) from error
        missing = [name for name in reading.hyper if name not in self._drawn]
        if missing:
            raise ValueError(f"The draws are of {sorted(self._drawn)}; this needs draws of {missing} as well.")
        self.hyper_values = {name: self._drawn[name][0] for name in reading.hyper}
        self._choose_givens(reading)
        return self._fit(reading, rng_key, init_state)

    def _choose_givens(self, reading: LatentGaussianReading) -> None:
        form = reading.compiled_form(self.hyper_values)
        parts = zip(reading.factor_names, form.potentials, form.observed, strict=True)
        names = [n for n, potential, used in parts if not isinstance(potential, GaussianPotential) and bool(used.any())]
        self.is_on_field = bool(names)
        if not names:
            return
        what = f"What the draws have seen of {names} is no observation with Gaussian noise, so that the field given"
        if self._has_focus:
            raise ValueError(
                f"{what} the hyperparameters is not known exactly, and draws within draws would be biased. {_INSTEAD}"
            )
        if missing := [name for name in reading.field if name not in self._drawn]:
            raise ValueError(f"{what} them is not known exactly: give draws of {missing} as well.")

    def algorithm(self, reading: LatentGaussianReading) -> Algorithm:
        return _OfAnyData() if self.is_on_field else Exact()


@dataclasses.dataclass(frozen=True)
class _OfAnyData(Exact):
    """Sites that stand for data of which nothing is looked at: what has old and new elements together is made from a
    run, here of other data."""

    def log_evidence(self, form: LatentGaussian, state: PyTree) -> Array:
        return jnp.zeros((), form.offset.dtype)

    def posterior(self, form: LatentGaussian, state: PyTree) -> GaussianPosterior:
        used = jnp.concatenate(form.observed).astype(form.offset.dtype)
        return GaussianPosterior(form, used, jnp.zeros_like(used))


class _Programs(NamedTuple):
    moments: Any
    joint: Any
    left: Any = None


def _points_on_field(
    old: LatentGaussianReading, reading: LatentGaussianReading, engine: Conditioned, slices: Slices | None
) -> Points:
    """Predictors at chosen rows, given draws of the whole field at the arguments of the fit.

    :param old: the reading of the fit.
    :param reading: in which field sites have further elements behind those of each axis.
    """
    elements = Interest({name: np.arange(int(np.prod(old.site_shapes[name]))) for name in old.field}, False)
    elements = elements.moved(old, reading)
    rows = np.concatenate([part.rows for part in observed_parts(reading, slices)])
    elements.check_joint(len(rows))
    weights, drawn = engine.points([*old.hyper, *old.field])
    hyper = {name: drawn[name] for name in old.hyper}
    fields = jnp.concatenate([drawn[name].reshape(len(weights), -1) for name in old.field], axis=1)
    programs = shared(_on_field, reading)
    potentials, mean, variance = programs.moments(reading.data, hyper, fields, jnp.asarray(rows), elements.elements)
    if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
        raise FloatingPointError(
            "The field given its values in the fit is not finite at some draws. The usual causes are a prior that is "
            "flat and a covariance close to singular: add jitter, or use float64 (numpyro.enable_x64())."
        )

    def covariance(rows: np.ndarray) -> Array:
        return programs.joint(reading.data, hyper, fields, jnp.asarray(rows), elements.elements)

    return Points(jnp.asarray(weights, mean.dtype), potentials, mean, variance, lambda rows: None, covariance)


def _on_field(reading: LatentGaussianReading) -> _Programs:
    Point = tuple[Mapping[str, Array], Array]

    def given(point: Point, data: Any, rows: Array, elements: Mapping[str, Array]) -> tuple[LatentGaussian, Any]:
        form = reading.form(point[0], data)
        zeros = jnp.zeros_like(form.offset)
        maps = reading.maps(point[0], data, list(elements))
        offset = jnp.concatenate([maps[name].offset[numbers] for name, numbers in elements.items()])
        design = form.design.to_dense()[rows], rows_of_elements(reading, point[0], data, elements)
        # sites without Gaussian prior have no new elements, and any prior will do for those that are given
        proper = [DiagonalPrior(jnp.ones(b.size)) if isinstance(b, FlatPrior) else b for b in form.prior]
        prior = GaussianPosterior(form._replace(prior=tuple(proper)), zeros, zeros)
        joint = joint_covariance(prior, jnp.concatenate(design))
        return form, _given(joint, len(rows), point[1] - offset)

    def moments(data: object, hyper: object, fields: Array, rows: Array, elements: Mapping[str, Array]) -> Any:
        def at(point: Point) -> Any:
            form, (mean, left) = given(point, data, rows, elements)
            variance = jnp.maximum(jnp.diagonal(left), 0.0)
            # predictors that are not looked at are left as they are without the draws
            return form.potentials, form.offset.at[rows].add(mean), jnp.zeros_like(form.offset).at[rows].set(variance)

        return jax.lax.map(at, (hyper, fields))

    def joint(data: object, hyper: object, fields: Array, rows: Array, elements: Mapping[str, Array]) -> Array:
        return jax.lax.map(lambda point: given(point, data, rows, elements)[1][1], (hyper, fields))

    return _Programs(jax.jit(moments), jax.jit(joint))


def _given(joint: Array, number: int, values: Array) -> tuple[Array, Array]:
    """Mean and covariance of the first ``number`` of jointly Gaussian quantities, given values of all others."""
    cross, known = joint[number:, :number], joint[number:, number:]
    # sites may hold quantities that determine each other
    rounding = max(1e-12, len(known) * float(jnp.finfo(known.dtype).eps)) * jnp.max(jnp.diagonal(known), initial=0.0)
    factor = jnp.linalg.cholesky(known + rounding * jnp.eye(len(known), dtype=known.dtype))
    rule = jax.scipy.linalg.solve_triangular(factor, cross, lower=True)
    mean = rule.T @ jax.scipy.linalg.solve_triangular(factor, values, lower=True)
    return mean, joint[:number, :number] - rule.T @ rule


def _points(reading: LatentGaussianReading, interest: Interest, weights: np.ndarray, hyper: dict[str, Array]) -> Points:
    programs = shared(_programs, reading)
    number = jnp.arange(len(weights))  # there may be no hyperparameters
    potentials, mean, variance = programs.moments(reading.data, number, hyper)
    if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
        raise FloatingPointError(
            "The field is not finite at some draws of the hyperparameters. The usual cause is a covariance close to "
            "singular: add jitter, or use float64 (numpyro.enable_x64())."
        )

    def left(rows: np.ndarray) -> Array | None:
        if not interest.elements:
            return None
        interest.check_joint(len(rows))
        return programs.left(reading.data, number, hyper, rows, interest.elements)

    def covariance(rows: np.ndarray) -> Array:
        return programs.joint(reading.data, number, hyper, rows, interest.elements)

    return Points(jnp.asarray(weights, mean.dtype), potentials, mean, variance, left, covariance)


def _programs(reading: LatentGaussianReading) -> _Programs:
    def posterior(hyper: Mapping[str, Array], data: PyTree) -> GaussianPosterior:
        form = reading.form(hyper, data)
        return GaussianPosterior(form, *gaussian_sites(form))

    def moments(data: object, number: Array, hyper: Mapping[str, Array]) -> Any:
        def at(point: tuple[Array, Mapping[str, Array]]) -> Any:
            found = posterior(point[1], data)
            return found.form.potentials, *found.predictor_moments()

        return jax.lax.map(at, (number, hyper))

    def designed(point: Any, data: Any, rows: Array, elements: Mapping[str, Array]) -> tuple[GaussianPosterior, Array]:
        found = posterior(point[1], data)
        design = [found.form.design.to_dense()[rows]]
        if elements:
            design.append(rows_of_elements(reading, point[1], data, elements))
        return found, jnp.concatenate(design)

    def joint(data: object, number: Array, hyper: object, rows: Array, elements: Mapping[str, Array]) -> Array:
        def at(point: object) -> Array:
            return joint_covariance(*designed(point, data, rows, elements))

        return jax.lax.map(at, (number, hyper))

    def left(data: object, number: Array, hyper: object, rows: Array, elements: Mapping[str, Array]) -> Array:
        def at(point: object) -> Array:
            return variance_left(*designed(point, data, rows, elements), len(rows))

        return jax.lax.map(at, (number, hyper))

    return _Programs(jax.jit(moments), jax.jit(joint), jax.jit(left))
