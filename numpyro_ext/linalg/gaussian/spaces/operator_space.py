"""Conditioning a Gaussian on sites in the space of independent unknowns, of rows that are known by their products."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax, random

from ...cholesky import cholesky, half_log_determinant, inverse_lower_in_blocks, solve_lower, solve_upper
from ...frozen_pytree import frozen_pytree
from ..design import AnyDesign, OperatorRows
from ..marginals import NotSequential, WhitenedPosterior
from ..prior import DiagonalPrior, FlatPrior, PriorBlock
from .one_block import IndependentUnknowns

_AT_A_TIME = 64
"""Vectors that are multiplied at once."""


def has_independent_unknowns(prior: tuple[PriorBlock, ...]) -> bool:
    """True if the space of operators can hold the prior."""
    return all(isinstance(block, DiagonalPrior | FlatPrior) for block in prior)


@frozen_pytree
class OperatorSpace(IndependentUnknowns):
    r"""Unknowns :math:`e = s \circ w` with a diagonal prior, seen through :math:`h = A e` without rows written down.

    The posterior precision is made of products with unit vectors, and variances of the rows are those of products with
    the rows of an inverse Cholesky factor: next to a factorisation, a triangular inverse and three products for each
    unknown. Memory: four matrices of all pairs of unknowns.
    """

    design: OperatorRows

    @classmethod
    def build(cls, prior: tuple[PriorBlock, ...], design: OperatorRows) -> OperatorSpace:
        """Whiten the prior."""
        return cls.whiten(prior, design, design.weight.dtype)

    def condition(self, site_precision: Array, site_shift: Array) -> OperatorPosterior:
        number = jnp.arange(self.scale.size)

        def row_of_precision(i: Array) -> Array:
            is_own = number == i
            seen = self.design.matvec(jnp.where(is_own, self.scale, 0.0))
            return self.scale * self.design.rmatvec(site_precision * seen) + jnp.where(is_own, self.precision, 0.0)

        factor = cholesky(lax.map(row_of_precision, number, batch_size=_AT_A_TIME))
        white = solve_lower(factor, (self.scale * self.design.rmatvec(site_shift))[:, None])
        return OperatorPosterior(self, site_precision, factor, white[:, 0], solve_upper(factor, white).T)


@frozen_pytree
class OperatorPosterior(WhitenedPosterior, NotSequential):
    """The Gaussian of :meth:`OperatorSpace.condition`."""

    space: OperatorSpace
    site_precision: Array
    factor: Array
    """Cholesky factor :math:`R` of the posterior precision of :math:`w`, shape ``(N, N)``."""
    white_mean: Array
    coordinates: Array
    """Shape ``(1, N)``."""

    def row_variance(self) -> Array:
        return self.map_variance(self.space.design)

    def log_volume(self) -> Array:
        return self.space.half_log_determinant - half_log_determinant(self.factor)

    def map_variance(self, design: AnyDesign) -> Array:

        def add(total: Array, root: Array) -> tuple[Array, None]:
            return total + jnp.sum(jnp.square(design.matvec(self.space.scale * root)), axis=0), None

        roots = inverse_lower_in_blocks(self.factor)
        missing = -len(roots) % _AT_A_TIME
        chunks = jnp.pad(roots, ((0, missing), (0, 0))).reshape(-1, _AT_A_TIME, len(roots))
        return lax.scan(add, jnp.zeros((design.num_rows,), roots.dtype), chunks)[0]

    def map_covariance(self, design: AnyDesign) -> Array:
        white = solve_lower(self.factor, (design.to_dense() * self.space.scale).T)
        return white.T @ white

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Exact draws of the unknowns by a triangular solve, shape ``(num_samples, N)``."""
        noise = random.normal(rng_key, (self.white_mean.size, num_samples), self.white_mean.dtype)
        return self._colour(noise)

    def from_white(self, white: Array) -> Array:
        """Unknowns made of as many standard normal numbers, one to one; both of shape ``(num_columns,)``."""
        return self._colour(white[:, None])[0]

    def _colour(self, noise: Array) -> Array:
        return self.space.scale * (self.coordinates + solve_upper(self.factor, noise).T)
