"""Patterns and orders of elimination as arrays, so that one program serves all designs of like size.

A :class:`~..sparse_cholesky.SparsePattern` and an :class:`~.elimination.Elimination` are compared by what they hold: a
program that has seen one is compiled anew for another. Here the same indices stand beside the data, entries padded to
few sizes, and the host knows the order again by its digest.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..frozen_pytree import frozen_pytree
from ..padding import rounded_up
from ..sparse_cholesky import SparsePattern
from .elimination import Elimination

_MOST_KNOWN = 4
"""Orders of elimination whose plans the host keeps."""
_known: OrderedDict[bytes, Elimination] = OrderedDict()


@frozen_pytree
class CarriedPattern:
    """Entries of the lower triangle of a symmetric matrix, as :class:`~..sparse_cholesky.SparsePattern` has them.

    Values of the matrix are zero at the padding behind the entries, which stands on the diagonal.

    >>> pattern = CarriedPattern.of(SparsePattern.of(2, [1], [0]))
    >>> print(pattern.multiply(jnp.array([2.0, 1.0, 3.0]), jnp.array([1.0, 1.0])), pattern.num_entries)
    [3. 4.] 3
    """

    rows: Array
    """Row of each entry, shape ``(nnz,)``, zeros at padding."""
    columns: Array
    """Column of each entry, at most its row."""
    diagonal: Array
    """Place of each diagonal entry, shape ``(n,)``."""
    pointer: Array
    """Place of the first entry of each row, and of what is behind the last; shape ``(n + 1,)``."""

    @classmethod
    def of(cls, pattern: SparsePattern) -> CarriedPattern:
        """The same entries, padded."""
        padding = (0, rounded_up(pattern.num_entries) - pattern.num_entries)
        pointer = np.searchsorted(pattern.rows, np.arange(pattern.size + 1)).astype(np.int32)
        rows, columns = (jnp.asarray(np.pad(a, padding)) for a in (pattern.rows, pattern.columns))
        return cls(rows, columns, jnp.asarray(pattern.diagonal.astype(np.int32)), jnp.asarray(pointer))

    @property
    def size(self) -> int:
        """Number of rows of the matrix."""
        return self.diagonal.shape[0]

    @property
    def num_entries(self) -> int:
        """Number of entries of the lower triangle, with padding."""
        return self.rows.shape[0]

    def multiply(self, values: Array, x: Array) -> Array:
        """Product of the symmetric matrix with vectors, shape (n,) or (n, k)."""
        shape = values.shape + (1,) * (x.ndim - 1)
        below = jnp.where(self.rows == self.columns, 0.0, values)
        out = jnp.zeros_like(x, values.dtype).at[self.rows].add(values.reshape(shape) * x[self.columns])
        return out.at[self.columns].add(below.reshape(shape) * x[self.rows])

    def known(self) -> SparsePattern:
        """The pattern of arrays that have values."""
        number = int(self.pointer[-1])
        return SparsePattern(self.size, np.asarray(self.rows)[:number], np.asarray(self.columns)[:number])


@frozen_pytree
class CarriedElimination:
    """Order in which the unknowns of a sparse precision are eliminated; see :class:`~.elimination.Elimination`."""

    pattern: CarriedPattern
    leaves: Array
    """Shape ``(b, n)``."""
    common: Array
    """Shape ``(q,)``."""
    directions: Array
    """Known directions, shape ``(m, r)``."""
    digest: Array
    """Digest of the order, bytes of shape ``(16,)``."""
    num_probes: int | None = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, elimination: Elimination) -> CarriedElimination:
        """The same order, which the host keeps as it is."""
        _keep(elimination)
        pattern, digest = CarriedPattern.of(elimination.pattern), np.frombuffer(elimination.digest, np.uint8)
        leaves, common = (jnp.asarray(a.astype(np.int32)) for a in (elimination.leaves, elimination.common))
        directions = jnp.asarray(elimination.known)
        return cls(pattern, leaves, common, directions, jnp.asarray(digest), elimination.num_probes)

    def known(self) -> Elimination:
        """The order of arrays that have values, made again where the host has forgotten it."""
        digest = np.asarray(self.digest, np.uint8).tobytes()
        if digest not in _known:
            directions = np.asarray(self.directions, np.float64)
            arrays = np.asarray(self.leaves), np.asarray(self.common)
            _keep(Elimination(self.pattern.known(), *arrays, self.num_probes, directions), digest)
        _known.move_to_end(digest)
        return _known[digest]

    def describe(self) -> str:
        """The order of elimination, in a line."""
        return self.known().describe()


def _keep(elimination: Elimination, digest: bytes | None = None) -> None:
    _known[elimination.digest if digest is None else digest] = elimination
    while len(_known) > _MOST_KNOWN:
        _known.popitem(last=False)
