"""Sums over the cells of each vector, and over all cells, that closed updates are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..background import AllPairs, sums_for_common, sums_over_pairs, unlisted_zeros
from ..cells import Block, over_devices
from .layout import (
    Cells,
    Layout,
    Products,
    Seen,
    products_of,
    quadratic_sums,
    seen_from,
    to_vectors,
    visit,
    visit_vectors,
)
from .moments import own_moments, pack, partner_moments, unpack
from .rules import Bound, Parabola, logit_negative, parabola, with_rule


class Problem(NamedTuple):
    """The cells as one side sees them, with the zeros of all pairs."""

    layout: Layout
    pairs: AllPairs | None
    bound: Bound
    """See :class:`~numpyro_ext.infer.BilinearVG`."""
    is_diagonal: bool
    """True if components are independent on both sides, and in products or linear terms alone."""
    is_censored: bool = False
    """True if listed cells have zeros, too: those censored pairs that are of them."""

    @property
    def is_of_rows(self) -> bool:
        """True if cells are in the order of the rows, which have the parabolas of zeros; where there are zeros."""
        return self.pairs is not None and self.pairs.own_bound is not None

    @property
    def pairs_of_rows(self) -> AllPairs | None:
        """Zeros of all pairs, seen from the rows."""
        return self.pairs if self.pairs is None or self.is_of_rows else self.pairs.seen_from_columns()


class VectorSums(NamedTuple):
    """Quadratic function that bounds the expected log factors of each vector ``u``, less a constant:
    ``linear @ u - u @ matrices @ u / 2``."""

    precision: Array
    """Upper triangles of the matrices, which are half of what many vectors take, shape ``(num, size (size + 1) / 2)``;
    see :func:`~.moments.pack`."""
    linear: Array
    """Shape ``(num, size)``."""

    @property
    def matrices(self) -> Array:
        """The precision of each vector, shape ``(num, size, size)``."""
        return unpack(self.precision, self.linear.shape[-1])


def products_at(problem: Problem, own: Block, other: Block) -> Products:
    """Moments of the products of all cells, in the order of the side of ``own``.

    Cost: per cell linear in the size where components are independent, else quadratic.
    """
    own_size = own.mean.shape[1]
    partner = partner_moments(problem.layout.coefficients, own_size, other, problem.is_diagonal)
    return products_of(problem.layout, own_moments(own, problem.is_diagonal), partner)


def _of_predictors(cells: Cells, products: Products, common: Block | None) -> tuple[Array, Array, Array]:
    """Means and variances of predictors, and the means of what is added to the products."""
    shift, variance = cells.offset, products.variance
    if common is not None and cells.common is not None:
        assert common.covariance is not None
        shift = shift + cells.common @ common.mean[0]
        variance = variance + jnp.einsum("...i,ij,...j->...", cells.common, common.covariance[0], cells.common)
    return products.mean + shift, variance, shift


def _of_cells(problem: Problem, cells: Cells, products: Products, common: Block | None) -> tuple[Parabola, Array]:
    """Weighted parabolas of the cells of a chunk with what is counted otherwise of their zeros, and the means of what
    is added to the products."""
    mean, variance, shift = _of_predictors(cells, products, common)
    found = parabola(with_rule(cells.potential, problem.bound), mean, variance)
    found = Parabola(*(jnp.where(cells.weight > 0.0, cells.weight * x, 0.0) for x in found))
    if problem.pairs is not None:
        found = Parabola(*(x + y for x, y in zip(found, _of_zeros(problem, cells, mean, variance), strict=True)))
    return found, shift


def _of_zeros(problem: Problem, cells: Cells, mean: Array, variance: Array) -> Parabola:
    """Parabolas of the zeros that cells have, at tangents of their own, less those that all pairs have counted."""
    assert problem.pairs is not None
    number, bound = problem.pairs.listed(cells.own, cells.other)
    number = jnp.where(cells.weight > 0.0, number, 0.0)
    value, curvature, slope = -bound.expected(mean, variance), -bound.curvature, bound.slope
    if problem.is_censored:
        own = logit_negative(mean, variance)
        value, curvature, slope = value + own.value, curvature + own.curvature, slope + own.slope
    return Parabola(number * value, number * curvature, number * slope)


def _common_moments(common: Block | None) -> tuple[Array, Array] | None:
    if common is None:
        return None
    assert common.covariance is not None
    return common.mean[0], common.covariance[0]


def vector_sums(problem: Problem, products: Products, own: Block, other: Block, common: Block | None) -> VectorSums:
    """Sums for the update of each vector of a side, at the tangents that are best for the present posterior.

    :param Problem problem: the cells in the order of the side.
    :param Products products: of the present posterior, from :func:`products_at`.
    :param Block own: the vectors that the sums are taken for.
    :param Block other: the vectors that are held.
    :param Block common: the common unknowns, where there are any.

    Cost: per cell quadratic in the size.
    """
    there = partner_moments(problem.layout.coefficients, own.mean.shape[1], other, problem.is_diagonal)
    start = _of_zeros_alone(*_zeros_of_vectors(problem, own, other, common))
    return visit_vectors(problem.layout, products, there, _quadratic(problem, common), start)


def sums_of_some(
    problem: Problem, products: Products, own: Block, other: Block, common: Block | None, length: int
) -> Callable[[Array], VectorSums]:
    """Function of the first of ``length`` vectors in order, to what :func:`vector_sums` gives of them.

    Cost of a call: that of the chunks in which these vectors have cells.
    """
    cells, function = problem.layout.cells, _quadratic(problem, common)
    there = partner_moments(problem.layout.coefficients, own.mean.shape[1], other, problem.is_diagonal)
    linear, scale, matrix = _zeros_of_vectors(problem, own, other, common)

    def at(first: Array) -> VectorSums:
        def step(number: Array, sums: VectorSums) -> VectorSums:
            here, moments = jax.tree.map(lambda x: x[number], (cells, products))
            place = jnp.where(here.own < first, length, here.own - first)
            found = function(here, moments, seen_from(here, there))
            return jax.tree.map(lambda x, y: x.at[place].add(y, mode="drop"), sums, found)

        mine, weights = (jax.lax.dynamic_slice_in_dim(x, first, length) for x in (linear, scale))
        ends = jnp.searchsorted(cells.own[:, -1], first), jnp.searchsorted(cells.own[:, 0], first + length)
        return jax.lax.fori_loop(*ends, step, _of_zeros_alone(mine, weights, matrix))

    return at


def _quadratic(problem: Problem, common: Block | None) -> Callable[[Cells, Products, Seen], VectorSums]:
    """Sums over the cells of each row of a chunk, as a function of the chunk."""

    def function(cells: Cells, here: Products, seen: Seen) -> VectorSums:
        found, shift = _of_cells(problem, cells, here, common)
        return VectorSums(*quadratic_sums(seen, found.curvature, found.slope - found.curvature * shift))

    return function


def _zeros_of_vectors(problem: Problem, own: Block, other: Block, common: Block | None) -> tuple[Array, Array, Array]:
    """Linear terms of each vector by zeros that nobody listed, and factors of a matrix that all vectors share."""
    num, size = own.mean.shape
    if problem.pairs is None:
        none = jnp.zeros((num, size), own.mean.dtype)
        return none, none[:, 0], jnp.zeros((size, size), own.mean.dtype)
    zeros = sums_over_pairs(problem.pairs, own, other, _common_moments(common))
    return zeros.linear, zeros.scale, zeros.matrix


def _of_zeros_alone(linear: Array, scale: Array, matrix: Array) -> VectorSums:
    return VectorSums(scale[:, None] * pack(matrix), linear)


def vector_values(problem: Problem, products: Products, own: Block, other: Block, common: Block | None) -> Array:
    """Lower bounds of the expected log factors of each vector of a side, shape ``(num,)``; see :func:`vector_sums`.

    Cost: per cell one evaluation of its factor.
    """

    def step(cells: Cells, here: Products) -> Array:
        return jnp.sum(_of_cells(problem, cells, here, common)[0].value, -1)

    value = visit(problem.layout, products, step, jnp.zeros(own.mean.shape[:1], own.mean.dtype))
    if problem.pairs is None:
        return value
    return value + sums_over_pairs(problem.pairs, own, other, _common_moments(common)).value


def zero_values(problem: Problem, products: Products, own: Block, other: Block, common: Block | None) -> Array:
    """Bounds of the expected log probability of a zero with each vector, shape ``(num,)``.

    The zeros of pairs are weighted by the other vectors alone. Cost: that of :func:`vector_values`.
    """
    assert problem.pairs is not None
    pairs = problem.pairs._replace(own_weight=jnp.ones_like(problem.pairs.own_weight))
    problem = problem._replace(pairs=pairs)

    def step(cells: Cells, here: Products) -> Array:
        mean, variance, _ = _of_predictors(cells, here, common)
        return jnp.sum(_of_zeros(problem, cells, mean, variance).value, -1)

    value = visit(problem.layout, products, step, jnp.zeros(own.mean.shape[:1], own.mean.dtype))
    return value + sums_over_pairs(pairs, own, other, _common_moments(common)).value


def values_at_moments(problem: Problem, products: Products, common: Block | None) -> Callable[[Layout], Array]:
    """The sum of the values of all cells, as a function of a layout in which factors alone may differ.

    Predictors are the same for all of these, so that hyperparameters of the factors can be learned at a cost per cell
    that does not depend on the size of vectors.
    """
    mean, variance, _ = _of_predictors(problem.layout.cells, products, common)

    def value(other: Layout) -> Array:
        cells = other.cells
        found = parabola(with_rule(cells.potential, problem.bound), mean, variance)
        return jnp.sum(jnp.where(cells.weight > 0.0, cells.weight * found.value, 0.0))

    return value


def common_sums(problem: Problem, products: Products, rows: Block, columns: Block, common: Block) -> VectorSums:
    """Sums for the update of the common unknowns, from cells in the order of either side; see :func:`vector_sums`."""
    size = common.mean.shape[1]

    def step(cells: Cells, here: Products) -> tuple[Array, Array]:
        assert cells.common is not None
        found, _ = _of_cells(problem, cells, here, common)
        mean = here.mean + cells.offset
        weighted = found.curvature[..., None] * cells.common
        return (
            jnp.einsum("bmi,bmj->ij", weighted, cells.common),
            jnp.einsum("bmi,bm->i", cells.common, found.slope) - jnp.einsum("bmi,bm->i", weighted, mean),
        )

    def add(sums: tuple[Array, Array], _: Cells, found: tuple[Array, Array]) -> tuple[Array, Array]:
        return sums[0] + found[0], sums[1] + found[1]

    start = jnp.zeros((size, size), rows.mean.dtype), jnp.zeros((size,), rows.mean.dtype)
    matrix, linear = visit(problem.layout, products, step, start, add)
    pairs = problem.pairs_of_rows
    if pairs is not None and pairs.common is not None:
        curvature, slope = sums_for_common(pairs, rows, columns)
        matrix = matrix + curvature * jnp.outer(pairs.common, pairs.common)
        linear = linear + slope * pairs.common
    return VectorSums(pack(matrix)[None], linear[None])


def zeros_left(problem: Problem, products: Products, rows: Block, columns: Block, common: Block | None) -> Array:
    """Number, sum of predictors and sum of expected squares of the zeros of each row that are in no listed cell.

    :param Problem problem: the cells in the order of either side.
    :param Products products: in the same order.
    :return: shape ``(num_rows, 3)``.
    """
    seen, pairs = problem.pairs, problem.pairs_of_rows
    assert seen is not None and pairs is not None

    def step(cells: Cells, here: Products) -> Array:
        mean, variance, _ = _of_predictors(cells, here, common)
        number, _ = seen.listed(cells.own, cells.other)
        number = jnp.where(cells.weight > 0.0, number, 0.0)
        found = jnp.stack([number, number * mean, number * (mean**2 + variance)], axis=-1)
        return jnp.sum(found, 1) if problem.is_of_rows else found

    def to_other(sums: Array, cells: Cells, found: Array) -> Array:
        return sums + jnp.sum(found, 0) if cells.other is None else sums.at[cells.other].add(found)

    add = to_vectors if problem.is_of_rows else to_other
    listed = visit(problem.layout, products, step, jnp.zeros((len(rows.mean), 3), rows.mean.dtype), add)
    return unlisted_zeros(pairs, rows, columns, listed, _common_moments(common))


def best_tangents(
    left: Array, *, is_shared: bool, axis_name: str | None = None, elsewhere: Array | None = None
) -> Array:
    """Squares of the best tangents of the zeros of each row; one where a row has no zeros but those of its cells.

    :param left: from :func:`zeros_left`.
    :param bool is_shared: whether all rows have one tangent.
    :param str axis_name: of the axis of devices between which the rows are divided, if they are.
    :param elsewhere: the same sums over rows of other batches, shape ``(3,)``, which count where there is one tangent.
    """
    if is_shared:
        total = over_devices(jnp.sum(left, 0), axis_name)
        left = jnp.broadcast_to(total if elsewhere is None else total + elsewhere, left.shape)
    number, _, square = left.T
    return jnp.where(number > 0.0, jnp.maximum(square, 0.0) / jnp.where(number > 0.0, number, 1.0), 1.0)
