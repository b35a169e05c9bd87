"""Elliptical slices of many particles side by side, each at its own pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

_DEGREES = 8.0
"""Degrees of freedom of Student's reference."""
_MOST_SHRINKS = 100
"""After so many the bracket holds one number; the particle stays."""


def elliptical_slices(
    key: Array,
    vector: Array,
    level: Array,
    log_density: Callable[[Array], Array],
    most_moves: int,
    num_moves: Array,
    is_given_prior: bool = False,
) -> tuple[Array, Array, Array]:
    """Several moves of one particle, under ``vmap``, by elliptical slices.

    An ellipse goes through the particle and through a draw from a reference; the particle moves to a place on it where
    the density over that of the reference is above a level drawn below its own. The reference is a standard
    multivariate Student distribution (Nishihara, Murray and Adams 2014), whose tails are heavier than those of the
    density and so keep no particle where it is; or the prior itself, where it is standard Gaussian (Murray, Adams and
    MacKay 2010).

    How many places a move looks at is random. Particles that wait for each other after each move all take as long as
    the slowest one; here a particle begins its next move at once, and the sums over several moves are more alike. That
    halves the time, and is the reason that this is not BlackJAX's kernel of one move.

    :param key: random number generator key.
    :param vector: where the particle is, in coordinates where it is about standard: ``(size,)``. Where its density is
        zero it takes the first place that it looks at.
    :param level: its log density.
    :param log_density: of one vector, not normalised.
    :param most_moves: how many there may be.
    :param num_moves: to be made.
    :param bool is_given_prior: the prior is standard Gaussian and the reference; log densities are then those of the
        likelihood alone.
    :return: the vector and log density after the moves, and how many densities were computed.
    """
    size, dtype = vector.size, vector.dtype
    angle_key, level_key, noise_key, scale_key, key = random.split(key, 5)
    angles = random.uniform(angle_key, (most_moves,), dtype, 0.0, 2.0 * np.pi)
    # below the present level by these; computed as differences, as single precision is coarse at large levels
    drops = -random.exponential(level_key, (most_moves,), dtype)
    noise = random.normal(noise_key, (most_moves, size), dtype)
    shape = 0.5 * (_DEGREES + size)
    gammas = random.gamma(scale_key, shape, (most_moves,), dtype)

    def residual(vector: Array, level: Array) -> Array:
        if is_given_prior:
            return level
        return level + shape * jnp.log1p(jnp.sum(jnp.square(vector)) / _DEGREES)

    def direction(moves: Array, vector: Array) -> Array:
        """Draw a direction of Student's distribution given the scale that it and the vector have in common."""
        moves = jnp.minimum(moves, most_moves - 1)
        if is_given_prior:
            return noise[moves]
        variance = 0.5 * (_DEGREES + jnp.sum(jnp.square(vector))) / gammas[moves]
        return jnp.sqrt(variance) * noise[moves]

    def goes_on(carry: Any) -> Any:
        return carry[1] < num_moves

    def look(carry: Any) -> Any:
        count, moves, shrinks, vector, level, other, angle, low, high = carry
        place = vector * jnp.cos(angle) + other * jnp.sin(angle)
        found = log_density(place)
        is_inside = residual(place, found) - residual(vector, level) > drops[moves]
        is_inside |= level == -jnp.inf
        ends = is_inside | (shrinks >= _MOST_SHRINKS)
        vector, level = jnp.where(is_inside, place, vector), jnp.where(is_inside, found, level)
        low, high = jnp.where(angle < 0.0, angle, low), jnp.where(angle < 0.0, high, angle)
        within = low + (high - low) * random.uniform(random.fold_in(key, count), (), dtype)
        moves = moves + ends.astype(moves.dtype)
        begun = angles[jnp.minimum(moves, most_moves - 1)]
        return (
            count + 1,
            moves,
            jnp.where(ends, 0, shrinks + 1),
            vector,
            level,
            jnp.where(ends, direction(moves, vector), other),
            jnp.where(ends, begun, within),
            jnp.where(ends, begun - 2.0 * np.pi, low),
            jnp.where(ends, begun, high),
        )

    zero = jnp.zeros((), num_moves.dtype)
    carry = (zero, zero, zero, vector, level, direction(zero, vector), angles[0], angles[0] - 2.0 * np.pi, angles[0])
    count, _, _, vector, level, *_ = lax.while_loop(goes_on, look, carry)
    return vector, level, count
