"""Elliptical slices of many particles side by side, each at its own pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

__all__ = ["elliptical_slices"]

_MOST_SHRINKS = 100
"""After so many the bracket holds one number; the particle stays."""


def elliptical_slices(
    key: Array,
    vector: Array,
    level: Array,
    log_likelihood: Callable[[Array], Array],
    directions: Array,
    mean: Array,
    num_moves: Array,
) -> tuple[Array, Array, Array]:
    """Several moves of one particle by elliptical slices (Murray, Adams and MacKay 2010), for use under ``vmap``.

    How many places a move looks at is random. Particles that wait for each other after each move all take as long as
    the slowest one; here a particle begins its next move at once, and the sums over several moves are more alike. That
    halves the time, and is the reason that this is not BlackJAX's kernel of one move.

    :param key: random number generator key.
    :param vector: where the particle is, of positive likelihood, shape ``(size,)``.
    :param level: its log likelihood.
    :param log_likelihood: of one vector.
    :param directions: draws from the Gaussian prior without its mean, one for each move, ``(moves, size)``.
    :param mean: of the prior, ``(size,)``.
    :param num_moves: to be made, at most as many as there are directions.
    :return: the vector and log likelihood after the moves, and how many likelihoods were computed.
    """
    most, dtype = len(directions), vector.dtype
    angle_key, level_key, key = random.split(key, 3)
    angles = random.uniform(angle_key, (most,), dtype, 0.0, 2.0 * np.pi)
    # below the present level by these; computed as differences, as single precision is coarse at large levels
    drops = -random.exponential(level_key, (most,), dtype)

    def goes_on(carry: Any) -> Any:
        return carry[1] < num_moves

    def look(carry: Any) -> Any:
        count, moves, shrinks, vector, level, angle, low, high = carry
        place = mean + (vector - mean) * jnp.cos(angle) + directions[moves] * jnp.sin(angle)
        found = log_likelihood(place)
        is_inside = found - level > drops[moves]
        ends = is_inside | (shrinks >= _MOST_SHRINKS)
        vector, level = jnp.where(is_inside, place, vector), jnp.where(is_inside, found, level)
        low, high = jnp.where(angle < 0.0, angle, low), jnp.where(angle < 0.0, high, angle)
        within = low + (high - low) * random.uniform(random.fold_in(key, count), (), dtype)
        moves = moves + ends.astype(moves.dtype)
        begun = angles[jnp.minimum(moves, most - 1)]
        return (
            count + 1,
            moves,
            jnp.where(ends, 0, shrinks + 1),
            vector,
            level,
            jnp.where(ends, begun, within),
            jnp.where(ends, begun - 2.0 * np.pi, low),
            jnp.where(ends, begun, high),
        )

    zero = jnp.zeros((), num_moves.dtype)
    carry = (zero, zero, zero, vector, level, angles[0], angles[0] - 2.0 * np.pi, angles[0])
    count, _, _, vector, level, *_ = lax.while_loop(goes_on, look, carry)
    return vector, level, count
