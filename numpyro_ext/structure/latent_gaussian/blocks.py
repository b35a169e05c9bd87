"""Independent groups of rows and columns: the plates of a model, found from the sparsity of its design."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components

from ...linalg.padding import padded_groups, rounded_up

_CHEAP = 0.1
"""Share of the operations of the joint that blocks of very different sizes may spend on padding."""
_MOST_PADDED = 1_000_000
"""Rows, with those of padding, up to which that is looked at."""


def find_blocks(
    pattern: np.ndarray | None,
    num_rows: int,
    num_columns: int,
    coupled: Sequence[tuple[int, int, int]],
    factor: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Partition rows and columns so that blocks share neither a factor nor a prior.

    :param pattern: columns of each row, ``(num_rows, k)`` padded with ``-1``; None where all rows touch all columns.
    :param coupled: for each prior block with correlations ``(start, batch, width)``: consecutive runs of columns.
    :param factor: number of the factor that each row belongs to, shape ``(num_rows,)``; by default each is one.
    :return: ``rows`` and ``columns`` of shape ``(num_blocks, ...)``, padded one past the end. A partition that would
        cost more than no partition (few large blocks among many small ones) is not used.
    """
    single = np.arange(num_rows)[None, :], np.arange(num_columns)[None, :]
    if pattern is None or num_columns <= 1 or num_rows == 0:
        return single
    # correlated unknowns are one node of the graph, and the others of their run have none
    unit = units(num_columns, coupled)
    rows, slots = np.nonzero(pattern >= 0)
    size = num_rows + num_columns
    edges = rows, num_rows + unit[pattern[rows, slots]]
    graph = scipy.sparse.coo_matrix((np.ones(rows.size, np.int8), edges), (size, size))
    label = connected_components(graph, directed=False)[1]
    column_label = label[num_rows:][unit]
    is_used = np.bincount(column_label, minlength=size) > 0
    num_blocks = int(is_used.sum())
    if num_blocks == 1:
        return single
    # a row without columns joins the other rows of its factor, whose value may stand on it; else any block will do
    factor = np.arange(num_rows) if factor is None else factor
    has_columns = (pattern >= 0).any(axis=1)
    of_factor = np.full(int(factor[-1]) + 1, column_label[0])
    of_factor[factor[has_columns]] = label[:num_rows][has_columns]
    row_label = np.where(has_columns, label[:num_rows], of_factor[factor])
    number = np.cumsum(is_used, dtype=np.int32) - 1
    column_blocks = group(number[column_label], num_blocks, num_columns)
    row_blocks = group(number[row_label], num_blocks, num_rows, other_width=column_blocks.shape[1])
    inner = min(row_blocks.shape[1], column_blocks.shape[1])
    whole = min(num_rows, num_columns)
    # padding costs memory and a few operations an entry: much of it pays only where the joint is much dearer
    padded, joint = row_blocks.size, float(whole) ** 3
    is_cheap = padded <= _MOST_PADDED and padded * float(inner) ** 2 <= _CHEAP * joint
    if num_blocks * float(inner) ** 3 >= joint or (padded > 4 * num_rows + 64 and not is_cheap):
        return single
    return row_blocks, column_blocks


def units(num_columns: int, coupled: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """The first column of the correlated run that each column is in, itself where it is in none.

    :param coupled: for each prior block with correlations ``(start, batch, width)``: consecutive runs of columns.
    """
    unit = np.arange(num_columns, dtype=np.int32)
    for start, batch, width in coupled:
        unit[start : start + batch * width] = start + np.repeat(np.arange(batch, dtype=np.int32) * width, width)
    return unit


def group(label: np.ndarray, num_groups: int, fill: int, *, other_width: int | None = None) -> np.ndarray:
    """Indices by label, ``(num_groups, ...)`` padded with ``fill``."""
    counts = np.bincount(label, minlength=num_groups)
    width = max(int(counts.max(initial=0)), 1)
    if other_width is not None and np.any(counts != width):
        width = _widened(width, other_width)
    return padded_groups(label, num_groups, fill, width=width)


def _widened(width: int, other_width: int) -> int:
    """A width of padded groups by up to a quarter larger, so that other groups, as of a bootstrap, have the same.

    The shorter side of a block stays the shorter one: the algebra is done there.
    """
    rounded = rounded_up(width, digits=3)
    return min(rounded, other_width) if width <= other_width else rounded
