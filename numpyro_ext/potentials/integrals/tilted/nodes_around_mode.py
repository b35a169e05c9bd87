"""A short rule for tilted moments: even nodes around the tilted mode."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ...moments import TiltedMoments
from .tilted_moments import sum_over_nodes
from .tilted_site import with_site
from .tilted_window import Cavity

NARROW = 4.0
"""The widest cavity variance for which there are :func:`nodes_of_counts`."""

# The inverse square of the distance of nodes, in standard deviations of the tilted density at its mode, is quadratic in
# the widest cavity variance, and their reach linear in its root. With these, relative errors of normalisers and of
# variances stay below 3e-13 (against five times as many nodes, further out), for counts up to thirty thousand.
_INVERSE_SQUARE, _REACH = (1.95, 4.0, 0.43), (9.5, 4.3)


def _nodes(widest: Any) -> tuple[Any, Any]:
    """Distance and reach."""
    constant, linear, quadratic = _INVERSE_SQUARE
    return (constant + linear * widest + quadratic * widest**2) ** -0.5, _REACH[0] + _REACH[1] * widest**0.5


_MOST_PAIRS = math.ceil(operator.truediv(*_nodes(NARROW)[::-1]))


class AroundMode(NamedTuple):
    r"""Log factors at a distance :math:`x` from a point :math:`c` near the tilted mode, with a sign :math:`s`:

    .. math:: \log t(c + s x) = \log t(c) + k x - F(x), \quad (\log t)'(c + s x) = (\log t)'(c) + s G(x).
    """

    derivatives: tuple[Array, Array, Array]
    """Log factor, slope and curvature at :math:`c`."""
    linear: Array | float
    """:math:`k`."""
    to_both_sides: Callable[[Array], tuple[tuple[Array, Array], tuple[Array, Array]]]
    """:math:`F` and :math:`G` at :math:`x`, and those at :math:`-x`."""
    sign: Array | float = 1.0


class Nodes(NamedTuple):
    """Even nodes to either side of the middle."""

    step: Array
    number: Array
    """Number of pairs that are used, for all factors."""
    most: int
    """Largest number of pairs."""


def nodes_of_counts(variance: Array, curvature: Array) -> Nodes:
    """For factors that are smooth within :math:`\\pi / 2` of the real line, under cavities of :data:`NARROW` variance.

    :param variance: of the cavities.
    :param curvature: of the log factors near the tilted modes.
    """
    spacing, reach = _nodes(jnp.max(variance, initial=0.0))
    return Nodes(spacing * jnp.sqrt(variance / (1.0 - variance * curvature)), reach / spacing, _MOST_PAIRS)


def falls_of_counts(fall: Callable[[Array], tuple[Array, Array]]) -> Callable[[Array], Any]:
    """Falls for :class:`AroundMode`, from a function of :math:`e^x - 1`."""

    def to_both_sides(x: Array) -> Any:
        rise = jnp.expm1(x)
        return fall(rise), fall(-rise / (1.0 + rise))

    return to_both_sides


def moments_around_mode(
    mean: Array,
    variance: Array,
    distance: Array,
    from_center: Callable[[Array], AroundMode],
    nodes: Callable[[Array, Array], Nodes],
    only_log_z: bool,
) -> TiltedMoments:
    r"""Tilted moments by the trapezoidal rule, which is as good as the factor is smooth off the real line.

    :param mean: of the cavities; as the variance.
    :param distance: of a point near the tilted mode from the cavity mean.
    :param from_center: from that point to the log factors around it.
    :param nodes: from the variance and the curvature of the log factor there.
    :param only_log_z: see :func:`sum_over_nodes`.
    """
    fixed_mean = lax.stop_gradient(mean)
    # Nodes are held under differentiation; the integrand follows the cavity and the parameters of the factor.
    from_mean = distance - (mean - fixed_mean)
    around = from_center(fixed_mean + distance)
    value, slope_at_center, curvature = around.derivatives
    step, number, most = nodes(*lax.stop_gradient((variance, curvature)))
    lean = (around.linear - around.sign * from_mean / variance) * step
    bend = 0.5 * jnp.square(step) / variance

    def terms(n: Array) -> tuple[Array, ...]:
        (right_fall, right_change), (left_fall, left_change) = around.to_both_sides(n * step)
        decay = jnp.square(n) * bend
        right, left = jnp.exp(n * lean - right_fall - decay), jnp.exp(-n * lean - left_fall - decay)
        both, risen, sunk = right + left, right * right_change, left * left_change
        return both, n * (right - left), jnp.square(n) * both, risen + sunk, n * (risen - sunk)

    numbers = jnp.arange(1, most + 1, dtype=mean.dtype)
    total, *rest = sum_over_nodes(terms, numbers, is_used=lambda n: n <= number, only_first=only_log_z)
    total = 1.0 + total  # the center
    first, second, change, product = (moment / total for moment in rest)
    slope = slope_at_center + around.sign * change
    shrinkage = step * (first * change - product)
    log_z = value - 0.5 * jnp.square(from_mean) / variance
    log_z += jnp.log(total * step) - 0.5 * jnp.log(2.0 * math.pi * variance)
    first, second = around.sign * step * first, jnp.square(step) * second
    return with_site(log_z, from_mean + first, second - first**2, slope, shrinkage, Cavity(mean, variance))
