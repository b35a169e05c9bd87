"""Checks of what users give: counts, indices and numbers, refused with the first offender."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np


def checked_count(count: object, what: str, name: str, least: int = 1) -> int:
    """A whole number of at least ``least``.

    :raises ValueError: if it is anything else.
    """
    try:
        found = operator.index(np.asarray(count)[()])
    except (TypeError, ValueError):
        found = None
    if found is None or found < least:
        raise ValueError(f"{name}: {what} must be a whole number, {least} or more; got {count!r}.")
    return found


def whole_numbers(indices: object, name: str, what: str) -> np.ndarray:
    """Indices as integers; floating-point numbers are refused, whole or not.

    :raises ValueError: if they are traced, or not integers; the message names the first.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(indices)):
        raise ValueError(f"{name}: {what} are traced; they must be known. Make them with NumPy, outside of jit.")
    array = np.asarray(indices)
    if array.dtype == object:  # columns of pandas of several kinds
        array = np.array(array.tolist())
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        flat = np.ravel(array)
        # a missing value, which is not equal to itself, is not whole either
        k = int(np.argmax(flat != np.floor(flat))) if array.dtype.kind == "f" else 0
        place = tuple(int(i) for i in np.unravel_index(k, array.shape))
        found = flat.tolist()[k]
        raise ValueError(
            f"{name}: {what} must be integers; {found!r} at {place} is of type {array.dtype}. If they are whole "
            "numbers, convert them with .astype(int); labels become numbers by np.unique(labels, return_inverse=True)."
        )
    return array.astype(np.int64)


def checked_indices(indices: object, size: int, name: str, what: str) -> np.ndarray:
    """Pairs of indices below ``size``, shape ``(entries, 2)``.

    :raises ValueError: if they have another shape, are no integers or are out of range; the message names the first.
    """
    pairs = whole_numbers(indices, name, what)
    if pairs.size == 0:
        return pairs.reshape(0, 2)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"{name}: {what} must be pairs, shape (number, 2); got {pairs.shape}.")
    outside = np.any((pairs < 0) | (pairs >= size), axis=1)
    if np.any(outside):
        row = int(np.argmax(outside))
        pair = tuple(int(i) for i in pairs[row])
        raise ValueError(
            f"{name}: row {row} of {what} is {pair}, and there are {size}, numbered 0 to {size - 1}. If the numbers "
            "begin at one, subtract one."
        )
    return pairs


def checked_numbers(values: object, name: str, what: str, places: np.ndarray | None = None) -> np.ndarray:
    """Finite numbers as floating-point ones.

    :param places: indices that the message names, shape ``(..., 2)`` along the last axis of the values.
    :raises ValueError: if one is not finite, or no number.
    """
    try:
        numbers = np.asarray(values, float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {what} must be numbers; got {values!r}.") from error
    if not np.all(np.isfinite(numbers)):
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(numbers))[0])
        where: Any = place if len(place) > 1 else place[0] if place else ""
        if places is not None and place:
            where = tuple(int(i) for i in places[place[-1]])
        raise ValueError(
            f"{name}: {what} must be finite; entry {where} is {numbers[place]}. Replace or remove it before."
        )
    return numbers


def is_concrete(*values: object) -> bool:
    """True if no value is traced, so that its numbers can be looked at."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))
