"""Conditioning a Gaussian on sites in the space of the unknowns where rows touch only unknowns near each other."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, random

from ...frozen_pytree import frozen_pytree
from ..block_tridiagonal import BlockTridiagonal, BlockTridiagonalFactor
from ..design import AnyDesign, Design, SparseRows
from ..marginals import NotSequential, WhitenedPosterior
from ..prior import DiagonalPrior, FlatPrior, PriorBlock
from ..row_pairs import sum_pairs
from .one_block import IndependentUnknowns

# Below this width, steps of the loops over blocks cost more than the arithmetic in them.
_SMALLEST_BLOCK = 32


def can_be_banded(prior: tuple[PriorBlock, ...], design: AnyDesign) -> bool:
    """True if the posterior precision is a band: independent unknowns and rows whose extent is known."""
    is_independent = all(isinstance(block, DiagonalPrior | FlatPrior) for block in prior)
    return is_independent and isinstance(design, SparseRows) and design.bandwidth is not None


def is_worth_banding(design: AnyDesign) -> bool:
    """True if a band of blocks is much smaller than the matrix."""
    assert isinstance(design, SparseRows) and design.bandwidth is not None  # see can_be_banded
    return _is_narrow(design.bandwidth, design.num_columns)


def known_bandwidth(bandwidth: int, num_columns: int) -> int:
    """The bandwidth of a design as far as it is of use: that of a full matrix where the band is not narrow.

    So designs whose rows lie elsewhere have equal static facts, and share compiled programs.
    """
    return bandwidth if _is_narrow(bandwidth, num_columns) else max(num_columns - 1, 0)


def _is_narrow(bandwidth: int, num_columns: int) -> bool:
    # With blocks of a third of the unknowns all steps of the loops still cost no more than four full factorisations.
    return max(3 * bandwidth, 8 * _SMALLEST_BLOCK) <= num_columns


@frozen_pytree
class BandedSpace(IndependentUnknowns):
    r"""Unknowns :math:`e = s \circ w` with a diagonal prior, each row touching a stretch of at most ``bandwidth + 1``.

    The posterior precision is block tridiagonal with blocks as wide as the band, so that a factorisation and all
    variances of the rows cost ``O(N b^2)`` and memory ``O(N b)``: images and time series of any length.
    """

    design: SparseRows

    @classmethod
    def build(cls, prior: tuple[PriorBlock, ...], design: SparseRows) -> BandedSpace:
        """Whiten the prior."""
        return cls.whiten(prior, design, design.values.dtype)

    @property
    def width(self) -> int:
        """Unknowns per block of the precision."""
        return max(self.design.bandwidth or 0, _SMALLEST_BLOCK)

    @property
    def num_blocks(self) -> int:
        """Blocks of the precision; the last one may be padded."""
        return -(-self.design.num_columns // self.width)

    def condition(self, site_precision: Array, site_shift: Array) -> BandedPosterior:
        rows = self.design.scale_columns(self.scale)
        gram = BlockTridiagonal.from_rows(rows.columns, rows.values, site_precision, self.num_blocks, self.width)
        padding = jnp.ones((self.num_blocks * self.width - self.scale.size,), self.precision.dtype)
        own = jnp.concatenate([self.precision, padding]).reshape(self.num_blocks, self.width)
        diagonal = gram.diagonal + own[:, :, None] * jnp.eye(self.width, dtype=own.dtype)
        factor = gram._replace(diagonal=diagonal).factorise()
        shift = self.to_blocks(self.scale * self.design.rmatvec(site_shift))
        white = factor.solve_lower(shift)
        return BandedPosterior(self, site_precision, factor, white, self.from_blocks(factor.solve_upper(white))[None])

    def to_blocks(self, x: Array) -> Array:
        """Values of shape ``(N,)`` or ``(N, r)`` as ``(K, b, r)``, padded with zeros."""
        x = x.reshape(self.scale.size, -1)
        x = jnp.pad(x, ((0, self.num_blocks * self.width - x.shape[0]), (0, 0)))
        return x.reshape(self.num_blocks, self.width, x.shape[1])

    def from_blocks(self, x: Array) -> Array:
        """The inverse of :meth:`to_blocks` for ``r = 1``: shape ``(N,)``."""
        return x.reshape(-1)[: self.scale.size]


@frozen_pytree
class BandedPosterior(WhitenedPosterior, NotSequential):
    """The Gaussian of :meth:`BandedSpace.condition`."""

    space: BandedSpace
    site_precision: Array
    factor: BlockTridiagonalFactor
    white_mean: Array
    coordinates: Array
    """Shape ``(1, N)``."""

    def row_variance(self) -> Array:
        return self._variance_of_rows(self.space.design)

    def log_volume(self) -> Array:
        return self.space.half_log_determinant - self.factor.half_log_determinant()

    def map_variance(self, design: Design) -> Array:
        if isinstance(design, SparseRows) and design.bandwidth is not None and design.bandwidth <= self.space.width:
            return self._variance_of_rows(design)
        return jnp.sum(self._white_map(design) ** 2, axis=(0, 1))

    def map_covariance(self, design: Design) -> Array:
        white = self._white_map(design)
        return jnp.einsum("kbi,kbj->ij", white, white)

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Exact draws of the unknowns by triangular solves, shape ``(num_samples, N)``."""
        noise = random.normal(rng_key, (*self.white_mean.shape[:2], num_samples), self.white_mean.dtype)
        return self._colour(noise)

    def from_white(self, white: Array) -> Array:
        """Unknowns made of as many standard normal numbers, one to one; both of shape ``(num_columns,)``."""
        return self._colour(self.space.to_blocks(white))[0]

    def _colour(self, noise: Array) -> Array:
        deviation = self.factor.solve_upper(noise).reshape(-1, noise.shape[-1])[: self.space.scale.size]
        return self.space.scale * (self.coordinates + deviation.T)

    def _variance_of_rows(self, design: SparseRows) -> Array:
        inverse = self.factor.selected_inverse()
        rows = design.scale_columns(self.space.scale)
        return sum_pairs(rows.columns, rows.values, inverse.entries)

    def _white_map(self, design: Design) -> Array:
        rows = design.to_dense() * self.space.scale
        return self.factor.solve_lower(self.space.to_blocks(rows.T))
