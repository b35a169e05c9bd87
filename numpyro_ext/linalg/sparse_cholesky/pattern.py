"""Pattern of a symmetric sparse matrix: which entries of its lower triangle may differ from zero."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike, NDArray

from ..frozen_pytree import frozen_pytree
from ..padding import rounded_up

_MOST_PADDED = 3.0
"""Entries with padding, in those without, up to which rows are padded to the longest for products with vectors."""
_WIDEST_ROW = 64
"""Entries of the longest row up to which they are: longer ones would differ between designs of like size."""


@jax.tree_util.register_static
class SparsePattern:
    """Entries of the lower triangle of a symmetric matrix, sorted by row and column, with the whole diagonal.

    Equal and hashed by its content, so it may be static in a pytree and an argument that ``jit`` compares.

    >>> pattern = SparsePattern.of(3, [0, 2], [1, 1])
    >>> pattern.rows.tolist(), pattern.columns.tolist()
    ([0, 1, 1, 2, 2], [0, 0, 1, 1, 2])

    :param int size: number of rows of the matrix.
    :param rows: row of each entry, int32, shape (nnz,).
    :param columns: column of each entry, at most its row.
    :raises ValueError: if entries are not in this form; :meth:`of` makes it.
    """

    def __init__(self, size: int, rows: ArrayLike, columns: ArrayLike) -> None:
        self.size = _size(size)
        self.rows, self.columns = (_indices(a, self.size, n) for a, n in ((rows, "rows"), (columns, "columns")))
        if self.rows.shape != self.columns.shape:
            raise ValueError(f"{self.rows.size} rows and {self.columns.size} columns: each entry has one of both.")
        keys = self._keys(self.rows, self.columns)
        is_sorted = bool(np.all(keys[1:] > keys[:-1])) and bool(np.all(self.columns <= self.rows))
        if not is_sorted or np.count_nonzero(self.rows == self.columns) != self.size:
            raise ValueError(
                "The entries must be those of the lower triangle with the whole diagonal, sorted by row and column, "
                "each once: SparsePattern.of(size, rows, columns) brings them into this form."
            )
        for array in (self.rows, self.columns):
            array.setflags(write=False)
        content = hashlib.blake2b(str(self.size).encode(), digest_size=16)
        content.update(self.rows.tobytes())
        content.update(self.columns.tobytes())
        self.digest = content.digest()

    @classmethod
    def of(cls, size: int, rows: ArrayLike, columns: ArrayLike) -> SparsePattern:
        """Pattern that holds given entries: mirrored to the lower triangle, each once, and the diagonal.

        :param int size: number of rows of the matrix.
        :param rows: rows of entries, integers from 0 to ``size - 1``, in any order and of either triangle.
        :param columns: their columns.
        :raises TypeError: if indices are no integers.
        :raises ValueError: if one is out of range, or the numbers of rows and columns differ.
        """
        size = _size(size)
        i, j = _indices(rows, size, "rows"), _indices(columns, size, "columns")
        if i.shape != j.shape:
            raise ValueError(f"{i.size} rows and {j.size} columns: each entry has one of both.")
        diagonal = np.arange(size, dtype=np.int64)
        low, high = np.minimum(i, j).astype(np.int64), np.maximum(i, j).astype(np.int64)
        keys = np.unique(np.concatenate([high * size + low, diagonal * (size + 1)]))
        return cls(size, (keys // size).astype(np.int32), (keys % size).astype(np.int32))

    @property
    def num_entries(self) -> int:
        """Number of entries of the lower triangle, the diagonal included."""
        return int(self.rows.size)

    @property
    def diagonal(self) -> NDArray[np.int64]:
        """Index of each diagonal entry in the values of this pattern, shape ``(size,)``."""
        return np.flatnonzero(self.rows == self.columns)

    @property
    def degrees(self) -> NDArray[np.int64]:
        """Number of entries of each column of the whole matrix, off the diagonal; shape ``(size,)``."""
        found = [np.bincount(index, minlength=self.size) for index in (self.rows, self.columns)]
        return found[0] + found[1] - 2

    @property
    def dense_columns(self) -> NDArray[np.bool_]:
        """True of columns that meet so many others, as those of coefficients do, that orders of elimination are found
        without them; shape ``(size,)``."""
        return self.degrees > max(16.0, 10.0 * np.sqrt(self.size))

    def positions(self, rows: ArrayLike, columns: ArrayLike) -> NDArray[np.int64]:
        """Index of given entries, of either triangle, in the values of this pattern.

        :raises ValueError: if the pattern lacks one of them.
        """
        i, j = _indices(rows, self.size, "rows"), _indices(columns, self.size, "columns")
        keys, wanted = self._keys(self.rows, self.columns), self._keys(np.maximum(i, j), np.minimum(i, j))
        found: NDArray[np.int64] = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
        if wanted.size and np.any(keys[found] != wanted):
            first = int(np.flatnonzero(keys[found] != wanted)[0])
            raise ValueError(f"The pattern has no entry ({i[first]}, {j[first]}).")
        return found

    def _keys(self, rows: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.int64]:
        return rows.astype(np.int64) * self.size + columns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SparsePattern) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"SparsePattern(size={self.size}, num_entries={self.num_entries})"


@frozen_pytree
class CarriedPattern:
    """Entries of a :class:`SparsePattern` as arrays, so that one program serves all patterns of like size.

    A program that has seen a :class:`SparsePattern` is compiled anew for another. Here the same indices stand beside
    the data, and the host knows the pattern again by its digest. Values of the matrix are zero at the padding behind
    the entries, which stands on the diagonal.

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
    digest: Array
    """Digest of the pattern, bytes of shape ``(16,)``."""
    row_entries: Array
    """Entries of each row of the whole matrix, ``nnz`` at padding, shape ``(width, n)``; none where rows differ much in
    their number."""
    row_columns: Array
    """The columns of these."""
    length: int = dataclasses.field(default=0, metadata={"static": True})
    """Numbers that a factor is stored in; zero where there is none."""

    @classmethod
    def of(cls, pattern: SparsePattern, num_entries: int | None = None, length: int = 0) -> CarriedPattern:
        """The same entries, in arrays of NumPy.

        :param int num_entries: with padding; by default the next of few sizes.
        :param int length: numbers of a factor, padded where programs are to be shared.
        """
        number = rounded_up(pattern.num_entries) if num_entries is None else num_entries
        padding = (0, number - pattern.num_entries)
        pointer = np.searchsorted(pattern.rows, np.arange(pattern.size + 1)).astype(np.int32)
        rows, columns = (np.pad(a, padding) for a in (pattern.rows, pattern.columns))
        digest = np.frombuffer(pattern.digest, np.uint8)
        indices = rows, columns, pattern.diagonal.astype(np.int32), pointer, digest, *_entries_by_row(pattern, number)
        fields: list[Any] = [*indices, length]
        return cls(*fields)

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
        own_axes = (1,) * (x.ndim - 1)
        if self.row_entries.size:  # sums by index take five times as long
            entries = _at(jnp.append(values, 0), self.row_entries)
            return jnp.sum(entries.reshape(*entries.shape, *own_axes) * _at(x, self.row_columns), axis=0)
        shape = values.shape + own_axes
        below = jnp.where(self.rows == self.columns, 0.0, values)
        out = jnp.zeros_like(x, jnp.result_type(values, x)).at[self.rows].add(values.reshape(shape) * x[self.columns])
        return out.at[self.columns].add(below.reshape(shape) * x[self.rows])

    def known(self) -> SparsePattern:
        """The pattern of arrays that have values."""
        number = int(self.pointer[-1])
        return SparsePattern(self.size, np.asarray(self.rows)[:number], np.asarray(self.columns)[:number])


