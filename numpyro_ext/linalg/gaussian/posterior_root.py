r"""Unknowns of a Gaussian posterior made of normal numbers by its Cholesky factor, with derivatives in closed form.

For :math:`e \sim N(0, C)` times :math:`\exp(s^T e - \tfrac12 e^T P e)` the posterior has covariance
:math:`\Sigma = T T^T` and mean :math:`m = \Sigma s`. A change of prior and sites changes the covariance by

.. math::
    d\Sigma = T X T^T, \quad X = W^T dC\, W - T^T dP\, T, \quad W = C^{-1} T = T^{-T} - P T,

the factor by :math:`T \Phi(X)`, where :math:`\Phi` takes the lower triangle and half of the diagonal, and the mean
by :math:`T (W^T dC\, r - T^T dP\, m + T^T ds)`, with :math:`r = s - P m`. Derivatives of conditioning and of factors
one after the other would take two triangular solves with matrices for each of three factorisations; here it is one
inverse of a triangle and two products. (Murray 2016, *Differentiation of the Cholesky decomposition*, for
:math:`\Phi`.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from ..cholesky import cholesky, inverse_lower_in_blocks
from ..frozen_pytree import frozen_pytree


@frozen_pytree
class PosteriorRoot:
    """Parts of the posterior on which unknowns of normal numbers and their derivatives depend."""

    factor: Array
    """:math:`T`, shape ``(n, n)``."""
    mean: Array
    """:math:`m`, shape ``(n,)``."""
    to_prior: Array
    """:math:`W`, shape ``(n, n)``."""
    rest: Array
    """:math:`r = C^{-1} m`, shape ``(n,)``."""


def posterior_root(covariance: Array, site_precision: Array, site_shift: Array) -> PosteriorRoot:
    r"""Factor and mean of a posterior.

    :param covariance: :math:`\Sigma`, shape ``(n, n)``.
    :param site_precision: :math:`P`, shape ``(n, n)``, or ``(n,)`` where it is diagonal.
    :param site_shift: :math:`s`, shape ``(n,)``.
    """
    factor = cholesky(covariance)
    mean = covariance @ site_shift
    to_prior = inverse_lower_in_blocks(factor, largest=32).T - _product(site_precision, factor)
    return PosteriorRoot(factor, mean, to_prior, site_shift - _product(site_precision, mean))


@jax.custom_jvp
def from_white(
    prior_covariance: Array, site_precision: Array, site_shift: Array, white: Array, root: PosteriorRoot
) -> tuple[Array, Array]:
    r"""Unknowns :math:`m + T z` of standard normal numbers, and the log determinant of the map.

    Cost of values: a product with a vector. Cost of a gradient: an inverse of a triangle and two matrix products.

    >>> covariance, precision, shift = jnp.array([[2.0]]), jnp.array([1.5]), jnp.array([4.0])
    >>> root = posterior_root(jnp.array([[0.5]]), precision, shift)
    >>> unknowns, log_scale = from_white(covariance, precision, shift, jnp.ones(1), root)
    >>> print(unknowns.round(3), jnp.exp(2 * log_scale).round(3))
    [2.707] 0.5

    :param prior_covariance: :math:`C`, shape ``(n, n)``; derivatives alone need it, as the two that follow.
    :param site_precision: :math:`P`, shape ``(n, n)``, or ``(n,)`` where it is diagonal.
    :param site_shift: :math:`s`, shape ``(n,)``.
    :param white: :math:`z`, shape ``(n,)``.
    :param root: of the posterior of these, which has no derivatives of its own.
    :return: shapes ``(n,)`` and ``()``.
    """
    return root.mean + root.factor @ white, jnp.sum(jnp.log(jnp.diagonal(root.factor)))


def _changes(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    white, root = primals[3:]
    of_prior, of_precision, of_shift, of_white, _ = tangents
    factor, in_factor, direction = root.factor, jnp.zeros_like(root.factor), jnp.zeros_like(white)
    if not isinstance(of_prior, SymbolicZero):
        in_factor += root.to_prior.T @ of_prior @ root.to_prior
        direction += root.to_prior.T @ (of_prior @ root.rest)
    if not isinstance(of_precision, SymbolicZero):
        in_factor -= factor.T @ _product(of_precision, factor)
        direction -= factor.T @ _product(of_precision, root.mean)
    if not isinstance(of_shift, SymbolicZero):
        direction += factor.T @ of_shift
    if not isinstance(of_white, SymbolicZero):
        direction += of_white
    diagonal = jnp.diagonal(in_factor)
    direction += jnp.tril(in_factor) @ white - 0.5 * diagonal * white
    return from_white(*primals), (factor @ direction, 0.5 * jnp.sum(diagonal))


from_white.defjvp(_changes, symbolic_zeros=True)


def _product(precision: Array, x: Array) -> Array:
    """A precision, or a diagonal one by its diagonal, times a vector or a matrix."""
    if precision.ndim == 2:
        return precision @ x
    return precision * x if x.ndim == 1 else precision[:, None] * x
