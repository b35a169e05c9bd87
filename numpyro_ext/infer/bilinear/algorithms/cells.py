r"""Sums over the cells of a bilinear form, for the vectors of one side when those of the other are held.

Given the other side, the expected log factors separate into one sum for each vector; a cell contributes a function of
its vector ``u`` and of the partner of that, :math:`M v + \alpha`. Cells are visited in the order of their own side, in
chunks, so that memory does not grow with their number times the square of the size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from ....linalg.cholesky import cholesky
from ....linalg.in_range import IN_RANGE, rows_of
from ....linalg.short_axes import as_matrices
from ....potentials.integrals.products.exponential_product import spectral_radius
from ....structure.bilinear.form import Bilinear
from .background import AllPairs, listed_potential, rising_zero, sums_over_pairs, unlisted_zeros
from .terms import Block, Coefficients, Factors, Pairing, diagonal_partner, full_partner

Side = Literal["rows", "columns"]
_Carry = TypeVar("_Carry")

# Numbers in the largest array of a chunk: it should stay in the cache.
_CHUNK_NUMBERS = 1 << 19
_SMALLEST_CHUNK = 512


class Cells(NamedTuple):
    """Arrays with one entry per cell."""

    own: Array
    other: Array
    factors: Factors
    weight: Array
    offset: Array
    coefficients: Coefficients
    """Coefficients that differ between cells."""


class View(NamedTuple):
    """The cells in the order of one side, which is called ``own``."""

    cells: Cells
    """Cut into chunks, the last of them padded with cells of no weight: leading axes ``(num_chunks, length)``."""
    shared: Coefficients
    """Coefficients that are the same for all cells, with a leading axis of length one."""
    zeros: AllPairs | None = None
    """Zeros in all pairs of vectors that are no cells, if these are counts of zero."""


class CellSums(NamedTuple):
    """Sums over the cells of each vector."""

    value: Array
    """Expected log factors, shape ``(num,)``; minus infinity where an expectation does not exist."""
    slope: Array
    """With respect to the mean, shape ``(num, size)``."""
    precision: Array
    """Minus twice the slope with respect to the covariance: ``(num, size, size)``, or its diagonal ``(num, size)``."""


def oriented(form: Bilinear, side: Side) -> tuple[Array, Array, Coefficients]:
    """Vectors that the cells touch, own and other, and the coefficients, as one side sees them.

    :param Bilinear form: the model.
    :param str side: ``"rows"`` or ``"columns"``.
    """
    is_rows = side == "rows"
    coupling = form.coupling if is_rows or form.is_paired else form.coupling.swapaxes(-1, -2)
    linear = (form.row_linear, form.column_linear) if is_rows else (form.column_linear, form.row_linear)
    coefficients = Coefficients(
        coupling if form.is_paired else None,
        None if form.is_paired else coupling,
        *(x if x.shape[-1] else None for x in linear),
    )
    index = (form.row_index, form.column_index) if is_rows else (form.column_index, form.row_index)
    return *index, coefficients


def make_view(form: Bilinear, side: Side, width: int) -> View:
    """Order and cut the cells for sums over one side.

    :param Bilinear form: the model.
    :param str side: ``"rows"`` or ``"columns"``.
    :param int width: numbers that one cell needs in the largest array; decides the length of the chunks.
    """
    order = form.row_order if side == "rows" else form.column_order
    num_cells = form.num_cells
    length = min(max(num_cells, 1), max(_SMALLEST_CHUNK, _CHUNK_NUMBERS // width))
    num_chunks = -(-num_cells // length)
    padding = num_chunks * length - num_cells

    def cut(x: Array, mode: str = "constant") -> Array:
        x = jnp.pad(x[order], [(0, padding)] + [(0, 0)] * (x.ndim - 1), mode=mode)
        return x.reshape(num_chunks, length, *x.shape[1:])

    own, other, everything = oriented(form, side)
    cells = Cells(
        own=cut(own, "edge"),
        other=cut(other, "edge"),
        # what is repeated has no weight, but must be finite
        factors=jax.tree.map(lambda x: cut(x, "edge"), Factors.of(form.potential, form.offset.dtype)),
        weight=cut(form.weight),
        offset=cut(form.offset),
        coefficients=Coefficients(*(None if x is None or x.shape[0] != num_cells else cut(x) for x in everything)),
    )
    shared = Coefficients(*(None if x is None or x.shape[0] == num_cells else x for x in everything))
    if form.background is None:
        return View(cells, shared)
    bound = rising_zero(jnp.zeros((), form.rows.mean.dtype))
    pairs = AllPairs.of_form(form, oriented(form, "rows")[2], bound, form.background.exposure)
    return View(cells, shared, pairs if side == "rows" else pairs.seen_from_columns())


def sum_cells(view: View, own: Block, other: Block, *, with_matrix: bool = False) -> CellSums:
    """Sums of the expected log factors, and of their slopes, over the cells of each vector of ``own``.

    :param View view: the cells in the order of ``own``.
    :param Block own: the vectors that the sums are taken for.
    :param Block other: the vectors that are held.
    :param bool with_matrix: the whole precision, also where components are independent.

    Cost: per cell linear in the size if components are independent on both sides, else cubic.
    """
    num, size = own.mean.shape
    if with_matrix and view.cells.factors.poisson is None:
        # Their diagonal expectations know no more than the diagonal.
        own, other = (b._replace(covariance=_as_needed(b.covariance, False)) for b in (own, other))
    has_matrix = not _is_diagonal(view, own, other) and (own.covariance is None or own.covariance.ndim == 3)
    has_matrix = has_matrix or with_matrix
    num_entries = size * size if has_matrix else size

    def visit(sums: tuple[Array, Array], cells: Cells, pairing: Pairing) -> tuple[Array, Array]:
        found = cells.factors.terms(cells.offset, cells.weight, pairing, with_matrix=has_matrix)
        both = jnp.concatenate([found.slope, found.precision.reshape(-1, num_entries)], axis=-1)
        return (
            sums[0].at[cells.own].add(found.value, indices_are_sorted=True, **IN_RANGE),
            sums[1].at[cells.own].add(both, indices_are_sorted=True, **IN_RANGE),
        )

    start = jnp.zeros((num,), own.mean.dtype), jnp.zeros((num, size + num_entries), own.mean.dtype)
    value, both = _visit_cells(view, own, other, visit, start)
    precision = both[:, size:].reshape((num, size, size) if has_matrix else (num, size))
    sums = CellSums(_no_nan(value), both[:, :size], precision)
    if view.zeros is None:
        return sums
    zeros = sums_over_pairs(view.zeros, own, other)
    matrix = zeros.matrix if has_matrix else jnp.diagonal(zeros.matrix)
    scale = zeros.scale.reshape((-1,) + (1,) * matrix.ndim)
    return CellSums(sums.value + zeros.value, sums.slope + zeros.slope_at(own.mean), precision + scale * matrix)


def sum_values(view: View, own: Block, other: Block) -> Array:
    """The values of :func:`sum_cells` alone, shape ``(num,)``."""

    def visit(sums: Array, cells: Cells, pairing: Pairing) -> Array:
        found = cells.factors.values(cells.offset, cells.weight, pairing)
        return sums.at[cells.own].add(found, indices_are_sorted=True, **IN_RANGE)

    start = jnp.zeros(own.mean.shape[:1], own.mean.dtype)
    value = _no_nan(_visit_cells(view, own, other, visit, start))
    return value if view.zeros is None else value + sums_over_pairs(view.zeros, own, other).value


def with_best_zeros(rows_view: View, columns_view: View, rows: Block, columns: Block) -> tuple[View, View]:
    """The views with the parabolas of the zeros of each row where these touch best, in both orders of the cells.

    Where a row has no zeros the parabola touches at zero.
    """
    assert rows_view.zeros is not None and columns_view.zeros is not None

    def visit(sums: Array, cells: Cells, pairing: Pairing) -> Array:
        predictor = cells.offset + pairing.partner.mean_shift + jnp.sum(pairing.mean * pairing.partner.mean, -1)
        three = jnp.stack([jnp.ones_like(predictor), predictor, jnp.zeros_like(predictor)], axis=-1)
        return sums.at[cells.own].add(jnp.where((cells.weight > 0.0)[:, None], three, 0.0), indices_are_sorted=True)

    start = jnp.zeros((rows.mean.shape[0], 3), rows.mean.dtype)
    pairs = rows_view.zeros
    # Listed cells have a zero each less, whatever the exposure.
    listed = _visit_cells(rows_view, rows, columns, visit, start) * pairs.own_weight[:, None] * pairs.other_weight[0]
    number, total, _ = unlisted_zeros(pairs, rows, columns, listed).T
    bound = rising_zero(total / jnp.where(number > 0.0, number, 1.0))
    return (
        rows_view._replace(zeros=pairs._replace(own_bound=bound)),
        columns_view._replace(zeros=columns_view.zeros._replace(other_bound=bound)),
    )


def _visit_cells(
    view: View, own: Block, other: Block, visit: Callable[[_Carry, Cells, Pairing], _Carry], start: _Carry
) -> _Carry:
    """``visit(carry, cells, pairing)`` for one chunk after the other."""
    is_diagonal = _is_diagonal(view, own, other)
    size = own.mean.shape[1]
    own = Block(own.mean, _as_needed(own.covariance, is_diagonal))
    held: tuple[Any, ...] = (other.mean, _as_needed(other.covariance, is_diagonal))
    if not is_diagonal and other.covariance is not None:
        # The spread of the partner is made of a root of the covariance.
        held += (cholesky(held[1]) if other.covariance.ndim == 3 else jnp.sqrt(held[1]),)
    make_partner = diagonal_partner if is_diagonal else full_partner
    is_shared = all(x is None for x in view.cells.coefficients)
    prepared = make_partner(view.shared, size, *held) if is_shared else held

    def step(carry: _Carry, cells: Cells) -> tuple[_Carry, None]:
        partner: Any = rows_of(prepared, cells.other)
        if not is_shared:
            both = zip(view.shared, cells.coefficients, strict=True)
            coefficients = Coefficients(*(x if y is None else y for x, y in both))
            partner = make_partner(coefficients, size, *partner)
        mean, covariance = rows_of((own.mean, own.covariance), cells.own)
        if view.zeros is not None:
            assert cells.factors.potential is not None
            listed = listed_potential(view.zeros, cells.factors.potential, cells.own, cells.other)
            cells = cells._replace(factors=Factors(None, listed))
        return visit(carry, cells, Pairing(mean, covariance, partner, is_diagonal)), None

    return jax.lax.scan(step, start, view.cells)[0]


def _is_diagonal(view: View, own: Block, other: Block) -> bool:
    """True if everything can be done component by component."""
    is_paired = view.shared.pairs is not None or view.cells.coefficients.pairs is not None
    return is_paired and own.is_diagonal and other.is_diagonal


def _as_needed(covariance: Array | None, is_diagonal: bool) -> Array | None:
    return covariance if is_diagonal or covariance is None else as_matrices(covariance)


def _no_nan(value: Array) -> Array:
    return jnp.where(jnp.isnan(value), -jnp.inf, value)


def largest_product(view: View, own: Block, other: Block) -> Array:
    """Largest eigenvalue of the covariance of ``u`` times that of its partner, over all cells that have a factor.

    It is below one wherever the bound is finite, and zero where one side is a point.
    """

    def visit(largest: Array, cells: Cells, pairing: Pairing) -> Array:
        covariance, root = pairing.covariance, pairing.partner.root
        if covariance is None or root is None:
            return largest
        if covariance.ndim == 2:
            radius = jnp.max(covariance * root**2, axis=-1)
        else:
            radius = spectral_radius(covariance, root)
        return jnp.maximum(largest, jnp.max(jnp.where(cells.weight > 0.0, radius, 0.0)))

    return _visit_cells(view, own, other, visit, jnp.zeros((), own.mean.dtype))


def conditional_moments(form: Bilinear, side: Side, own: Block, other: Array) -> tuple[Array, Array]:
    """Mean and variance of the predictor of each cell, given the vectors of the other side.

    :param str side: which side ``own`` is.
    :param other: values of the vectors of the other side, shape ``(num, size)``.
    :return: two arrays of shape ``(num_cells,)``.
    """
    own_index, other_index, coefficients = oriented(form, side)
    partner = full_partner(coefficients, own.mean.shape[1], other[other_index], None)
    mean = form.offset + partner.mean_shift + jnp.sum(own.mean[own_index] * partner.mean, -1)
    if own.covariance is None:
        return mean, jnp.zeros_like(mean)
    covariance = own.covariance[own_index]
    if covariance.ndim == 2:
        return mean, jnp.sum(covariance * partner.mean**2, -1)
    return mean, jnp.einsum("ci,cij,cj->c", partner.mean, covariance, partner.mean)


def cell_expectations(form: Bilinear, rows: Block, columns: Block) -> Array:
    r"""Log of :math:`E\, e^{\eta}` of each cell, shape ``(num_cells,)``; ``inf`` where it does not exist."""

    def expectation(cells: Cells, pairing: Pairing) -> Array:
        return cells.offset + pairing.partner.shift + pairing.exponential_product().log_value

    return _of_each_cell(form, rows, columns, expectation)


def cell_values(form: Bilinear, rows: Block, columns: Block) -> Array:
    """The expected log factor of each cell, without its weight, shape ``(num_cells,)``."""

    def value(cells: Cells, pairing: Pairing) -> Array:
        return cells.factors.values(cells.offset, jnp.ones_like(cells.weight), pairing)

    return _of_each_cell(form, rows, columns, value)


def _of_each_cell(form: Bilinear, rows: Block, columns: Block, function: Callable[[Cells, Pairing], Array]) -> Array:
    """A function of each cell, shape ``(num_cells,)``."""
    width = 3 * rows.mean.shape[1] ** 2
    view = make_view(form._replace(row_order=jnp.arange(form.num_cells), background=None), "rows", width)

    def visit(carry: tuple[Array, Array], cells: Cells, pairing: Pairing) -> tuple[Array, Array]:
        chunk, out = carry
        return chunk + 1, out.at[chunk].set(function(cells, pairing))

    start = jnp.asarray(0), jnp.zeros(view.cells.own.shape, rows.mean.dtype)
    _, out = _visit_cells(view, rows, columns, visit, start)
    return out.reshape(-1)[: form.num_cells]


def draw_block(block: Block, rng_key: Array) -> Array:
    """One draw of all vectors of a side, shape ``(num, size)``."""
    if block.covariance is None:
        return block.mean
    white = jax.random.normal(rng_key, block.mean.shape, block.mean.dtype)
    if block.covariance.ndim == 2:
        return block.mean + jnp.sqrt(block.covariance) * white
    return block.mean + jnp.einsum("eij,ej->ei", cholesky(block.covariance), white)


def over_devices(x: _Carry, axis_name: str | None) -> _Carry:
    """The sum over the devices of an axis, within ``shard_map``; ``x`` itself where there is no such axis.

    :param x: array or tree of arrays.
    :param str axis_name: of the axis of devices.
    """
    return x if axis_name is None else jax.lax.psum(x, axis_name)
