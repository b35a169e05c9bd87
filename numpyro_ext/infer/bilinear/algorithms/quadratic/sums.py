"""Sums over the cells of each vector, and over all cells, that closed updates are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ..cells import Block, Side
from .background import Background, best_tangents, listed_zeros, sums_for_common, sums_over_pairs
from .layout import Cells, Layout, Seen, predictor_moments, visit, weighted_sums
from .moments import Moments, own_moments, partner_moments
from .rules import Bound, Parabola, parabola, with_rule

__all__ = ["Problem", "VectorSums", "common_sums", "find_tangents", "values_at_moments", "vector_sums", "vector_values"]


class Problem(NamedTuple):
    """The cells as one side sees them, with the zeros that nobody listed."""

    layout: Layout
    background: Background | None


class VectorSums(NamedTuple):
    """Quadratic function that bounds the expected log factors of each vector ``u``, less a constant:
    ``linear @ u - u @ precision @ u / 2``."""

    precision: Array
    """Shape ``(num, size, size)``."""
    linear: Array
    """Shape ``(num, size)``."""


def _moments(problem: Problem, own: Block, other: Block, is_diagonal: bool) -> tuple[Moments, Moments]:
    partner = partner_moments(problem.layout.coefficients, own.mean.shape[1], other, is_diagonal)
    return own_moments(own, is_diagonal), partner


def _of_predictors(cells: Cells, own: Moments, seen: Seen, common: Block | None) -> tuple[Array, Array, Array]:
    """Means and variances of the predictors of a chunk, and the means of what is added to the products."""
    mean, variance = predictor_moments(own, seen)
    shift = cells.offset
    if common is not None and cells.common is not None:
        assert common.covariance is not None
        shift = shift + cells.common @ common.mean[0]
        variance = variance + jnp.einsum("bmi,ij,bmj->bm", cells.common, common.covariance[0], cells.common)
    return mean + shift, variance, shift


def _of_cells(
    problem: Problem, side: Side, cells: Cells, own: Moments, seen: Seen, common: Block | None, bound: Bound
) -> tuple[Parabola, Array]:
    """Weighted parabolas of the cells of a chunk less those of their zeros, and the means of what is added to the
    products."""
    mean, variance, shift = _of_predictors(cells, own, seen, common)
    found = parabola(with_rule(cells.potential, bound), mean, variance)
    value, curvature, slope = (jnp.where(cells.weight > 0.0, cells.weight * x, 0.0) for x in found)
    if problem.background is not None:
        number, constant, bend = listed_zeros(problem.background, side, cells.own, cells.other)
        number = jnp.where(cells.weight > 0.0, number, 0.0)
        value -= number * (constant - 0.5 * mean - 0.5 * bend * (mean**2 + variance))
        curvature -= number * bend
        slope += 0.5 * number
    return Parabola(value, curvature, slope), shift


def _common_moments(common: Block | None) -> tuple[Array, Array] | None:
    if common is None:
        return None
    assert common.covariance is not None
    return common.mean[0], common.covariance[0]


def vector_sums(
    problem: Problem, side: Side, own: Block, other: Block, common: Block | None, *, bound: Bound, is_diagonal: bool
) -> VectorSums:
    """Sums for the update of each vector of a side, at the tangents that are best for the present posterior.

    :param Problem problem: the cells in the order of the side.
    :param str side: ``"rows"`` or ``"columns"``, which ``own`` is.
    :param Block own: the vectors that the sums are taken for.
    :param Block other: the vectors that are held.
    :param Block common: the common unknowns, where there are any.
    :param str bound: see :class:`~numpyro_ext.infer.BilinearVG`.
    :param bool is_diagonal: whether components are independent on both sides, and in products or linear terms alone.

    Cost: per cell quadratic in the size.
    """
    num, size = own.mean.shape
    here, there = _moments(problem, own, other, is_diagonal)

    def step(sums: tuple[Array, Array], cells: Cells, mine: Moments, seen: Seen) -> tuple[Array, Array]:
        found, shift = _of_cells(problem, side, cells, mine, seen, common, bound)
        matrix = weighted_sums(seen, found.curvature)
        linear = seen.sum(found.slope - found.curvature * shift, seen.moments.mean)
        return (
            sums[0].at[cells.own].add(matrix, indices_are_sorted=True),
            sums[1].at[cells.own].add(linear, indices_are_sorted=True),
        )

    dtype = own.mean.dtype
    start = jnp.zeros((num, size + 1, size + 1), dtype), jnp.zeros((num, size + 1), dtype)
    matrix, linear = visit(problem.layout, here, there, step, start)
    if problem.background is not None:
        zeros = sums_over_pairs(problem.background, side, here, there, _common_moments(common))
        matrix, linear = matrix + zeros.matrix, linear + zeros.linear
    return VectorSums(matrix[:, :size, :size], linear[:, :size] - matrix[:, :size, size])


def vector_values(
    problem: Problem, side: Side, own: Block, other: Block, common: Block | None, *, bound: Bound, is_diagonal: bool
) -> Array:
    """Lower bounds of the expected log factors of each vector of a side, shape ``(num,)``; see :func:`vector_sums`.

    Cost: per cell linear in the size where components are independent, else quadratic.
    """
    here, there = _moments(problem, own, other, is_diagonal)

    def step(sums: Array, cells: Cells, mine: Moments, seen: Seen) -> Array:
        found, _ = _of_cells(problem, side, cells, mine, seen, common, bound)
        return sums.at[cells.own].add(jnp.sum(found.value, -1), indices_are_sorted=True)

    value = visit(problem.layout, here, there, step, jnp.zeros(own.mean.shape[:1], own.mean.dtype))
    if problem.background is None:
        return value
    return value + sums_over_pairs(problem.background, side, here, there, _common_moments(common)).value


def values_at_moments(
    layout: Layout, rows: Block, columns: Block, common: Block | None, *, bound: Bound, is_diagonal: bool
) -> Callable[[Layout], Array]:
    """The sum of the values of all cells, as a function of a layout in which factors alone may differ.

    Predictors are visited once, so that hyperparameters of the factors can be learned at a cost per cell that does not
    depend on the size of vectors.

    :param Layout layout: in the order of the rows.
    """
    here, there = _moments(Problem(layout, None), rows, columns, is_diagonal)

    def step(places: tuple[Array, Array, Array], cells: Cells, mine: Moments, seen: Seen) -> tuple[Array, Array, Array]:
        chunk, mean, variance = places
        found = _of_predictors(cells, mine, seen, common)
        return chunk + 1, mean.at[chunk].set(found[0]), variance.at[chunk].set(found[1])

    zeros = jnp.zeros_like(layout.cells.weight)
    _, mean, variance = visit(layout, here, there, step, (jnp.asarray(0), zeros, zeros))

    def value(other: Layout) -> Array:
        cells = other.cells
        found = parabola(with_rule(cells.potential, bound), mean, variance)
        return jnp.sum(jnp.where(cells.weight > 0.0, cells.weight * found.value, 0.0))

    return value


def common_sums(
    problem: Problem, rows: Block, columns: Block, common: Block, *, bound: Bound, is_diagonal: bool
) -> VectorSums:
    """Sums for the update of the common unknowns, in the order of the rows; see :func:`vector_sums`."""
    here, there = _moments(problem, rows, columns, is_diagonal)
    size = common.mean.shape[1]

    def step(sums: tuple[Array, Array], cells: Cells, mine: Moments, seen: Seen) -> tuple[Array, Array]:
        assert cells.common is not None
        found, _ = _of_cells(problem, "rows", cells, mine, seen, common, bound)
        mean = seen.dot(mine.mean, seen.moments.mean) + cells.offset
        weighted = found.curvature[..., None] * cells.common
        return (
            sums[0] + jnp.einsum("bmi,bmj->ij", weighted, cells.common),
            sums[1] + jnp.einsum("bmi,bm->i", cells.common, found.slope) - jnp.einsum("bmi,bm->i", weighted, mean),
        )

    start = jnp.zeros((size, size), rows.mean.dtype), jnp.zeros((size,), rows.mean.dtype)
    matrix, linear = visit(problem.layout, here, there, step, start)
    background = problem.background
    if background is not None and background.common is not None:
        curvature, slope = sums_for_common(background, here, there)
        matrix = matrix + curvature * jnp.outer(background.common, background.common)
        linear = linear + slope * background.common
    return VectorSums(matrix[None], linear[None])


def find_tangents(
    problem: Problem, rows: Block, columns: Block, common: Block | None, *, is_diagonal: bool, is_shared: bool
) -> Array:
    """Squares of the tangents of the zeros of each row at which the bound is largest, shape ``(num_rows,)``.

    :param Problem problem: the cells in the order of the rows.
    :param bool is_shared: whether all rows have one tangent.

    Cost: that of :func:`vector_values`.
    """
    background = problem.background
    assert background is not None
    here, there = _moments(problem, rows, columns, is_diagonal)

    def step(sums: tuple[Array, Array], cells: Cells, mine: Moments, seen: Seen) -> tuple[Array, Array]:
        mean, variance, _ = _of_predictors(cells, mine, seen, common)
        number, _, _ = listed_zeros(background, "rows", cells.own, cells.other)
        number = jnp.where(cells.weight > 0.0, number, 0.0)
        found = jnp.sum(number, -1), jnp.sum(number * (mean**2 + variance), -1)
        return (
            sums[0].at[cells.own].add(found[0], indices_are_sorted=True),
            sums[1].at[cells.own].add(found[1], indices_are_sorted=True),
        )

    zero = jnp.zeros(rows.mean.shape[:1], rows.mean.dtype)
    listed = visit(problem.layout, here, there, step, (zero, zero))
    return best_tangents(background, here, there, _common_moments(common), listed, is_shared=is_shared)
