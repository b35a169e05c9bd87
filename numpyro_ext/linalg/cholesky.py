"""Cholesky factors and triangular solves, batched, with the conventions that the Gaussian algebra shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

__all__ = ["cholesky", "cholesky_solve", "half_log_determinant", "safe_sqrt", "solve_lower", "solve_upper"]


def cholesky(matrix: Array) -> Array:
    """Lower factor of a symmetric matrix of shape ``(..., n, n)``; all nan where it is not positive definite.

    The input is taken to be symmetric: averaging it with its transpose would cost as much as a small factorisation.
    """
    return jax.lax.linalg.cholesky(matrix, symmetrize_input=False)


def half_log_determinant(factor: Array) -> Array:
    """Half the log determinant of ``L L^T``, summed over leading axes of ``factor`` too."""
    return jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)))


def solve_lower(factor: Array, x: Array) -> Array:
    """``L^-1 x`` for ``x`` of shape ``(..., n, r)``."""
    return solve_triangular(factor, x, lower=True)


def solve_upper(factor: Array, x: Array) -> Array:
    """``L^-T x`` for ``x`` of shape ``(..., n, r)``."""
    return solve_triangular(factor, x, lower=True, trans="T")


def cholesky_solve(factor: Array, x: Array) -> Array:
    """``(L L^T)^-1 x`` for ``x`` of shape ``(..., n)``."""
    return solve_upper(factor, solve_lower(factor, x[..., None]))[..., 0]


def safe_sqrt(x: Array) -> Array:
    """Square root of the positive part, with derivative zero (not infinite) where ``x <= 0``; nan stays nan."""
    is_positive = x > 0
    root = jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, x, 1.0)), 0.0)
    return jnp.where(jnp.isnan(x), x, root)
