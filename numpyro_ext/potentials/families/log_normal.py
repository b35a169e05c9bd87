"""Log-normal observations: Gaussian ones on another scale."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..moments import ExpectedLogDensity, TiltedMoments
from .gaussian import GaussianPotential


@potential
class LogNormalPotential(Potential):
    r"""Density of ``observation``, whose logarithm is :math:`N(\eta, \text{scale}^2)`; the site is exact.

    It is that of the logarithm over the observation, which is a constant to all but the evidence.

    :param Array observation: positive values.
    :param Array scale: standard deviations of their logarithms.
    """

    observation: Array
    scale: Array | float

    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True
    has_exponential_mean: ClassVar[bool] = True

    @property
    def _of_logarithms(self) -> GaussianPotential:
        return GaussianPotential(jnp.log(jnp.asarray(self.observation)), self.scale)

    @property
    def _constant(self) -> Array:
        return -jnp.log(jnp.asarray(self.observation))

    def log_density(self, eta: ArrayLike) -> Array:
        return self._of_logarithms.log_density(eta) + self._constant

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        value, slope, curvature = self._of_logarithms.derivatives(eta)
        return value + self._constant, slope, curvature

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        moments = self._of_logarithms.tilted_moments(mean, variance, power)
        return moments._replace(log_z=moments.log_z + power * self._constant)

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        expected = self._of_logarithms.expected_log_density(mean, variance)
        return expected._replace(value=expected.value + self._constant)

    def has_finite_variance(self) -> Array:
        return self._of_logarithms.has_finite_variance()

    def mean(self, eta: ArrayLike) -> Array:
        return jnp.exp(jnp.asarray(eta) + 0.5 * jnp.square(self.scale))
