r"""Zeros in all pairs of a row and a column, at a cost that does not depend on their number.

Every pair has a number of zeros that is a product of a weight of its row and one of its column, one times one for
cells that nobody listed. The log probability of a zero, :math:`\log \sigma(-a)`, is bounded by a parabola with a
tangent :math:`\xi` that a row has for all its zeros, or all rows share; so the expectation over all pairs needs no more
than weighted sums of first and second moments over either side. What the parabolas of all pairs have counted of the
listed cells is taken back there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ..cells import Side
from .moments import Moments, pack, total_second
from .rules import tangent_terms

__all__ = ["AllPairs", "Background", "best_tangents", "listed_zeros", "sums_for_common", "sums_over_pairs"]


class Background(NamedTuple):
    """Zeros of all pairs."""

    row_weight: Array
    """Shape ``(num_rows,)``."""
    column_weight: Array
    """Shape ``(num_columns,)``."""
    tangent: Array
    """Squares of the tangents of the rows, shape ``(num_rows,)``."""
    offset: Array
    """Offset of all predictors, a scalar."""
    common: Array | None
    """Coefficients of the common unknowns in all predictors, shape ``(p,)``."""

    def of_side(self, side: Side) -> tuple[Array, Array, bool]:
        """Weights of a side and of the other, and whether the side is that of the rows."""
        is_rows = side == "rows"
        weights = (self.row_weight, self.column_weight) if is_rows else (self.column_weight, self.row_weight)
        return *weights, is_rows


class AllPairs(NamedTuple):
    """Sums over all pairs of each vector of a side."""

    value: Array
    """Bounds of the expected log probabilities, shape ``(num,)``."""
    matrix: Array
    """Curvatures times second moments of what multiplies the vector, shape ``(num, n, n)``."""
    linear: Array
    """Slopes at zero times first moments, shape ``(num, n)``."""


def shift_of(background: Background, common: tuple[Array, Array] | None) -> tuple[Array, Array]:
    """Mean and variance of what is added to all products.

    :param common: mean and covariance of the common unknowns.
    """
    if common is None or background.common is None:
        return background.offset, jnp.zeros_like(background.offset)
    mean, covariance = common
    return background.offset + background.common @ mean, background.common @ covariance @ background.common


def listed_zeros(background: Background, side: Side, own: Array, other: Array | None) -> tuple[Array, Array, Array]:
    """Number of zeros of listed cells, and the terms of their bounds, shape ``(b, m)`` or one that broadcasts.

    :param str side: which ``own`` is.
    :param own: vectors of a chunk, shape ``(b,)``.
    :param other: vectors of the other side, ``(b, m)``, or ``None`` for all of them.
    """
    own_weight, other_weight, is_rows = background.of_side(side)
    weights = other_weight[None, :] if other is None else other_weight[other]
    constant, curvature = tangent_terms(background.tangent)
    if is_rows:
        return own_weight[own][:, None] * weights, constant[own][:, None], curvature[own][:, None]
    pick = (lambda x: x[None, :]) if other is None else (lambda x: x[other])
    return own_weight[own][:, None] * weights, pick(constant), pick(curvature)


def sums_over_pairs(
    background: Background, side: Side, own: Moments, other: Moments, common: tuple[Array, Array] | None
) -> AllPairs:
    """Sums over all pairs.

    :param str side: which ``own`` is.
    :param own: moments of ``(u, 1)``.
    :param other: of what multiplies it.
    :param common: mean and covariance of the common unknowns.

    Cost: linear in the numbers of vectors, quadratic in their sizes.
    """
    own_weight, other_weight, is_rows = background.of_side(side)
    constant, curvature = tangent_terms(background.tangent)
    shift, spread = shift_of(background, common)
    # The curvature belongs to the rows: it stands inside the sum, or outside of it.
    inside, outside = (jnp.ones_like(other_weight), curvature) if is_rows else (curvature, jnp.ones_like(own_weight))
    weights = other_weight * inside
    first, curved = other_weight @ other.mean, weights @ other.mean
    matrix = (own_weight * outside)[:, None, None] * total_second(other, weights)
    linear = own_weight[:, None] * (-0.5 * first - shift * outside[:, None] * curved)
    square = expected_square(own, total_second(other, weights))
    total, curved_total = jnp.sum(other_weight), jnp.sum(weights)
    mean = own.mean @ first + shift * total
    square += 2.0 * shift * (own.mean @ curved) + (shift**2 + spread) * curved_total
    constants = constant * total if is_rows else jnp.sum(other_weight * constant)
    return AllPairs(own_weight * (constants - 0.5 * mean - 0.5 * outside * square), matrix, linear)


def expected_square(own: Moments, matrix: Array) -> Array:
    """Expected quadratic form of each vector, shape ``(num,)``."""
    value = jnp.sum(own.mean * (own.mean @ matrix), -1)
    if own.variance is not None:
        trace: Array = own.variance @ jnp.diagonal(matrix)
        return value + trace
    assert own.covariance is not None
    twice = pack(2.0 - jnp.eye(own.mean.shape[-1], dtype=matrix.dtype))
    return value + own.covariance @ (twice * pack(matrix))


def best_tangents(
    background: Background,
    rows: Moments,
    columns: Moments,
    common: tuple[Array, Array] | None,
    listed: tuple[Array, Array],
    *,
    is_shared: bool,
) -> Array:
    """Squares of the tangents at which the bound is largest: means of expected squares over the zeros that are left.

    :param rows: moments of ``(u, 1)``.
    :param columns: of what multiplies it.
    :param listed: for each row the number of zeros of listed cells, and the sum of their expected squares.
    :param bool is_shared: whether all rows have one tangent.
    """
    shift, spread = shift_of(background, common)
    weight, first = background.column_weight, background.column_weight @ columns.mean
    total = jnp.sum(weight)
    square = expected_square(rows, total_second(columns, weight)) + 2.0 * shift * (rows.mean @ first)
    square = background.row_weight * (square + (shift**2 + spread) * total) - listed[1]
    number = background.row_weight * total - listed[0]
    if is_shared:
        square, number = (jnp.broadcast_to(jnp.sum(x), x.shape) for x in (square, number))
    # Where no zero is left nothing depends on the tangent.
    is_left = number > 1e-12 * background.row_weight * total
    best = jnp.maximum(square, 0.0) / jnp.where(is_left, number, 1.0)
    return jnp.where(is_left, best, background.tangent)


def sums_for_common(background: Background, rows: Moments, columns: Moments) -> tuple[Array, Array]:
    """Sum of the curvatures of all pairs, and that of their slopes where the common unknowns are zero."""
    _, curvature = tangent_terms(background.tangent)
    weight = background.row_weight * curvature
    total, first = jnp.sum(background.column_weight), background.column_weight @ columns.mean
    mean = jnp.sum(weight * (rows.mean @ first)) + background.offset * jnp.sum(weight) * total
    return jnp.sum(weight) * total, -0.5 * jnp.sum(background.row_weight) * total - mean
