"""Conditioning a Gaussian on sites in the space of the unknowns: one factorisation of size ``columns`` per block."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from ...cholesky import cholesky, cholesky_inverse, half_log_determinant, solve_lower, solve_upper
from ...frozen_pytree import frozen_pytree
from ..block_diagonal import BlockCovariance, BlockDiagonal, Part, quadratic_form
from ..design import DenseDesign, Design, SparseRows
from ..marginals import GaussianSpace, WhitenedPosterior
from ..prior import FlatPrior, PrecisionPrior, PriorBlock
from ..row_pairs import gram_of_rows
from ..sparse_prior import SparsePrecisionPrior


class WhitenedPrior(NamedTuple):
    r"""Coordinates :math:`w` with :math:`e = F w` in which the prior precision is simple.

    A covariance is whitened (:math:`F F^T = C`, precision one), which is safe for any variance down to zero; a
    precision is kept as given, and a flat block has precision zero.
    """

    factor: BlockDiagonal
    precision: BlockDiagonal
    half_log_determinant: Array
    """Half the log determinant of the precision of the proper blocks, with the constant of the flat ones."""

    @classmethod
    def build(cls, prior: tuple[PriorBlock, ...], dtype: jnp.dtype) -> WhitenedPrior:
        """Whiten block by block."""
        factors: list[Part] = []
        precisions: list[Part] = []
        total = jnp.zeros((), dtype)
        for block in prior:
            ones = jnp.ones((block.size,), dtype)
            if isinstance(block, FlatPrior):
                factors.append(ones)
                precisions.append(0.0 * ones)
                total += 0.5 * block.size * math.log(2.0 * math.pi)
            elif isinstance(block, PrecisionPrior):
                factors.append(ones)
                precisions.append(block.precision_part())
                total += block.count * half_log_determinant(cholesky(block.precision))
            elif isinstance(block, SparsePrecisionPrior):
                factors.append(ones)
                precisions.append(block.precision_part())
                total += 0.5 * (block.log_determinant() + block.num_flat * math.log(2.0 * math.pi))
            else:
                factors.append(block.scale_part())
                precisions.append(ones)
        return cls(BlockDiagonal(tuple(factors)), BlockDiagonal(tuple(precisions)), total)


@frozen_pytree
class CoefficientSpace(GaussianSpace):
    r"""Unknowns :math:`e = F w` seen through :math:`h = A e = X w`, with :math:`X = A F`.

    With ``is_sparse`` (one block, sparse rows) :math:`X` is never formed: the Gram matrix is accumulated from the
    ``k^2`` pairs of every row, and variances are gathered from the covariance of the unknowns.
    """

    whitened: WhitenedPrior
    design: Any
    """The design: sparse rows in the sparse case."""
    rows: Array
    columns: Array
    factor: Any
    """:math:`F` block by block, shape ``(b, n, n)``; None in the sparse case."""
    matrix: Any
    """:math:`X` block by block, shape ``(b, m, n)``; None in the sparse case."""
    precision: Array
    """Prior precision of :math:`w` block by block, shape ``(b, n, n)``; one on the diagonal at padding."""
    is_sparse: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(
        cls, prior: tuple[PriorBlock, ...], design: Design, rows: Array, columns: Array, is_sparse: bool
    ) -> CoefficientSpace:
        """Whiten the prior and carry the design over."""
        dtype = design.values.dtype if isinstance(design, SparseRows) else design.matrix.dtype
        whitened = WhitenedPrior.build(prior, dtype)
        if rows.shape[0] == 1:
            rows, columns = jnp.arange(design.num_rows)[None], jnp.arange(design.num_columns)[None]
            precision = whitened.precision.to_dense()[None]
            if is_sparse:
                return cls(whitened, design, rows, columns, None, None, precision, True)
            factor = whitened.factor.to_dense()[None]
            matrix = whitened.factor.apply_transpose(design.to_dense())[None]
            return cls(whitened, design, rows, columns, factor, matrix, precision, False)
        is_padding = (columns == design.num_columns).astype(dtype)
        precision = whitened.precision.take(columns) + is_padding[:, :, None] * jnp.eye(columns.shape[1], dtype=dtype)
        factor = whitened.factor.take(columns)
        matrix = design.take_blocks(rows, columns) @ factor
        return cls(whitened, design, rows, columns, factor, matrix, precision, False)

    def to_rows(self, local: Array) -> Array:
        """Values of shape ``(b, m)`` as ``(num_rows,)``."""
        if self.rows.shape[0] == 1:
            return local[0]
        return jnp.zeros((self.design.num_rows,), local.dtype).at[self.rows].set(local, mode="drop")

    def predictor(self, coordinates: Array) -> Array:
        """:math:`h = X w` of shape ``(num_rows,)`` for coordinates :math:`w` of shape ``(b, n)``."""
        if self.is_sparse:
            return self.design.matvec(self.unknowns(coordinates))
        return self.to_rows(jnp.einsum("bmn,bn->bm", self.matrix, coordinates))

    def unknowns(self, coordinates: Array) -> Array:
        """:math:`e = F w` of shape ``(..., num_columns)`` for ``w`` of shape ``(..., b, n)``."""
        if self.rows.shape[0] > 1:
            out = jnp.zeros((*coordinates.shape[:-2], self.design.num_columns), coordinates.dtype)
            coordinates = out.at[..., self.columns].set(coordinates, mode="drop")
        else:
            coordinates = coordinates[..., 0, :]
        return self.whitened.factor.apply(coordinates)

    def inner(self, a: Array, b: Array) -> Array:
        return jnp.einsum("bi,bij,bj->", a, self.precision, b)

    def zeros(self) -> Array:
        return jnp.zeros(self.precision.shape[:2], self.precision.dtype)

    def sequential_row(self, i: int | Array) -> Array:
        """The ``i``-th row of :math:`X` of every block, shape ``(b, n)``."""
        if not self.is_sparse:
            return self.matrix[:, i]
        row = jnp.zeros((self.design.num_columns,), self.precision.dtype)
        row = row.at[self.design.columns[i]].add(self.design.values[i])
        return self.whitened.factor.apply_transpose(row)[None]

    @jax.jit  # traced once for all that condition
    def condition(self, site_precision: Array, site_shift: Array) -> CoefficientPosterior:
        r"""The factorised matrix is the posterior precision :math:`H = P + X^T \mathrm{diag}(\tau) X` (Ko 2017, §2.1);
        it is positive definite exactly when the posterior is proper, whatever the signs of :math:`\tau`.
        """
        if self.is_sparse:
            transpose = self.whitened.factor.apply_transpose
            gram = gram_of_rows(self.design, site_precision)
            gram = transpose(transpose(gram).T)[None]
            shift = transpose(self.design.rmatvec(site_shift))[None]
        else:
            precision, local_shift = self._to_local(site_precision), self._to_local(site_shift)
            gram = (self.matrix * precision[:, :, None]).swapaxes(-1, -2) @ self.matrix
            shift = jnp.einsum("bmn,bm->bn", self.matrix, local_shift)
        factor = cholesky(self.precision + gram)
        white = solve_lower(factor, shift[:, :, None])
        return CoefficientPosterior(self, site_precision, factor, white[..., 0], solve_upper(factor, white)[..., 0])

    def _to_local(self, values: Array) -> Array:
        if self.rows.shape[0] == 1:
            return values[None]
        return values.at[self.rows].get(mode="fill", fill_value=0.0)


@frozen_pytree
class CoefficientPosterior(WhitenedPosterior):
    """The Gaussian of :meth:`CoefficientSpace.condition`."""

    space: CoefficientSpace
    site_precision: Array
    factor: Array
    """Cholesky factor :math:`R` of the posterior precision of :math:`w`, shape ``(b, n, n)``."""
    white_mean: Array
    """Shape ``(b, n)``."""
    coordinates: Array
    """Shape ``(b, n)``."""

    def row_variance(self) -> Array:
        if self.space.is_sparse:
            return quadratic_form(self.space.design, self._block_covariance())
        white = solve_lower(self.factor, self.space.matrix.swapaxes(-1, -2))
        return self.space.to_rows(jnp.sum(white**2, axis=-2))

    def log_volume(self) -> Array:
        return self.space.whitened.half_log_determinant - half_log_determinant(self.factor)

    def sequential_moments(self) -> tuple[Array, Array]:
        """Mean ``(b, n)`` and covariance ``(b, n, n)`` of :math:`w`."""
        return self.coordinates, cholesky_inverse(self.factor)

    def map_variance(self, design: Design) -> Array:
        if isinstance(design, DenseDesign) and self.space.rows.shape[0] == 1:
            return jnp.sum(self._white_map(design) ** 2, axis=0)
        return quadratic_form(design, self._block_covariance())

    def map_covariance(self, design: Design) -> Array:
        if isinstance(design, DenseDesign) and self.space.rows.shape[0] == 1:
            white = self._white_map(design)
            return white.T @ white
        return self._block_covariance().map_covariance(design)

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Exact draws of the unknowns by a triangular solve, shape ``(num_samples, num_columns)``."""
        noise = random.normal(rng_key, (*self.coordinates.shape, num_samples), self.factor.dtype)
        return self._colour(noise)

    def from_white(self, white: Array) -> Array:
        """Unknowns made of as many standard normal numbers, one to one; both of shape ``(num_columns,)``."""
        if self.space.rows.shape[0] == 1:
            return self._colour(white[None, :, None])[0]
        return self._colour(white.at[self.space.columns].get(mode="fill", fill_value=0.0)[..., None])[0]

    def _colour(self, noise: Array) -> Array:
        deviation = jnp.moveaxis(solve_upper(self.factor, noise), -1, 0)
        return self.space.unknowns(self.coordinates + deviation)

    def scale_tril(self) -> Array:
        """Lower factor of the covariance of the unknowns, for one block: ``(num_columns, num_columns)``.

        By orthogonal factorisation of a root of it, because the covariance itself may be numerically singular.
        """
        root = solve_lower(self.factor, self._dense_factor().swapaxes(-1, -2))[0]
        upper = jnp.linalg.qr(root, mode="r")
        return jnp.where(jnp.diagonal(upper) < 0, -1.0, 1.0) * upper.T

    def _dense_factor(self) -> Array:
        return self.space.whitened.factor.to_dense()[None] if self.space.factor is None else self.space.factor

    def _white_map(self, design: DenseDesign) -> Array:
        return solve_lower(self.factor[0], self.space.whitened.factor.apply_transpose(design.matrix).T)

    def _block_covariance(self) -> BlockCovariance:
        space = self.space
        root = solve_lower(self.factor, self._dense_factor().swapaxes(-1, -2))
        return BlockCovariance.build(root.swapaxes(-1, -2) @ root, space.columns, space.design.num_columns)
