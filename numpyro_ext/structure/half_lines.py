"""Priors on a half line that are a normal or an exponential density above a bound: half-normal and the like."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from ..potentials.integrals.normal import log_ndtr

HALF_LINE_FAMILIES = ("HalfNormal", "Exponential", "LeftTruncatedDistribution")
"""Names of the distributions that may be densities on a half line."""

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class HalfLine(dist.Distribution):
    """Values whose distance :math:`x` above ``loc`` has a normal or an exponential density on a half line; see
    :class:`~numpyro_ext.potentials.families.half_line.HalfLinePotential` for its parameters."""

    support = constraints.real

    def __init__(
        self,
        loc: ArrayLike,
        lower: ArrayLike,
        center: ArrayLike,
        precision: ArrayLike,
        rate: ArrayLike,
        log_scale: ArrayLike,
    ):
        self.loc, self.lower, self.center = loc, lower, center
        self.precision, self.rate, self.log_scale = precision, rate, log_scale
        shape = jnp.broadcast_shapes(*map(jnp.shape, (loc, lower, center, precision, rate, log_scale)))
        super().__init__(shape, validate_args=False)

    def log_prob(self, value: ArrayLike) -> Array:
        x = jnp.asarray(value) - self.loc
        inside = self.log_scale - 0.5 * self.precision * jnp.square(x - self.center) - self.rate * (x - self.lower)
        return jnp.where(x > self.lower, inside, -jnp.inf)


def has_half_line(base: Any) -> bool:
    """True if a distribution without wrappers is a normal or exponential density on a half line, bounded below."""
    if type(base) is dist.LeftTruncatedDistribution:
        return type(base.base_dist) is dist.Normal
    return type(base) in (dist.HalfNormal, dist.Exponential)


def half_line(base: Any, loc: Array) -> HalfLine:
    """The density of a distribution for which :func:`has_half_line`, moved by ``loc``."""
    zero = jnp.zeros(())
    if type(base) is dist.Exponential:
        return HalfLine(loc, zero, zero, zero, base.rate, jnp.log(base.rate))
    if type(base) is dist.HalfNormal:
        log_scale = math.log(2.0) - _HALF_LOG_2PI - jnp.log(base.scale)
        return HalfLine(loc, zero, zero, 1.0 / jnp.square(base.scale), zero, log_scale)
    center, scale, low = base.base_dist.loc, base.base_dist.scale, base.low
    log_scale = -_HALF_LOG_2PI - jnp.log(scale) - log_ndtr((center - low) / scale)
    return HalfLine(loc, low, center, 1.0 / jnp.square(scale), zero, log_scale)
