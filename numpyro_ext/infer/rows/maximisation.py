r"""The M-step of variational EM for rows: new parameters at given Gaussians (Khan 2012, sections 3.2 and 4.5)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...potentials import GaussianPotential, Potential, VectorPotential
from .posteriors import Family, LatentGaussianRows, RowPosteriors, map_chunks

Parameter = Literal["mean", "covariance", "loadings", "intercept", "noise"]

_NUM_HALVINGS = 30


class ColumnStatistics(NamedTuple):
    """Weighted sums over rows for ``C`` columns of ``K`` predictors each."""

    gram: Array
    """Sum of precisions times second moments of latent variables and one, shape ``(C, K, K, L + 1, L + 1)``."""
    gradient: Array
    """Slopes of the expected log factors in loadings and intercept, shape ``(C, K, L + 1)``."""
    value: Array
    """Sum of expected log factors, shape ``(C,)``."""


@partial(jax.jit, static_argnames=("learn", "chunk_size"))
def maximisation_step(
    rows: LatentGaussianRows,
    posteriors: RowPosteriors,
    *,
    learn: tuple[Parameter, ...],
    loading_scale: float | None = None,
    chunk_size: int = 4096,
) -> LatentGaussianRows:
    r"""New parameters, for which the bound at the given Gaussians is no lower.

    Mean and covariance are the weighted moments of the Gaussians (Khan 2012, section 3.2). Loadings and intercept of a
    column solve one least-squares problem: with :math:`\bar z = (z, 1)`, slopes :math:`g_n` and
    :math:`\Lambda_n = -2 G_n` of the expected log factors,

    .. math:: \sum_n \Lambda_n [W, w_0]\, E[\bar z_n \bar z_n^T]
        = \sum_n (g_n + \Lambda_n \bar\eta_n)\, E[\bar z_n]^T.

    That is the maximum for Gaussian columns and quadratic bounds (Böhning, Jaakkola) at the local parameters of now.
    For any other expectation it is a step of Newton's kind, halved in the columns whose bound would fall. The noise of
    real columns is the root of the expected squared residual at the new loadings.

    Cost: ``N D L^2``, and one evaluation or more of all expectations.

    :param LatentGaussianRows rows: data and parameters.
    :param RowPosteriors posteriors: Gaussians of the rows.
    :param learn: the parameters to change; the covariance is not sparse here.
    :param float loading_scale: prior standard deviation of the loadings; ``None`` for a flat prior.
    :param int chunk_size: how many rows are worked on together.
    """
    total = jnp.sum(rows.weights)
    mean, covariance = rows.mean, rows.covariance
    if "mean" in learn:
        mean = rows.weights @ posteriors.mean / total
    if "covariance" in learn:
        covariance = scatter(rows._replace(mean=mean), posteriors)
    potentials = rows.potentials
    if "loadings" in learn or "intercept" in learn:
        rows = _raise_columns(rows, posteriors, learn, loading_scale, chunk_size)
    if "noise" in learn:
        sums = map_chunks(residual_sums, rows, posteriors, chunk_size, is_sum=True)
        potentials = tuple(map(with_noise, rows.potentials, sums))
    return rows._replace(mean=mean, covariance=covariance, potentials=potentials)


def _raise_columns(
    rows: LatentGaussianRows,
    posteriors: RowPosteriors,
    learn: tuple[Parameter, ...],
    loading_scale: float | None,
    chunk_size: int,
) -> LatentGaussianRows:
    """Loadings and intercepts after one step, of which each column takes the whole or a part."""
    statistics = map_chunks(column_statistics, rows, posteriors, chunk_size, is_sum=True)
    statistics = [
        with_loading_prior(part, family, loading_scale)
        for part, family in zip(statistics, rows.families(), strict=True)
    ]
    moves = newton_moves(statistics, learn)
    before = [part.value for part in statistics]
    eps = jnp.finfo(rows.mean.dtype).eps

    def refused(parts: list[Array]) -> list[Array]:
        new_rows = with_moved_columns(rows, moves, parts)
        values = map_chunks(_column_values, new_rows, posteriors, chunk_size, is_sum=True)
        after = [
            value - loading_penalty(family, loading_scale)
            for value, family in zip(values, new_rows.families(), strict=True)
        ]
        # Not "less": a value that is not a number is refused too.
        return [
            ~(new >= old - 16.0 * eps * jnp.abs(old)) & (part > 0.0)
            for new, old, part in zip(after, before, parts, strict=True)
        ]

    def proceed(state: tuple[list[Array], list[Array], Array]) -> Array:
        return jnp.any(jnp.stack([jnp.any(is_refused) for is_refused in state[1]]))

    def halve(state: tuple[list[Array], list[Array], Array]) -> tuple[list[Array], list[Array], Array]:
        parts, are_refused, count = state
        smaller = jnp.where(count < _NUM_HALVINGS, 0.5, 0.0)
        parts = [jnp.where(bad, smaller * part, part) for part, bad in zip(parts, are_refused, strict=True)]
        return parts, refused(parts), count + 1

    whole = [jnp.ones(value.shape, value.dtype) for value in before]
    parts, *_ = lax.while_loop(proceed, halve, (whole, refused(whole), jnp.asarray(0)))
    return with_moved_columns(rows, moves, parts)


def newton_moves(statistics: list[ColumnStatistics], learn: tuple[Parameter, ...]) -> list[Array]:
    """Change of loadings and intercept that solves the least-squares problem of each family, ``(C, K, L + 1)``."""
    moves = []
    for gram, gradient, _ in statistics:
        columns, width, extended = gradient.shape
        size = extended - 1
        free = np.r_[0 : size if "loadings" in learn else 0, size : size + ("intercept" in learn)]
        rank = width * len(free)
        matrix = gram[..., free[:, None], free].swapaxes(2, 3).reshape(columns, rank, rank)
        step = _flat_solve(matrix, gradient[..., free].reshape(columns, rank))
        moves.append(jnp.zeros_like(gradient).at[..., free].set(step.reshape(columns, width, len(free))))
    return moves


def with_moved_columns(
    rows: LatentGaussianRows, moves: list[Array], parts: list[Array] | None = None
) -> LatentGaussianRows:
    """Add moves to loadings and intercepts, or the given part of each column's move."""
    if parts is not None:
        moves = [part[:, None, None] * move for part, move in zip(parts, moves, strict=True)]
    change = jnp.concatenate([move.reshape(-1, rows.num_latents + 1) for move in moves])
    return rows._replace(loadings=rows.loadings + change[:, :-1], intercept=rows.intercept + change[:, -1])


