"""The cells of a bilinear form in the order of one side, in tiles, and sums over them in one pass.

Where most pairs of a row and a column are cells, the layout is a grid: a chunk has some rows of the matrix, and sums
are matrix products. Elsewhere the cells of a vector are cut into tiles of the same length, the last of which is filled
up; a chunk has some tiles, and gathers the vectors of the other side once. Kept per cell are a mean and a variance, and
nothing per cell and component.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .....linalg.in_range import IN_RANGE, rows_of
from .....potentials.base import Potential
from .....structure.bilinear.form import Bilinear
from ..cells import Side, oriented
from ..terms import Coefficients
from .moments import Moments, pack

LayoutKind = Literal["grid", "tiles"]
_Sums = TypeVar("_Sums")
_GRID_CELLS = 1 << 16
_TILE_CELLS = 1 << 11
_SHORTEST, _LONGEST = 4, 64
_WRITTEN_OUT = 16
"""Cells of a tile up to which their sum is written out: half the time of a product of many small matrices."""


class Cells(NamedTuple):
    """A chunk of cells, ``(b, m)``: of the ``b`` vectors ``own``, with ``m`` vectors of the other side each."""

    own: Array
    """Shape ``(b,)``."""
    other: Array | None
    """Shape ``(b, m)``, or ``None`` in a grid, where they are all vectors of the other side in order."""
    potential: Potential
    weight: Array
    """Zero for what only fills up, shape ``(b, m)``."""
    offset: Array
    common: Array | None
    """Coefficients of the common unknowns, shape ``(b, m, p)``."""


class Layout(NamedTuple):
    """All cells in the order of one side."""

    cells: Cells
    """With a leading axis of chunks."""
    coefficients: Coefficients
    """The same for all cells."""


def make_layout(
    form: Bilinear, side: Side, kind: LayoutKind, zero: Potential | None = None, is_cell: Array | None = None
) -> Layout:
    """Order the cells of a form whose coefficients are the same for all of them.

    :param Bilinear form: the model.
    :param str side: ``"rows"`` or ``"columns"``.
    :param str kind: ``"grid"``, for forms without two cells of one row and column, or ``"tiles"``.
    :param Potential zero: factor of all pairs of a grid that are no cells, with the offset and the common coefficients
        of the first cell; ``None`` where they are missing. Vectors of no weight have none.
    :param is_cell: false for cells that only fill up the arrays, by default true for all.
    """
    own, other, coefficients = oriented(form, side)
    sides = (form.rows, form.columns) if side == "rows" else (form.columns, form.rows)
    num, num_other = (s.mean.shape[0] for s in sides)
    num_cells = form.num_cells
    if kind == "grid":
        length = max(1, min(num, _GRID_CELLS // num_other))
        num_chunks = -(-num // length)
        place, num_places = own * num_other + other, num_chunks * length * num_other
        if is_cell is not None:
            place = jnp.where(is_cell, place, num_places)
        source = jnp.full((num_places,), -1, jnp.int32)
        source = source.at[place].set(jnp.arange(num_cells, dtype=jnp.int32), mode="drop")
        source = source.reshape(num_chunks, length, num_other)
        vectors = jnp.minimum(jnp.arange(num_chunks * length), num - 1).reshape(num_chunks, length)
        others = None
    else:
        order = form.row_order if side == "rows" else form.column_order
        size = int(np.clip(2 ** int(np.log2(max(num_cells / num, 1))), _SHORTEST, _LONGEST))
        length = max(1, _TILE_CELLS // size)
        # The most that there can be, so that other cells compile nothing.
        num_chunks = -(-(num_cells // size + min(num, num_cells)) // length)
        num_tiles = num_chunks * length
        ordered = own[order]
        degree = jnp.bincount(own, length=num)
        tiles_of = -(-degree // size)
        position = jnp.arange(num_cells) - (jnp.cumsum(degree) - degree)[ordered]
        tile = (jnp.cumsum(tiles_of) - tiles_of)[ordered] + position // size
        source = jnp.full((num_tiles * size,), -1, jnp.int32)
        source = source.at[tile * size + position % size].set(order.astype(jnp.int32))
        source = source.reshape(num_chunks, length, size)
        vectors = jnp.full((num_tiles,), num - 1).at[tile].set(ordered).reshape(num_chunks, length)
        others = other[jnp.maximum(source, 0)].astype(jnp.int32)
    is_listed, safe = source >= 0, jnp.maximum(source, 0)

    def take(x: Array) -> Array:
        return x[safe]

    weight, potential = jnp.where(is_listed, form.weight[safe], 0.0), jax.tree.map(take, form.potential)
    if zero is not None:
        one, two = (jnp.ones(s.mean.shape[:1]) if s.weight is None else s.weight for s in sides)
        is_vector = jnp.arange(vectors.size).reshape(vectors.shape) < num
        number = jnp.where(is_vector, one[vectors], 0.0)[..., None] * two
        weight = jnp.where(is_listed, weight, number.astype(weight.dtype))
        potential = jax.tree.map(lambda x, y: jnp.where(is_listed, x, y), potential, zero)
    cells = Cells(
        vectors.astype(jnp.int32),
        others,
        potential,
        weight,
        form.offset[safe],
        None if form.common is None else form.common.coefficients[safe],
    )
    return Layout(cells, coefficients)


class Seen(NamedTuple):
    """The other side as the cells of a chunk see it: gathered for tiles, all of it for a grid."""

    moments: Moments
    is_gathered: bool

    def dot(self, own: Array, other: Array) -> Array:
        """Products of a vector per row of the chunk with the vectors of its cells, shape ``(b, m)``."""
        # as a product of many small matrices it would take twice as long
        return jnp.sum(own[:, None] * other, -1) if self.is_gathered else own @ other.T

    def sum(self, weight: Array, other: Array) -> Array:
        """Weighted sums over the cells of each row of the chunk, shape ``(b, n)``."""
        return jnp.einsum("bm,bmk->bk", weight, other) if self.is_gathered else weight @ other


class Products(NamedTuple):
    """Moments of the products of vectors in all cells of a layout, without offsets and common unknowns."""

    mean: Array
    """Shape ``(chunks, b, m)``."""
    variance: Array


def products_of(layout: Layout, own: Moments, other: Moments) -> Products:
    """Moments of the products in all cells, which is the one place where they are made.

    :param Moments own: of ``(u, 1)``.
    :param Moments other: of what multiplies it.
    """

    @jax.checkpoint
    def step(cells: Cells) -> Products:
        # of a variance that can be divided by, where nothing asks
        blank = Products(jnp.zeros_like(cells.weight), jnp.ones_like(cells.weight))
        return jax.lax.cond(
            _has_cells(cells),
            lambda: Products(*_product_moments(rows_of(own, cells.own), seen_from(cells, other))),
            lambda: blank,
        )

    return jax.lax.map(step, layout.cells)


def to_vectors(sums: _Sums, cells: Cells, found: _Sums) -> _Sums:
    """Add what was found of each row of a chunk to the vector that it belongs to."""

    def add(x: Array, y: Array) -> Array:
        return x.at[cells.own].add(y, indices_are_sorted=True, **IN_RANGE)

    return jax.tree.map(add, sums, found)


def visit(
    layout: Layout,
    products: Products,
    function: Callable[[Cells, Products], _Sums],
    start: _Sums,
    add: Callable[[_Sums, Cells, _Sums], _Sums] = to_vectors,
) -> _Sums:
    """Sums over all chunks.

    :param function: what is found in one of them.
    :param start: what it is added to.
    :param add: how; by default each row to its vector.
    """

    @jax.checkpoint
    def step(sums: _Sums, chunk: tuple[Cells, Products]) -> tuple[_Sums, None]:
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *chunk))
        # of the sums themselves a branch would make a copy
        found = jax.lax.cond(_has_cells(chunk[0]), lambda: function(*chunk), lambda: blank)
        return add(sums, chunk[0], found), None

    return jax.lax.scan(step, start, (layout.cells, products))[0]


def visit_vectors(
    layout: Layout,
    products: Products,
    other: Moments,
    function: Callable[[Cells, Products, Seen], _Sums],
    start: _Sums,
) -> _Sums:
    """The same with the vectors of the other side, whose moments are given, as the cells see them."""
    return visit(layout, products, lambda cells, here: function(cells, here, seen_from(cells, other)), start)


def _has_cells(cells: Cells) -> Array:
    """True if a chunk does not only fill up."""
    return jnp.any(cells.weight > 0.0)


def seen_from(cells: Cells, other: Moments) -> Seen:
    """Vectors of the other side, whose moments are given, as the cells of a chunk see them."""
    if cells.other is None:
        return Seen(other, False)
    return Seen(rows_of(other, cells.other), True)


def _product_moments(own: Moments, seen: Seen) -> tuple[Array, Array]:
    """Means and variances of the products of a chunk, shape ``(b, m)`` each."""
    other = seen.moments
    mean = seen.dot(own.mean, other.mean)
    if other.variance is not None:
        assert own.variance is not None
        variance = seen.dot(own.mean**2, other.variance) + seen.dot(own.variance, other.mean**2 + other.variance)
        return mean, variance
    assert own.covariance is not None and other.covariance is not None
    row, column = np.triu_indices(own.mean.shape[-1])
    twice = jnp.where(row == column, 1.0, 2.0)
    products = other.mean[..., row] * other.mean[..., column]
    variance = seen.dot(twice * own.second, other.covariance) + seen.dot(twice * own.covariance, products)
    return mean, variance


def quadratic_sums(seen: Seen, curvature: Array, slope: Array) -> tuple[Array, Array]:
    """Sums over the cells of each row of a chunk of what is expected of ``slope * eta - curvature * eta**2 / 2``, as a
    function of the vector ``u`` whose products ``eta`` with the vectors of the cells are.

    :return: upper triangles of ``precision``, of shape ``(b, n (n - 1) / 2)``, and ``linear``, ``(b, n - 1)``, so that
        the sum is ``linear @ u - u @ precision @ u / 2`` and a constant.
    """
    moments = seen.moments
    size = moments.mean.shape[-1] - 1
    mean, last = moments.mean[..., :size], moments.mean[..., size]
    if not seen.is_gathered or moments.variance is None:
        whole, column = seen.sum(curvature, moments.second), np.triu_indices(size + 1)[1]
        of_last = np.flatnonzero(column == size)[:-1]
        return whole[:, np.flatnonzero(column < size)], seen.sum(slope, mean) - whole[:, of_last]
    weighted = curvature[..., None] * mean
    if mean.shape[1] <= _WRITTEN_OUT:
        terms = (weighted[:, cell, :, None] * mean[:, cell, None, :] for cell in range(mean.shape[1]))
        products = functools.reduce(operator.add, terms)
    else:
        products = jnp.einsum("bmk,bml->bkl", weighted, mean)
    spread = seen.sum(curvature, moments.variance[..., :size])
    precision = products + spread[..., None] * jnp.eye(size, dtype=mean.dtype)
    return pack(precision), seen.sum(slope - curvature * last, mean)
