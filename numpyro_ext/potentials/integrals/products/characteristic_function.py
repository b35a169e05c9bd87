r"""The trapezoidal rule for expectations under characteristic functions of quadratic forms in normal variables.

The rule has a window outside which the predictor has no probability, and frequencies up to where either its
characteristic function vanishes or the transform of the factor, which is analytic in a strip around the real line.
Each factor says how many frequencies and nodes it needs. They are taken in blocks, and factors that need equally many
together, in chunks whose values at all nodes stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....linalg.short_axes import reduce_short
from ...moments import LogFactor

_Tree = TypeVar("_Tree")

# What factors are taken to be analytic in, to either side of the real line.
_STRIP = 2.5
_CHUNK = 128
_BLOCK = 32
# Slopes at which the tail is bounded, as multiples of the standard deviation.
_TAIL_SLOPES = (0.02, 0.05, 0.1, 0.15, 0.25)


class _Rule(NamedTuple):
    """Sizes of the quadrature in one precision."""

    num_blocks: int
    """Largest number of blocks of frequencies, and of nodes to either side."""
    tail: float
    """Minus the log of the probability outside the window."""
    smallest: float
    """Half width relative to the size of the predictor."""
    silence: float
    """Minus the log of what is left beyond the frequencies."""


_DOUBLE = _Rule(num_blocks=4, tail=28.0, smallest=1e-7, silence=37.0)
_SINGLE = _Rule(num_blocks=2, tail=15.0, smallest=1e-3, silence=18.0)


class Canonical(NamedTuple):
    r"""The predictor as :math:`c + \gamma^\top q + z \sqrt{\tau + 2 k^\top q + \sum_d \lambda_d q_d^2}`, after a
    rotation of ``q``, with standard normal ``z``."""

    center: Array
    slope: Array
    """:math:`\\gamma`, shape ``(n, r)``."""
    cross: Array
    """:math:`k`, shape ``(n, r)``."""
    spread: Array
    """:math:`\\lambda`, shape ``(n, r)``."""
    share: Array
    """:math:`k^2 / \\lambda`, shape ``(n, r)``: the parts of :math:`\\tau` that come with a component of ``q``."""
    rest: Array
    """Rest of :math:`\\tau`, shape ``(n,)``."""
    rotation: Array | None
    """Its columns are the new directions, shape ``(n, r, r)``."""


def _half_width(form: Canonical, rule: _Rule) -> Array:
    """A distance from the center beyond which there is no probability to speak of, by Chernoff's bound; ``(n,)``."""
    total = form.rest + jnp.sum(form.share + form.slope**2 + form.spread, -1)
    deviation = jnp.sqrt(total)
    largest = jnp.sqrt(jnp.max(form.spread, axis=-1, initial=0.0))
    smallest = rule.smallest * (1.0 + jnp.abs(form.center))

    def distance(factor: float) -> Array:
        theta = 1.0 / jnp.maximum(largest + factor * deviation, smallest)
        gap = 1.0 - jnp.square(theta)[:, None] * form.spread
        growth = form.share + form.slope**2 + 2.0 * theta[:, None] * jnp.abs(form.slope * form.cross)
        log_moment = 0.5 * theta**2 * (form.rest + jnp.sum(growth / gap, -1)) - 0.5 * jnp.sum(jnp.log(gap), -1)
        return (log_moment + rule.tail) / theta

    distances = jnp.stack([distance(factor) for factor in _TAIL_SLOPES])
    return jnp.maximum(jnp.min(distances, axis=0), smallest)


class Window(NamedTuple):
    """Window in which each factor is integrated, arrays of shape ``(n,)``."""

    half_width: Array
    num_blocks: Array
    """Number of blocks of frequencies and nodes that are needed."""
    is_silent: Array
    """True if the characteristic function vanishes beyond the frequencies. Then all of it is used, and else a part
    with a smooth end, beyond which the factor has nothing to say."""


