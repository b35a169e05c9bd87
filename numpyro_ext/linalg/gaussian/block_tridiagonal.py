r"""Symmetric matrices whose blocks couple only to the next ones: Cholesky factors, solves, elements of the inverse.

The matrix of blocks of width :math:`b` has :math:`D_k` on its diagonal and :math:`E_k` below it, from block :math:`k`
to block :math:`k + 1`. Its Cholesky factor has the same shape, with blocks :math:`L_k` and :math:`C_k`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..cholesky import cholesky, half_log_determinant, solve_lower, solve_upper
from .row_pairs import add_pairs


class BlockTridiagonal(NamedTuple):
    """A symmetric matrix of ``K`` blocks of width ``b``."""

    diagonal: Array
    """:math:`D_k`, shape ``(K, b, b)``."""
    below: Array
    """:math:`E_k` under block ``k``, shape ``(K, b, b)``; the last one is not used."""

    @classmethod
    def from_rows(cls, columns: Array, values: Array, weight: Array, num_blocks: int, width: int) -> BlockTridiagonal:
        """The sum of weighted squares of sparse rows, each of which lies in two neighbouring blocks at most."""

        def add(total: Array, i: Array, j: Array, terms: Array) -> Array:
            return total.at[i // width - j // width, j // width, i % width, j % width].add(terms)

        start = jnp.zeros((2, num_blocks, width, width), values.dtype)
        diagonal, below = add_pairs(columns, values, weight, add, start)
        return cls(diagonal + jnp.tril(diagonal, -1).mT, below)

    def entries(self, i: Array, j: Array) -> Array:
        """The elements at broadcast indices, which lie in neighbouring blocks at most."""
        width = self.diagonal.shape[-1]
        first, last = jnp.maximum(i, j), jnp.minimum(i, j)
        row, column = first % width, last % width
        is_same = first // width == last // width
        inside = self.diagonal[last // width, row, column]
        return jnp.where(is_same, inside, self.below[last // width, row, column])

    def factorise(self) -> BlockTridiagonalFactor:
        """The Cholesky factor, with nan in it where the matrix is not positive definite; ``O(K b^3)``."""

        def factorise_block(link: Array, block: BlockTridiagonal) -> tuple[Array, tuple[Array, Array]]:
            diagonal, below = block
            factor = cholesky(diagonal - link @ link.T)
            return solve_lower(factor, below.T).T, (factor, link)

        nothing = jnp.zeros_like(self.below[0])
        return BlockTridiagonalFactor(*lax.scan(factorise_block, nothing, self)[1])


class BlockTridiagonalFactor(NamedTuple):
    """The lower Cholesky factor of a :class:`BlockTridiagonal`."""

    diagonal: Array
    """:math:`L_k`, shape ``(K, b, b)``."""
    left: Array
    """:math:`C_k` to the left of block ``k``, shape ``(K, b, b)``; the first one is zero."""

    def half_log_determinant(self) -> Array:
        """Half the log determinant of the matrix."""
        return half_log_determinant(self.diagonal)

    def solve_lower(self, x: Array) -> Array:
        """``L^-1 x`` for ``x`` of shape ``(K, b, r)``."""

        def solve_block(before: Array, block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            factor, left, x = block
            solved = solve_lower(factor, x - left @ before)
            return solved, solved

        return lax.scan(solve_block, jnp.zeros_like(x[0]), (self.diagonal, self.left, x))[1]

    def solve_upper(self, x: Array) -> Array:
        """``L^-T x`` for ``x`` of shape ``(K, b, r)``."""

        def solve_block(after: Array, block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            factor, left, x = block
            solved = solve_upper(factor, x - after)
            return left.T @ solved, solved

        return lax.scan(solve_block, jnp.zeros_like(x[0]), (self.diagonal, self.left, x), reverse=True)[1]

    def selected_inverse(self) -> BlockTridiagonal:
        r"""The elements of the inverse within the blocks of the matrix; ``O(K b^3)``.

        From the last block to the first (Takahashi, Fagan and Chin 1973), with :math:`M = C_{k+1} L_k^{-1}`:
        :math:`S_{k+1,k} = -S_{k+1,k+1} M` and :math:`S_{kk} = L_k^{-T} L_k^{-1} - M^T S_{k+1,k}`.
        """
        identity = jnp.eye(self.diagonal.shape[-1], dtype=self.diagonal.dtype)

        def invert_block(after: tuple[Array, Array], block: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
            covariance, left = after
            factor, own_left = block
            root = solve_lower(factor, identity)
            carried = left @ root
            below = -covariance @ carried
            diagonal = root.T @ root - carried.T @ below
            return (diagonal, own_left), jnp.stack([diagonal, below])

        start = (jnp.zeros_like(identity), jnp.zeros_like(identity))
        _, found = lax.scan(invert_block, start, (self.diagonal, self.left), reverse=True)
        return BlockTridiagonal(found[:, 0], found[:, 1])
