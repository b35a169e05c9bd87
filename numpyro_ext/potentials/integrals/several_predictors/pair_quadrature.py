r"""Integrals of factors of two predictors over the plane: one predictor given the other, and then over the other.

Both steps follow the integrand. The equidistant nodes of the inner one are those of :math:`\sinh` around its mode, so
that they are dense there and reach to the ends of the Gaussian; the outer ones are laid around the mean and deviation
of the integrand itself, which two coarser passes have found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import logsumexp

from ...vector import VectorTiltedMoments

Slice = Callable[[Array, Array], Array]
"""Log factors of the inner and the outer predictor, each of the shape of the factors."""

_LOG_2PI = math.log(2.0 * math.pi)
NUM_OUTER, _NUM_OUTER_OF_GAUSSIAN = 35, 61
_OUTER_REACH = 3.7
_INNER = np.linspace(-1.0, 1.0, 45)
_SEARCH, _SEARCH_SCALES = np.linspace(-5.0, 5.0, 17), (1.0, 1.0 / 8.0, 1.0 / 32.0)
_NUM_PASSES = 3
_NUM_CLIMBS = 6
_REACH = 8.5
"""Standard deviations of the Gaussian that inner nodes span, more where the mode is not in its middle."""
_NUM_HERMITE = 32


class _Conditional(NamedTuple):
    """The inner predictor at one outer value: log integral, mean and variance."""

    log_z: Array
    mean: Array
    variance: Array


def tilted_moments(
    log_factor: Slice, mean: Array, covariance: Array, power: Array, is_gaussian: bool, copies: int = 1
) -> VectorTiltedMoments:
    r"""Moments of :math:`t(\eta)^p N(\eta \mid \mu, C)`, the inner predictor first.

    Differentiable in the log factors; nodes are held fixed. Cost: 180 evaluations with two derivatives for factors that
    are Gaussian in the inner predictor, 8,000 evaluations otherwise.

    :param log_factor: the factors, one after the other, as many times as there are copies.
    :param Array mean: cavity means, shape ``(n, 2)``.
    :param Array covariance: cavity covariances, shape ``(n, 2, 2)``.
    :param Array power: the exponent of the factors, shape ``(n,)``.
    :param bool is_gaussian: whether the log factors are quadratic and concave in the inner predictor.
    :param int copies: outer nodes that are looked at together.
    """
    middle, spread = mean[:, 1], covariance[:, 1, 1]
    # a predictor that cannot move is one that moves by next to nothing
    smallest = jnp.finfo(mean.dtype).eps * (1.0 + jnp.abs(middle) ** 2 + covariance[:, 0, 0])
    spread = jnp.maximum(spread, smallest)
    slope = covariance[:, 0, 1] / spread
    rest = jnp.maximum(covariance[:, 0, 0] - slope * covariance[:, 0, 1], smallest)
    integrate = _gaussian_slice if is_gaussian else _quadrature_slice

    exponent, rests = (jnp.tile(part, copies) for part in (power, rest))

    def at(outer: Array) -> _Conditional:
        """Shape ``(copies, n)``, like those of the result."""
        along, places = (mean[:, 0] + slope * (outer - middle)).reshape(-1), outer.reshape(-1)
        found = integrate(lambda inner: exponent * log_factor(inner, places), along, rests)
        return _Conditional(*(part.reshape(outer.shape) for part in found))

    even = np.linspace(-_OUTER_REACH, _OUTER_REACH, _NUM_OUTER_OF_GAUSSIAN if is_gaussian else NUM_OUTER)
    nodes = jnp.asarray(np.sinh(even), mean.dtype)[:, None]
    widths = jnp.asarray((even[1] - even[0]) * np.cosh(even), mean.dtype)[:, None]

    def sweep(place: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], VectorTiltedMoments]:
        center, scale = lax.stop_gradient(place)
        outer = center + scale * nodes
        together = jnp.pad(outer, ((0, -len(outer) % copies), (0, 0)), mode="edge").reshape(-1, copies, len(middle))
        inner = _Conditional(*(part.reshape(-1, len(middle))[: len(outer)] for part in lax.map(at, together)))
        log_weight = inner.log_z - 0.5 * (outer - middle) ** 2 / spread + jnp.log(scale * widths)
        log_weight = jnp.where(jnp.isnan(log_weight), -jnp.inf, log_weight)
        log_total = logsumexp(log_weight, axis=0)
        weight = jnp.where(log_weight == -jnp.inf, 0.0, jnp.exp(log_weight - log_total))
        of_inner = jnp.where(weight > 0, inner.mean, 0.0)
        means = jnp.stack([jnp.sum(weight * of_inner, 0), jnp.sum(weight * outer, 0)], axis=-1)
        away, along = of_inner - means[:, 0], outer - means[:, 1]
        own = jnp.sum(weight * (jnp.where(weight > 0, inner.variance, 0.0) + away**2), 0)
        mixed, other = jnp.sum(weight * away * along, 0), jnp.sum(weight * along**2, 0)
        moments = jnp.stack([jnp.stack([own, mixed], -1), jnp.stack([mixed, other], -1)], -2)
        log_z = log_total - 0.5 * (_LOG_2PI + jnp.log(spread))
        best = jnp.argmax(log_weight - jnp.log(widths), axis=0)
        narrowest = 0.25 * scale * widths[best, 0]
        place = means[:, 1], jnp.maximum(jnp.sqrt(other), narrowest)
        return place, VectorTiltedMoments(log_z, means, moments)

    start = middle, jnp.sqrt(spread) / 3.0
    found = lax.scan(sweep, start, length=_NUM_PASSES)[1]
    return jax.tree.map(lambda x: x[-1], found)


def _gaussian_slice(log_factor: Callable[[Array], Array], mean: Array, variance: Array) -> _Conditional:
    """Closed forms for a log factor that is quadratic and concave: it is read off at the mean of the Gaussian."""
    ones = jnp.ones_like(mean)

    def first(x: Array) -> tuple[Array, Array]:
        return jax.jvp(log_factor, (x,), (ones,))

    (_, slope), (_, curvature) = jax.jvp(first, (mean,), (ones,))
    precision = -curvature
    # measured from the peak, where the exponent does not cancel however narrow it is
    distance = slope / precision
    peak = log_factor(mean + distance)
    ratio = 1.0 + precision * variance
    log_z = peak - 0.5 * jnp.log(ratio) - 0.5 * distance * (distance * (precision / ratio))
    return _Conditional(log_z, mean + distance * (precision * variance / ratio), variance / ratio)


def _quadrature_slice(log_factor: Callable[[Array], Array], mean: Array, variance: Array) -> _Conditional:
    """Nodes around the mode of any log factor times a Gaussian."""
    deviation = jnp.sqrt(variance)
    ones = jnp.ones_like(mean)

    def exponent(x: Array) -> Array:
        value = log_factor(x) - 0.5 * (x - mean) ** 2 / variance
        return jnp.where(jnp.isnan(value), -jnp.inf, value)

    def slope_and_curvature(x: Array) -> tuple[Array, Array]:
        def first(x: Array) -> Array:
            return jax.jvp(log_factor, (x,), (ones,))[1]

        slope, curvature = lax.stop_gradient(jax.jvp(first, (x,), (ones,)))
        return jnp.where(jnp.isfinite(slope), slope, 0.0), jnp.where(jnp.isfinite(curvature), curvature, 0.0)

    middle, width = lax.stop_gradient((mean, deviation))
    offsets = jnp.asarray(_SEARCH, mean.dtype)[:, None]

    def climb(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        """One step further, and the curvature of the log factor before it."""
        slope, curvature = slope_and_curvature(state[0])
        step = slope / jnp.maximum(jnp.abs(curvature), 0.01 / jnp.square(width))
        return jnp.clip(state[0] + step, middle - _REACH * width, middle + _REACH * width), curvature

    def highest_near(peak: Array) -> Array:
        """The highest of some places around the mean, ever closer to the highest so far, and the peak: that of a factor
        that is much narrower than the Gaussian stands between the places."""

        def look(best: Array, scale: Array) -> tuple[Array, None]:
            places = jnp.concatenate([best + scale * width * offsets, peak[None]])
            highest = jnp.argmax(lax.map(exponent, places), axis=0)
            return jnp.take_along_axis(places, highest[None], axis=0)[0], None

        return lax.scan(look, middle, jnp.asarray(_SEARCH_SCALES, mean.dtype))[0]

    def around(state: tuple[Array, Array], num_climbs: Array) -> tuple[tuple[Array, Array], None]:
        """The mode, then the curvature there: one copy of the derivatives serves both."""
        place, (peak, curvature) = state[0], lax.fori_loop(0, num_climbs, climb, state)
        mode = lax.cond(num_climbs > 1, highest_near, lambda _: place, peak)
        return (lax.stop_gradient(mode), curvature), None

    (mode, bend), _ = lax.scan(around, (middle, jnp.zeros_like(middle)), jnp.array([_NUM_CLIMBS, 1]))
    curvature = 1.0 / jnp.square(width) - bend
    scale = 1.0 / jnp.sqrt(jnp.maximum(curvature, 0.3 / jnp.square(width)))
    length = jnp.arcsinh((jnp.abs(mode - mean) + _REACH * deviation) / scale)
    # written out, as the compiler's own hyperbolic functions are long
    grown = jnp.exp(length * jnp.asarray(_INNER, mean.dtype)[:, None])
    offsets = 0.5 * scale * (grown - 1.0 / grown)
    widths = (0.5 * (_INNER[1] - _INNER[0])) * scale * length * (grown + 1.0 / grown)
    values = jax.vmap(exponent)(mode + offsets)
    highest = lax.stop_gradient(jnp.max(values, axis=0))
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weight = widths * jnp.exp(values - highest)
    total = jnp.sum(weight, 0)
    is_positive = total > 0
    total = jnp.where(is_positive, total, 1.0)  # so that no derivative divides by zero where the factor is zero
    center = jnp.sum(weight * offsets, 0) / total
    second = jnp.sum(weight * (offsets - center) ** 2, 0) / total
    log_z = jnp.where(is_positive, highest + jnp.log(total), -jnp.inf) - 0.5 * (_LOG_2PI + jnp.log(variance))
    return _Conditional(log_z, mode + center, second)


def expectation(
    functions: Callable[[Array, Array], tuple[Array, ...]], mean: Array, covariance: Array, is_gaussian: bool
) -> tuple[Array, ...]:
    """Gaussian expectations of functions of two predictors, by a product of Gauss-Hermite rules.

    :param functions: of the inner and the outer predictor, each of shape ``(n,)``; arrays that begin with this axis.
    :param Array mean: means, shape ``(n, 2)``, the inner predictor first.
    :param Array covariance: covariances, shape ``(n, 2, 2)``, positive semidefinite.
    :param bool is_gaussian: whether the functions are quadratic in the inner predictor: three nodes are then exact.
    """
    outer_rule, inner_rule = (
        np.polynomial.hermite_e.hermegauss(size) for size in (_NUM_HERMITE, 3 if is_gaussian else _NUM_HERMITE)
    )
    deviation = jnp.sqrt(jnp.maximum(covariance[:, 1, 1], 0.0))
    slope = covariance[:, 0, 1] / jnp.where(deviation > 0, deviation, 1.0)
    rest = jnp.sqrt(jnp.maximum(covariance[:, 0, 0] - slope**2, 0.0))
    nodes = jnp.asarray(inner_rule[0], mean.dtype)
    weights = jnp.asarray(inner_rule[1] / inner_rule[1].sum(), mean.dtype)

    def add(total: tuple[Array, ...], rule: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
        node, weight = rule
        outer, along = mean[:, 1] + deviation * node, mean[:, 0] + slope * node
        values = jax.vmap(lambda z: functions(along + rest * z, outer))(nodes)
        return tuple(t + weight * jnp.tensordot(weights, v, 1) for t, v in zip(total, values, strict=True)), None

    like = jax.eval_shape(functions, mean[:, 0], mean[:, 1])
    zeros = tuple(jnp.zeros(part.shape, mean.dtype) for part in like)
    rule = jnp.asarray(outer_rule[0], mean.dtype), jnp.asarray(outer_rule[1] / outer_rule[1].sum(), mean.dtype)
    return lax.scan(add, zeros, rule)[0]
