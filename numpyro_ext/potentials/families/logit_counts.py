"""Counts whose probabilities are powers of a logistic function: binomial ones, and negative binomial ones in the two
parameterisations that NumPyro has."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..integrals.stirling import log_binomial_coefficient, log_rising_coefficient
from ..integrals.tilted.logistic_tilting import sigmoid
from ..integrals.tilted.nodes_around_mode import (
    NARROW,
    AroundMode,
    falls_of_counts,
    moments_around_mode,
    nodes_of_counts,
)
from ..integrals.tilted.tilted_moments import tilted_moments_unless_wide
from ..integrals.tilted.tilted_window import Cavity, log_concave_mode
from ..moments import LogisticTerms, Outcomes, TiltedMoments


@potential
class _LogitCounts(Potential):
    r"""Factors :math:`\sigma(\eta + a)^{k} \sigma(-\eta - a)^{r}`: what depends on the predictor.

    :param Array count: :math:`k`, not negative.
    :param Array rest: :math:`r`, not negative.
    :param Array shift: :math:`a`.
    """

    count: Array
    rest: Array
    shift: Array

    is_log_concave: ClassVar[bool] = True

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        """From one exponential."""
        right = sigmoid(jnp.asarray(eta) + self.shift)
        value = self.count * right.log + self.rest * right.log_complement
        slope = self.count * right.complement - self.rest * right.value
        return value, slope, -(self.count + self.rest) * (right.value * right.complement)

    def seen_from(self, center: Array) -> AroundMode:
        r"""With :math:`p = \sigma(c + a)` and :math:`n = k + r` it is :math:`F = n \log(1 + p (e^x - 1))`. The sign is
        turned so that :math:`p \le 1/2`, which keeps the digits of the logarithm."""
        logit = center + self.shift
        is_low = jax.lax.stop_gradient(logit) <= 0.0
        at_center, number = sigmoid(logit), self.count + self.rest
        p = jnp.where(is_low, at_center.value, at_center.complement)

        derivatives = self.derivatives(center)

        def fall(rise: Array) -> tuple[Array, Array]:
            excess = p * rise
            return number * jnp.log1p(excess), derivatives[2] * rise / (1.0 + excess)

        linear, sign = jnp.where(is_low, self.count, self.rest), jnp.where(is_low, 1.0, -1.0)
        return AroundMode(derivatives, linear, falls_of_counts(fall), sign.astype(center.dtype))


def _narrow(factors: _LogitCounts, mean: Array, variance: Array, only_log_z: bool) -> TiltedMoments:
    fixed_mean, fixed_variance, fixed = jax.lax.stop_gradient((mean, variance, factors))
    cavity = Cavity(jnp.zeros_like(fixed_mean), fixed_variance)
    distance = log_concave_mode(lambda x: fixed.derivatives(fixed_mean + x), cavity, jnp.ones_like(fixed_mean))
    return moments_around_mode(mean, variance, distance, factors.seen_from, nodes_of_counts, only_log_z)


class _LogitCountPotential(Potential):
    """A constant, which no node of an integral need compute, times powers of a logistic function and its complement."""

    is_elementwise: ClassVar[bool] = True
    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True

    @abstractmethod
    def _parts(self, dtype: jnp.dtype) -> tuple[Array, _LogitCounts]:
        """The logarithm of the constant, and the rest."""

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        constant, counts = self._parts(eta.dtype)
        value, slope, curvature = counts.derivatives(eta)
        return constant + value, slope, curvature

    def _tilted_moments(
        self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, *, only_log_z: bool
    ) -> TiltedMoments:
        """A short rule if no cavity variance exceeds four and the power is the Python number one, else quadrature."""
        constant, counts = self._parts(jnp.result_type(mean, variance, float))
        found = tilted_moments_unless_wide(counts, _narrow, NARROW, mean, variance, power, only_log_z)
        return found._replace(log_z=found.log_z + power * constant)

    def logistic_terms(self) -> LogisticTerms:
        constant, counts = self._parts(jnp.result_type(*jax.tree.leaves(self), float))
        return two_sided_terms(constant, counts.count, counts.rest, counts.shift)


@potential
class BinomialLogitPotential(_LogitCountPotential):
    r"""``count`` successes among ``total`` trials, each with probability :math:`1 / (1 + e^{-\eta})`.

    :param Array count: successes.
    :param Array total: trials.
    """

    count: Array
    total: Array

    def _parts(self, dtype: jnp.dtype) -> tuple[Array, _LogitCounts]:
        count, total = jnp.asarray(self.count, dtype), jnp.asarray(self.total, dtype)
        return log_binomial_coefficient(total, count), _LogitCounts(count, total - count, jnp.zeros((), dtype))

    def outcomes(self) -> Outcomes:
        return Outcomes("count", limit=self.total)

    def mean(self, eta: ArrayLike) -> Array:
        return self.total * jax.nn.sigmoid(jnp.asarray(eta))


@potential
class NegativeBinomialExpPotential(_LogitCountPotential):
    r"""Counts with mean :math:`m = \text{exposure}\; e^{\eta}` and variance :math:`m + m^2 / \text{concentration}`.

    :param Array count: counts.
    :param Array concentration: concentration of the gamma-distributed rate.
    :param Array exposure: factor of the mean.
    """

    count: Array
    concentration: Array | float
    exposure: Array | float = 1.0

    has_exponential_mean: ClassVar[bool] = True

    def _parts(self, dtype: jnp.dtype) -> tuple[Array, _LogitCounts]:
        count, concentration = jnp.asarray(self.count, dtype), jnp.asarray(self.concentration, dtype)
        shift = jnp.log(jnp.asarray(self.exposure, dtype)) - jnp.log(concentration)
        return log_rising_coefficient(count, concentration), _LogitCounts(count, concentration, shift)

    def outcomes(self) -> Outcomes:
        return Outcomes("count")

    def mean(self, eta: ArrayLike) -> Array:
        return self.exposure * jnp.exp(eta)


@potential
class NegativeBinomialLogitPotential(_LogitCountPotential):
    r"""Successes before ``total`` failures, with success probability :math:`1 / (1 + e^{-\eta})`.

    :param Array count: successes.
    :param Array total: failures, any positive number.
    """

    count: Array
    total: Array | float

    has_exponential_mean: ClassVar[bool] = True

    def _parts(self, dtype: jnp.dtype) -> tuple[Array, _LogitCounts]:
        count, total = jnp.asarray(self.count, dtype), jnp.asarray(self.total, dtype)
        return log_rising_coefficient(count, total), _LogitCounts(count, total, jnp.zeros((), dtype))

    def outcomes(self) -> Outcomes:
        return Outcomes("count")

    def mean(self, eta: ArrayLike) -> Array:
        return self.total * jnp.exp(eta)


def two_sided_terms(constant: Array, successes: Array, failures: Array, shift: Array) -> LogisticTerms:
    r"""Terms of ``constant + successes * log_sigmoid(x) + failures * log_sigmoid(-x)`` with :math:`x = \eta + b`.

    One term is enough, since the two log sigmoids differ by ``x``. It is turned to the side of the larger count, where
    the linear part does not cancel against it.

    :param Array constant: what does not depend on the predictor.
    :param Array successes: weights of the log sigmoid, any non-negative numbers.
    :param Array failures: weights of its mirror image.
    :param Array shift: the number :math:`b`.
    """
    constant, successes, failures, shift = jnp.broadcast_arrays(constant, successes, failures, shift)
    sign = jnp.where(successes > failures, -1.0, 1.0).astype(constant.dtype)
    linear = sign * jnp.minimum(successes, failures)
    return LogisticTerms(
        constant=constant + linear * shift,
        linear=linear,
        weights=(successes + failures)[None],
        slopes=sign[None],
        offsets=(sign * shift)[None],
    )
