"""Draws of a Gaussian posterior with the elements of half lines moved onto them, rank by rank.

Moments are matched: the density of such an element, cavity times prior, is a normal one cut at the bound that has the
mean and variance of its marginal. Each such element of a draw of the Gaussian is replaced by the quantile of the cut
normal at its own probability. The joint draw keeps its Gaussian copula, and moments of single elements are exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ....potentials.families.half_line import HalfLinePotential
from ....potentials.integrals.truncated_by_moments import TruncatedByMoments, truncated_by_moments
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian.form import LatentGaussian
from .posterior import GaussianPosterior

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class HalfLines(NamedTuple):
    """Unknowns that lie on half lines, with their marginals."""

    columns: tuple[slice, ...]
    marginals: tuple[TruncatedByMoments, ...]
    mean: tuple[Array, ...]
    deviation: tuple[Array, ...]

    def move(self, e: Array) -> Array:
        """The unknowns with these elements on their half lines, shape ``(..., num_columns)`` as before."""
        for columns, marginal, mean, deviation in zip(*self, strict=True):
            e = e.at[..., columns].set(marginal.from_normal((e[..., columns] - mean) / deviation))
        return e

    def log_ratio(self, e: Array, moved: Array) -> Array:
        """Log density of the moved unknowns among those that are moved, over that of the unknowns among draws of the
        Gaussian."""
        total = jnp.zeros(e.shape[:-1], e.dtype)
        for columns, marginal, mean, deviation in zip(*self, strict=True):
            z = (e[..., columns] - mean) / deviation
            before = -0.5 * z * z - _HALF_LOG_2PI - jnp.log(deviation)
            total = total + jnp.sum(marginal.log_density(moved[..., columns]) - before, axis=-1)
        return total


def half_lines(reading: LatentGaussianReading, form: LatentGaussian, posterior: GaussianPosterior) -> HalfLines | None:
    """The elements of the field that lie on half lines; ``None`` where there are none.

    :param LatentGaussianReading reading: of the model.
    :param LatentGaussian form: at some hyperparameters.
    :param GaussianPosterior posterior: of the form.
    """
    columns = reading.half_lines
    if not columns:
        return None
    moments = zip(*(form.split_rows(part) for part in posterior.predictor_moments()), strict=True)
    rows = dict(zip(reading.factor_names, zip(form.potentials, moments, strict=True), strict=True))
    marginals, means, deviations = [], [], []
    for name in columns:
        prior, (mean, variance) = rows[name]
        assert isinstance(prior, HalfLinePotential)  # by its family
        marginals.append(truncated_by_moments(mean, variance, prior.lower))
        means.append(mean)
        deviations.append(jnp.sqrt(variance))
    return HalfLines(tuple(columns.values()), tuple(marginals), tuple(means), tuple(deviations))
