r"""Even nodes in the plane for tilted densities of smooth factors of two predictors, and a check of the sum.

The nodes are laid around the mode, in the axes in which both the Gaussian and the curvature of the factor there are
diagonal. On an analytic integrand the trapezoidal rule converges so fast that every halving of its step about squares
its error (Trefethen and Weideman 2014, theorem 5.1), so the sums over every second row, every second column and one
colour of the checkerboard tell whether the sum over all nodes can be trusted. What each of these sums misses of the
Gaussian itself is known and taken out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ....linalg.in_range import rows_of
from ...vector import VectorPotential, VectorTiltedMoments
from ..tilted.tilted_moments import sum_over_nodes
from .few_rows import for_few_rows

__all__ = ["Chosen", "on_plane_nodes"]

_LOG_2PI = math.log(2.0 * math.pi)
_MOST_CLIMBS = 30
_LONGEST_CLIMB = 3.0
"""Standard deviations of the cavity."""
_NEAR = 1e-2
"""Twice the height, in nats, that a mode may be below the true one."""
_LEAST_CURVATURE = 0.4
"""In units of that of the cavity, in which the nodes are laid where the tilted density is wider than that."""
_NARROW = 0.36
"""Variance of the tilted density along an axis, in units of that of the cavity, below which the rest is looked at."""
_LEAST_BATCH = 16
"""Rows that are looked at again together, where these are a few."""
_SCAN = np.linspace(-6.0, 6.0, 13)
_LOW, _LOWEST = 24.0, 200.0
"""Nats below the mode where there is no mass, and where another mode is none of importance."""


class _Frame(NamedTuple):
    """Coordinates ``z = center + axes x``, in which ``z`` is standard normal under the cavity."""

    center: Array
    """Shape ``(n, 2)``."""
    axes: Array
    """Shape ``(n, 2, 2)``."""


class _Climb(NamedTuple):
    """State of Newton's method."""

    place: Array
    height: Array
    step: Array
    length: Array
    """Fraction of the step that is tried next."""
    curvature: Array
    is_there: Array


