r"""Counts of zero in all cells that are not listed, at a cost that does not depend on their number.

For Poisson counts with the rate :math:`c \log(1 + e^\eta)` the log factor of a zero has a curvature of a quarter at
most, so that it is bounded by a parabola that touches it at any :math:`f`,

.. math:: \log(1 + e^\eta) \le \log(1 + e^f) + \sigma(f)\, (\eta - f) + \tfrac18 (\eta - f)^2

(Seeger and Bouchard 2012). Its expectation over all pairs of a row and a column needs no
more than sums of second moments over either side. Every row has an ``f`` of its own; the best is the mean of the
expected predictors of its zeros. Listed cells keep their exact expectations, and what the parabolas of all pairs have
counted of them is taken back.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ....potentials.base import Potential, potential
from .terms import Coefficients

__all__ = ["ListedPotential", "ZeroCells", "ZeroSums", "best_tangents", "zero_sums"]


@potential
class ListedPotential(Potential):
    """The factor of a listed cell, less the parabola that it would have if it were a zero."""

    base: Potential
    exposure: Array
    tangent: Array
    """Predictor at which the parabola touches, one per cell."""

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        return self.base.log_density(eta) + self.exposure * self._parabola(eta)[0]

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        value, slope, curvature = self.base.derivatives(eta)
        height, rise = self._parabola(eta)
        return value + self.exposure * height, slope + self.exposure * rise, curvature + 0.25 * self.exposure

    def _parabola(self, eta: Array) -> tuple[Array, Array]:
        distance, rise = eta - self.tangent, jax.nn.sigmoid(self.tangent)
        return jax.nn.softplus(self.tangent) + rise * distance + 0.125 * distance**2, rise + 0.25 * distance


class ZeroCells(NamedTuple):
    """All pairs of a row and a column, as one side sees them."""

    exposure: Array
    """Factor of the rates."""
    offset: Array
    """Offset of the predictors."""
    coefficients: Coefficients
    """With leading axes of length one."""
    own_tangent: Array | None
    """Predictors at which the parabolas touch, if ``own`` are the rows, shape ``(num_rows,)``."""
    other_tangent: Array | None
    """The same if the others are the rows."""

    def listed(self, base: Potential, own: Array, other: Array) -> ListedPotential:
        """The factors of listed cells, given which vectors they touch."""
        if self.own_tangent is not None:
            return ListedPotential(base, self.exposure, self.own_tangent[own])
        assert self.other_tangent is not None
        return ListedPotential(base, self.exposure, self.other_tangent[other])


class ZeroSums(NamedTuple):
    """Bounds of the expected log factors of zeros in all pairs."""

    value: Array
    """Sum over the pairs of each own vector, shape ``(num,)``."""
    slope: Array
    """Slope in the means, shape ``(num, size)``."""
    precision: Array
    """The same for all own vectors: minus twice the slope in a covariance, shape ``(size, size)``."""


def zero_sums(zeros: ZeroCells, own: tuple[Array, Array | None], other: tuple[Array, Array | None]) -> ZeroSums:
    """Sums over all pairs.

    :param ZeroCells zeros: what they have in common.
    :param own: means and covariances of the vectors that the sums are taken for.
    :param other: of those that are held.

    Cost: linear in the number of vectors, quadratic in their sizes.
    """
    mean, covariance = own
    num_other = other[0].shape[0]
    second, first = _partner_moments(zeros, mean.shape[1], other)
    extended = jnp.pad(mean, [(0, 0), (0, 1)], constant_values=1.0)
    spread, weights = second[:-1, :-1], first[:-1]
    square = jnp.einsum("ni,ij,nj->n", extended, second, extended)
    if covariance is not None:
        square += (
            covariance @ jnp.diagonal(spread) if covariance.ndim == 2 else jnp.einsum("nij,ij", covariance, spread)
        )
    slope = extended @ second[:, :-1]
    if zeros.own_tangent is not None:
        shift, floor = _vertex(zeros.own_tangent)
        square += num_other * shift**2 - 2.0 * shift * (extended @ first)
        slope -= shift[:, None] * weights
        floor = num_other * floor
    else:
        assert zeros.other_tangent is not None
        floor = jnp.sum(_vertex(zeros.other_tangent)[1])
    scale = 0.125 * zeros.exposure
    return ZeroSums(-scale * square - zeros.exposure * floor, -2.0 * scale * slope, 2.0 * scale * spread)


def best_tangents(
    zeros: ZeroCells,
    rows: tuple[Array, Array | None],
    columns: tuple[Array, Array | None],
    listed_sum: Array,
    num_listed: Array,
) -> Array:
    """Mean of the expected predictors of the zeros of each row.

    :param zeros: as the rows see them.
    :param listed_sum: sum of the expected predictors of listed cells, shape ``(num_rows,)``.
    :param num_listed: their number.
    """
    _, first = _partner_moments(zeros, rows[0].shape[1], columns)
    total = rows[0] @ first[:-1] + first[-1]
    num_zeros = columns[0].shape[0] - num_listed
    return jnp.where(num_zeros > 0, (total - listed_sum) / jnp.maximum(num_zeros, 1), 0.0)


def _vertex(tangent: Array) -> tuple[Array, Array]:
    """The parabola is an eighth of the square of the distance from its vertex, above its floor."""
    rise = jax.nn.sigmoid(tangent)
    return tangent - 4.0 * rise, jax.nn.softplus(tangent) - 2.0 * rise**2


def _partner_moments(zeros: ZeroCells, size: int, other: tuple[Array, Array | None]) -> tuple[Array, Array]:
    """Sums over the other side of second and first moments of the partner and, in the last place, of what is added to
    the product: the predictor of a pair is the product of ``(u, 1)`` with these.
    """
    pairs, matrix, own_linear, other_linear = zeros.coefficients
    mean, covariance = other
    num, other_size = mean.shape
    shift = jnp.zeros_like(mean[:, 0]) if zeros.other_tangent is None else _vertex(zeros.other_tangent)[0]
    vector = jnp.concatenate([mean, jnp.ones_like(mean[:, :1]), shift[:, None]], axis=1)
    moment = vector.T @ vector
    if covariance is not None:
        spread = jnp.sum(covariance, 0)
        spread = jnp.diag(spread) if covariance.ndim == 2 else spread
        moment = moment.at[:other_size, :other_size].add(spread)
    whole = jnp.zeros((size + 1, other_size + 2), mean.dtype)
    if pairs is not None:
        k = pairs.shape[-1]
        whole = whole.at[jnp.arange(k), jnp.arange(k)].set(pairs[0])
    elif matrix is not None:
        whole = whole.at[:size, :other_size].set(matrix[0])
    if own_linear is not None:
        whole = whole.at[:size, other_size].set(own_linear[0])
    if other_linear is not None:
        whole = whole.at[size, :other_size].set(other_linear[0])
    whole = whole.at[size, other_size].set(zeros.offset).at[size, other_size + 1].set(-1.0)
    return whole @ moment @ whole.T, whole @ moment[:, other_size]
