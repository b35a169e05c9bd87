r"""Coefficients of rows in the unknowns of a border: a matrix where the border is narrow, entries where it is wide.

Both answer the same questions about whitened unknowns :math:`w_0` of the border, :math:`e_0 = F w_0`. A matrix costs
``p^2`` operations and ``p`` numbers a row. Entries cost as many as their pairs, and three products of matrices as large
as the border with the blocks, whatever the number of rows: crossed effects of thousands of levels need these.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ..cholesky import inverse_lower
from ..frozen_pytree import frozen_pytree
from .design import SparseRows
from .row_pairs import gram_of_rows, sum_pairs

__all__ = ["BorderEntries", "BorderMatrix", "BorderRows"]


@frozen_pytree
class BorderMatrix:
    """Rows of a narrow border, which see all of its unknowns."""

    matrix: Array
    """Coefficients in the whitened unknowns, shape ``(num_rows, p)``."""

    def predictor(self, shared: Array) -> Array:
        """Part of the predictors by whitened unknowns of the border, shape ``(num_rows,)``."""
        return self.matrix @ shared

    def gram(self, precision: Array) -> Array:
        """Precision of the whitened unknowns by sites of the rows, shape ``(p, p)``."""
        return (self.matrix * precision[:, None]).T @ self.matrix

    def shift(self, shift: Array) -> Array:
        """Shift of the whitened unknowns by those of the rows, shape ``(p,)``."""
        return self.matrix.T @ shift

    def local_products(self, weighted: Array, shifted: Array, at: tuple[Array, Array], like: Array) -> Array:
        """Sums over rows of local entries times coefficients in the border, and of shifts, ``(b, n, p + 1)``.

        :param weighted: local entries times site precisions, shape ``(num_rows, k)``.
        :param shifted: local entries times site shifts, of the same shape.
        :param at: block and position of each local entry.
        :param like: an array whose first axes are ``(b, n)``.
        """
        # the border and the shift side by side: one pass over the rows, one triangular solve
        seen = jnp.concatenate([weighted[..., None] * self.matrix[:, None], shifted[..., None]], -1)
        return jnp.zeros((*like.shape[:2], seen.shape[-1]), seen.dtype).at[at].add(seen)

    def row_variance(self, values: Array, at: tuple[Array, Array], given: tuple[Array, Array], schur: Array) -> Array:
        """Variances of the predictors, shape ``(num_rows,)``.

        :param values: local entries, shape ``(num_rows, k)``.
        :param at: block and position of each.
        :param given: covariance of each block given the border, ``(b, n, n)``, and minus its slopes in the whitened
            unknowns of the border, ``(b, n, p)``.
        :param schur: Cholesky factor of the precision of these.
        """
        covariance, slope = given
        block, position = at
        pairs = covariance[block[:, :, None], position[:, :, None], position[:, None, :]]
        own = jnp.einsum("rk,rkl,rl->r", values, pairs, values)
        moved = self.matrix - jnp.einsum("rk,rkp->rp", values, slope[block, position])
        return own + jnp.sum((moved @ inverse_lower(schur).T) ** 2, axis=-1)


@frozen_pytree
class BorderEntries:
    """Rows of a wide border, which see a few of its unknowns each."""

    rows: SparseRows
    """Entries among the unknowns of the border; of ``p`` columns."""
    factor: Array
    """From whitened unknowns to unknowns: ``(p,)`` where it is diagonal, else ``(p, p)``."""

    def predictor(self, shared: Array) -> Array:
        """Part of the predictors by whitened unknowns of the border, shape ``(num_rows,)``."""
        unknowns = self.factor * shared if self.factor.ndim == 1 else self.factor @ shared
        return self.rows.matvec(unknowns)

    def gram(self, precision: Array) -> Array:
        """Precision of the whitened unknowns by sites of the rows, shape ``(p, p)``."""
        return self._times(self._times(gram_of_rows(self.rows, precision)).T)

    def shift(self, shift: Array) -> Array:
        """Shift of the whitened unknowns by those of the rows, shape ``(p,)``."""
        return self._times(self.rows.rmatvec(shift))

    def local_products(self, weighted: Array, shifted: Array, at: tuple[Array, Array], like: Array) -> Array:
        """Sums over rows of local entries times coefficients in the border; see :class:`BorderMatrix`."""
        block, position = at
        size, dtype = self.rows.num_columns, weighted.dtype
        total = jnp.zeros((*like.shape[:2], size), dtype)
        block = jnp.broadcast_to(block, position.shape)
        # one entry of the border of all rows after the other: nothing is made that is as large as all pairs
        for columns, values in zip(self.rows.columns.T, self.rows.values.T, strict=True):
            total = total.at[block, position, columns[:, None]].add(weighted * values[:, None])
        pulled = jnp.zeros(like.shape[:2], dtype).at[block, position].add(shifted)
        return jnp.concatenate([self._times(total), pulled[..., None]], -1)

    def row_variance(self, values: Array, at: tuple[Array, Array], given: tuple[Array, Array], schur: Array) -> Array:
        """Variances of the predictors, shape ``(num_rows,)``; see :class:`BorderMatrix`.

        They are gathered from the covariance of unknowns that meet in a row: sums with signs, where the matrix has sums
        of squares, at a cost that does not grow with rows times border.
        """
        covariance, slope = given
        block, position = at
        root = inverse_lower(schur)
        shared = root.T @ root
        gain = slope @ shared
        local = covariance + gain @ slope.mT
        cross = self._by_unknowns(gain)
        whole = self._by_unknowns(self._by_unknowns(shared).T)
        pairs = local[block[:, :, None], position[:, :, None], position[:, None, :]]
        total = jnp.einsum("rk,rkl,rl->r", values, pairs, values)
        block = jnp.broadcast_to(block, position.shape)
        for columns, own in zip(self.rows.columns.T, self.rows.values.T, strict=True):
            total -= 2.0 * own * jnp.sum(values * cross[block, position, columns[:, None]], axis=-1)
        return total + sum_pairs(self.rows.columns, self.rows.values, lambda i, j: whole[i, j])

    def _times(self, x: Array) -> Array:
        """Products ``x F`` along the last axis: from coefficients in unknowns to those in whitened ones."""
        return x * self.factor if self.factor.ndim == 1 else x @ self.factor

    def _by_unknowns(self, x: Array) -> Array:
        """Products ``x F^T`` along the last axis: from whitened unknowns to unknowns."""
        return x * self.factor if self.factor.ndim == 1 else x @ self.factor.T


BorderRows = BorderMatrix | BorderEntries
