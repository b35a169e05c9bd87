"""Symbolic factorisation: supernodes, the rows of their fronts, and batches of fronts that are eliminated together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .elimination_tree import EliminationTree
from .front_times import LARGEST_BATCHED, seconds_of_front, seconds_of_leaf, share_sizes
from .pattern import SparsePattern

# NumPy takes elements by these as they are, and converts others each time.
Indices = NDArray[np.intp]

# Fronts are padded to the next of these sizes, and of all others to nothing.
_PADDED = np.array([1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64])
# So many numbers of a batch stay in the cache.
_NUMBERS_IN_BATCH = 2**17
# Up to so many places of Schur complements in the fronts of parents are kept; beyond, they are found each time.
_MOST_PLACES = 2**20


class Children(NamedTuple):
    """Fronts of one batch whose parents are in another: their Schur complements are added there."""

    batch: int
    start: int
    stop: int
    parents: Indices
    """Place of each parent in its batch, shape (stop - start,)."""
    is_last: bool
    """True if no later batch has children in that batch."""
    places: Indices | None = None
    """Places of all pairs of rows below in the fronts of the parents, shape (stop - start, B, B), where few."""

    @property
    def nbytes(self) -> int:
        """Bytes of the indices."""
        return self.parents.nbytes + (0 if self.places is None else self.places.nbytes)

    def find_places(self, in_parent: Indices, width: int) -> Indices:
        """The places, for parents whose fronts have so many rows.

        :param in_parent: of the batch of the children.
        """
        place = in_parent[self.start : self.stop]
        down = (self.parents[:, None] * width + place) * width
        return down[:, :, None] + place[:, None, :]


class Batch(NamedTuple):
    """Fronts of m supernodes of one height in the tree, each padded to K own columns and B rows below.

    Padding in ``columns`` and ``rows`` is n, one past the last column.
    """

    columns: Indices
    """Own columns, shape (m, K)."""
    rows: Indices
    """Rows below, shape (m, B)."""
    in_parent: Indices
    """Place of each row below in the front of the parent, shape (m, B); 0 in the padding."""
    entries: Indices
    """Entries of the matrix that the fronts begin with, as indices of its values."""
    places: Indices
    """Their places in the fronts, which are an array of shape (m, K + B, K + B)."""
    padding: Indices
    """Places of the diagonal of padded columns."""
    children: tuple[Children, ...]
    is_large: bool
    """True if the fronts are eliminated one by one: none of them has padding."""
    shape: tuple[int, int, int]
    """Fronts, their own columns, their rows below."""
    start: int
    """Start of the factor of this batch in the flat array of all."""
    stop: int
    """End of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the indices."""
        own = sum(a.nbytes for a in self if isinstance(a, np.ndarray))
        return own + sum(child.nbytes for child in self.children)


class _Supernodes(NamedTuple):
    first: NDArray[np.int64]
    """First own column of each supernode, and n."""
    parent: NDArray[np.int64]
    """Parent of each, their number for roots."""
    below: NDArray[np.int64]
    """Rows below of each."""

    @property
    def number(self) -> int:
        return int(self.parent.size)

    @property
    def own(self) -> NDArray[np.int64]:
        return np.diff(self.first)


def make_batches(
    pattern: SparsePattern, order: NDArray[np.int64], tree: EliminationTree
) -> tuple[NDArray[np.int64], list[Batch]]:
    """Order of elimination that keeps the columns of a supernode together, and the batches from leaves to roots."""
    nodes, renumbering = _relaxed_supernodes(tree, _dense_neighbours(pattern)[order])
    order = order[renumbering]
    size = pattern.size
    position = np.empty(size, np.int64)
    position[order] = np.arange(size)
    i, j = position[pattern.rows], position[pattern.columns]
    high, low = np.maximum(i, j), np.minimum(i, j)
    owner = np.repeat(np.arange(nodes.number), nodes.own)
    height = _heights(nodes.parent)
    rows, pointer = _rows_below(size, nodes, owner, height, high, low)
    return order, _batches(size, nodes, owner, height, rows, pointer, high, low)


def _relaxed_supernodes(tree: EliminationTree, dense: NDArray[np.int64]) -> tuple[_Supernodes, NDArray[np.int64]]:
    """:param dense: number of dense columns that each column meets."""
    size = tree.parent.size
    follows = (tree.parent[:-1] == np.arange(1, size)) & (tree.counts[:-1] == tree.counts[1:] + 1)
    start = np.flatnonzero(np.append(True, ~follows))
    last = np.append(start[1:], size) - 1
    number = start.size
    owner = np.repeat(np.arange(number), np.diff(np.append(start, size)))
    parent = np.append(owner, number)[tree.parent[last]].tolist()
    below = (tree.counts[last] - 1).tolist()
    own = (last - start + 1).tolist()
    has_children = np.zeros(number + 1, bool)
    has_children[parent] = True
    seconds = [
        seconds_of_front(k, b) if is_parent else seconds_of_leaf(k, b, d)
        for k, b, d, is_parent in zip(own, below, dense[last].tolist(), has_children.tolist(), strict=False)
    ]
    into = list(range(number))
    for node in range(number):  # children come before parents, so their own columns are known
        above = parent[node]
        if above == number:
            continue
        joined = seconds_of_front(own[node] + own[above], below[above])
        if joined <= seconds[node] + seconds[above]:
            into[node] = above
            own[above] += own[node]
            seconds[above] = joined
    for node in range(number - 1, -1, -1):
        into[node] = into[into[node]]
    merged = np.asarray(into)
    kept, new = np.unique(merged, return_inverse=True)
    new_owner = new[owner]
    renumbering = np.argsort(new_owner, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(new_owner, minlength=kept.size))])
    above = np.asarray(parent)[kept]
    new_parent = np.append(new, kept.size)[above]
    return _Supernodes(first, new_parent, np.asarray(below)[kept]), renumbering


def _dense_neighbours(pattern: SparsePattern) -> NDArray[np.int64]:
    """Number of dense columns that each column meets."""
    is_dense, found = pattern.dense_columns, np.zeros(pattern.size, np.int64)
    for one, other in ((pattern.rows, pattern.columns), (pattern.columns, pattern.rows)):
        found += np.bincount(one[is_dense[other]], minlength=pattern.size)
    return found


def _heights(parent: NDArray[np.int64]) -> NDArray[np.int64]:
    height = [0] * (parent.size + 1)
    for node, above in enumerate(parent.tolist()):
        if height[above] <= height[node]:
            height[above] = height[node] + 1
    return np.asarray(height[:-1])


def _rows_below(
    size: int,
    nodes: _Supernodes,
    owner: NDArray[np.int64],
    height: NDArray[np.int64],
    high: NDArray[np.int64],
    low: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows below of all supernodes, sorted, one supernode after the other; and where each begins.

    They are those of the matrix in its columns, and those of its children that are none of its columns.
    """
    apart = owner[high] != owner[low]
    keys = np.unique(owner[low[apart]] * np.int64(size) + high[apart])
    by_height = np.argsort(height[keys // size], kind="stable")
    keys = keys[by_height]
    ends = np.searchsorted(height[keys // size], np.arange(height.max() + 2))
    # what children pass on, by the height of the parent that gets it
    passed: list[list[NDArray[np.int64]]] = [[] for _ in range(int(height.max()) + 1)]
    found = []
    for level, waiting in enumerate(passed):
        here = np.unique(np.concatenate([keys[ends[level] : ends[level + 1]], *waiting]))
        waiting.clear()
        found.append(here)
        node, row = here // size, here % size
        above = nodes.parent[node]
        on = owner[row] != above
        above, row = above[on], row[on]
        if above.size == 0:
            continue
        heights = height[above]
        lowest, highest = int(heights.min()), int(heights.max())
        sent = above * np.int64(size) + row
        if lowest == highest:
            passed[lowest].append(sent)
            continue
        by = np.argsort(heights, kind="stable")
        sent, cuts = sent[by], np.searchsorted(heights[by], np.arange(lowest, highest + 2))
        for k in range(highest - lowest + 1):
            if cuts[k] < cuts[k + 1]:
                passed[lowest + k].append(sent[cuts[k] : cuts[k + 1]])
    all_keys = np.sort(np.concatenate(found))
    return all_keys % size, np.searchsorted(all_keys, np.arange(nodes.number + 1) * np.int64(size))


def _padded(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(sizes <= _PADDED[-1], np.append(_PADDED, 0)[np.searchsorted(_PADDED, sizes)], sizes)


def _batches(
    size: int,
    nodes: _Supernodes,
    owner: NDArray[np.int64],
    height: NDArray[np.int64],
    rows: NDArray[np.int64],
    pointer: NDArray[np.int64],
    high: NDArray[np.int64],
    low: NDArray[np.int64],
) -> list[Batch]:
    own, below, number = nodes.own, np.diff(pointer), nodes.number
    is_small = own + below <= LARGEST_BATCHED
    padded_own = np.where(is_small, _padded(own), own)
    padded_below = np.where(is_small & (below > 0), _padded(below), below)
    share_sizes(height, padded_own, padded_below, np.flatnonzero(is_small))
    front = padded_own + padded_below
    batch, slot = _assign(height, padded_own, padded_below, nodes.parent)
    members = np.lexsort((slot, batch))
    cuts = np.searchsorted(batch[members], np.arange(batch.max() + 2))
    of_row = np.repeat(np.arange(number), below)
    keys = of_row * np.int64(size) + rows

    def place_below(node: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the fronts of nodes of rows below them."""
        found: NDArray[np.int64] = padded_own[node] + np.searchsorted(keys, node * np.int64(size) + row) - pointer[node]
        return found

    above = np.append(nodes.parent, number)[of_row]
    in_parents = np.where(owner[rows] == above, rows - nodes.first[above], place_below(above, rows))
    # places of the entries of the matrix
    node = owner[low]
    local = high - nodes.first[node]
    apart = np.flatnonzero(owner[high] != node)
    local[apart] = place_below(node[apart], high[apart])
    places = (slot[node] * front[node] + local) * front[node] + low - nodes.first[node]
    by_batch = np.argsort(batch[node], kind="stable")
    entry_cuts = np.searchsorted(batch[node][by_batch], np.arange(batch.max() + 2))
    children: list[list[Children]] = [[] for _ in range(int(batch.max()) + 1)]
    result, start = [], 0
    for b in range(int(batch.max()) + 1):
        ids = members[cuts[b] : cuts[b + 1]]
        m, k, r = ids.size, int(padded_own[ids[0]]), int(padded_below[ids[0]])
        steps = np.arange(k)
        is_column = steps < own[ids][:, None]
        columns = np.where(is_column, nodes.first[ids][:, None] + steps, size)
        steps = np.arange(r)
        is_row = steps < below[ids][:, None]
        index = np.where(is_row, pointer[ids][:, None] + steps, 0)
        below_rows = np.where(is_row, rows[index], size) if r else np.zeros((m, 0))
        in_parent = np.where(is_row, in_parents[index], 0) if r else np.zeros((m, 0))
        fronts, column = np.nonzero(~is_column)
        chosen = by_batch[entry_cuts[b] : entry_cuts[b + 1]]
        result.append(
            Batch(
                columns,
                below_rows.astype(np.intp),
                in_parent.astype(np.intp),
                chosen,
                places[chosen],
                (fronts * (k + r) + column) * (k + r) + column,
                tuple(children[b]),
                not np.any(is_small[ids]),
                (m, k, r),
                start,
                start + m * k * (k + r),
            )
        )
        start = result[-1].stop
        if r:
            _hand_on(children, b, batch, slot, nodes.parent[ids])
    return _with_places(_with_last_uses(result))


def _with_last_uses(batches: list[Batch]) -> list[Batch]:
    """The batches with notes where a batch is a child for the last time."""
    seen: set[int] = set()
    result = list(batches)
    for b in range(len(result) - 1, -1, -1):
        noted = tuple(c._replace(is_last=c.batch not in seen) for c in result[b].children)
        # of several in one batch the last, since they are added in order
        latest = {c.batch: k for k, c in enumerate(noted)}
        noted = tuple(c._replace(is_last=c.is_last and latest[c.batch] == k) for k, c in enumerate(noted))
        seen.update(latest)
        result[b] = result[b]._replace(children=noted)
    return result


def _with_places(batches: list[Batch]) -> list[Batch]:
    """The batches with the places of what is added to parents, where these are few."""
    if sum(batch.rows.size * batch.rows.shape[1] for batch in batches if not batch.is_large) > _MOST_PLACES:
        return batches
    result = []
    for batch in batches:
        width = sum(batch.shape[1:])
        children = [
            child
            if (source := batches[child.batch]).is_large
            else child._replace(places=child.find_places(source.in_parent, width))
            for child in batch.children
        ]
        result.append(batch._replace(children=tuple(children)))
    return result


def _assign(
    height: NDArray[np.int64], own: NDArray[np.int64], below: NDArray[np.int64], parent: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Batch of each supernode and its place in it: one height and one size, as many as stay in the cache."""
    number = height.size
    order = np.lexsort((parent, below, own, height))
    kind = np.stack([height, own, below])[:, order]
    begins = np.append(True, np.any(kind[:, 1:] != kind[:, :-1], axis=0))
    start = np.flatnonzero(begins)
    group = np.cumsum(begins) - 1
    within = np.arange(number) - start[group]
    most = np.maximum(1, _NUMBERS_IN_BATCH // (own + below) ** 2)[order]
    chunk = within // most
    is_new = begins | np.append(False, chunk[1:] != chunk[:-1])
    batch, slot = np.empty(number, np.int64), np.empty(number, np.int64)
    batch[order] = np.cumsum(is_new) - 1
    # those whose parents share a batch are next to each other, so that what they pass on is added at once
    order = np.lexsort((parent, np.append(batch, number)[parent], batch))
    slot[order] = np.arange(number) - np.searchsorted(batch[order], batch[order])
    return batch, slot


def _hand_on(
    children: list[list[Children]],
    here: int,
    batch: NDArray[np.int64],
    slot: NDArray[np.int64],
    above: NDArray[np.int64],
) -> None:
    """Note for the batches of the parents which of the fronts here are their children."""
    target = batch[above]
    cuts = np.flatnonzero(np.append(True, target[1:] != target[:-1]))
    for first, last in zip(cuts, np.append(cuts[1:], target.size), strict=True):
        children[int(target[first])].append(
            Children(here, int(first), int(last), slot[above[first:last]].astype(np.intp), False)
        )
