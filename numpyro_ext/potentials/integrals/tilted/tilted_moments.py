r"""Tilted moments of any elementwise factor by quadrature centred on the tilted density, and Gaussian expectations.

The raw density is never integrated: it under- and overflows for ordinary data (Ko 2017, Fig 2.5a). The logarithm of
the integrand is followed to its modes and shoulders, and Gauss-Legendre rules are laid between them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ....linalg.padding import chunked
from ...moments import LogFactor, TiltedMoments
from .even_nodes import NUM_NODES, even_nodes, few_nodes, mode_and_width
from .tilted_site import with_site
from .tilted_window import Cavity, Piece, Segments, log_concave_mode, segments, two_pieces

_LOG_2PI = math.log(2.0 * math.pi)
_CHUNK, _LEAST_CHUNKS = 2048, 2
_NUM_BLOCKS = 5


def gaussian_expectation(
    function: Callable[[Array], Array], mean: ArrayLike, variance: ArrayLike, num_nodes: int = 32
) -> Array:
    r"""Expectation of an elementwise function under independent Gaussians, by the Gauss-Hermite rule.

    Exact for polynomials of degree ``2 num_nodes - 1``; good for functions that are smooth on the scale of the
    standard deviation. Differentiable in everything that ``function`` uses.

    :param Callable function: maps an array of the broadcast shape of ``mean`` and ``variance`` to one of that shape.
    :param ArrayLike mean: means.
    :param ArrayLike variance: variances.
    :param int num_nodes: nodes of the rule, and calls of ``function`` (mapped over the nodes).
    :return: expectations, of the broadcast shape.

    **Example:**

    >>> gaussian_expectation(jnp.exp, 0.5, 1.0).item()
    2.7183
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    mean, variance = jnp.broadcast_arrays(*jax.tree.map(jnp.asarray, (mean, variance)))
    scale = jnp.sqrt(variance)
    dtype = jnp.result_type(mean, variance, float)
    values = jax.vmap(lambda z: function(mean + scale * z))(jnp.asarray(nodes, dtype))
    return jnp.tensordot(jnp.asarray(weights / weights.sum(), dtype), values, axes=1)


def tilted_moments(
    potential: LogFactor,
    mean: ArrayLike,
    variance: ArrayLike,
    power: ArrayLike = 1.0,
    *,
    num_nodes: int | None = None,
    only_log_z: bool = False,
) -> TiltedMoments:
    r"""Moments of :math:`t(\eta)^p N(\eta \mid \mu, v)` for any elementwise factor.

    Smooth log-concave factors are integrated around their one tilted mode. Others that are called smooth, and whose
    peak is not known, take the trapezoidal rule where it shows that it can be trusted for all of them. For what is left
    a second mode is searched for, and the line is also cut at the peak of the factor, where it may have a kink; the
    factor itself should have a single peak (it may have more if each is wider than about a tenth of the cavity). A
    factor may be zero on part of the line.

    The nodes are held fixed under differentiation, so that derivatives in the cavity, the power and the parameters of
    the potential are those of the integral. What cannot be integrated is ``nan``.

    Cost: about 250 evaluations of the log density for log-concave factors, 47 to 450 for other smooth ones, and 1500
    more where these were not trusted (of which some with the slope); memory of about 20 arrays (200 for others) of the
    size of the result.

    :param LogFactor potential: the factors; only ``log_density`` and ``derivatives`` are used.
    :param ArrayLike mean: cavity means.
    :param ArrayLike variance: cavity variances.
    :param ArrayLike power: the exponent of the factor, in (0, 1].
    :param int num_nodes: for the rule that cuts the line, without the trapezoidal one: Gauss-Legendre nodes per
        segment (four segments for each mode). Default: 40 in float64 and 16 in float32, twice that for factors that are
        not log-concave or not smooth.
    :param bool only_log_z: whether derivatives are asked of ``log_z`` alone, which cost less: all else is then held.
    :return: tilted moments, of the broadcast shape of the factors, ``mean``, ``variance`` and ``power``.
    """
    return _tilted_moments(potential, mean, variance, power, num_nodes, only_log_z)


