"""Elimination tree of a sparse symmetric matrix and the numbers of entries in the columns of its factor."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import minimum_spanning_tree

from .pattern import SparsePattern


class EliminationTree(NamedTuple):
    """Elimination tree of a matrix whose columns are in postorder."""

    parent: NDArray[np.int64]
    """Parent of each column, n for roots; it is the first entry below the diagonal of the factor's column."""
    counts: NDArray[np.int64]
    """Entries in each column of the factor, the diagonal included."""

    @property
    def flops(self) -> float:
        """Multiplications and additions of the factorisation."""
        return float(np.sum(self.counts.astype(float) ** 2))

    @property
    def fill(self) -> int:
        """Entries of the factor."""
        return int(np.sum(self.counts))


def elimination_tree(pattern: SparsePattern, order: NDArray[np.int64]) -> tuple[EliminationTree, NDArray[np.int64]]:
    """Elimination tree in postorder.

    The subtree of column i is its component in the graph of columns up to i. A spanning tree of least weights, where
    an edge weighs its higher end, has the same components, so only n - 1 edges are followed one by one (Liu 1990).

    :param order: the old index of each new one.
    :return: the tree of the matrix in postorder, and the postorder: positions in ``order``.
    """
    size = pattern.size
    position = np.empty(size, np.int64)
    position[order] = np.arange(size)
    off = pattern.rows != pattern.columns
    i, j = position[pattern.rows[off]], position[pattern.columns[off]]
    high, low = np.maximum(i, j), np.minimum(i, j)
    postorder, parent, first = _postorder(size, _parents(size, high, low))
    position[postorder] = np.arange(size)
    # A postorder keeps descendants before ancestors, and ends of an entry are descendant and ancestor.
    return EliminationTree(parent, _column_counts(parent, first, position[high], position[low])), postorder


def _parents(size: int, high: NDArray[np.int64], low: NDArray[np.int64]) -> list[int]:
    # SciPy before 1.15 has spanning trees for short indices alone
    ends = high.astype(np.int32), low.astype(np.int32)
    spanning = minimum_spanning_tree(csr_array((high + 1.0, ends), shape=(size, size))).tocoo()
    row, column = spanning.row, spanning.col
    high, low = np.maximum(row, column), np.minimum(row, column)
    by_high = np.argsort(high, kind="stable")
    parent, ancestor = [size] * size, list(range(size))
    for i, start in zip(high[by_high].tolist(), low[by_high].tolist(), strict=True):
        # root of the subtree so far, with paths halved on the way
        node = start
        while ancestor[node] != node:
            ancestor[node] = node = ancestor[ancestor[node]]
        if node != i:
            parent[node] = ancestor[node] = i
    return parent


def _postorder(size: int, parent: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Postorder; parents and the first descendant of each node, in the new numbers."""
    subtree = [1] * size
    for node, above in enumerate(parent):
        if above < size:
            subtree[above] += subtree[node]
    start, end = [0] * size, [0] * (size + 1)
    for node in range(size - 1, -1, -1):
        above = parent[node]
        start[node] = end[node] = end[above]
        end[above] += subtree[node]
    number = np.asarray(start) + np.asarray(subtree) - 1
    postorder = np.empty(size, np.int64)
    postorder[number] = np.arange(size)
    new_parent = np.append(number, size)[np.asarray(parent)[postorder]]
    return postorder, new_parent, np.asarray(start)[postorder]


def _depths(parent: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of ancestors of each node, by doubling the steps."""
    above, depth = np.append(parent, parent.size), np.append(np.ones(parent.size, np.int64), 0)
    while np.any(above < parent.size):
        depth = depth + depth[above]
        above = above[above]
    return depth[:-1] - 1


def _column_counts(
    parent: NDArray[np.int64], first: NDArray[np.int64], high: NDArray[np.int64], low: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Entries of each column of the factor (Gilbert, Ng and Peyton 1994).

    Row i of the factor is the union of the paths from the entries of row i up to i. Each entry begins a path, which
    ends where it meets that of the entry before it: at their lowest common ancestor.
    """
    size = parent.size
    change = np.ones(size + 1, np.int64)
    np.subtract.at(change, parent, 1)
    if high.size:
        key = np.sort(high * np.int64(size) + low)
        row, column = key // size, key % size
        change[:size] += np.bincount(column, minlength=size)
        # each row ends with its diagonal entry, of which all others are descendants
        is_last = np.append(row[1:] != row[:-1], True)
        following = np.where(is_last, row, np.append(column[1:], 0))
        # nested entries are met where the second of them begins
        meeting = following.copy()
        apart = np.flatnonzero(first[following] > column)
        meeting[apart] = _lowest_common_ancestors(parent, column[apart], following[apart])
        change[:size] -= np.bincount(meeting, minlength=size)
    total = np.concatenate([[0], np.cumsum(change[:size])])
    return total[1:] - total[first]


def _lowest_common_ancestors(
    parent: NDArray[np.int64], a: NDArray[np.int64], b: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Lowest common ancestors of pairs a < b in postorder of which neither is the other's ancestor.

    The shallowest of the nodes from a to b is a child of it. Minima over stretches of powers of two are tabulated.
    """
    if a.size == 0:
        return a
    size = parent.size
    depth = _depths(parent)
    by_depth = np.argsort(depth, kind="stable")
    rank = np.empty(size, np.int32)
    rank[by_depth] = np.arange(size, dtype=np.int32)
    length = b - a + 1
    power = np.frexp(length.astype(float))[1] - 1
    result = np.empty(a.size, np.int32)
    for exponent in range(int(power.max()) + 1):
        here = np.flatnonzero(power == exponent)
        result[here] = np.minimum(rank[a[here]], rank[b[here] - 2**exponent + 1])
        rank = np.minimum(rank[: max(rank.size - 2**exponent, 0)], rank[2**exponent :])
    return parent[by_depth[result]]
