r"""Rows whose Gaussians have the same covariance: one factorisation serves them all.

Where the slopes of the expected log factors in the variances are constants (Böhning's bound, Gaussian columns), the
best precision :math:`\Sigma^{-1} + \sum_d W_d^T \Lambda_d W_d` does not depend on the data of a row, only on which of
its cells are observed (Khan 2012, section 4.5). Only the means are iterated.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...linalg.cholesky import cholesky
from ...potentials import (
    BohningBound,
    BoundedPotential,
    GaussianPotential,
    Potential,
    SoftmaxPotential,
    VectorPotential,
)
from .posteriors import LatentGaussianRows, RowPosteriors, inverse_from_cholesky, map_chunks, prior_divergence

__all__ = ["shared_expectation_step", "shared_posteriors"]

# Sharing pays where there are at least so many rows for one covariance.
_LEAST_ROWS = 2.0


def shared_posteriors(rows: LatentGaussianRows) -> RowPosteriors | None:
    """The Gaussians with the best covariance at the prior mean, one covariance for each pattern of observed cells.

    :param LatentGaussianRows rows: data and parameters; concrete arrays.
    :return: where to start :func:`shared_expectation_step`, or ``None`` where covariances depend on the point or
        nearly every row has a pattern of its own.

    >>> from numpyro_ext.potentials import LogitPotential
    >>> table = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 1]])
    >>> rows = LatentGaussianRows(
    ...     mean=jnp.zeros(1), covariance=jnp.eye(1), loadings=jnp.ones((3, 1)), intercept=jnp.zeros(3),
    ...     potentials=(BoundedPotential(LogitPotential(table), BohningBound()),),
    ...     observed=(jnp.ones((4, 3), bool).at[0, 2].set(False),), weights=jnp.ones(4))
    >>> print(shared_posteriors(rows).covariance.round(4).ravel(), shared_posteriors(rows).pattern)
    [0.6667 0.5714] [0 1 1 1]
    """
    if not all(map(_has_constant_curvature, rows.potentials)):
        return None
    _, first, pattern = np.unique(_keys(rows), axis=0, return_index=True, return_inverse=True)
    if len(first) * _LEAST_ROWS > rows.num_rows:
        return None
    mean = jnp.broadcast_to(rows.mean, (rows.num_rows, rows.num_latents))
    nothing = jnp.full((rows.num_rows,), -jnp.inf, rows.mean.dtype)
    precision = _precisions(rows, jnp.asarray(first))
    covariance = inverse_from_cholesky(cholesky(precision))
    return RowPosteriors(mean, precision, covariance, nothing, nothing, jnp.asarray(pattern.reshape(-1)))


@partial(jax.jit, static_argnames=("num_steps", "chunk_size"))
def shared_expectation_step(
    rows: LatentGaussianRows,
    posteriors: RowPosteriors,
    *,
    num_steps: int = 20,
    tol: float = 1e-10,
    chunk_size: int = 4096,
) -> RowPosteriors:
    """What :func:`~numpyro_ext.infer.rows.posteriors.expectation_step` does, for Gaussians with shared covariances.

    The covariances are at their best at once, and the means climb by steps that never lower the bound, being maxima of
    quadratic ones.

    Cost: ``U (L^3 + D L^2)`` for ``U`` patterns of observed cells, and ``N (L^2 + D L)`` and the expectations for a
    step. Memory beyond data and means: ``U L^2``, and what one chunk needs.

    :param LatentGaussianRows rows: data and parameters.
    :param RowPosteriors posteriors: of :func:`shared_posteriors` for the same observed cells, or of this function.
    :param int num_steps: the largest number of steps.
    :param float tol: stop when no bound of a row rises by more than this times one plus its size.
    :param int chunk_size: how many rows are worked on together.
    """
    assert posteriors.pattern is not None
    count = len(posteriors.covariance)
    first = jax.ops.segment_min(jnp.arange(rows.num_rows), posteriors.pattern, num_segments=count)
    precision = _precisions(rows, first)
    new = posteriors._replace(precision=precision, covariance=inverse_from_cholesky(cholesky(precision)))

    def solve(rows: LatentGaussianRows, posteriors: RowPosteriors) -> tuple[Array, Array, Array]:
        start = _bound_and_slope(rows, posteriors)(posteriors.mean)[0]
        # The new covariances are of all chunks, the means of this one.
        moved = posteriors._replace(precision=new.precision, covariance=new.covariance)
        return *_climb(rows, moved, num_steps, tol), start

    mean, bound, start = map_chunks(solve, rows, posteriors, chunk_size)
    return new._replace(mean=mean, bound=bound, start_bound=start)


def _climb(rows: LatentGaussianRows, start: RowPosteriors, num_steps: int, tol: float) -> tuple[Array, Array]:
    """Means and bounds of the rows."""
    evaluate = _bound_and_slope(rows, start)
    covariances = start.covariances()
    assert covariances is not None  # these are no points
    smallest = 16.0 * jnp.finfo(rows.mean.dtype).eps

    def proceed(state: tuple[Any, ...]) -> Array:
        *_, gain, count = state
        return (count < num_steps) & jnp.any(gain > jnp.maximum(tol, smallest))

    def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
        mean, bound, slope, _, count = state
        mean = mean + jnp.einsum(
            "nlm,nm->nl", jnp.broadcast_to(covariances, (len(mean), *covariances.shape[1:])), slope
        )
        new, slope = evaluate(mean)
        return mean, new, slope, (new - bound) / (1.0 + jnp.abs(new)), count + 1

    first = evaluate(start.mean)
    mean, bound, *_ = lax.while_loop(proceed, advance, (start.mean, *first, jnp.full_like(first[0], jnp.inf), 0))
    return mean, bound


def _bound_and_slope(rows: LatentGaussianRows, posteriors: RowPosteriors) -> Any:
    """A function from means ``(n, L)`` to bounds and their slopes; what depends on covariances only is done before."""
    prior_factor = cholesky(rows.covariance)
    prior_precision = inverse_from_cholesky(prior_factor)
    origin = jnp.broadcast_to(rows.mean, (len(posteriors.covariance), rows.num_latents))
    assert posteriors.precision is not None  # these are no points
    factor = cholesky(posteriors.precision)
    spread = prior_divergence(rows.mean, prior_factor, origin, posteriors.covariance, factor)[posteriors.pattern]
    families = rows.families()
    # Of the predictors, for one pattern each.
    moments = [family.moments(origin, posteriors.covariance)[1][posteriors.pattern] for family in families]

    def evaluate(mean: Array) -> tuple[Array, Array]:
        pull = (rows.mean - mean) @ prior_precision
        bound, slope = 0.5 * jnp.sum(pull * (mean - rows.mean), axis=-1) - spread, pull
        for family, covariances in zip(families, moments, strict=True):
            found = family.expect_at(family.means(mean), covariances)
            bound = bound + jnp.sum(found.value, axis=-1)
            slope = slope + found.mean_slope.reshape(len(mean), -1) @ family.loadings.reshape(-1, rows.num_latents)
        return bound, slope

    return evaluate


def _precisions(rows: LatentGaussianRows, chosen: Array) -> Array:
    """The best precisions of some rows, shape ``(len(chosen), L, L)``."""
    size = rows.num_latents
    total = jnp.broadcast_to(inverse_from_cholesky(cholesky(rows.covariance)), (len(chosen), size, size))
    part = rows.take(chosen)
    mean = jnp.broadcast_to(rows.mean, (len(chosen), size))
    nothing = jnp.zeros((len(chosen), size, size), total.dtype)
    for family in part.families():
        # Their slopes in the variances are the same everywhere.
        sites = family.expect(mean, nothing).precision.reshape(len(chosen), -1) @ family.products()
        total = total + sites.reshape(total.shape)
    return total


def _has_constant_curvature(potential: Potential | VectorPotential) -> bool:
    if isinstance(potential, VectorPotential):
        return isinstance(potential, SoftmaxPotential) and potential.bound == "bohning"
    if isinstance(potential, BoundedPotential):
        return isinstance(potential.bound, BohningBound)
    return isinstance(potential, GaussianPotential)


def _keys(rows: LatentGaussianRows) -> np.ndarray:
    """Bytes ``(N, size)`` that are equal for rows with the same covariance."""
    parts = [np.packbits(np.asarray(mask), axis=1) for mask in rows.observed]
    mean = jnp.broadcast_to(rows.mean, (rows.num_rows, rows.num_latents))
    for family in rows.families():
        found = family.expect(mean, jnp.zeros((1, rows.num_latents, rows.num_latents), mean.dtype))
        curvature = np.asarray(found.precision).reshape(rows.num_rows, family.observed.shape[1], -1)
        common = np.max(curvature, axis=0, where=np.asarray(family.observed)[..., None], initial=-np.inf)
        if np.any(np.where(family.observed[..., None], curvature != common, False)):
            flat = np.ascontiguousarray(curvature.reshape(rows.num_rows, -1))
            parts.append(flat.view(np.uint8).reshape(rows.num_rows, -1))
    return np.concatenate(parts, axis=1)
