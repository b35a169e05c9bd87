"""A few unknowns that many rows share, given which the others fall into small blocks: found by counting operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components

from ...linalg.padding import padded_groups, places_within, rounded_up
from ..program.rows.affine_rows import AffineRows
from .blocks import group, units
from .prior_columns import PriorColumns

_SCATTER_COST = 32
"""Multiply-adds of a matrix product that cost as much as a scattered update."""
_LEAST_LISTED = 8
"""Unknowns of a border over those that a block meets at most, from which on the latter are listed."""
_LARGEST_BORDER = 50_000_000
"""Numbers of the largest matrix of rows, or of blocks, with the unknowns of the border, 400 MB."""


class BorderIndices(NamedTuple):
    """The arrays of a :class:`~numpyro_ext.linalg.gaussian.spaces.border_space.Border`."""

    columns: np.ndarray
    shared: np.ndarray
    slots: np.ndarray
    shared_slots: np.ndarray | None
    met: np.ndarray | None
    listed: np.ndarray | None


def find_border(
    pattern: np.ndarray | None,
    rows: AffineRows,
    priors: PriorColumns,
    blocks: tuple[np.ndarray, np.ndarray],
    touched_cost: float | None = None,
    *,
    overhead: float,
    are_sites_held: bool = False,
) -> BorderIndices | None:
    """The border with which a factorisation is the cheapest, if it costs much less than without.

    Tried are the unknowns that more rows touch than a threshold, for all thresholds, and whole sites, the smallest
    first: common coefficients, and of crossed or nested effects those of fewer groups.

    :param pattern: columns of each row, ``(num_rows, k)`` padded with ``-1``; ``None`` if it is not known.
    :param rows: predictors.
    :param priors: those of the sites of the field. Inducing values of sites of low rank are in every border.
    :param blocks: independent rows and columns, as :func:`~.blocks.find_blocks` finds them.
    :param touched_cost: multiplications where only what rows touch of the blocks is kept, if that can be done.
    :param overhead: operations below which nothing is gained.
    :param are_sites_held: sums over rows are made once, for many factorisations, and variances are not asked for.
    :return: its arrays, or None.
    """
    if pattern is None or rows.is_dense:
        return None
    num_columns = rows.num_columns
    coupled, inducing = priors.coupled(given_inducing=True), priors.inducing()
    num_inducing = sum(batch * rank for batch, rank in inducing)
    cost = len(blocks[0]) * float(min(blocks[0].shape[1], blocks[1].shape[1])) ** 3
    if touched_cost is not None:  # the cheaper of two ways that both take few unknowns at a time
        cost = 4.0 * touched_cost
    if not coupled and not inducing:
        cost = min(cost, num_columns * float(rows.bandwidth + 1) ** 2)
    if cost <= overhead:
        return None
    unit = units(num_columns, coupled)
    num_rows = pattern.shape[0]
    num_summed = 0 if are_sites_held else num_rows
    # without a border the pairs of entries are added to one matrix
    cost += num_summed * min(_SCATTER_COST * float(pattern.shape[1]) ** 2, float(num_columns) ** 2)
    best, least = None, (cost - overhead) / 3.0
    for is_shared, rest in _candidates(pattern, unit, priors.sites):
        size = int(is_shared.sum()) + num_inducing
        # coefficients in whitened unknowns change with the prior, so their sums are made again
        by_matrix = num_rows * float(size) ** 2 if num_rows * size <= _LARGEST_BORDER else np.inf
        seen = int(((pattern >= 0) & is_shared[pattern]).sum(axis=1).max(initial=0))
        by_entries = np.inf if num_inducing else float(size) ** 3 + num_summed * _SCATTER_COST * float(seen) ** 2
        if float(size) ** 3 + min(by_matrix, by_entries) >= least:
            continue
        label = _components(rest, unit, is_shared)
        width, num_blocks = int(np.bincount(label).max(initial=0)), int(label.max(initial=-1)) + 1
        entries = int((rest >= 0).sum(axis=1).max(initial=1))
        by_matrix += num_rows * _SCATTER_COST * entries * (entries + size)
        by_entries += num_summed * _SCATTER_COST * entries * (entries + seen)
        if not are_sites_held:  # variances take a second product of the blocks with the border
            is_small = num_blocks * width * size <= _LARGEST_BORDER
            by_entries += num_blocks * float(width) * size**2 if is_small else np.inf
        found = float(size) ** 3 + min(by_matrix, by_entries) + num_blocks * float(width) * (width + size) ** 2
        if num_blocks > 1 and found < least:
            best, least = (is_shared, label, by_entries < by_matrix), found
    if best is None:
        return None
    is_shared, label, is_wide = best
    shared, local = np.flatnonzero(is_shared), np.flatnonzero(~is_shared)
    slots = _slots((pattern >= 0) & ~is_shared[pattern])
    shared_slots = _slots((pattern >= 0) & is_shared[pattern]) if is_wide else None
    num_blocks = int(label.max()) + 1
    met = listed = None
    if shared_slots is not None:
        owner = np.full(num_columns + 1, -1)
        owner[local] = label
        met, listed = _met(np.column_stack([pattern, np.full(num_rows, -1)]), owner, slots, shared_slots, unit, shared)
    columns = np.append(local, num_columns + num_inducing)[group(label, num_blocks, local.size)]
    shared = np.append(shared, num_columns + np.arange(num_inducing))
    return BorderIndices(columns.astype(np.int32), shared.astype(np.int32), slots, shared_slots, met, listed)


def _met(
    pattern: np.ndarray,
    blocks: np.ndarray,
    slots: np.ndarray,
    shared_slots: np.ndarray,
    unit: np.ndarray,
    shared: np.ndarray,
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Unknowns of the border that each block meets, ascending, and the places of the entries of rows there; none if
    they are many.

    :param pattern: with a last column of ``-1``, where the slots of no entry lead.
    :param blocks: of each column, ``-1`` for those of the border and behind the last.
    """
    rows = np.arange(len(pattern))[:, None]
    block, column = blocks[pattern[rows, slots[:, :1]]], pattern[rows, shared_slots]
    is_met = (block >= 0) & (column >= 0)
    # what the prior couples is met together
    heads, members = np.unique(unit[shared], return_inverse=True)
    by_head, sizes = np.argsort(members, kind="stable"), np.bincount(members)
    place = np.full(unit.size + 1, -1)
    place[shared] = np.arange(shared.size)
    pairs = np.unique((block * heads.size + members[place[column]])[is_met])
    label, head = np.divmod(pairs, heads.size)
    repeats = sizes[head]
    starts = np.repeat(np.cumsum(sizes)[head] - repeats, repeats)
    within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    label, found = np.repeat(label, repeats), by_head[starts + within]
    order = np.argsort(label * shared.size + found)
    label, found = label[order], found[order]
    num_blocks = int(blocks.max()) + 1
    width = rounded_up(int(np.bincount(label, minlength=num_blocks).max(initial=1)))
    if shared.size < _LEAST_LISTED * width:
        return None, None
    met = padded_groups(label, num_blocks, shared.size, members=found, width=width)
    codes = label * shared.size + found
    wanted = np.where(is_met, block * shared.size + place[column], codes[:1])
    listed = places_within(label, num_blocks)[np.searchsorted(codes, wanted)]
    return met.astype(np.int32), np.where(is_met, listed, 0).astype(np.int32)


