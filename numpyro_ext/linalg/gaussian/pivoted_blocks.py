"""Conditioning of many blocks whose covariance and precision may both be singular, with derivatives.

A block is normal with covariance :math:`C`, and rows give it the precision :math:`L` and the shift :math:`t`. Neither
is inverted: :math:`I + L C` is factorised with pivots.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

from ..short_axes import times_vector

# Derivatives of the two functions below are written out: those of a factorisation with pivots are long programs.


@jax.custom_jvp
def condition_blocks(covariance: Array, precision: Array, shift: Array) -> tuple[Array, Array, Array]:
    """For each block half the log determinant of ``I + L C``, ``a``, and the posterior covariance."""

    def one(block: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        prior, precision, shift = block
        factor, _, order = lax.linalg.lu(_one_plus(precision, prior))
        # (I + C L) x = C by the transposed factors
        white = solve_triangular(factor, prior, trans="T")
        white = solve_triangular(factor, white, trans="T", lower=True, unit_diagonal=True)
        posterior = jnp.zeros_like(prior).at[order].set(white)
        half_log = 0.5 * jnp.sum(jnp.log(jnp.abs(jnp.diagonal(factor))))
        return half_log, _solve(factor, order, shift), 0.5 * (posterior + posterior.T)

    return lax.map(one, (covariance, precision, shift))


@condition_blocks.defjvp
def _move(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    covariance, precision, _ = primals
    d_covariance, d_precision, d_shift = tangents
    found = condition_blocks(*primals)
    _, solved, posterior = found
    gain = gains_of_blocks(covariance, precision)
    half_log = 0.5 * jnp.sum(posterior * d_precision + gain * d_covariance, (-2, -1))
    moved = d_shift - times_vector(d_precision, times_vector(covariance, solved))
    # (I + L C)^-1 = I - G C, of which the matrix is made for the covariance alone, which not all derivatives have
    d_solved = moved - times_vector(gain, times_vector(covariance, moved) + times_vector(d_covariance, solved))
    inverse = jnp.eye(gain.shape[-1], dtype=gain.dtype) - gain @ covariance
    d_posterior = inverse.mT @ d_covariance @ inverse - posterior @ d_precision @ posterior
    return found, (half_log, d_solved, d_posterior)


@jax.custom_jvp
def gains_of_blocks(covariance: Array, precision: Array) -> Array:
    """``(I + L C)^-1 L`` of each block."""

    def one(block: tuple[Array, Array]) -> Array:
        prior, precision = block
        factor, _, order = lax.linalg.lu(_one_plus(precision, prior))
        gain = _solve(factor, order, precision)
        return 0.5 * (gain + gain.T)

    return lax.map(one, (covariance, precision))


@gains_of_blocks.defjvp
def _move_gains(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    covariance, precision = primals
    d_covariance, d_precision = tangents
    gain = gains_of_blocks(covariance, precision)
    inverse = jnp.eye(gain.shape[-1], dtype=gain.dtype) - gain @ covariance
    return gain, inverse @ d_precision @ inverse.mT - gain @ d_covariance @ gain


def _one_plus(precision: Array, prior: Array) -> Array:
    return jnp.eye(len(prior), dtype=prior.dtype) + precision @ prior


def _solve(factor: Array, order: Array, x: Array) -> Array:
    white = solve_triangular(factor, x[order], lower=True, unit_diagonal=True)
    return solve_triangular(factor, white)
