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
from ..moments import LogisticTerms, Outcomes

__all__ = ["NegativeBinomialExpPotential", "NegativeBinomialLogitPotential"]


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
        logit = eta + shift
        constant = log_rising_coefficient(count, size)
        return constant + count * jax.nn.log_sigmoid(logit) + size * jax.nn.log_sigmoid(-logit)

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
