"""Predicted times of fronts, and sizes that are padded so that fronts share batches."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

# Seconds of a front, of each of its numbers, and of each multiplication and addition, as measured: a supernode joins
# its parent where that saves time.
_PER_FRONT, _PER_NUMBER, _PER_FLOP = 1.5e-6, 5e-9, 3e-10
# Rows below a column without children, up to which it is best eliminated on its own; and where all but one of them are
# those of dense columns, which stand in the front of its parent as well. Others, as nodes of a grid, add more to their
# parents than that saves.
_MOST_ROWS_OF_LEAF, _MOST_ROWS_BESIDE_DENSE = 3, 6
# Seconds of the calls that a batch takes, and of those for each column that its fronts have, as measured: fronts of one
# height share a batch where that saves time.
_PER_BATCH, _PER_COLUMN = 5e-5, 1.5e-6
# Larger fronts are eliminated one by one.
LARGEST_BATCHED = 96


def seconds_of_front(own: int, below: int) -> float:
    """Predicted time of a front: its factorisation, and what it adds to its parent."""
    flops = own**3 / 3 + own * own * below + own * below * below
    return _PER_FRONT + _PER_NUMBER * (own + below) ** 2 + _PER_FLOP * flops


def seconds_of_leaf(own: int, below: int, dense: int) -> float:
    """The same of a front without children: next to nothing of one column and few rows, as of the noise of an area.

    All of these are eliminated by one product, and what is left has half the unknowns.

    :param dense: rows below that are those of dense columns, as of coefficients that all areas see.
    """
    most = max(_MOST_ROWS_OF_LEAF, min(1 + dense, _MOST_ROWS_BESIDE_DENSE))
    return 0.0 if own == 1 and below <= most else seconds_of_front(own, below)


def share_sizes(
    height: NDArray[np.int64], own: NDArray[np.int64], below: NDArray[np.int64], small: NDArray[np.int64]
) -> None:
    """Pad fronts of one height to sizes of others, in place, where one batch takes less time than two.

    :param small: the fronts that are eliminated together.
    """
    kinds, kind, counts = np.unique(
        np.stack([height[small], own[small], below[small]]), axis=1, return_inverse=True, return_counts=True
    )
    found = np.empty((2, counts.size), np.int64)
    level_of = 2 * kinds[0] + (kinds[2] > 0)  # a root hands nothing on
    by_size = np.lexsort((kinds[1], kinds[1] + kinds[2], level_of))
    cuts = np.flatnonzero(np.diff(level_of[by_size])) + 1
    for level in np.split(by_size, cuts):
        groups = [(int(kinds[1, k]), int(kinds[2, k]), int(counts[k]), [int(k)]) for k in level]
        while len(groups) > 1:
            pairs = [_joined(first, second) for first, second in itertools.pairwise(groups)]
            gains = [
                _batch_seconds(*a[:3]) + _batch_seconds(*b[:3]) - _batch_seconds(*joined[:3])
                for a, b, joined in zip(groups, groups[1:], pairs, strict=False)
            ]
            best = int(np.argmax(gains))
            if gains[best] <= 0.0:
                break
            groups[best : best + 2] = [pairs[best]]
        for columns, rows, _, members in groups:
            found[:, members] = np.array([[columns], [rows]])
    own[small], below[small] = found[:, kind.reshape(-1)]


_Group = tuple[int, int, int, list[int]]


def _joined(first: _Group, second: _Group) -> _Group:
    return max(first[0], second[0]), max(first[1], second[1]), first[2] + second[2], first[3] + second[3]


def _batch_seconds(own: int, below: int, number: int) -> float:
    """Predicted time of a batch of fronts of one size; none is as large as those that are eliminated one by one."""
    if own + below > LARGEST_BATCHED:
        return math.inf
    return _PER_BATCH + _PER_COLUMN * own + number * seconds_of_front(own, below)
