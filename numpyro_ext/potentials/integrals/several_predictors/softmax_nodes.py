r"""Tilted moments of the softmax of a few predictors, by product rules whose nodes share their exponentials.

Measured from the predictor of the category that was observed, the factor is
:math:`(1 + \sum_j e^{\delta_j})^{-p}`. With :math:`\delta = \mu + L z` for a standard normal ``z`` under the cavity,
nodes are laid around the mode, in a frame :math:`z = z^* + A x` that is lower triangular. Every exponential at a node
is then a product of exponentials along one or two of the axes, and what is left of a node is a few products and a
division.

Nodes are even in ``u`` at :math:`x = \sinh(c u) / c`. Sums of alternating sign along each axis are what a rule with
half of its nodes is wrong by, and on an analytic integrand twice as many about square that (Trefethen and Weideman
2014, theorem 5.1). These, and the mass at the ends, are the estimate of the error.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ....linalg.cholesky import cholesky, inverse_lower
from ....linalg.in_range import rows_of
from ....linalg.padding import chunked
from ....linalg.short_axes import times_vector
from .few_rows import for_few_rows
from .lattice_around_mode import (
    Cavities,
    LatticeMoments,
    Place,
    cavities,
    decay,
    lattice_moments,
    mode,
)
from .line_rules import LineRule, trapezoidal

_Parts = TypeVar("_Parts")
_Result = TypeVar("_Result")

LARGEST_SOFTMAX_DIMENSION = 5
"""Differences of predictors up to which moments are summed: 59,049 nodes."""

_SHORT = {2: (15, 4.75, 0.25), 3: (13, 4.5, 0.25), 4: (11, 4.25, 0.25), 5: (9, 4.0, 0.2)}
_LONG = {2: (201, 7.0, 0.3), 3: (41, 6.5, 0.3), 4: (21, 5.0, 0.3), 5: (13, 4.0, 0.3)}
"""Rules by dimension: number of nodes on an axis, how far they reach in ``u``, and the constant ``c``."""
_ENOUGH = {2: 1e-7, 3: 3e-5, 4: 1e-4, 5: 1e-3}
"""Error by the estimate, by dimension, above which other nodes are laid."""
_MOST_ERROR = {2: 1e-4, 3: 1e-4, 4: 3e-4, 5: 1e-3}
"""Error from which moments are not believed, by dimension."""
_SAFETY = 0.85
"""Part of the distance from the real line to the first singularity of the factor that is counted upon."""
_MOST_PASSES = 3
_ROWS_AT_A_TIME, _LEAST_BATCH = 256, 16
_FARTHEST = 6.0
"""Standard deviations of the cavity, beyond which a place that is given is none to begin at."""


def softmax_moments(
    mean: ArrayLike, covariance: ArrayLike, power: ArrayLike = 1.0, near: ArrayLike | None = None
) -> LatticeMoments:
    r"""Moments of :math:`(1 + \sum_j e^{\delta_j})^{-p} N(\delta \mid \mu, S)` in up to five dimensions, and sites.

    Where deviations of the cavity are about one, errors are about 1e-8 of a standard deviation in two dimensions, 1e-6
    in three and four, and 1e-5 in five. Factors whose error is estimated to be larger than is asked take more nodes,
    around the moments found. Where these do not serve either (deviations above some 30 in two dimensions, 10 in three,
    5 in four and 3 in five) moments are nan. One dimension is summed by a lattice.

    Cost: 225, 2,197, 14,641 and 59,049 nodes in two to five dimensions, of 2 to 3 ns each; 40,401, 68,921, 194,481 and
    371,293 for those that are looked at again.

    :param Array mean: cavity means, shape ``(n, M)``.
    :param Array covariance: cavity covariances, shape ``(n, M, M)``, positive semidefinite.
    :param power: exponents, one or ``n``. Where it is the number one, the mean of the log factor is not computed.
    :param Array near: where the modes are looked for first; the cavity means otherwise.
    """
    mean, covariance = jnp.asarray(mean), jnp.asarray(covariance)
    number, dimension = mean.shape
    is_one = isinstance(power, int | float) and power == 1
    known = cavities(mean, covariance, power)
    if dimension not in _SHORT:
        return lattice_moments(_derivatives, mean, covariance, power, strip=math.pi)
    start = jnp.zeros_like(mean)
    if near is not None:
        away = times_vector(inverse_lower(known.root), jnp.asarray(near) - mean)
        start = jnp.where(jnp.sum(jnp.square(away), axis=-1, keepdims=True) < _FARTHEST**2, away, 0.0)

    def short(part: tuple[Cavities, Array]) -> tuple[_Sums, Place]:
        own, start = part
        center, axes = mode(_derivatives, own, start)
        place = Place(center, cholesky(axes @ axes.mT))
        return _summed(own, place, _Rule(*_SHORT[dimension]), is_one), place

    sums, place_of_all = _in_chunks(short, (known, start), number)
    is_needed = ~(sums.error < _ENOUGH[dimension])
    size = min(number, max(_LEAST_BATCH, number // _LEAST_BATCH))

    def again(rows: Array) -> _Sums:
        own, before, place = rows_of((known, sums, place_of_all), rows)

        def is_poor(state: tuple[Array, _Sums, Place]) -> Array:
            return (state[0] < _MOST_PASSES) & jnp.any(~(state[1].error < _ENOUGH[dimension]))

        def sweep(state: tuple[Array, _Sums, Place]) -> tuple[Array, _Sums, Place]:
            number, before, place = state
            place = _around(before, place)
            found = _summed(own, place, _Rule(*_LONG[dimension]), is_one)
            is_better = ~(before.error < found.error)

            def better(new: Array, old: Array) -> Array:
                return jnp.where(is_better.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

            return number + 1, jax.tree.map(better, found, before), place

        return lax.while_loop(is_poor, sweep, (jnp.asarray(0), before, place))[1]

    return _moments(known, for_few_rows(again, is_needed, sums, size))


def _around(sums: _Sums, place: Place) -> Place:
    """The frame in which moments that were found are those of a standard normal density, or the one before."""
    factor = cholesky(sums.spread)
    is_good = jnp.isfinite(jnp.sum(factor, axis=(-2, -1)) + jnp.sum(sums.moved, axis=-1))
    axes = jnp.where(is_good[:, None, None], factor, place.axes)
    return Place(jnp.where(is_good[:, None], sums.moved, place.center), axes)


def _in_chunks(function: Callable[[_Parts], _Result], parts: _Parts, number: int) -> _Result:
    """``function`` of arrays with a row for each factor, some of them at a time so that sums stay in the cache."""
    if number <= _ROWS_AT_A_TIME:
        return function(parts)
    num_chunks = -(-number // _ROWS_AT_A_TIME)
    padded = jax.tree.map(lambda x: chunked(x, num_chunks, _ROWS_AT_A_TIME, mode="edge"), parts)
    found: _Result = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:number], lax.map(function, padded))
    return found


def _derivatives(seen: Sequence[Array], _: Array) -> tuple[Array, Sequence[Array], Sequence[Array]]:
    largest = functools.reduce(jnp.maximum, seen, jnp.zeros_like(seen[0]))
    masses = [jnp.exp(part - largest) for part in seen]
    mass = sum(masses, start=jnp.exp(-largest))
    probs = [part / mass for part in masses]
    pairs = itertools.combinations_with_replacement(range(len(seen)), 2)
    bends = [probs[i] * (probs[j] - (1.0 if i == j else 0.0)) for i, j in pairs]
    return -largest - jnp.log(mass), [-part for part in probs], bends


class _Rule(NamedTuple):
    """Even nodes on each axis, with long tails."""

    size: int
    reach: float
    stretch: float

    @property
    def spacing(self) -> float:
        return 2.0 * self.reach / (self.size - 1)

    def on_line(self) -> LineRule:
        return trapezoidal(self.spacing, self.reach, self.stretch)


class _Sums(NamedTuple):
    """Moments in coordinates in which the cavity is standard normal."""

    log_z: Array
    moved: Array
    """Means, shape ``(n, M)``."""
    spread: Array
    """Covariances, shape ``(n, M, M)``."""
    log_factor: Array
    error: Array


_Carry = tuple[Array, Array, Array]


def _summed(known: Cavities, place: Place, rule: _Rule, is_one: bool) -> _Sums:
    """Moments by the nodes of a rule on all axes of a frame."""
    number, dimension = known.mean.shape
    dtype, size, most = known.mean.dtype, rule.size, dimension - 2
    position, told = rule.on_line()
    nodes, weights = jnp.asarray(position, dtype), told[:, 0]
    # all arrays have the factors last
    center, axes, root = (jnp.moveaxis(part, 0, -1) for part in (place.center, place.axes, known.root @ place.axes))
    begin = jnp.moveaxis(known.mean + times_vector(known.root, place.center), 0, -1)
    level = jnp.logaddexp(jax.nn.logsumexp(begin, axis=0), 0.0)
    begin = begin - level
    peak = -known.power * level - 0.5 * jnp.sum(jnp.square(center), axis=0)
    first, last = nodes[:, None], nodes[:, None]
    growth = jnp.exp(root[-2, -2] * first), jnp.exp(root[-1, -2] * first), jnp.exp(root[-1, -1] * last)
    across = jnp.exp(-axes[-1, -2] * axes[-1, -1] * nodes[:, None, None] * nodes[:, None])
    across *= jnp.asarray(weights[:, None] * weights, dtype)[..., None]
    along = jnp.stack([jnp.ones_like(nodes), nodes])

    def add(sums: _Carry, node: tuple[Array, Array]) -> tuple[_Carry, Array]:
        """All nodes on the last two axes, at one node of the others."""
        outer, weight = node
        z = center + jnp.tensordot(axes[:, :most], outer, axes=(1, 0))
        masses = jnp.exp(begin + jnp.tensordot(root[:, :most], outer, axes=(1, 0)))
        rest = jnp.exp(-level) + jnp.sum(masses[:most], axis=0)
        height = 0.5 * (jnp.sum(jnp.square(center), axis=0) - jnp.sum(jnp.square(z[:most]), axis=0))
        drop = jnp.square(z[-2] + axes[-2, -2] * first) + axes[-1, -2] * first * (2.0 * z[-1] + axes[-1, -2] * first)
        of_first = jnp.exp(height - 0.5 * drop)
        of_last = jnp.exp(-0.5 * jnp.square(z[-1] + axes[-1, -1] * last))
        mass = rest + masses[-2] * growth[0] + growth[2][:, None] * (masses[-1] * growth[1])
        density = across * of_last[:, None] * of_first
        log_mass = None if is_one else jnp.log(mass)
        density = density / mass if log_mass is None else density * jnp.exp(-known.power * log_mass)
        lines = jnp.tensordot(along, density, axes=(1, 0))  # sums over the last axis
        total, of_one = jnp.tensordot(along, lines[0], axes=(1, 0))
        parts = [total, of_one, jnp.sum(lines[1], axis=0)]
        if log_mass is not None:
            parts.append(jnp.sum(density * log_mass, axis=(0, 1)))
        new = lines[0], jnp.sum(density, axis=1), jnp.tensordot(nodes, lines[1], axes=(0, 0))
        return jax.tree.map(lambda old, part: old + weight * part, sums, new), jnp.stack(parts)

    outer = np.array(list(itertools.product(position, repeat=most))).reshape(size**most, most)
    weight = np.array(list(itertools.product(weights, repeat=most))).reshape(size**most, most).prod(axis=-1)
    nothing = jnp.zeros((size, number), dtype), jnp.zeros((size, number), dtype), jnp.zeros((number,), dtype)
    steps = jnp.asarray(outer, dtype), jnp.asarray(weight, dtype)
    (of_first, of_last, mixed), parts = lax.scan(add, nothing, steps)
    parts = parts * steps[1][:, None, None]
    total = jnp.sum(parts[:, 0], axis=0)
    # densities along each axis, which say the moments on it and the error of the rule
    cube = (parts[:, 0] / total).reshape(*(size,) * most, number)
    lines = [jnp.sum(cube, axis=tuple(k for k in range(most) if k != axis)) for axis in range(most)]
    lines += [of_first / total, of_last / total]
    told = told / told[:, :1]
    sums = jnp.einsum("sj,ksn->jkn", jnp.asarray(told, dtype), jnp.stack(lines))
    x, squares = sums[1], 1.0 + math.sqrt(2.0) * sums[2]
    error = _error(rule, sums[3:6], jnp.stack(lines), jnp.moveaxis(root, -1, 0))
    between = jnp.einsum("sk,sl,sn->kln", *(steps[0],) * 2, parts[:, 0] / total)
    to_inner = jnp.einsum("sk,sjn->kjn", steps[0], parts[:, 1:3] / total)
    second = jnp.zeros((dimension, dimension, number), dtype)
    second = second.at[:most, :most].set(between).at[:most, most:].set(to_inner)
    second = second.at[most:, :most].set(jnp.swapaxes(to_inner, 0, 1))
    second = second.at[-2, -1].set(mixed / total).at[-1, -2].set(mixed / total)
    second = second.at[np.arange(dimension), np.arange(dimension)].set(squares)
    inner = jnp.moveaxis(second - x[:, None] * x, -1, 0)
    log_z = peak + jnp.log(total) + jnp.sum(jnp.log(jnp.abs(jnp.diagonal(axes))), axis=-1)
    log_factor = jnp.zeros_like(log_z) if is_one else -level - jnp.sum(parts[:, 3], axis=0) / total
    moved = place.center + times_vector(place.axes, x.T)
    spread = place.axes @ inner @ place.axes.mT
    return _Sums(log_z - 0.5 * dimension * math.log(2.0 * math.pi), moved, spread, log_factor, error)


def _error(rule: _Rule, halves: Array, lines: Array, axes: Array) -> Array:
    """Estimate from sums of alternating sign ``(3, M, n)``, densities along the axes ``(M, size, n)``, and the axes in
    units of the predictors ``(n, M, M)``."""
    # what half of the nodes are wrong by is the transform at one frequency, what all are at twice that
    halves = jnp.max(jnp.abs(halves), axis=0)
    spread = jnp.maximum(jnp.max(axes, axis=1), 0.0) - jnp.minimum(jnp.min(axes, axis=1), 0.0)
    strip = _SAFETY * math.pi / jnp.maximum(spread, 1e-6).T
    frequency = math.pi / rule.spacing
    gain = decay(2.0 * frequency, strip) - decay(frequency, strip)
    of_nodes = halves * jnp.minimum(halves, jnp.exp(-gain))
    # densities along axes are log-concave: beyond the ends they fall at least as fast as up to them
    furthest = np.square(np.sinh(rule.stretch * (rule.reach + rule.spacing)) / rule.stretch)
    tails = [
        line * jnp.minimum(line / before, 1.0)
        for line, before in ((lines[:, 0], lines[:, 1]), (lines[:, -1], lines[:, -2]))
    ]
    return jnp.max(of_nodes + furthest * (tails[0] + tails[1]), axis=0)


def _moments(known: Cavities, sums: _Sums) -> LatticeMoments:
    """Sites from mean and covariance in the coordinates of the cavity, where neither is far from standard."""
    log_z, moved, spread, log_factor, error = sums
    root, back = known.root, inverse_lower(known.root)
    half = inverse_lower(cholesky(spread))
    inverse = half.mT @ half
    identity = jnp.eye(spread.shape[-1], dtype=spread.dtype)
    precision = back.mT @ (inverse - identity) @ back
    error = jnp.where(jnp.isfinite(error), error, jnp.inf)
    return LatticeMoments(
        jnp.where(error < _MOST_ERROR[spread.shape[-1]], log_z, jnp.nan),
        known.mean + times_vector(root, moved),
        root @ spread @ root.mT,
        times_vector(back.mT, moved),
        back.mT @ (identity - spread) @ back,
        log_factor,
        precision,
        times_vector(precision, known.mean) + times_vector(back.mT, times_vector(inverse, moved)),
        error,
    )
