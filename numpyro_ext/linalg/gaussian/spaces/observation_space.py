"""Conditioning a Gaussian on sites in the space of the predictors: one factorisation of size ``rows`` per block."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax, random

from ...cholesky import (
    cholesky,
    cholesky_solve,
    divide_by_upper,
    half_log_determinant,
    safe_sqrt,
    solve_lower,
    solve_upper,
)
from ...frozen_pytree import frozen_pytree
from ..block_diagonal import BlockCovariance, BlockDiagonal, cross_product, quadratic_form
from ..design import Design, SparseRows
from ..marginals import ConditionedGaussian, GaussianSpace, Marginals
from ..posterior_root import from_white, posterior_root
from ..prior import PriorBlock
from ..row_pairs import gram_of_rows

_LEAST_DIGITS = 1e-8
"""Rounding of a posterior covariance, relative to it, up to which it is the prior's less a gain."""


@frozen_pytree
class ObservationSpace(GaussianSpace):
    r"""Unknowns :math:`e \sim N(0, C)` seen through :math:`h = A e` with prior covariance :math:`K = A C A^T`.

    Nothing is inverted: :math:`K` may be singular (two rows with one predictor), and it is never factorised.
    """

    prior: tuple[PriorBlock, ...]
    design: Design
    rows: Array
    """Rows of each block, shape ``(b, m)``, padded with ``num_rows``."""
    columns: Array
    """Columns of each block, shape ``(b, n)``, padded with ``num_columns``."""
    covariance: Array
    """:math:`K` block by block, shape ``(b, m, m)``; zero at padding."""
    is_signed: bool = dataclasses.field(metadata={"static": True})
    """True if site precisions may be negative, which costs a second factorisation."""

    @classmethod
    def build(
        cls, prior: tuple[PriorBlock, ...], design: Design, rows: Array, columns: Array, is_signed: bool
    ) -> ObservationSpace:
        """Form :math:`K`; all priors must be proper."""
        if rows.shape[0] == 1:
            rows, columns = jnp.arange(design.num_rows)[None], jnp.arange(design.num_columns)[None]
            covariance = cross_product(design, _covariance(prior), design)[None]
        else:
            local = design.take_blocks(rows, columns)
            covariance = local @ _covariance(prior).take(columns) @ local.swapaxes(-1, -2)
        return cls(prior, design, rows, columns, covariance, is_signed)

    def to_local(self, values: Array) -> Array:
        """Values of shape ``(..., num_rows)`` as ``(..., b, m)``, zero at padding."""
        if self.rows.shape[0] == 1:
            return values[..., None, :]
        return values.at[..., self.rows].get(mode="fill", fill_value=0.0)

    def to_rows(self, local: Array) -> Array:
        """Undo :meth:`to_local`."""
        if self.rows.shape[0] == 1:
            return local[..., 0, :]
        out = jnp.zeros((*local.shape[:-2], self.design.num_rows), local.dtype)
        return out.at[..., self.rows].set(local, mode="drop")

    def predictor(self, coordinates: Array) -> Array:
        """:math:`h = K a` of shape ``(num_rows,)`` for coordinates :math:`a` of shape ``(b, m)``."""
        return self.to_rows(_matvec(self.covariance, coordinates))

    def unknowns(self, coordinates: Array) -> Array:
        """:math:`e = C A^T a` of shape ``(num_columns,)``."""
        return _covariance(self.prior).apply(self.design.rmatvec(self.to_rows(coordinates)))

    def inner(self, a: Array, b: Array) -> Array:
        """The prior's quadratic form :math:`e_a^T C^{-1} e_b = a^T K b` between two coordinates."""
        return jnp.sum(a * _matvec(self.covariance, b))

    def zeros(self) -> Array:
        return jnp.zeros(self.covariance.shape[:2], self.covariance.dtype)

    def sequential_row(self, i: int | Array) -> Array:
        """The ``i``-th row of every block in the coordinates of :meth:`ObservationPosterior.sequential_moments`."""
        num_blocks, num_rows = self.covariance.shape[:2]
        return jnp.zeros((num_blocks, num_rows), self.covariance.dtype).at[:, i].set(1.0)

    def condition(self, site_precision: Array, site_shift: Array) -> ObservationPosterior:
        r"""With :math:`S = \mathrm{diag}(\tau)` the factorised matrix is :math:`B = I + S^{1/2} K S^{1/2}` (Ko 2017,
        §2.1; Rasmussen and Williams 2006, eq. 3.26), whose eigenvalues are at least one. Negative precisions
        enter in a second stage, after the positive ones, as
        :math:`B_- = I - S_-^{1/2} \Xi_+ S_-^{1/2}`, positive definite exactly when the posterior is proper.
        """
        precision, shift = self.to_local(site_precision), self.to_local(site_shift)
        root = safe_sqrt(precision)
        gram = root[:, :, None] * self.covariance * root[:, None, :]
        factor = cholesky(gram + jnp.eye(gram.shape[-1], dtype=gram.dtype))
        positive = ObservationPosterior(self, precision, shift, root, factor, jnp.zeros_like(shift))
        if not self.is_signed:
            return dataclasses.replace(positive, coordinates=positive.reduce_shift(shift))
        gain = positive.whitened_gain()
        reduced = self.covariance - gain.swapaxes(-1, -2) @ gain
        negative_root = safe_sqrt(-precision)
        gram = negative_root[:, :, None] * reduced * negative_root[:, None, :]
        negative_factor = cholesky(jnp.eye(gram.shape[-1], dtype=gram.dtype) - gram)
        mean = _matvec(reduced, shift)
        shift_plus = shift + negative_root * cholesky_solve(negative_factor, negative_root * mean)
        negative = NegativeStage(negative_root, negative_factor, gain, reduced)
        return ObservationPosterior(self, precision, shift, root, factor, positive.reduce_shift(shift_plus), negative)


