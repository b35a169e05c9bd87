"""A short rule for the tilted moments of factors made of one or two logistic functions."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..moments import LogFactor, TiltedMoments
from .tilted_moments import sum_over_nodes, tilted_moments_unless_wide, with_site
from .tilted_window import Cavity

__all__ = ["LogisticFactor", "Sigmoid", "logistic_tilted_moments", "sigmoid"]

_NARROW = 4.0
# Of nodes, in standard deviations of the cavity, as functions of the widest variance up to one: errors stay below 1e-13
# up to there (against four times as many nodes). Above two the poles are as near in standard deviations as they are in
# units, and nodes keep the distance in units that they have there; the mode may be further from where it is sought.
_SPACING, _SPACING_SLOPE = 0.72, -0.32
_REACH, _REACH_SLOPE, _REACH_OF_WIDE = 8.5, 0.7, 1.5
_MOST_SPACINGS = 36


class Sigmoid(NamedTuple):
    """The sigmoid of a logit as ``weight * exp(exponent)``, in which a sum over nodes needs no logarithm."""

    exponent: Array
    """The smaller of the logit and zero."""
    weight: Array
    """Between a half and one."""
    value: Array
    complement: Array
    """Of the negative logit, which is the slope of the logarithm."""

    decayed: Array
    """Exponential of minus the distance of the logit from zero."""

    @property
    def log(self) -> Array:
        return self.exponent - jnp.log1p(self.decayed)


def sigmoid(logit: Array) -> Sigmoid:
    """From one exponential."""
    decayed = jnp.exp(-jnp.abs(logit))
    larger = 1.0 / (1.0 + decayed)
    smaller = decayed * larger
    positive = logit >= 0.0
    value, complement = jnp.where(positive, larger, smaller), jnp.where(positive, smaller, larger)
    return Sigmoid(jnp.minimum(logit, 0.0), larger, value, complement, decayed)


class LogisticFactor(LogFactor, Protocol):
    """A factor that can be had as a product in which no logarithm is taken."""

    def product(self, eta: Array) -> tuple[Array, Array, Array]:
        """The factor at ``eta`` as ``weight * exp(exponent)`` with a weight that is neither large nor small: exponent,
        weight, and the slope of the logarithm."""


def logistic_tilted_moments(
    potential: LogisticFactor, mean: ArrayLike, variance: ArrayLike, power: ArrayLike
) -> TiltedMoments:
    """A short rule where no cavity variance exceeds four and the power is the Python number one, else quadrature.

    :param LogisticFactor potential: log-concave factors with slopes between -1 and 1, analytic within :math:`\\pi` of
        the real line, as a logistic function or a product of a rising and a falling one.
    """
    return tilted_moments_unless_wide(potential, _narrow, _NARROW, mean, variance, power)


def _narrow(potential: LogisticFactor, mean: Array, variance: Array) -> TiltedMoments:
    r"""Tilted moments under cavities that are not wide, by the trapezoidal rule.

    The poles of the factor lie :math:`\pi` off the real line, so with nodes :math:`h\sqrt v` apart the relative error
    is about :math:`\exp(\pi^2/2v - 2\pi^2/h\sqrt v)`, below 1e-12 here, and nodes may stand the wider apart the
    narrower the cavity. The slope of the log factor is at most one, so the tilted density stays within two standard
    deviations of the cavity.
    """
    fixed_mean, fixed_variance, frozen = jax.lax.stop_gradient((mean, variance, potential))
    log_height, slope, curvature = frozen.derivatives(fixed_mean)
    # One Newton step towards the mode; positions are distances from the cavity mean, held under differentiation.
    center = fixed_variance * slope / (1.0 - fixed_variance * curvature)
    most = jnp.max(fixed_variance, initial=0.0)
    widest, excess = jnp.minimum(most, 1.0), jnp.sqrt(jnp.maximum(most, 2.0) / 2.0)
    step = (_SPACING + _SPACING_SLOPE * widest) / excess
    reach = _REACH + _REACH_SLOPE * widest + _REACH_OF_WIDE * math.sqrt(2.0) * (excess - 1.0)
    spacing = step * jnp.sqrt(fixed_variance)
    moved = mean - fixed_mean

    def terms(number: Array) -> tuple[Array, ...]:
        x = center + number * spacing
        exponent, weight, slope = potential.product(fixed_mean + x)
        density = weight * jnp.exp(exponent - log_height - 0.5 * jnp.square(x - moved) / variance)
        weighted, distance = density * slope, x - center
        return density, density * distance, density * distance**2, weighted, weighted * distance

    numbers = jnp.arange(-_MOST_SPACINGS, _MOST_SPACINGS + 1, dtype=mean.dtype)
    # At the widest, rounding must not tell whether the last nodes are used.
    largest = reach / step + 0.5
    total, *rest = sum_over_nodes(terms, numbers, is_used=lambda number: jnp.abs(number) <= largest)
    first, second, slope, product = (value / total for value in rest)
    log_z = log_height + jnp.log(total * spacing) - 0.5 * jnp.log(2.0 * math.pi * variance)
    shift = center + first - moved
    cavity = Cavity(mean, variance)
    return with_site(log_z, shift, second - first**2, slope, first * slope - product, cavity)
