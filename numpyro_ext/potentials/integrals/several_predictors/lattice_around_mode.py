r"""Tilted moments of log-concave factors of a few predictors, by the trapezoidal rule on a lattice around their mode.

The predictors are :math:`\eta = \mu + L z` with a standard normal ``z`` under the cavity. The mode of the integrand and
its curvature there give a frame :math:`z = z^* + R^{-T} u` in which it is about as wide in all directions. Along each
axis of the frame Newton's method finds where the integrand has fallen to nothing: on a concave function it comes from
outside, so that an iteration too few gives nodes too many. The distance of nodes follows from how far the factor is
analytic. Sums over all nodes and over every second one (those whose indices add up to an even number) tell the error.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ....linalg.cholesky import cholesky, cholesky_solve, inverse_lower
from ....linalg.short_axes import times_vector

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
_MARGIN, _COARSER = 1.2, 1.15
"""Margins of the ends and the distance of nodes: together they leave errors of the same size, 1e-9 of the
normaliser."""
_DROP = {1: 21.0, 2: 21.0, 3: 14.0}
"""Logarithm of how far the integrand has fallen at the ends, by dimension: nine digits, six where nodes are many."""
_NODES_AT_A_TIME = 64
_ROWS_AT_A_TIME = 128
_MOST_NODES = {1: 4096, 2: 256, 3: 64}
"""On each axis, by dimension."""
_NUM_PASSES = 5
_ENOUGH = {1: 1e-9, 2: 3e-9, 3: 1e-5}
"""Relative error of the normaliser, by dimension, above which another lattice is laid around the moments found."""
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
    number = len(mean)
    rows = cavities(mean, covariance, power)
    if number <= _ROWS_AT_A_TIME:
        return _found(derivatives, rows, strip)
    # Broad cavities need many nodes: rows that are alike are summed together.
    order = jnp.argsort(jnp.max(jnp.diagonal(covariance, axis1=-2, axis2=-1), axis=-1))
    padded = jnp.concatenate([order, jnp.full((-number % _ROWS_AT_A_TIME,), order[-1])]).reshape(-1, _ROWS_AT_A_TIME)
    found = lax.map(lambda chosen: _found(derivatives, jax.tree.map(lambda x: x[chosen], rows), strip), padded)
    place = jnp.argsort(order)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[place], found)


class Cavities(NamedTuple):
    """Factors and their cavities."""

    number: Array
    """Number of each factor among all, shape ``(n,)``."""
    mean: Array
    root: Array
    """Lower Cholesky factors of the covariances."""
    power: Array


def cavities(mean: Array, covariance: Array, power: ArrayLike) -> Cavities:
    """All factors, with cavities in which what moves by less than rounding moves by that."""
    number, dimension = mean.shape
    largest = jnp.max(jnp.diagonal(covariance, axis1=-2, axis2=-1), axis=-1)
    jitter = 8.0 * jnp.finfo(mean.dtype).eps * (1.0 + largest)
    root = cholesky(covariance + jitter[:, None, None] * jnp.eye(dimension, dtype=mean.dtype))
    return Cavities(jnp.arange(number), mean, root, jnp.broadcast_to(jnp.asarray(power, mean.dtype), (number,)))


class _Frame(NamedTuple):
    """Places of the nodes of each factor."""

    center: Array
    axes: Array
    """Columns are the directions of the lattice, shape ``(n, M, M)``."""
    peak: Array
    """Log integrand at the center."""
    gradient: Array
    """Gradient of the log factor there."""
    below: Array
    """Ends of the lattice on each axis, shape ``(n, M)``."""
    above: Array
    num_nodes: Array
    """Needed on each axis, shape ``(n,)``."""
    strip: Array
    """Distance from the real line within which the integrand is analytic, along the axes, shape ``(n,)``."""
    is_too_wide: Array
    """True if half as many again would be needed as there are."""


def _pairs(dimension: int) -> list[tuple[int, int]]:
    return list(itertools.combinations_with_replacement(range(dimension), 2))


def _symmetric(parts: Sequence[Array], dimension: int) -> Array:
    """Matrices on the last two axes, from their entries ``i <= j``."""
    entries = dict(zip(_pairs(dimension), parts, strict=True))
    rows = [[entries[min(i, j), max(i, j)] for j in range(dimension)] for i in range(dimension)]
    return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


def _at(derivatives: Derivatives, rows: Cavities, z: Array) -> tuple[Array, Array, Array]:
    """Log factors to their powers and their derivatives in the predictors, at ``z`` of shape ``(..., n, M)``."""
    eta = rows.mean + jnp.einsum("nij,...nj->...ni", rows.root, z)
    dimension = z.shape[-1]
    value, gradient, hessian = derivatives([eta[..., i] for i in range(dimension)], rows.number)
    power = rows.power[:, None]
    of_value, of_gradient = rows.power * value, power * jnp.stack(gradient, axis=-1)
    return of_value, of_gradient, power[..., None] * _symmetric(hessian, dimension)


def _in_z(derivatives: Derivatives, rows: Cavities, z: Array) -> tuple[Array, Array, Array, Array]:
    """Log integrand, gradient of the log factor in the predictors, slope and curvature of the former in ``z``."""
    value, gradient, hessian = _at(derivatives, rows, z)
    slope = jnp.einsum("nij,...ni->...nj", rows.root, gradient) - z
    identity = jnp.eye(z.shape[-1], dtype=z.dtype)
    bend = identity - jnp.einsum("nki,...nkl,nlj->...nij", rows.root, hessian, rows.root)
    return value - 0.5 * jnp.sum(z**2, axis=-1), gradient, slope, bend


def _found(derivatives: Derivatives, rows: Cavities, strip: float) -> LatticeMoments:
    """Moments by lattices around the mode, and around the moments found where the first one was cut off."""
    dimension = rows.mean.shape[-1]
    enough = _ENOUGH[dimension]

    def is_cut(state: tuple[Array, Place, LatticeMoments]) -> Array:
        number, _, found = state
        is_worth_more = jnp.any(~(found.error <= enough))  # a wider one may find what the first has missed
        return (number == 0) | ((number < _NUM_PASSES) & is_worth_more)

    def sweep(state: tuple[Array, Place, LatticeMoments]) -> tuple[Array, Place, LatticeMoments]:
        number, place, before = state
        margin = _MARGIN * 1.25 ** number.astype(rows.mean.dtype)
        place, found = _summed(derivatives, rows, _frame(derivatives, rows, place, strip, margin))
        # What is good enough stays: a wider lattice is a coarser one where there are no more nodes.
        is_better = (found.error < before.error) & ~(before.error <= enough)

        def better(new: Array, old: Array) -> Array:
            return jnp.where(is_better.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return number + 1, place, jax.tree.map(better, found, before)

    place = mode(derivatives, rows, jnp.zeros_like(rows.mean))
    margin = jnp.asarray(_MARGIN, rows.mean.dtype)
    shapes = jax.eval_shape(lambda: _summed(derivatives, rows, _frame(derivatives, rows, place, strip, margin))[1])
    nothing: LatticeMoments = jax.tree.map(lambda x: jnp.full(x.shape, jnp.inf, x.dtype), shapes)
    found = lax.while_loop(is_cut, sweep, (jnp.asarray(0), place, nothing))[2]
    return found._replace(log_z=jnp.where(found.error < _MOST_ERROR, found.log_z, jnp.nan))


class Place(NamedTuple):
    """Middle of the integrand in ``z``, and directions in which it has about unit width."""

    center: Array
    axes: Array


def mode(derivatives: Derivatives, rows: Cavities, start: Array) -> Place:
    """The mode by Newton's method with a choice of step sizes, as far as a lattice needs it.

    :param Array start: where it is looked for first, in coordinates that are standard normal under the cavity.
    """
    sizes = jnp.asarray(_STEP_SIZES, rows.mean.dtype)[:, None, None]

    def is_far(state: tuple[Array, Array, Array, Array, Array]) -> Array:
        return (state[0] < _NUM_CLIMBS) & (state[1] > _NEAR)

    def climb(state: tuple[Array, Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array, Array]:
        number, _, z, step, _ = state
        trials = z + sizes * step
        height, _, slope, bend = _in_z(derivatives, rows, trials)
        best = jnp.argmax(jnp.where(jnp.isnan(height), -jnp.inf, height), axis=0)
        z, slope, bend = (_chosen(part, best) for part in (trials, slope, bend))
        factor = cholesky(bend)
        step = cholesky_solve(factor, slope)
        # in deviations of the integrand
        length = jnp.sqrt(jnp.sum(slope * step, axis=-1))
        is_good = jnp.isfinite(length)
        step = jnp.where(is_good[:, None], step, 0.0)
        return number + 1, jnp.max(jnp.where(is_good, length, 0.0), initial=0.0), z, step, factor

    infinity = jnp.asarray(jnp.inf, rows.mean.dtype)
    _, _, z, _, factor = lax.while_loop(
        is_far, climb, (jnp.asarray(0), infinity, start, jnp.zeros_like(start), jnp.zeros_like(rows.root))
    )
    return Place(z, inverse_lower(factor).mT)


def _chosen(parts: Array, best: Array) -> Array:
    """One of the arrays on the first axis, for each row."""
    return jnp.take_along_axis(parts, best.reshape(1, -1, *(1,) * (parts.ndim - 2)), axis=0)[0]


def _frame(derivatives: Derivatives, rows: Cavities, place: Place, strip: float, margin: Array) -> _Frame:
    """Ends of a lattice, and how many nodes it needs."""
    center, axes = place
    dtype, dimension = rows.mean.dtype, rows.mean.shape[-1]
    drop = min(_DROP[dimension], 1.0 - math.log(float(jnp.finfo(dtype).eps)))
    # Out along the axes, in both directions at once: axes of arrays are direction, factor, predictor.
    directions = jnp.concatenate([axes, -axes], axis=-1).transpose(2, 0, 1)
    length = jnp.sqrt(jnp.sum(directions**2, axis=-1))
    # The integrand falls at least as fast as the cavity, from its mode.
    furthest = 1.5 * math.sqrt(2.0 * drop) / length + 1.0

    def look(distance: Array) -> tuple[Array, Array, Array]:
        height, gradient, slope, _ = _in_z(derivatives, rows, center + distance[..., None] * directions)
        return height, gradient, jnp.sum(slope * directions, axis=-1)

    def out(_: Array | int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        distance, peak, gradient = state
        height, of_factor, slope = look(distance)
        is_start = jnp.isnan(peak)
        peak, gradient = jnp.where(is_start, height[0], peak), jnp.where(is_start[:, None], of_factor[0], gradient)
        step = (height - peak + drop) / jnp.minimum(slope, -1e-3)
        moved = jnp.clip(distance - jnp.where(jnp.isfinite(step), step, 0.0), 1.0, furthest)
        return jnp.where(is_start, jnp.minimum(math.sqrt(2.0 * drop), furthest), moved), peak, gradient

    # The first look is at the center.
    start = jnp.zeros_like(length), jnp.full_like(length[0], jnp.nan), jnp.zeros_like(center)
    ends, peak, gradient = lax.fori_loop(0, 1 + _NUM_STEPS_OUT, out, start)
    # A convex set that is no box reaches beyond the ends of its axes.
    above, below = margin * ends[:dimension].T, -margin * ends[dimension:].T

    # Sums over nodes at a distance h miss exp(-2 pi t / h) times what the integrand is at t from the real line.
    move = rows.root @ axes
    spread = jnp.maximum(jnp.max(move, axis=-2), 0.0) - jnp.minimum(jnp.min(move, axis=-2), 0.0)
    reach_of_factor = 0.85 * strip / jnp.maximum(spread, 1e-6)
    reach = jnp.minimum(reach_of_factor, math.sqrt(2.0 * (drop + 1.0)))
    distance = _COARSER * 2.0 * math.pi * reach / (drop + 1.0 + 0.5 * reach**2)
    distance = jnp.minimum(distance, math.pi * math.sqrt(2.0 / (drop + 2.0)))  # enough for a Gaussian
    needed = jnp.ceil(jnp.max((above - below) / distance, axis=-1))
    needed = jnp.where(jnp.isfinite(needed), needed, 1.0)
    most = _MOST_NODES[dimension]
    num_nodes = jnp.clip(needed, 2, most).astype(int)
    analytic = jnp.min(reach_of_factor, axis=-1)
    return _Frame(center, axes, peak, gradient, below, above, num_nodes, analytic, needed > 1.5 * most)


def _summed(derivatives: Derivatives, rows: Cavities, frame: _Frame) -> tuple[Place, LatticeMoments]:
    """Moments by one lattice, and where they say that the integrand is."""
    number, dimension = rows.mean.shape
    dtype = rows.mean.dtype
    count = jnp.max(frame.num_nodes)
    width = (frame.above - frame.below) / count.astype(dtype)
    axes, pairs = range(dimension), _pairs(dimension)
    move = rows.root @ frame.axes
    start = rows.mean + times_vector(rows.root, frame.center)

    def add(chunk: Array, sums: Array) -> Array:
        flat = chunk * _NODES_AT_A_TIME + jnp.arange(_NODES_AT_A_TIME)
        index = [(flat // count**k) % count for k in axes]
        is_node = flat < count**dimension
        is_even = functools.reduce(jnp.add, index) % 2 == 0
        is_end = functools.reduce(jnp.logical_or, [(part == 0) | (part == count - 1) for part in index])
        u = [frame.below[:, k] + (index[k][:, None].astype(dtype) + 0.5) * width[:, k] for k in axes]
        z = [frame.center[:, i] + sum(frame.axes[:, i, k] * u[k] for k in axes) for i in axes]
        eta = [start[:, i] + sum(move[:, i, k] * u[k] for k in axes) for i in axes]
        value, gradient, hessian = derivatives(eta, rows.number)
        value = rows.power * value
        height = value - 0.5 * sum(part**2 for part in z) - frame.peak
        weight = jnp.where(is_node[:, None] & (height > -jnp.inf), jnp.exp(height), 0.0)
        apart = [rows.power * gradient[i] - frame.gradient[:, i] for i in axes]
        kinds = [jnp.broadcast_to(kind[:, None], weight.shape) for kind in (is_node, is_even, is_end)]
        parts = [*kinds, value, *u, *apart]
        parts += [u[i] * u[j] for i, j in pairs] + [apart[i] * apart[j] for i, j in pairs]
        parts += [rows.power * part for part in hessian]
        return sums + jnp.stack([jnp.sum(weight * part, axis=0) for part in parts])

    nothing = jnp.zeros((4 + 2 * dimension + 3 * len(pairs), number), dtype)
    num_chunks = (count**dimension + _NODES_AT_A_TIME - 1) // _NODES_AT_A_TIME
    sums = lax.fori_loop(0, num_chunks, add, nothing)
    return _moments(rows, frame, sums, width, count)


def decay(frequency: ArrayLike, strip: Array) -> Array:
    """Fall of the transform of the integrand at a frequency: as that of a Gaussian, and like the exponential
    of minus the width of the strip where singularities come first."""
    distance = jnp.minimum(strip, frequency)
    return distance * frequency - 0.5 * jnp.square(distance)


def _moments(rows: Cavities, frame: _Frame, sums: Array, width: Array, count: Array) -> tuple[Place, LatticeMoments]:
    """Moments and sites from the sums over nodes of the parts in :func:`_summed`, weighted by the integrand over its
    peak."""
    dimension = rows.mean.shape[-1]
    total = sums[0]
    even, end, value, *parts = sums[1:] / total
    place, gradient = (jnp.stack(parts[k * dimension : (k + 1) * dimension], axis=-1) for k in range(2))
    size = len(_pairs(dimension))
    rest = parts[2 * dimension :]
    places, gradients, hessian = (_symmetric(rest[k * size : (k + 1) * size], dimension) for k in range(3))
    inner = places - place[:, :, None] * place[:, None, :]
    center = frame.center + times_vector(frame.axes, place)
    spread = frame.axes @ inner @ frame.axes.mT
    # of the factor: mean curvature less what the slope varies by
    curvature = -hessian - (gradients - gradient[:, :, None] * gradient[:, None, :])
    gradient = frame.gradient + gradient
    # 1/V - 1/S for V = S - S B S and S = L L', with V = L W L': B + B L W^-1 L' B, in which nothing cancels.
    gain = curvature @ rows.root
    factor = cholesky(spread)
    half = inverse_lower(factor) @ gain.mT
    precision = curvature + half.mT @ half
    shift = times_vector(precision, rows.mean) + gradient + times_vector(gain, cholesky_solve(factor, center))
    log_axes = jnp.sum(jnp.log(jnp.diagonal(frame.axes, axis1=-2, axis2=-1)), axis=-1)
    log_z = frame.peak + jnp.log(total) + jnp.sum(jnp.log(width), axis=-1) + log_axes
    log_z -= 0.5 * dimension * math.log(2.0 * math.pi)
    # A lattice of every second node is coarser by the root of two, so its error to that power is a bound where the
    # transform is log-concave; that holds until there are no more nodes to be had.
    difference = jnp.abs(2.0 * even - 1.0)
    is_fine = count < _MOST_NODES[dimension]
    highest = 2.0 * math.pi / jnp.max(width, axis=-1)
    gain = decay(highest, frame.strip) - decay(highest / math.sqrt(2.0), frame.strip)
    shrinks = jnp.minimum(difference ** (math.sqrt(2.0) - 1.0), jnp.exp(-gain))
    error = end + difference * jnp.where(is_fine, shrinks, 10.0)
    error = jnp.where(frame.is_too_wide, jnp.inf, error)
    moments = LatticeMoments(
        log_z,
        rows.mean + times_vector(rows.root, center),
        rows.root @ spread @ rows.root.mT,
        gradient,
        curvature,
        value / jnp.where(rows.power == 0.0, 1.0, rows.power),
        precision,
        shift,
        jnp.where(jnp.isfinite(error), error, jnp.inf),
    )
    is_good = jnp.isfinite(jnp.sum(factor, axis=(-2, -1)))[:, None]
    next_place = Place(jnp.where(is_good, center, frame.center), jnp.where(is_good[..., None], factor, frame.axes))
    return next_place, moments
