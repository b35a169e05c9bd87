"""Log-factorials of counts without the cancellation of their large parts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["log_binomial_coefficient", "log_gamma_remainder", "log_rising_coefficient", "stirling_error"]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_TABLE = [0.0] + [math.lgamma(k + 1.0) - (k + 0.5) * math.log(k) + k - _HALF_LOG_2PI for k in range(1, 16)]


def _remainder_series(inverse: Array) -> Array:
    w = inverse * inverse
    return inverse * (1.0 / 12.0 - w * (1.0 / 360.0 - w * (1.0 / 1260.0 - w * (1.0 / 1680.0 - w / 1188.0))))


def stirling_error(count: Array) -> Array:
    r"""What Stirling's formula misses: :math:`\log y! - (y + 1/2)\log y + y - \log(2\pi)/2` for integers ``y >= 1``.

    Elementwise, to full relative accuracy in float32 too, because the entries below 16 are tabulated. A ``count`` that
    is not a positive integer gives ``nan``.
    """
    table = jnp.asarray(_TABLE, count.dtype)
    series = _remainder_series(1.0 / jnp.maximum(count, 1.0))
    value = jnp.where(count < 16.0, table[jnp.clip(count, 0.0, 15.0).astype(jnp.int32)], series)
    return jnp.where((count >= 1.0) & (count == jnp.round(count)), value, jnp.nan)


def log_gamma_remainder(x: Array) -> Array:
    r""":math:`\log\Gamma(x) - (x - 1/2)\log x + x - \log(2\pi)/2` for real ``x > 0``."""
    is_large = x > 16.0
    inverse = 1.0 / jnp.where(is_large, x, 16.0)
    small = jnp.where(is_large, 1.0, x)
    direct = jax.lax.lgamma(small) - (small - 0.5) * jnp.log(small) + small - _HALF_LOG_2PI
    return jnp.where(is_large, _remainder_series(inverse), direct)


def log_rising_coefficient(count: Array, size: Array) -> Array:
    r""":math:`\log\,\Gamma(y + r) / (\Gamma(r)\, y!)` for real ``y >= 0`` and ``r > 0``.

    The leading parts of Stirling's formula are subtracted on paper, so nothing large cancels for large arguments.
    """
    total, following = count + size, count + 1.0
    leading = (size - 0.5) * jnp.log1p(count / size) + (count + 0.5) * jnp.log1p((size - 1.0) / following)
    remainder = log_gamma_remainder(total) - log_gamma_remainder(size) - log_gamma_remainder(following)
    return leading - 0.5 * jnp.log(total) + (1.0 - _HALF_LOG_2PI) + remainder


def log_binomial_coefficient(total: Array, count: Array) -> Array:
    r""":math:`\log \binom{n}{k}`, also where the factorials are huge."""
    return log_rising_coefficient(count, total - count + 1.0)