def _slots(is_entry: np.ndarray) -> np.ndarray:
    """Places of some entries in each row, padded with the number of entries of a row."""
    entries = max(int(is_entry.sum(axis=1).max(initial=0)), 1)
    order = np.argsort(~is_entry, axis=1, kind="stable")[:, :entries]
    slots: np.ndarray = np.where(np.take_along_axis(is_entry, order, axis=1), order, is_entry.shape[1])
    return slots.astype(np.int32)


def _candidates(
    pattern: np.ndarray, unit: np.ndarray, sites: Sequence[tuple[int, int]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Columns that may be the border, and the rest of the pattern, ``-1`` in their places."""
    num_rows, num_columns = pattern.shape[0], unit.size
    touched = np.bincount(unit[pattern[pattern >= 0]], minlength=num_columns)[unit]
    seen: set[bytes] = set()
    marks = [touched > num_rows * 0.5**power for power in range(int(np.log2(max(num_rows, 2))) + 1)]
    dense = marks[0]
    chosen = np.zeros(num_columns, bool)
    for start, size in sorted(sites, key=lambda site: site[1]):
        chosen = chosen.copy()
        chosen[start : start + size] = True
        marks.append(chosen | dense)
    if not dense.any():
        marks.append(np.zeros(num_columns, bool))
    # what half of the rows touch is in every border: without it the rows are short
    left = np.where((pattern >= 0) & ~dense[pattern], pattern, -1)
    width = max(int((left >= 0).sum(axis=1).max(initial=0)), 1)
    if width < left.shape[1]:
        left = -np.sort(-left, axis=1)[:, :width]
    for mark in sorted(marks, key=np.count_nonzero):
        if mark.tobytes() not in seen and not mark.all():
            seen.add(mark.tobytes())
            yield mark, np.where((left >= 0) & ~mark[left], left, -1)


def _components(rest: np.ndarray, unit: np.ndarray, is_shared: np.ndarray) -> np.ndarray:
    """The block of each column that is not in the border."""
    columns = np.flatnonzero(~is_shared)
    first = rest.max(axis=1, initial=-1)
    rows, slots = np.nonzero((rest >= 0) & (rest != first[:, None]))
    heads = np.concatenate([first[rows], columns])
    tails = np.concatenate([rest[rows, slots], unit[columns]])
    graph = scipy.sparse.coo_matrix((np.ones(heads.size, np.int8), (heads, tails)), (unit.size, unit.size))
    label = connected_components(graph.tocsr(), directed=False)[1][columns]
    return np.unique(label, return_inverse=True)[1]
