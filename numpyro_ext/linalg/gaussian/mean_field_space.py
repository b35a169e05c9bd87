"""Gaussians of independent unknowns: the mean of the Gaussian that sites give, with a diagonal covariance."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, random

from ..cholesky import cholesky, half_log_determinant, inverse_lower
from ..frozen_pytree import frozen_pytree
from .conditioning import LinearGaussian, LinearGaussianPosterior
from .design import AnyDesign, Design
from .prior import CovariancePrior, DiagonalPrior, FlatPrior, LowRankPrior, PriorBlock
from .sparse_prior import SparsePrecisionPrior

_LOG_2PI = math.log(2.0 * math.pi)


class PredictorMoments(NamedTuple):
    """Means and variances of the predictors without their offset, shape ``(num_rows,)``."""

    mean: Array
    variance: Array


@frozen_pytree
class MeanFieldSpace:
    r"""A prior to be conditioned on sites, of which only the diagonal of the posterior precision is kept.

    With prior precision :math:`P` and sites :math:`\tau` of the predictors :math:`A e`, the unknowns are independent
    with variances :math:`1 / (P_{jj} + \sum_i \tau_i A_{ij}^2)`. Their means are those of the joint Gaussian. At the
    sites that the slopes of the expected log factors ask for, that is the stationary point of the bound among
    Gaussians with diagonal covariance (Opper and Archambeau 2009, section 4).

    >>> from numpyro_ext.linalg.gaussian.design import DenseDesign
    >>> from numpyro_ext.linalg.gaussian.conditioning import linear_gaussian
    >>> prior = (CovariancePrior(jnp.array([[[1.0, 0.6], [0.6, 1.0]]])),)
    >>> rows = jnp.arange(2)[None]
    >>> design = DenseDesign(jnp.eye(2))
    >>> space = MeanFieldSpace.build(linear_gaussian(prior, design, rows, rows), prior, design)
    >>> print(space.condition(jnp.ones(2), jnp.ones(2)).variance)  # the joint Gaussian has 0.451 twice
    [0.3902 0.3902]
    """

    joint: LinearGaussian
    squared_design: Design
    conditional_variance: Array
    """Prior variances of the unknowns given all others, infinite under flat priors, shape ``(num_columns,)``."""
    log_excess: Array
    """Half the log determinant of the prior covariance of the proper unknowns, less that of the diagonal matrix of the
    conditional variances; zero for independent unknowns."""

    @classmethod
    def build(cls, joint: LinearGaussian, prior: tuple[PriorBlock, ...], design: AnyDesign) -> MeanFieldSpace:
        """Take the diagonal of the precision of every block, which costs one factorisation of a correlated block."""
        dtype = joint.zeros().dtype
        parts = [_conditional_variance(block, dtype) for block in prior]
        excess = jnp.zeros((), dtype) + sum(excess for _, excess in parts)
        return cls(joint, design.squared(), jnp.concatenate([variance for variance, _ in parts]), excess)

    def condition(self, site_precision: Array, site_shift: Array) -> MeanFieldPosterior:
        """Posterior under sites, whose precisions may be negative while the sums for the unknowns are positive."""
        joint = self.joint.condition(site_precision, site_shift)
        gained = self.squared_design.rmatvec(site_precision)
        is_flat = jnp.isinf(self.conditional_variance)
        finite = jnp.where(is_flat, 1.0, self.conditional_variance)
        total = jnp.where(is_flat, gained, 1.0 + finite * gained)
        # An unknown without a density, or a negative precision: improper.
        variance = jnp.where(total > 0.0, finite / jnp.where(total > 0.0, total, 1.0), jnp.nan)
        return MeanFieldPosterior(self, joint, variance)


@frozen_pytree
class MeanFieldPosterior:
    """Independent unknowns, as :meth:`MeanFieldSpace.condition` returns them; nan where improper."""

    space: MeanFieldSpace
    joint: LinearGaussianPosterior
    """Has the same means."""
    variance: Array
    """Variances of the unknowns, shape ``(num_columns,)``."""

    def unknowns(self) -> Array:
        """Means of the unknowns, shape ``(num_columns,)``."""
        return self.joint.unknowns()

    def marginals(self) -> PredictorMoments:
        """Means and variances of the predictors."""
        mean = self.space.joint.predictor(self.joint.coordinates)
        return PredictorMoments(mean, self.space.squared_design.matvec(self.variance))

    def divergence(self) -> Array:
        """Kullback-Leibler divergence from the prior; flat unknowns have density one."""
        prior = self.space.conditional_variance
        is_flat, is_free = jnp.isinf(prior), prior > 0.0
        ratio = jnp.where(is_flat | ~is_free, 1.0, self.variance / jnp.where(is_free & ~is_flat, prior, 1.0))
        log_ratio = jnp.where(is_flat, jnp.log(self.variance) + _LOG_2PI + 1.0, jnp.log(ratio))
        coordinates = self.joint.coordinates
        distance = self.space.joint.inner(coordinates, coordinates)
        return 0.5 * (distance + jnp.sum(ratio - 1.0 - log_ratio)) + self.space.log_excess

    def map_variance(self, design: Design) -> Array:
        """Variances of ``J e`` for a design ``J``, shape ``(rows of J,)``."""
        return design.squared().matvec(self.variance)

    def map_covariance(self, design: Design) -> Array:
        """Covariance of ``J e`` for a design ``J``, shape ``(rows of J, rows of J)``."""
        matrix = design.to_dense()
        return (matrix * self.variance) @ matrix.T

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Draws of the unknowns, shape ``(num_samples, num_columns)``."""
        noise = random.normal(rng_key, (num_samples, self.variance.shape[0]), self.variance.dtype)
        return self.unknowns() + jnp.sqrt(self.variance) * noise

    def scale_tril(self) -> Array:
        """Cholesky factor of the covariance of the unknowns: a diagonal matrix."""
        return jnp.diag(jnp.sqrt(self.variance))


