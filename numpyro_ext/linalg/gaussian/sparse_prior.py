"""Gaussian block of a sparse precision: proper, flat along a null space, or conditioned on sums of zero."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax

from ..cholesky import LARGEST_DENSE
from ..frozen_pytree import frozen_pytree
from ..sparse_cholesky import AnyPattern, CarriedPattern, SparseFactor, SparsePattern, analyse, factorise, multiply

_LOG_2PI = math.log(2.0 * math.pi)


@frozen_pytree
class SparsePrecisionPrior:
    r"""Unknowns with a sparse precision :math:`Q`, at most flat along the span of a few orthonormal columns :math:`U`.

    With ``pivots`` the matrix is singular, :math:`Q U = 0`. With ``is_constrained`` the unknowns are orthogonal to
    :math:`U`, and the density is one on that subspace. With ``pivots`` alone it is constant along :math:`U`, and
    normalised on what is orthogonal to it.

    >>> pattern = SparsePattern.of(3, [1, 2], [0, 1])
    >>> walk = jnp.array([1.0, -1.0, 2.0, -1.0, 1.0])
    >>> ones = jnp.full((3, 1), 3.0 ** -0.5)
    >>> prior = SparsePrecisionPrior(walk, None, ones, jnp.array([0]), pattern, is_constrained=True)
    >>> print(jnp.exp(prior.log_determinant()).round(6), prior.rank)
    3.0 2
    """

    values: Array
    """Entries of the precision in the order of the pattern, shape ``(nnz,)``."""
    known_log_determinant: Array | None
    """Log determinant of the precision on its support, if it is known without a factorisation."""
    directions: Array | None
    """:math:`U`, shape ``(n, k)``."""
    pivots: Array | None
    """Unknowns, as many as directions, at which the rows of :math:`U` are independent; shape ``(k,)``."""
    pattern: AnyPattern
    is_constrained: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def size(self) -> int:
        return self.pattern.size

    @property
    def num_flat(self) -> int:
        """Number of directions along which the density is constant."""
        return 0 if self.is_constrained or self.pivots is None else self.pivots.shape[0]

    @property
    def rank(self) -> int:
        """Dimension of the space on which there is a density."""
        return self.size - (0 if self.directions is None else self.directions.shape[1])

    def carried(self) -> SparsePrecisionPrior:
        """The same prior with its pattern as arrays, which programs do not depend on."""
        assert isinstance(self.pattern, SparsePattern)  # as the prior is made
        pattern = CarriedPattern.of(self.pattern, self.pattern.num_entries, analyse(self.pattern).padded_length)
        return dataclasses.replace(self, pattern=pattern)

    def anchor(self) -> Array:
        """Number of the size of the precision that makes it positive definite once added to the pivots."""
        return lax.stop_gradient(jnp.sum(self.values[self.pattern.diagonal]) / self.rank)

    def factor(self) -> tuple[SparseFactor, Array]:
        """Factor of the precision, with the :meth:`anchor` on the pivots where it is singular, and the anchor."""
        added = self.anchor()
        if self.pivots is None:
            return factorise(self.pattern, self.values), added
        slots = jnp.asarray(self.pattern.diagonal)[self.pivots]
        return factorise(self.pattern, self.values.at[slots].add(added)), added

    def log_determinant(self) -> Array:
        """Log of the product of the eigenvalues of the precision on the space on which there is a density.

        One factorisation, unless it is known; ``nan`` where the precision is not positive definite there.
        """
        if self.known_log_determinant is not None:
            return self.known_log_determinant
        factor, added = self.factor()
        found: Array = factor.log_determinant
        if self.directions is None:
            return found
        basis = self.directions.astype(self.values.dtype)
        if self.pivots is None:
            found += jnp.linalg.slogdet(basis.T @ factor.solve(basis))[1]
        else:
            found -= self.pivots.shape[0] * jnp.log(added) + 2.0 * jnp.linalg.slogdet(basis[self.pivots])[1]
        return found

    def log_density(self, e: Array) -> Array:
        """Log density of ``e`` of shape ``(size,)``, which is orthogonal to the directions where it has to be."""
        if self.pivots is not None and self.directions is not None:
            e = e - self.directions @ (self.directions.T @ e)  # a large level would take the digits of the rest
        return 0.5 * (self.log_determinant() - self.rank * _LOG_2PI - e @ multiply(self.pattern, self.values, e))

    def draw(self, white: Array) -> Array:
        """Unknowns of a plausible size, in the support, made of standard normal numbers of shape ``(size,)``."""
        diagonal = self.values[self.pattern.diagonal]
        e = white / jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1.0))
        if self.directions is None or not self.is_constrained:
            return e
        # twice, so that rounding leaves nothing along the directions
        e = e - self.directions @ (self.directions.T @ e)
        return e - self.directions @ (self.directions.T @ e)

    def covariance_part(self) -> Array:
        """The covariance as a part of a :class:`~.block_diagonal.BlockDiagonal`, shape ``(1, n, n)``.

        :raises ValueError: if it is singular or flat, or too large to be held.
        """
        self._check_dense("covariance")
        found: Array = factorise(self.pattern, self.values).solve(jnp.eye(self.size, dtype=self.values.dtype))
        return found[None]

    def scale_part(self) -> Array:
        """Factor ``F`` with ``F F^T`` the covariance, as a part of a block diagonal; refused like
        :meth:`covariance_part`.

        :raises ValueError: if the covariance is singular or flat, or too large to be held.
        """
        self._check_dense("factor of the covariance")
        return jnp.linalg.cholesky(self.covariance_part())

    def precision_part(self) -> Array:
        """The precision as a part of a block diagonal, shape ``(1, n, n)``; refused like :meth:`covariance_part`.

        :raises ValueError: if unknowns are constrained, or it is too large to be held.
        """
        self._check_dense("dense precision", may_be_flat=True)
        return multiply(self.pattern, self.values, jnp.eye(self.size, dtype=self.values.dtype))[None]

    def _check_dense(self, what: str, may_be_flat: bool = False) -> None:
        if self.directions is not None and not (may_be_flat and self.num_flat):
            raise ValueError(
                f"a field that adds up to zero, or is flat, has no {what}: condition it with space='sparse-cholesky'."
            )
        if self.size > LARGEST_DENSE:
            raise ValueError(
                f"the {what} of {self.size} unknowns of a sparse field is too large to be held: condition them with "
                "space='sparse-cholesky'."
            )