@frozen_pytree
class NegativeStage:
    """Contribution of the negative site precisions to a posterior that holds the positive ones already."""

    root: Array
    factor: Array
    gain: Array
    covariance: Array
    """Covariance of the predictors before this stage."""


@frozen_pytree
class ObservationPosterior(ConditionedGaussian):
    """The Gaussian of :meth:`ObservationSpace.condition`; arrays of its blocks have shape ``(b, m, ...)``."""

    space: ObservationSpace
    site_precision: Array
    site_shift: Array
    root: Array
    factor: Array
    coordinates: Array
    """:math:`a` with posterior mean :math:`E[h] = K a`, shape ``(b, m)``."""
    negative: NegativeStage | None = None

    def reduce_shift(self, x: Array) -> Array:
        r""":math:`(I + S_+ K)^{-1} x`, with divisions by :math:`S^{1/2}` instead of a difference of large numbers."""
        root = self.root
        has_root = root > 0
        direct = jnp.where(has_root, 0.0, x)
        scaled = jnp.where(has_root, x / jnp.where(has_root, root, 1.0), 0.0)
        scaled -= root * _matvec(self.space.covariance, direct)
        return direct + root * cholesky_solve(self.factor, scaled)

    def whitened_gain(self) -> Array:
        r""":math:`V = L^{-1} S^{1/2} K`, so that :math:`\Xi_+ = K - V^T V`; shape ``(b, m, m)``."""
        return solve_lower(self.factor, self.root[:, :, None] * self.space.covariance)

    def marginals(self) -> Marginals:
        """Moments of every predictor and the log partition function; one triangular solve with ``m`` right sides."""
        space, precision = self.space, self.site_precision
        prior_variance = jnp.diagonal(space.covariance, axis1=-2, axis2=-1)
        mean = _matvec(space.covariance, self.coordinates)
        log_partition = 0.5 * jnp.sum(self.site_shift * mean) + self.log_volume()
        gain = self.whitened_gain() if self.negative is None else self.negative.gain
        squares = gain**2
        plain = prior_variance - jnp.sum(squares, axis=-2)
        # diag(B^-1) = 1 - tau * variance. Below the diagonal V equals -L^-1 S^(-1/2), so the sum is one of positive
        # terms; it gives both the cavity and, for sites that dominate, the variance without cancellation.
        positive_precision = self.root**2
        inverse_diagonal = jnp.diagonal(self.factor, axis1=-2, axis2=-1) ** -2
        below = jnp.sum(jnp.tril(squares, -1), axis=-2)
        ratio = inverse_diagonal + positive_precision * below
        dominates = positive_precision * prior_variance > 1.0
        variance = jnp.where(dominates, (1.0 - ratio) / jnp.where(dominates, positive_precision, 1.0), plain)
        if self.negative is not None:
            extra = solve_lower(self.negative.factor, self.negative.root[:, :, None] * self.negative.covariance)
            extra = jnp.sum(extra**2, axis=-2)
            variance, ratio = variance + extra, ratio - precision * extra
            ratio = jnp.where(precision < 0, 1.0 - precision * variance, ratio)
        return Marginals(space.to_rows(mean), space.to_rows(variance), space.to_rows(ratio), log_partition)

    def log_volume(self) -> Array:
        r""":math:`-\frac12 \log|B|`, the log ratio of posterior to prior volume."""
        log_volume = -half_log_determinant(self.factor)
        return log_volume if self.negative is None else log_volume - half_log_determinant(self.negative.factor)

    def sequential_moments(self) -> tuple[Array, Array]:
        """Mean ``(b, m)`` and covariance ``(b, m, m)`` of the predictors of every block."""
        mean = _matvec(self.space.covariance, self.coordinates)
        if self.negative is None:
            gain = self.whitened_gain()
            return mean, self.space.covariance - gain.swapaxes(-1, -2) @ gain
        return mean, self._conditioned(self.space.covariance, self.space.covariance)

    def unknowns(self) -> Array:
        return self.space.unknowns(self.coordinates)

    def map_variance(self, design: Design) -> Array:
        if self.space.rows.shape[0] > 1:
            return quadratic_form(design, self._block_covariance())
        prior = _covariance(self.space.prior)
        cross = cross_product(self.space.design, prior, design)
        removed, added = self._whitened(cross[None])
        return quadratic_form(design, prior) - jnp.sum(removed**2, (0, 1)) + jnp.sum(added**2, (0, 1))

    def map_covariance(self, design: Design) -> Array:
        if self.space.rows.shape[0] > 1:
            return self._block_covariance().map_covariance(design)
        prior = _covariance(self.space.prior)
        cross = cross_product(self.space.design, prior, design)
        return self._conditioned(cross_product(design, prior, design)[None], cross[None])[0]

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Exact draws of the unknowns by Matheron's rule: a draw from the prior, corrected by what its sites miss."""
        space = self.space
        key_prior, key_sites, key_negative = random.split(rng_key, 3)
        dtype = space.covariance.dtype
        scale = BlockDiagonal(tuple(block.scale_part() for block in space.prior))
        draw = scale.apply(random.normal(key_prior, (num_samples, space.design.num_columns), dtype))
        missed = self.root * space.to_local(space.design.matvec(draw))
        missed += random.normal(key_sites, missed.shape, dtype)
        correction = -self.root * _solve_many(self.factor, missed)
        if self.negative is not None:
            noise = random.normal(key_negative, missed.shape, dtype)
            noise = jnp.moveaxis(solve_upper(self.negative.factor, jnp.moveaxis(noise, 0, -1)), -1, 0)
            noise = self.negative.root * noise
            reduced = self.root * _matvec(space.covariance, noise)
            correction += noise - self.root * _solve_many(self.factor, reduced)
        return draw + space.unknowns(self.coordinates + correction)

    def from_white(self, white: Array) -> Array:
        """Unknowns made of as many standard normal numbers, one to one; both of shape ``(num_columns,)``."""
        if self.negative is not None:
            raise ValueError("Sites of negative precision have no factor of the posterior here: leave them out first.")
        # With U = F^T A^T S^(1/2) and B = I + U^T U = R R^T, the matrix I - U R^-T (R + I)^-1 U^T is a root of
        # (I + U U^T)^-1 of determinant |B|^(-1/2) (Andrews 1968).
        space = self.space
        scale = BlockDiagonal(tuple(block.scale_part() for block in space.prior))
        draw = scale.apply(white)
        seen = self.root * space.to_local(space.design.matvec(draw))
        identity = jnp.eye(self.factor.shape[-1], dtype=self.factor.dtype)
        removed = solve_upper(self.factor, solve_lower(self.factor + identity, seen[..., None]))[..., 0]
        return draw + space.unknowns(self.coordinates - self.root * removed)

    @property
    def suits_root(self) -> bool:
        """True if :meth:`place` takes a root of the covariance of all unknowns: of one block, where these are not many
        more than the rows, and where the difference of prior and posterior covariance has digits left."""
        space = self.space
        if self.negative is not None or space.rows.shape[0] > 1 or space.design.num_columns > 2 * space.design.num_rows:
            return False
        gain = jnp.max(self.site_precision * jnp.diagonal(space.covariance, axis1=-2, axis2=-1))
        return bool(jnp.finfo(gain.dtype).eps * gain < _LEAST_DIGITS)

    def place(self, white: Array) -> tuple[Array, Array]:
        """Unknowns like those of :meth:`from_white`, by another root whose derivatives are in closed form, and the log
        determinant of the map; for one block."""
        space, design, precision = self.space, self.space.design, self.site_precision[0]
        if isinstance(design, SparseRows):
            is_single = design.columns.shape[1] == 1
            of_unknowns = design.squared().rmatvec(precision) if is_single else gram_of_rows(design, precision)
        else:
            of_unknowns = design.matrix.T @ (precision[:, None] * design.matrix)
        prior, shift = _covariance(space.prior).to_dense(), design.rmatvec(self.site_shift[0])
        held, held_prior = lax.stop_gradient((self, prior))
        removed = divide_by_upper(held.root[0] * held.space.design.matvec(held_prior), held.factor[0])
        root = posterior_root(held_prior - removed @ removed.T, *lax.stop_gradient((of_unknowns, shift)))
        return from_white(prior, of_unknowns, shift, white, root)

    def _whitened(self, cross: Array) -> tuple[Array, Array]:
        """Roots of what the positive sites remove from, and the negative ones add to, a prior covariance."""
        removed = solve_lower(self.factor, self.root[:, :, None] * cross)
        if self.negative is None:
            return removed, jnp.zeros_like(removed)
        reduced = cross - self.negative.gain.swapaxes(-1, -2) @ removed
        return removed, solve_lower(self.negative.factor, self.negative.root[:, :, None] * reduced)

    def _conditioned(self, covariance: Array, cross: Array) -> Array:
        removed, added = self._whitened(cross)
        return covariance - removed.swapaxes(-1, -2) @ removed + added.swapaxes(-1, -2) @ added

    def _block_covariance(self) -> BlockCovariance:
        space = self.space
        prior = _covariance(space.prior).take(space.columns)
        cross = space.design.take_blocks(space.rows, space.columns) @ prior
        return BlockCovariance.build(self._conditioned(prior, cross), space.columns, space.design.num_columns)


def _covariance(prior: tuple[PriorBlock, ...]) -> BlockDiagonal:
    return BlockDiagonal(tuple(block.covariance_part() for block in prior))


def _matvec(matrix: Array, x: Array) -> Array:
    """Batched product of ``(b, m, m)`` with ``(..., b, m)``."""
    return jnp.einsum("bij,...bj->...bi", matrix, x)


def _solve_many(factor: Array, x: Array) -> Array:
    """``(L L^T)^-1 x`` of a batch of factors ``(b, m, m)`` for ``x`` of shape ``(num_samples, b, m)``."""
    x = jnp.moveaxis(x, 0, -1)
    return jnp.moveaxis(solve_upper(factor, solve_lower(factor, x)), -1, 0)