@functools.partial(jax.jit, static_argnames=("num_nodes", "only_log_z"))
def _tilted_moments(
    potential: LogFactor,
    mean: ArrayLike,
    variance: ArrayLike,
    power: ArrayLike,
    num_nodes: int | None,
    only_log_z: bool,
) -> TiltedMoments:
    arrays = broadcast_to_factors(potential, mean, variance, power)
    whole = functools.partial(_chunk_moments, num_nodes=num_nodes, only_log_z=only_log_z)
    is_unknown = potential.is_smooth and not potential.is_log_concave and not hasattr(potential, "center")
    if not is_unknown or num_nodes is not None:
        return in_chunks(whole, potential, *arrays)

    def searched(potential: LogFactor, *arrays: Array) -> TiltedMoments:
        found, is_trusted = on_even_nodes(potential, *arrays, only_log_z=only_log_z)
        return jax.lax.cond(jnp.all(is_trusted), lambda *_: found, whole, potential, *arrays)

    if arrays[0].dtype != jnp.float64:  # differences of values have no digits of curvatures
        return in_chunks(searched, potential, *arrays)

    def of_chunk(potential: LogFactor, *arrays: Array) -> TiltedMoments:
        found, is_trusted = on_few_nodes(potential, *arrays, only_log_z=only_log_z)
        return jax.lax.cond(jnp.all(is_trusted), lambda *_: found, searched, potential, *arrays)

    return in_chunks(of_chunk, potential, *arrays)


