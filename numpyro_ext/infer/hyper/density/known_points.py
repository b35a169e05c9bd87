"""Values between and beyond points of the hyperparameters at which they are known, and fits predicted from others.

States of the field are smooth functions of the hyperparameters, so a fit that starts from a prediction has less of its
way left than one that starts from the state at another point. Where it ends is judged as that of any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import jax
import numpy as np

from ....compilation.quick_jit import holds_little

_LENGTHS = (3.0, 4.0, 6.0)
"""Length scales of the process to choose from, in standard deviations, for two coordinates; they grow with the root of
the number."""
_TREND = (1e3, 1e2, 1e1)
"""Prior variances of a value at the origin, of its slopes and of its curvatures, in those of the process: next to no
knowledge."""
_MOST_USED = 200
"""Points that a prediction is made from: on a lattice of thousands, far ones add work and no digits."""
_MOST_TOGETHER = 500_000
"""Numbers of states up to which those of two calls are put together, so that predictions take few operations."""
_NUGGET = 1e-8
"""Error of values, in variances of the process: what rounding asks for."""


def shares(known: np.ndarray, points: np.ndarray, length: float = _LENGTHS[1]) -> np.ndarray:
    """Shares of the values at known points in the values at others, by a Gaussian process with a quadratic trend.

    :param known: standardised coordinates, shape ``(n, k)``, of one point or more.
    :param points: shape ``(m, k)``.
    :param float length: length scale of the process; see :func:`length_of`.
    :return: shape ``(m, n)``; the mean of the process at ``points`` is this times the values.

    >>> known = np.linspace(-3.0, 3.0, 7)[:, None]
    >>> found = shares(known, np.array([[0.4], [3.5]])) @ np.exp(known[:, 0] / 3)
    >>> print(found.round(2), np.exp([0.4 / 3, 3.5 / 3]).round(2))
    [1.14 3.21] [1.14 3.21]
    """
    return np.linalg.solve(_covariance(known, length), _kernel(known, points, length)).T


def length_of(known: np.ndarray, values: np.ndarray, weights: np.ndarray) -> float:
    """Length scale with which each of the values is best told from the others.

    :param known: standardised coordinates, shape ``(n, k)``.
    :param values: shape ``(n,)``.
    :param weights: of the squared errors, shape ``(n,)``.

    >>> known = np.linspace(-3.0, 3.0, 13)[:, None]
    >>> length_of(known, known[:, 0] ** 3, np.ones(13)), length_of(known, np.sin(2 * known[:, 0]), np.ones(13))
    (6.0, 3.0)
    """

    def error(length: float) -> float:
        inverse = np.linalg.inv(_covariance(known, length))
        return float(weights @ np.square(inverse @ values / np.diagonal(inverse)))

    return min(_LENGTHS, key=error)


def _covariance(known: np.ndarray, length: float) -> np.ndarray:
    return _kernel(known, known, length) + _NUGGET * np.eye(len(known))


def _kernel(first: np.ndarray, second: np.ndarray, length: float) -> np.ndarray:
    scale = length * math.sqrt(max(first.shape[1], 2) / 2.0)
    inner = first @ second.T
    square = np.sum(first**2, axis=1)[:, None] + np.sum(second**2, axis=1) - 2.0 * inner
    constant, slope, curvature = _TREND
    process = np.exp(-0.5 / scale**2 * np.maximum(square, 0.0))
    return constant + slope * inner + curvature * inner**2 + process


def predicted(states: Sequence[object], known: np.ndarray, points: np.ndarray, length: float = _LENGTHS[1]) -> Any:
    """States at points, from those at others: numbers by :func:`shares`, all else from the nearest point.

    Numbers that are nowhere negative stay so. What would not be finite is that of the nearest point.

    :param states: trees of arrays, each stacked along some of the known points, one after the other.
    :param known: standardised coordinates of all of these, shape ``(n, k)``.
    :param points: shape ``(m, k)``.
    :param float length: as in :func:`shares`.
    :return: the tree, stacked along ``points``.
    """
    parts = shares(known, points, length)
    nearest = np.argmin(np.sum((points[:, None] - known) ** 2, axis=-1), axis=1)
    # Large states are not put together, which would take as much memory again.
    ends = np.cumsum([len(jax.tree.leaves(batch)[0]) for batch in states])
    batch_of = np.searchsorted(ends, nearest, side="right")
    row_of = nearest - np.concatenate([[0], ends])[batch_of]

    own_parts, left = np.split(parts, ends[:-1], axis=1), 1.0 - parts.sum(axis=1)
    picked = [np.flatnonzero(batch_of == batch) for batch in range(len(states))]

    def at_points(*leaves: object) -> np.ndarray:
        # In few operations of NumPy, each of which takes longer to begin than a small state takes.
        arrays = [np.asarray(leaf) for leaf in leaves]
        beside = np.empty((len(points), *arrays[0].shape[1:]), arrays[0].dtype)
        for array, here in zip(arrays, picked, strict=True):
            if len(here):
                beside[here] = array[row_of[here]]
        if not np.issubdtype(beside.dtype, np.inexact):
            return beside
        flat = beside.reshape(len(points), -1)
        with np.errstate(all="ignore"):
            # From the nearest one, so that what is the same everywhere stays exactly so.
            found = left[:, None] * flat
            for own, array in zip(own_parts, arrays, strict=True):
                found += own @ array.reshape(len(array), -1)
        if np.min(found, initial=0.0) < 0.0:
            is_positive = np.all([np.min(array, axis=0) >= 0.0 for array in arrays], axis=0).reshape(-1)
            found = np.where(is_positive, np.maximum(found, 0.0), found)
        if not np.isfinite(found).all():
            found = np.where(np.isfinite(found), found, flat)
        return found.reshape(beside.shape).astype(beside.dtype)

    return jax.tree.map(at_points, *states)


class KnownPoints:
    """Points with the states of their fits, from which others are predicted."""

    def __init__(self) -> None:
        self._points: list[np.ndarray] = []
        self._states: list[Any] = []

    @property
    def number(self) -> int:
        """Number of points."""
        return sum(map(len, self._points))

    def clear(self) -> None:
        """Forget all points."""
        self._points.clear()
        self._states.clear()

    def append(self, points: np.ndarray, states: object, is_good: np.ndarray) -> None:
        """Note the fits that are good.

        :param points: standardised coordinates, shape ``(n, k)``.
        :param states: tree of arrays, stacked along the points.
        :param is_good: shape ``(n,)``.
        """
        chosen = slice(None) if np.all(is_good) else np.flatnonzero(is_good)
        if not np.any(is_good):
            return
        points, states = points[chosen], jax.tree.map(lambda leaf: np.asarray(leaf)[chosen], states)
        if self._states and holds_little(self._states[-1], _MOST_TOGETHER):
            points = np.concatenate([self._points.pop(), points])
            states = jax.tree.map(lambda *leaves: np.concatenate(leaves), self._states.pop(), states)
        self._points.append(points)
        self._states.append(states)

    def states_at(self, points: np.ndarray) -> Any:
        """States predicted at points of shape ``(m, k)`` from those nearest to any of them, stacked; ``None`` where
        nothing is known.

        Cost: a solve with as many equations as points are used, 200 at most.
        """
        if not self._points:
            return None
        known, states = np.concatenate(self._points), self._states
        if len(known) > _MOST_USED:
            distance = np.min(np.sum((points[:, None] - known) ** 2, axis=-1), axis=0)
            near = np.sort(np.argpartition(distance, _MOST_USED)[:_MOST_USED])
            parts = np.split(near, np.searchsorted(near, np.cumsum([len(p) for p in self._points])[:-1]))
            starts = np.cumsum([0, *map(len, self._points)])
            states = [
                jax.tree.map(itemgetter(part - start), batch)
                for part, start, batch in zip(parts, starts, states, strict=False)
                if len(part)
            ]
            known = known[near]
        return predicted(states, known, points)
