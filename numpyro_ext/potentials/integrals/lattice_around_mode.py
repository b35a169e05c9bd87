r"""Tilted moments of log-concave factors of a few predictors, by the trapezoidal rule on a lattice around their mode.

The predictors are :math:`\eta = \mu + L z` with a standard normal ``z`` under the cavity. The mode of the integrand and
its curvature there give a frame :math:`z = z^* + R^{-T} u` in which it is about as wide in all directions. Along each
axis of the frame Newton's method finds where the integrand has fallen to nothing: on a concave function it comes from
outside, so that an iteration too few gives nodes too many. The distance of nodes follows from how far the factor is
analytic. Sums over all nodes and over every second one (those whose indices add up to an even number) tell the error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ...linalg.cholesky import cholesky, cholesky_solve, inverse_lower

__all__ = ["LARGEST_LATTICE_DIMENSION", "LatticeMoments", "lattice_moments"]

LARGEST_LATTICE_DIMENSION = 3
"""Predictors up to which a lattice is summed: four thousand nodes for a cavity of variance one."""

Derivatives = Callable[[Sequence[Array], Array], tuple[Array, Sequence[Array], Sequence[Array]]]
"""From ``M`` predictors, each of shape ``(..., r)``, of the factors with the numbers ``(r,)``: their logarithms, ``M``
first derivatives, and second derivatives in predictors ``i <= j``, row by row. (Arrays whose last axis is that of the
predictors would be summed three times as slowly.)"""

_NUM_CLIMBS = 25
_NEAR = 0.05
"""Last step, in deviations, from which the frame around it is as good as that of the mode."""
_STEP_SIZES = (1.0, 0.5, 0.25, 0.0625)
_NUM_STEPS_OUT = 6
_MARGIN, _COARSER = 1.12, 1.15
"""Of the ends and the distance of nodes: together they leave errors of the same size, 1e-9 of the normaliser."""
_DROP = {1: 21.0, 2: 21.0, 3: 14.0}
"""Logarithm of how far the integrand has fallen at the ends, by dimension: nine digits, six where nodes are many."""
_NODES_AT_A_TIME = 64
_ROWS_AT_A_TIME = 128
_MOST_NODES = {1: 4096, 2: 256, 3: 64}
"""On each axis, by dimension."""
_MOST_ERROR = 1e-4
"""Relative error of the normaliser from which moments are not believed."""


class LatticeMoments(NamedTuple):
    r"""Moments of :math:`t(\eta)^p N(\eta \mid \mu, S)`, and the site that has the same, one entry per factor.

    The site is made of the mean derivatives of the factor, never of inverses of covariances: these may be singular.
    """

    log_z: Array
    mean: Array
    covariance: Array
    gradient: Array
    """Derivative of ``log_z`` in the mean of the cavity, shape ``(n, M)``."""
    curvature: Array
    """Minus the second derivative, shape ``(n, M, M)``."""
    log_factor: Array
    """Mean of the log factor, which is the derivative of ``log_z`` in the power."""
    site_precision: Array
    site_shift: Array
    error: Array
    """Estimate of the relative error of the normaliser."""


def lattice_moments(
    derivatives: Derivatives,
    mean: Array,
    covariance: Array,
    power: ArrayLike,
    *,
    strip: float,
) -> LatticeMoments:
    r"""Tilted moments of log-concave factors of up to three predictors.

    Cost: 200 evaluations of each factor with two derivatives in two dimensions, 4,000 in three, as long as deviations
    of the cavity are below one; with the deviation to the power of the dimension beyond. Moments whose error is
    estimated above :math:`10^{-4}` are nan.

    :param derivatives: of the log factors, which are log-concave.
    :param Array mean: cavity means, shape ``(n, M)``.
    :param Array covariance: cavity covariances, shape ``(n, M, M)``, positive semidefinite.
    :param power: exponents of the factors, one or ``n``.
    :param float strip: distance from the real line, in the largest difference of two of the predictors and zero, at
        which the first singularity of a factor may be.
    """
    number, dimension = mean.shape
    # What moves by less than rounding moves by that.
    size = 1.0 + jnp.max(jnp.diagonal(covariance, axis1=-2, axis2=-1), axis=-1)
    jitter = 8.0 * jnp.finfo(mean.dtype).eps * size
    root = cholesky(covariance + jitter[:, None, None] * jnp.eye(dimension, dtype=mean.dtype))
    power = jnp.broadcast_to(jnp.asarray(power, mean.dtype), (number,))
    rows = _Rows(jnp.arange(number), mean, root, power)
    frames = _frames(derivatives, rows, strip)
    if number <= _ROWS_AT_A_TIME:
        return _summed(derivatives, rows, frames)
    # Rows that need about as many nodes are summed together.
    order = jnp.argsort(frames.num_nodes)
    padded = jnp.concatenate([order, jnp.full((-number % _ROWS_AT_A_TIME,), order[-1])]).reshape(-1, _ROWS_AT_A_TIME)
    found = lax.map(lambda chosen: _summed(derivatives, *jax.tree.map(lambda x: x[chosen], (rows, frames))), padded)
    place = jnp.argsort(order)
    moments: LatticeMoments = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[place], found)
    return moments


class _Rows(NamedTuple):
    """Factors and their cavities."""

    index: Array
    mean: Array
    root: Array
    """Lower Cholesky factors of the covariances."""
    power: Array


class _Frame(NamedTuple):
    """Where the nodes of each factor are."""

    mode: Array
    axes: Array
    """Columns are the directions of the lattice, shape ``(n, M, M)``."""
    peak: Array
    """Log integrand at the mode."""
    gradient: Array
    """Of the log factor there."""
    below: Array
    """Ends of the lattice on each axis, shape ``(n, M)``."""
    above: Array
    num_nodes: Array
    """Needed on each axis, shape ``(n,)``."""


def _pairs(dimension: int) -> list[tuple[int, int]]:
    return list(itertools.combinations_with_replacement(range(dimension), 2))


def _symmetric(parts: Sequence[Array], dimension: int) -> Array:
    """Matrices on the last two axes, from their entries ``i <= j``."""
    entries = dict(zip(_pairs(dimension), parts, strict=True))
    rows = [[entries[min(i, j), max(i, j)] for j in range(dimension)] for i in range(dimension)]
    return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


def _at(derivatives: Derivatives, rows: _Rows, z: Array) -> tuple[Array, Array, Array]:
    """Log factors to their powers and their derivatives in the predictors, at ``z`` of shape ``(..., n, M)``."""
    eta = rows.mean + jnp.einsum("nij,...nj->...ni", rows.root, z)
    dimension = z.shape[-1]
    value, gradient, hessian = derivatives([eta[..., i] for i in range(dimension)], rows.index)
    power = rows.power[:, None]
    of_value, of_gradient = rows.power * value, power * jnp.stack(gradient, axis=-1)
    return of_value, of_gradient, power[..., None] * _symmetric(hessian, dimension)


def _frames(derivatives: Derivatives, rows: _Rows, strip: float) -> _Frame:
    dtype, dimension = rows.mean.dtype, rows.mean.shape[-1]
    drop = min(_DROP[dimension], 1.0 - math.log(float(jnp.finfo(dtype).eps)))
    identity = jnp.eye(dimension, dtype=dtype)
    sizes = jnp.asarray(_STEP_SIZES, dtype)

    def height(z: Array) -> Array:
        return _at(derivatives, rows, z)[0] - 0.5 * jnp.sum(z**2, axis=-1)

    def in_frame(z: Array) -> tuple[Array, Array, Array]:
        """Log factor's gradient, and slope and curvature of the log integrand in ``z``."""
        _, gradient, hessian = _at(derivatives, rows, z)
        slope = jnp.einsum("nij,ni->nj", rows.root, gradient) - z
        bend = identity - jnp.einsum("nki,nkl,nlj->nij", rows.root, hessian, rows.root)
        return gradient, slope, bend

    def is_far(climb: tuple[Array, Array, Array]) -> Array:
        return (climb[0] < _NUM_CLIMBS) & (climb[2] > _NEAR)

    def climb(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, z, _ = state
        _, slope, bend = in_frame(z)
        factor = cholesky(bend)
        step = cholesky_solve(factor, slope)
        trials = z + sizes[:, None, None] * step
        heights = height(trials)
        best = jnp.argmax(jnp.where(jnp.isnan(heights), -jnp.inf, heights), axis=0)
        moved = sizes[best][:, None] * step
        # in deviations of the integrand
        length = jnp.sum(slope * step, axis=-1)
        length = jnp.where(jnp.isfinite(length), length, 0.0)
        return number + 1, z + jnp.where(jnp.isfinite(moved), moved, 0.0), jnp.sqrt(jnp.max(length, initial=0.0))

    start = (jnp.asarray(0), jnp.zeros_like(rows.mean), jnp.asarray(jnp.inf, dtype))
    mode = lax.while_loop(is_far, climb, start)[1]
    peak = height(mode)
    gradient, _, bend = in_frame(mode)
    axes = inverse_lower(cholesky(bend)).mT

    # Out along the axes, in both directions at once: axes of arrays are direction, factor, predictor.
    directions = jnp.concatenate([axes, -axes], axis=-1).transpose(2, 0, 1)
    length = jnp.sqrt(jnp.sum(directions**2, axis=-1))
    # The integrand falls at least as fast as the cavity.
    furthest = math.sqrt(2.0 * drop) / length + 1.0

    def out(_: int, distance: Array) -> Array:
        z = mode + distance[..., None] * directions
        value, gradient, _ = _at(derivatives, rows, z)
        left = value - 0.5 * jnp.sum(z**2, axis=-1) - peak + drop
        slope = jnp.sum((jnp.einsum("nij,dni->dnj", rows.root, gradient) - z) * directions, axis=-1)
        step = left / jnp.minimum(slope, -1e-3)
        return jnp.clip(distance - jnp.where(jnp.isfinite(step), step, 0.0), 1.0, furthest)

    ends = jnp.minimum(math.sqrt(2.0 * drop), furthest)
    ends = lax.fori_loop(0, _NUM_STEPS_OUT, out, ends)
    # A convex set that is no box reaches beyond the ends of its axes.
    above, below = _MARGIN * ends[:dimension].T, -_MARGIN * ends[dimension:].T

    # Sums over nodes at a distance h miss exp(-2 pi t / h) times what the integrand is at t from the real line.
    move = rows.root @ axes
    spread = jnp.maximum(jnp.max(move, axis=-2), 0.0) - jnp.minimum(jnp.min(move, axis=-2), 0.0)
    reach = jnp.minimum(0.85 * strip / jnp.maximum(spread, 1e-6), math.sqrt(2.0 * (drop + 1.0)))
    distance = _COARSER * 2.0 * math.pi * reach / (drop + 1.0 + 0.5 * reach**2)
    needed = jnp.ceil(jnp.max((above - below) / distance, axis=-1))
    needed = jnp.where(jnp.isfinite(needed), needed, 1.0)
    num_nodes = jnp.clip(needed, 2, _MOST_NODES[dimension]).astype(int)
    return _Frame(mode, axes, peak, gradient, below, above, num_nodes)


def _summed(derivatives: Derivatives, rows: _Rows, frame: _Frame) -> LatticeMoments:
    number, dimension = rows.mean.shape
    dtype = rows.mean.dtype
    count = jnp.max(frame.num_nodes)
    width = (frame.above - frame.below) / count.astype(dtype)
    axes, pairs = range(dimension), _pairs(dimension)
    move = rows.root @ frame.axes
    start = rows.mean + _times(rows.root, frame.mode)

    def add(chunk: Array, sums: Array) -> Array:
        flat = chunk * _NODES_AT_A_TIME + jnp.arange(_NODES_AT_A_TIME)
        index = [(flat // count**k) % count for k in axes]
        is_node = flat < count**dimension
        is_even = sum(index) % 2 == 0
        u = [frame.below[:, k] + (index[k][:, None].astype(dtype) + 0.5) * width[:, k] for k in axes]
        z = [frame.mode[:, i] + sum(frame.axes[:, i, k] * u[k] for k in axes) for i in axes]
        eta = [start[:, i] + sum(move[:, i, k] * u[k] for k in axes) for i in axes]
        value, gradient, hessian = derivatives(eta, rows.index)
        value = rows.power * value
        height = value - 0.5 * sum(part**2 for part in z) - frame.peak
        weight = jnp.where(is_node[:, None] & (height > -jnp.inf), jnp.exp(height), 0.0)
        apart = [rows.power * gradient[i] - frame.gradient[:, i] for i in axes]
        parts = [jnp.ones_like(weight), is_even[:, None] * jnp.ones_like(weight), value, *u, *apart]
        parts += [u[i] * u[j] for i, j in pairs] + [apart[i] * apart[j] for i, j in pairs]
        parts += [rows.power * part for part in hessian]
        return sums + jnp.stack([jnp.sum(weight * part, axis=0) for part in parts])

    nothing = jnp.zeros((3 + 2 * dimension + 3 * len(pairs), number), dtype)
    num_chunks = (count**dimension + _NODES_AT_A_TIME - 1) // _NODES_AT_A_TIME
    sums = lax.fori_loop(0, num_chunks, add, nothing)
    return _moments(rows, frame, sums, width)


def _moments(rows: _Rows, frame: _Frame, sums: Array, width: Array) -> LatticeMoments:
    """Moments and sites from the sums over nodes of the parts in :func:`_summed`, weighted by the integrand over its
    peak."""
    dimension = rows.mean.shape[-1]
    total, even = sums[0], sums[1]
    value, *parts = sums[2:] / total
    place, gradient = (jnp.stack(parts[k * dimension : (k + 1) * dimension], axis=-1) for k in range(2))
    size = len(_pairs(dimension))
    rest = parts[2 * dimension :]
    places, gradients, hessian = (_symmetric(rest[k * size : (k + 1) * size], dimension) for k in range(3))
    inner = places - place[:, :, None] * place[:, None, :]
    center = frame.mode + _times(frame.axes, place)
    spread = frame.axes @ inner @ frame.axes.mT
    # of the factor: mean curvature less what the slope varies by
    curvature = -hessian - (gradients - gradient[:, :, None] * gradient[:, None, :])
    gradient = frame.gradient + gradient
    # 1/V - 1/S for V = S - S B S and S = L L', with V = L W L': B + B L W^-1 L' B, in which nothing cancels.
    gain = curvature @ rows.root
    factor = cholesky(spread)
    half = inverse_lower(factor) @ gain.mT
    precision = curvature + half.mT @ half
    shift = _times(precision, rows.mean) + gradient + _times(gain, cholesky_solve(factor, center))
    log_axes = jnp.sum(jnp.log(jnp.diagonal(frame.axes, axis1=-2, axis2=-1)), axis=-1)
    log_z = frame.peak + jnp.log(total) + jnp.sum(jnp.log(width), axis=-1) + log_axes
    log_z -= 0.5 * dimension * math.log(2.0 * math.pi)
    error = jnp.abs(2.0 * even / total - 1.0) ** math.sqrt(2.0)
    return LatticeMoments(
        jnp.where(error < _MOST_ERROR, log_z, jnp.nan),
        rows.mean + _times(rows.root, center),
        rows.root @ spread @ rows.root.mT,
        gradient,
        curvature,
        value / jnp.where(rows.power == 0.0, 1.0, rows.power),
        precision,
        shift,
        error,
    )


def _times(matrix: Array, vector: Array) -> Array:
    return jnp.einsum("nij,nj->ni", matrix, vector)
