r"""Product rules in the plane for tilted densities of smooth factors of two predictors, and a check of the sum.

Nodes are laid around the mode, in units of the curvature there, on lines along one predictor: the *inner* one. What a
factor computes of the other, *outer* predictor alone is then computed once a line. Most densities are near a Gaussian,
and served by a short rule of Gauss and Hermite. Where the coefficients of high polynomials do not die out, the
trapezoidal rule takes its place: on an analytic integrand every halving of its step about squares its error (Trefethen
and Weideman 2014, theorem 5.1), so sums over every second row, column and diagonal tell whether that over all nodes can
be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ....linalg.in_range import rows_of
from ...vector import VectorTiltedMoments
from ..tilted.tilted_moments import sum_over_nodes
from .few_rows import for_few_rows, like
from .line_rules import LineRule, gauss_hermite, trapezoidal

_LOG_2PI = math.log(2.0 * math.pi)
_MOST_CLIMBS = 30
_LONGEST_CLIMB = 3.0
"""Standard deviations of the cavity."""
_NEAR = 0.1
"""Twice the height, in nats, that the last place may be below the mode, to which one more step is made blindly."""
_LEAST_CURVATURE = 0.4
"""In units of that of the cavity, in which the nodes are laid where the tilted density is wider than that."""
_NARROW = 0.36
"""Variance of the tilted density along an axis, in units of that of the cavity, below which the rest is looked at."""
_LEAST_BATCH = 16
"""Rows that are looked at again together, where these are a few."""
_FARTHEST = 6.0
"""Standard deviations of the cavity, beyond which a place that is given is none to begin at."""
_SCAN = np.linspace(-6.0, 6.0, 13)
_LOW, _LOWEST = 20.0, 200.0
"""Nats below the mode where there is no mass, and where another mode is none of importance."""


class PlaneFactors(Protocol):
    """Factors of two predictors, given along lines of one of them."""

    @property
    def outer_first(self) -> np.ndarray:
        """The numbers of the outer and of the inner predictor."""
        ...

    def derivatives(self, eta: Array) -> tuple[Array, Array, Array]: ...

    def at(self, inner: Array, outer: Array) -> Array:
        """Log factors, each at its own two numbers, shape ``(n,)``."""
        ...


class _Frame(NamedTuple):
    """Coordinates ``z = center + axes x``, in which ``z`` is standard normal under the cavity.

    The outer predictor is a function of the first one of each alone.
    """

    center: Array
    """Shape ``(n, 2)``."""
    axes: Array
    """Lower triangular, shape ``(n, 2, 2)``."""


class _Climb(NamedTuple):
    """State of Newton's method."""

    place: Array
    height: Array
    step: Array
    length: Array
    """Fraction of the step that is tried next."""
    curvature: Array
    is_there: Array


_HIGHEST = 80.0
"""Nats above the place that heights are measured from, which exponentials of single precision can hold."""
_TOLERANCE = 1e-4
"""Allowed size of sums that are nothing where a rule is right, in units of the mass and of the deviations."""
_REACH = 7.0
"""Standard deviations up to which the first nodes know the density."""
_SHORT = gauss_hermite(13)
_MIDDLE, _LONG = (trapezoidal(0.45, 5.4, 0.3), 8.0), (trapezoidal(0.33, 7.26, 0.3), 10.0)
"""Rules for what the first nodes do not serve, with how far they know the density."""


class _Sums(NamedTuple):
    """Sums over nodes, in the coordinates of a frame."""

    log_total: Array
    mean: Array
    """Shape ``(n, 2)``."""
    covariance: Array
    """Shape ``(n, 2, 2)``."""
    is_trusted: Array


Chosen = Callable[[Array], PlaneFactors]
"""Factors of some rows, by the numbers of the rows, which may be repeated."""


class _Found(NamedTuple):
    """Sums over the nodes in a frame, and how far these reach."""

    frame: _Frame
    sums: _Sums
    reach: Array


