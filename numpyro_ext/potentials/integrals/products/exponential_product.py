r"""Expectations of :math:`\exp(u^\top v)` for independent Gaussian vectors: the term that Poisson bilinear models need.

With :math:`u \sim N(a, A)` and :math:`v \sim N(b, B)`, and any root :math:`B = L L^\top`,

.. math:: \log E\, e^{u^\top v} = a^\top b + \tfrac12 b^\top A b + \tfrac12 \|G^{-1} L^\top (a + A b)\|^2
    - \textstyle\sum_d \log G_{dd}, \qquad G G^\top = I - L^\top A L,

which exists if and only if that matrix is positive definite, that is if the largest eigenvalue of :math:`AB` is below
one. No covariance is inverted, so that they may be singular or zero. The weight :math:`e^{u^\top v}` turns ``u`` and
``v`` into vectors with Gaussian marginals, whose moments are the gradients.

Ko and Khan (2014), eq. (13), in a form without cancellation. There, existence is stated by the sign of a determinant,
which is positive, too, where an even number of eigenvalues exceed one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ....linalg.cholesky import cholesky, solve_lower
from ....linalg.short_axes import reduce_short


class ProductExpectation(NamedTuple):
    r"""Log of :math:`E\, e^{u^\top v}`, and moments of ``v`` under the weight :math:`e^{u^\top v}`.

    They are the gradients: with respect to the mean of ``u`` it is ``mean``, with respect to the covariance of ``u``
    half of ``covariance`` plus the outer square of ``mean``.
    """

    log_value: Array
    """Infinite where the expectation does not exist; the moments are then finite, and mean nothing."""
    mean: Array
    covariance: Array
    """Variances, where the covariances are diagonal."""


def product_expectation(mean_u: Array, covariance_u: Array, mean_v: Array, root_v: Array) -> ProductExpectation:
    r"""Value and tilted moments for full covariances, batched over leading axes.

    :param mean_u: shape ``(..., d)``.
    :param covariance_u: shape ``(..., d, d)``.
    :param mean_v: shape ``(..., d)``.
    :param root_v: :math:`L` with :math:`L L^\top` the covariance of ``v``, shape ``(..., d, r)``; ``r`` may be smaller.
    :return: see :class:`ProductExpectation`.

    Cost: :math:`O(d^2 r + r^3)` per element of the batch.
    """
    transposed = root_v.swapaxes(-1, -2)
    gap = jnp.eye(root_v.shape[-1], dtype=root_v.dtype) - transposed @ covariance_u @ root_v
    # Comparisons with nan are false. At the boundary itself a pivot is zero.
    exists = jnp.all(jnp.diagonal(cholesky(gap), axis1=-2, axis2=-1) > 0.0, axis=-1)
    factor = cholesky(jnp.where(exists[..., None, None], gap, jnp.eye(root_v.shape[-1], dtype=root_v.dtype)))
    half = solve_lower(factor, transposed)
    pushed = jnp.einsum("...ij,...j->...i", covariance_u, mean_v)
    white = jnp.einsum("...rj,...j->...r", half, mean_u + pushed)
    value = jnp.sum(mean_u * mean_v + 0.5 * mean_v * pushed, -1) + 0.5 * jnp.sum(white**2, -1)
    value -= jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)), -1)
    mean = mean_v + jnp.einsum("...rj,...r->...j", half, white)
    return ProductExpectation(jnp.where(exists, value, jnp.inf), mean, half.swapaxes(-1, -2) @ half)


def diagonal_product_expectation(
    mean_u: Array, variance_u: Array, mean_v: Array, variance_v: Array
) -> ProductExpectation:
    """The same as :func:`product_expectation` for independent components, all of shape ``(..., d)``; cost ``O(d)``."""
    gap = 1.0 - variance_u * variance_v
    inverse = 1.0 / gap
    numerator = mean_u * mean_v + 0.5 * (variance_u * mean_v**2 + variance_v * mean_u**2)
    value = reduce_short(jnp.add, numerator * inverse) - 0.5 * _sum_log(gap)
    # Comparisons with nan are false. The least is taken of numbers, because that of truth values is slow.
    exists = reduce_short(jnp.minimum, gap) > 0.0
    inverse = jnp.where(gap > 0.0, inverse, 1.0)
    mean = (mean_v + variance_v * mean_u) * inverse
    return ProductExpectation(jnp.where(exists, value, jnp.inf), mean, variance_v * inverse)


def _sum_log(gap: Array) -> Array:
    """Sum of logarithms of numbers between rounding and one, of as many products as cannot underflow."""
    size = gap.shape[-1]
    length = 16 if gap.dtype == jnp.float64 else 4
    parts = [jnp.log(reduce_short(jnp.multiply, gap[..., i : i + length])) for i in range(0, size, length)]
    return sum(parts[1:], parts[0])


@jax.custom_jvp
def log_expected_exp_product(mean_u: Array, covariance_u: Array, mean_v: Array, covariance_v: Array) -> Array:
    r"""Log of :math:`E\, e^{u^\top v}` for :math:`u \sim N(a, A)`, :math:`v \sim N(b, B)`; ``inf`` if it is infinite.

    Differentiable in all arguments, by tilted moments and not through the factorisation.

    :param mean_u: :math:`a`, shape ``(..., d)``.
    :param covariance_u: :math:`A`, shape ``(..., d, d)``, positive semidefinite.
    :param mean_v: :math:`b`, shape ``(..., d)``.
    :param covariance_v: :math:`B`, shape ``(..., d, d)``, positive semidefinite.
    :return: shape ``(...)``.

    **Example:**

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.potentials.integrals.products.exponential_product import log_expected_exp_product
    >>> a, b, one = jnp.array([0.2]), jnp.array([0.1]), jnp.eye(1)
    >>> print(jnp.exp(log_expected_exp_product(a, 0.9 * one, b, one)).round(3))
    4.935
    >>> print(log_expected_exp_product(a, 1.2 * one, b, one))
    inf
    """
    return product_expectation(mean_u, covariance_u, mean_v, semidefinite_root(covariance_v)).log_value


@log_expected_exp_product.defjvp
def _log_expected_exp_product_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    mean_u, covariance_u, mean_v, covariance_v = primals
    found = product_expectation(mean_u, covariance_u, mean_v, semidefinite_root(covariance_v))
    tilted_u = mean_u + jnp.einsum("...ij,...j->...i", covariance_u, found.mean)
    spread_u = covariance_u + covariance_u @ found.covariance @ covariance_u
    slopes = (
        found.mean,
        0.5 * (found.covariance + found.mean[..., :, None] * found.mean[..., None, :]),
        tilted_u,
        0.5 * (spread_u + tilted_u[..., :, None] * tilted_u[..., None, :]),
    )
    parts = [
        jnp.sum(s * t, axis=(-1,) if i % 2 == 0 else (-2, -1)) for i, (s, t) in enumerate(_pairs(slopes, tangents))
    ]
    change = parts[0] + parts[1] + parts[2] + parts[3]
    return found.log_value, jnp.where(jnp.isfinite(found.log_value), change, 0.0)


def _pairs(slopes: tuple[Array, ...], tangents: tuple[Array, ...]) -> list[tuple[Array, Array]]:
    return list(zip(slopes, tangents, strict=True))


@jax.custom_jvp
def log_expected_exp_product_diagonal(
    mean_u: ArrayLike, variance_u: ArrayLike, mean_v: ArrayLike, variance_v: ArrayLike
) -> Array:
    """The same as :func:`log_expected_exp_product` for independent components; all arguments of shape ``(..., d)``."""
    arguments = jnp.broadcast_arrays(mean_u, variance_u, mean_v, variance_v)
    return diagonal_product_expectation(*arguments).log_value


@log_expected_exp_product_diagonal.defjvp
def _log_expected_exp_product_diagonal_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    mean_u, variance_u, mean_v, variance_v = jnp.broadcast_arrays(*primals)
    found = diagonal_product_expectation(mean_u, variance_u, mean_v, variance_v)
    tilted_u = mean_u + variance_u * found.mean
    spread_u = variance_u + variance_u**2 * found.covariance
    slopes = (
        found.mean,
        0.5 * (found.covariance + found.mean**2),
        tilted_u,
        0.5 * (spread_u + tilted_u**2),
    )
    total = sum((slope * tangent for slope, tangent in _pairs(slopes, tangents)), jnp.zeros_like(mean_u))
    return found.log_value, jnp.where(jnp.isfinite(found.log_value), jnp.sum(total, -1), 0.0)


def product_moments(mean_u: Array, covariance_u: Array, mean_v: Array, covariance_v: Array) -> tuple[Array, Array]:
    r"""Mean and variance of :math:`u^\top v`, which always exist; arguments as for :func:`log_expected_exp_product`."""
    mean = jnp.sum(mean_u * mean_v, -1)
    variance = jnp.einsum("...i,...ij,...j->...", mean_u, covariance_v, mean_u)
    variance += jnp.einsum("...i,...ij,...j->...", mean_v, covariance_u, mean_v)
    return mean, variance + jnp.sum(covariance_u * covariance_v, axis=(-2, -1))


def spectral_radius(covariance_u: Array, root_v: Array) -> Array:
    r"""Largest eigenvalue of :math:`A L L^\top`, of shape ``(...)``: the expectation exists where it is below one.

    :param covariance_u: :math:`A`, shape ``(..., d, d)``.
    :param root_v: :math:`L`, shape ``(..., d, r)``.
    """
    return jnp.max(jnp.linalg.eigvalsh(root_v.swapaxes(-1, -2) @ covariance_u @ root_v), axis=-1)


def semidefinite_root(covariance: Array) -> Array:
    r"""Lower triangular :math:`L` with :math:`L L^\top` the covariance, which may be singular; ``(..., d, d)``.

    Pivots that are zero up to rounding give zero columns.
    """
    size = covariance.shape[-1]
    tolerance = 4 * size * jnp.finfo(covariance.dtype).eps
    floor = tolerance * jnp.diagonal(covariance, axis1=-2, axis2=-1)
    index = jnp.arange(size)

    def eliminate(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, root = carry
        pivot = rest[..., j, j]
        is_used = pivot > floor[..., j]
        column = rest[..., :, j] / jnp.sqrt(jnp.where(is_used, pivot, 1.0))[..., None]
        column = jnp.where(is_used[..., None] & (index >= j), column, 0.0)
        return rest - column[..., :, None] * column[..., None, :], root.at[..., :, j].set(column)

    _, root = jax.lax.fori_loop(0, size, eliminate, (covariance, jnp.zeros_like(covariance)))
    return root
