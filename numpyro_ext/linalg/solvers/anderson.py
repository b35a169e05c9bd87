r"""Extrapolation of a fixed-point iteration that converges slowly and steadily.

Parallel sweeps of expectation propagation gain a constant share of a digit each where predictors are correlated, forty
of them to ten digits on a Gaussian process. Every third sweep goes to where the residuals of the last three would be
least if the iteration were linear (Anderson mixing of depth two); those between are plain, so that what they change is
the residual itself and says honestly how far the iteration is (Pratapa, Suryanarayana and Pask 2016, eq. 2.6 and 2.9).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["History", "extrapolated", "no_history", "remember"]

_PERIOD = 3
_LEAST_RATIO = 0.2
"""Ratio of successive changes, three sweeps for two digits, below which there is nothing to be won."""
_LARGEST_CHANGE = 0.5
"""Change from which on the iteration is taken for a linear one."""
_SINGULAR = 1e-8
"""Share of the product of two squared lengths, from which on two differences count as one direction; in single
precision a hundred roundings."""


class History(NamedTuple):
    """The last three points, the latest first, and what one plain step adds to each."""

    points: Array
    """Shape ``(3, size)``."""
    residuals: Array
    """Shape ``(3, size)``."""
    changes: Array
    """Changes by the two steps before the latest point, the latest first; infinite if one was an extrapolation."""
    number: Array
    """Points since the start, or since the iteration was last another one."""


def no_history(point: Array) -> History:
    """Before the first step."""
    nothing = jnp.zeros((_PERIOD, *point.shape), point.dtype)
    return History(nothing, nothing, jnp.full(2, jnp.inf, point.dtype), jnp.asarray(0))


def remember(history: History, point: Array, residual: Array, change: Array) -> History:
    """The history with one point more."""
    return History(
        jnp.roll(history.points, 1, 0).at[0].set(point),
        jnp.roll(history.residuals, 1, 0).at[0].set(residual),
        jnp.roll(history.changes, 1).at[0].set(change),
        history.number + 1,
    )


def extrapolated(history: History, measure: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Target of a step from the latest point, and whether it is an extrapolation.

    :param History history: with the latest point in it. An infinite change is followed by no extrapolation.
    :param measure: a linear function of residuals whose sum of squares is to be least.
    :return: the next point, shape ``(size,)``, and a boolean scalar.
    """
    points, residuals, changes, number = history
    moved, turned = points[:-1] - points[1:], residuals[:-1] - residuals[1:]
    scaled = jax.vmap(measure)(turned)
    (a, b), (_, d) = scaled @ scaled.T
    left, right = scaled @ measure(residuals[0])
    determinant = a * d - b * b
    # the two differences are one direction
    is_flat = determinant <= max(_SINGULAR, 100.0 * float(jnp.finfo(a.dtype).eps)) * a * d
    safe = jnp.where(is_flat, 1.0, determinant)
    first = jnp.where(is_flat, left / jnp.where(a > 0.0, a, 1.0), (d * left - b * right) / safe)
    second = jnp.where(is_flat, 0.0, (a * right - b * left) / safe)
    plain = points[0] + residuals[0]
    target = plain - first * (moved + turned)[0] - second * (moved + turned)[1]
    is_slow = (changes[0] < _LARGEST_CHANGE) & (changes[0] < changes[1]) & (changes[0] > _LEAST_RATIO * changes[1])
    is_due = (number % _PERIOD == 0) & is_slow & jnp.all(jnp.isfinite(target))
    return jnp.where(is_due, target, plain), is_due
