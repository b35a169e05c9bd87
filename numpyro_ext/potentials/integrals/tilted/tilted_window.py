"""The mass of a tilted density ``exp(g)``: its modes, and the points where it has dropped by given amounts.

``g(eta) = power * log t(eta) - (eta - mean)^2 / (2 variance)``, elementwise over an array of factors. Nothing here is
differentiated: quadrature rules place their nodes by these numbers, and any placement near them gives the same sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_NUM_NEWTON_STEPS = 60
_NUM_BISECTIONS = 8
_NUM_SCALES = 22
_NUM_ZOOM_POINTS = 9
_DISTANCES = np.exp(np.arange(np.log(1e-6), np.log(1e8), 0.01))
_NEARLY_LARGEST = 2.0


class Cavity(NamedTuple):
    """The Gaussian that a factor is multiplied with."""

    mean: Array
    variance: Array

    def exponent(self, eta: Array) -> Array:
        return -0.5 * jnp.square(eta - self.mean) / self.variance


class Piece(NamedTuple):
    """A part ``[lower, upper]`` of the line on which ``g`` rises to ``mode`` and falls after it."""

    mode: Array
    lower: Array
    upper: Array


class Segments(NamedTuple):
    """Stretches ``center + scale * sinh(w)``, ``0 <= w <= length``; leading axis: the segment. ``scale`` has a sign."""

    center: Array
    scale: Array
    length: Array


_LogDensity = Callable[[Array], Array]


def log_concave_mode(derivatives: Callable[[Array], tuple[Array, Array, Array]], cavity: Cavity, power: Array) -> Array:
    """The mode, to a small part of its width, by Newton's method safeguarded by bisection on the sign of the slope.

    Concavity puts the mode between the cavity mean and that mean plus the variance times the slope there. Such a
    bracket can be many orders of magnitude too wide, so it is bisected in the logarithm of the distance from the mean.
    """
    mean, variance = cavity
    info = jnp.finfo(mean.dtype)
    _, slope, curvature = derivatives(mean)
    slope = power * slope
    sign = jnp.where(slope >= 0.0, 1.0, -1.0).astype(mean.dtype)
    # Distances from the mean towards the mode, which may be unknown where the slope overflows.
    far = jnp.minimum(jnp.where(jnp.isfinite(slope), variance * jnp.abs(slope), jnp.inf), 1e15 * (1.0 + jnp.abs(mean)))
    step = jnp.abs(slope) / (1.0 / variance - power * curvature)

    def condition(state: tuple[Array, ...]) -> Array:
        i, _, _, _, done = state
        return (i < _NUM_NEWTON_STEPS) & ~jnp.all(done)

    def body(state: tuple[Array, ...]) -> tuple[Array, ...]:
        i, near, far, distance, done = state
        _, slope, curvature = derivatives(mean + sign * distance)
        slope = sign * power * slope - distance / variance
        curvature = 1.0 / variance - power * curvature
        beyond = ~(slope > 0.0)
        new_near = jnp.where(beyond, near, distance)
        new_far = jnp.where(beyond, distance, far)
        newton = distance + slope / curvature
        inside = (newton > new_near) & (newton < new_far) & (i % 3 != 2)
        middle = jnp.sqrt(jnp.maximum(new_near, new_far * info.eps)) * jnp.sqrt(new_far)
        middle = jnp.where(new_far < 4.0 * new_near, 0.5 * (new_near + new_far), middle)
        # Tighter than the width asks for: on a flat top, the bend beside a badly placed mode would go unresolved.
        converged = slope * slope < (1e-6 if info.bits <= 32 else 1e-9) * curvature
        converged |= ~(new_far - new_near > 4.0 * info.eps * (jnp.abs(mean) + new_far))
        following = jnp.where(inside, newton, middle)
        done_now = done | converged
        return (
            i + 1,
            jnp.where(done, near, new_near),
            jnp.where(done, far, new_far),
            jnp.where(done_now, distance, following),
            done_now,
        )

    start = jnp.where((step > 0.0) & (step < far), step, 0.5 * far)
    state: tuple[Array, ...] = (jnp.zeros((), jnp.int32), jnp.zeros_like(mean), far, start, jnp.zeros(mean.shape, bool))
    return mean + sign * jax.lax.while_loop(condition, body, state)[3]


def _finite(values: Array) -> Array:
    return jnp.where(jnp.isnan(values), -jnp.inf, values)


def _zoom(g: _LogDensity, lower: Array, upper: Array, num_rounds: int) -> Array:
    """Maximum on ``[lower, upper]`` of ``g``, which rises and then falls there: the best of nine points, repeatedly."""
    fractions = jnp.linspace(0.0, 1.0, _NUM_ZOOM_POINTS, dtype=lower.dtype)

    def one_round(_: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        lower, upper, _ = state
        points = jax.vmap(lambda s: lower + s * (upper - lower))(fractions)
        best = jnp.argmax(_finite(jax.vmap(g)(points)), axis=0)[None]
        beside = (jnp.maximum(best - 1, 0), jnp.minimum(best + 1, _NUM_ZOOM_POINTS - 1), best)
        lower, upper, at_best = (jnp.take_along_axis(points, index, axis=0)[0] for index in beside)
        return lower, upper, at_best

    return jax.lax.fori_loop(0, num_rounds, one_round, (lower, upper, lower))[2]


def nearest_large(log_density: _LogDensity, start: Array) -> Array:
    """Points near ``start`` from which no step outwards multiplies a factor by more than ``exp(2)``, elementwise.

    They lie in the support of a factor that is zero on a part of the line, and what is narrower than a hundredth of its
    distance from the start may be missed. Cost: 6500 evaluations.
    """
    distances = jnp.asarray(_DISTANCES, start.dtype)

    def height(point: Array) -> Array:
        value = log_density(point)
        return jnp.where(jnp.isfinite(value), value, -jnp.inf)

    def look(index: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        point, highest = found
        for sign in (1.0, -1.0):
            other = start + sign * distances[index]
            value = height(other)
            is_larger = value > highest + _NEARLY_LARGEST
            point, highest = jnp.where(is_larger, other, point), jnp.where(is_larger, value, highest)
        return point, highest

    return jax.lax.fori_loop(0, distances.size, look, (start, height(start)))[0]


def two_pieces(log_density: _LogDensity, cavity: Cavity, power: Array, center: Array | None, drop: float) -> Piece:
    """Split the line for a factor that need not be log-concave or smooth, whose own density has one peak.

    The mass lies between the cavity mean and that peak. ``g`` is looked up at distances from both that grow
    geometrically, which finds at most two modes. The line is cut in the valley between them, and if there is one mode
    only, at the peak of the factor, where it may have a kink.

    :param center: the peak, if it is known; searched for otherwise.
    :return: two pieces, stacked along a new leading axis.
    """
    mean, variance = cavity
    reach = jnp.sqrt(2.0 * drop * variance)
    num_rounds = 10 if jnp.finfo(mean.dtype).bits <= 32 else 24

    def g(eta: Array) -> Array:
        return _finite(power * log_density(eta)) + cavity.exponent(eta)

    if center is None:
        best = _zoom(log_density, mean - reach, mean + reach, num_rounds)
        # Where all nine points are outside of its support there is nothing to zoom in on.
        is_inside = jnp.isfinite(log_density(best))
        center = jax.lax.cond(
            jnp.all(is_inside), lambda: best, lambda: jnp.where(is_inside, best, nearest_large(log_density, mean))
        )
    center = jnp.broadcast_to(center, mean.shape)

    widest = reach + jnp.minimum(jnp.abs(center - mean), 4.0 * reach)
    offsets = jnp.logspace(-10.0 if num_rounds > 10 else -5.0, 0.0, _NUM_SCALES, dtype=mean.dtype)
    offsets = jnp.concatenate([-offsets[::-1], jnp.zeros(1, mean.dtype), offsets])
    points = jax.vmap(lambda s: s * widest)(offsets)
    points = jnp.sort(jnp.concatenate([mean + points, center + points]), axis=0)
    values = jax.lax.map(g, points)

    index = jnp.arange(points.shape[0]).reshape((-1,) + (1,) * mean.ndim)
    first = jnp.argmax(values, axis=0)[None]
    edge = jnp.full((1, *mean.shape), -jnp.inf, mean.dtype)
    padded = jnp.concatenate([edge, values, edge])
    is_peak = (values > padded[:-2]) & (values >= padded[2:]) & (jnp.abs(index - first) > 1)
    others = jnp.where(is_peak, values, -jnp.inf)
    second = jnp.argmax(others, axis=0)[None]
    best = jnp.take_along_axis(values, first, axis=0)
    is_bimodal = (jnp.take_along_axis(others, second, axis=0) > best - drop)[0]

    left, right = jnp.minimum(first, second), jnp.maximum(first, second)
    between = (index > left) & (index < right)
    valley = jnp.argmin(jnp.where(between, values, jnp.inf), axis=0)[None]
    cut = jnp.where(is_bimodal, jnp.take_along_axis(points, valley, axis=0)[0], center)

    def refine(best: Array) -> Array:
        below = jnp.take_along_axis(points, jnp.maximum(best - 1, 0), axis=0)[0]
        above = jnp.take_along_axis(points, jnp.minimum(best + 1, points.shape[0] - 1), axis=0)[0]
        return _zoom(g, below, above, num_rounds)

    mode, other = jax.lax.map(refine, jnp.stack([first, second]))
    lower_mode = jnp.where(is_bimodal, jnp.minimum(mode, other), jnp.minimum(mode, cut))
    upper_mode = jnp.where(is_bimodal, jnp.maximum(mode, other), jnp.maximum(mode, cut))
    infinity = jnp.full_like(mean, jnp.inf)
    return Piece(
        mode=jnp.stack([jnp.minimum(lower_mode, cut), jnp.maximum(upper_mode, cut)]),
        lower=jnp.stack([-infinity, cut]),
        upper=jnp.stack([cut, infinity]),
    )


def segments(g: _LogDensity, piece: Piece, at_mode: Array, cavity: Cavity, drop: float) -> Segments:
    """Cover a piece, with ``g`` of its mode, by four segments that resolve the shoulders of ``g``.

    On each side of the mode let ``a`` and ``b`` be the points where ``g`` has dropped by 1/2 and by 2, and ``z`` where
    it has dropped by ``drop``. The segments run from ``a`` inwards to the mode and outwards to ``z``, and ``sinh``
    lets their nodes be dense within ``b - a`` of ``a``. So a Gaussian shape, a flat top with a step at its end, and
    tails on very different scales are all smooth functions of ``w``.
    """
    mean, variance = cavity
    sides = jnp.asarray([-1.0, 1.0], mean.dtype).reshape((2,) + (1,) * mean.ndim)
    levels = jnp.asarray([0.5, 2.0, drop], mean.dtype).reshape((3, 1) + (1,) * mean.ndim)
    reach = jnp.sqrt(2.0 * drop * variance) + jnp.abs(piece.mode - mean)
    room = jnp.minimum(reach, jnp.stack([piece.mode - piece.lower, piece.upper - piece.mode]))
    evaluate = jax.vmap(jax.vmap(g))
    num_halvings = 20.0 if jnp.finfo(mean.dtype).bits <= 32 else 46.0

    def bisect(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        near, far = bounds
        middle = 0.5 * (near + far)
        dropped = at_mode - evaluate(piece.mode + sides * room * jnp.exp2(-middle))
        is_far = ~(dropped < levels)
        return jnp.where(is_far, middle, near), jnp.where(is_far, far, middle)

    shape = (3, 2, *mean.shape)
    bounds = (jnp.zeros(shape, mean.dtype), jnp.full(shape, num_halvings, mean.dtype))
    near, far = jax.lax.fori_loop(0, _NUM_BISECTIONS, bisect, bounds)
    shoulder, below = room * jnp.exp2(-0.5 * (near[0] + far[0])), room * jnp.exp2(-far[1])
    end = jnp.maximum(room * jnp.exp2(-near[2]), shoulder)
    scale = jnp.maximum(jnp.abs(below - shoulder), 0.05 * shoulder)
    safe = jnp.where(scale > 0.0, scale, 1.0)
    inwards, outwards = jnp.arcsinh(shoulder / safe), jnp.arcsinh((end - shoulder) / safe)
    center = piece.mode + sides * shoulder
    return Segments(
        center=jnp.concatenate([center, center]),
        scale=jnp.concatenate([-sides * scale, sides * scale]),
        length=jnp.concatenate([inwards, outwards]),
    )
