"""Log determinants, draws and variances of one Gaussian Markov random field, from one sparse factorisation."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax import Array
from jax.typing import DTypeLike

from ...linalg.frozen_pytree import FixedArray
from ...linalg.gaussian.sparse_prior import SparsePrecisionPrior
from ...linalg.sparse_cholesky import SparseFactor, SparsePattern, analyse, multiply, numeric
from .directions import Directions, directions_of
from .precision import pattern_of

_DENSE_LIMIT = 1500
"""Unknowns up to which a refused matrix has all of its eigenvalues computed for the message."""


class HostFactor:
    """Factor of a matrix that is known, in NumPy and in double precision."""

    def __init__(self, pattern: SparsePattern, numbers: np.ndarray) -> None:
        self._analysis = analyse(pattern)
        self._factor = numeric.factorise(self._analysis.batches, np.asarray(numbers, np.float64))
        self._num_entries = len(numbers)

    @property
    def log_determinant(self) -> float:
        """Log determinant, ``nan`` of a matrix that is not positive definite."""
        return float(numeric.log_determinant(self._analysis.batches, self._factor))

    def solve(self, columns: np.ndarray) -> np.ndarray:
        """Solution for the columns of an array of shape ``(size, k)``."""
        order, batches = self._analysis.order, self._analysis.batches
        found = np.empty_like(columns)
        inner = numeric.solve_lower(batches, self._factor, columns[order])
        found[order] = numeric.solve_upper(batches, self._factor, inner)
        return found

    def selected_inverse(self) -> np.ndarray:
        """Entries of the inverse at the pattern."""
        return numeric.selected_inverse(self._analysis.batches, self._factor, self._num_entries)


class Entries(NamedTuple):
    """Facts of a field that are not traced: where its precision has entries, and the directions without a precision.

    With ``null_space`` the precision is singular, and ``Q + c S S^T`` is factorised in its place, where ``S`` picks
    as many unknowns as there are directions: ``c`` is added to ``k`` numbers of the diagonal, so that nothing fills.
    The product of the eigenvalues of ``Q`` that are not zero is then ``det(Q + c S S^T) / (c^k det(U_S)^2)``, where
    ``U_S`` are the rows of the orthonormal null vectors that ``S`` picks, and the inverse, projected onto what is
    orthogonal to these, is the pseudoinverse of ``Q``.
    """

    size: int
    rows: FixedArray
    columns: FixedArray
    null_space: FixedArray | None
    constraint: FixedArray | None
    """Directions that values are orthogonal to; the null space where there is one."""

    @property
    def pattern(self) -> SparsePattern:
        """Entries of the precision."""
        return pattern_of(self.size, self.rows, self.columns)

    @property
    def null_directions(self) -> Directions | None:
        """Directions along which the precision is zero."""
        return None if self.null_space is None else directions_of(self.null_space)

    @property
    def constrained(self) -> Directions | None:
        """Directions that values are orthogonal to."""
        return None if self.constraint is None else directions_of(self.constraint)

    @property
    def rank(self) -> int:
        """Dimension of the density: unknowns less directions that are flat or constrained."""
        taken = self.null_directions or self.constrained
        return self.size - (0 if taken is None else taken.count)

    def product(self, numbers: Array, x: Array) -> Array:
        """The matrix times the vector ``x`` of shape ``(size,)`` or the columns of ``x``."""
        return multiply(self.pattern, numbers, x)

    def quadratic(self, numbers: Array, x: Array) -> Array:
        """The form ``x^T Q x`` with vectors on the last axis."""
        twice = np.where(self.rows.array == self.columns.array, 1.0, 2.0)
        return jnp.sum(numbers * jnp.asarray(twice, x.dtype) * x[..., self.rows.array] * x[..., self.columns.array], -1)

    def block(self, numbers: Array, known_log_determinant: Array | None = None) -> SparsePrecisionPrior:
        """The field about zero as a block of a Gaussian prior."""
        taken, null = self.constrained or self.null_directions, self.null_directions
        return SparsePrecisionPrior(
            numbers,
            known_log_determinant,
            None if taken is None else jnp.asarray(taken.basis, numbers.dtype),
            None if null is None else jnp.asarray(null.pivots, jnp.int32),
            self.pattern,
            self.constraint is not None,
        )

    def factor(self, numbers: Array) -> SparseFactor:
        """Factor of the precision, with ``c`` added to the pivots where it is singular."""
        return self.block(numbers).factor()[0]

    def log_determinant(self, numbers: Array) -> Array:
        """Log determinant on the space on which there is a density; ``nan`` if the matrix does not annihilate the null
        space."""
        found, null = self.block(numbers).log_determinant(), self.null_directions
        if null is None:
            return found
        rest = jnp.max(jnp.abs(self.product(numbers, jnp.asarray(null.basis, numbers.dtype))))
        tolerance = 1e-4 if numbers.dtype == jnp.float32 else 1e-8
        return jnp.where(rest <= tolerance * jnp.max(jnp.abs(numbers)), found, jnp.nan)

    def gain(self, factor: Any, dtype: DTypeLike) -> Array:
        """Kriging weights of what is constrained, shape ``(size, k)``: ``Q^-1 U (U^T Q^-1 U)^-1``; the basis itself
        where it is the null space."""
        assert self.constrained is not None
        basis = jnp.asarray(self.constrained.basis, dtype)
        if self.null_space is not None:
            return basis
        solved = factor.solve(basis)
        return jnp.linalg.solve(basis.T @ solved, solved.T).T

    def conditioned(self, numbers: Array, columns: Array) -> Array:
        """Vectors as columns, shape ``(size, m)``, conditioned by kriging on being orthogonal to the constraint."""
        if self.constrained is None:
            return columns
        factor = None if self.null_space is not None else self.factor(numbers)
        basis = jnp.asarray(self.constrained.basis, columns.dtype)
        return columns - self.gain(factor, columns.dtype) @ (basis.T @ columns)

    def coloured(self, numbers: Array, white: Array) -> Array:
        """Draws about zero from standard normal numbers, both of shape ``(size, m)``."""
        factor = self.factor(numbers)
        drawn: Array = factor.half_solve(white)
        if self.constrained is None:
            return drawn
        basis = jnp.asarray(self.constrained.basis, drawn.dtype)
        return drawn - self.gain(factor, drawn.dtype) @ (basis.T @ drawn)

    def variances(self, numbers: Array) -> Array:
        """Variances, shape ``(size,)``."""
        factor = self.factor(numbers)
        found: Array = factor.selected_inverse()[self.pattern.diagonal]
        if self.constrained is None:
            return found
        basis = jnp.asarray(self.constrained.basis, numbers.dtype)
        solved = factor.solve(basis)
        gain = self.gain(factor, numbers.dtype)
        if self.null_space is None:
            return found - jnp.sum(gain * solved, axis=1)
        # of P S P with the projection P = I - U U^T
        return found - 2.0 * jnp.sum(basis * solved, axis=1) + jnp.sum((basis @ (basis.T @ solved)) * basis, axis=1)

    def dense(self, numbers: Array) -> Array:
        """The precision as a dense matrix, in coordinates of the space orthogonal to the constraint."""
        identity = jnp.eye(self.size, dtype=numbers.dtype)
        if self.constrained is None:
            return self.product(numbers, identity)
        embedded = self.constrained.embed(identity[: self.size - self.constrained.count, : -self.constrained.count])
        return embedded @ self.product(numbers, embedded.T)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - of tuples of small objects that compare by content
    def constant_dense(self, constants: FixedArray, dtype: DTypeLike) -> Array:
        """:meth:`dense` of numbers that are known, computed once for each precision."""
        with jax.ensure_compile_time_eval():
            return self.dense(jnp.asarray(constants.array, dtype))

    def host_factor(self, numbers: np.ndarray) -> tuple[HostFactor, float]:
        """:meth:`factor` of numbers that are known, in double precision whatever JAX computes in."""
        null, added = self.null_directions, 1.0
        if null is not None:
            diagonal = self.pattern.diagonal
            added = float(np.sum(numbers[diagonal]) / self.rank)
            numbers = numbers.copy()
            numbers[diagonal[null.pivots]] += added
        return HostFactor(self.pattern, numbers), added

    @functools.lru_cache(maxsize=64)  # noqa: B019 - of tuples of small objects that compare by content
    def constant_log_determinant(self, constants: FixedArray) -> float:
        """Log determinant of numbers that are known, computed once, in double precision.

        :raises ValueError: if the matrix is not positive definite, or does not annihilate its null space.
        """
        numbers = np.asarray(constants.array, np.float64)
        lower = scipy.sparse.csr_matrix((numbers, (self.rows.array, self.columns.array)), (self.size, self.size))
        matrix = lower + scipy.sparse.tril(lower, -1).T
        self._check_null_space(matrix, numbers)
        factor, added = self.host_factor(numbers)
        found: float = factor.log_determinant
        vector = None
        if np.isfinite(found):
            vector = self._smallest_direction(factor)
            rest = np.linalg.norm(matrix @ vector)
            if rest > 8.0 * np.finfo(float).eps * np.max(np.asarray(abs(matrix).sum(axis=1))):
                null, constrained = self.null_directions, self.constrained
                if null is not None:
                    return float(found - null.count * math.log(added) - 2.0 * null.log_volume)
                if constrained is not None:
                    found += float(np.linalg.slogdet(constrained.basis.T @ factor.solve(constrained.basis))[1])
                return found
        raise ValueError(self._refusal(numbers, vector))

    def _check_null_space(self, matrix: object, numbers: np.ndarray) -> None:
        if self.null_space is None:
            return
        columns = self.null_space.array / np.linalg.norm(self.null_space.array, axis=0)
        products = np.linalg.norm(matrix @ columns, axis=0)
        tolerance = 1e-5 if jnp.result_type(float) == jnp.float32 else 1e-8  # a null space of JAX has as few digits
        worst = int(np.argmax(products))
        if not products[worst] <= tolerance * np.max(np.abs(numbers)):
            raise ValueError(
                f"GaussianMarkovRandomField: the precision does not annihilate column {worst} of null_space: the norm "
                f"of Q n is {products[worst]:.3g} for n of norm one, and the largest entry of Q is "
                f"{np.max(np.abs(numbers)):.3g}. Give the null space of this very matrix (graph.null_space, "
                "precision.null_space), or none if it is positive definite."
            )

    def _smallest_direction(self, factor: HostFactor) -> np.ndarray:
        """Unit vector of about the smallest eigenvalue (outside of the null space), by inverse iteration."""
        vector = np.random.default_rng(0).normal(size=self.size)
        for _ in range(4):
            vector = factor.solve(vector[:, None])[:, 0]
            if self.null_directions is not None:
                basis = self.null_directions.basis
                vector = vector - basis @ (basis.T @ vector)
            vector = vector / np.linalg.norm(vector)
        return vector

    def _refusal(self, numbers: np.ndarray, vector: np.ndarray | None) -> str:
        known = 0 if self.null_directions is None else self.null_directions.count
        what, is_indefinite = "has null directions beside", False
        if self.size <= _DENSE_LIMIT:
            dense = np.zeros((self.size, self.size))
            dense[self.rows.array, self.columns.array] = dense[self.columns.array, self.rows.array] = numbers
            if self.null_directions is not None:
                dense += self.null_directions.basis @ self.null_directions.basis.T * np.max(np.abs(numbers))
            values, vectors = np.linalg.eigh(dense)
            zero = 1e-10 * np.max(np.abs(values))
            vector = vectors[:, 0]
            negative, null = int(np.sum(values < -zero)), int(np.sum(np.abs(values) <= zero))
            is_indefinite = negative > 0
            what = f"has {negative} negative and {null} zero eigenvalues" if negative else f"has {null} null directions"
            what = f"{what} beside" if known else what
        elif vector is None:
            what = "has eigenvalues that are negative or zero" + (" beside" if known else "")
        else:
            what = what if known else "has null directions"
        largest = ""
        if vector is not None and np.all(np.isfinite(vector)):
            order = np.argsort(-np.abs(vector))[:5]
            places = ", ".join(f"{vector[i]:.2g} at {i}" for i in order)
            largest = f" (the largest entries of one are {places})"
        told = f" the {known} columns of null_space" if known else ""
        said = f"GaussianMarkovRandomField: the precision is not positive definite: it {what}{told}{largest}."
        if is_indefinite:
            return f"{said} No null_space= helps: check the signs of its entries, or make its diagonal larger."
        return (
            f"{said} Give null_space= with one column for each direction in which the field is flat (graph.null_space "
            "or precision.null_space where the helpers made it), or add a small number to the diagonal."
        )
