r"""Log density of a normal vector by the factor of its covariance, with derivatives in closed form.

.. math::
    d \log N(x \mid 0, C) = \tfrac12 a^T dC\, a - \tfrac12 \mathrm{tr}(C^{-1} dC) - a^T dx, \quad a = C^{-1} x.

The derivative of a Cholesky factor takes two triangular solves with matrices; the inverse of the covariance that stands
here takes the inverse of one triangle and a product.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from ..cholesky import gram_of_lower, half_log_determinant, inverse_lower_in_blocks, solve_lower, solve_upper


@jax.custom_jvp
def normal_log_density(covariance: Array, x: Array, factor: Array) -> Array:
    """Log density of a normal vector with mean zero.

    Cost of the value: a triangular solve with a vector. Cost of a gradient with respect to the covariance: the inverse
    of a triangle and a product.

    >>> covariance, x = jnp.array([[4.0]]), jnp.array([2.0])
    >>> value, slope = jax.value_and_grad(normal_log_density)(covariance, x, jnp.sqrt(covariance))
    >>> print(value.round(4), slope)
    -2.1121 [[0.]]

    :param covariance: shape ``(n, n)``; derivatives alone need it.
    :param x: shape ``(n,)``.
    :param factor: its lower Cholesky factor, whose own derivatives are left out.
    :return: shape ``()``.
    """
    white = solve_lower(factor, x)
    return -0.5 * white @ white - half_log_determinant(factor) - 0.5 * len(x) * math.log(2.0 * math.pi)


def _change(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    _, x, factor = primals
    of_covariance, of_x, _ = tangents
    weights, change = solve_upper(factor, solve_lower(factor, x)), jnp.zeros((), x.dtype)
    if not isinstance(of_covariance, SymbolicZero):
        inverse = gram_of_lower(inverse_lower_in_blocks(factor, largest=32))
        change += 0.5 * jnp.sum((weights[:, None] * weights - inverse) * of_covariance)
    if not isinstance(of_x, SymbolicZero):
        change -= weights @ of_x
    return normal_log_density(*primals), change


normal_log_density.defjvp(_change, symbolic_zeros=True)