def loading_penalty(family: Family, loading_scale: float | None) -> Array:
    """Half the squared loadings of each column over the variance of their prior, shape ``(C,)``."""
    square = jnp.sum(jnp.square(family.loadings), axis=(1, 2))
    return jnp.zeros_like(square) if loading_scale is None else 0.5 * square / loading_scale**2


def with_loading_prior(
    statistics: ColumnStatistics, family: Family, loading_scale: float | None, share: Array | float = 1.0
) -> ColumnStatistics:
    """Add ``share`` of the Gaussian prior of the loadings to the sums over rows."""
    if loading_scale is None:
        return statistics
    weight = share / loading_scale**2
    width, size = family.loadings.shape[1:]
    diagonal = weight * jnp.einsum("kj,lm->kjlm", jnp.eye(width), jnp.pad(jnp.eye(size), ((0, 1), (0, 1))))
    pull = weight * jnp.pad(family.loadings, ((0, 0), (0, 0), (0, 1)))
    penalty = share * loading_penalty(family, loading_scale)
    gram, gradient, value = statistics
    return ColumnStatistics(gram + diagonal.astype(gram.dtype), gradient - pull, value - penalty)


def column_statistics(rows: LatentGaussianRows, posteriors: RowPosteriors) -> list[ColumnStatistics]:
    """The sums over rows for each family."""
    size = rows.num_latents
    mean, weights = posteriors.mean, rows.weights
    extended = jnp.pad(mean, ((0, 0), (0, 1)), constant_values=1.0)
    second = (extended[:, :, None] * extended[:, None, :]).reshape(-1, (size + 1) ** 2)
    result = []
    for family in rows.families():
        found = family.expect(mean, posteriors.covariances())
        columns, width = found.mean_slope.shape[1:]
        precision = (weights[:, None, None, None] * found.precision).reshape(-1, columns * width**2)
        shape = (columns, width, width)
        spread = posteriors.sum_over_sharing(precision).T @ posteriors.covariance.reshape(-1, size**2)
        spread = spread.reshape(*shape, size, size)
        located = (precision.T @ second).reshape(*shape, size + 1, size + 1)
        slope = (weights[:, None, None] * found.mean_slope).reshape(-1, columns * width)
        gradient = (slope.T @ extended).reshape(columns, width, size + 1)
        spread = jnp.pad(spread, [(0, 0)] * 3 + [(0, 1)] * 2)
        pulled = jnp.einsum("ckjlm,cjl->ckm", spread[..., :size, :], family.loadings)
        result.append(ColumnStatistics(located + spread, gradient - pulled, weights @ found.value))
    return result


