r"""Gaussian expectations of the logistic log-partition :math:`\log(1 + e^x)` and its derivatives, to full accuracy.

The trapezoidal rule converges geometrically here, at a rate set by the poles of the derivatives at :math:`\pm i\pi`.
For a narrow Gaussian it runs over standard deviations. For a wide one it runs over ``x``, on which all but the density
of the Gaussian is constant; what does not decay, :math:`E \max(x, 0)` smoothed by a standard normal, is taken out
first, because it has a closed form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy import special

from ..moments import ExpectedLogDensity

LogPartitionExpectation = Callable[[Array, Array], tuple[Array, Array, Array]]
"""Maps means and variances to the expectation of the log-partition, or an upper bound of it, and the two slopes."""

_SQRT_2PI = math.sqrt(2.0 * math.pi)
_NARROW = 1.25  # standard deviations up to here take the rule over standard deviations
_NARROW_STEP, _NARROW_HALF = 0.36, 24
_WIDE_STEP, _WIDE_HALF = 0.475, 80
_BLOCK = {_NARROW_HALF: 7, _WIDE_HALF: 23}  # nodes at a time, divisors of their odd numbers


def expected_log_partition(mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
    r"""Expectation of :math:`\log(1 + e^x)` under :math:`N(x \mid m, v)`, and its slopes in mean and variance.

    The slopes are :math:`E\,\sigma(x)` and :math:`\tfrac12 E\,\sigma'(x)`. All three are accurate to a few units in the
    last place of the larger of one and the value, for any mean and variance, and derivatives of every order.

    Cost: about 200 exponentials; memory of about 30 arrays of the size of the result.

    :param ArrayLike mean: means :math:`m`.
    :param ArrayLike variance: variances :math:`v`, non-negative.
    :return: value and slopes, of the broadcast shape.

    **Example:**

    >>> expected_log_partition(2.0, 4.0).value.item()
    2.356
    """
    dtype = jnp.result_type(mean, variance, float)
    mean, variance = jnp.broadcast_arrays(jnp.asarray(mean, dtype), jnp.asarray(variance, dtype))
    value, slope, curvature = _moments(0, 3, mean, variance)
    return ExpectedLogDensity(value, slope, 0.5 * curvature)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _moments(first: int, count: int, mean: Array, variance: Array) -> Array:
    """Expectations of the derivatives of orders ``first, first + 1, ...`` of the log-partition, stacked."""
    return _evaluate(first, count, mean, variance)


@_moments.defjvp
def _moments_jvp(
    first: int, count: int, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Slopes are expectations of higher derivatives: one order up in the mean, half that two up in the variance."""
    moments = _moments(first, count + 2, *primals)
    mean_dot, variance_dot = tangents
    return moments[:-2], moments[1:-1] * mean_dot + 0.5 * moments[2:] * variance_dot


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(first: int, count: int, mean: Array, variance: Array) -> Array:
    scale = jnp.sqrt(variance)
    is_narrow = scale <= _NARROW
    narrow = _narrow(first, count, mean, jnp.where(is_narrow, scale, _NARROW))
    wide = _wide(first, count, mean, jnp.where(is_narrow, _NARROW, scale))
    return jnp.where(is_narrow, narrow, wide)


def _narrow(first: int, count: int, mean: Array, scale: Array) -> Array:
    nodes = _NARROW_STEP * np.arange(-_NARROW_HALF, _NARROW_HALF + 1)
    weights = np.exp(-0.5 * nodes**2)
    orders = range(first, first + count)
    polynomials = [_derivative_polynomial(order) for order in orders]

    def at_node(z: Array) -> Array:
        x = mean + scale * z
        decayed = jnp.exp(-jnp.abs(x))
        larger = 1.0 / (1.0 + decayed)
        smaller = decayed * larger
        sigmoid = jnp.where(x >= 0.0, larger, smaller)
        known = {0: jnp.maximum(x, 0.0) + jnp.log1p(decayed), 1: sigmoid}
        bell = larger * smaller
        return jnp.stack(
            [
                known[order] if order < 2 else bell * jnp.polyval(jnp.asarray(p, x.dtype), sigmoid)
                for order, p in zip(orders, polynomials, strict=True)
            ]
        )

    def add_block(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        z, weight = block
        return total + jnp.tensordot(weight, jax.vmap(at_node)(z), axes=1), None

    z, weight = (jnp.asarray(x, mean.dtype).reshape(-1, _BLOCK[_NARROW_HALF]) for x in (nodes, weights / weights.sum()))
    start = jnp.zeros((count, *mean.shape), mean.dtype)
    total, _ = jax.lax.scan(add_block, start, (z, weight))
    return total


def _wide(first: int, count: int, mean: Array, scale: Array) -> Array:
    nodes, table = _wide_rule(first, count)
    size = _BLOCK[_WIDE_HALF]
    blocks = nodes.reshape(-1, size), table.reshape(count, -1, size).transpose(1, 0, 2)

    def add_block(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        t, constants = block
        density = jnp.exp(-0.5 * jnp.square((t.reshape(-1, *(1,) * mean.ndim) - mean) / scale))
        return total + jnp.tensordot(constants, density, axes=1), None

    start = jnp.zeros((count, *mean.shape), mean.dtype)
    total, _ = jax.lax.scan(add_block, start, jax.tree.map(lambda x: jnp.asarray(x, mean.dtype), blocks))
    total = total / (scale * _SQRT_2PI)
    # The smooth ramp, which is max(x, 0) smoothed by a standard normal.
    width = jnp.sqrt(1.0 + jnp.square(scale))
    z = mean / width
    mass = jax.scipy.special.ndtr(z)
    ramp = {0: mean * mass + width * jnp.exp(-0.5 * jnp.square(z)) / _SQRT_2PI, 1: mass}
    return total + jnp.stack([ramp.get(order, jnp.zeros_like(mean)) for order in range(first, first + count)])


@functools.lru_cache(maxsize=16)
def _wide_rule(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes, and one row per order: step times the derivative, less that of the smooth ramp for orders zero and one."""
    nodes = _WIDE_STEP * np.arange(-_WIDE_HALF, _WIDE_HALF + 1)
    # The remainders are even and odd; on the negative side nothing cancels.
    left = -np.abs(nodes)
    rows = []
    for order in range(first, first + count):
        if order == 0:
            ramp = left * special.ndtr(left) + np.exp(-0.5 * left**2) / _SQRT_2PI
            rows.append(np.log1p(np.exp(left)) - ramp)
        elif order == 1:
            rows.append(np.where(nodes > 0, -1.0, 1.0) * (special.expit(left) - special.ndtr(left)))
        else:
            bell = special.expit(nodes) * special.expit(-nodes)
            rows.append(bell * np.polyval(_derivative_polynomial(order), special.expit(nodes)))
    return nodes, _WIDE_STEP * np.stack(rows)


@functools.lru_cache(maxsize=32)
def _derivative_polynomial(order: int) -> tuple[float, ...]:
    """The derivative of an order of two or more over ``p (1 - p)``, as a polynomial in the sigmoid ``p``."""
    polynomial = np.poly1d([1.0])
    bell = np.poly1d([-1.0, 1.0, 0.0])
    for _ in range(order - 2):
        # d/dx (bell * polynomial), with dp/dx = bell.
        polynomial = np.poly1d([-2.0, 1.0]) * polynomial + bell * polynomial.deriv()
    return tuple(polynomial.coeffs.tolist())
