r"""Noise variances of Normal cells that have gamma distributions given all else.

With all other sites held, the variance of a cell is a product of elements of such sites and a known number, and their
priors are inverse gamma (or, of precisions, gamma). Which element each cell has is found by moving all elements of a
site by different amounts, digit by digit, and what was found is compared with the form at a random point.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....potentials.families.gaussian import GaussianPotential
from ...errors import ModelStructureError
from ..form import Bilinear
from ..reading import BilinearReading
from .priors import GAMMA_FAMILIES, FormAt, PriorSearch

_BASE = 256
"""Amounts by which elements are moved at once; single precision tells them apart."""
_FIRST = 1.5


class GammaRule(NamedTuple):
    """What is known of the gamma distribution of each precision, whatever the vectors are."""

    prior_shape: Array
    prior_rate: Array
    half_count: Array
    """Half the number of cells that have it."""

    @property
    def shape(self) -> Array:
        """Shapes in the posterior."""
        return self.prior_shape + self.half_count


class NormalNoise(NamedTuple):
    """Sites of noise variances, and of their inverses, with arrays that are flat in the elements of each."""

    variances: dict[str, GammaRule]
    precisions: dict[str, GammaRule]

    @property
    def names(self) -> tuple[str, ...]:
        """Every site."""
        return (*self.variances, *self.precisions)

    @property
    def rules(self) -> dict[str, GammaRule]:
        """Those of all sites."""
        return {**self.variances, **self.precisions}

    def of(self, names: Collection[str]) -> NormalNoise:
        """Those of some sites."""
        return NormalNoise(*({n: rule for n, rule in rules.items() if n in names} for rules in self))

    def updated(self, other: NormalNoise) -> NormalNoise:
        """Those of both, as in ``other`` where they are in both."""
        return NormalNoise(*({**old, **new} for old, new in zip(self, other, strict=True)))


NO_NOISE = NormalNoise({}, {})
"""Noise of a model that has none to integrate over."""


def find_normal_noise(
    reading: BilinearReading, form_at: FormAt, free: tuple[str, ...], fixed: Mapping[str, object]
) -> tuple[NormalNoise, dict[str, ModelStructureError]]:
    """The noise variances behind a reading whose factors are Gaussian.

    :param BilinearReading reading: of the model.
    :param form_at: from values of all hyperparameters to the form.
    :param free: hyperparameters that are not given.
    :param fixed: values of all others.
    :return: the sites that were found, and why others with gamma priors are none.

    Cost: two or three evaluations of the form for each site, and two more.
    """
    names = [n for n in free if reading.sites[n].family in GAMMA_FAMILIES]
    if not names or not isinstance(reading.factor_kind, GaussianPotential):
        return NO_NOISE, {}
    return _Search(reading, form_at, free, fixed).found(names)


class _Search(PriorSearch):
    taken = (
        "Noise variances with inverse gamma priors (or precisions with gamma priors) of Normal observations are, whose "
        "products are the variances of cells."
    )

    def found(self, names: Collection[str]) -> tuple[NormalNoise, dict[str, ModelStructureError]]:
        self.eps = float(jnp.finfo(self.form.offset.dtype).eps)
        base, rest = self.look(self.start)
        weight = np.broadcast_to(np.asarray(self.form.weight), base.shape)
        out, refusals = NormalNoise({}, {}), {}
        groups: dict[str, np.ndarray] = {}
        for name in names:
            try:
                shape, rate, is_precision = self.gamma_prior(name)
                groups[name] = group = self.elements(name, base, rest, is_precision=is_precision)
            except ModelStructureError as refusal:
                refusals[name] = refusal
                continue
            counts = np.bincount(group, weight, len(shape) + 1)[:-1]
            rules = out.precisions if is_precision else out.variances
            rules[name] = GammaRule(*(jnp.asarray(x, self.form.offset.dtype) for x in (shape, rate, 0.5 * counts)))
        if groups and not self.is_product(groups, base, out):
            for name in groups:
                refusals[name] = self.refusal(name, f"variances of cells are no products of elements of {[*groups]}")
            return NO_NOISE, refusals
        return out, refusals

    def look(self, hyper: Mapping[str, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Variances of all cells, and all other numbers of the form."""
        form = self.form_at({n: jnp.asarray(v) for n, v in hyper.items()})
        potential: Any = form.potential
        scale = np.broadcast_to(np.asarray(potential.scale, float), form.offset.shape)
        return scale**2, [np.asarray(x) for x in jax.tree.leaves(_without_scales(form))]

    def elements(self, name: str, base: np.ndarray, rest: list[np.ndarray], *, is_precision: bool) -> np.ndarray:
        """The element of a site that the variance of each cell is proportional to; one behind the last for none."""
        size = self.start[name].size
        group, is_moved = np.zeros(base.shape, int), np.ones(base.shape, bool)
        place = 1
        while place < max(size, 2):
            digits = np.arange(size) // place % _BASE
            factors = (_FIRST + digits / _BASE).reshape(self.start[name].shape)
            moved = self.start[name] * (1.0 / factors if is_precision else factors)
            seen, others = self.look({**self.start, name: moved})
            if any(not np.array_equal(x, y, equal_nan=True) for x, y in zip(others, rest, strict=True)):
                raise self.refusal(name, "it moves more than variances of cells")
            ratio = seen / base
            digit = np.rint((ratio - _FIRST) * _BASE)
            is_still = np.abs(ratio - 1.0) < 0.1 / _BASE
            is_known = np.abs(ratio - _FIRST - digit / _BASE) < 0.1 / _BASE
            if not np.all(is_still | (is_known & (digit >= 0.0) & (digit < _BASE))):
                raise self.refusal(name, "the variance of a cell is not proportional to one of its elements")
            group, is_moved = group + place * digit.clip(0).astype(int), is_moved & ~is_still
            place *= _BASE
        return np.where(is_moved, group, size)

    def is_product(self, groups: Mapping[str, np.ndarray], base: np.ndarray, noise: NormalNoise) -> bool:
        """True if variances are the products that were found at another point, too."""
        hyper, expected = dict(self.start), base
        for name, group in groups.items():
            factors = np.exp(0.3 * self.rng.standard_normal(self.start[name].shape))
            hyper[name] = hyper[name] * (1.0 / factors if name in noise.precisions else factors)
            expected = expected * np.append(factors.reshape(-1), 1.0)[group]
        return bool(np.allclose(self.look(hyper)[0], expected, rtol=1e3 * self.eps))


def _without_scales(form: Bilinear) -> Bilinear:
    """The form without the scales of its factors."""
    potential: Any = form.potential
    return form._replace(potential=potential.observation)
