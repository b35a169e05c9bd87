"""Coefficients between blocks of unknowns and the border that they share: of all its unknowns, or of those that each
block meets."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...frozen_pytree import frozen_pytree

_MOST_PARTS = 4
"""Parts of the lists of columns, each of which is paired with itself and with those behind it."""


@frozen_pytree
class Coupling:
    """A matrix ``V`` of ``n`` rows for each of ``b`` blocks, and ``p`` columns.

    Where a block meets few columns, these are listed: sums over pairs of entries take one place in the lists after the
    other, so that nothing is made that is as large as all pairs.

    >>> lists = Coupling(jnp.array([[[1.0, 2.0]], [[3.0, 0.0]]]), jnp.array([[0, 2], [1, 3]]), 3)
    >>> print(jnp.tril(lists.gram_lower()))
    [[1. 0. 0.]
     [0. 9. 0.]
     [2. 0. 4.]]
    >>> print(lists.times(jnp.array([1.0, 1.0, 10.0])[:, None])[:, 0, 0])
    [21.  3.]
    """

    values: Array
    """Coefficients, shape ``(b, n, p)``, or ``(b, n, w)`` where columns are listed."""
    columns: Array | None
    """Columns that each block meets, ascending, each once, shape ``(b, w)``; padded with ``p`` beside values of
    zero."""
    size: int = dataclasses.field(metadata={"static": True})
    """The number ``p`` of columns."""

    def of(self, values: Array) -> Coupling:
        """Other coefficients in the same places."""
        return Coupling(values, self.columns, self.size)

    def dense(self) -> Array:
        """All coefficients, shape ``(b, n, p)``."""
        if self.columns is None:
            return self.values
        num_blocks, width = self.values.shape[:2]
        out = jnp.zeros((num_blocks, width, self.size), self.values.dtype)
        at = jnp.arange(num_blocks)[:, None, None], jnp.arange(width)[:, None], self.columns[:, None, :]
        return out.at[at].add(self.values, mode="drop")

    def gram_lower(self) -> Array:
        """``V^T V``, shape ``(p, p)``: its lower triangle, and anything above. Cost: ``b n p^2``, or ``b n w^2``."""
        if (columns := self.columns) is None:
            return jnp.einsum("bnp,bnq->pq", self.values, self.values)
        total = jnp.zeros((self.size, self.size), self.values.dtype)
        # as columns ascend, pairs with those further behind are all of a triangle
        for part in np.array_split(np.arange(columns.shape[1]), min(_MOST_PARTS, columns.shape[1])):
            start = int(part[0])
            behind, of_behind = columns[:, start:], self.values[:, :, start:]

            def add(place: Array, total: Array, behind: Array = behind, of_behind: Array = of_behind) -> Array:
                column, values = self._at(place)
                return total.at[column[:, None], behind].add(jnp.sum(values * of_behind, axis=1), mode="drop")

            total = lax.fori_loop(start, start + len(part), add, total)
        return total.T  # rows are what LAPACK, to whom it goes, has as columns

    def times(self, x: Array) -> Array:
        """``V x`` for ``x`` of shape ``(p, m)``, as ``(b, n, m)``."""
        if (columns := self.columns) is None:
            return self.values @ x

        def one(x: Array) -> Array:
            return jnp.einsum("bnw,bw->bn", self.values, x[columns])

        return one(x[:, 0])[..., None] if x.shape[1] == 1 else jnp.moveaxis(lax.map(one, x.T), 0, -1)

    def transpose_times(self, y: Array) -> Array:
        """``V^T y`` for ``y`` of shape ``(b, n)``, as ``(p,)``."""
        if self.columns is None:
            return jnp.einsum("bnp,bn->p", self.values, y)
        terms = jnp.einsum("bnw,bn->bw", self.values, y)
        return jnp.zeros((self.size,), terms.dtype).at[self.columns].add(terms, mode="drop")

    def times_symmetric(self, matrix: Array) -> Coupling:
        """``V S`` for a symmetric ``S``, in the places of the coefficients. Cost: ``b n p^2``, or ``b n w^2``."""
        if (columns := self.columns) is None:
            return self.of(self.values @ matrix)

        def add(place: Array, total: Array) -> Array:
            column, values = self._at(place)
            return total + values * matrix[column[:, None], columns][:, None, :]

        return self.of(lax.fori_loop(0, columns.shape[1], add, jnp.zeros_like(self.values)))

    def _at(self, place: Array) -> tuple[Array, Array]:
        """Columns in one place of all lists, shape ``(b,)``, and coefficients there, ``(b, n, 1)``."""
        column = lax.dynamic_index_in_dim(self.columns, place, axis=1, keepdims=False)
        return column, lax.dynamic_slice_in_dim(self.values, place, 1, axis=2)
