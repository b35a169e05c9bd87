"""Poisson counts with a log link and with a softplus link."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .base import ExpectedLogDensity, Potential, potential
from .stirling import stirling_error

__all__ = ["PoissonExpPotential", "PoissonSoftplusPotential"]


def _log_softplus(eta: Array) -> Array:
    """``log log(1 + e^eta)``, which below -40 is ``eta``, where the outer logarithm would come to see zero."""
    small = eta < -40.0
    safe = jnp.where(small, 0.0, eta)
    return jnp.where(small, eta, jnp.log(jax.nn.softplus(safe)))


def _log_poisson(count: Array, rate: Array, excess: Array, log_ratio: Array) -> Array:
    """Log probability of a count, given ``excess = rate / count - 1`` and ``log_ratio = log1p(excess)``.

    In this form, the parts that are as large as ``count * log(count)`` have cancelled on paper.
    """
    is_zero = count <= 0.0
    safe = jnp.where(is_zero, 1.0, count)
    normaliser = 0.5 * jnp.log(2.0 * math.pi * safe) + stirling_error(safe)
    return jnp.where(is_zero, -rate, -safe * (excess - log_ratio) - normaliser)


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
        count = jnp.asarray(self.count, eta.dtype)
        log_exposure = jnp.log(jnp.asarray(self.exposure, eta.dtype))
        log_ratio = eta + (log_exposure - jnp.log(jnp.where(count > 0.0, count, 1.0)))
        return _log_poisson(count, jnp.exp(eta + log_exposure), jnp.expm1(log_ratio), log_ratio)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        rate = self.exposure * jnp.exp(eta)
        return self.log_density(eta), jnp.asarray(self.count, eta.dtype) - rate, -rate

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        """Closed form: the rate is a log-normal variable."""
        dtype = jnp.result_type(mean, variance, float)
        mean, half = jnp.asarray(mean, dtype), 0.5 * jnp.asarray(variance, dtype)
        count = jnp.asarray(self.count, dtype)
        log_exposure = jnp.log(jnp.asarray(self.exposure, dtype))
        log_ratio = mean + (log_exposure - jnp.log(jnp.where(count > 0.0, count, 1.0)))
        rate = jnp.exp(mean + half + log_exposure)
        value = _log_poisson(count, rate, jnp.expm1(log_ratio + half), log_ratio)
        return ExpectedLogDensity(value, count - rate, jnp.broadcast_to(-0.5 * rate, value.shape))


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
        safe_count = jnp.where(count > 0.0, count, 1.0)
        rate = self.exposure * jax.nn.softplus(eta)
        excess = (rate - safe_count) / safe_count
        near = jnp.abs(excess) < 0.5
        log_near = jnp.log1p(jnp.where(near, excess, 0.0))
        log_far = jnp.log(jnp.asarray(self.exposure, eta.dtype)) + _log_softplus(eta) - jnp.log(safe_count)
        return _log_poisson(count, rate, excess, jnp.where(near, log_near, log_far))
