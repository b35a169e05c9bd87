"""The linear map from the unknowns of a Gaussian field to the predictors: dense, or a few entries per row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["DenseDesign", "Design", "SparseRows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SparseRows:
    """At most ``k`` entries in every row, at ``columns`` with ``values``, both of shape ``(num_rows, k)``.

    A column may repeat inside a row (its values add); padding entries have value zero and any valid column.
    Identity, selections, gathers of random effects and sums of a few of them are of this kind.
    """

    columns: Array
    values: Array
    num_columns: int = dataclasses.field(metadata={"static": True})

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


Design = DenseDesign | SparseRows