def find_window(form: Canonical) -> Window:
    """The window of each factor, and the fewest blocks that are accurate."""
    rule = _rule(form.center)
    width = _half_width(form, rule)
    num_blocks = jnp.full(width.shape, rule.num_blocks)
    is_silent = jnp.zeros(width.shape, bool)
    for blocks in range(rule.num_blocks, 0, -1):
        num = blocks * _BLOCK
        end = math.pi * num / width
        square = jnp.square(end)[:, None]
        growth = square * form.spread
        decay = jnp.sum(square * (form.share + form.slope**2) / (1.0 + growth) + jnp.log1p(growth), -1)
        decay = 0.5 * (decay + square[:, 0] * form.rest)
        # The nodes must be close enough for the factor, too: its share of frequencies up to twice the end counts.
        silent = (decay > rule.silence) & (2.0 * _STRIP * end > 0.95 * rule.silence)
        middle, spread = _smooth_end(num, rule)
        # The largest product of what is cut off with what the factor has there.
        slope, distance = _STRIP * math.pi * spread / width, middle / spread
        left = jnp.where(slope < distance, slope * distance - 0.5 * slope**2, 0.5 * distance**2)
        fits = silent | (left > rule.silence) if middle > 0.0 else silent
        num_blocks = jnp.where(fits, blocks, num_blocks)
        is_silent = jnp.where(fits | (blocks == rule.num_blocks), silent, is_silent)
    return Window(width, num_blocks, is_silent)


def _smooth_end(num: Any, rule: _Rule) -> tuple[Any, float]:
    """Middle and standard deviation of the smooth end of ``num`` frequencies, in steps between these.

    Its transform falls to the probability in the tails within the window, and so does it within the frequencies.
    """
    return num - 2.0 * rule.tail / math.pi, math.sqrt(2.0 * rule.tail) / math.pi


class Spectrum(NamedTuple):
    """The characteristic function about the center, at a block of frequencies."""

    frequency: Array
    """Shape ``(B, n)``."""
    shrinkage: Array
    """:math:`1 / (1 + t^2 \\lambda)`, shape ``(r, B, n)``: variances of ``q`` under the tilt."""
    real: Array
    imaginary: Array
    """Both with the weights of the sum over frequencies, shape ``(B, n)``."""


def _spectrum(form: Canonical, window: Window, place: Array, num: Array | int, rule: _Rule) -> Spectrum:
    """At the frequencies with the numbers ``place`` of ``num``."""
    middle, spread = _smooth_end(num, rule)
    dtype = form.center.dtype
    weight: Array = jnp.where(place == 0, 0.5, 1.0) / num
    end = 0.5 * jax.scipy.special.erfc((place - middle) / (math.sqrt(2.0) * spread))
    weight = jnp.where(window.is_silent, weight[:, None], (weight * end)[:, None]).astype(dtype)
    t = place.astype(dtype)[:, None] * (math.pi / window.half_width)
    square = t**2
    shrinkage = 1.0 / (1.0 + square * form.spread.T[:, None])
    decay = form.rest + _sum_first((form.share + form.slope**2).T[:, None] * shrinkage)
    phase = -square * t * _sum_first((form.slope * form.cross).T[:, None] * shrinkage)
    size = weight * jnp.exp(-0.5 * square * decay)
    for first in range(0, shrinkage.shape[0], 8):
        size *= jnp.sqrt(_reduce_first(jnp.multiply, shrinkage[first : first + 8]))
    return Spectrum(t, shrinkage, size * jnp.cos(phase), size * jnp.sin(phase))


def _reduce_first(operation: Any, x: Array) -> Array:
    return reduce_short(operation, jnp.moveaxis(x, 0, -1))


def _sum_first(x: Array) -> Array:
    return _reduce_first(jnp.add, x)


_TURN = 12 * _BLOCK


