"""A short rule for the tilted moments of factors made of one or two logistic functions."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ...moments import LogFactor, TiltedMoments
from .tilted_moments import sum_over_nodes, tilted_moments_unless_wide
from .tilted_site import with_site
from .tilted_window import Cavity

_NARROW = 16.0
# Gauss-Hermite rules up to variances of one, whose errors stay below 1e-13 (against sums over many more nodes).
_NUM_NODES = (8, 12, 16, 20, 24, 28, 32, 36, 40)
_WIDEST_OF_RULE = (0.03, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
# Beyond, even nodes: between one and two at a fixed distance in standard deviations of the cavity; above two the poles
# are as near in standard deviations as they are in units, and nodes keep the distance in units that they have there;
# the mode may be further from where it is sought.
_SPACING, _REACH, _REACH_OF_WIDE = 0.4, 9.2, 1.5
_MOST_PAIRS = 94


class Sigmoid(NamedTuple):
    """The sigmoid of a logit."""

    value: Array
    complement: Array
    """Sigmoid of the negative logit, which is the slope of the logarithm."""
    log: Array
    log_complement: Array


def sigmoid(logit: Array) -> Sigmoid:
    """From one exponential."""
    # Not by abs and minimum: their derivatives at zero are of different sides, and the sum would be of neither.
    positive = logit >= 0.0
    decayed = jnp.exp(jnp.where(positive, -logit, logit))
    larger = 1.0 / (1.0 + decayed)
    smaller = decayed * larger
    value, complement = jnp.where(positive, larger, smaller), jnp.where(positive, smaller, larger)
    tail = jnp.log1p(decayed)
    return Sigmoid(value, complement, jnp.where(positive, 0.0, logit) - tail, jnp.where(positive, -logit, 0.0) - tail)


def log_sigmoid(logit: Array) -> Array:
    """Log probability of :func:`sigmoid` alone."""
    positive = logit >= 0.0
    return jnp.where(positive, 0.0, logit) - jnp.log1p(jnp.exp(jnp.where(positive, -logit, logit)))


class LogisticView(NamedTuple):
    r"""A factor as seen from a predictor :math:`c`,

    .. math:: t(c + x) = t(c) / (\text{level} + \text{fall}\, e^x + \text{rise}\, e^{-x}),

    with parts that are not negative and sum to one: where they are taken at ``c``, nothing overflows or cancels
    however far ``c`` is from the data.
    """

    log_value: Array
    level: Array
    fall: Array
    rise: Array

    @classmethod
    def of(cls, constant: Array, under: Sigmoid, above: Sigmoid) -> LogisticView:
        """View of ``exp(constant)`` times a falling and a rising sigmoid, which have these values at the predictor."""
        level = under.value * above.value + under.complement * above.complement
        fall, rise = under.complement * above.value, above.complement * under.value
        return cls(constant + under.log + above.log, level, fall, rise)


class LogisticFactor(LogFactor, Protocol):
    """A factor that is a logistic function, or a product of a rising and a falling one."""

    def seen_from(self, eta: Array) -> LogisticView:
        """The factor as a function of the distance from ``eta``."""


def logistic_tilted_moments(
    potential: LogisticFactor, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, only_log_z: bool = False
) -> TiltedMoments:
    """A short rule where no cavity variance exceeds sixteen and the power is the Python number one, else quadrature.

    :param LogisticFactor potential: log-concave factors with slopes between -1 and 1, analytic within :math:`\\pi` of
        the real line.
    """
    return tilted_moments_unless_wide(potential, _narrow, _NARROW, mean, variance, power, only_log_z)


@functools.cache
def _hermite_rules() -> tuple[np.ndarray, np.ndarray]:
    """Positive nodes of each rule, and the logarithms of their weights over the normal density."""
    nodes = np.zeros((len(_NUM_NODES), _MOST_PAIRS))
    log_weights = np.full(nodes.shape, -np.inf)
    for rule, number in enumerate(_NUM_NODES):
        z, weight = np.polynomial.hermite_e.hermegauss(number)
        half = number // 2
        nodes[rule, :half], log_weights[rule, :half] = z[half:], np.log(weight[half:]) + 0.5 * z[half:] ** 2
    return nodes, log_weights


def _rule(widest: Array) -> tuple[Array, Array]:
    """Positive nodes and log weights for cavities of this variance at most, filled up with nodes without weight.

    The poles of the factor lie :math:`\\pi` off the real line. With even nodes :math:`h \\sqrt v` apart the relative
    error is about :math:`\\exp(\\pi^2/2v - 2\\pi^2/h\\sqrt v)`, below 1e-12 here.
    """
    nodes, log_weights = (jnp.asarray(table, widest.dtype) for table in _hermite_rules())
    index = jnp.searchsorted(jnp.asarray(_WIDEST_OF_RULE, widest.dtype), widest)
    is_hermite = index < len(_NUM_NODES)
    excess = jnp.sqrt(jnp.maximum(widest, 2.0) / 2.0)
    step = _SPACING / excess
    reach = _REACH + _REACH_OF_WIDE * math.sqrt(2.0) * (excess - 1.0)
    even = step * (jnp.arange(_MOST_PAIRS, dtype=widest.dtype) + 0.5)
    even_weights = jnp.where(even <= reach + step, jnp.log(step), -jnp.inf)
    index = jnp.minimum(index, len(_NUM_NODES) - 1)
    return jnp.where(is_hermite, nodes[index], even), jnp.where(is_hermite, log_weights[index], even_weights)


def _narrow(potential: LogisticFactor, mean: Array, variance: Array, only_log_z: bool) -> TiltedMoments:
    """Tilted moments under cavities that are not wide, by one rule for all of them around where the modes are about.

    The slope of the log factor is at most one, so the tilted density stays within two standard deviations of the
    cavity. Nodes to either side of the center are made together, from the same exponential.
    """
    fixed_mean, fixed_variance, frozen = jax.lax.stop_gradient((mean, variance, potential))
    _, slope, curvature = frozen.derivatives(fixed_mean)
    # One Newton step towards the mode; positions are distances from the cavity mean, held under differentiation.
    tilted_variance = fixed_variance / (1.0 - fixed_variance * curvature)
    center = tilted_variance * slope
    widest = jnp.max(fixed_variance, initial=0.0)
    scale = jnp.sqrt(jnp.where(widest <= _WIDEST_OF_RULE[-1], tilted_variance, fixed_variance))
    moved = mean - fixed_mean
    log_value, level, fall, rise = potential.seen_from(fixed_mean + center)
    bend, lean = scale**2 / variance, scale * (center - moved) / variance

    def terms(pair: tuple[Array, Array]) -> tuple[Array, ...]:
        z, log_weight = pair
        growth = jnp.exp(scale * z)
        decay = 1.0 / growth
        even, odd = log_weight - 0.5 * bend * z**2, lean * z

        def side(exponent: Array, growth: Array, decay: Array) -> tuple[Array, Array]:
            share = 1.0 / (level + fall * growth + rise * decay)
            density = jax.lax.optimization_barrier(share * jnp.exp(exponent))
            return density, density * (share * (rise * decay - fall * growth))

        (right, right_slope), (left, left_slope) = side(even - odd, growth, decay), side(even + odd, decay, growth)
        both, difference = right + left, right - left
        return both, z * difference, z**2 * both, right_slope + left_slope, z * (right_slope - left_slope)

    total, *rest = sum_over_nodes(terms, _rule(widest), is_used=lambda pair: pair[1] > -jnp.inf, only_first=only_log_z)
    first, second, slope, product = (value / total for value in rest)
    log_z = log_value - 0.5 * jnp.square(center - moved) / variance
    log_z += jnp.log(total * scale) - 0.5 * jnp.log(2.0 * math.pi * variance)
    shift, spread, shrinkage = center + scale * first - moved, second - first**2, first * slope - product
    return with_site(log_z, shift, scale**2 * spread, slope, scale * shrinkage, Cavity(mean, variance))
