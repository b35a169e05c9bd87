"""Search for the maximum of a function of few numbers, by its slopes alone, and many searches side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....compilation.pytree import PyTree

State = TypeVar("State", bound=PyTree)

FIRST_RADIUS = 2.0
"""Radius of the first step, in units of the first coordinates."""
MOST_STEPS = 60
"""Steps of a search, after which another look at the curvature is worth its price."""
_LEAST_SHARE = 0.2
"""Least curvature along a step after it, as a share of that before."""
_DAMPINGS = 5


class Place(NamedTuple):
    """Numbers that a search has reached, with a quadratic model of the function around them."""

    numbers: Array
    value: Array
    axes: Array
    """Axes of the model, in columns."""
    bends: Array
    """Minus the second derivative of the model along each, ascending and positive."""
    slopes: Array
    """First derivative along each."""
    radius: Array
    """Greatest length of the next step."""
    num_steps: Array

    @classmethod
    def first(cls, numbers: Array, value: Array, gradient: Array, precision: Array) -> Place:
        """Place to begin at, in coordinates in which a curvature is one, but for what is below one itself."""
        values, vectors = jnp.linalg.eigh(precision)
        axes, ones = vectors / jnp.sqrt(jnp.maximum(values, 1.0)), jnp.ones_like(numbers)
        return cls(numbers, value, axes, ones, axes.T @ gradient, FIRST_RADIUS * ones[0], jnp.array(0))

    @property
    def distance(self) -> Array:
        """Length of the step to the maximum of the model; of a log density, in its standard deviations."""
        return jnp.sqrt((self.slopes**2 / self.bends).sum())

    @property
    def tolerance(self) -> Array:
        """Distance that a search ends at."""
        return jnp.finfo(self.numbers.dtype).eps ** jnp.asarray(0.4, self.numbers.dtype)

    @property
    def is_end(self) -> Array:
        """True at the maximum, and where a search has taken too long."""
        return (self.distance <= self.tolerance) | (self.num_steps >= MOST_STEPS)

    @property
    def along(self) -> Array:
        """Step along the axes to the maximum of the model within the radius."""
        damping = jnp.zeros_like(self.radius)
        for _ in range(_DAMPINGS):  # of Newton's method for the inverse length, which is nearly linear in the damping
            along = self.slopes / (self.bends + damping)
            square = (along**2).sum()
            excess = jnp.sqrt(square) / self.radius - 1.0
            damping += jnp.where(excess > 0, excess * square / (along**2 / (self.bends + damping)).sum(), 0.0)
        along = self.slopes / (self.bends + damping)
        return along * jnp.minimum(1.0, self.radius / jnp.linalg.norm(along))

    def _bends_after(self, along: Array, slopes: Array) -> Array:
        """Curvature that explains the slopes after a step, and stays positive."""
        before, change = self.bends * along, self.slopes - slopes
        old, seen = along @ before, along @ change
        weight = jnp.where(seen < _LEAST_SHARE * old, (1.0 - _LEAST_SHARE) * old / (old - seen), 1.0)
        change = weight * change + (1.0 - weight) * before
        whole = jnp.diag(self.bends)
        new = whole - jnp.outer(before, before) / old + jnp.outer(change, change) / (along @ change)
        return jnp.where(jnp.isfinite(new).all(), new, whole)

    def stepped(self, function: Callable[[Array], Array]) -> Place:
        """Place after a step uphill within a trust region, with a model that has learned from the slopes there.

        :param function: of numbers; it and its gradient are taken once.

        **Source:** Nocedal and Wright (2006), *Numerical optimization*, algorithm 4.1, and procedure 18.2 for the
        model.
        """
        along = self.along
        trial = self.numbers + self.axes @ along
        value, gradient = jax.value_and_grad(function)(trial)
        slopes, gained, slope = self.axes.T @ gradient, value - self.value, self.slopes @ along
        slack = self.tolerance**2 * (1.0 + jnp.abs(self.value))  # near the maximum differences are rounding
        ratio = (gained + slack) / (slope - 0.5 * (self.bends * along**2).sum() + slack)
        length = jnp.linalg.norm(along)
        # to the top of the parabola that a poor step shows
        shrunk = jnp.where(jnp.isfinite(gained), jnp.clip(0.5 * slope / (slope - gained), 0.1, 0.5), 0.1)
        grown = jnp.where(ratio > 0.75, jnp.maximum(self.radius, 2.0 * length), self.radius)
        radius = jnp.where(ratio > 0.25, grown, shrunk * length)
        bends, turn = jnp.linalg.eigh(self._bends_after(along, slopes))
        there, here = (trial, value, slopes), (self.numbers, self.value, self.slopes)
        numbers, value, slopes = (jnp.where(ratio > 0.05, new, old) for new, old in zip(there, here, strict=True))
        bends = jnp.maximum(bends, jnp.finfo(bends.dtype).eps * bends[-1])
        return Place(numbers, value, self.axes @ turn, bends, turn.T @ slopes, radius, self.num_steps + 1)


def beside(function: Callable[..., State], *args: PyTree) -> State:
    """Values of a function of arguments with an axis in front; for one there is no axis inside, which is faster."""
    if len(jax.tree.leaves(args)[0]) > 1:
        return jax.vmap(function)(*args)
    return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))


def chosen(is_new: Array, new: State, old: State) -> State:
    """The one or the other for each place along the axis in front."""
    choose = jax.vmap(lambda one, x, y: jax.tree.map(lambda a, b: jnp.where(one, a, b), x, y))
    found: State = choose(is_new, new, old)
    return found


def repeated(
    step: Callable[[State, Array], State],
    is_end: Callable[[State], Array],
    states: State,
    number: Array,
    num_lanes: int,
) -> State:
    """States after as many steps each as these need; a few are taken side by side, and one at its end makes room.

    :param step: of a state and its index.
    :param states: with an axis in front.
    :param number: of them to take, from the first.
    :param num_lanes: number of them to take side by side.
    """
    last = len(jax.tree.leaves(states)[0]) - 1

    def at(states: State, who: Array) -> State:
        return jax.tree.map(lambda x: x[jnp.minimum(who, last)], states)

    def body(value: tuple[State, State, Array, Array]) -> tuple[State, State, Array, Array]:
        states, own, who, following = value
        own = beside(step, own, jnp.minimum(who, last))
        is_done = beside(is_end, own) & (who < number)
        where = jnp.where(is_done, who, last + 1)
        states = jax.tree.map(lambda x, y: x.at[where].set(y, mode="drop"), states, own)
        who = jnp.where(is_done, following + jnp.cumsum(is_done) - 1, who)
        return states, chosen(is_done, at(states, who), own), who, following + is_done.sum()

    who = jnp.arange(num_lanes)
    start = (states, at(states, who), who, jnp.array(num_lanes))
    found: State = lax.while_loop(lambda value: (value[2] < number).any(), body, start)[0]
    return found