def _table(function: Callable[[np.ndarray], np.ndarray], place: Array, node: Array, num: Array | int) -> Array:
    """A trigonometric function of :math:`\\pi j k / K` for two blocks of integers, shape ``(B, B)``."""
    values = jnp.asarray(function(np.arange(2 * _TURN) * math.pi / _TURN), jnp.result_type(float))
    return values[(jnp.outer(place, node) * (_TURN // num)) % (2 * _TURN)]


def integrate(
    functions: Callable[[Array], Array],
    collect: Callable[[Spectrum, Array, Array], Any],
    form: Canonical,
    window: Window,
    num_blocks: Array | int,
) -> Any:
    """Sums over all frequencies, block by block.

    :param functions: maps predictors of shape ``(B, n)`` to values of some functions, shape ``(B, f, n)``.
    :param collect: maps a block of frequencies, and real and imaginary parts of the transforms of the functions there,
        of shape ``(B, f, n)``, times the characteristic function, to what is summed.
    :param num_blocks: of frequencies, and of nodes to either side; derivatives in reverse need a Python number.
    """
    rule = _rule(form.center)
    num, dtype = num_blocks * _BLOCK, form.center.dtype
    step, index = window.half_width / num, jnp.arange(_BLOCK)

    def once(make: Callable[[], _Tree]) -> _Tree:
        """Make a value once, which XLA would compute anew for each of its uses if it knew that there are always some
        blocks."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make))
        return jax.lax.cond(num_blocks > 0, make, lambda: zeros)

    def evaluate(block: Array, values: Array) -> Array:
        place = block * _BLOCK + index
        distance = place.astype(dtype)[:, None] * step
        above, below = jax.lax.map(functions, jnp.stack([form.center + distance, form.center - distance]))
        half = jnp.where(place == 0, 0.5, 1.0).astype(dtype)[:, None, None]
        return jax.lax.dynamic_update_slice(
            values, jnp.stack([half * (above + below), above - below]), (0, block * _BLOCK, 0, 0)
        )

    shape = jax.eval_shape(functions, jax.ShapeDtypeStruct((_BLOCK, *form.center.shape), dtype)).shape
    values = jnp.zeros((2, rule.num_blocks * _BLOCK, *shape[1:]), dtype)
    values = jax.lax.fori_loop(0, num_blocks, evaluate, values)

    def add(block: Array, sums: Any) -> Any:
        place = block * _BLOCK + index
        spectrum = once(lambda: _spectrum(form, window, place, num, rule))

        def transform(other: Array, parts: tuple[Array, Array]) -> tuple[Array, Array]:
            own = jax.lax.dynamic_slice_in_dim(values, other * _BLOCK, _BLOCK, axis=1)
            tables = (_table(f, place, other * _BLOCK + index, num).astype(dtype) for f in (np.cos, np.sin))
            even, odd = (
                part + jnp.einsum("kj,jfn->kfn", table, x, precision=jax.lax.Precision.HIGHEST)
                for part, table, x in zip(parts, tables, own, strict=True)
            )
            return even, odd

        even, odd = jax.lax.fori_loop(0, num_blocks, transform, (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))
        real, imaginary = spectrum.real[:, None], spectrum.imaginary[:, None]
        real, imaginary = once(lambda: (real * even + imaginary * odd, imaginary * even - real * odd))
        found = collect(spectrum, real, imaginary)
        return jax.tree.map(jnp.add, sums, found)

    def collected() -> Any:
        spectrum = _spectrum(form, window, index, num, rule)
        return collect(spectrum, jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(collected))
    return jax.lax.fori_loop(0, num_blocks, add, start)


def in_chunks(integral: Callable[..., _Tree], potential: LogFactor, form: Canonical) -> _Tree:
    """``integral(potential, form, window, num_blocks)``, whose arrays have one entry per factor, of all factors."""
    window = find_window(form)
    num, size = form.slope.shape
    length = _CHUNK if size <= _BLOCK else max(16, _CHUNK * _BLOCK // size)

    def of_chunk(potential: LogFactor, form: Canonical, window: Window) -> _Tree:
        return integral(potential, form, window, jnp.max(window.num_blocks, initial=1))

    if num <= length or jax.default_backend() != "cpu":
        return of_chunk(potential, form, window)
    order = jnp.argsort(window.num_blocks)
    leaves, structure = jax.tree.flatten((potential, form, window))
    is_split = [np.shape(leaf)[:1] == (num,) for leaf in leaves]

    def at(chunk: Array) -> _Tree:
        own = [leaf[chunk] if split else leaf for leaf, split in zip(leaves, is_split, strict=True)]
        return of_chunk(*jax.tree.unflatten(structure, own))

    found = jax.lax.map(at, jnp.pad(order, (0, -num % length), mode="edge").reshape(-1, length))
    place = jnp.zeros_like(order).at[order].set(jnp.arange(num, dtype=order.dtype))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[place], found)


def with_all_blocks(integral: Callable[..., _Tree], potential: LogFactor, form: Canonical) -> _Tree:
    """The same as :func:`in_chunks`, with as many blocks as any factor may need: differentiable in reverse."""
    return integral(potential, form, find_window(form), _rule(form.center).num_blocks)


def _rule(x: Array) -> _Rule:
    return _SINGLE if jnp.finfo(x.dtype).bits <= 32 else _DOUBLE
