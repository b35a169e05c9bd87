"""The trapezoidal rule for tilted densities of smooth factors, on a window that is looked for, and a check of the sum.

On an analytic integrand the rule converges so fast that every halving of its step about squares its error (Trefethen
and Weideman 2014, theorem 5.1). So the sum over every second node tells whether the sum over all of them can be
trusted, and nothing has to be known of the factor: not its peak, nor its curvature, nor whether it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

NUM_NODES = 65
"""An odd number: every second node is a rule with the same ends."""
_MAX_ROUNDS = 6
# In standard deviations of the cavity.
_FEW_STEPS, _FEW_SPACING = 20, 0.4
_FEW_TOLERANCE, _FEW_TOLERANCE_OF_THIRDS, _FEW_AT_ENDS = 7e-9, 1e-3, 1e-12
_FEW_FARTHEST = 8.0


class EvenNodes(NamedTuple):
    """Nodes ``center + scale * sinh(u)`` at even steps of ``u``, elementwise over an array of factors."""

    center: Array
    scale: Array
    first: Array
    """The least ``u``."""
    step: Array
    highest: Array
    """The node at which the density is highest."""
    height: Array
    """The logarithm of the density there."""
    tolerance: Array
    """Allowed change of the moments with every second node, relative to the standard deviation: the root of the
    precision, times the standard deviation of the log factor where the factor says little."""
    is_trusted: Array
    """Mask of the factors whose moments change by less."""
    ends: tuple[Array, Array]
    """The outermost nodes with mass."""

    def at(self, index: Array) -> tuple[Array, Array]:
        """The nodes of some indices, on a new first axis, and what each counts for in the integral."""
        index = index.reshape((-1,) + (1,) * self.center.ndim)
        u = self.first + index * self.step
        return self.center + self.scale * jnp.sinh(u), self.step * self.scale * jnp.cosh(u)

    def with_mass(self, index: Array) -> tuple[Array, Array]:
        """The same with the highest node, which counts nothing, in the place of nodes without mass, where the factor
        may not be a number."""
        x, measure = self.at(index)
        has_mass = (self.ends[0] <= x) & (x <= self.ends[1])
        return jnp.where(has_mass, x, self.highest), jnp.where(has_mass, measure, 0.0)


def even_nodes(log_factor: Callable[[Array], Array], variance: Array, drop: float) -> EvenNodes:
    r"""Nodes for the density of a factor times a Gaussian with mean zero.

    The first window is that of the Gaussian. Every other reaches to where the logarithm of the density has dropped by
    ``drop`` on the nodes of the one before, or beyond its end, and is dense around its highest node, on the scale on
    which it drops there: so a factor that is much narrower than the Gaussian is found if its logarithm rises towards
    it, and tails that are exponential or worse are covered. Nothing here is differentiated.

    Cost: 65 evaluations of the factor in a round; one round for factors that say less than the Gaussian, two to four
    for others.

    :param Callable log_factor: elementwise. Where it is ``nan`` there is no mass.
    :param Array variance: variances of the Gaussian.
    :param float drop: how far below its maximum the logarithm of the density has no mass left.
    """
    eps = jnp.finfo(variance.dtype).eps
    index = jnp.arange(NUM_NODES, dtype=variance.dtype)
    last = NUM_NODES - 1
    ends = jnp.asarray([0, last])

    def over(center: Array, scale: Array, lower: Array, upper: Array) -> EvenNodes:
        first = jnp.arcsinh((lower - center) / scale)
        step = (jnp.arcsinh((upper - center) / scale) - first) / last
        zero = jnp.zeros_like(center)
        return EvenNodes(center, scale, first, step, center, zero, zero, jnp.zeros(center.shape, bool), (lower, upper))

    def moments(x: Array, mass: Array) -> tuple[Array, Array, Array]:
        total = jnp.sum(mass, axis=0)
        mean = jnp.sum(mass * x, axis=0) / total
        return total, mean, jnp.sum(mass * jnp.square(x - mean), axis=0) / total

    def look(nodes: EvenNodes) -> tuple[EvenNodes, EvenNodes]:
        """The nodes with the verdict on them, and those of the next round."""
        x, measure = nodes.at(index)
        factor = jax.vmap(log_factor)(x)
        values = factor - 0.5 * jnp.square(x) / variance
        is_number = ~jnp.isnan(values)
        values = jnp.where(is_number, values, -jnp.inf)
        best = jnp.argmax(values, axis=0)[None]
        highest, height = (jnp.take_along_axis(array, best, axis=0)[0] for array in (x, values))
        below = values - height
        mass = measure * jnp.exp(below)
        total, mean, spread = moments(x, mass)
        said = jnp.where(mass > 0.0, factor - jnp.take_along_axis(factor, best, axis=0), 0.0)
        # Its square is the error of the sum over all nodes.
        tolerance = 2.0 * jnp.sqrt(eps) * jnp.clip(jnp.sqrt(moments(said, mass)[2]), 200.0 * jnp.sqrt(eps), 1.0)
        half_total, half_mean, half_spread = moments(x[::2], 2.0 * mass[::2])
        used = below > -drop
        outer = jnp.argmax(used, axis=0)[None], last - jnp.argmax(used[::-1], axis=0)[None]
        lower, upper = (jnp.take_along_axis(x, side, axis=0)[0] for side in outer)
        is_trusted = (
            (jnp.abs(half_total - total) < tolerance * total)
            & (jnp.abs(half_mean - mean) < tolerance * jnp.sqrt(spread))
            & (jnp.abs(half_spread - spread) < tolerance * spread)
            & jnp.all(below[ends] < -drop + 4.0, axis=0)
            & jnp.all(is_number | (x < lower) | (x > upper), axis=0)
        )
        nodes = nodes._replace(ends=(lower, upper))

        beyond = jnp.maximum(outer[0] - 1, 0), jnp.minimum(outer[1] + 1, last)
        lower, upper = (jnp.take_along_axis(x, side, axis=0)[0] for side in beyond)
        # Where it is highest at an end, its mode lies beyond, and may be as far away as the window is wide.
        is_outside = (best[0] == 0) | (best[0] == last)
        width = jnp.where(is_outside, x[last] - x[0], upper - lower)
        lower = jnp.where(used[0], lower - width, lower)
        upper = jnp.where(used[last], upper + width, upper)
        # Twice the half width at a drop of 1/2, which is a standard deviation of a Gaussian shape.
        scale = jnp.sum(jnp.where(below > -0.5, measure, 0.0), axis=0)
        scale = jnp.where(is_outside, width, scale)
        nodes = nodes._replace(highest=highest, height=height, tolerance=tolerance, is_trusted=is_trusted)
        return nodes, over(highest, scale, lower, upper)

    def advance(state: tuple[Array, EvenNodes, EvenNodes]) -> tuple[Array, EvenNodes, EvenNodes]:
        i, found, following = state
        looked, new = look(following)
        keep = found.is_trusted
        found, following = (
            jax.tree.map(lambda old, new: jnp.where(keep, old, new), *pair)
            for pair in ((found, looked), (following, new))
        )
        return i + 1, found, following

    reach = jnp.sqrt(2.0 * drop * variance)
    start = over(jnp.zeros_like(variance), reach, -reach, reach)
    state = (jnp.zeros((), jnp.int32), start, start)
    return jax.lax.while_loop(lambda s: (s[0] < _MAX_ROUNDS) & ~jnp.all(s[1].is_trusted), advance, state)[1]


class FewNodes(NamedTuple):
    """Moments, by values at few nodes, of a factor times the exponential of a Gaussian without its constant."""

    log_total: Array
    """The logarithm of the integral."""
    mean: Array
    variance: Array
    is_trusted: Array


def few_nodes(
    log_factor: Callable[[Array], Array],
    mean: Array,
    variance: Array,
    center: Array,
    scale: Array,
    *,
    only_log_z: bool = False,
) -> FewNodes:
    """Moments by values of a factor alone, at even nodes, and where they can be trusted: under cavities that are narrow
    for the factor. Every second node is a rule of which this one squares the error at least.

    Cost: 41 evaluations of the factor.

    :param Callable log_factor: elementwise.
    :param Array mean: of the Gaussian, zero but for its derivatives.
    :param Array variance: of the Gaussian.
    :param Array center: the node in the middle; see :func:`mode_and_width`.
    :param Array scale: a third of it is the distance of nodes.
    :param bool only_log_z: whether all but the integral is held under differentiation.
    """
    node = jnp.arange(-_FEW_STEPS, _FEW_STEPS + 1, dtype=mean.dtype).reshape(-1, *(1,) * mean.ndim)
    step = _FEW_SPACING * scale
    x = center + node * step
    value = jax.vmap(log_factor)(x)
    exponent = value - 0.5 * jnp.square(x - mean) / variance
    height = jax.lax.stop_gradient(jnp.max(exponent, axis=0))
    density = step * jnp.exp(exponent - height)
    distance = x - center
    parts = density, density * distance, density * jnp.square(distance)
    sums = [jnp.sum(part, axis=0) for part in parts]
    if only_log_z:
        sums[1:] = jax.lax.stop_gradient(sums[1:])
    total, first, second = sums[0], sums[1] / sums[0], sums[2] / sums[0]
    spread = second - jnp.square(first)
    half = [2.0 * jnp.sum(part[::2], axis=0) for part in jax.lax.stop_gradient(parts)]
    moved, widened = half[1] / half[0], half[2] / half[0] - jnp.square(half[1] / half[0])
    # A kink half way between two nodes hides from every second node, but none from these and every third as well. What
    # they miss of a Gaussian is taken out; of a factor that says little, little may be missed.
    weight = np.exp(-0.5 * np.square(_FEW_SPACING * np.arange(-_FEW_STEPS, _FEW_STEPS + 1)))
    third = jnp.sum(density[_FEW_STEPS % 3 :: 3], axis=0) * (weight.sum() / weight[_FEW_STEPS % 3 :: 3].sum())
    mean_value = jnp.sum(density * value, axis=0) / total
    said = jnp.sqrt(jnp.sum(density * jnp.square(value - mean_value), axis=0) / total)
    unit = jax.lax.stop_gradient(jnp.clip(said, 1e-5, 1.0))
    is_trusted = (
        (jnp.abs(half[0] - total) < _FEW_TOLERANCE * unit * total)
        & (jnp.abs(moved - first) < _FEW_TOLERANCE * unit * jnp.sqrt(spread))
        & (jnp.abs(widened - spread) < _FEW_TOLERANCE * unit * spread)
        & (jnp.abs(third - total) < _FEW_TOLERANCE_OF_THIRDS * unit * total)
        & jnp.all(density[jnp.array([0, -1])] < _FEW_AT_ENDS * total, axis=0)
    )
    return FewNodes(height + jnp.log(total), center + first, spread, is_trusted)


def mode_and_width(log_factor: Callable[[Array], Array], variance: Array) -> tuple[Array, Array]:
    """About where a factor times a Gaussian with mean zero is highest, and the standard deviation that the curvature
    there suggests: the vertices of two parabolas through three values of the factor. Zero and the standard deviation of
    the Gaussian where these are of no use. Nothing here is differentiated.

    Cost: 6 evaluations of the factor.
    """
    widest = jnp.sqrt(variance)

    def round_of(_: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        center, scale = found
        below, middle, above = jax.vmap(log_factor)(jnp.stack([center - scale, center, center + scale]))
        slope = 0.5 * (above - below) / scale - center / variance
        curvature = (above - 2.0 * middle + below) / jnp.square(scale) - 1.0 / variance
        # Less than the Gaussian says only where the factor is not log-concave.
        precision = jnp.maximum(-curvature, 0.5 / variance)
        center, scale = center + slope / precision, 1.0 / jnp.sqrt(precision)
        is_of_use = jnp.isfinite(center) & jnp.isfinite(scale) & (jnp.abs(center) < _FEW_FARTHEST * widest)
        return jnp.where(is_of_use, center, 0.0), jnp.where(is_of_use, scale, widest)

    start = jnp.zeros_like(variance), widest
    return jax.lax.fori_loop(0, 2, round_of, start)