def expected_log_prior(prior: tuple[PriorBlock, ...], mean: Array, variance: Array) -> Array:
    """Expected log density of the prior under independent unknowns; a scalar, differentiable in the prior.

    :param tuple prior: the blocks. Unknowns that one pins by a variance of zero do not enter.
    :param Array mean: means of the unknowns, shape ``(num_columns,)``.
    :param Array variance: variances of the unknowns, shape ``(num_columns,)``.
    """
    total, start = jnp.zeros((), mean.dtype), 0
    for block in prior:
        m, v = mean[start : start + block.size], variance[start : start + block.size]
        start += block.size
        if isinstance(block, DiagonalPrior):
            is_free = block.variance > 0.0
            safe = jnp.where(is_free, block.variance, 1.0)
            total += jnp.sum(jnp.where(is_free, -0.5 * ((m**2 + v) / safe + jnp.log(safe) + _LOG_2PI), 0.0))
        elif not isinstance(block, FlatPrior):
            conditional, _ = _conditional_variance(block, mean.dtype)
            total += block.log_density(m) - 0.5 * jnp.sum(v / conditional)
    return total


def _conditional_variance(block: PriorBlock, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Variances given all other unknowns, and half the log determinant of the covariance relative to theirs."""
    zero = jnp.zeros((), dtype)
    if isinstance(block, FlatPrior):
        return jnp.full((block.size,), jnp.inf, dtype), zero
    if isinstance(block, DiagonalPrior):
        return block.variance, zero
    if isinstance(block, SparsePrecisionPrior):
        if block.directions is not None:
            raise ValueError(
                "unknowns of a field that adds up to zero, or is flat, are not independent: take covariance='full'."
            )
        diagonal = block.values[block.pattern.diagonal]
        return 1.0 / diagonal, 0.5 * (jnp.sum(jnp.log(diagonal)) - block.log_determinant())
    if isinstance(block, LowRankPrior):
        block = block.dense()
    if isinstance(block, CovariancePrior):
        factor = cholesky(block.covariance)
        precision = jnp.sum(jnp.square(inverse_lower(factor)), axis=-2).reshape(-1)
        half_log = half_log_determinant(factor)
    else:
        precision = jnp.diagonal(block.precision, axis1=-2, axis2=-1).reshape(-1)
        half_log = -half_log_determinant(cholesky(block.precision))
    excess = half_log + 0.5 * jnp.sum(jnp.log(precision))
    return jnp.tile(1.0 / precision, block.count), block.count * excess
