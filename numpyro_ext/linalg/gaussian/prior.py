"""Independent zero-mean Gaussian blocks of a field, in the parameterisation in which the model gave them."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..cholesky import cholesky, cholesky_solve, half_log_determinant, inverse_lower, safe_sqrt, solve_lower
from ..frozen_pytree import frozen_pytree
from .block_diagonal import Part, repeated
from .sparse_prior import SparsePrecisionPrior

_LOG_2PI = math.log(2.0 * math.pi)


@frozen_pytree
class DiagonalPrior:
    """Independent unknowns with ``variance`` of shape ``(size,)``."""

    variance: Array

    @property
    def size(self) -> int:
        return self.variance.shape[0]

    def log_density(self, e: Array) -> Array:
        """Log density of ``e`` of shape ``(size,)``."""
        return -0.5 * jnp.sum(e**2 / self.variance + jnp.log(self.variance) + _LOG_2PI)

    def covariance_part(self) -> Array:
        """The covariance as a part of a :class:`~.block_diagonal.BlockDiagonal`."""
        return self.variance

    def scale_part(self) -> Array:
        """A factor ``F`` with ``F F^T`` the covariance, as a part of a block diagonal."""
        return safe_sqrt(self.variance)


@frozen_pytree
class CovariancePrior:
    """``count * batch`` independent blocks of ``width`` unknowns, ``covariance`` of shape ``(batch, width, width)``.

    The unknowns are ordered block after block, and blocks take the covariances in turn, ``count`` times over: what a
    plate of fields has in common is kept and factorised once. The covariance may be of low rank only if it is never
    factorised, so models keep a jitter on its diagonal.
    """

    covariance: Array
    count: int = dataclasses.field(default=1, metadata={"static": True})
    is_known_valid: bool = dataclasses.field(default=False, metadata={"static": True})
    """True if :func:`is_valid_prior` has been asked before, so that it need not factorise the covariance again."""

    @property
    def size(self) -> int:
        return self.count * self.covariance.shape[0] * self.covariance.shape[1]

    def log_density(self, e: Array) -> Array:
        """Log density of ``e`` of shape ``(size,)``."""
        factor = cholesky(self.covariance)
        white = solve_lower(factor, _side_by_side(e, self.covariance))
        log_diagonal = jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1))
        return -0.5 * (jnp.sum(white**2) + self.count * jnp.sum(2.0 * log_diagonal + _LOG_2PI))

    def covariance_part(self) -> Part:
        """The covariance as a part of a :class:`~.block_diagonal.BlockDiagonal`."""
        return repeated(self.covariance, self.count)

    def scale_part(self) -> Part:
        """A factor ``F`` with ``F F^T`` the covariance, as a part of a block diagonal."""
        return repeated(cholesky(self.covariance), self.count)


@frozen_pytree
class LowRankPrior:
    """Prior like :class:`CovariancePrior` of covariances ``factor @ factor^T + diag(diagonal)``.

    The unknowns are ``factor @ u + sqrt(diagonal) * noise`` of standard normal ``u`` and noise.
    """

    factor: Array
    """Shape ``(batch, width, rank)``."""
    diagonal: Array
    """Shape ``(batch, width)``; zeros are allowed wherever no density is asked for."""

    @property
    def size(self) -> int:
        return self.diagonal.shape[0] * self.diagonal.shape[1]

    def log_density(self, e: Array) -> Array:
        """Log density of ``e`` of shape ``(size,)``, at cost ``width * rank^2`` for each block."""
        scale = jnp.sqrt(self.diagonal)
        white = e.reshape(self.diagonal.shape) / scale
        factor = self.factor / scale[..., None]
        gram = factor.swapaxes(-1, -2) @ factor + jnp.eye(factor.shape[-1], dtype=factor.dtype)
        root = cholesky(gram)
        mean = cholesky_solve(root, jnp.einsum("bnm,bn->bm", factor, white))
        # of the nearest u: a sum of squares where Woodbury's identity takes a difference
        rest = white - jnp.einsum("bnm,bm->bn", factor, mean)
        log_volume = half_log_determinant(root) + jnp.sum(jnp.log(scale)) + 0.5 * self.size * _LOG_2PI
        return -0.5 * (jnp.sum(rest**2) + jnp.sum(mean**2)) - log_volume

    def draw(self, white: Array) -> Array:
        """Unknowns of a plausible size made of ``white`` of shape ``(size,)``, numbers that ``u`` and noise share."""
        white = white.reshape(self.diagonal.shape)
        rank = self.factor.shape[-1]
        copies = -(-rank // max(white.shape[1], 1))
        by_rank = jnp.tile(white[:, ::-1], (1, copies))[:, :rank]
        return (jnp.einsum("bnm,bm->bn", self.factor, by_rank) + safe_sqrt(self.diagonal) * white).reshape(-1)

    def dense(self) -> CovariancePrior:
        """The same prior by its covariances."""
        diagonal = self.diagonal[..., None] * jnp.eye(self.diagonal.shape[1], dtype=self.diagonal.dtype)
        return CovariancePrior(self.factor @ self.factor.swapaxes(-1, -2) + diagonal)

    def covariance_part(self) -> Part:
        """The covariance as a part of a :class:`~.block_diagonal.BlockDiagonal`."""
        return self.dense().covariance_part()

    def scale_part(self) -> Part:
        """A factor ``F`` with ``F F^T`` the covariance, as a part of a block diagonal."""
        return self.dense().scale_part()


@frozen_pytree
class PrecisionPrior:
    """Prior like :class:`CovariancePrior`, but given by ``precision`` of shape ``(batch, width, width)``."""

    precision: Array
    count: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def size(self) -> int:
        return self.count * self.precision.shape[0] * self.precision.shape[1]

    def log_density(self, e: Array) -> Array:
        """Log density of ``e`` of shape ``(size,)``."""
        factor = cholesky(self.precision)
        white = factor.swapaxes(-1, -2) @ _side_by_side(e, self.precision)
        log_diagonal = jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1))
        return -0.5 * (jnp.sum(white**2) + self.count * jnp.sum(_LOG_2PI - 2.0 * log_diagonal))

    def covariance_part(self) -> Part:
        """The covariance as a part of a :class:`~.block_diagonal.BlockDiagonal`."""
        scale = self._scale()
        return repeated(scale @ scale.swapaxes(-1, -2), self.count)

    def scale_part(self) -> Part:
        """A factor ``F`` with ``F F^T`` the covariance, as a part of a block diagonal."""
        return repeated(self._scale(), self.count)

    def precision_part(self) -> Part:
        """The precision as a part of a block diagonal."""
        return repeated(self.precision, self.count)

    def _scale(self) -> Array:
        return inverse_lower(cholesky(self.precision)).swapaxes(-1, -2)


@frozen_pytree
class FlatPrior:
    """``size`` unknowns with the constant (improper) density one."""

    size: int = dataclasses.field(metadata={"static": True})

    def log_density(self, e: Array) -> Array:
        """Zero: the density is one everywhere."""
        return jnp.zeros((), e.dtype)

    def covariance_part(self) -> Part:
        """Refused: a flat prior has no covariance.

        :raises ValueError: always.
        """
        raise ValueError("a flat prior has no covariance: condition in the space of the unknowns.")

    def scale_part(self) -> Part:
        """Refused like :meth:`covariance_part`.

        :raises ValueError: always.
        """
        return self.covariance_part()


def _side_by_side(e: Array, matrix: Array) -> Array:
    """Unknowns as columns, ``(batch, width, count)``, for matrices ``(batch, width, width)`` taken in turn."""
    return jnp.moveaxis(e.reshape(-1, *matrix.shape[:2]), 0, -1)


PriorBlock = DiagonalPrior | CovariancePrior | LowRankPrior | PrecisionPrior | FlatPrior | SparsePrecisionPrior


def num_flat(block: PriorBlock) -> int:
    """Number of directions along which the density of a block is constant."""
    if isinstance(block, FlatPrior):
        return block.size
    return block.num_flat if isinstance(block, SparsePrecisionPrior) else 0


def is_flat(block: PriorBlock) -> bool:
    """True if the density of a block is constant in some direction."""
    return num_flat(block) > 0


def extreme_eigenvalues(block: CovariancePrior | LowRankPrior | PrecisionPrior) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest eigenvalues of its matrices, shape ``(batch,)`` each; of low rank bounds of these."""
    if isinstance(block, LowRankPrior):
        diagonal = np.asarray(block.diagonal, float)
        norms = np.linalg.norm(np.asarray(block.factor, float), 2, axis=(1, 2))
        return diagonal.min(axis=1), norms**2 + diagonal.max(axis=1)
    matrices = block.covariance if isinstance(block, CovariancePrior) else block.precision
    values = np.linalg.eigvalsh(np.asarray(matrices, float))
    return values[:, 0], values[:, -1]


