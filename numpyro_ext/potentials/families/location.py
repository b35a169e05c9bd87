"""Densities about a location: logistic, soft Laplace and asymmetric Laplace, of coefficients or of observations."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.stats import norm
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..integrals.tilted.tilted_moments import tilted_moments
from ..moments import ExpectedLogDensity, Outcomes, TiltedMoments


class _LocationPotential(Potential):
    r"""A density of :math:`z = (\text{observation} - \eta) / \text{scale}`, log-concave and with a variance."""

    observation: Array
    scale: Array | float

    is_log_concave: ClassVar[bool] = True

    @property
    def center(self) -> Array:
        """Place of the peak of the factor, for the quadrature."""
        return jnp.asarray(self.observation)

    def outcomes(self) -> Outcomes:
        return Outcomes("observation", width=self.scale)

    def has_finite_variance(self) -> Array:
        return jnp.asarray(True)

    def _standard(self, eta: ArrayLike) -> Array:
        return (self.observation - jnp.asarray(eta)) / self.scale

    def _fall(self, eta: ArrayLike) -> Array:
        """Minus the distance, with a slope at the location, too: functions of it keep their digits in the tails."""
        z = self._standard(eta)
        return jnp.where(z > 0.0, -z, z)


@potential
class LogisticPotential(_LocationPotential):
    r"""Logistic density, :math:`e^{-z} / (1 + e^{-z})^2 / \text{scale}`.

    :param Array observation: observed values.
    :param Array scale: scales.

    **Example:**

    >>> print(LogisticPotential(jnp.array([0.0, 2.0]), 1.0).log_density(0.0).round(3))
    [-1.386 -2.254]
    """

    observation: Array
    scale: Array | float

    def log_density(self, eta: ArrayLike) -> Array:
        fall = self._fall(eta)
        return fall - 2.0 * jnp.log1p(jnp.exp(fall)) - jnp.log(self.scale)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        z = self._standard(eta)
        slope = jnp.tanh(0.5 * z)
        curvature = -2.0 * jax.nn.sigmoid(z) * jax.nn.sigmoid(-z)
        return self.log_density(eta), slope / self.scale, curvature / jnp.square(self.scale)

    def mean(self, eta: ArrayLike) -> Array:
        return jnp.asarray(eta)


@potential
class SoftLaplacePotential(_LocationPotential):
    r"""NumPyro's smooth density with the tails of a Laplace density, :math:`2 / (\pi\,(e^z + e^{-z})\,\text{scale})`.

    :param Array observation: observed values.
    :param Array scale: scales.

    **Example:**

    >>> print(SoftLaplacePotential(jnp.array([0.0, 2.0]), 1.0).log_density(0.0))
    [-1.1447 -2.4697]
    """

    observation: Array
    scale: Array | float

    def log_density(self, eta: ArrayLike) -> Array:
        fall = self._fall(eta)
        return math.log(2.0 / math.pi) + fall - jnp.log1p(jnp.exp(2.0 * fall)) - jnp.log(self.scale)

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        # The bend is short beside its tails in a broad cavity.
        return tilted_moments(self, mean, variance, power, num_nodes=80)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        z = self._standard(eta)
        curvature = -4.0 * jax.nn.sigmoid(2.0 * z) * jax.nn.sigmoid(-2.0 * z)
        return self.log_density(eta), jnp.tanh(z) / self.scale, curvature / jnp.square(self.scale)

    def mean(self, eta: ArrayLike) -> Array:
        return jnp.asarray(eta)


@potential
class AsymmetricLaplacePotential(_LocationPotential):
    r"""Exponential falls of two rates: with the asymmetry :math:`\kappa`, :math:`\kappa / \text{scale}` above the
    location and :math:`1 / (\kappa\,\text{scale})` below it.

    :param Array observation: observed values.
    :param Array scale: scales.
    :param Array asymmetry: :math:`\kappa`.

    **Example:**

    >>> print(AsymmetricLaplacePotential(jnp.array([-2.0, 2.0]), 1.0, 2.0).log_density(0.0))
    [-1.9163 -4.9163]
    """

    observation: Array
    scale: Array | float
    asymmetry: Array | float

    is_smooth: ClassVar[bool] = False

    def log_density(self, eta: ArrayLike) -> Array:
        z = self._standard(eta)
        return -jnp.where(z < 0.0, -z / self.asymmetry, z * self.asymmetry) - self._log_width()

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        """Closed form: the means of the two sides of a Gaussian variable."""
        deviation = jnp.sqrt(variance)
        distance = self.observation - jnp.asarray(mean)
        standard = distance / deviation
        density = norm.pdf(standard)
        above = distance * norm.cdf(standard) + deviation * density
        low, high = 1.0 / (self.asymmetry * self.scale), self.asymmetry / self.scale
        value = -high * above - low * (above - distance) - self._log_width()
        return ExpectedLogDensity(
            value,
            high * norm.cdf(standard) - low * norm.cdf(-standard),
            -0.5 * (low + high) * density / deviation,
        )

    def mean(self, eta: ArrayLike) -> Array:
        asymmetry = jnp.asarray(self.asymmetry)
        return jnp.asarray(eta) + self.scale * (1.0 / asymmetry - asymmetry)

    def _log_width(self) -> Array:
        asymmetry = jnp.asarray(self.asymmetry)
        return jnp.log(self.scale) + jnp.log(asymmetry + 1.0 / asymmetry)
