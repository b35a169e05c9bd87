"""Laplace densities: a sparse prior on a linear functional, or an observation with heavy-tailed noise."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import potential
from ..bounds.super_gaussian import SuperGaussianPotential
from ..integrals.normal import TruncatedNormal, truncated_normal
from ..moments import ExpectedLogDensity, Outcomes, TiltedMoments

_LOG_2 = math.log(2.0)


@potential
class LaplacePotential(SuperGaussianPotential):
    r""":math:`\exp(-|\eta - \text{location}| / \text{scale}) / (2\,\text{scale})`.

    :param Array location: location of the kink.
    :param Array scale: scale.
    """

    location: Array | float
    scale: Array | float

    is_log_concave: ClassVar[bool] = True
    is_smooth: ClassVar[bool] = False

    @property
    def center(self) -> Array:
        """Place of the kink."""
        return jnp.asarray(self.location)

    def width(self, squared: ArrayLike) -> Array:
        return jnp.sqrt(squared) * self.scale

    def width_penalty(self, width: ArrayLike) -> Array:
        return jnp.asarray(width) / jnp.square(self.scale) + 2.0 * (_LOG_2 + jnp.log(self.scale))

    def outcomes(self) -> Outcomes:
        return Outcomes("location", width=self.scale)

    def log_density(self, eta: ArrayLike) -> Array:
        return -jnp.abs(jnp.asarray(eta) - self.location) / self.scale - jnp.log(self.scale) - _LOG_2

    def mean(self, eta: ArrayLike) -> Array:
        return jnp.asarray(eta)

    def has_finite_variance(self) -> Array:
        return jnp.asarray(True)

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        r"""A mixture of two truncated Gaussians, one on each side of the kink.

        With :math:`\tau` the rate and the kink at zero, the side :math:`\pm` has mass
        :math:`e^{\tau^2 v/2 \mp \tau\mu}\,\Phi(a_\pm)` with :math:`a_\pm = (\pm\mu - \tau v)/\sqrt v`.
        """
        variance = jnp.asarray(variance)
        rate = power / self.scale
        centered = jnp.asarray(mean) - self.location
        deviation = jnp.sqrt(variance)
        standard, drift = centered / deviation, rate * deviation

        def side(sign: float) -> tuple[Array, TruncatedNormal]:
            a = sign * standard - drift
            part = truncated_normal(a)
            # Deep in the tail the exponential and the tail cancel: log Phi(a) + a^2 / 2 is what remains.
            # Far from the tail the ratio is zero, which must not reach the logarithm and its gradient.
            log_ratio = jnp.log(jnp.where(a < 0.0, part.ratio, 1.0))
            log_tail = -0.5 * standard**2 - 0.5 * math.log(2.0 * math.pi) - log_ratio
            log_mass = drift * (0.5 * drift - sign * standard) + part.log_mass
            return jnp.where(a < 0.0, log_tail, log_mass), part

        log_upper, upper = side(1.0)
        log_lower, lower = side(-1.0)
        log_mass = jnp.logaddexp(log_upper, log_lower)
        p, q = jnp.exp(log_upper - log_mass), jnp.exp(log_lower - log_mass)
        gap = upper.mean + lower.mean
        ratio = p * upper.variance + q * lower.variance + p * q * gap**2
        shift = deviation * (p * upper.mean - q * lower.mean)
        # For a factor that says little: 1 - ratio and the moved mean, from the slopes -rate and +rate of the sides.
        boundary = 2.0 * drift * p * upper.ratio - 4.0 * drift**2 * p * q
        shrinkage = jnp.where(ratio < 0.5, 1.0 - ratio, jnp.maximum(boundary, 0.0))
        precision = shrinkage / (ratio * variance)
        tilted_variance = variance * ratio
        centered_shift = jnp.where(
            ratio < 0.5,
            shift / tilted_variance - centered / variance,
            (-rate * (p - q) + shrinkage * centered / variance) / ratio,
        )
        return TiltedMoments(
            log_z=log_mass - power * (_LOG_2 + jnp.log(self.scale)),
            mean=self.location + shift,
            variance=tilted_variance,
            site_precision=precision,
            site_shift=centered_shift + precision * self.location,
        )

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        """Closed form: ``|eta - location|`` is a folded normal variable."""
        deviation = jnp.sqrt(variance)
        centered = jnp.asarray(mean) - self.location
        standard = centered / deviation
        density = jnp.exp(-0.5 * jnp.square(standard)) / math.sqrt(2.0 * math.pi)
        balance = jax.scipy.special.erf(standard / math.sqrt(2.0))
        distance = 2.0 * deviation * density + centered * balance
        value = -distance / self.scale - jnp.log(self.scale) - _LOG_2
        return ExpectedLogDensity(value, -balance / self.scale, -density / (deviation * self.scale))
