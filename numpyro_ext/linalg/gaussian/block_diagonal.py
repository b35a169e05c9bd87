"""Block-diagonal matrices over the unknowns: priors before, and posteriors after, conditioning on factors."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import block_diag

from ..frozen_pytree import frozen_pytree
from .design import DenseDesign, Design, SparseRows
from .row_pairs import FEW_ENTRIES, is_summed_by_pair, sum_pairs


@frozen_pytree
class Repeated:
    """Blocks of shape ``(batch, width, width)`` that stand for ``count`` times as many, in turn."""

    matrix: Array
    count: int = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        return 3

    @property
    def dtype(self) -> jnp.dtype:
        return self.matrix.dtype

    @property
    def mT(self) -> Repeated:
        return Repeated(self.matrix.mT, self.count)


Part = Array | Repeated


def repeated(matrix: Array, count: int) -> Part:
    """Blocks that stand for ``count`` times as many, as a part of a :class:`BlockDiagonal`."""
    return matrix if count == 1 else Repeated(matrix, count)


def _blocks(part: Part) -> tuple[Array, int]:
    return (part.matrix, part.count) if isinstance(part, Repeated) else (part, 1)


class BlockDiagonal(NamedTuple):
    """A square block-diagonal matrix, part after part.

    A part is a diagonal of shape ``(size,)``, or blocks of equal shape, ``(batch, width, width)`` or :class:`Repeated`.
    """

    parts: tuple[Part, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(count * math.prod(matrix.shape[:2]) for matrix, count in map(_blocks, self.parts))

    def _split(self, x: Array) -> list[Array]:
        pieces, start = [], 0
        for size in self.sizes:
            pieces.append(x[..., start : start + size])
            start += size
        return pieces

    def apply(self, x: Array) -> Array:
        """``D x`` for ``x`` of shape ``(..., N)``."""
        return jnp.concatenate([_apply(p, piece) for p, piece in zip(self.parts, self._split(x), strict=True)], -1)

    def apply_transpose(self, x: Array) -> Array:
        """``D^T x`` for ``x`` of shape ``(..., N)``."""
        transposed = BlockDiagonal(tuple(p.mT if p.ndim == 3 else p for p in self.parts))
        return transposed.apply(x)

    def to_dense(self) -> Array:
        """Materialise as ``(N, N)``."""
        blocks: list[Array] = []
        for matrix, count in map(_blocks, self.parts):
            if matrix.ndim == 3:
                blocks.extend(list(matrix) * count)
            else:  # fewer operations than `jnp.diag`
                blocks.append(jnp.where(np.eye(len(matrix), dtype=bool), matrix, 0.0))
        return block_diag(*blocks)

    def entries(self, i: Array, j: Array) -> Array:
        """The elements at broadcast indices ``(i, j)``; zero where an index is ``N`` (padding)."""
        total, start = jnp.zeros((), self.parts[0].dtype), 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            if not size:  # of a site without elements
                continue
            a, b = i - start, j - start
            inside = (a >= 0) & (a < size) & (b >= 0) & (b < size)
            a, b = jnp.clip(a, 0, size - 1), jnp.clip(b, 0, size - 1)
            matrix, _ = _blocks(part)
            if matrix.ndim == 3:
                batch, width = matrix.shape[:2]
                inside &= a // width == b // width
                value = matrix[a // width % batch, a % width, b % width]
            else:
                inside &= a == b
                value = matrix[a]
            total = total + jnp.where(inside, value, 0.0)
            start += size
        return total

    def take(self, columns: Array) -> Array:
        """Principal submatrices at ``columns`` of shape ``(num_blocks, n)``, in each block each column once but for
        padding: shape ``(num_blocks, n, n)``."""
        if self._is_diagonal:
            taken = self._diagonal().at[columns].get(mode="fill", fill_value=0.0)
            return jnp.where(np.eye(columns.shape[1], dtype=bool), taken[:, :, None], 0.0)
        return self.entries(columns[:, :, None], columns[:, None, :])

    def at(self, columns: Array) -> BlockDiagonal:
        """Principal submatrix at ``columns`` of shape ``(n,)``, each once: one part, a diagonal of a diagonal."""
        return BlockDiagonal((self._diagonal()[columns] if self._is_diagonal else self.take(columns[None]),))

    @property
    def _is_diagonal(self) -> bool:
        return all(part.ndim == 1 for part in self.parts)

    def _diagonal(self) -> Array:
        return self.apply(jnp.ones((sum(self.sizes),), self.parts[0].dtype))


def _apply(part: Part, x: Array) -> Array:
    matrix, count = _blocks(part)
    if matrix.ndim == 1:
        return matrix * x
    batch, width = matrix.shape[:2]
    if batch == 1:
        return (x.reshape(*x.shape[:-1], count, width) @ matrix[0].T).reshape(x.shape)
    pieces = x.reshape(*x.shape[:-1], count, batch, width)
    return jnp.einsum("bij,...cbj->...cbi", matrix, pieces).reshape(x.shape)


def cross_product(left: Design, matrix: BlockDiagonal, right: Design) -> Array:
    """``A D B^T`` of shape ``(rows of A, rows of B)``, by gathers where the designs are sparse.

    A single dense block between sparse designs costs no matrix product: for the identity it is a copy.
    """
    total, start = jnp.zeros((), matrix.parts[0].dtype), 0
    for part, size in zip(matrix.parts, matrix.sizes, strict=True):
        if not size:  # of a site without elements
            continue
        left_part, right_part = left.column_range(start, size), right.column_range(start, size)
        if not isinstance(part, Repeated) and part.ndim == 3 and part.shape[0] == 1:
            applied = left_part.matvec(part[0].T).T
        else:
            applied = _apply(part.mT if part.ndim == 3 else part, left_part.to_dense())
        total = total + right_part.matvec(applied)
        start += size
    return total


def quadratic_form(design: Design, matrix: BlockDiagonal | BlockCovariance) -> Array:
    """The diagonal of ``A D A^T`` without its other elements, of shape ``(rows of A,)``."""
    if isinstance(design, SparseRows):
        columns, values = design.columns, design.values
        if is_summed_by_pair(columns):
            return sum_pairs(columns, values, matrix.entries)
        if columns.shape[1] <= FEW_ENTRIES:
            pairs = matrix.entries(columns[:, :, None], columns[:, None, :])
            return jnp.einsum("rk,rkl,rl->r", values, pairs, values)

        # memory for one entry of each row with all others, and not for all pairs of them
        def with_others(entry: tuple[Array, Array]) -> Array:
            column, value = entry
            return value * jnp.sum(matrix.entries(column[:, None], columns) * values, axis=-1)

        return jnp.sum(lax.map(with_others, (columns.T, values.T)), axis=0)
    return jnp.sum(matrix.apply(design.matrix) * design.matrix, axis=-1)


class BlockCovariance(NamedTuple):
    """A covariance over all unknowns held as ``matrix`` of shape ``(num_blocks, n, n)``.

    ``columns`` of shape ``(num_blocks, n)`` says which unknowns a block holds, padded with ``num_columns``;
    unknowns in different blocks are independent.
    """

    matrix: Array
    columns: Array
    home: Array
    """Block of every unknown and its position in the block, shape ``(2, num_columns)``."""

    @classmethod
    def build(cls, matrix: Array, columns: Array, num_columns: int) -> BlockCovariance:
        """Index the blocks by unknown."""
        return cls(matrix, columns, column_home(columns, num_columns))

    def entries(self, i: Array, j: Array) -> Array:
        """The elements at broadcast indices ``(i, j)``."""
        if self.matrix.shape[0] == 1:
            return self.matrix[0][i, j]
        (block_i, position_i), (block_j, position_j) = self.home[:, i], self.home[:, j]
        return jnp.where(block_i == block_j, self.matrix[block_i, position_i, position_j], 0.0)

    def apply(self, x: Array) -> Array:
        """The covariance times ``x`` of shape ``(..., num_columns)``."""
        if self.matrix.shape[0] == 1:
            return x @ self.matrix[0]
        local = x.at[..., self.columns].get(mode="fill", fill_value=0.0)
        local = jnp.einsum("bij,...bj->...bi", self.matrix, local)
        return jnp.zeros_like(x).at[..., self.columns].set(local, mode="drop")

    def map_covariance(self, design: Design) -> Array:
        """Covariance of ``A e``, of shape ``(rows, rows)``."""
        if isinstance(design, SparseRows) and self.matrix.shape[0] == 1:
            return design.matvec(design.matvec(self.matrix[0]).T)
        dense = DenseDesign(design.to_dense())
        return dense.matvec(self.apply(dense.matrix))


def column_home(columns: Array, num_columns: int) -> Array:
    """Invert ``columns``: for every unknown its block and its position in that block, shape ``(2, num_columns)``."""
    block, position = jnp.indices(columns.shape)
    index = jnp.stack([block, position])
    return jnp.zeros((2, num_columns), index.dtype).at[:, columns].set(index, mode="drop")
