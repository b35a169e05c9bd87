"""Places of the entries of prior and rows in a sparse posterior precision, found once on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..cholesky import cholesky, cholesky_inverse, half_log_determinant
from ..frozen_pytree import frozen_pytree
from ..sparse_cholesky import AnyPattern, CarriedPattern, SparsePattern, analyse
from ..sparse_krylov import CarriedElimination, Elimination
from ..sums_by_index import sums_by_index
from .design import SparseRows
from .prior import CovariancePrior, DiagonalPrior, FlatPrior, LowRankPrior, PrecisionPrior, PriorBlock
from .sparse_prior import SparsePrecisionPrior


@frozen_pytree
class SparseLayout:
    """Places of what adds to a posterior precision among the entries of its pattern.

    Made by :func:`find_layout`. The pattern holds all pairs of unknowns that a row touches.
    """

    prior_slots: Array
    """Places of the entries of the lower triangles of the prior blocks, one block after the other."""
    row_slots: Array
    """Places of the pairs of entries of each row as :func:`row_pairs` lists them, one past the last for pairs with
    padding; shape ``(num_rows, k (k + 1) / 2)``."""
    pattern: AnyPattern
    prior: AnyPattern
    """Entries of the prior precision, in the order of their places."""
    elimination: Elimination | CarriedElimination | None = None
    """Order in which unknowns are eliminated where the rest is known by its products; ``None`` for Cholesky factors."""

    def carried(self, elimination: Elimination | None = None) -> SparseLayout:
        """The same layout, of an order of elimination if one is given, with all patterns as arrays, which programs do
        not depend on.

        :raises ValueError: if the factor would not fit (:func:`~numpyro_ext.linalg.sparse_cholesky.analyse`).
        """
        assert isinstance(self.pattern, SparsePattern) and isinstance(self.prior, SparsePattern)  # as it is found
        carried = None if elimination is None else CarriedElimination.of(elimination)
        if carried is None:
            pattern = CarriedPattern.of(self.pattern, length=analyse(self.pattern).padded_length)
        else:
            pattern = carried.pattern
        slots = np.array(self.row_slots)  # by NumPy, which compiles nothing
        slots[slots == self.pattern.num_entries] = pattern.num_entries
        prior = CarriedPattern.of(self.prior, self.prior.num_entries)
        pattern, prior = jax.tree.map(jnp.asarray, (pattern, prior))
        return SparseLayout(self.prior_slots, jnp.asarray(slots), pattern, prior, carried)

    def gram(self, design: SparseRows, weight: Array) -> Array:
        r""":math:`A^T \mathrm{diag}(w) A` at the entries of the pattern, shape ``(nnz,)``."""
        first, second = row_pairs(design.columns.shape[1])
        columns, values = design.columns, design.values
        # of two entries at one column, the pair and its mirror image fall on the same element
        times = jnp.where((columns[:, first] == columns[:, second]) & (first != second), 2.0, 1.0)
        terms = times.astype(values.dtype) * values[:, first] * values[:, second] * weight[:, None]
        return sums_by_index(terms, self.row_slots, self.pattern.num_entries)

    def quadratic(self, design: SparseRows, entries: Array) -> Array:
        """Quadratic forms of the rows with the symmetric matrix of given entries, shape ``(num_rows,)``."""
        return quadratic_of_pairs(design, entries.at[self.row_slots].get(mode="fill", fill_value=0.0))


def row_pairs(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of the entries of a row of a given number of entries, each once, with themselves."""
    first, second = np.triu_indices(width)
    return first, second


def quadratic_of_pairs(design: SparseRows, entries: Array) -> Array:
    """Quadratic forms of rows with a symmetric matrix, from its elements at the pairs of entries of each row."""
    first, second = row_pairs(design.columns.shape[1])
    times = jnp.asarray(np.where(first == second, 1.0, 2.0), design.values.dtype)
    return jnp.sum(times * design.values[:, first] * design.values[:, second] * entries, axis=-1)


