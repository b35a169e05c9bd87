r"""Modes of the latent variables of rows: the baseline that ignores how uncertain they are.

Maximising :math:`\log p(y_n, z_n)` over both the latent variables and the parameters overfits (Khan 2012, section
2.2.1), which is what the variational Gaussian is there to avoid.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...linalg.cholesky import cholesky, cholesky_solve
from .posteriors import LatentGaussianRows, RowPosteriors, inverse_from_cholesky, map_chunks

__all__ = ["initial_modes", "mode_step"]

_SMALLEST_STEP = 1e-6
_SLACK = 16.0


def initial_modes(rows: LatentGaussianRows) -> RowPosteriors:
    """The prior mean as the mode of every row: Gaussians without variance."""
    size = rows.num_latents
    nothing = jnp.full((rows.num_rows,), -jnp.inf, rows.mean.dtype)
    point = jnp.zeros((1, size, size), rows.mean.dtype)
    mean = jnp.broadcast_to(rows.mean, (rows.num_rows, size))
    return RowPosteriors(mean, None, point, nothing, nothing, jnp.zeros((rows.num_rows,), int))


@partial(jax.jit, static_argnames=("num_steps", "chunk_size"))
def mode_step(
    rows: LatentGaussianRows,
    posteriors: RowPosteriors,
    *,
    num_steps: int = 20,
    tol: float = 1e-10,
    chunk_size: int = 4096,
) -> RowPosteriors:
    r"""Raise :math:`\log p(y_n, z_n)` of every row by Newton steps, halved in rows where it would fall.

    :param LatentGaussianRows rows: data and parameters.
    :param RowPosteriors posteriors: of :func:`initial_modes` or of this function.
    :param int num_steps: the largest number of steps.
    :param float tol: stop when no row rises by more than this times one plus its size.
    :param int chunk_size: how many rows are worked on together.
    :return: modes as means, covariances of zero, and as ``bound`` the log joint densities, which bound nothing.
    """

    def solve(rows: LatentGaussianRows, posteriors: RowPosteriors) -> tuple[Array, Array, Array]:
        return _climb(rows, posteriors.mean, num_steps, tol)

    mean, joint, start = map_chunks(solve, rows, posteriors, chunk_size)
    return posteriors._replace(mean=mean, bound=joint, start_bound=start)


def _climb(rows: LatentGaussianRows, start: Array, num_steps: int, tol: float) -> tuple[Array, Array, Array]:
    eps = jnp.finfo(start.dtype).eps
    factor = cholesky(rows.covariance)
    prior_precision = inverse_from_cholesky(factor)
    log_volume = jnp.sum(jnp.log(jnp.diagonal(factor))) + 0.5 * rows.num_latents * jnp.log(2.0 * jnp.pi)

    def evaluate(mean: Array) -> tuple[Array, Array]:
        """Log joint densities and Newton's directions."""
        pull = (rows.mean - mean) @ prior_precision
        joint, slope = 0.5 * jnp.sum(pull * (mean - rows.mean), axis=-1) - log_volume, pull
        precision = jnp.broadcast_to(prior_precision, (len(mean), *prior_precision.shape))
        for family in rows.families():
            found = family.expect(mean, None)
            joint = joint + jnp.sum(found.value, axis=-1)
            slope = slope + found.mean_slope.reshape(len(mean), -1) @ family.loadings.reshape(-1, rows.num_latents)
            curvature = found.precision.reshape(len(mean), -1) @ family.products()
            precision = precision + curvature.reshape(precision.shape)
        return joint, cholesky_solve(cholesky(precision), slope)

    def proceed(state: tuple[Any, ...]) -> Array:
        *_, is_done, count = state
        return (count < num_steps) & ~jnp.all(is_done)

    def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
        mean, joint, direction, size, is_done, count = state
        moved = mean + size[:, None] * direction
        trial, next_direction = evaluate(moved)
        scale = 1.0 + jnp.abs(joint)
        accepted = (trial >= joint - _SLACK * eps * scale) & ~is_done
        is_small = accepted & (jnp.abs(trial - joint) <= jnp.maximum(tol, _SLACK * eps) * scale)
        is_done = is_done | is_small | (~accepted & (size < _SMALLEST_STEP))
        mean = jnp.where(accepted[:, None], moved, mean)
        direction = jnp.where(accepted[:, None], next_direction, direction)
        size = jnp.where(accepted, jnp.minimum(1.0, 2.0 * size), 0.5 * size)
        return mean, jnp.where(accepted, trial, joint), direction, size, is_done, count + 1

    first, direction = evaluate(start)
    ones = jnp.ones_like(first)
    state = (start, first, direction, ones, jnp.zeros_like(first, bool), 0)
    mean, joint, *_ = lax.while_loop(proceed, advance, state)
    return mean, joint, first
