"""Log-factorials of counts without the cancellation of their large parts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_TABLE = [0.0] + [math.lgamma(k + 1.0) - (k + 0.5) * math.log(k) + k - _HALF_LOG_2PI for k in range(1, 16)]

_NUM_STEPS = 8
_SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)
"""Coefficients of Stirling's series, in odd powers of the inverse: rounding in float64 from eight on."""


def stirling_error(count: Array) -> Array:
    r"""Error of Stirling's formula: :math:`\log y! - (y + 1/2)\log y + y - \log(2\pi)/2` for integers ``y >= 1``.

    Elementwise, to full relative accuracy in float32 too, because the entries below 16 are tabulated. A ``count`` that
    is not a positive integer gives ``nan``.
    """
    table = jnp.asarray(_TABLE, count.dtype)
    series = _long_series(jnp.maximum(count, 1.0), 0)
    value = jnp.where(count < 16.0, table[jnp.clip(count, 0.0, 15.0).astype(jnp.int32)], series)
    return jnp.where((count >= 1.0) & (count == jnp.round(count)), value, jnp.nan)


@jax.custom_jvp
def log_gamma_remainder(x: Array) -> Array:
    r""":math:`R(x) = \log\Gamma(x) - (x - 1/2)\log x + x - \log(2\pi)/2` for real ``x > 0``, and its derivatives.

    By :math:`R(x) - R(x + 1) = (x + 1/2) \log(1 + 1/x) - 1` up to where Stirling's series serves. Compilers of special
    functions write out each with all its cases, and densities ask for several with three derivatives: this is short,
    with derivatives that lose no digits.
    """
    z, far = _steps_from(x)
    return jnp.sum((z + 0.5) * jnp.log1p(1.0 / z) - 1.0, axis=-1) + _long_series(far, 0)


@log_gamma_remainder.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return log_gamma_remainder(*primals), _remainder_slope(*primals) * tangents[0]


@jax.custom_jvp
def _remainder_slope(x: Array) -> Array:
    z, far = _steps_from(x)
    steps = jnp.log1p(1.0 / z) - 0.5 * (1.0 / z + 1.0 / (z + 1.0))
    return jnp.sum(steps, axis=-1) + _long_series(far, 1)


@_remainder_slope.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    z, far = _steps_from(*primals)
    curvature = jnp.sum(0.5 / jnp.square(z * (z + 1.0)), axis=-1) + _long_series(far, 2)
    return _remainder_slope(*primals), curvature * tangents[0]


def _steps_from(x: Array) -> tuple[Array, Array]:
    return x[..., None] + jnp.arange(_NUM_STEPS, dtype=x.dtype), x + _NUM_STEPS


def _long_series(x: Array, order: int) -> Array:
    """A derivative of Stirling's series, for ``x`` of at least :data:`_NUM_STEPS`."""
    inverse = 1.0 / x
    square = jnp.square(inverse)
    powers = range(1, 2 * len(_SERIES), 2)
    terms = [(-1) ** order * math.prod(range(p, p + order)) * c for p, c in zip(powers, _SERIES, strict=True)]
    total = jnp.full_like(x, terms[-1])
    for term in terms[-2::-1]:
        total = total * square + term
    return total * inverse ** (order + 1)


def log_rising_coefficient(count: Array, size: Array) -> Array:
    r""":math:`\log\,\Gamma(y + r) / (\Gamma(r)\, y!)` for real ``y >= 0`` and ``r > 0``.

    The leading parts of Stirling's formula are subtracted on paper, so nothing large cancels for large arguments.
    """
    total, following = count + size, count + 1.0
    leading = (size - 0.5) * jnp.log1p(count / size) + (count + 0.5) * jnp.log1p((size - 1.0) / following)
    # Two at once are one piece of program; what follows the count knows nothing of the size.
    of_total, of_size = log_gamma_remainder(jnp.stack(jnp.broadcast_arrays(total, size)))
    remainder: Array = of_total - of_size - log_gamma_remainder(following)
    return leading - 0.5 * jnp.log(total) + (1.0 - _HALF_LOG_2PI) + remainder


def log_beta(a: Array, b: Array) -> Array:
    r""":math:`\log B(a, b)` for positive arguments, by what Stirling's formula misses at each.

    The leading parts are subtracted on paper.
    """
    of_a, of_b, of_sum = log_gamma_remainder(jnp.stack(jnp.broadcast_arrays(a, b, a + b)))
    remainder: Array = of_a + of_b - of_sum
    leading = -a * jnp.log1p(b / a) - b * jnp.log1p(a / b)
    return leading + 0.5 * (jnp.log(a + b) - jnp.log(a) - jnp.log(b)) + _HALF_LOG_2PI + remainder


def log_binomial_coefficient(total: Array, count: Array) -> Array:
    r""":math:`\log \binom{n}{k}`, also where the factorials are huge."""
    return log_rising_coefficient(count, total - count + 1.0)
