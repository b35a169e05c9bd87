"""Blocks that share their columns, a part of all of them at a time: their outcomes, and their posteriors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .....linalg.gaussian.prior import CovariancePrior
from .....structure import LatentGaussianReading
from .....structure.latent_gaussian import LatentGaussian, MoreBlocks
from .column_factors import has_rows, parameters_of, slopes_of, starts_of_families
from .shared_columns import SharedColumns, variance_of

_ENOUGH = 1e-9
"""Change of the log evidence of a block, with half the nodes, at which a finer rule has nothing to tell."""


class PartColumns(NamedTuple):
    """Common properties of the blocks of a part, and their outcomes."""

    common: Array
    """Slopes, offsets and other parameters of the columns of the first block; of several unknowns their variances."""
    spread: Array
    """Largest relative difference of columns between the blocks."""
    has_gaps: Array
    """True if observations are masked."""
    log_constant: Array
    """Terms of the log density that do not depend on the unknowns."""
    blocks: MoreBlocks


class PartScores(NamedTuple):
    """Posteriors of the blocks of a part at given hyperparameters."""

    log_evidence: Array
    """Log evidence of each block, shape ``(B,)``."""
    error: Array
    """Error that the sum over nodes of each may have, shape ``(B,)``."""
    moments: dict[str, tuple[Array, Array]]
    """Means and variances of affine sites, flat."""
    columns: PartColumns


def _columns(algorithm: SharedColumns, form: LatentGaussian) -> PartColumns:
    rows, columns = form.blocks
    starts = starts_of_families(form)
    slopes, offsets = slopes_of(form.design, rows, columns, jnp), form.offset[rows]
    if algorithm.has_shift:
        offsets = offsets - _locations(slopes, offsets)[:, None] * slopes[:1, :, 0]
    parts = [slopes, offsets]
    for number, (potential, family) in enumerate(zip(form.potentials, algorithm.families, strict=True)):
        own = rows[:, family.first : family.first + family.number] - starts[number]
        parts += [value[own] for value in parameters_of(potential).values() if has_rows(potential, value)]
    if columns.shape[1] > 1:
        parts.append(_variances(form))  # which is one for all
    common = jnp.concatenate([part[0].ravel() for part in parts])
    spread = jnp.stack([_spread(part) for part in parts]).max()
    observed = [form.observed[k] for k in range(len(algorithm.families))]
    has_gaps = ~jnp.all(jnp.stack([jnp.all(mask) for mask in observed]))
    blocks = algorithm.blocks(form)
    labels = tuple(label.astype(jnp.int8) for label in blocks.labels)
    return PartColumns(common, spread, has_gaps, form.log_constant, MoreBlocks(labels, blocks.counted))


def _locations(slopes: Array, offsets: Array) -> Array:
    """Locations of the unknown of each block at which no predictors are nearer to zero, shape ``(B,)``."""
    slope = slopes[0, :, 0]
    square = jnp.sum(slope**2)
    return offsets @ slope / jnp.where(square > 0.0, square, 1.0)


def _variances(form: LatentGaussian) -> Array:
    """Prior variances of the unknowns of each block, shape ``(B, D)``, or covariances, one or more of them."""
    if isinstance(form.prior[0], CovariancePrior):
        return form.prior[0].covariance.reshape(len(form.prior[0].covariance), -1)
    return jnp.concatenate([variance_of(block) for block in form.prior])[form.blocks.columns]


def _spread(values: Array) -> Array:
    first = values[0]
    scale = 1.0 + jnp.max(jnp.where(jnp.isfinite(first), jnp.abs(first), 0.0), initial=0.0)
    # thresholds may be infinite, and anything else that is not finite is no less than a difference
    away = jnp.where(values == first, 0.0, jnp.abs(values - first) / scale)
    return jnp.max(jnp.where(jnp.isnan(away), jnp.inf, away), initial=0.0)


def columns_of_parts(
    reading: LatentGaussianReading, algorithm: SharedColumns
) -> Callable[[Sequence[Any], dict[str, Array]], PartColumns]:
    """The compiled function from data of a part and hyperparameters to what its blocks have in common."""
    return jax.jit(lambda data, hyper: _columns(algorithm, reading.form(hyper, data)))


def priors_of_parts(reading: LatentGaussianReading) -> Callable[[Sequence[Any], dict[str, Array]], Array]:
    """The compiled function from data of a part and several hyperparameters to the location and the variance of the
    unknown of each of its blocks, shape ``(2, h, B)``. Locations have a part that is common to all blocks."""

    def compute(data: Sequence[Any], hypers: dict[str, Array]) -> Array:
        def of(hyper: dict[str, Array]) -> Array:
            form = reading.form(hyper, data)
            rows, columns = form.blocks
            slopes = slopes_of(form.design, rows[:1], columns[:1], jnp)
            return jnp.stack([_locations(slopes, form.offset[rows]), _variances(form)[:, 0]])

        return jnp.swapaxes(lax.map(of, hypers), 0, 1)

    return jax.jit(compute)


def scores_of_parts(
    reading: LatentGaussianReading, algorithm: SharedColumns
) -> Callable[[Sequence[Any], dict[str, Array]], PartScores]:
    """The compiled function from data of a part and hyperparameters to the posteriors of its blocks."""

    def compute(data: Sequence[Any], hyper: dict[str, Array]) -> PartScores:
        form = reading.form(hyper, data)
        grid = algorithm.init(form)
        posterior = algorithm.posterior(form, grid)
        log_step = grid.log_step(algorithm.num_nodes)
        found = jax.nn.logsumexp(posterior.log_density, axis=0) + log_step

        def finer() -> Array:
            coarse, fine = algorithm.with_finer_rule(form, grid)
            return jnp.abs(fine - coarse)

        if posterior.nodes.center.shape[1] == 1:
            half = jax.nn.logsumexp(posterior.log_density[::2], axis=0) + log_step + math.log(2.0)
            change = jnp.abs(found - half)
            error = lax.cond(jnp.all(change <= _ENOUGH), lambda: change, finer)
        else:
            error = finer()
        moments = posterior.moments(reading.maps(hyper, data))
        return PartScores(found, error, moments, _columns(algorithm, form))

    return jax.jit(compute)
