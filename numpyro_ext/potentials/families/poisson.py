"""Poisson counts with a log link and with a softplus link."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from ..base import Potential, potential
from ..integrals.stirling import stirling_error
from ..integrals.tilted.nodes_around_mode import (
    NARROW,
    AroundMode,
    falls_of_counts,
    moments_around_mode,
    nodes_of_counts,
)
from ..integrals.tilted.tilted_moments import tilted_moments_unless_wide
from ..moments import ExpectedLogDensity, LogFactor, Outcomes, TiltedMoments

_NO_EXPOSURE = 1e-35


def log_softplus(eta: Array) -> Array:
    """``log log(1 + e^eta)``, which below -40 is ``eta``, where the outer logarithm would come to see zero."""
    small = eta < -40.0
    safe = jnp.where(small, 0.0, eta)
    return jnp.where(small, eta, jnp.log(jax.nn.softplus(safe)))


def _log_poisson(count: Array, rate: Array, excess: Array, log_ratio: Array) -> Array:
    """Log probability of a count, given ``excess = rate / count - 1`` and ``log_ratio = log1p(excess)``.

    In this form, the parts that are as large as ``count * log(count)`` have cancelled on paper.
    """
    return _log_kernel(count, rate, excess, log_ratio) - _log_normaliser(count)


def _log_kernel(count: Array, rate: Array, excess: Array, log_ratio: Array) -> Array:
    return jnp.where(count <= 0.0, -rate, -count * (excess - log_ratio))


@jax.jit  # many nodes ask for it: traced once for all
def _log_normaliser(count: Array) -> Array:
    safe = jnp.where(count <= 0.0, 1.0, count)
    return jnp.where(count <= 0.0, 0.0, 0.5 * jnp.log(2.0 * math.pi * safe) + stirling_error(safe))


@potential
class PoissonExpPotential(Potential):
    r"""Counts with rate :math:`\text{exposure}\; e^{\eta}`.

    :param Array count: counts.
    :param Array exposure: factor of the rate.
    """

    count: Array
    exposure: Array | float = 1.0

    is_elementwise: ClassVar[bool] = True
    is_log_concave: ClassVar[bool] = True
    has_exponential_mean: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        return _PoissonExpKernel(self.count, self.exposure).log_density(eta) - self._log_normaliser(eta.dtype)

    def _log_normaliser(self, dtype: DTypeLike) -> Array:
        """Constant of the factor, which no node of an integral need compute."""
        return _log_normaliser(jnp.asarray(self.count, dtype))

    def outcomes(self) -> Outcomes:
        return Outcomes("count")

    def mean(self, eta: ArrayLike) -> Array:
        return self.exposure * jnp.exp(eta)

    def _tilted_moments(
        self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, *, only_log_z: bool
    ) -> TiltedMoments:
        """A short rule if no cavity variance exceeds four and the power is the Python number one, else quadrature."""
        # Without exposure a count of zero says nothing, and the logarithm of none has no digits.
        is_empty = (jnp.asarray(self.count) <= 0) & (jnp.asarray(self.exposure) == 0.0)
        kernel = _PoissonExpKernel(self.count, jnp.where(is_empty, _NO_EXPOSURE, self.exposure))
        found = exponential_tilted_moments(kernel, mean, variance, power, only_log_z)
        return found._replace(log_z=found.log_z - power * self._log_normaliser(found.log_z.dtype))

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
class _PoissonExpKernel(PoissonExpPotential):
    """The same without what normalises the count."""

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        count = jnp.asarray(self.count, eta.dtype)
        log_exposure = jnp.log(jnp.asarray(self.exposure, eta.dtype))
        log_ratio = eta + (log_exposure - jnp.log(jnp.where(count > 0.0, count, 1.0)))
        excess = jnp.expm1(log_ratio)
        return _log_kernel(count, 1.0 + excess, excess, log_ratio)  # the rate is only asked for of a count of zero


class ExponentialFactors(LogFactor, Protocol):
    """Factors ``exp(count * eta - exposure * exp(eta))`` up to a constant, with any positive numbers for counts."""

    @property
    def count(self) -> Any: ...

    @property
    def exposure(self) -> Any: ...


def exponential_tilted_moments(
    factors: ExponentialFactors, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, only_log_z: bool = False
) -> TiltedMoments:
    """A short rule if no cavity variance exceeds four and the power is the Python number one, else quadrature."""
    return tilted_moments_unless_wide(factors, _narrow_tilted_moments, NARROW, mean, variance, power, only_log_z)


@jax.jit  # traced once, for moments and for derivatives of the log normaliser alone
def _way_to_mode(factors: ExponentialFactors, mean: Array, variance: Array) -> Array:
    r"""Distance of the tilted mode from the cavity mean.

    With :math:`w = v \lambda` at the mode, :math:`w + \log w = \log(v \lambda(\mu)) + v y`: Newton's method
    from the asymptotes of the solution. It need only be near: nodes around any point close to the mode serve.
    """
    count = jnp.asarray(factors.count, mean.dtype)
    z = jnp.log(variance) + jnp.log(jnp.asarray(factors.exposure, mean.dtype)) + mean + variance * count
    small, large = jnp.minimum(z, 1.0), jnp.maximum(z, 1.0)
    w = jnp.where(z < 1.0, jnp.exp(small) / (1.0 + jnp.exp(small)), large - jnp.log(large))
    w = jnp.maximum(w, jnp.finfo(mean.dtype).tiny)
    for _ in range(3):
        w = w * (1.0 + z - jnp.log(w)) / (1.0 + w)
    distance = variance * count - w
    for _ in range(2):  # as large as the count is, the difference may have few digits
        _, slope, curvature = factors.derivatives(mean + distance)
        distance = distance + (slope - distance / variance) / (1.0 / variance - curvature)
    return distance


def _narrow_tilted_moments(
    factors: ExponentialFactors, mean: Array, variance: Array, only_log_z: bool
) -> TiltedMoments:
    distance = _way_to_mode(*jax.lax.stop_gradient((factors, mean, variance)))

    def seen_from(center: Array) -> AroundMode:
        derivatives = factors.derivatives(center)
        rate = -derivatives[2]

        def fall(rise: Array) -> tuple[Array, Array]:
            lost = rate * rise
            return lost, -lost

        return AroundMode(derivatives, jnp.asarray(factors.count, center.dtype), falls_of_counts(fall))

    return moments_around_mode(mean, variance, distance, seen_from, nodes_of_counts, only_log_z)


@potential
class PoissonSoftplusPotential(Potential):
    r"""Counts with rate :math:`\text{exposure}\,\log(1 + e^{\eta})`.

    :param Array count: counts.
    :param Array exposure: factor of the rate.
    """

    count: Array
    exposure: Array | float = 1.0

    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        count = jnp.asarray(self.count, eta.dtype)
        safe_count = jnp.where(count > 0.0, count, 1.0)
        rate = self.exposure * jax.nn.softplus(eta)
        excess = (rate - safe_count) / safe_count
        near = jnp.abs(excess) < 0.5
        log_near = jnp.log1p(jnp.where(near, excess, 0.0))
        log_far = jnp.log(jnp.asarray(self.exposure, eta.dtype)) + log_softplus(eta) - jnp.log(safe_count)
        return _log_poisson(count, rate, excess, jnp.where(near, log_near, log_far))

    def outcomes(self) -> Outcomes:
        return Outcomes("count")

    def mean(self, eta: ArrayLike) -> Array:
        return self.exposure * jax.nn.softplus(jnp.asarray(eta))

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        count = jnp.asarray(self.count, eta.dtype)
        up, down = jax.nn.sigmoid(eta), jax.nn.sigmoid(-eta)
        # The derivative of the log of softplus, one where that is eta.
        small = eta < -40.0
        ratio = jnp.where(small, 1.0, up / jax.nn.softplus(jnp.where(small, 0.0, eta)))
        slope = count * ratio - self.exposure * up
        return self.log_density(eta), slope, count * ratio * (down - ratio) - self.exposure * up * down
