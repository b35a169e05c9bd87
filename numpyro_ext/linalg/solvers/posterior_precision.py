r"""The precision :math:`A = X^T N^{-1} X + \operatorname{diag}(\pi)` of coefficients seen through a linear operator.

Its solutions, variances and log determinant in the three cases that occur: :math:`X^T N^{-1} X` diagonal (denoising
with an orthonormal transform), small enough for a dense matrix, and neither, where conjugate gradients, perturbed
draws and Lanczos iterations stand in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...optional import optional
from ..cholesky import cholesky, cholesky_solve, half_log_determinant, solve_lower
from ..frozen_pytree import frozen_pytree
from ..operators.operator import LinearOperator
from .conjugate_gradient import ConjugateGradientResult, conjugate_gradient

_NUM_SIGNS = 4


@frozen_pytree
class PosteriorPrecision(LinearOperator):
    r"""The matrix :math:`A` as an operator of ``n`` rows and columns, its own adjoint.

    :param LinearOperator operator: :math:`X` of shape ``(m, n)``.
    :param Array noise_variance: the diagonal of :math:`N`, of shape ``()`` or ``(m,)``.
    :param Array precision: :math:`\pi` of shape ``(n,)``, or ``(p,)`` with a frame.
    :param LinearOperator analysis: a tight frame :math:`B` of shape ``(p, n)``; the second term is then
        :math:`B^T \operatorname{diag}(\pi) B`.
    """

    operator: LinearOperator
    noise_variance: Array
    precision: Array
    analysis: LinearOperator | None = None

    @property
    def shape(self) -> tuple[int, int]:
        n = self.operator.shape[1]
        return n, n

    def matvec(self, x: Array) -> Array:
        data = self.operator.rmatvec(self.operator.matvec(x) / self.noise_variance)
        return data + self.synthesis(self.precision * self.coefficients(x))

    def coefficients(self, x: Array) -> Array:
        """:math:`B x`, or ``x`` without a frame."""
        return x if self.analysis is None else self.analysis.matvec(x)

    def synthesis(self, coefficients: Array) -> Array:
        """:math:`B^T` times coefficients, or these themselves without a frame."""
        return coefficients if self.analysis is None else self.analysis.rmatvec(coefficients)

    def rmatvec(self, y: Array) -> Array:
        return self.matvec(y)

    def project(self, y: Array) -> Array:
        r""":math:`X^T N^{-1} y`: what data say about the coefficients.

        :param Array y: of shape ``(m,)``.
        :return: of shape ``(n,)``.
        """
        return self.operator.rmatvec(y / self.noise_variance)

    def dense(self) -> Array:
        """The matrix itself, of shape ``(n, n)``."""
        matrix = self.operator.materialise()
        weight = jnp.broadcast_to(1.0 / self.noise_variance, (matrix.shape[0],))
        data = matrix.T @ (weight[:, None] * matrix)
        if self.analysis is None:
            return jnp.diag(self.precision) + data
        frame = self.analysis.materialise()
        return frame.T @ (self.precision[:, None] * frame) + data

    def frame_constant(self) -> Array:
        """:math:`c` of :math:`B^T B = c I`."""
        n = self.shape[1]
        return jnp.sum(jnp.square(self.coefficients(jnp.ones((n,), self.precision.dtype)))) / n

    def solve(
        self,
        right_hand_side: Array,
        gram_diagonal: Array,
        *,
        initial: Array | None = None,
        tol: float = 1e-6,
        max_iterations: int = 1000,
    ) -> ConjugateGradientResult:
        r"""Solve with conjugate gradients.

        :param right_hand_side: of shape ``(n,)`` or ``(k, n)``.
        :param gram_diagonal: about the diagonal of :math:`X^T N^{-1} X`, a number or of shape ``(n,)``; with
            :attr:`precision` added it is the preconditioner. With a frame, of which each basis would give such a
            preconditioner, it is the average of them.
        :param initial: where to start.
        :param float tol: relative residual.
        :param int max_iterations: iterations at most.
        """
        return conjugate_gradient(
            self.matvec,
            right_hand_side,
            preconditioner=self._preconditioner(gram_diagonal),
            initial=initial,
            tol=tol,
            max_iterations=max_iterations,
        )

    def _preconditioner(self, gram_diagonal: Array) -> Array | Callable[[Array], Array]:
        if self.analysis is None:
            return gram_diagonal + self.precision
        constant = self.frame_constant()
        inverse = 1.0 / (jnp.mean(gram_diagonal) + constant * self.precision)
        return lambda r: self.synthesis(inverse * self.coefficients(r)) / constant


def gram_diagonal(operator: LinearOperator, noise_variance: Array, is_diagonal: bool) -> Array:
    r"""The diagonal of :math:`X^T N^{-1} X`, exactly if that matrix is diagonal, and otherwise its average.

    The product with random signs, times the signs, has the diagonal as its expectation; where the matrix is diagonal
    every draw gives it exactly. The average over all coefficients needs few draws, and suits the preconditioning of
    operators with columns of about equal norm.

    :param LinearOperator operator: :math:`X`.
    :param Array noise_variance: the diagonal of :math:`N`, of shape ``()`` or ``(m,)``.
    :param bool is_diagonal: from :func:`has_diagonal_gram`.
    :return: of shape ``(n,)``.
    """
    estimates = _signed_products(operator, noise_variance, 1 if is_diagonal else _NUM_SIGNS)
    return estimates[0] if is_diagonal else jnp.full_like(estimates[0], jnp.mean(estimates))


def has_diagonal_gram(operator: LinearOperator, noise_variance: Array) -> bool:
    r"""True if :math:`X^T N^{-1} X` is diagonal, judged by its products with random signs. Not for traced values.

    :param LinearOperator operator: :math:`X`.
    :param Array noise_variance: the diagonal of :math:`N`, of shape ``()`` or ``(m,)``.
    """
    estimates = np.asarray(_signed_products(operator, noise_variance, _NUM_SIGNS))
    # Tables of wavelet filters hold twelve digits: a transform by 'sym4' is orthonormal to 1e-11 after a few levels.
    tolerance = max(1e3 * float(np.finfo(estimates.dtype).eps), 1e-10)
    return bool(np.ptp(estimates, axis=0).max() <= tolerance * np.abs(estimates).max())


@functools.partial(jax.jit, static_argnums=2)
def _signed_products(operator: LinearOperator, noise_variance: Array, num_signs: int) -> Array:
    leaves = [x.dtype for x in jax.tree.leaves((operator, noise_variance)) if jnp.issubdtype(x.dtype, jnp.floating)]
    coarsest = max(leaves, key=lambda dtype: float(jnp.finfo(dtype).eps))
    precision = PosteriorPrecision(operator, noise_variance, jnp.zeros((operator.shape[1],), coarsest))
    # Fixed signs: equal operators must be treated equally.
    choices = np.random.default_rng(0).choice([-1.0, 1.0], size=(_NUM_SIGNS, operator.shape[1]))
    # Hidden from the compiler, which would otherwise multiply the operator with them itself, and slowly.
    signs = jax.lax.optimization_barrier(jnp.asarray(choices[:num_signs], coarsest))
    return signs * jax.vmap(precision.matvec)(signs)


class DenseMoments(NamedTuple):
    """Moments from one Cholesky factorisation of the precision."""

    mean: Array
    """:math:`A^{-1} b`, of shape ``(n,)``."""
    variance: Array
    """Diagonal of :math:`A^{-1}`, of shape ``(n,)``; with a frame of :math:`B A^{-1} B^T`, of shape ``(p,)``."""
    half_log_determinant: Array
    """:math:`\\tfrac12 \\log |A|`."""
    fitted_variance: Array
    """Diagonal of :math:`X A^{-1} X^T`, of shape ``(m,)``."""


def dense_moments(precision: PosteriorPrecision, shift: Array) -> DenseMoments:
    """Exact moments by a Cholesky factorisation, at cost ``O(n^3 + n^2 m)``; nan if it is not positive definite.

    :param PosteriorPrecision precision: :math:`A`.
    :param Array shift: :math:`b` of shape ``(n,)``.
    """
    factor = cholesky(precision.dense())
    frame = precision.analysis
    identity = jnp.eye(factor.shape[0], dtype=factor.dtype) if frame is None else frame.materialise().T
    inverse = solve_lower(factor, identity)
    fitted = solve_lower(factor, precision.operator.materialise().T)
    return DenseMoments(
        cholesky_solve(factor, shift),
        jnp.sum(inverse**2, axis=0),
        half_log_determinant(factor),
        jnp.sum(fitted**2, axis=0),
    )


def lanczos_variance(precision: PosteriorPrecision, start: Array, num_products: int) -> Array:
    r"""The part of the diagonal of :math:`A^{-1}` that a Krylov space sees: never more than the diagonal itself.

    With :math:`Q^T A Q = T` on the space of ``num_products`` dimensions, :math:`\operatorname{diag}(Q T^{-1} Q^T)`.
    It misses most of the variance of most coefficients unless the space is large (Ko 2017, section 2.2).

    :param PosteriorPrecision precision: :math:`A`.
    :param Array start: the vector that spans the space, of shape ``(n,)``.
    :param int num_products: its dimension.
    :return: of shape ``(n,)``, or with a frame ``(p,)``.
    """
    basis, tridiagonal = tridiagonalise(precision.matvec, start, num_products)
    half = jax.vmap(precision.coefficients)(solve_lower(cholesky(tridiagonal), basis))
    return jnp.sum(half**2, axis=0)


def tridiagonalise(matvec: Callable[[Array], Array], start: Array, num_products: int) -> tuple[Array, Array]:
    """Orthonormal basis ``(k, n)`` of the Krylov space of a symmetric matrix, and the matrix on it, ``(k, k)``.

    The matrix is perturbed at the level of rounding errors: where the space has fewer dimensions than asked for, as
    with a multiple of the identity, the iteration would divide by zero.
    """
    size = start.size
    jitter = jnp.asarray(np.random.default_rng(0).uniform(-1.0, 1.0, size), start.dtype)
    level = 16.0 * jnp.finfo(start.dtype).eps
    basis, matrix, *_ = optional("matfree.decomp", "images").tridiag_sym(num_products)(
        lambda x: matvec(x) * (1.0 + level * jitter), start / jnp.linalg.norm(start)
    )
    return basis, 0.5 * (matrix + matrix.T)


def lanczos_log_determinant(
    precision: PosteriorPrecision, gram_diagonal: Array, signs: Array, num_products: int
) -> Array:
    r"""Estimate :math:`\tfrac12 \log |A|` by stochastic Lanczos quadrature of the preconditioned matrix.

    :param PosteriorPrecision precision: :math:`A`.
    :param Array gram_diagonal: about the diagonal of :math:`X^T N^{-1} X`.
    :param Array signs: random signs, of shape ``(num_probes, n)``.
    :param int num_products: products with :math:`A` per probe.
    :return: a scalar.

    **References**

    1. Ubaru, S., Chen, J. and Saad, Y. (2017), *Fast estimation of tr(f(A)) via stochastic Lanczos quadrature*, SIAM
       Journal on Matrix Analysis and Applications 38, 1075-1099.
    """
    prior = precision.precision
    if precision.analysis is not None:
        prior = jnp.sum(prior) * precision.frame_constant() / prior.size
    diagonal = jnp.broadcast_to(gram_diagonal + prior, signs.shape[1:])
    root = jnp.sqrt(diagonal)

    def quadrature(sign: Array) -> Array:
        def matvec(x: Array) -> Array:
            return precision.matvec(x / root) / root

        _, tridiagonal = tridiagonalise(matvec, sign, num_products)
        values, vectors = jnp.linalg.eigh(tridiagonal)
        return sign.size * jnp.sum(vectors[0] ** 2 * jnp.log(values))

    return 0.5 * (jnp.sum(jnp.log(diagonal)) + jnp.mean(lax.map(quadrature, signs)))
