"""The linear map from the unknowns of a Gaussian field to the predictors: dense, or a few entries per row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from ..frozen_pytree import frozen_pytree
from .recurrences import run_backward, run_forward

LEAST_ENTRIES, _WIDEST = 5000, 32
"""Number of entries from which, and width up to which, products of sparse rows take one entry of all rows at a time."""
_AT_A_TIME = 64
"""Rows that are made dense at once."""


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

    def take_rows(self, rows: Array) -> DenseDesign:
        """Some rows, of zeros for numbers past the last."""
        return DenseDesign(self.matrix.at[rows].get(mode="fill", fill_value=0.0))

    def column_range(self, start: int, size: int) -> DenseDesign:
        """The columns from ``start`` on, ``size`` of them."""
        return DenseDesign(self.matrix[:, start : start + size])

    def take_blocks(self, rows: Array, columns: Array) -> Array:
        """Submatrices at ``rows`` ``(b, m)`` and ``columns`` ``(b, n)``: shape ``(b, m, n)``, zero at padding."""
        return self.matrix.at[rows[:, :, None], columns[:, None, :]].get(mode="fill", fill_value=0.0)

    def scale_rows(self, weight: Array) -> DenseDesign:
        """Each row times a number."""
        return DenseDesign(weight[:, None] * self.matrix)

    def scale_columns(self, weight: Array) -> DenseDesign:
        """Each column times a number."""
        return DenseDesign(self.matrix * weight)

    def squared(self) -> DenseDesign:
        """The squares of the elements: maps variances of independent unknowns to those of the predictors."""
        return DenseDesign(jnp.square(self.matrix))


def _sums_of_rows(values: Array, columns: Array, x: Array) -> Array:
    return jnp.sum(values * x[..., columns], axis=-1)


@jax.custom_jvp
def _sums_by_entry(values: Array, columns: Array, x: Array) -> Array:
    """The same, three to twenty times as fast for many rows: nothing is gathered that is not added at once.

    Its derivatives are those of the other, since transposes of slices fill arrays of all entries.
    """
    first, *others = (values[:, k] * x[..., columns[:, k]] for k in range(columns.shape[1]))
    return sum(others, first)


@partial(_sums_by_entry.defjvp, symbolic_zeros=True)
def _(primals: tuple[Array, Array, Array], tangents: tuple[Any, Any, Any]) -> tuple[Array, Any]:
    values, columns, x = primals
    of_values, _, of_x = tangents
    parts = []
    if not isinstance(of_values, SymbolicZero):
        parts.append(_sums_of_rows(of_values, columns, x))
    if not isinstance(of_x, SymbolicZero):
        parts.append(_sums_of_rows(values, columns, of_x))
    found = _sums_by_entry(values, columns, x)
    return found, sum(parts) if parts else jnp.zeros_like(found)


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
        is_large = self.columns.size >= LEAST_ENTRIES and self.columns.shape[1] <= _WIDEST
        return (_sums_by_entry if is_large else _sums_of_rows)(self.values, self.columns, x)

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

    def take_rows(self, rows: Array) -> SparseRows:
        """Some rows, of zeros for numbers past the last."""
        values = self.values.at[rows].get(mode="fill", fill_value=0.0)
        return SparseRows(self.columns.at[rows].get(mode="clip"), values, self.num_columns, self.bandwidth)

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

    def scale_rows(self, weight: Array) -> SparseRows:
        """Each row times a number."""
        return SparseRows(self.columns, weight[:, None] * self.values, self.num_columns, self.bandwidth)

    def scale_columns(self, weight: Array) -> SparseRows:
        """Each column times a number."""
        return SparseRows(self.columns, self.values * weight[self.columns], self.num_columns, self.bandwidth)

    def squared(self) -> SparseRows:
        """The squares of the elements: maps variances of independent unknowns to those of the predictors."""
        is_same = self.columns[:, :, None] == self.columns[:, None, :]
        whole = jnp.sum(jnp.where(is_same, self.values[:, None, :], 0.0), axis=-1)
        return SparseRows(self.columns, self.values * whole, self.num_columns)


@frozen_pytree
class Dynamics:
    """Transition of states from block to block of steps: ``c_{k+1} = transition c_k + gain e_k``, ``c_1 = start
    e_shared``.

    Every unknown is local, seen in the rows of one block and in later ones only through the state, or it is shared.
    """

    transition: Array
    """Shape ``(K, s, s)``."""
    gain: Array
    """Shape ``(K, s, n)``."""
    start: Array
    """Shape ``(s, p)``."""
    columns: Array
    """The local unknowns of each block, shape ``(K, n)``, padded with ``num_columns``."""
    shared: Array
    """The shared unknowns, shape ``(p,)``."""
    num_columns: int = dataclasses.field(metadata={"static": True})
    key: Hashable = dataclasses.field(metadata={"static": True})
    """Designs of equal keys have equal dynamics."""


@frozen_pytree
class StateSpaceDesign:
    """Rows that see the state before a block and the local unknowns of the block: ``h_k = states c_k + local e_k``.

    Products cost time and memory linear in the number of blocks.
    """

    dynamics: Dynamics
    rows: Array
    """The rows of each block, shape ``(K, m)``, padded with ``num_rows``."""
    states: Array
    """Shape ``(K, m, s)``, zero at padding."""
    local: Array
    """Shape ``(K, m, n)``, zero at padding."""
    num_rows: int = dataclasses.field(metadata={"static": True})

    @property
    def num_columns(self) -> int:
        return self.dynamics.num_columns

    def to_blocks(self, values: Array) -> Array:
        """Values of shape ``(..., num_rows)`` as ``(..., K, m)``, zero at padding."""
        return values.at[..., self.rows].get(mode="fill", fill_value=0.0)

    def from_blocks(self, values: Array) -> Array:
        """The inverse of :meth:`to_blocks`."""
        out = jnp.zeros((*values.shape[:-2], self.num_rows), values.dtype)
        return out.at[..., self.rows].set(values, mode="drop")

    def matvec(self, x: Array) -> Array:
        """``A x`` for ``x`` of shape ``(..., num_columns)``."""
        dynamics, flat = self.dynamics, x.reshape(-1, x.shape[-1])
        local = jnp.moveaxis(flat.at[:, dynamics.columns].get(mode="fill", fill_value=0.0), 0, -1)
        start = dynamics.start @ flat[:, dynamics.shared].T
        states = run_forward(dynamics.transition, dynamics.gain @ local, start)
        blocks = jnp.moveaxis(self.states @ states + self.local @ local, -1, 0)
        return self.from_blocks(blocks).reshape(*x.shape[:-1], self.num_rows)

    def rmatvec(self, y: Array) -> Array:
        """``A^T y`` for ``y`` of shape ``(..., num_rows)``."""
        dynamics = self.dynamics
        blocks = jnp.moveaxis(self.to_blocks(y.reshape(-1, y.shape[-1])), 0, -1)
        first, after = run_backward(dynamics.transition, self.states.swapaxes(-1, -2) @ blocks)
        local = self.local.swapaxes(-1, -2) @ blocks + dynamics.gain.swapaxes(-1, -2) @ after
        out = jnp.zeros((blocks.shape[-1], self.num_columns), y.dtype)
        out = out.at[:, dynamics.columns].set(jnp.moveaxis(local, -1, 0), mode="drop")
        out = out.at[:, dynamics.shared].set((dynamics.start.T @ first).T)
        return out.reshape(*y.shape[:-1], self.num_columns)

    def to_dense(self) -> Array:
        """Materialise as ``(num_rows, num_columns)``."""
        return self.matvec(jnp.eye(self.num_columns, dtype=self.states.dtype)).T

    def scale_rows(self, weight: Array) -> StateSpaceDesign:
        """Each row times a number."""
        weight = self.to_blocks(weight)[..., None]
        return dataclasses.replace(self, states=weight * self.states, local=weight * self.local)

    def squared(self) -> DenseDesign:
        """The squares of the elements, which have no state space: a matrix of ``num_rows * num_columns`` numbers."""
        return DenseDesign(jnp.square(self.to_dense()))


@frozen_pytree
class OperatorRows:
    """Rows that touch all unknowns and of which only products are known, such as those of a Fourier transform."""

    known: Any
    """All that the values are made of but the unknowns."""
    weight: Array
    """Factor of each row, shape ``(num_rows,)``."""
    values: Callable[[Array, Any], Array] = dataclasses.field(metadata={"static": True})
    """``values(e, known)`` of shape ``(num_rows,)``, affine in the unknowns."""
    num_columns: int = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        return self.weight.shape[0]

    def _push(self, x: Array) -> Array:
        values: Array = jax.jvp(lambda e: self.values(e, self.known), (jnp.zeros_like(x),), (x,))[1]
        return self.weight * values

    def matvec(self, x: Array) -> Array:
        """``A x`` for ``x`` of shape ``(..., num_columns)``."""
        found: Array = jax.vmap(self._push)(x.reshape(-1, self.num_columns))
        return found.reshape(*x.shape[:-1], self.num_rows)

    def rmatvec(self, y: Array) -> Array:
        """``A^T y`` for ``y`` of shape ``(..., num_rows)``."""
        pull = jax.linear_transpose(self._push, jax.ShapeDtypeStruct((self.num_columns,), y.dtype))
        found: Array = jax.vmap(lambda y: pull(y)[0])(y.reshape(-1, self.num_rows))
        return found.reshape(*y.shape[:-1], self.num_columns)

    def to_dense(self) -> Array:
        """Materialise as ``(num_rows, num_columns)``."""
        return self.matvec(jnp.eye(self.num_columns, dtype=self.weight.dtype)).T

    def scale_rows(self, weight: Array) -> OperatorRows:
        """Each row times a number."""
        return dataclasses.replace(self, weight=weight * self.weight)

    def squared(self) -> DenseDesign:
        """The squares of the elements: a matrix of ``num_rows * num_columns`` numbers."""
        return DenseDesign(jnp.square(self.to_dense()))


Design = DenseDesign | SparseRows
AnyDesign = Design | StateSpaceDesign | OperatorRows


def by_dense_rows(design: Design, function: Callable[[Array, Array], object]) -> Any:
    """Results of a function of dense rows and of their numbers, 64 rows after the other.

    :param function: to a pytree of arrays with these rows in front; it is asked for some rows of zeros too.
    """
    number = design.num_rows
    numbers = jnp.arange(number + -number % _AT_A_TIME).reshape(-1, _AT_A_TIME)
    found = jax.lax.map(lambda rows: function(design.take_rows(rows).to_dense(), rows), numbers)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:number], found)


def rows_at(design: AnyDesign, places: Array) -> Design:
    """Some rows of a design, dense where it is neither dense nor sparse."""
    known = design if isinstance(design, DenseDesign | SparseRows) else DenseDesign(design.to_dense())
    return known.take_rows(places)