AnyPattern = SparsePattern | CarriedPattern
"""Pattern that programs are compiled for, or that is an argument of theirs."""


def multiply(pattern: AnyPattern, values: Array, x: Array) -> Array:
    """Product of the symmetric matrix with vectors, shape (n,) or (n, k)."""
    carried = CarriedPattern.of(pattern, pattern.num_entries) if isinstance(pattern, SparsePattern) else pattern
    return carried.multiply(values, x)


def _at(x: Array, index: Any) -> Array:
    """Elements at indices that are neither negative nor out of range, which nothing has to check."""
    return jnp.asarray(x).at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _entries_by_row(pattern: SparsePattern, nothing: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Entries and columns of each row of the whole matrix, side by side."""
    off = np.flatnonzero(pattern.rows != pattern.columns)
    width = rounded_up(int(pattern.degrees.max()) + 1, digits=3)
    if width > _WIDEST_ROW or width * pattern.size > _MOST_PADDED * (pattern.num_entries + off.size):
        none = np.zeros((0, pattern.size), np.int32)
        return none, none
    rows = np.concatenate([pattern.rows, pattern.columns[off]])
    columns = np.concatenate([pattern.columns, pattern.rows[off]])
    entries = np.concatenate([np.arange(pattern.num_entries), off])
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=pattern.size)
    within = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.full((width, pattern.size), nothing, np.int32), np.zeros((width, pattern.size), np.int32)
    for padded, indices in zip(found, (entries, columns), strict=True):
        padded[within, rows[by_row]] = indices[by_row]
    return found


def _size(size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 0 < size < 2**31:
        raise ValueError(f"The size of a matrix is a positive integer, not {size!r}.")
    return int(size)


def _indices(indices: ArrayLike, size: int, name: str) -> NDArray[np.int32]:
    array = np.asarray(indices)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1:
        raise ValueError(f"{name} have shape {array.shape}: they are indices of entries, of one dimension.")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} are {array.dtype}: indices of entries are integers.")
    bad = np.flatnonzero((array < 0) | (array >= size))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}: indices go from 0 to {size - 1}.")
    return np.array(array, np.int32)
