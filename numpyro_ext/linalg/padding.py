"""Groups of unequal sizes in arrays of few shapes: sizes rounded up, places within groups, levels that cost least."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array


def rounded_up(number: int, digits: int = 4) -> int:
    """The next number with at most so many binary digits before its zeros, so that data of similar sizes share shapes.

    :param int number: from zero.
    :param int digits: from one; with four of them a number grows by at most an eighth, with three by a quarter.

    **Example:**

    >>> [rounded_up(number) for number in (7, 15, 17, 100, 1000)]
    [7, 15, 18, 104, 1024]
    """
    step = 1 << max(int(number).bit_length() - digits, 0)
    return -(-int(number) // step) * step


def chunked(rows: Array, num_chunks: int, length: int, **fill: Any) -> Array:
    """Rows in chunks of one length, the last of which is filled up, by zeros if nothing else is said.

    :param rows: shape ``(n, ...)``.
    :param int num_chunks: as many as hold all rows.
    :param fill: options of ``jnp.pad``, such as ``mode="edge"`` for copies of the last row.
    :return: shape ``(num_chunks, length, ...)``.

    >>> print(chunked(jnp.arange(5), 2, 3))
    [[0 1 2]
     [3 4 0]]
    """
    padding = [(0, num_chunks * length - rows.shape[0])] + [(0, 0)] * (rows.ndim - 1)
    return jnp.pad(rows, padding, **fill).reshape(num_chunks, length, *rows.shape[1:])


def places_within(label: np.ndarray, num_groups: int) -> np.ndarray:
    """Place of each element among those of its group, in their order.

    :param label: the group of each element, in ``0, ..., num_groups - 1``, shape ``(n,)``.
    :param int num_groups: number of groups.

    **Example:**

    >>> print(places_within(np.array([2, 0, 2, 2, 0]), 3))
    [0 0 1 2 1]
    """
    order, counts = np.argsort(label, kind="stable"), np.bincount(label, minlength=num_groups)
    places = np.empty(len(label), np.int64)
    places[order] = np.arange(len(label)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def padded_groups(
    label: np.ndarray, num_groups: int, fill: int, *, members: np.ndarray | None = None, width: int | None = None
) -> np.ndarray:
    """The members of each group side by side, shape ``(num_groups, width)``.

    :param label: the group of each member, shape ``(n,)``.
    :param int num_groups: number of groups.
    :param int fill: what stands where a group has no more members.
    :param members: integers; by default ``0, ..., n - 1``.
    :param int width: at least the size of the largest group, which it is by default.

    **Example:**

    >>> print(padded_groups(np.array([1, 0, 1]), 2, 3))
    [[1 3]
     [0 2]]
    """
    if width is None:
        width = int(np.bincount(label, minlength=num_groups).max(initial=0))
    out = np.full((num_groups, width), fill)
    out[label, places_within(label, num_groups)] = np.arange(len(label)) if members is None else members
    return out


def cheapest_levels(cost: np.ndarray, most: int) -> np.ndarray:
    """Cut an ordered list into at most so many runs of least total cost.

    :param cost: that of a run from one element to another, both included, shape ``(n, n)``; only what is on and above
        the diagonal counts.
    :param int most: number of runs at most, from one.
    :return: the number of the run that each element is in, from zero, shape ``(n,)``.

    Cost: ``most * n**2`` operations.

    **Example:** three sizes, each padded to the largest of its run:

    >>> sizes = np.array([1.0, 2.0, 9.0])
    >>> cost = (1 + np.arange(3) - np.arange(3)[:, None]) * sizes**3
    >>> print(cheapest_levels(cost, 2))
    [0 0 1]
    """
    last = np.arange(len(cost))
    if not last.size:
        return last
    cost = np.where(last >= last[:, None], cost, np.inf)
    # the least cost of all elements up to the last one by so many runs, and where the last of these begins
    least, begins = cost[0], [np.zeros(last.size, int)]
    for _ in range(most - 1):
        split = np.concatenate([cost[:1], least[:-1, None] + cost[1:]])
        begins.append(np.argmin(split, axis=0))
        least = split[begins[-1], last]
    level, end = np.zeros(last.size, int), last.size
    for begin in reversed(begins):
        start = begin[end - 1]
        level[:start] -= 1
        end = start
        if not start:
            break
    level -= level[0]
    return level
