r"""Moments of a Gaussian of sparse precision by the Schur complement of its leaves, on the host.

With :math:`W = R^{-1} H_{LM}` for the Cholesky factors :math:`R` of the leaves, and :math:`D` the diagonal of the
complement :math:`C = H_{MM} - W^T W`, the matrix :math:`A = D^{-1/2} C D^{-1/2}` has the diagonal one and, of crossed
designs, eigenvalues near one. What is asked of it goes through its Krylov spaces. Common unknowns come last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .elimination import Elimination, Plan
from .lanczos import Floats, Krylov, conjugate_gradient, krylov

_MOST_NUMBERS = 40_000_000
"""Numbers of the bases of the Krylov spaces of some starts, for 64 products."""
_AT_ONCE = 32
_ELEMENTS_AT_ONCE = 4096
_REFINED = 1e-6


class Determinant(NamedTuple):
    """Estimate of a log determinant."""

    value: float
    standard_error: float
    """Standard error of the value, by its spread over the probes; zero where it is exact."""
    residual: float
    """Largest relative residual of the solutions from the Krylov spaces."""
    gradient: Floats
    """Derivative of the estimate by the entries of the pattern, of those off the diagonal half: an unbiased estimate of
    the inverse there, shape ``(nnz,)``. Empty if not asked for."""


class Schur:
    """Symmetric positive definite matrix with its leaves eliminated.

    :param Elimination elimination: pattern and order.
    :param values: entries, shape ``(nnz,)``.
    :raises numpy.linalg.LinAlgError: where the matrix is not positive definite; not always found.
    """

    def __init__(self, elimination: Elimination, values: Floats) -> None:
        self.elimination, self.plan = elimination, elimination.plan
        plan: Plan = self.plan
        entries = np.append(values, 0.0)
        b, n = plan.leaves.shape
        block = entries[plan.within]
        empty = plan.leaves == elimination.pattern.size
        block[:, np.arange(n), np.arange(n)] += empty
        root = np.linalg.cholesky(block)
        self.inverse_root = np.linalg.inv(root) if n > 1 else 1.0 / root
        """Inverse Cholesky factors of the leaves, shape ``(b, n, n)``."""
        diagonals = np.einsum("bii->bi", root)
        self.log_leaves = 2.0 * float(np.sum(np.log(diagonals)))
        coupled = entries[plan.pairs]
        self.white = self._per_pair(self.inverse_root, coupled)
        """Rows of :math:`W` by pairs, before they are scaled, shape ``(p, n)``."""
        m = plan.middle.size
        gained = np.bincount(plan.met, np.sum(self.white**2, axis=1), m)
        scale = entries[plan.diagonal] - gained
        if m and not scale.min() > 0.0:  # nan, too
            raise np.linalg.LinAlgError("not positive definite")
        self.scale = np.sqrt(scale)
        """:math:`D^{1/2}`, shape ``(m,)``."""
        scaled = (self.white / self.scale[plan.met, None]).reshape(-1)
        self.rows, self.columns = plan.rows.matrix(scaled), plan.columns.matrix(scaled)
        beside = plan.beside.matrix(entries)
        beside.data /= self.scale[np.repeat(np.arange(m), np.diff(plan.beside.pointer))] * self.scale[beside.indices]
        self.beside = beside if beside.nnz else None
        self.own = (1.0 + gained / scale)[:, None]
        # common unknowns
        q = plan.common.size
        self.leaves_common = self._halved(entries[plan.leaves_common])
        self.middle_common = entries[plan.middle_common] / self.scale[:, None] - self.columns @ self.leaves_common
        self.common = entries[plan.common_common] - self.leaves_common.T @ self.leaves_common
        self.solved_common = self._refined(self.middle_common) if q else self.middle_common
        self.common_root = np.linalg.cholesky(self.common - self.middle_common.T @ self.solved_common)

    def _per_pair(self, blocks: Floats, vectors: Floats) -> Floats:
        """Products of the block of each pair with its vector."""
        if blocks.shape[1] == 1:
            return blocks[self.plan.block, 0] * vectors
        return np.einsum("pij,pj->pi", blocks[self.plan.block], vectors)

    def _by_leaf(self, blocks: Floats, x: Floats) -> Floats:
        b, n, _ = blocks.shape
        if n == 1:
            return blocks[:, 0] * x
        return np.matmul(blocks, x.reshape(b, n, x.shape[1])).reshape(x.shape)

    def _halved(self, x: Floats) -> Floats:
        """:math:`R^{-1} x` of the leaves."""
        return self._by_leaf(self.inverse_root, x)

    def _raised(self, x: Floats) -> Floats:
        """:math:`R^{-T} x`."""
        return self._by_leaf(self.inverse_root.transpose(0, 2, 1), x)

    def multiply(self, x: Floats) -> Floats:
        """:math:`A x` for vectors of shape ``(m, k)``."""
        found: Floats = self.own * x - self.columns @ (self.rows @ x)
        return found if self.beside is None else found + self.beside @ x

    def _refined(self, b: Floats) -> Floats:
        """:math:`A^{-1} b` to rounding: a second run on the residual has the digits that the first one lost."""
        x = conjugate_gradient(self.multiply, b)
        return x + conjugate_gradient(self.multiply, b - self.multiply(x), _REFINED)

    def _split(self, x: Floats) -> tuple[Floats, Floats, Floats]:
        padded = np.concatenate([x, np.zeros((1, x.shape[1]))])
        return padded[self.plan.leaves.reshape(-1)], x[self.plan.middle], x[self.plan.common]

    def _filled_in(self, white: Floats, scaled: Floats, common: Floats) -> Floats:
        """All unknowns, from what the leaves have beside the others, in white coordinates."""
        leaves = self._raised(white - self.rows @ scaled - self.leaves_common @ common)
        out = np.zeros((self.elimination.pattern.size + 1, leaves.shape[1]))
        out[self.plan.leaves.reshape(-1)] = leaves
        out[self.plan.middle], out[self.plan.common] = scaled / self.scale[:, None], common
        return out[:-1]

    def solve(self, b: Floats) -> tuple[Floats, float]:
        """Solutions for right-hand sides ``(n, k)``, and the largest relative residual of their Schur complements."""
        leaves, middle, common = self._split(b)
        leaves, middle = self._halved(leaves), middle / self.scale[:, None]
        middle -= self.columns @ leaves
        common = common - self.leaves_common.T @ leaves
        first = self._refined(middle)
        root = self.common_root
        common = np.linalg.solve(root.T, np.linalg.solve(root, common - self.middle_common.T @ first))
        found = first - self.solved_common @ common
        residual = middle - self.middle_common @ common - self.multiply(found)
        size = np.linalg.norm(middle, axis=0)
        largest = float(np.max(np.linalg.norm(residual, axis=0) / np.where(size > 0.0, size, 1.0), initial=0.0))
        return self._filled_in(leaves, found, common), largest

    def _spaces(self, starts: Floats) -> Iterator[Krylov]:
        """Krylov spaces of some starts after the other, for memory."""
        number = int(np.clip(_MOST_NUMBERS // (64 * max(len(starts), 1)), 4, _AT_ONCE))
        for i in range(0, starts.shape[1], number):
            yield krylov(self.multiply, starts[:, i : i + number])

    def draw(self, white: Floats) -> Floats:
        """Vectors whose covariance is the inverse of the matrix, of white noise; both of shape ``(n, k)``."""
        leaves, middle, common = self._split(white)
        last = np.linalg.solve(self.common_root.T, common).astype(np.float64)
        parts = [space.inverse_root() for space in self._spaces(middle)] if middle.size else [middle]
        return self._filled_in(leaves, np.concatenate(parts, axis=1) - self.solved_common @ last, last)

    def determinant(self, with_gradient: bool) -> Determinant:
        """Log determinant by stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017), with the probes of the
        elimination, and the derivative of this estimate."""
        probes = self.elimination.probes
        m, num_signs = len(probes), self.elimination.num_probes
        value = self.log_leaves + 2.0 * float(np.sum(np.log(self.scale)))
        value += 2.0 * float(np.sum(np.log(np.diagonal(self.common_root))))
        forms, residuals, factors, products = [], [0.0], [np.zeros((m, 0))], [np.zeros((m, 0))]
        for space in self._spaces(probes):
            forms.append(space.log_forms())
            residuals.append(space.residual)
            if with_gradient and np.all(space.eigenvalues > 0.0):
                factor, product = space.log_derivative()
                factors.append(factor)
                products.append(product)
        each = np.concatenate(forms) if forms else np.zeros(1)
        value += float(np.sum(each))
        error = 0.0 if num_signs is None else float(np.std(each[-num_signs:], ddof=1) * np.sqrt(num_signs))
        residual, gradient = float(np.max(residuals)), np.zeros(0)
        if with_gradient and np.isfinite(value):
            gradient = self._inverse(np.concatenate(factors, axis=1), np.concatenate(products, axis=1))
        elif with_gradient:
            gradient = np.full(self.elimination.pattern.num_entries, np.nan)
        return Determinant(value, error, residual, gradient)

    def _inverse(self, factor: Floats, product: Floats) -> Floats:
        """Derivative by the entries, from that by :math:`A`, ``factor @ factor.T``, and ``A @ factor``."""
        plan = self.plan
        b, n = plan.leaves.shape
        m, q = self.middle_common.shape
        # of log |D| + f(A): the diagonal of the complement is in both
        own = (1.0 - np.einsum("mr,mr->m", factor, product)) / self.scale**2
        common = np.linalg.solve(self.common_root, np.eye(q)).T
        by_common = self.solved_common @ common / self.scale[:, None]
        middle = np.concatenate([factor / self.scale[:, None], by_common], axis=1)
        # covariance of middle and common unknowns: diag(own) and the product of these factors
        last = np.concatenate([np.zeros((q, factor.shape[1])), -common], axis=1)
        moved = self.rows @ (self.scale[:, None] * middle) + self.leaves_common @ last
        moved = self._raised(moved)
        slope = self._per_pair(self.inverse_root.transpose(0, 2, 1), self.white)
        out = np.zeros(self.elimination.pattern.num_entries + 1)
        # each entry stands in these arrays once or, with equal values, twice
        out[plan.common_common] = common @ common.T
        out[plan.middle_common] = middle @ last.T
        out[plan.leaves_common] = -moved @ last.T
        beside = plan.beside
        rows = np.repeat(np.arange(m), np.diff(beside.pointer))
        out[beside.source] = _products(middle, rows, middle, beside.columns)
        out[plan.diagonal] = own + np.einsum("mr,mr->m", middle, middle)
        for i in range(n):
            with_met = _products(moved, plan.block * n + i, middle, plan.met)
            out[plan.pairs[:, i]] = -with_met - slope[:, i] * own[plan.met]
        blocks = np.matmul(self.inverse_root.transpose(0, 2, 1), self.inverse_root)
        moved = moved.reshape(b, n, moved.shape[1])
        blocks += np.matmul(moved, moved.transpose(0, 2, 1))
        for i in range(n):
            for j in range(n):
                blocks[:, i, j] += np.bincount(plan.block, slope[:, i] * slope[:, j] * own[plan.met], b)
        out[plan.within] = blocks
        return out[:-1]


def _products(left: Floats, i: np.ndarray, right: Floats, j: np.ndarray) -> Floats:
    """Elements of ``left @ right.T`` at places ``(i, j)``, some at a time."""
    out = np.empty(len(i))
    for start in range(0, len(i), _ELEMENTS_AT_ONCE):
        part = slice(start, start + _ELEMENTS_AT_ONCE)
        np.einsum("pr,pr->p", left[i[part]], right[j[part]], out=out[part])
    return out
