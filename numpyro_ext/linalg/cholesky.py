"""Cholesky factors and triangular solves, batched, with the conventions that the Gaussian algebra shares."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from .lanes import positive_solve_in_lanes, suits_lanes

LARGEST_DENSE = 2048
"""Unknowns up to which a matrix of all their pairs is made where nothing else will do, or once for an answer: 32 MiB
and a factorisation of a fraction of a second."""

# A batched library call splits its batch among the threads of the CPU and waits for them. Where it runs inside a
# compiled loop, these threads may all be waiting for each other (seen with JAX 0.10 on two cores), and nothing moves
# again. So no batch reaches the library: small matrices are factorised by arithmetic on whole batches, written out,
# which is also faster; larger ones one after the other.
_LARGEST_WRITTEN_OUT = 8

_LARGEST_BLOCK = 512
"""Largest size of triangular matrices that are inverted as a whole, zeros and all."""


def _is_batch(matrix: Array) -> bool:
    return matrix.ndim > 2 and matrix.size > matrix.shape[-1] * matrix.shape[-2]


def _is_small(matrix: Array) -> bool:
    return matrix.shape[-1] <= _LARGEST_WRITTEN_OUT


def _one_by_one(function: Callable[..., Array], *arrays: Array) -> Array:
    """``function`` of the matrices on the last two axes, for arrays that have the same leading axes."""
    leading = arrays[0].shape[:-2]
    flat = [array.reshape(-1, *array.shape[-2:]) for array in arrays]
    result: Array = jax.lax.map(lambda parts: function(*parts), tuple(flat))
    return result.reshape(*leading, *result.shape[-2:])


def cholesky(matrix: Array) -> Array:
    """Lower factor of a symmetric matrix of shape ``(..., n, n)``, with nan on the diagonal where it is not positive
    definite.

    The input is taken to be symmetric: averaging it with its transpose would cost as much as a small factorisation.
    """
    if not _is_batch(matrix):
        return jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
    if _is_small(matrix):
        return _cholesky_written_out(matrix)
    return _one_by_one(lambda one: jax.lax.linalg.cholesky(one, symmetrize_input=False), matrix)


def from_lower(matrix: Array) -> Array:
    """Symmetric matrix of shape ``(n, n)`` with the lower triangle of another one."""
    return jnp.tril(matrix) + jnp.tril(matrix, -1).T


@jax.custom_jvp
def cholesky_of_lower(matrix: Array) -> Array:
    """:func:`cholesky` of the symmetric matrix with this lower triangle, of shape ``(n, n)``; what stands above it may
    be anything. A copy across the diagonal would take as long as a factorisation of some thousand unknowns."""
    return cholesky(matrix)


@cholesky_of_lower.defjvp
def _cholesky_of_lower_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (matrix,), (change,) = primals, tangents
    return cholesky_of_lower(matrix), jax.jvp(cholesky, (from_lower(matrix),), (from_lower(change),))[1]


def half_log_determinant(factor: Array) -> Array:
    """Half the log determinant of ``L L^T``, summed over leading axes of ``factor`` too."""
    return jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)))


def solve_lower(factor: Array, x: Array) -> Array:
    """``L^-1 x`` for ``x`` of shape ``(..., n, r)``."""
    if not _is_batch(factor):
        return solve_triangular(factor, x, lower=True)
    if _is_small(factor):
        return _substitute(factor, x, range(factor.shape[-1]))
    return _one_by_one(lambda f, y: solve_triangular(f, y, lower=True), factor, x)


def solve_upper(factor: Array, x: Array) -> Array:
    """``L^-T x`` for ``x`` of shape ``(..., n, r)``."""
    if not _is_batch(factor):
        return solve_triangular(factor, x, lower=True, trans="T")
    if _is_small(factor):
        return _substitute(factor.swapaxes(-1, -2), x, range(factor.shape[-1] - 1, -1, -1))
    return _one_by_one(lambda f, y: solve_triangular(f, y, lower=True, trans="T"), factor, x)


def divide_by_upper(x: Array, factor: Array) -> Array:
    """``x L^-T`` of shape ``(r, n)`` for one factor: the transpose of :func:`solve_lower`, without any copies."""
    return jax.lax.linalg.triangular_solve(factor, x, left_side=False, lower=True, transpose_a=True)


def cholesky_solve(factor: Array, x: Array) -> Array:
    """``(L L^T)^-1 x`` for ``x`` of shape ``(..., n)``."""
    return solve_upper(factor, solve_lower(factor, x[..., None]))[..., 0]


def positive_solve(matrix: Array, x: Array) -> Array:
    """``A^-1 x`` for symmetric positive definite ``A`` of shape ``(..., n, n)`` and ``x`` of shape ``(..., n)``, where
    the factor is not wanted; nan where ``A`` is not positive definite."""
    if suits_lanes(matrix):
        return positive_solve_in_lanes(matrix, x)
    return cholesky_solve(cholesky(matrix), x)


def inverse_lower(factor: Array) -> Array:
    """``L^-1`` of shape ``(..., n, n)``."""
    return solve_lower(factor, jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape))


def inverse_lower_in_blocks(factor: Array, largest: int = _LARGEST_BLOCK) -> Array:
    """``L^-1`` of shape ``(n, n)`` by halves, which leaves out the zeros: half the work of :func:`inverse_lower`.

    :param int largest: size of blocks that are inverted as a whole.
    """
    size = factor.shape[0]
    if size <= largest:
        return inverse_lower(factor)
    half = size // 2
    first, last = (inverse_lower_in_blocks(f, largest) for f in (factor[:half, :half], factor[half:, half:]))
    below = -last @ (factor[half:, :half] @ first)
    return jnp.block([[first, jnp.zeros((half, size - half), factor.dtype)], [below, last]])


def gram_of_lower(root: Array) -> Array:
    """``L^T L`` of shape ``(n, n)`` for a lower triangular matrix, by halves, which leaves out most of the zeros."""
    size = root.shape[0]
    if size <= _LARGEST_BLOCK:
        return root.T @ root
    half = size // 2
    below, last = root[half:, :half], root[half:, half:]
    cross = last.T @ below
    first = gram_of_lower(root[:half, :half]) + below.T @ below
    return jnp.block([[first, cross.T], [cross, gram_of_lower(last)]])


def cholesky_inverse(factor: Array) -> Array:
    """``(L L^T)^-1`` of shape ``(..., n, n)``, symmetric by construction; where the matrix itself is wanted."""
    root = inverse_lower(factor)
    return root.swapaxes(-1, -2) @ root


def safe_sqrt(x: Array) -> Array:
    """Square root of the positive part, with derivative zero (not infinite) where ``x <= 0``; nan stays nan."""
    is_positive = x > 0
    root = jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, x, 1.0)), 0.0)
    return jnp.where(jnp.isnan(x), x, root)


def _cholesky_written_out(matrix: Array) -> Array:
    size = matrix.shape[-1]
    zero = jnp.zeros_like(matrix[..., 0, 0])
    factor: list[list[Array]] = [[zero] * size for _ in range(size)]
    for j in range(size):
        factor[j][j] = jnp.sqrt(matrix[..., j, j] - sum((factor[j][k] ** 2 for k in range(j)), zero))
        for i in range(j + 1, size):
            rest = matrix[..., i, j] - sum((factor[i][k] * factor[j][k] for k in range(j)), zero)
            factor[i][j] = rest / factor[j][j]
    return jnp.stack([jnp.stack(row, axis=-1) for row in factor], axis=-2)


def _substitute(triangle: Array, x: Array, order: range) -> Array:
    """Solve with triangular matrices ``(..., n, n)``; in ``order``, every unknown needs only those before it."""
    solved: dict[int, Array] = {}
    for i in order:
        rest = x[..., i, :] - sum((triangle[..., i, j, None] * solved[j] for j in solved), jnp.zeros_like(x[..., i, :]))
        solved[i] = rest / triangle[..., i, i, None]
    return jnp.stack([solved[i] for i in range(x.shape[-2])], axis=-2)
