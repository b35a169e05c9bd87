"""Poisson counts with a log link and with a softplus link."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .base import Potential, potential

__all__ = ["PoissonExpPotential", "PoissonSoftplusPotential"]


def _log_softplus(eta: Array) -> Array:
    """``log log(1 + e^eta)``; below -40 it is ``eta - e^eta / 2``, where the outer logarithm would see zero."""
    small = eta < -40.0
    safe = jnp.where(small, 0.0, eta)
    return jnp.where(small, eta, jnp.log(jax.nn.softplus(safe)))


@potential
class PoissonExpPotential(Potential):
    r"""Counts with rate :math:`\text{exposure}\; e^{\eta}`.

    :param Array count: counts.
    :param Array exposure: factor of the rate.
    """

    count: Array
    exposure: Array | float = 1.0

    is_log_concave: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        count, log_rate = jnp.asarray(self.count, eta.dtype), eta + jnp.log(self.exposure)
        return count * log_rate - jnp.exp(log_rate) - jax.lax.lgamma(count + 1.0)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        rate = self.exposure * jnp.exp(eta)
        return self.log_density(eta), jnp.asarray(self.count, eta.dtype) - rate, -rate


@potential
class PoissonSoftplusPotential(Potential):
    r"""Counts with rate :math:`\text{exposure}\,\log(1 + e^{\eta})`.

    :param Array count: counts.
    :param Array exposure: factor of the rate.
    """

    count: Array
    exposure: Array | float = 1.0

    is_log_concave: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        count = jnp.asarray(self.count, eta.dtype)
        log_rate = jnp.log(self.exposure) + _log_softplus(eta)
        return count * log_rate - self.exposure * jax.nn.softplus(eta) - jax.lax.lgamma(count + 1.0)
