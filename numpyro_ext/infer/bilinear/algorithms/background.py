r"""Zeros in all pairs of a row and a column, at a cost that does not depend on their number.

A pair has a number of zeros that is the product of a weight of its row and one of its column: one times one for cells
that nobody listed, and what is expected of censored pairs. The log probability of a zero is bounded by a parabola,

.. math:: \log p(0 \mid \eta) \ge c - \kappa \eta - \tfrac12 h \eta^2,

that a row has for all its zeros, so that its expectation over all pairs needs no more than weighted sums of first and
second moments over either side. What the parabolas of all pairs have counted of the listed cells is taken back there.
There are two rules for the parabolas: of curvature 1/4, touching at one predictor, for :math:`-\log(1 + e^\eta)` of
counts with a softplus rate (Seeger and Bouchard 2012); and touching at :math:`\pm\xi`, for the same function of binary
outcomes (Jaakkola and Jordan 1997).
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ....linalg.in_range import rows_of
from ....potentials.base import Potential, potential
from ....potentials.bounds.logistic import JaakkolaBound
from ....structure.bilinear.form import Bilinear, GaussianSide
from .terms import Block, Coefficients

_Tree = TypeVar("_Tree")


class ZeroBound(NamedTuple):
    """Parabolas below the log probability of a zero: ``constant - slope * eta - curvature * eta**2 / 2``."""

    constant: Array
    slope: Array
    curvature: Array

    def at(self, eta: Array) -> Array:
        """Values at predictors."""
        return self.constant - self.slope * eta - 0.5 * self.curvature * eta**2

    def expected(self, mean: Array, variance: Array) -> Array:
        """Expectations over predictors."""
        return self.at(mean) - 0.5 * self.curvature * variance

    def total(self, number: Array, mean: Array, square: Array) -> Array:
        """Sums over zeros, given their number, and the sums of predictors and of expected squares."""
        return self.constant * number - self.slope * mean - 0.5 * self.curvature * square

    def of(self, index: Array) -> ZeroBound:
        """Parabolas with these indices."""
        return ZeroBound(*(x[index] for x in self))


def rising_zero(point: Array) -> ZeroBound:
    """Parabolas of curvature 1/4 that touch at these predictors."""
    rise = jax.nn.sigmoid(point)
    return ZeroBound(
        rise * point - jax.nn.softplus(point) - 0.125 * point**2, rise - 0.25 * point, jnp.full_like(point, 0.25)
    )


def even_zero(square: Array) -> ZeroBound:
    r"""Parabolas that touch at :math:`\pm\xi`.

    :param square: :math:`\xi^2`.
    """
    value, _, weight = JaakkolaBound()(jnp.zeros_like(square), square)
    # At mean zero the bound is c - lambda xi^2.
    return ZeroBound(-value + weight * square, jnp.full_like(square, 0.5), 2.0 * weight)


class AllPairs(NamedTuple):
    """Zeros in all pairs, as one side sees them, whose vectors are called own. One side has the parabolas."""

    own_weight: Array
    """Shape ``(num,)``."""
    other_weight: Array
    """Shape ``(num_other,)``."""
    own_bound: ZeroBound | None
    """Arrays of shape ``(num,)``."""
    other_bound: ZeroBound | None
    """Arrays of shape ``(num_other,)``."""
    coefficients: Coefficients
    """The same for all pairs, with leading axes of length one."""
    offset: Array
    """Offset of all predictors, a scalar."""
    common: Array | None
    """Coefficients of the common unknowns in all predictors, shape ``(p,)``."""

    @classmethod
    def of_form(cls, form: Bilinear, coefficients: Coefficients, bound: ZeroBound, weight: ArrayLike) -> AllPairs:
        """The same number of zeros for each pair, seen from the rows.

        :param Bilinear form: the model.
        :param Coefficients coefficients: as its rows see them.
        :param ZeroBound bound: for all rows.
        :param weight: number of zeros of a pair, a scalar.
        """
        common = None if form.common is None else form.common.coefficients[0]
        rows, columns = (jnp.ones_like(side.mean[:, 0]) for side in (form.rows, form.columns))
        bounds = ZeroBound(*(x * rows for x in bound))
        if isinstance(form.rows, GaussianSide):
            rows = form.rows.weighted(rows)
        return cls(jnp.asarray(weight) * rows, columns, bounds, None, coefficients, form.offset[0], common)

    def seen_from_columns(self) -> AllPairs:
        """The same pairs with the other side as own."""
        pairs, matrix, own, other = self.coefficients
        turned = Coefficients(pairs, None if matrix is None else matrix.swapaxes(-1, -2), other, own)
        return AllPairs(
            self.other_weight, self.own_weight, self.other_bound, self.own_bound, turned, self.offset, self.common
        )

    def listed(self, own: Array, other: Array | None) -> tuple[Array, ZeroBound]:
        """Numbers of zeros of listed cells and their parabolas, of shape ``(b, m)`` or one that broadcasts.

        :param own: vectors of a chunk, shape ``(b,)``.
        :param other: vectors of the other side, ``(b, m)``, or ``None`` for all of them.
        """
        number = rows_of(self.own_weight, own)[:, None] * _of_others(self.other_weight, other)
        if self.own_bound is not None:
            return number, rows_of(self.own_bound, own[:, None])
        assert self.other_bound is not None
        return number, _of_others(self.other_bound, other)


def _of_others(tree: _Tree, other: Array | None) -> _Tree:
    return tree if other is None else rows_of(tree, other)


@potential
class _ListedPotential(Potential):
    """The factor of a listed cell, less the parabola that it would have if it were a zero."""

    base: Potential
    number: Array
    """Number of zeros of the cell."""
    bound: ZeroBound

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        return self.base.log_density(eta) - self.number * self.bound.at(eta)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        value, slope, curvature = self.base.derivatives(eta)
        fall = self.bound.slope + self.bound.curvature * eta
        own = self.number * self.bound.curvature
        return value - self.number * self.bound.at(eta), slope + self.number * fall, curvature + own


def listed_potential(pairs: AllPairs, base: Potential, own: Array, other: Array) -> Potential:
    """The factors of listed cells less the parabolas of zeros, given which vectors they touch."""
    bound = pairs.own_bound.of(own) if pairs.own_bound is not None else None
    if bound is None:
        assert pairs.other_bound is not None
        bound = pairs.other_bound.of(other)
    return _ListedPotential(base, pairs.own_weight[own] * pairs.other_weight[other], bound)


class PairSums(NamedTuple):
    """Bounds of the expected log probabilities of zeros, summed over all pairs of each own vector ``u``: quadratic
    functions of it, of curvature ``scale * matrix``."""

    value: Array
    """At the present posterior, shape ``(num,)``."""
    linear: Array
    """Slopes where vectors are zero, shape ``(num, size)``."""
    scale: Array
    """Shape ``(num,)``."""
    matrix: Array
    """Shape ``(size, size)``."""

    def slope_at(self, mean: Array) -> Array:
        """Slopes at given means, shape ``(num, size)``."""
        return self.linear - self.scale[:, None] * (mean @ self.matrix)


def sums_over_pairs(pairs: AllPairs, own: Block, other: Block, common: tuple[Array, Array] | None = None) -> PairSums:
    """Sums over all pairs.

    :param own: the vectors that the sums are taken for.
    :param other: those that are held.
    :param common: mean and covariance of the common unknowns.

    Cost: linear in the numbers of vectors, quadratic in their sizes.
    """
    whole, spread = _predictor_matrix(pairs, own, other, common)
    weight = pairs.other_weight
    # The parabola belongs to one side: its terms stand inside the sum over the other side, or outside of it.
    one = jnp.ones_like(weight)
    inside = ZeroBound(one, one, one) if pairs.other_bound is None else pairs.other_bound
    outside = ZeroBound(*(jnp.ones_like(pairs.own_weight),) * 3) if pairs.own_bound is None else pairs.own_bound
    curved = whole @ _second_moments(other, weight * inside.curvature) @ whole.T
    sloped = whole @ _first_moments(other, weight * inside.slope)
    square = _expected_square(own, curved) + spread * jnp.sum(weight * inside.curvature)
    mean = own.mean @ sloped[:-1] + sloped[-1]
    value = outside.constant * jnp.sum(weight * inside.constant) - outside.slope * mean
    value = pairs.own_weight * (value - 0.5 * outside.curvature * square)
    scale = pairs.own_weight * outside.curvature
    linear = -(pairs.own_weight * outside.slope)[:, None] * sloped[:-1] - scale[:, None] * curved[:-1, -1]
    return PairSums(value, linear, scale, curved[:-1, :-1])


def unlisted_zeros(
    pairs: AllPairs, rows: Block, columns: Block, listed: Array, common: tuple[Array, Array] | None = None
) -> Array:
    """Number, sum of predictors and sum of expected squares of the zeros of each row that are in no listed cell.

    :param AllPairs pairs: seen from the rows.
    :param listed: the same of the zeros of listed cells, shape ``(num_rows, 3)``.
    :param common: see :func:`sums_over_pairs`.
    :return: of the same shape, zero where nothing but rounding is left.
    """
    whole, spread = _predictor_matrix(pairs, rows, columns, common)
    weight = pairs.other_weight
    total, first = jnp.sum(weight), whole @ _first_moments(columns, weight)
    mean = rows.mean @ first[:-1] + first[-1]
    square = _expected_square(rows, whole @ _second_moments(columns, weight) @ whole.T) + spread * total
    everything = pairs.own_weight[:, None] * jnp.stack([jnp.full_like(mean, total), mean, square], axis=1)
    is_left = everything[:, :1] - listed[:, :1] > 1e-12 * everything[:, :1]
    return jnp.where(is_left, everything - listed, 0.0)


def sums_for_common(pairs: AllPairs, rows: Block, columns: Block) -> tuple[Array, Array]:
    """Sum of the curvatures of all pairs, and that of their slopes where the common unknowns are zero.

    :param AllPairs pairs: seen from the rows.
    """
    assert pairs.own_bound is not None
    whole, _ = _predictor_matrix(pairs, rows, columns, None)
    total, first = jnp.sum(pairs.other_weight), whole @ _first_moments(columns, pairs.other_weight)
    weight = pairs.own_weight * pairs.own_bound.curvature
    mean = jnp.sum(weight * (rows.mean @ first[:-1] + first[-1]))
    return jnp.sum(weight) * total, -jnp.sum(pairs.own_weight * pairs.own_bound.slope) * total - mean


def _predictor_matrix(
    pairs: AllPairs, own: Block, other: Block, common: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """The matrix ``W`` with which predictors are ``(u, 1) @ W @ (v, 1)``, and the variance of what all of them share.

    :param common: mean and covariance of the common unknowns.
    """
    products, matrix, own_linear, other_linear = pairs.coefficients
    size, other_size = own.mean.shape[1], other.mean.shape[1]
    shift, spread = pairs.offset, jnp.zeros_like(pairs.offset)
    if common is not None and pairs.common is not None:
        mean, covariance = common
        shift, spread = shift + pairs.common @ mean, pairs.common @ covariance @ pairs.common
    whole = jnp.zeros((size + 1, other_size + 1), own.mean.dtype)
    if products is not None:
        k = products.shape[-1]
        whole = whole.at[jnp.arange(k), jnp.arange(k)].set(products[0])
    elif matrix is not None:
        whole = whole.at[:size, :other_size].set(matrix[0])
    if own_linear is not None:
        whole = whole.at[:size, other_size].set(own_linear[0])
    if other_linear is not None:
        whole = whole.at[size, :other_size].set(other_linear[0])
    return whole.at[size, other_size].set(shift), spread


def _first_moments(block: Block, weight: Array) -> Array:
    """Weighted sum of the means of ``(v, 1)``."""
    return jnp.append(weight @ block.mean, jnp.sum(weight))


def _second_moments(block: Block, weight: Array) -> Array:
    """Weighted sum of the second moments of ``(v, 1)``."""
    vectors = jnp.pad(block.mean, [(0, 0), (0, 1)], constant_values=1.0)
    moments = vectors.T @ (weight[:, None] * vectors)
    if block.covariance is None:
        return moments
    spread = jnp.tensordot(weight, block.covariance, 1)
    return moments.at[:-1, :-1].add(jnp.diag(spread) if spread.ndim == 1 else spread)


def _expected_square(block: Block, matrix: Array) -> Array:
    """Expected quadratic form of each ``(u, 1)``, shape ``(num,)``."""
    vectors = jnp.pad(block.mean, [(0, 0), (0, 1)], constant_values=1.0)
    value = jnp.sum(vectors * (vectors @ matrix), -1)
    if block.covariance is None:
        return value
    inner = matrix[:-1, :-1]
    if block.covariance.ndim == 2:
        diagonal: Array = block.covariance @ jnp.diagonal(inner)
        return value + diagonal
    trace: Array = jnp.einsum("nij,ij->n", block.covariance, inner)
    return value + trace