def find_layout(
    priors: Sequence[SparsePattern | None],
    sizes: Sequence[int],
    columns: np.ndarray,
    is_entry: np.ndarray,
    others: Sequence[np.ndarray] = (),
) -> SparseLayout:
    """Pattern of the posterior precision of some prior blocks seen in sparse rows, and the places of all entries.

    >>> layout = find_layout([None], [3], np.array([[0, 1], [2, 2]]), np.array([[True, True], [True, False]]))
    >>> layout.pattern, layout.row_slots.tolist()
    (SparsePattern(size=3, num_entries=4), [[0, 1, 2], [3, 4, 4]])

    :param priors: pattern of the precision of each block; ``None`` of independent unknowns.
    :param sizes: number of unknowns of each block.
    :param columns: unknowns that each row touches, shape ``(num_rows, k)``.
    :param is_entry: false at padding, of the same shape.
    :param others: unknowns that rows of other maps touch, each ``(rows, k)`` padded with ``-1``: the inverse will be
        known at their pairs too.
    """
    starts = np.cumsum((0, *sizes))
    of_prior = []
    for pattern, start, size in zip(priors, starts, sizes, strict=False):
        own = (np.arange(size), np.arange(size)) if pattern is None else (pattern.rows, pattern.columns)
        of_prior.append(np.stack(own).astype(np.int64) + start)
    prior_pairs = np.concatenate(of_prior, axis=1)
    size = int(starts[-1])
    first, second = row_pairs(columns.shape[1])
    # one pair of entries of all rows after the other: many of them are at few places
    is_pair, found = [], []
    for i, j in zip(first, second, strict=True):
        is_pair.append(is_entry[:, i] & is_entry[:, j])
        pair = columns[is_pair[-1], i].astype(np.int64), columns[is_pair[-1], j].astype(np.int64)
        found.append(np.unique(_places(size, *pair), return_inverse=True))
    of_others = [_places(size, *_pairs_of(other)) for other in others]
    places = np.unique(np.concatenate([_places(size, *prior_pairs), *(keys for keys, _ in found), *of_others]))
    whole = SparsePattern.of(size, *np.divmod(places, size))
    slots = np.full((len(columns), first.size), whole.num_entries, np.int32)
    for number, (keys, inverse) in enumerate(found):
        slots[is_pair[number], number] = whole.positions(*np.divmod(keys, size))[inverse]
    of_prior_alone = SparsePattern(size, *prior_pairs)
    prior_slots = jnp.asarray(whole.positions(*prior_pairs), jnp.int32)
    return SparseLayout(prior_slots, jnp.asarray(slots), whole, of_prior_alone)


def _places(size: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Numbers of entries in the lower triangle of a matrix, row after row."""
    return np.maximum(i, j) * size + np.minimum(i, j)


def _pairs_of(pattern: np.ndarray) -> np.ndarray:
    first, second = row_pairs(pattern.shape[1])
    is_pair = (pattern[:, first] >= 0) & (pattern[:, second] >= 0)
    return np.stack([pattern[:, first][is_pair], pattern[:, second][is_pair]]).astype(np.int64)


def block_pattern(block: PriorBlock) -> SparsePattern | None:
    """Entries of the precision of a prior block, from its kind and shape alone; ``None`` of independent unknowns.

    :raises ValueError: if the block is of low rank.
    """
    if isinstance(block, SparsePrecisionPrior):
        return block.pattern if isinstance(block.pattern, SparsePattern) else block.pattern.known()
    if isinstance(block, DiagonalPrior | FlatPrior):
        return None
    if isinstance(block, LowRankPrior):
        raise ValueError("a prior of low rank has no sparse precision: give its covariance_matrix in a model of maps.")
    matrix = block.covariance if isinstance(block, CovariancePrior) else block.precision
    width = matrix.shape[1]
    i, j = np.tril_indices(width)
    starts = width * np.arange(block.size // max(width, 1))[:, None]
    return SparsePattern.of(block.size, (starts + i).reshape(-1), (starts + j).reshape(-1))


def dense_entries(block: CovariancePrior | PrecisionPrior) -> tuple[Array, Array]:
    """Entries of the precision of small correlated blocks as :func:`block_pattern` has them, and half its log
    determinant."""
    matrix = block.covariance if isinstance(block, CovariancePrior) else block.precision
    factor, sign = cholesky(matrix), 1.0
    if isinstance(block, CovariancePrior):
        matrix, sign = cholesky_inverse(factor), -1.0
    entries = jnp.tile(matrix[:, *np.tril_indices(matrix.shape[1])].reshape(-1), block.count)
    return entries, sign * block.count * half_log_determinant(factor)


def look_up(pattern: AnyPattern, i: Array, j: Array) -> tuple[Array, Array]:
    """Places of entries ``i >= j`` in a pattern, and which of them it has: by bisection within rows, as products of
    two indices may exceed 32 bits."""
    pointer: Any
    if isinstance(pattern, CarriedPattern):
        pointer, longest = pattern.pointer, pattern.size
    else:
        pointer = np.searchsorted(pattern.rows, np.arange(pattern.size + 1)).astype(np.int32)
        longest = int(np.diff(pointer).max())
    columns = jnp.asarray(pattern.columns)
    start, end = jnp.asarray(pointer)[i], jnp.asarray(pointer)[i + 1]

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) // 2
        is_below = (middle < high) & (columns[jnp.minimum(middle, columns.size - 1)] < j)
        return jnp.where(is_below, middle + 1, low), jnp.where(is_below, high, middle)

    low, _ = lax.fori_loop(0, longest.bit_length(), halve, (start, end))
    slots = jnp.minimum(low, columns.size - 1)
    return slots, (low < end) & (columns[slots] == j)
