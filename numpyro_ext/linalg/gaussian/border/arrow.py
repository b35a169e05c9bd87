r"""Factors of arrow matrices: blocks on the diagonal, a border, and the couplings of the blocks with it.

.. math::
    H = \begin{pmatrix} H_1 & & G_1 \\ & \ddots & \vdots \\ G_1^T & \cdots & H_0 \end{pmatrix}, \quad
    H_b = R_b R_b^T, \quad V_b = R_b^{-1} G_b, \quad S = H_0 - \sum_b V_b^T V_b,

and the Cholesky factor consists of the :math:`R_b`, the :math:`V_b^T` and the factor of the Schur complement :math:`S`
(Golub and Van Loan 2013, *Matrix Computations*, section 4.2.5). Log determinants and solutions have derivatives by the
factor at hand: :math:`d \log|H| = \langle H^{-1}, dH \rangle`, for which the inverse is needed where :math:`H` has
entries alone (Takahashi 1973), and :math:`d(H^{-1} y) = H^{-1} (dy - dH\, H^{-1} y)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...cholesky import (
    cholesky,
    cholesky_of_lower,
    gram_of_lower,
    half_log_determinant,
    inverse_lower,
    inverse_lower_in_blocks,
    solve_lower,
    solve_upper,
)
from ...frozen_pytree import frozen_pytree
from .coupling import Coupling


class ArrowMatrix(NamedTuple):
    """A symmetric arrow matrix, or the elements of another one in its places."""

    local: Array
    """Blocks, shape ``(b, n, n)``."""
    cross: Coupling
    """Rows of the blocks in the columns of the border."""
    shared: Array
    """The border, shape ``(p, p)``: its lower triangle, and anything above."""

    def times(self, local: Array, shared: Array) -> tuple[Array, Array]:
        """Product with a vector of parts ``(b, n)`` and ``(p,)``."""
        first = jnp.einsum("bij,bj->bi", self.local, local) + self.cross.times(shared[:, None])[..., 0]
        by_border = jnp.tril(self.shared) @ shared + shared @ jnp.tril(self.shared, -1)
        return first, self.cross.transpose_times(local) + by_border

    def inner(self, other: ArrowMatrix) -> Array:
        """Sum of the products of elements with those of another one in the same places."""
        products = jnp.tril(self.shared * other.shared)
        twice = 2.0 * (jnp.sum(self.cross.values * other.cross.values) + jnp.sum(products))
        return jnp.sum(self.local * other.local) + twice - jnp.trace(products)


@frozen_pytree
class ArrowFactor:
    """Cholesky factor of an arrow matrix.

    >>> cross = Coupling(jnp.array([[[1.0]]]), None, 1)
    >>> factor = ArrowFactor.build(ArrowMatrix(jnp.array([[[2.0]]]), cross, jnp.array([[3.0]])))
    >>> local, shared = factor.solve(jnp.array([[3.0]]), jnp.array([4.0]))
    >>> print(local.round(6), shared.round(6), jnp.exp(2.0 * factor.half_log_determinant()).round(6))
    [[1.]] [1.] 5.0
    """

    matrix: ArrowMatrix
    factor: Array
    """:math:`R_b`, shape ``(b, n, n)``."""
    gain: Coupling
    """:math:`V_b`."""
    schur: Array
    """Cholesky factor of :math:`S`, shape ``(p, p)``."""

    @classmethod
    def build(cls, matrix: ArrowMatrix) -> ArrowFactor:
        """Factorise; nan where the matrix is not positive definite.

        Cost: :math:`p^3/3`, and :math:`n^3` and the products of :class:`.Coupling` for each block.
        """
        factor = cholesky(matrix.local)
        gain = matrix.cross.of(solve_lower(factor, matrix.cross.values))
        return cls(matrix, factor, gain, cholesky_of_lower(matrix.shared - gain.gram_lower()))

    def held(self, matrix: ArrowMatrix) -> ArrowFactor:
        """The same factor beside the matrix that it is of as something else has computed it: derivatives, of first
        order alone, are by that one."""
        return ArrowFactor(matrix, *jax.lax.stop_gradient((self.factor, self.gain, self.schur)))

    def half_log_determinant(self) -> Array:
        """Half the log determinant; its derivative costs :meth:`inverse`."""
        return _half_log_determinant(self.matrix, self)

    def solve(self, local: Array, shared: Array) -> tuple[Array, Array]:
        """Solution for a right-hand side of parts ``(b, n)`` and ``(p,)``, by triangular solves."""
        return self.solution(local, shared)[:2]

    def solution(self, local: Array, shared: Array) -> tuple[Array, Array, Array]:
        """:meth:`solve`, and half the product of the solution with the right-hand side, as a sum of squares."""
        return _solution(self.matrix, (local, shared), self)

    def colour(self, local: Array, shared: Array) -> tuple[Array, Array]:
        """Transposed factor divided out of ``(b, n, m)`` and ``(p, m)``: of white noise it makes the covariance
        that is the inverse."""
        shared = solve_upper(self.schur, shared)
        return solve_upper(self.factor, local - self.gain.times(shared)), shared

    def inverse(self) -> ArrowMatrix:
        """Elements of the inverse where the matrix has its own, of the border all. Cost: :math:`p^3`, and that of the
        couplings."""
        shared = gram_of_lower(inverse_lower_in_blocks(self.schur))
        moved = self.gain.times_symmetric(shared)
        inner = jnp.eye(self.factor.shape[-1], dtype=shared.dtype) + moved.values @ self.gain.values.mT
        root = inverse_lower(self.factor)
        return ArrowMatrix(root.mT @ inner @ root, moved.of(-solve_upper(self.factor, moved.values)), shared)


# The factor stands beside the matrix that it is of. Derivatives by the matrix use it, and take no account of its own
# ones, but in derivatives of derivatives.


@jax.custom_jvp
def _half_log_determinant(matrix: ArrowMatrix, factor: ArrowFactor) -> Array:
    return half_log_determinant(factor.factor) + half_log_determinant(factor.schur)


@_half_log_determinant.defjvp
def _half_log_determinant_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    matrix, factor = primals
    change = _change(matrix, tangents[0])
    return _half_log_determinant(matrix, factor), 0.5 * factor.inverse().inner(change)


@jax.custom_jvp
def _solution(matrix: ArrowMatrix, side: tuple[Array, Array], factor: ArrowFactor) -> tuple[Array, Array, Array]:
    local, shared = side
    white = solve_lower(factor.factor, local[..., None])[..., 0]
    shared_white = solve_lower(factor.schur, (shared - factor.gain.transpose_times(white))[:, None])
    solved = solve_upper(factor.schur, shared_white)
    rest = white[..., None] - factor.gain.times(solved)
    half_square = 0.5 * (jnp.sum(white**2) + jnp.sum(shared_white**2))
    return solve_upper(factor.factor, rest)[..., 0], solved[:, 0], half_square


@_solution.defjvp
def _solution_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    matrix, side, factor = primals
    found = _solution(matrix, side, factor)
    moved = _change(matrix, tangents[0]).times(*found[:2])
    of_local, of_shared = (given - own for given, own in zip(tangents[1], moved, strict=True))
    change = _solution(matrix, (of_local, of_shared), factor)[:2]
    of_square = sum(jnp.sum(x * (given - 0.5 * own)) for x, given, own in zip(found, tangents[1], moved, strict=False))
    return found, (*change, of_square)


def _change(matrix: ArrowMatrix, tangent: ArrowMatrix) -> ArrowMatrix:
    return ArrowMatrix(tangent.local, matrix.cross.of(tangent.cross.values), tangent.shared)
