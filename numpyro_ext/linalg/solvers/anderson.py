r"""Anderson mixing (1965): a fixed-point iteration sped up by what its last moves taught.

Parallel sweeps of expectation propagation gain a constant share of a digit each where predictors are correlated, forty
of them to ten digits on a Gaussian process. Every third sweep, or after another period, goes to where the residuals of
the last would be least if the iteration were linear; those between are plain, so that what they change is the residual
itself and says honestly how far the iteration is (Pratapa, Suryanarayana and Pask 2016, eq. 2.6 and 2.9).
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
        return plain + correction(moved, turned, history.residuals[latest], measure, singular)

    target = lax.cond(is_due, jump, lambda: plain)
    is_sound = jnp.all(jnp.isfinite(target))
    return jnp.where(is_sound, target, plain), is_due & is_sound


class Moves(NamedTuple):
    """The last moves of an iteration and what they did to its residual; rows of zeros where there is none yet."""

    moves: Array
    """Shape ``(memory, size)``, the newest first."""
    changes: Array
    """Residual after minus residual before each move, shape ``(memory, size)``."""

    def with_move(self, move: Array, change: Array) -> Moves:
        """The moves with one in front and without the oldest; one with numbers that are not finite is left out."""
        is_good = jnp.all(jnp.isfinite(move)) & jnp.all(jnp.isfinite(change))
        new = (jnp.concatenate([row[None], rows[:-1]]) for row, rows in zip((move, change), self, strict=True))
        return Moves(*(jnp.where(is_good, rows, old) for rows, old in zip(new, self, strict=True)))


def no_moves(memory: int, size: int, dtype: jnp.dtype) -> Moves:
    """Before the first move."""
    nothing = jnp.zeros((memory, size), dtype)
    return Moves(nothing, nothing)


def correction(
    moves: Array, changes: Array, residual: Array, measure: Callable[[Array], Array], singular: float = 0.0
) -> Array:
    """Correction of ``x + residual`` that would make the residual smallest, were it linear.

    :param Array moves: differences of points, shape ``(memory, size)``; rows of zeros count for nothing.
    :param Array changes: those of their residuals.
    :param Array residual: image minus argument at the current point ``x``, shape ``(size,)``.
    :param measure: as of :func:`extrapolated`.
    :param float singular: likewise.
    :return: shape ``(size,)``; zero without moves.
    """
    scaled = jax.vmap(measure)(changes)
    length = jnp.sqrt(jnp.sum(scaled**2, 1))
    length = jnp.where(length > 0.0, length, 1.0)
    scaled = scaled / length[:, None]
    squares, directions = jnp.linalg.eigh(scaled @ scaled.T)
    is_one = squares > max(singular, 100.0 * float(jnp.finfo(squares.dtype).eps)) * squares[-1]
    along = directions.T @ (scaled @ measure(residual))
    weights = directions @ jnp.where(is_one, along / jnp.where(is_one, squares, 1.0), 0.0)
    return -(weights / length) @ (moves + changes)
