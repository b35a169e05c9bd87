"""The linear map from the unknowns of a Gaussian field to the predictors: dense, or a few entries per row."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from ..frozen_pytree import frozen_pytree

__all__ = ["DenseDesign", "Design", "SparseRows"]


@frozen_pytree
class DenseDesign:
    """A materialised matrix of shape ``(num_rows, num_columns)``."""

    matrix: Array

    @property
    def num_rows(self) -> int:
        return self.matrix.shape[0]

    @property
    def num_columns(self) -> int:
        return self.matrix.shape[1]

    def matvec(self, x: Array) -> Array:
        """``A x`` for ``x`` of shape ``(..., num_columns)``."""
        return x @ self.matrix.T

    def rmatvec(self, y: Array) -> Array:
        """``A^T y`` for ``y`` of shape ``(..., num_rows)``."""
        return y @ self.matrix

    def to_dense(self) -> Array:
        """The matrix itself."""
        return self.matrix

    def column_range(self, start: int, size: int) -> DenseDesign:
        """The columns from ``start`` on, ``size`` of them."""
        return DenseDesign(self.matrix[:, start : start + size])

    def take_blocks(self, rows: Array, columns: Array) -> Array:
        """Submatrices at ``rows`` ``(b, m)`` and ``columns`` ``(b, n)``: shape ``(b, m, n)``, zero at padding."""
        return self.matrix.at[rows[:, :, None], columns[:, None, :]].get(mode="fill", fill_value=0.0)

    def squared(self) -> DenseDesign:
        """The squares of the elements: maps variances of independent unknowns to those of the predictors."""
        return DenseDesign(jnp.square(self.matrix))


@frozen_pytree
class SparseRows:
    """Rows of at most ``k`` entries each, at ``columns`` with ``values``, both of shape ``(num_rows, k)``.

    A column may repeat inside a row (its values add); padding entries have value zero and any valid column.
    Identity, selections, gathers of random effects and sums of a few of them are of this kind.
    """

    columns: Array
    values: Array
    num_columns: int = dataclasses.field(metadata={"static": True})
    bandwidth: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Largest distance between two columns of a row, padding included, if it is known."""

    @property
    def num_rows(self) -> int:
        return self.columns.shape[0]

    def matvec(self, x: Array) -> Array:
        """``A x`` for ``x`` of shape ``(..., num_columns)``."""
        return jnp.sum(self.values * x[..., self.columns], axis=-1)

    def rmatvec(self, y: Array) -> Array:
        """``A^T y`` for ``y`` of shape ``(..., num_rows)``."""
        terms = self.values * y[..., None]
        flat = terms.reshape(*y.shape[:-1], -1)
        out = jnp.zeros((*y.shape[:-1], self.num_columns), flat.dtype)
        return out.at[..., self.columns.reshape(-1)].add(flat)

    def to_dense(self) -> Array:
        """Materialise as ``(num_rows, num_columns)``."""
        rows = jnp.arange(self.num_rows)[:, None]
        out = jnp.zeros((self.num_rows, self.num_columns), self.values.dtype)
        return out.at[rows, self.columns].add(self.values)

    def column_range(self, start: int, size: int) -> SparseRows:
        """The columns from ``start`` on, ``size`` of them; entries outside become padding."""
        if (start, size) == (0, self.num_columns):
            return self
        inside = (self.columns >= start) & (self.columns < start + size)
        columns = jnp.clip(self.columns - start, 0, size - 1)
        return SparseRows(columns, jnp.where(inside, self.values, 0.0), size)

    def take_blocks(self, rows: Array, columns: Array) -> Array:
        """Submatrices at ``rows`` ``(b, m)`` and ``columns`` ``(b, n)``: shape ``(b, m, n)``, zero at padding.

        The columns that a row uses must lie in the block of the row.
        """
        position = jnp.broadcast_to(jnp.arange(columns.shape[1]), columns.shape)
        position = jnp.zeros((self.num_columns,), position.dtype).at[columns].set(position, mode="drop")
        values = self.values.at[rows].get(mode="fill", fill_value=0.0)
        local = position[self.columns.at[rows].get(mode="clip")]
        block, row, _ = jnp.indices(local.shape, sparse=True)
        out = jnp.zeros((*rows.shape, columns.shape[1]), self.values.dtype)
        return out.at[block, row, local].add(values)

    def squared(self) -> SparseRows:
        """The squares of the elements: maps variances of independent unknowns to those of the predictors."""
        is_same = self.columns[:, :, None] == self.columns[:, None, :]
        whole = jnp.sum(jnp.where(is_same, self.values[:, None, :], 0.0), axis=-1)
        return SparseRows(self.columns, self.values * whole, self.num_columns)


Design = DenseDesign | SparseRows