def in_chunks(function: Callable[..., TiltedMoments], potential: LogFactor, *arrays: Array) -> TiltedMoments:
    """A function of factors and of arrays of their shape, on CPUs for two thousand or so of many factors at a time.

    The arrays of a chunk stay in the processor's cache from node to node, and what a function decides from the widest
    cavity it decides for each chunk.
    """
    shape = arrays[0].shape
    if math.prod(shape) < _LEAST_CHUNKS * _CHUNK:
        # What derivatives need is little here; to look for the nodes again for them is as much to compile as they are.
        return function(potential, *arrays)
    # Derivatives take a chunk at a time as well, and what a branch of it keeps for them stays in the branch.
    of_chunk: Callable[..., TiltedMoments] = jax.checkpoint(function, prevent_cse=False)
    leaves, structure = jax.tree.flatten(potential)
    is_split = [np.shape(leaf) == shape for leaf in leaves]
    is_whole = all(split or np.ndim(leaf) == 0 for leaf, split in zip(leaves, is_split, strict=True))
    is_whole &= not getattr(potential, "has_fixed_shape", False)
    if len(shape) != 1 or not is_whole or jax.default_backend() != "cpu":
        return of_chunk(potential, *arrays)
    num_chunks = -(-shape[0] // _CHUNK)
    cut = functools.partial(chunked, num_chunks=num_chunks, length=_CHUNK, mode="edge")

    def one(chunk: tuple[list[Array], list[Array]]) -> TiltedMoments:
        own = iter(chunk[0])
        parts = [next(own) if split else leaf for leaf, split in zip(leaves, is_split, strict=True)]
        return of_chunk(jax.tree.unflatten(structure, parts), *chunk[1])

    pieces = (
        [cut(jnp.asarray(leaf)) for leaf, split in zip(leaves, is_split, strict=True) if split],
        [cut(x) for x in arrays],
    )
    return jax.tree.map(lambda x: x.reshape(-1)[: shape[0]], jax.lax.map(one, pieces))


def _chunk_moments(
    potential: LogFactor, mean: Array, variance: Array, power: Array, *, num_nodes: int | None, only_log_z: bool
) -> TiltedMoments:
    single = jnp.finfo(mean.dtype).bits <= 32
    num_nodes = num_nodes or (16 if single else 40) * (1 if _has_one_mode(potential) else 2)
    cover, highest, height = _cover(*jax.lax.stop_gradient((potential, mean, variance, power)))
    center, scale, length = cover
    origin = jax.lax.stop_gradient(mean)
    weighed = functools.partial(_terms, potential, origin, power, Cavity(mean, variance), highest, height)

    def terms(node: tuple[Array, Array]) -> tuple[Array, ...]:
        position, weight = node
        growth = jnp.exp(length * position)
        x = center + (0.5 * scale) * (growth - 1.0 / growth)
        measure = (0.5 * weight * length) * jnp.abs(scale) * (growth + 1.0 / growth)
        # A segment without length contributes nothing, whatever the factor is there.
        return weighed(x, measure, measure > 0.0)

    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    grid = jnp.asarray(0.5 * (nodes + 1.0), mean.dtype), jnp.asarray(0.5 * weights, mean.dtype)
    # The segments are added up at the end: a reduction inside the loop would cost more than the factor.
    sums = tuple(jnp.sum(value, axis=0) for value in sum_over_nodes(terms, grid, only_first=only_log_z))
    return _from_sums(sums, height, highest - (mean - origin), Cavity(mean, variance))


def _has_one_mode(potential: LogFactor) -> bool:
    return potential.is_log_concave and potential.is_smooth


@jax.jit  # traced once, for moments and for derivatives of the log normaliser alone
def _cover(potential: LogFactor, origin: Array, variance: Array, power: Array) -> tuple[Segments, Array, Array]:
    """Segments that cover the mass, with a leading axis, the highest point of the tilted density and its height there.

    Everything is located by its distance x from the cavity mean, which keeps the digits of a narrow cavity.
    """
    single = jnp.finfo(origin.dtype).bits <= 32
    one_mode, cavity = _has_one_mode(potential), Cavity(jnp.zeros_like(origin), variance)
    # With two modes, a narrow one may have tails that carry its variance far below its height.
    drop = (20.0 if single else 44.0) if one_mode else (60.0 if single else 100.0)

    def log_factor(x: Array) -> Array:
        return potential.log_density(origin + x)

    def g(x: Array) -> Array:
        return power * log_factor(x) + cavity.exponent(x)

    if one_mode:
        mode = log_concave_mode(lambda x: potential.derivatives(origin + x), cavity, power)
        infinity = jnp.full_like(origin, jnp.inf)
        pieces = Piece(mode[None], -infinity[None], infinity[None])
    else:
        peak = getattr(potential, "center", None)
        pieces = two_pieces(log_factor, cavity, power, None if peak is None else peak - origin, drop)
    heights = jax.vmap(g)(pieces.mode)
    cover = jax.vmap(lambda piece, height: segments(g, piece, height, cavity, drop))(pieces, heights)
    heights = jnp.where(jnp.isnan(heights), -jnp.inf, heights)
    highest = jnp.take_along_axis(pieces.mode, jnp.argmax(heights, axis=0)[None], axis=0)[0]
    height = jnp.max(heights, axis=0)
    segments_of_all = Segments(*(x.reshape(-1, *origin.shape) for x in cover))
    return segments_of_all, highest, jnp.where(jnp.isfinite(height), height, 0.0)


def on_few_nodes(
    potential: LogFactor, mean: Array, variance: Array, power: Array, *, only_log_z: bool = False
) -> tuple[TiltedMoments, Array]:
    """Moments by values of the factor at few nodes, and where they can be trusted."""
    origin = jax.lax.stop_gradient(mean)
    away = mean - origin
    frozen, fixed_variance, fixed_power = jax.lax.stop_gradient((potential, variance, power))
    center, scale = mode_and_width(lambda x: fixed_power * frozen.log_density(origin + x), fixed_variance)

    def log_factor(x: Array) -> Array:
        return power * potential.log_density(origin + x)

    found = few_nodes(log_factor, away, variance, center, scale, only_log_z=only_log_z)
    shift = found.mean - away
    log_z = found.log_total - 0.5 * (_LOG_2PI + jnp.log(variance))
    shrinkage = 1.0 - found.variance / variance
    moments = with_site(log_z, shift, found.variance, shift / variance, shrinkage, Cavity(mean, variance))
    return moments, found.is_trusted


def on_even_nodes(
    potential: LogFactor, mean: Array, variance: Array, power: Array, *, only_log_z: bool = False
) -> tuple[TiltedMoments, Array]:
    """Moments by the trapezoidal rule, and where they can be trusted."""
    single = jnp.finfo(mean.dtype).bits <= 32
    origin = jax.lax.stop_gradient(mean)
    frozen, fixed_variance, fixed_power = jax.lax.stop_gradient((potential, variance, power))

    def log_factor(x: Array) -> Array:
        return fixed_power * frozen.log_density(origin + x)

    nodes = even_nodes(log_factor, fixed_variance, 20.0 if single else 44.0)
    highest, height = nodes.highest, nodes.height
    weighed = functools.partial(_terms, potential, origin, power, Cavity(mean, variance), highest, height)

    def terms(index: Array) -> tuple[Array, ...]:
        x, measure = nodes.with_mass(index)
        return tuple(jnp.sum(part, axis=0) for part in weighed(x, measure, nodes.is_trusted & (measure > 0.0)))

    blocks = jnp.arange(NUM_NODES, dtype=mean.dtype).reshape(_NUM_BLOCKS, -1)
    sums = sum_over_nodes(terms, blocks, only_first=only_log_z)
    found = _from_sums(sums, height, highest - (mean - origin), Cavity(mean, variance))
    # A kink may lie where the nodes hide its part in the sum, but then they show that in the mean of the slope.
    shift, slope = found.mean - mean, sums[3] / sums[0]
    agrees = jnp.abs(variance * slope - shift) < nodes.tolerance * jnp.sqrt(variance)
    return found, nodes.is_trusted & agrees


def _terms(
    potential: LogFactor,
    origin: Array,
    power: Array,
    cavity: Cavity,
    highest: Array,
    height: Array,
    x: Array,
    measure: Array,
    is_used: Array,
) -> tuple[Array, ...]:
    """Terms of the sums of :func:`_from_sums`, at distances ``x`` from ``origin`` with a node on the first axis."""
    value, slope = jax.vmap(lambda x: _value_and_slope(potential, origin + x))(x)
    from_mean = x - (cavity.mean - origin)
    density = measure * jnp.exp(power * value - 0.5 * jnp.square(from_mean) / cavity.variance - height)
    density = jnp.where(is_used, density, 0.0)
    slope = jnp.where(density > 0.0, power * slope, 0.0)
    distance = x - highest
    return density, density * distance, density * distance**2, density * slope, density * slope * distance


def _from_sums(sums: tuple[Array, ...], height: Array, offset: Array, cavity: Cavity) -> TiltedMoments:
    """Moments from the sums of the density over ``exp(height)``, of the slope of the factor, and of both times the
    distance from a point that lies ``offset`` beside the mean of the cavity."""
    total, first, second, slope, product = sums
    valid = (cavity.variance > 0.0) & (total > 0.0) & jnp.isfinite(total)
    total = jnp.where(valid, total, jnp.nan)
    first, second, slope, product = first / total, second / total, slope / total, product / total
    log_z = height + jnp.log(total) - 0.5 * (_LOG_2PI + jnp.log(cavity.variance))
    return with_site(log_z, offset + first, second - first**2, slope, first * slope - product, cavity)


def _value_and_slope(potential: LogFactor, eta: Array) -> tuple[Array, Array]:
    """Log density and its slope, from the closed form if the family has one."""
    if potential.has_closed_derivatives:
        value, slope, _ = potential.derivatives(eta)
        return value, slope
    return jax.jvp(potential.log_density, (eta,), (jnp.ones_like(eta),))


def tilted_moments_unless_wide(
    potential: LogFactor,
    rule: Callable[[Any, Array, Array, bool], TiltedMoments],
    widest: float | Callable[[Any], Array],
    mean: ArrayLike,
    variance: ArrayLike,
    power: ArrayLike,
    only_log_z: bool = False,
) -> TiltedMoments:
    """A cheaper rule where no cavity variance exceeds ``widest`` and the power is the Python number one, else
    quadrature.

    :param widest: a number, or a function of the factors that gives one for each.
    :param rule: makes tilted moments of factors, means and variances, these two of the shape of the factors; the last
        argument is ``only_log_z``, for :func:`sum_over_nodes`.
    """
    whole = functools.partial(tilted_moments, only_log_z=only_log_z)
    if not (isinstance(power, int | float) and power == 1):
        return whole(potential, mean, variance, power)
    mean, variance = broadcast_to_factors(potential, mean, variance)

    def short(potential: LogFactor, mean: Array, variance: Array) -> TiltedMoments:
        return rule(potential, mean, variance, only_log_z)

    def of_chunk(potential: LogFactor, mean: Array, variance: Array) -> TiltedMoments:
        largest = widest(potential) if callable(widest) else widest
        is_narrow = jnp.all((variance > 0.0) & (variance <= largest))
        return jax.lax.cond(is_narrow, short, whole, potential, mean, variance)

    return in_chunks(of_chunk, potential, mean, variance)


def sum_over_nodes(
    terms: Callable[[Any], tuple[Array, ...]],
    nodes: Any,
    is_used: Callable[[Any], Array] | None = None,
    *,
    only_first: bool = False,
) -> tuple[Array, ...]:
    """Sums of the arrays that ``terms`` makes of each node, one after another.

    :param is_used: of a node, whether it is one of the sum; of others nothing is computed.
    :param bool only_first: whether the other sums are held under differentiation, which makes no terms of them then.
    """
    shapes = jax.eval_shape(terms, jax.tree.map(itemgetter(0), nodes))
    zeros = jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shapes)

    def with_node(sums: tuple[Array, ...], node: Any) -> tuple[Array, ...]:
        first, *others = terms(node)
        found = (first, *(jax.lax.stop_gradient(others) if only_first else others))
        return tuple(total + term for total, term in zip(sums, found, strict=True))

    # Derivatives make the terms of a node again: storing them for all nodes takes longer than the factors do.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def added(sums: tuple[Array, ...], node: Any) -> tuple[Array, ...]:
        if is_used is None:
            return with_node(sums, node)
        return jax.lax.cond(is_used(node), with_node, lambda sums, _: sums, sums, node)

    def add(sums: tuple[Array, ...], node: Any) -> tuple[tuple[Array, ...], None]:
        return added(sums, node), None

    return jax.lax.scan(add, zeros, nodes)[0]


def broadcast_to_factors(potential: LogFactor, mean: ArrayLike, variance: ArrayLike, *others: ArrayLike) -> list[Array]:
    """Arrays of the floating dtype of mean and variance, and of the shape of the factors at these."""
    mean = jnp.asarray(mean)
    dtype = jnp.result_type(mean, variance, float)
    arrays = [jnp.asarray(x, dtype) for x in (mean, variance, *others)]
    eta = jax.ShapeDtypeStruct(jnp.broadcast_shapes(*(x.shape for x in arrays)), dtype)
    shape = jax.eval_shape(potential.log_density, eta).shape
    return [jnp.broadcast_to(x, shape) for x in arrays]