def _column_values(rows: LatentGaussianRows, posteriors: RowPosteriors) -> list[Array]:
    return [rows.weights @ family.expect(posteriors.mean, posteriors.covariances()).value for family in rows.families()]


def _flat_solve(matrix: Array, vector: Array) -> Array:
    """An ascent direction: Newton's, with zero where there is no curvature and the curvature made positive."""
    # One matrix at a time: see the note on batches in linalg/cholesky.py.
    values, vectors = lax.map(jnp.linalg.eigh, matrix)
    size = jnp.abs(values)
    floor = matrix.shape[-1] * jnp.finfo(matrix.dtype).eps * jnp.max(size, axis=-1, keepdims=True)
    is_used = size > floor
    inverse = jnp.where(is_used, 1.0 / jnp.where(is_used, size, 1.0), 0.0)
    return jnp.einsum("cij,cj,ckj,ck->ci", vectors, inverse, vectors, vector)


def scatter(rows: LatentGaussianRows, posteriors: RowPosteriors) -> Array:
    """The covariance that maximises the bound, shape ``(L, L)``."""
    share = rows.weights / jnp.sum(rows.weights)
    centered = posteriors.mean - rows.mean
    scatter = jnp.tensordot(posteriors.sum_over_sharing(share), posteriors.covariance, axes=1)
    scatter += (share[:, None] * centered).T @ centered
    return 0.5 * (scatter + scatter.T)


def with_noise(potential: Potential | VectorPotential, sums: tuple[Array, Array]) -> Potential | VectorPotential:
    """The potential with the noise that maximises the bound, from the sums of :func:`residual_sums`."""
    if not isinstance(potential, GaussianPotential):
        return potential
    square, count = map(jnp.sum, sums) if jnp.ndim(potential.scale) == 0 else sums
    # A column without observations keeps its noise.
    root = jnp.sqrt(square / jnp.where(count > 0, count, 1.0))
    return dataclasses.replace(potential, scale=jnp.where(count > 0, root, potential.scale))


def residual_sums(rows: LatentGaussianRows, posteriors: RowPosteriors) -> list[tuple[Array, Array]]:
    """Weighted sums over rows of expected squared residuals and of ones, shape ``(C,)``; zero for what is not real."""

    def of_family(family: Family) -> tuple[Array, Array]:
        weight = rows.weights[:, None] * family.observed
        if isinstance(family.potential, VectorPotential) or not isinstance(family.potential, GaussianPotential):
            return jnp.zeros_like(weight[0]), jnp.zeros_like(weight[0])
        covariance = posteriors.covariances()
        covariance = posteriors.covariance if covariance is None else covariance
        mean = family.means(posteriors.mean)[..., 0]
        residual = jnp.where(family.observed, family.potential.observation - mean, 0.0)
        square = jnp.square(residual) + family.covariances(covariance)[..., 0, 0]
        return jnp.sum(weight * square, axis=0), jnp.sum(weight, axis=0)

    return [of_family(family) for family in rows.families()]
