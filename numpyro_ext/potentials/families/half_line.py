"""Normal and exponential densities on a half line: priors of coefficients that cannot be negative."""

from __future__ import annotations

import math
from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..integrals.normal import truncated_normal
from ..moments import TiltedMoments

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@potential
class HalfLinePotential(Potential):
    r""":math:`\exp\{c - \tfrac12 \lambda (\eta - m)^2 - \rho\,(\eta - b)\}` above the bound :math:`b`, zero below it.

    With :math:`\rho = 0` it is a normal density cut at the bound, with :math:`\lambda = 0` an exponential one.

    :param Array lower: the bound :math:`b`.
    :param Array center: center :math:`m` of the normal density.
    :param Array precision: its precision :math:`\lambda`, zero or positive.
    :param Array rate: rate :math:`\rho` of the exponential density, zero or positive.
    :param Array log_scale: the normalising constant :math:`c`.
    """

    lower: Array | float
    center: Array | float
    precision: Array | float
    rate: Array | float
    log_scale: Array | float

    is_log_concave: ClassVar[bool] = True
    is_smooth: ClassVar[bool] = False
    is_elementwise: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        return jnp.where(eta > self.lower, self._inside(eta), -jnp.inf)

    def _inside(self, eta: Array) -> Array:
        away = eta - self.center
        return self.log_scale - 0.5 * self.precision * away * away - self.rate * (eta - self.lower)

    def inside(self, white: Array) -> Array:
        """Values above the bound of the size that the density has there, made of standard normal numbers."""
        return self.lower + (0.01 + jnp.abs(white)) / (jnp.sqrt(self.precision) + self.rate)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        """Derivatives of the density above the bound, on the whole line, so that no gradient is nan."""
        eta = jnp.asarray(eta)
        slope = -self.precision * (eta - self.center) - self.rate
        return self.log_density(eta), slope, jnp.broadcast_to(-jnp.asarray(self.precision, eta.dtype), slope.shape)

    def has_finite_expectation(self) -> Array:
        return jnp.asarray(False)

    def has_finite_variance(self) -> Array:
        return jnp.asarray(self.precision) + self.rate > 0.0

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        r"""A truncated normal: cavity and exponent make a normal with mean :math:`\bar\mu - r w` and variance
        :math:`w = v / d`, where :math:`d = 1 + p \lambda v` and :math:`r = p \rho`, cut at the bound."""
        mean, variance = jnp.asarray(mean), jnp.asarray(variance)
        power = jnp.asarray(power)
        own, rate = power * self.precision, power * self.rate
        growth = 1.0 + own * variance
        width = jnp.sqrt(variance / growth)
        apart = mean - self.center
        # From the cavity mean to that of the product with the normal part, and on by the exponential one.
        to_normal = -variance * own * apart / growth
        standard = (mean - self.lower + to_normal) / width
        drift = rate * width
        a = standard - drift
        part = truncated_normal(a)
        # Deep in the tail the exponential and the tail cancel: log Phi(a) + a^2 / 2 is what remains. Elsewhere the
        # ratio may be zero, which must not reach the logarithm and its gradient.
        log_ratio = jnp.log(jnp.where(a < 0.0, part.ratio, 1.0))
        log_tail = -0.5 * standard * standard - _HALF_LOG_2PI - log_ratio
        log_mass = jnp.where(a < 0.0, log_tail, drift * (0.5 * drift - standard) + part.log_mass)
        log_normal = -0.5 * jnp.log(growth) - 0.5 * own * apart * apart / growth
        tilted_mean = self.lower + width * part.mean
        precision = (own + part.shrinkage / variance) / part.variance
        # How far the mean moves, over the variance: by parts where the bound says little, whole where it says much.
        near = (-own * apart - rate) / growth + width * part.ratio / variance
        far = (tilted_mean - mean) / variance
        return TiltedMoments(
            log_z=power * self.log_scale + log_normal + log_mass,
            mean=tilted_mean,
            variance=width * width * part.variance,
            site_precision=precision,
            site_shift=tilted_mean * precision + jnp.where(a > 0.0, near, far),
        )
