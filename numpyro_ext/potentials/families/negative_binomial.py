"""Overdispersed counts: negative binomial factors in the two parameterisations that NumPyro has."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..bounds.logistic_terms import two_sided_terms
from ..integrals.logistic_tilting import sigmoid
from ..integrals.stirling import log_rising_coefficient
from ..integrals.tilted_moments import tilted_moments
from ..moments import LogisticTerms, Outcomes, TiltedMoments

__all__ = ["NegativeBinomialExpPotential", "NegativeBinomialLogitPotential"]


@potential
class _Kernel(Potential):
    """The factor but for its constant, which no node of an integral need compute."""

    count: Array
    size: Array
    shift: Array

    is_log_concave: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        return self.derivatives(eta)[0]

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        """From one exponential."""
        right = sigmoid(jnp.asarray(eta) + self.shift)
        value = self.count * right.log + self.size * right.log_complement
        slope = self.count * right.complement - self.size * right.value
        return value, slope, -(self.count + self.size) * (right.value * right.complement)


class _NegativeBinomialPotential(Potential):
    """Counts with the log density ``count * log sigmoid(x) + size * log sigmoid(-x)`` of a shifted predictor ``x``."""

    is_elementwise: ClassVar[bool] = True
    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True
    has_exponential_mean: ClassVar[bool] = True

    def _parts(self, dtype: jnp.dtype) -> tuple[Array, Array, Array]:
        """Count, size and shift."""
        raise NotImplementedError

    def outcomes(self) -> Outcomes:
        return Outcomes("count")

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        count, size, shift = self._parts(eta.dtype)
        return log_rising_coefficient(count, size) + _Kernel(count, size, shift).log_density(eta)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        count, size, shift = self._parts(eta.dtype)
        value, slope, curvature = _Kernel(count, size, shift).derivatives(eta)
        return log_rising_coefficient(count, size) + value, slope, curvature

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        return self._tilted_moments(mean, variance, power)

    def log_normaliser(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> Array:
        return self._tilted_moments(mean, variance, power, only_log_z=True).log_z

    def _tilted_moments(
        self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, *, only_log_z: bool = False
    ) -> TiltedMoments:
        count, size, shift = self._parts(jnp.result_type(mean, variance, float))
        found = tilted_moments(_Kernel(count, size, shift), mean, variance, power, only_log_z=only_log_z)
        return found._replace(log_z=found.log_z + power * log_rising_coefficient(count, size))

    def logistic_terms(self) -> LogisticTerms:
        count, size, shift = self._parts(jnp.result_type(*jax.tree.leaves(self), float))
        return two_sided_terms(log_rising_coefficient(count, size), count, size, shift)


@potential
class NegativeBinomialExpPotential(_NegativeBinomialPotential):
    r"""Counts with mean :math:`m = \text{exposure}\; e^{\eta}` and variance :math:`m + m^2 / \text{concentration}`.

    :param Array count: counts.
    :param Array concentration: concentration of the gamma-distributed rate.
    :param Array exposure: factor of the mean.
    """

    count: Array
    concentration: Array | float
    exposure: Array | float = 1.0

    def _parts(self, dtype: jnp.dtype) -> tuple[Array, Array, Array]:
        concentration = jnp.asarray(self.concentration, dtype)
        shift = jnp.log(jnp.asarray(self.exposure, dtype)) - jnp.log(concentration)
        return jnp.asarray(self.count, dtype), concentration, shift

    def mean(self, eta: ArrayLike) -> Array:
        return self.exposure * jnp.exp(eta)


@potential
class NegativeBinomialLogitPotential(_NegativeBinomialPotential):
    r"""Successes before ``total`` failures, with success probability :math:`1 / (1 + e^{-\eta})`.

    :param Array count: successes.
    :param Array total: failures, any positive number.
    """

    count: Array
    total: Array | float

    def _parts(self, dtype: jnp.dtype) -> tuple[Array, Array, Array]:
        return jnp.asarray(self.count, dtype), jnp.asarray(self.total, dtype), jnp.zeros((), dtype)

    def mean(self, eta: ArrayLike) -> Array:
        return self.total * jnp.exp(eta)
