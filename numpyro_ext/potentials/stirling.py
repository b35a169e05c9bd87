"""Log-factorials of counts without the cancellation of their large parts."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import betaln

__all__ = ["log_binomial_coefficient", "log_rising_coefficient", "stirling_error"]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_TABLE = [0.0] + [math.lgamma(k + 1.0) - (k + 0.5) * math.log(k) + k - _HALF_LOG_2PI for k in range(1, 16)]


def stirling_error(count: Array) -> Array:
    r"""What Stirling's formula misses: :math:`\log y! - (y + 1/2)\log y + y - \log(2\pi)/2` for integers ``y >= 1``.

    Elementwise, to full relative accuracy in float32 too, because the entries below 16 are tabulated. A ``count`` that
    is not a positive integer gives ``nan``.
    """
    table = jnp.asarray(_TABLE, count.dtype)
    inverse = 1.0 / jnp.maximum(count, 1.0)
    w = inverse * inverse
    series = inverse * (1.0 / 12.0 - w * (1.0 / 360.0 - w * (1.0 / 1260.0 - w * (1.0 / 1680.0 - w / 1188.0))))
    value = jnp.where(count < 16.0, table[jnp.clip(count, 0.0, 15.0).astype(jnp.int32)], series)
    return jnp.where((count >= 1.0) & (count == jnp.round(count)), value, jnp.nan)


def log_rising_coefficient(count: Array, size: Array) -> Array:
    r""":math:`\log \Gamma(y + r) / (\Gamma(r)\, y!)` for ``size`` ``r > 0``, also where gamma functions are huge."""
    return -betaln(size, count + 1.0) - jnp.log(size + count)


def log_binomial_coefficient(total: Array, count: Array) -> Array:
    r""":math:`\log \binom{n}{k}`, also where the factorials are huge."""
    return -betaln(count + 1.0, total - count + 1.0) - jnp.log(total + 1.0)
