"""Positive observations whose scale is the exponential of the predictor: gamma, exponential and Weibull variables."""

from __future__ import annotations

import math
from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import gammaln
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..integrals.stirling import log_gamma_remainder
from ..moments import ExpectedLogDensity, TiltedMoments
from .poisson import exponential_tilted_moments


@potential
class GammaExpPotential(Potential):
    r"""Density of ``observation`` under a gamma distribution with rate :math:`\text{scale}\; e^{\eta}`.

    In the predictor it is a Poisson probability of ``concentration`` events, up to a constant.

    :param Array observation: positive values.
    :param Array concentration: shape parameters; ones make the distribution exponential.
    :param Array scale: factor of the rate.
    """

    observation: Array
    concentration: Array | float = 1.0
    scale: Array | float = 1.0

    is_log_concave: ClassVar[bool] = True
    has_exponential_mean: ClassVar[bool] = True

    @property
    def count(self) -> Array | float:
        """The concentration, which a Poisson probability has as its count."""
        return self.concentration

    @property
    def exposure(self) -> Array:
        """The observation in units of the scale, which a Poisson probability has as its exposure."""
        return jnp.asarray(self.observation) * self.scale

    def log_density(self, eta: ArrayLike) -> Array:
        log_ratio = self._log_ratio(eta)
        return self._density(jnp.expm1(log_ratio), log_ratio)

    def _log_ratio(self, eta: ArrayLike) -> Array:
        """Logarithm of the rate times the observation, over the concentration."""
        eta = jnp.asarray(eta)
        exposure, concentration = jnp.asarray(self.exposure, eta.dtype), jnp.asarray(self.concentration, eta.dtype)
        return eta + (jnp.log(exposure) - jnp.log(concentration))

    def _density(self, excess: Array, log_ratio: Array) -> Array:
        """Given that ratio less one: what is as large as the concentration has cancelled on paper."""
        shape = jnp.asarray(self.concentration, log_ratio.dtype)
        constant = 0.5 * jnp.log(shape / (2.0 * math.pi)) - log_gamma_remainder(shape)
        return constant - shape * (excess - log_ratio) - jnp.log(jnp.asarray(self.observation, log_ratio.dtype))

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        rate = self.exposure * jnp.exp(jnp.asarray(eta))
        return self.log_density(eta), self.concentration - rate, -rate

    def mean(self, eta: ArrayLike) -> Array:
        return self.concentration / self.scale * jnp.exp(-jnp.asarray(eta))

    def has_finite_variance(self) -> Array:
        return jnp.asarray(True)

    def _tilted_moments(
        self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, *, only_log_z: bool
    ) -> TiltedMoments:
        """A short rule if no cavity variance exceeds four and the power is the Python number one, else quadrature."""
        return exponential_tilted_moments(self, mean, variance, power, only_log_z)

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        """Closed form: the rate is a log-normal variable."""
        dtype = jnp.result_type(mean, variance, float)
        mean, half = jnp.asarray(mean, dtype), 0.5 * jnp.asarray(variance, dtype)
        log_ratio = self._log_ratio(mean)
        value = self._density(jnp.expm1(log_ratio + half), log_ratio)
        rate = self.exposure * jnp.exp(mean + half)
        slopes = self.concentration - rate, -0.5 * rate
        return ExpectedLogDensity(value, *(jnp.broadcast_to(slope, value.shape) for slope in slopes))


@potential
class WeibullExpPotential(Potential):
    r"""Density of ``observation`` under a Weibull distribution with scale :math:`\text{scale}\; e^{\eta}`.

    :param Array observation: positive values.
    :param Array concentration: shape parameters.
    :param Array scale: factor of the scale.
    """

    observation: Array
    concentration: Array | float = 1.0
    scale: Array | float = 1.0

    is_log_concave: ClassVar[bool] = True
    has_exponential_mean: ClassVar[bool] = True

    def _hazard(self, eta: ArrayLike) -> tuple[Array, Array]:
        """Concentration, and the logarithm of the hazard that has accumulated until the observation."""
        eta = jnp.asarray(eta)
        shape = jnp.asarray(self.concentration, eta.dtype)
        return shape, shape * (jnp.log(jnp.asarray(self.observation, eta.dtype)) - jnp.log(self.scale) - eta)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        shape, log_hazard = self._hazard(eta)
        hazard = jnp.exp(log_hazard)
        value = jnp.log(shape) - jnp.log(jnp.asarray(self.observation, shape.dtype)) + log_hazard - hazard
        return value, shape * (hazard - 1.0), -jnp.square(shape) * hazard

    def _tilted_moments(
        self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, *, only_log_z: bool
    ) -> TiltedMoments:
        """A short rule if no cavity variance exceeds four over the squared concentration and the power is the Python
        number one, else quadrature.

        The logarithm of the hazard is a predictor, under which a hazard is an exponential variable that was one.
        """
        dtype = jnp.result_type(mean, variance, float)
        shape, center = self._hazard(jnp.asarray(mean, dtype))
        origin = self._hazard(jnp.zeros((), dtype))[1]
        hazard = GammaExpPotential(jnp.ones((), dtype))
        found = exponential_tilted_moments(hazard, center, jnp.square(shape) * variance, power, only_log_z)
        constant = jnp.log(shape) - jnp.log(jnp.asarray(self.observation, dtype))
        return TiltedMoments(
            log_z=found.log_z + power * constant,
            mean=jnp.asarray(mean, dtype) - (found.mean - center) / shape,
            variance=found.variance / jnp.square(shape),
            site_precision=jnp.square(shape) * found.site_precision,
            site_shift=shape * (found.site_precision * origin - found.site_shift),
        )

    def mean(self, eta: ArrayLike) -> Array:
        inverse = 1.0 / jnp.asarray(self.concentration, jnp.result_type(float))
        return self.scale * jnp.exp(jnp.asarray(eta) + gammaln(1.0 + inverse))

    def has_finite_variance(self) -> Array:
        return jnp.asarray(True)

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        """Closed form: the hazard is a log-normal variable."""
        dtype = jnp.result_type(mean, variance, float)
        mean, variance = jnp.asarray(mean, dtype), jnp.asarray(variance, dtype)
        shape, log_hazard = self._hazard(mean)
        hazard = jnp.exp(log_hazard + 0.5 * jnp.square(shape) * variance)
        value = jnp.log(shape) - jnp.log(jnp.asarray(self.observation, dtype)) + log_hazard - hazard
        slopes = shape * (hazard - 1.0), -0.5 * jnp.square(shape) * hazard
        return ExpectedLogDensity(value, *(jnp.broadcast_to(slope, value.shape) for slope in slopes))