def on_plane_nodes(
    factors: PlaneFactors,
    mean: Array,
    covariance: Array,
    power: Array,
    chosen: Chosen | None = None,
    near: Array | None = None,
    spread: Array | None = None,
) -> tuple[VectorTiltedMoments, Array]:
    r"""Moments of :math:`t(\eta)^p N(\eta \mid \mu, C)`, and where they can be trusted: to ``1e-7`` of a standard
    deviation for smooth factors in double precision, to about ``1e-4`` where a factor has a kink that the nodes
    do not see, and to ``1e-4`` in single precision.

    A product of Gauss-Hermite rules serves densities near a Gaussian. For the factors that it does not serve, even
    nodes are laid around the moments that it has found, closer and further out. A tilted density that is much
    narrower than the cavity is trusted if it has no other mode and no mass elsewhere in the cavity, as far as a coarse
    grid shows. Differentiable in cavities and in what the log densities know; nodes are held fixed.

    Cost: 169 evaluations, and one with two derivatives for each step to the mode; 800 more for factors that the first
    nodes do not serve, and for narrow ones, and 2,025 where these nodes do not serve either: for all if there is one of
    them, and factors cannot be chosen.

    :param PlaneFactors factors: ``n`` factors of two predictors.
    :param Array mean: cavity means, shape ``(n, 2)``.
    :param Array covariance: cavity covariances, shape ``(n, 2, 2)``.
    :param Array power: the exponent of the factors, shape ``(n,)``.
    :param chosen: makes the factors of some rows, at most ``n``.
    :param near: where the modes are looked for first, shape ``(n, 2)``; the cavity means otherwise.
    :param spread: guesses of covariances, shape ``(n, 2, 2)``, as ``near`` is then one of means: the first nodes are
        laid by these, and no modes are looked for. Marginals of EP are such guesses.
    """
    order = factors.outer_first
    cavities = _Cavities(mean[..., order], _ordered(covariance, order), power)
    frozen, fixed = lax.stop_gradient((factors, cavities))
    triangle, exponents = _triangle(fixed.covariance), cavities.exponents(factors)

    def climbed(z: Array) -> tuple[Array, Array, Array]:
        """Logarithm of the tilted density, its gradient and minus its Hessian."""
        value, slope, hessian = frozen.derivatives((fixed.mean + _times(triangle, z))[..., order])
        slope, hessian = fixed.power[:, None] * slope[..., order], fixed.power[:, None, None] * _ordered(hessian, order)
        identity = jnp.eye(2, dtype=z.dtype)
        value = fixed.power * value - 0.5 * jnp.sum(jnp.square(z), axis=-1)
        return value, _times(triangle.mT, slope) - z, identity - triangle.mT @ hessian @ triangle

    start = jnp.zeros_like(mean)
    if near is not None:  # not further than a mode is looked for
        away = _solve(triangle, lax.stop_gradient(near)[..., order] - fixed.mean)
        start = jnp.where(jnp.sum(jnp.square(away), axis=-1, keepdims=True) < _FARTHEST**2, away, 0.0)
    if spread is None:
        frame, height = lax.stop_gradient(_around_mode(climbed, start))
    else:
        frame = lax.stop_gradient(_Frame(start, _inverse(triangle) @ _triangle(_ordered(spread, order))))
        height = lax.stop_gradient(exponents(start[None, :, 0], start[None, None, :, 1])[0, 0])
        height = jnp.where(jnp.isfinite(height), height, 0.0)
    first = _sums(exponents, height, frame, _SHORT, 1)
    found = _Found(frame, first, jnp.full_like(height, _REACH))
    size, copies = _batches(len(power)) if chosen is not None else (len(power), 1)

    def again(rows: Array) -> tuple[VectorTiltedMoments, Array]:
        own, before, top = rows_of((cavities, found, height), rows)
        repeated = jnp.tile(rows, copies)
        of_own = own.exponents(factors if chosen is None else chosen(repeated))
        closer = _improved(of_own, top, before, ~before.sums.is_trusted, _MIDDLE, copies)
        # a narrow density is to be known further out
        needs = ~closer.sums.is_trusted | _is_narrow(before.frame)
        frame, sums, reach = _improved(of_own, top, closer, needs, _LONG, copies)
        is_alone = lax.stop_gradient(_is_alone(of_own, top, frame, reach, copies)) | ~_is_narrow(frame)
        return _moments(own, top, frame, sums), sums.is_trusted & is_alone

    served = _moments(cavities, height, frame, first), first.is_trusted
    moments, is_trusted = for_few_rows(again, ~first.is_trusted | _is_narrow(frame), served, size)
    return VectorTiltedMoments(moments.log_z, moments.mean[..., order], _ordered(moments.covariance, order)), is_trusted