def is_valid_prior(prior: tuple[PriorBlock, ...]) -> Array:
    """True if all blocks have parameters of a Gaussian, as a scalar boolean array.

    Conditioning in observation space never factorises a prior covariance, so it would not notice an indefinite one. A
    variance of zero pins the unknown and is allowed. Costs a factorisation of every covariance or precision, but of a
    sparse one whose determinant is known.
    """

    def is_valid(block: PriorBlock) -> Array:
        if isinstance(block, FlatPrior):
            return jnp.asarray(True)
        if isinstance(block, DiagonalPrior):
            return jnp.all((block.variance >= 0) & (block.variance < jnp.inf))
        if isinstance(block, LowRankPrior):
            is_positive = (block.diagonal >= 0) & (block.diagonal < jnp.inf)
            return jnp.all(is_positive) & jnp.all(jnp.isfinite(block.factor))
        if isinstance(block, SparsePrecisionPrior):
            return jnp.isfinite(block.log_determinant())
        if isinstance(block, CovariancePrior) and block.is_known_valid:
            return jnp.asarray(True)
        factor = cholesky(block.covariance if isinstance(block, CovariancePrior) else block.precision)
        return jnp.all(jnp.isfinite(jnp.diagonal(factor, axis1=-2, axis2=-1)))

    return jnp.all(jnp.stack([is_valid(block) for block in prior]))
