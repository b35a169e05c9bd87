"""Sparsity patterns as arrays: which seed elements each element of a value depends on.

A pattern of a value of shape ``s`` is an integer array of shape ``s + (k,)``: for each element the numbers of the seed
elements it may depend on, padded with ``-1``. Patterns are supersets of the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class DenseDependence:
    """Every element depends on (up to) every one of the seed elements ``ids``."""

    def __init__(self, ids: np.ndarray):
        self.ids = ids


Pattern = np.ndarray | DenseDependence

MAX_ENTRIES = 60_000_000
"""Entries of the largest pattern, 480 MB: a larger one becomes a :class:`DenseDependence`."""


def as_array(pattern: Pattern) -> np.ndarray:
    """The array of a pattern that has one.

    :raises TooLarge: for a dense one.
    """
    if isinstance(pattern, DenseDependence):
        raise TooLarge
    return pattern


class TooLarge(Exception):
    """A pattern would not fit; fall back to the dense superset."""


def ids_of(pattern: Pattern | None) -> np.ndarray:
    """The seed elements that occur in a pattern, sorted."""
    if pattern is None:
        return np.zeros((0,), np.int64)
    found = np.unique(pattern.ids if isinstance(pattern, DenseDependence) else pattern)
    return found[found >= 0]


def everything(patterns: Sequence[Pattern | None], shapes: Sequence[tuple[int, ...]]) -> list[Pattern]:
    """Patterns in which every element depends on all seed elements of some patterns."""
    ids = np.unique(np.concatenate([ids_of(p) for p in patterns])).astype(np.int64)
    out: list[Pattern] = []
    for shape in shapes:
        if int(np.prod(shape)) * max(ids.size, 1) > MAX_ENTRIES:
            out.append(DenseDependence(ids))
        else:
            out.append(np.broadcast_to(ids, (*shape, ids.size)))
    return out


def or_nothing(pattern: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A pattern, or that of a value of this shape that depends on nothing."""
    return np.full((*shape, 1), -1, np.int64) if pattern is None else pattern


def broadcast(pattern: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A pattern broadcast to a value of this shape."""
    return np.broadcast_to(pattern, (*shape, pattern.shape[-1]))


def check_size(size: float) -> None:
    """Refuse to make a pattern with more than :data:`MAX_ENTRIES` entries.

    :raises TooLarge: if it has more.
    """
    if size > MAX_ENTRIES:
        raise TooLarge


def merge(patterns: Sequence[np.ndarray]) -> np.ndarray:
    """The pattern of what depends on all that these depend on."""
    first = patterns[0]
    if all(p is first or (p.shape == first.shape and np.array_equal(p, first)) for p in patterns[1:]):
        return first
    width = sum(p.shape[-1] for p in patterns)
    check_size(np.prod(first.shape[:-1]) * width)
    return deduplicate(np.concatenate(patterns, axis=-1))


def _is_repeated(pattern: np.ndarray) -> bool:
    """True if all numbers on the last axis are the same."""
    return bool(np.all(pattern == pattern[..., :1]))


def deduplicate(pattern: np.ndarray) -> np.ndarray:
    """Keep one of equal numbers on the last axis, and pad with ``-1``."""
    if pattern.shape[-1] <= 1 or pattern.size == 0:
        return pattern
    if _is_repeated(pattern):
        return pattern[..., :1].copy()
    ordered = np.sort(pattern, axis=-1)
    repeated = np.zeros(ordered.shape, bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    ordered[repeated] = -1
    width = max(int((ordered >= 0).sum(-1).max()), 1)
    if width == ordered.shape[-1]:
        return ordered
    # descending order brings the padding to the end, where it can be cut off
    return np.sort(ordered, axis=-1)[..., ::-1][..., :width][..., ::-1].copy()


def same_width(patterns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The same patterns with as many entries per element."""
    width = max(p.shape[-1] for p in patterns)
    out = []
    for p in patterns:
        missing = width - p.shape[-1]
        out.append(np.concatenate([p, np.full((*p.shape[:-1], missing), -1, p.dtype)], -1) if missing else p)
    return out


def reduce_axes(pattern: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The pattern of a reduction over some axes."""
    kept = [i for i in range(pattern.ndim - 1) if i not in axes]
    moved = np.transpose(pattern, (*kept, *axes, pattern.ndim - 1))
    merged = moved.reshape(*(pattern.shape[i] for i in kept), -1)
    if not _is_repeated(merged):
        check_size(merged.size)
    return deduplicate(merged)


def cumulate(pattern: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    """The pattern of a cumulative operation along an axis."""
    length, width = pattern.shape[axis], pattern.shape[-1]
    check_size(pattern.size * length)
    moved = np.moveaxis(pattern, axis, -2)
    rows, columns = np.arange(length)[:, None], np.arange(length)[None, :]
    seen = columns >= rows if reverse else columns <= rows
    spread = np.where(seen[..., None], moved[..., None, :, :], -1)
    out = deduplicate(spread.reshape(*moved.shape[:-1], length * width))
    return np.moveaxis(out, -2, axis)
