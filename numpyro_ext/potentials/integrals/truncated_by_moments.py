"""Truncated normals that are known by their mean, variance and bound: what a Gaussian on a half line stands for."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import ndtri
from jax.typing import ArrayLike

from .normal import log_ndtr, truncated_normal

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_STEEPEST = -100.0
"""Location, in deviations from the bound, from which on a truncated normal is an exponential distribution to 1e-4."""
_HALVINGS, _NEWTON_STEPS = 60, 4
_TAIL = 5.0


class TruncatedByMoments(NamedTuple):
    """A normal distribution on the part of the line above a bound, elementwise."""

    lower: Array
    """The bound."""
    location: Array
    """Mean of the normal before it is cut, less the bound, in units of :attr:`scale`."""
    scale: Array
    """Standard deviation of the normal before it is cut."""

    def from_normal(self, z: ArrayLike) -> Array:
        """Quantiles at the probabilities of standard normal numbers, to full relative accuracy in both tails.

        >>> found = truncated_by_moments(0.7978845608, 0.3633802276, 0.0)  # a standard half-normal variable
        >>> print(found.from_normal(jnp.array([-5.0, 0.0, 5.0])).round(4))
        [0.     0.6745 5.132 ]
        """
        z = jnp.asarray(z, self.scale.dtype)
        log_above, log_below = log_ndtr(jnp.stack([-z, z]))  # of the probabilities to be above and below the quantile
        # Near the bulk: the tail above the quantile is that above the bound times the first.
        location = jnp.maximum(self.location, -_TAIL)
        log_inside, log_outside = log_ndtr(jnp.stack([location, -location]))
        above = jnp.exp(log_above + log_inside)
        below = jnp.exp(log_below) + jnp.exp(log_above + log_outside)
        near = location + jnp.where(above < 0.5, -ndtri(jnp.minimum(above, 0.5)), ndtri(jnp.minimum(below, 0.5)))
        # Far in the tail, by Newton's method for the excess t above the bound at -a = c: log Q(c + t) - log Q(c).
        c = jnp.maximum(-self.location, _TAIL)
        rate = _hazard(c)

        def improve(_: int, excess: Array) -> Array:
            there = _hazard(c + excess)
            difference = -excess * (c + 0.5 * excess) - jnp.log(there / rate) - log_above
            return jnp.maximum(excess + difference / there, 0.0)

        excess = -2.0 * log_above / (c + jnp.sqrt(c * c - 2.0 * log_above))
        excess = jax.lax.fori_loop(0, _NEWTON_STEPS, improve, excess)
        found = jnp.where(self.location < -_TAIL, excess, near)
        return self.lower + self.scale * jnp.maximum(found, jnp.finfo(found.dtype).tiny)

    def log_density(self, x: ArrayLike) -> Array:
        """Log density at values above the bound."""
        excess = (jnp.asarray(x) - self.lower) / self.scale
        away = excess - self.location
        log_mass = truncated_normal(self.location).log_mass
        # In the tail squares cancel: of the density at the bound over the mass above it the hazard is left.
        is_tail = self.location < 0.0
        hazard = _hazard(jnp.where(is_tail, -self.location, 0.0))
        tail = jnp.log(hazard) - excess * (0.5 * excess - self.location)
        return jnp.where(is_tail, tail, -0.5 * away * away - _HALF_LOG_2PI - log_mass) - jnp.log(self.scale)

    def cdf(self, x: ArrayLike) -> Array:
        """Probability to be below ``x``."""
        excess = jnp.maximum((jnp.asarray(x) - self.lower) / self.scale, 0.0)
        return -jnp.expm1(log_ndtr(self.location - excess) - log_ndtr(self.location))


def truncated_by_moments(mean: ArrayLike, variance: ArrayLike, lower: ArrayLike) -> TruncatedByMoments:
    """The normal cut at a bound that has given moments.

    Its deviation is less than the mean's distance from the bound, as that of an exponential distribution is at most;
    moments that ask for more have the steepest of all with this mean.

    :param ArrayLike mean: above the bound.
    :param ArrayLike variance: positive.
    :param ArrayLike lower: the bound.
    :return: of the broadcast shape. Cost: sixty evaluations of a polynomial for each element.
    """
    dtype = jnp.result_type(mean, variance, float)
    mean, variance, lower = (x.astype(dtype) for x in jnp.broadcast_arrays(mean, variance, lower))
    deviation = jnp.sqrt(variance)
    height = jnp.maximum(mean - lower, 1e-6 * deviation)
    target = jnp.square(deviation / height)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        part = truncated_normal(middle)
        is_wide = part.variance > target * jnp.square(part.mean)
        return jnp.where(is_wide, middle, low), jnp.where(is_wide, high, middle)

    # The cut raises mean over deviation, so that this ratio of the normal is below that of the moments.
    ends = jnp.full_like(height, _STEEPEST), jnp.maximum(height / deviation, _STEEPEST)
    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, ends)
    location = 0.5 * (low + high)
    return TruncatedByMoments(lower, location, height / truncated_normal(location).mean)


def _hazard(x: Array) -> Array:
    """Density over the probability above, of the standard normal."""
    return truncated_normal(-x).ratio