class _Lattice(NamedTuple):
    """Nodes, and what each adds to the sums over all of them and over parts of them."""

    position: np.ndarray
    """Shape ``(size, 2)``."""
    weight: np.ndarray
    """Shape ``(size, sums)``."""
    tolerance: float
    """Allowed change of moments with a part of the nodes, in units of the deviations."""

    def in_blocks(self, copies: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and weights, filled up with nodes of no weight, of shapes ``(blocks, nodes, copies, ...)``."""
        size = _NODES_TOGETHER * copies
        pad = ((0, -len(self.weight) % size), (0, 0))
        position, weight = (np.pad(x, pad).reshape(-1, size, x.shape[1]) for x in (self.position, self.weight))
        return position.reshape(-1, _NODES_TOGETHER, copies, 2), weight


_POWERS = np.array([[0, 0], [1, 0], [0, 1], [2, 0], [0, 2], [1, 1]])
_MOMENTS_OF_NORMAL = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
_NUM_PARTS, _NODES_TOGETHER = 4, 32


def _lattice(spacing: float, reach: float, tolerance: float, stretch: float = 0.0) -> _Lattice:
    """Even nodes in a disc, or in one of ``sinh(stretch u) / stretch`` where tails are to be followed.

    The sums are the mass, means and second moments: by all nodes, by every second row, column, and diagonal, each so
    scaled that it is exact for the standard normal density; and the mass in the outermost ring.
    """
    most = round(reach / spacing)
    steps = np.stack(np.meshgrid(*[np.arange(-most, most + 1)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
    u = steps * spacing
    is_in_disc = np.linalg.norm(u, axis=1) < reach + 1e-9
    steps, u = steps[is_in_disc], u[is_in_disc]
    is_outer = np.linalg.norm(u, axis=1) > reach - 1.0
    position, measure = u, np.ones(len(u))
    if stretch:
        position, measure = np.sinh(stretch * u) / stretch, np.prod(np.cosh(stretch * u), axis=1)
    terms = np.prod(position[:, None] ** _POWERS, axis=-1) * measure[:, None] * spacing**2
    density = np.exp(-0.5 * np.sum(position**2, axis=1)) / (2.0 * math.pi)
    is_in = np.stack([np.ones(len(steps), bool), *(steps.T % 2 == 0), steps.sum(1) % 2 == 0], axis=-1)
    weights = []
    for part in is_in.T:
        own = terms * part[:, None]
        found = density @ own
        scale = np.where(_MOMENTS_OF_NORMAL > 0, 1.0 / np.where(_MOMENTS_OF_NORMAL > 0, found, 1.0), 1.0 / found[0])
        weights.append(own * scale)
    weight = np.concatenate([*weights, (terms[:, :1] * is_outer[:, None])], axis=1)
    return _Lattice(position, weight, tolerance)


_REACH = 7.0
"""Standard deviations up to which the first nodes lie."""
_LONG_REACH = 10.0
_SHORT, _LONG = _lattice(0.7, _REACH, 5e-4), _lattice(0.33, 7.26, 1e-4, stretch=0.3)


class _Sums(NamedTuple):
    """Sums over nodes, in the coordinates of a frame."""

    log_total: Array
    mean: Array
    """Shape ``(n, 2)``."""
    covariance: Array
    """Shape ``(n, 2, 2)``."""
    is_trusted: Array


Chosen = Callable[[Array], VectorPotential]
"""Factors of some rows, by the numbers of the rows, which may be repeated."""


class _Found(NamedTuple):
    """Sums over the nodes in a frame, and how far these reach."""

    frame: _Frame
    sums: _Sums
    reach: Array


def on_plane_nodes(
    factors: VectorPotential, mean: Array, covariance: Array, power: Array, chosen: Chosen | None = None
) -> tuple[VectorTiltedMoments, Array]:
    r"""Moments of :math:`t(\eta)^p N(\eta \mid \mu, C)`, and where they can be trusted: to ``1e-7`` of a standard
    deviation for smooth factors in double precision, to about ``1e-4`` where a factor has a kink that the nodes
    do not see, and to ``1e-4`` in single precision.

    Nodes 0.7 standard deviations apart serve densities near a Gaussian. For the factors that they do not serve,
    others are laid around the moments that they have found, closer and further out. A tilted density that is much
    narrower than the cavity is trusted if it has no other mode and no mass elsewhere in the cavity, as far as a coarse
    grid shows. Differentiable in cavities and in what the log densities know; nodes are held fixed.

    Cost: 320 evaluations, and one with two derivatives for each step to the mode; 1700 more for factors that the first
    nodes do not serve, and for narrow ones: for all if there is one of them, and factors cannot be chosen.

    :param VectorPotential factors: ``n`` factors of two predictors.
    :param Array mean: cavity means, shape ``(n, 2)``.
    :param Array covariance: cavity covariances, shape ``(n, 2, 2)``.
    :param Array power: the exponent of the factors, shape ``(n,)``.
    :param chosen: makes the factors of some rows, at most ``n``.
    """
    cavities = _Cavities(mean, covariance, power)
    frozen, fixed = lax.stop_gradient((factors, cavities))
    triangle = _triangle(fixed.covariance)

    def climbed(z: Array) -> tuple[Array, Array, Array]:
        """Logarithm of the tilted density, its gradient and minus its Hessian."""
        value, slope, hessian = frozen.derivatives(fixed.mean + _times(triangle, z))
        slope, hessian = fixed.power[:, None] * slope, fixed.power[:, None, None] * hessian
        identity = jnp.eye(2, dtype=z.dtype)
        value = fixed.power * value - 0.5 * jnp.sum(jnp.square(z), axis=-1)
        return value, _times(triangle.mT, slope) - z, identity - triangle.mT @ hessian @ triangle

    frame, height = lax.stop_gradient(_around_mode(climbed, jnp.zeros_like(mean)))
    first = _sums(cavities.exponents(factors), height, frame, _SHORT, 1)
    found = _Found(frame, first, jnp.full_like(height, _REACH))
    size, copies = _batches(len(power)) if chosen is not None else (len(power), 1)

    def again(rows: Array) -> tuple[VectorTiltedMoments, Array]:
        own, before, top = rows_of((cavities, found, height), rows)
        repeated = jnp.tile(rows, copies)
        exponents = own.exponents(factors if chosen is None else chosen(repeated))
        moved = _recentred(before.frame, lax.stop_gradient(before.sums))
        after = _Found(moved, _sums(exponents, top, moved, _LONG, copies), jnp.full_like(top, _LONG_REACH))
        is_served = before.sums.is_trusted
        frame, sums, reach = jax.tree.map(lambda new, old: jnp.where(_like(is_served, new), old, new), after, before)
        is_alone = lax.stop_gradient(_is_alone(exponents, top, frame, reach, copies)) | ~_is_narrow(frame)
        return _moments(own, top, frame, sums), sums.is_trusted & is_alone

    served = _moments(cavities, height, frame, first), first.is_trusted
    return for_few_rows(again, ~first.is_trusted | _is_narrow(frame), served, size)


def _batches(number: int) -> tuple[int, int]:
    """Rows that are looked at again together, and how often all of them fit into the factors."""
    size = min(number, max(_LEAST_BATCH, number // _LEAST_BATCH))
    return size, number // size


class _Cavities(NamedTuple):
    mean: Array
    covariance: Array
    power: Array

    def exponents(self, factors: VectorPotential) -> Callable[[Array], Array]:
        """Log of the factors times the exponential of the cavities, the latter without its constant, at ``z`` of shape
        ``(copies, n, 2)``; ``factors`` are as many for each copy."""
        origin = lax.stop_gradient(self.mean)
        triangle, live, away = (
            _triangle(lax.stop_gradient(self.covariance)),
            _triangle(self.covariance),
            self.mean - origin,
        )

        def exponents(z: Array) -> Array:
            distance = _times(triangle, z)
            value = factors.log_density((origin + distance).reshape(-1, 2)).reshape(z.shape[:-1])
            value = self.power * value - 0.5 * jnp.sum(jnp.square(_solve(live, distance - away)), axis=-1)
            return jnp.where(jnp.isnan(value), -jnp.inf, value)

        return exponents


def _moments(cavities: _Cavities, height: Array, frame: _Frame, found: _Sums) -> VectorTiltedMoments:
    """Moments of the predictors, from sums in a frame."""
    triangle = _triangle(lax.stop_gradient(cavities.covariance))
    axes = triangle @ frame.axes
    middle = lax.stop_gradient(cavities.mean) + _times(triangle, frame.center)
    volume = jnp.log(jnp.abs(_determinant(axes)) / _determinant(_triangle(cavities.covariance)))
    log_z = height + found.log_total - _LOG_2PI + volume
    return VectorTiltedMoments(log_z, middle + _times(axes, found.mean), axes @ found.covariance @ axes.mT)


def _is_narrow(frame: _Frame) -> Array:
    return jnp.any(jnp.sum(jnp.square(frame.axes), axis=-2) < _NARROW, axis=-1)


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
        return jax.tree.map(lambda new, old: jnp.where(_like(takes, new), new, old), moved, stayed)

    flat = jnp.zeros_like(start[:, 0])
    begin = _Climb(
        start,
        flat - jnp.inf,
        jnp.zeros_like(start),
        flat + 1.0,
        jnp.broadcast_to(jnp.eye(2, dtype=start.dtype), (*start.shape, 2)),
        jnp.zeros(flat.shape, bool),
    )
    _, end = lax.while_loop(
        lambda state: (state[0] < _MOST_CLIMBS) & ~jnp.all(state[1].is_there),
        lambda state: (state[0] + 1, go(state[1])),
        (jnp.zeros((), jnp.int32), begin),
    )
    values, turn = _eigen(end.curvature)
    axes = turn / jnp.sqrt(jnp.maximum(values, _LEAST_CURVATURE))[:, None, :]
    return _Frame(end.place, axes), jnp.where(jnp.isfinite(end.height), end.height, 0.0)


def _sums(exponents: Callable[[Array], Array], height: Array, frame: _Frame, lattice: _Lattice, copies: int) -> _Sums:
    def terms(block: tuple[Array, Array]) -> tuple[Array, ...]:
        position, weight = block
        z = frame.center + _times(frame.axes, position[..., None, :])
        density = jnp.exp(jnp.minimum(jax.vmap(exponents)(z) - height, 80.0))
        return (weight.T @ density.reshape(len(weight), -1),)

    dtype = height.dtype
    position, weight = lattice.in_blocks(copies)
    (sums,) = sum_over_nodes(terms, (jnp.asarray(position, dtype), jnp.asarray(weight, dtype)))
    parts = jnp.reshape(sums[:-1], (_NUM_PARTS, len(_POWERS), -1))
    total = parts[:, 0]
    first, second, own, other, mixed = (parts[:, k] / total for k in range(1, 6))
    variances = own - jnp.square(first), other - jnp.square(second)
    covariance = mixed - first * second
    log_total = jnp.log(total)
    held = lax.stop_gradient((log_total, first, second, *variances))
    units = [
        jnp.ones_like(held[0][0]),
        *(jnp.sqrt(jnp.maximum(v[0], 0.0)) for v in held[3:]),
        *(v[0] for v in held[3:]),
    ]
    tolerance = max(lattice.tolerance, 100.0 * float(jnp.finfo(dtype).eps))
    is_trusted = lax.stop_gradient(sums[-1] / total[0]) < (1e-7 if dtype == jnp.float64 else 1e-5)
    for value, unit in zip(held, units, strict=True):
        is_trusted &= jnp.all(jnp.abs(value[1:] - value[0]) < tolerance * unit, axis=0)
    matrix = jnp.stack(
        [jnp.stack([variances[0][0], covariance[0]], -1), jnp.stack([covariance[0], variances[1][0]], -1)], -2
    )
    return _Sums(log_total[0], jnp.stack([first[0], second[0]], axis=-1), matrix, is_trusted)


def _recentred(frame: _Frame, found: _Sums) -> _Frame:
    """The frame in which moments that were found are those of a standard normal density, not far from the first."""
    is_known = jnp.all(jnp.isfinite(found.covariance), (-2, -1)) & jnp.isfinite(found.log_total)
    identity = jnp.eye(2, dtype=found.mean.dtype)
    values, turn = _eigen(jnp.where(is_known[:, None, None], found.covariance, identity))
    axes = turn * jnp.sqrt(jnp.clip(values, 0.25, 9.0))[:, None, :]
    center = jnp.where(is_known[:, None], jnp.clip(found.mean, -3.0, 3.0), 0.0)
    return _Frame(frame.center + _times(frame.axes, center), frame.axes @ axes)


def _is_alone(exponents: Callable[[Array], Array], height: Array, frame: _Frame, reach: Array, copies: int) -> Array:
    """True if there is no mass, and no other mode, in the cavity outside of where the nodes are."""
    size = len(_SCAN)
    grid = np.stack(np.meshgrid(_SCAN, _SCAN, indexing="ij"), axis=-1).reshape(-1, 1, 2)
    blocks = np.pad(grid, ((0, -len(grid) % copies), (0, 0), (0, 0)), mode="edge").reshape(-1, copies, 1, 2)
    at = jnp.asarray(grid, height.dtype)
    is_outside = jnp.sum(jnp.square(_times(_inverse(frame.axes), at - frame.center)), axis=-1) > jnp.square(reach)
    values = lax.map(
        lambda z: exponents(jnp.broadcast_to(z, (copies, *frame.center.shape))), jnp.asarray(blocks, height.dtype)
    )
    below = values.reshape(-1, *height.shape)[: len(grid)] - height
    square = below.reshape(size, size, -1)
    around = lax.reduce_window(square, -jnp.inf, lax.max, (3, 3, 1), (1, 1, 1), "SAME")
    is_peak = (square >= around).reshape(below.shape) & (below > -_LOWEST)
    return ~jnp.any(is_outside & (is_peak | (below > -_LOW)), axis=0)


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


def _like(mask: Array, array: Array) -> Array:
    return mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim))
