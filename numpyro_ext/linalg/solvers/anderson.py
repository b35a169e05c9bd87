r"""Extrapolation of a fixed-point iteration that converges slowly and steadily.

Parallel sweeps of expectation propagation gain a constant share of a digit each where predictors are correlated, forty
of them to ten digits on a Gaussian process. Every third sweep, or after another period, goes to where the residuals of
the last would be least if the iteration were linear (Anderson mixing); those between are plain, so that what they
change is the residual itself and says honestly how far the iteration is (Pratapa, Suryanarayana and Pask 2016, eq. 2.6
and 2.9).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

_PERIOD = 3
_LEAST_RATIO = 0.2
"""Ratio of successive changes, three sweeps for two digits, below which there is nothing to be won."""
_LARGEST_CHANGE = 0.5
"""Change from which on the iteration is taken for a linear one."""
_SINGULAR = 1e-8


class History(NamedTuple):
    """The last points, each in the place of the oldest, and what one plain step adds to each."""

    points: Array
    """Shape ``(memory, size)``."""
    residuals: Array
    """Shape ``(memory, size)``."""
    changes: Array
    """Changes by the two steps before the latest point, the latest first; infinite if one was an extrapolation."""
    number: Array
    """Points since the start, or since the iteration was last another one."""


def no_history(point: Array, memory: int = _PERIOD) -> History:
    """Before the first step."""
    nothing = jnp.zeros((memory, *point.shape), point.dtype)
    return History(nothing, nothing, jnp.full(2, jnp.inf, point.dtype), jnp.asarray(0))


def remember(history: History, point: Array, residual: Array, change: Array) -> History:
    """The history with one point more."""
    place = history.number % history.points.shape[0]
    return History(
        history.points.at[place].set(point),
        history.residuals.at[place].set(residual),
        jnp.roll(history.changes, 1).at[0].set(change),
        history.number + 1,
    )


def extrapolated(
    history: History,
    measure: Callable[[Array], Array],
    *,
    period: int = _PERIOD,
    largest_change: float = _LARGEST_CHANGE,
    singular: float = _SINGULAR,
) -> tuple[Array, Array]:
    """Target of a step from the latest point, and whether it is an extrapolation.

    :param History history: with the latest point in it. An infinite change is followed by no extrapolation.
    :param measure: a linear function of residuals whose sum of squares is to be least.
    :param int period: steps from one extrapolation to the next; there may be more points.
    :param float largest_change: change from which on the iteration is not taken for a linear one.
    :param float singular: share of the largest principal square of differences of unit length, below which a direction
        counts as none; in single precision a hundred roundings at least.
    :return: the next point, shape ``(size,)``, and a boolean scalar.
    """
    memory, changes = history.points.shape[0], history.changes
    latest = (history.number - 1) % memory
    plain = history.points[latest] + history.residuals[latest]
    is_slow = (changes[0] < largest_change) & (changes[0] < changes[1]) & (changes[0] > _LEAST_RATIO * changes[1])
    is_due = (history.number % period == 0) & is_slow

    def jump() -> Array:
        is_there = (jnp.arange(memory) < history.number)[:, None]
        moved, turned = (jnp.where(is_there, x[latest] - x, 0.0) for x in history[:2])
        scaled = jax.vmap(measure)(turned)
        length = jnp.sqrt(jnp.sum(scaled**2, 1))
        scaled = scaled / jnp.where(length > 0.0, length, 1.0)[:, None]
        squares, directions = jnp.linalg.eigh(scaled @ scaled.T)
        is_one = squares > max(singular, 100.0 * float(jnp.finfo(squares.dtype).eps)) * squares[-1]
        along = directions.T @ (scaled @ measure(history.residuals[latest]))
        weights = directions @ jnp.where(is_one, along / jnp.where(is_one, squares, 1.0), 0.0)
        return plain - (weights / jnp.where(length > 0.0, length, 1.0)) @ (moved + turned)

    target = lax.cond(is_due, jump, lambda: plain)
    is_sound = jnp.all(jnp.isfinite(target))
    return jnp.where(is_sound, target, plain), is_due & is_sound
