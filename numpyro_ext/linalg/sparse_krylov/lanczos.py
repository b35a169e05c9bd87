r"""Krylov spaces of several vectors at a time, on the host: solutions, and functions of a matrix of unit diagonal.

A product of a sparse matrix with thirty vectors takes SciPy a tenth of thirty products with one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_Product = Callable[[Floats], Floats]

_MOST_STEPS = 300
_LARGEST_RESIDUAL = 1e-8
_EXHAUSTED = 1e-12
"""Norm of what a product adds to a space, relative to the matrix, that is rounding."""
_LEAST_SHARE = 1e-11
"""Share of the largest eigenvalue below which one of a derivative is left out."""


def conjugate_gradient(multiply: _Product, b: Floats, tol: float = 1e-10) -> Floats:
    """Solve for several right-hand sides, each to a relative residual, by Hestenes and Stiefel (1952).

    A matrix that is not positive definite ends it early; who calls computes the residual of what is returned.

    :param multiply: product of the matrix with vectors ``(n, k)``.
    :param b: shape ``(n, k)``.
    :return: shape ``(n, k)``.
    """
    x, r = np.zeros_like(b), b.copy()
    p, square = r.copy(), np.einsum("nk,nk->k", b, b)
    goal = tol**2 * square
    for _ in range(_MOST_STEPS):
        is_active = square > goal
        if not is_active.any():
            break
        product = multiply(p)
        curvature = np.einsum("nk,nk->k", p, product)
        if not np.all(curvature[is_active] > 0.0):
            break
        length = np.where(is_active, square / np.where(is_active, curvature, 1.0), 0.0)
        x += length * p
        r -= length * product
        after = np.where(is_active, np.einsum("nk,nk->k", r, r), square)
        p = r + np.where(is_active, after / np.where(is_active, square, 1.0), 0.0) * p
        square = after
    return x


class Krylov(NamedTuple):
    """Orthonormal bases of Krylov spaces, one for each start, and the matrix on each by its eigenvectors."""

    basis: Floats
    """Shape ``(B, k, n)``; rows of zeros behind the last of an exhausted space."""
    eigenvalues: Floats
    """Shape ``(B, k)``."""
    vectors: Floats
    """Eigenvectors, shape ``(B, k, k)``."""
    norms: Floats
    """Norms of the starts, shape ``(B,)``."""
    residual: float
    """Largest relative residual of the solutions from these spaces."""

    def log_forms(self) -> Floats:
        """Quadratic forms of the starts with the logarithm of the matrix, shape ``(B,)``."""
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = (self.norms[:, None] * self.vectors[:, 0]) ** 2
            found: Floats = np.sum(weights * np.log(self.eigenvalues), axis=1)
        return found

    def inverse_root(self) -> Floats:
        """Inverse square root of the matrix times each start, shape ``(n, B)``."""
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = self.norms[:, None] * self.vectors[:, 0] / np.sqrt(self.eigenvalues)
        inside = np.einsum("bij,bj->bi", self.vectors, weights)
        return np.ascontiguousarray(np.matmul(inside[:, None], self.basis)[:, 0].T)

    def log_derivative(self) -> tuple[Floats, Floats]:
        r"""Derivative of the sum of :meth:`log_forms` by the matrix, as :math:`V V^T`, and the product of the matrix
        with :math:`V`; both of shape ``(n, r)``.

        The derivative of :math:`z^T \log(A) z` is :math:`\int_0^\infty u_t u_t^T dt` with :math:`u_t = (A + t)^{-1} z`,
        which lies in the Krylov space; there the integral is known (Daleckii and Krein 1965).
        """
        values = self.eigenvalues
        total, difference = values[:, :, None] + values[:, None], values[:, :, None] - values[:, None]
        ratio = difference / total
        is_near = np.abs(ratio) < 1e-3
        safe = np.where(is_near, 0.5, ratio)
        quotient = np.where(is_near, 1.0 + ratio**2 / 3.0 + ratio**4 / 5.0, np.arctanh(safe) / safe)
        weights = self.norms[:, None] * self.vectors[:, 0]
        matrix = weights[:, :, None] * weights[:, None] * quotient * 2.0 / total
        sizes, directions = np.linalg.eigh(matrix)
        parts, products = [], []
        for b in range(len(sizes)):
            kept = sizes[b] > _LEAST_SHARE * sizes[b, -1]
            root = directions[b][:, kept] * np.sqrt(sizes[b, kept])
            parts.append(self.basis[b].T @ (self.vectors[b] @ root))
            products.append(self.basis[b].T @ (self.vectors[b] @ (values[b][:, None] * root)))
        return np.concatenate(parts, axis=1), np.concatenate(products, axis=1)


def krylov(multiply: _Product, start: Floats) -> Krylov:
    """Spaces in which the solution for each start has a small residual, by Lanczos' method with orthogonalisation.

    Quadratic forms are then right to about the square of this residual.

    :param multiply: product of a symmetric matrix with vectors ``(n, B)``.
    :param start: shape ``(n, B)``.
    """
    size, number = start.shape
    most_steps = min(_MOST_STEPS, size)
    norms = np.linalg.norm(start, axis=0)
    basis = np.zeros((number, min(16, most_steps), size))
    diagonal, beside = np.ones((number, most_steps)), np.zeros((number, most_steps))
    is_alive = norms > 0.0
    w: Floats = start / np.where(is_alive, norms, 1.0)
    pivot, product, residual = np.ones(number), np.ones(number), np.inf
    steps = 0
    for k in range(most_steps):
        if k == basis.shape[1]:
            basis = np.concatenate([basis, np.zeros((number, min(k, most_steps - k), size))], axis=1)
        basis[:, k] = w.T
        image = multiply(w)
        alpha = np.einsum("nb,nb->b", w, image)
        rest = np.ascontiguousarray(image.T)
        for _ in range(2 if k else 1):
            inside = np.matmul(basis[:, : k + 1], rest[:, :, None])
            rest -= np.matmul(inside.transpose(0, 2, 1), basis[:, : k + 1])[:, 0]
        beta = np.linalg.norm(rest, axis=1)
        diagonal[:, k] = np.where(is_alive, alpha, 1.0)
        pivot = diagonal[:, k] - (beside[:, k - 1] ** 2 / pivot if k else 0.0)
        is_going_on = is_alive & (beta > _EXHAUSTED)
        beside[:, k] = np.where(is_going_on, beta, 0.0)
        product = product * np.where(k > 0, beside[:, k - 1], 1.0) / pivot
        steps = k + 1
        residual = float(np.max(np.abs(beside[:, k] * product)))
        if not residual > _LARGEST_RESIDUAL:  # nan, too
            break
        is_alive = is_going_on
        w = np.where(is_alive, rest.T / np.where(is_alive, beta, 1.0), 0.0)
    matrix = np.zeros((number, steps, steps))
    i = np.arange(steps)
    matrix[:, i, i] = diagonal[:, :steps]
    matrix[:, i[1:], i[:-1]] = matrix[:, i[:-1], i[1:]] = beside[:, : steps - 1]
    if not np.all(np.isfinite(matrix)):
        values = np.full((number, steps), np.nan)
        return Krylov(basis[:, :steps], values, np.full_like(matrix, np.nan), norms, np.nan)
    return Krylov(basis[:, :steps], *np.linalg.eigh(matrix), norms, residual)
