"""Binary and binomial observations with probit and logit links."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..bounds.logistic_terms import two_sided_terms
from ..integrals.normal import TruncatedNormal, log_ndtr, truncated_normal
from ..integrals.stirling import log_binomial_coefficient
from ..integrals.tilted_moments import sum_over_nodes, tilted_moments_unless_wide, with_site
from ..integrals.tilted_window import Cavity
from ..moments import LogisticTerms, TiltedMoments

__all__ = ["BinomialLogitPotential", "LogitPotential", "ProbitPotential"]


_NARROW = 2.0
_SPACING, _NUM_SPACINGS = 0.4, 23


def _signs(label: Array, dtype: jnp.dtype) -> Array:
    """+1 for a label that is true, -1 for one that is not."""
    return 2.0 * jnp.asarray(label).astype(dtype) - 1.0


def _sigmoids(logit: Array) -> tuple[Array, Array, Array]:
    """``log sigmoid(x)``, ``sigmoid(x)`` and ``sigmoid(-x)`` from one exponential."""
    decayed = jnp.exp(-jnp.abs(logit))
    larger = 1.0 / (1.0 + decayed)
    smaller = decayed * larger
    positive = logit >= 0.0
    log_sigmoid = jnp.minimum(logit, 0.0) - jnp.log1p(decayed)
    return log_sigmoid, jnp.where(positive, larger, smaller), jnp.where(positive, smaller, larger)


@potential
class ProbitPotential(Potential):
    r"""Label one with probability :math:`\Phi(\eta)`.

    :param Array label: zeros and ones.
    """

    label: Array

    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        return log_ndtr(_signs(self.label, eta.dtype) * eta)

    def mean(self, eta: ArrayLike) -> Array:
        return jax.scipy.special.ndtr(jnp.asarray(eta))

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        sign = _signs(self.label, eta.dtype)
        part = truncated_normal(sign * eta)
        return part.log_mass, sign * part.ratio, -part.shrinkage

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        """Closed form (Rasmussen and Williams 2006, section 3.9) for the Python number one, else quadrature."""
        if not (isinstance(power, int | float) and power == 1):
            return super().tilted_moments(mean, variance, power)
        dtype = jnp.result_type(mean, variance, float)
        mean, variance = jnp.asarray(mean, dtype), jnp.asarray(variance, dtype)
        sign = _signs(self.label, dtype)
        total = 1.0 + variance
        scale = jnp.sqrt(total)
        part = truncated_normal(sign * mean / scale)
        alpha = sign * part.ratio / scale
        weight = variance / total
        # 1 - weight * shrinkage as a sum of positive terms.
        ratio = (1.0 + variance * part.variance) / total
        beta = part.shrinkage / total
        return TiltedMoments(
            log_z=part.log_mass,
            mean=jnp.where(weight < 0.5, mean + variance * alpha, _far_mean(mean, sign, scale, part, weight)),
            variance=variance * ratio,
            site_precision=beta / ratio,
            site_shift=(alpha + beta * mean) / ratio,
        )


def _far_mean(mean: Array, sign: Array, scale: Array, part: TruncatedNormal, weight: Array) -> Array:
    """``mean + variance * alpha`` without cancellation when the cavity is wide: the truncated mean, plus the rest."""
    return (1.0 - weight) * mean + weight * sign * scale * part.mean


def _narrow_tilted_moments(sign: Array, mean: Array, variance: Array) -> TiltedMoments:
    r"""Tilted moments of logistic factors under cavities that are not wide, by the trapezoidal rule.

    The poles of the factor lie :math:`\pi` off the real line, so with nodes :math:`h\sqrt v` apart the relative error
    is about :math:`\exp(\pi^2/2v - 2\pi^2/h\sqrt v)`, below 1e-12 here. The slope of the log factor is at most one, so
    the tilted density stays within two standard deviations of the cavity.
    """
    fixed_mean, fixed_variance = jax.lax.stop_gradient((mean, variance))
    log_height, right, wrong = _sigmoids(jax.lax.stop_gradient(sign) * fixed_mean)
    # One Newton step towards the mode; positions are distances from the cavity mean, held under differentiation.
    center = fixed_variance * sign * wrong / (1.0 + fixed_variance * wrong * right)
    spacing = _SPACING * jnp.sqrt(fixed_variance)
    moved = mean - fixed_mean

    def terms(number: Array) -> tuple[Array, ...]:
        x = center + number * spacing
        value, _, wrong = _sigmoids(sign * (fixed_mean + x))
        density = jnp.exp(value - log_height - 0.5 * jnp.square(x - moved) / variance)
        slope, distance = density * sign * wrong, x - center
        return density, density * distance, density * distance**2, slope, slope * distance

    numbers = jnp.arange(-_NUM_SPACINGS, _NUM_SPACINGS + 1, dtype=mean.dtype)
    total, *rest = sum_over_nodes(terms, numbers, mean)
    first, second, slope, product = (value / total for value in rest)
    log_z = log_height + jnp.log(total * spacing) - 0.5 * jnp.log(2.0 * math.pi * variance)
    shift = center + first - moved
    cavity = Cavity(mean, variance)
    return with_site(log_z, shift, second - first**2, slope, first * slope - product, cavity)


@potential
class LogitPotential(Potential):
    r"""Label one with probability :math:`1 / (1 + e^{-\eta})`.

    :param Array label: zeros and ones.
    """

    label: Array

    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        return jax.nn.log_sigmoid(_signs(self.label, eta.dtype) * eta)

    def mean(self, eta: ArrayLike) -> Array:
        return jax.nn.sigmoid(jnp.asarray(eta))

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        """A short rule if no cavity variance exceeds two and the power is the Python number one, else quadrature."""
        sign = _signs(self.label, jnp.result_type(mean, variance, float))
        return tilted_moments_unless_wide(self, partial(_narrow_tilted_moments, sign), _NARROW, mean, variance, power)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        sign = _signs(self.label, eta.dtype)
        log_right, right, wrong = _sigmoids(sign * eta)
        return log_right, sign * wrong, -wrong * right

    def logistic_terms(self) -> LogisticTerms:
        sign = _signs(self.label, jnp.result_type(self.label, float))
        return LogisticTerms(
            jnp.zeros_like(sign),
            jnp.zeros_like(sign),
            jnp.ones_like(sign)[None],
            -sign[None],
            jnp.zeros_like(sign)[None],
        )


@potential
class BinomialLogitPotential(Potential):
    r"""``count`` successes among ``total`` trials, each with probability :math:`1 / (1 + e^{-\eta})`.

    :param Array count: successes.
    :param Array total: trials.
    """

    count: Array
    total: Array

    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        count, total = jnp.asarray(self.count, eta.dtype), jnp.asarray(self.total, eta.dtype)
        successes, failures = count * jax.nn.log_sigmoid(eta), (total - count) * jax.nn.log_sigmoid(-eta)
        return log_binomial_coefficient(total, count) + successes + failures

    def mean(self, eta: ArrayLike) -> Array:
        return self.total * jax.nn.sigmoid(jnp.asarray(eta))

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        count, total = jnp.asarray(self.count, eta.dtype), jnp.asarray(self.total, eta.dtype)
        log_up, up, down = _sigmoids(eta)
        # log sigmoid(-eta) = log sigmoid(eta) - eta.
        value = log_binomial_coefficient(total, count) + total * log_up - (total - count) * eta
        return value, count * down - (total - count) * up, -total * up * down

    def logistic_terms(self) -> LogisticTerms:
        dtype = jnp.result_type(self.count, self.total, float)
        count, total = jnp.asarray(self.count, dtype), jnp.asarray(self.total, dtype)
        return two_sided_terms(log_binomial_coefficient(total, count), count, total - count, jnp.zeros((), dtype))
