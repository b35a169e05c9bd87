"""Overdispersed counts: negative binomial factors in the two parameterisations that NumPyro has."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..bounds.logistic_terms import two_sided_terms
from ..integrals.stirling import log_rising_coefficient
from ..moments import LogisticTerms

__all__ = ["NegativeBinomialExpPotential", "NegativeBinomialLogitPotential"]


@potential
class NegativeBinomialExpPotential(Potential):
    r"""Counts with mean :math:`m = \text{exposure}\; e^{\eta}` and variance :math:`m + m^2 / \text{concentration}`.

    :param Array count: counts.
    :param Array concentration: concentration of the gamma-distributed rate.
    :param Array exposure: factor of the mean.
    """

    count: Array
    concentration: Array | float
    exposure: Array | float = 1.0

    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True
    has_exponential_mean: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        count, concentration = jnp.asarray(self.count, eta.dtype), jnp.asarray(self.concentration, eta.dtype)
        logit = eta + jnp.log(self.exposure) - jnp.log(concentration)
        return (
            log_rising_coefficient(count, concentration)
            + count * jax.nn.log_sigmoid(logit)
            + concentration * jax.nn.log_sigmoid(-logit)
        )

    def mean(self, eta: ArrayLike) -> Array:
        return self.exposure * jnp.exp(eta)

    def logistic_terms(self) -> LogisticTerms:
        dtype = jnp.result_type(self.count, self.concentration, self.exposure, float)
        count, concentration = jnp.asarray(self.count, dtype), jnp.asarray(self.concentration, dtype)
        shift = jnp.log(jnp.asarray(self.exposure, dtype)) - jnp.log(concentration)
        return two_sided_terms(log_rising_coefficient(count, concentration), count, concentration, shift)


@potential
class NegativeBinomialLogitPotential(Potential):
    r"""Successes before ``total`` failures, with success probability :math:`1 / (1 + e^{-\eta})`.

    :param Array count: successes.
    :param Array total: failures, any positive number.
    """

    count: Array
    total: Array | float

    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True
    has_exponential_mean: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        count, total = jnp.asarray(self.count, eta.dtype), jnp.asarray(self.total, eta.dtype)
        constant = log_rising_coefficient(count, total)
        return constant + count * jax.nn.log_sigmoid(eta) + total * jax.nn.log_sigmoid(-eta)

    def mean(self, eta: ArrayLike) -> Array:
        return self.total * jnp.exp(eta)

    def logistic_terms(self) -> LogisticTerms:
        dtype = jnp.result_type(self.count, self.total, float)
        count, total = jnp.asarray(self.count, dtype), jnp.asarray(self.total, dtype)
        return two_sided_terms(log_rising_coefficient(count, total), count, total, jnp.zeros((), dtype))
