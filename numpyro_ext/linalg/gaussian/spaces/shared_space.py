"""Conditioning many blocks that are alike: one factorisation serves them all."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, random

from ...cholesky import cholesky, half_log_determinant, solve_lower, solve_upper
from ...frozen_pytree import frozen_pytree
from ..block_diagonal import BlockCovariance, BlockDiagonal, quadratic_form
from ..design import Design
from ..marginals import GaussianSpace, NotSequential, WhitenedPosterior
from ..prior import PriorBlock


@frozen_pytree
class SharedSpace(GaussianSpace, NotSequential):
    r"""Blocks of unknowns :math:`e_b = F w_b` seen through :math:`h_b = X w_b`, with one :math:`F` and one :math:`X`.

    Blocks have the same prior, the same linear map, and sites of the same precisions; only the shifts differ. Then all
    have the same posterior covariance. Where this does not hold, to rounding, the posterior is nan.

    >>> from numpyro_ext.linalg.gaussian.design import DenseDesign
    >>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
    >>> prior, design = (DiagonalPrior(jnp.ones(2)),), DenseDesign(jnp.eye(2))
    >>> space = SharedSpace.build(prior, design, jnp.arange(2)[:, None], jnp.arange(2)[:, None])
    >>> print(space.condition(jnp.ones(2), jnp.array([1.0, 3.0])).unknowns().round(3))
    [0.5 1.5]
    >>> print(space.condition(jnp.array([1.0, 2.0]), jnp.ones(2)).unknowns())
    [nan nan]
    """

    design: Any
    rows: Array
    columns: Array
    factor: Array
    """:math:`F`, the Cholesky factor of the prior covariance of a block, shape ``(n, n)``."""
    matrix: Array
    """:math:`X`, shape ``(m, n)``."""

    @classmethod
    def build(cls, prior: tuple[PriorBlock, ...], design: Design, rows: Array, columns: Array) -> SharedSpace:
        """Compare the blocks and factorise the prior covariance of the first.

        :param tuple prior: the prior blocks, none of them flat.
        :param Design design: the linear map from unknowns to predictors.
        :param jax.Array rows: rows of each block, shape ``(b, m)``, without padding.
        :param jax.Array columns: columns of each block, shape ``(b, n)``, without padding.
        :raises ValueError: for a flat prior.
        """
        covariances = BlockDiagonal(tuple(block.covariance_part() for block in prior)).take(columns)
        matrices = design.take_blocks(rows, columns)
        is_padded = jnp.any(rows == design.num_rows) | jnp.any(columns == design.num_columns)
        is_shared = _are_equal(covariances) & _are_equal(matrices) & ~is_padded
        factor = cholesky(covariances[0]) * jnp.where(is_shared, 1.0, jnp.nan)
        return cls(design, rows, columns, factor, matrices[0] @ factor)

    def to_rows(self, local: Array) -> Array:
        """Values of shape ``(b, m)`` as ``(num_rows,)``."""
        return jnp.zeros((self.design.num_rows,), local.dtype).at[self.rows].set(local)

    def predictor(self, coordinates: Array) -> Array:
        """:math:`h = X w` of shape ``(num_rows,)`` for coordinates :math:`w` of shape ``(b, n)``."""
        return self.to_rows(coordinates @ self.matrix.T)

    def unknowns(self, coordinates: Array) -> Array:
        """:math:`e = F w` of shape ``(..., num_columns)`` for ``w`` of shape ``(..., b, n)``."""
        out = jnp.zeros((*coordinates.shape[:-2], self.design.num_columns), coordinates.dtype)
        return out.at[..., self.columns].set(coordinates @ self.factor.T)

    def inner(self, a: Array, b: Array) -> Array:
        return jnp.sum(a * b)

    def zeros(self) -> Array:
        return jnp.zeros(self.columns.shape, self.factor.dtype)

    def condition(self, site_precision: Array, site_shift: Array) -> SharedPosterior:
        r"""Cost: ``n^3 + m n^2`` once, and ``n^2 + m n`` for each block.

        :param jax.Array site_precision: :math:`\tau`, shape ``(num_rows,)``, the same in all blocks.
        :return: the posterior; all nan where it is improper or the precisions differ.
        """
        precision = site_precision[self.rows]
        gram = (self.matrix * precision[0][:, None]).T @ self.matrix
        factor = cholesky(jnp.eye(len(gram), dtype=gram.dtype) + gram)
        factor = factor * jnp.where(_are_equal(precision), 1.0, jnp.nan)
        white = solve_lower(factor, (site_shift[self.rows] @ self.matrix).T)
        return SharedPosterior(self, site_precision, factor, white.T, solve_upper(factor, white).T)


@frozen_pytree
class SharedPosterior(WhitenedPosterior, NotSequential):
    """The Gaussian of :meth:`SharedSpace.condition`."""

    space: SharedSpace
    site_precision: Array
    factor: Array
    """Cholesky factor :math:`R` of the posterior precision of :math:`w`, shape ``(n, n)``."""
    white_mean: Array
    """Shape ``(b, n)``."""
    coordinates: Array
    """Shape ``(b, n)``."""

    def row_variance(self) -> Array:
        variance = jnp.sum(solve_lower(self.factor, self.space.matrix.T) ** 2, axis=0)
        return self.space.to_rows(jnp.broadcast_to(variance, self.space.rows.shape))

    def log_volume(self) -> Array:
        return -len(self.coordinates) * half_log_determinant(self.factor)

    def map_variance(self, design: Design) -> Array:
        return quadratic_form(design, self._block_covariance())

    def map_covariance(self, design: Design) -> Array:
        return self._block_covariance().map_covariance(design)

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        num_blocks, size = self.coordinates.shape
        noise = random.normal(rng_key, (size, num_samples * num_blocks), self.factor.dtype)
        deviation = solve_upper(self.factor, noise).T.reshape(num_samples, num_blocks, size)
        return self.space.unknowns(self.coordinates + deviation)

    def _block_covariance(self) -> BlockCovariance:
        space = self.space
        root = solve_lower(self.factor, space.factor.T)
        matrix = jnp.broadcast_to(root.T @ root, (len(space.columns), *root.shape))
        return BlockCovariance.build(matrix, space.columns, space.design.num_columns)


def _are_equal(blocks: Array) -> Array:
    """True if all entries on the first axis are the same to rounding, as a scalar boolean."""
    slack = 100 * jnp.finfo(blocks.dtype).eps
    return jnp.all(jnp.abs(blocks - blocks[:1]) <= slack * jnp.max(jnp.abs(blocks)))
