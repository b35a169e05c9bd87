"""Gaussian observations."""

from __future__ import annotations

import math
from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import potential
from ..bounds.super_gaussian import SuperGaussianPotential
from ..moments import ExpectedLogDensity, Outcomes, TiltedMoments

_LOG_2PI = math.log(2.0 * math.pi)


@potential
class GaussianPotential(SuperGaussianPotential):
    r"""Density of ``observation`` under :math:`N(\eta, \text{scale}^2)`; the site is exact for every cavity and power.

    :param Array observation: observed values.
    :param Array scale: standard deviations of the noise.
    """

    observation: Array
    scale: Array | float

    is_elementwise: ClassVar[bool] = True
    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True

    @property
    def center(self) -> Array:
        """The observed values."""
        return jnp.asarray(self.observation)

    def width(self, squared: ArrayLike) -> Array:
        """The variance, whatever the argument."""
        return jnp.broadcast_to(jnp.square(self.scale), jnp.broadcast_shapes(jnp.shape(squared), jnp.shape(self.scale)))

    def width_penalty(self, width: ArrayLike) -> Array:
        """Finite at the variance only, to rounding."""
        variance = jnp.square(self.scale)
        is_own = jnp.isclose(width, variance, rtol=1e-5, atol=0.0)
        return jnp.where(is_own, _LOG_2PI + jnp.log(variance), jnp.inf)

    def log_density(self, eta: ArrayLike) -> Array:
        residual = (self.observation - jnp.asarray(eta)) / self.scale
        return -0.5 * (residual**2 + _LOG_2PI) - jnp.log(self.scale)

    def outcomes(self) -> Outcomes:
        return Outcomes("observation", width=self.scale)

    def has_finite_variance(self) -> Array:
        return jnp.asarray(True)

    def mean(self, eta: ArrayLike) -> Array:
        return jnp.asarray(eta)

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        mean, variance = jnp.asarray(mean), jnp.asarray(variance)
        noise = jnp.square(self.scale) / power
        total = variance + noise
        residual = self.observation - mean
        # t^power is a Gaussian density with variance scale^2 / power, up to a constant.
        constant = -0.5 * jnp.log(power) + (1.0 - power) * (0.5 * _LOG_2PI + jnp.log(self.scale))
        log_z = constant - 0.5 * (residual**2 / total + jnp.log(total) + _LOG_2PI)
        shape = log_z.shape
        return TiltedMoments(
            log_z=log_z,
            mean=(mean * noise + self.observation * variance) / total,
            variance=jnp.broadcast_to(variance * noise / total, shape),
            site_precision=jnp.broadcast_to(1.0 / noise, shape),
            site_shift=jnp.broadcast_to(self.observation / noise, shape),
        )

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        precision = 1.0 / jnp.square(self.scale)
        residual = self.observation - jnp.asarray(mean)
        value = self.log_density(mean) - 0.5 * precision * variance
        return ExpectedLogDensity(
            value, *(jnp.broadcast_to(x, value.shape) for x in (precision * residual, -0.5 * precision))
        )