def _improved(
    exponents: _Exponents, height: Array, before: _Found, needs: Array, further: tuple[LineRule, float], copies: int
) -> _Found:
    """Sums over the nodes of a rule around the moments that were found, for those that need it."""
    rule, reach = further

    def again() -> _Found:
        moved = _recentred(before.frame, lax.stop_gradient(before.sums))
        return _Found(moved, _sums(exponents, height, moved, rule, copies), jnp.full_like(height, reach))

    after = lax.cond(jnp.any(needs), again, lambda: before)
    return jax.tree.map(lambda new, old: jnp.where(like(needs, new), new, old), after, before)


def _batches(number: int) -> tuple[int, int]:
    """Rows that are looked at again together, and how often all of them fit into the factors."""
    size = min(number, max(_LEAST_BATCH, number // _LEAST_BATCH))
    return size, number // size


_Exponents = Callable[[Array, Array], Array]
"""Exponents at the first coordinate in units of the cavity, shape ``(copies, n)``, and at as many numbers as its lines
have nodes of the second, ``(nodes, copies, n)``; of this shape."""


class _Cavities(NamedTuple):
    """In order of the coordinates: the outer predictor first."""

    mean: Array
    covariance: Array
    power: Array

    def exponents(self, factors: PlaneFactors) -> _Exponents:
        """Log of the factors times the exponential of the cavities, the latter without its constant; ``factors`` are as
        many for each copy."""
        origin = lax.stop_gradient(self.mean)
        triangle, live = _triangle(lax.stop_gradient(self.covariance)), _triangle(self.covariance)
        away = self.mean - origin

        def exponents(outer: Array, inner: Array) -> Array:
            across = triangle[:, 0, 0] * outer
            along = triangle[:, 1, 0] * outer + triangle[:, 1, 1] * inner
            places, given = (origin[:, 1] + along).reshape(len(inner), -1), (origin[:, 0] + across).reshape(-1)
            # what depends on the outer predictor alone is not computed for each of the inner ones
            value = jax.vmap(lambda place: factors.at(place, given))(places).reshape(inner.shape)
            first = (across - away[:, 0]) / live[:, 0, 0]
            second = (along - away[:, 1] - live[:, 1, 0] * first) / live[:, 1, 1]
            value = self.power * value - 0.5 * (jnp.square(first) + jnp.square(second))
            return jnp.where(jnp.isnan(value), -jnp.inf, value)

        return exponents


def _moments(cavities: _Cavities, height: Array, frame: _Frame, found: _Sums) -> VectorTiltedMoments:
    """Moments of the predictors, from sums in a frame."""
    triangle = _triangle(lax.stop_gradient(cavities.covariance))
    axes = triangle @ frame.axes
    middle = lax.stop_gradient(cavities.mean) + _times(triangle, frame.center)
    log_z = height + found.log_total - _LOG_2PI
    log_z += jnp.log(jnp.abs(_determinant(axes)) / _determinant(_triangle(cavities.covariance)))
    return VectorTiltedMoments(log_z, middle + _times(axes, found.mean), axes @ found.covariance @ axes.mT)


def _is_narrow(frame: _Frame) -> Array:
    return _eigen(frame.axes @ frame.axes.mT)[0][:, 1] < _NARROW


def _around_mode(derivatives: Callable[[Array], tuple[Array, Array, Array]], start: Array) -> tuple[_Frame, Array]:
    """The frame in which the tilted density is as wide as one at its mode, by a safeguarded Newton's method, and the
    height there."""

    def go(climb: _Climb) -> _Climb:
        trial = climb.place + climb.length[:, None] * climb.step
        height, slope, curvature = derivatives(trial)
        is_known = jnp.isfinite(height) & jnp.all(jnp.isfinite(slope), -1) & jnp.all(jnp.isfinite(curvature), (-2, -1))
        is_higher = is_known & (height >= climb.height)
        values, turn = _eigen(jnp.where(is_known[:, None, None], curvature, jnp.eye(2, dtype=start.dtype)))
        slope = jnp.where(is_known[:, None], slope, 0.0)
        along = _times(turn.mT, slope)
        step = _times(turn, along / jnp.maximum(jnp.abs(values), 0.25))
        size = jnp.sqrt(jnp.sum(jnp.square(step), axis=-1, keepdims=True))
        step = step * jnp.minimum(1.0, _LONGEST_CLIMB / jnp.where(size > 0.0, size, 1.0))
        is_near = jnp.sum(jnp.square(along) / jnp.maximum(jnp.abs(values), 0.25), axis=-1) < _NEAR
        is_there = climb.is_there | (is_higher & is_near) | (climb.length < 1e-4)
        moved = _Climb(trial, height, step, jnp.ones_like(climb.length), curvature, is_there)
        stayed = climb._replace(length=0.3 * climb.length, is_there=is_there)
        takes = is_higher & ~climb.is_there
        return jax.tree.map(lambda new, old: jnp.where(like(takes, new), new, old), moved, stayed)

    flat = jnp.zeros_like(start[:, 0])
    begin = _Climb(
        start,
        flat - jnp.inf,
        jnp.zeros_like(start),
        flat + 1.0,
        jnp.broadcast_to(jnp.eye(2, dtype=start.dtype), (*start.shape, 2)),
        jnp.zeros(flat.shape, bool),
    )
    end = lax.while_loop(
        lambda state: (state[0] < _MOST_CLIMBS) & ~jnp.all(state[1].is_there),
        lambda state: (state[0] + 1, go(state[1])),
        (jnp.zeros((), jnp.int32), begin),
    )[1]
    values, turn = _eigen(end.curvature)
    spread = (turn / jnp.maximum(values, _LEAST_CURVATURE)[:, None, :]) @ turn.mT
    last = jnp.where(like(end.length == 1.0, end.step), end.step, 0.0)
    return _Frame(end.place + last, _triangle(spread)), jnp.where(jnp.isfinite(end.height), end.height, 0.0)


def _sums(exponents: _Exponents, height: Array, frame: _Frame, rule: LineRule, copies: int) -> _Sums:
    dtype = height.dtype
    along, weights = jnp.asarray(rule.position, dtype)[:, None, None], jnp.asarray(rule.weight, dtype)
    axes = frame.axes

    def terms(lines: tuple[Array, Array]) -> tuple[Array, ...]:
        position, weight = lines
        outer = frame.center[:, 0] + axes[:, 0, 0] * position[:, None]
        inner = frame.center[:, 1] + axes[:, 1, 0] * position[:, None] + axes[:, 1, 1] * along
        density = jnp.exp(jnp.minimum(exponents(outer, inner) - height, _HIGHEST))
        of_lines = jnp.tensordot(weights, density, axes=(0, 0))
        return (jnp.einsum("ci,jcn->ijn", weight, of_lines),)

    position, weight = rule.in_blocks(copies)
    (sums,) = sum_over_nodes(terms, (jnp.asarray(position, dtype), jnp.asarray(weight, dtype)))
    total = sums[0, 0]
    parts = sums / total
    mean = jnp.stack([parts[1, 0], parts[0, 1]], axis=-1)
    # the second polynomial is the square less one, over the root of two
    outer, inner = (1.0 + math.sqrt(2.0) * part for part in (parts[2, 0], parts[0, 2]))
    squares = jnp.stack([jnp.stack([outer, parts[1, 1]], -1), jnp.stack([parts[1, 1], inner], -1)], -2)
    covariance = squares - mean[:, :, None] * mean[:, None, :]
    held, spread = lax.stop_gradient((jnp.abs(parts), covariance))
    rest = jnp.maximum(jnp.max(held[3:], axis=(0, 1)), jnp.max(held[:, 3:], axis=(0, 1)))
    least = jnp.minimum(1.0, jnp.minimum(spread[:, 0, 0], spread[:, 1, 1]))
    rest = jnp.where(lax.stop_gradient(total) < math.exp(0.5 * _HIGHEST), rest, jnp.inf)
    return _Sums(jnp.log(total), mean, covariance, rest < _TOLERANCE * least)


def _recentred(frame: _Frame, found: _Sums) -> _Frame:
    """The frame in which moments that were found are those of a standard normal density, not far from the first."""
    is_known = jnp.all(jnp.isfinite(found.covariance), (-2, -1)) & jnp.isfinite(found.log_total)
    values, turn = _eigen(jnp.where(is_known[:, None, None], found.covariance, jnp.eye(2, dtype=found.mean.dtype)))
    spread = (turn * jnp.clip(values, 0.25, 9.0)[:, None, :]) @ turn.mT
    center = jnp.where(is_known[:, None], jnp.clip(found.mean, -3.0, 3.0), 0.0)
    return _Frame(frame.center + _times(frame.axes, center), frame.axes @ _triangle(spread))


def _is_alone(exponents: _Exponents, height: Array, frame: _Frame, reach: Array, copies: int) -> Array:
    """True if there is no mass, and no other mode, in the cavity outside of where the nodes are."""
    size, shape = len(_SCAN), (copies, *height.shape)
    lines = np.pad(_SCAN, (0, -size % copies), mode="edge").reshape(-1, copies, 1)
    scan = jnp.asarray(_SCAN, height.dtype)
    along = jnp.broadcast_to(scan[:, None, None], (size, *shape))
    values = lax.map(lambda z: exponents(jnp.broadcast_to(z, shape), along), jnp.asarray(lines, height.dtype))
    square = jnp.moveaxis(values, 1, 2).reshape(-1, size, *height.shape)[:size] - height
    at = jnp.stack(jnp.meshgrid(scan, scan, indexing="ij"), axis=-1)[:, :, None]
    is_outside = jnp.sum(jnp.square(_times(_inverse(frame.axes), at - frame.center)), axis=-1) > jnp.square(reach)
    around = lax.reduce_window(square, -jnp.inf, lax.max, (3, 3, 1), (1, 1, 1), "SAME")
    is_peak = (square >= around) & (square > -_LOWEST)
    return ~jnp.any(is_outside & (is_peak | (square > -_LOW)), axis=(0, 1))


def _triangle(covariance: Array) -> Array:
    """Lower triangular factors of 2 x 2 covariances, of which one may be next to singular."""
    tiny = jnp.finfo(covariance.dtype).eps
    first = jnp.sqrt(covariance[:, 0, 0])
    cross = covariance[:, 0, 1] / first
    rest = jnp.maximum(covariance[:, 1, 1] - jnp.square(cross), tiny * covariance[:, 1, 1])
    zero = jnp.zeros_like(first)
    return jnp.stack([jnp.stack([first, zero], -1), jnp.stack([cross, jnp.sqrt(rest)], -1)], -2)


def _solve(triangle: Array, vector: Array) -> Array:
    first = vector[..., 0] / triangle[:, 0, 0]
    return jnp.stack([first, (vector[..., 1] - triangle[:, 1, 0] * first) / triangle[:, 1, 1]], axis=-1)


def _ordered(matrix: Array, order: np.ndarray) -> Array:
    return matrix[..., order, :][..., order]


def _eigen(matrix: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors, as columns, of symmetric 2 x 2 matrices."""
    middle = 0.5 * (matrix[:, 0, 0] + matrix[:, 1, 1])
    half = 0.5 * (matrix[:, 0, 0] - matrix[:, 1, 1])
    radius = jnp.hypot(half, matrix[:, 0, 1])
    angle = 0.5 * jnp.arctan2(matrix[:, 0, 1], half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turn = jnp.stack([jnp.stack([cos, -sin], -1), jnp.stack([sin, cos], -1)], -2)
    return jnp.stack([middle + radius, middle - radius], axis=-1), turn


def _times(matrix: Array, vector: Array) -> Array:
    """Products of 2 x 2 matrices and vectors, written out: so they are fused with what is around them."""
    return matrix[..., 0] * vector[..., :1] + matrix[..., 1] * vector[..., 1:]


def _determinant(matrix: Array) -> Array:
    return matrix[:, 0, 0] * matrix[:, 1, 1] - matrix[:, 0, 1] * matrix[:, 1, 0]


def _inverse(matrix: Array) -> Array:
    top = jnp.stack([matrix[:, 1, 1], -matrix[:, 0, 1]], -1)
    bottom = jnp.stack([-matrix[:, 1, 0], matrix[:, 0, 0]], -1)
    return jnp.stack([top, bottom], -2) / _determinant(matrix)[:, None, None]
