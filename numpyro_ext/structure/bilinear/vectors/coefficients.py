"""Coefficients of bilinear predictors: which there are, which all cells share, and their values.

They are exact derivatives of the predictors of all cells as a function of all unknowns, ``predict`` below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.transfer import generator_of
from ...errors import ModelStructureError
from ...model.hyper_site import HyperSite

_LARGEST_COUPLING = 100_000_000
"""Numbers in the products of components of all cells, where cells share none: 800 MB in float64."""

Predict = Callable[[Array], Array]


class Vectors(NamedTuple):
    """Unknowns that make the vectors of rows and columns, and the vectors that each cell touches."""

    num_unknowns: int
    elements: Sequence[np.ndarray]
    """Flat indices of the unknowns, for rows and columns, shape ``(num, size)``."""
    of_cells: Sequence[Any]
    """Vector that each cell touches, for rows and columns, shape ``(num_cells,)``; of a side that is coupled the
    combination of vectors. Arrays of a program where the vectors are those of a compiled function."""
    is_coupled: tuple[bool, bool] = (False, False)
    reference: tuple[Any, Any, Any] | None = None
    """Reference where a side is coupled: a cell, and the vectors of rows and columns that have the weight one in it."""

    @property
    def first(self) -> tuple[Any, Any, Any]:
        """The cell from which shared coefficients are read, and its vectors."""
        if self.reference is not None:
            return self.reference
        return 0, self.of_cells[0][0], self.of_cells[1][0]

    def without_cells(self) -> Vectors:
        """The vectors alone, as compiled functions keep them that are given what cells touch."""
        nothing = np.zeros(0, int)
        return self._replace(of_cells=(nothing, nothing), reference=None)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of components."""
        return self.elements[0].shape[1], self.elements[1].shape[1]

    @property
    def zeros(self) -> Array:
        """All unknowns at zero."""
        return jnp.zeros((self.num_unknowns,), jnp.result_type(float))

    def ordered(self, orders: Sequence[np.ndarray]) -> Vectors:
        """The same vectors with their components in another order."""
        return self._replace(elements=tuple(e[:, order] for e, order in zip(self.elements, orders, strict=True)))

    def split(self, unknowns: Array) -> tuple[Array, Array]:
        """Rows and columns of all unknowns, whose leading axes are kept."""
        return unknowns[..., self.elements[0]], unknowns[..., self.elements[1]]

    def join(self, rows: Array, columns: Array) -> Array:
        """All unknowns of rows and columns, whose leading axes are kept."""
        lead = rows.shape[:-2]
        out = jnp.zeros((*lead, self.num_unknowns), rows.dtype)
        for vectors, elements in zip((rows, columns), self.elements, strict=True):
            out = out.at[..., elements.reshape(-1)].set(vectors.reshape(*lead, -1))
        return out

    def direction(self, side: int, position: Array, amounts: Array | float = 1.0) -> Array:
        """Unknowns that are one (or the amounts) at a position of every vector of a side, else zero."""
        return self.zeros.at[jnp.asarray(self.elements[side])[:, position]].set(amounts)

    def spread(self, side: int, vector: Array, amounts: Array | float = 1.0) -> Array:
        """Unknowns in which every vector of a side is the same, times the amounts."""
        elements = jnp.asarray(self.elements[side])
        return self.zeros.at[elements].set(jnp.broadcast_to(jnp.reshape(amounts, (-1, 1)) * vector, elements.shape))


class Design(NamedTuple):
    """Coefficients that were found, and those that are the same for all cells."""

    num_pairs: int | None
    """Products of single components, or ``None`` if the coupling is a matrix."""
    is_coupling_shared: bool
    has_linear: tuple[bool, bool]
    is_linear_shared: tuple[bool, bool]
    is_mixed: bool = False
    """True if some component is in a product and in a linear term."""

    @property
    def is_shared(self) -> bool:
        """True if all cells have the same coefficients."""
        return self.is_coupling_shared and all(self.is_linear_shared)


class Probe(NamedTuple):
    """Random numbers with which coefficients are looked for."""

    weights: Array
    """One per cell: sums over cells with these weights do not cancel."""
    unknowns: Array
    tests: tuple[Array, Array]
    """A row and a column."""
    amounts: tuple[Array | float, Array | float]
    """Amount of each vector of a side that is coupled, so that differences of vectors do not vanish; else one."""


def random_probe(vectors: Vectors, rng_key: Array) -> Probe:
    """Random numbers for :func:`meetings`."""
    rng = generator_of(rng_key)
    dtype = jnp.result_type(float)
    weights = jnp.asarray(rng.uniform(1.0, 2.0, vectors.of_cells[0].size), dtype)
    unknowns = jnp.asarray(rng.standard_normal(vectors.num_unknowns), dtype)
    row, column = (jnp.asarray(rng.uniform(1.0, 2.0, size), dtype) for size in vectors.sizes)
    rows, columns = (
        jnp.asarray(rng.uniform(1.0, 2.0, len(e)), dtype) if coupled else 1.0
        for e, coupled in zip(vectors.elements, vectors.is_coupled, strict=True)
    )
    return Probe(weights, unknowns, (row, column), (rows, columns))


def off_zero(hyper: Mapping[str, HyperSite]) -> dict[str, Any]:
    """Hyperparameters near their starting values, none of which makes a coefficient zero by chance."""
    out = {}
    for number, (name, site) in enumerate(hyper.items()):
        free = site.transform.inv(jnp.asarray(site.init, jnp.result_type(float)))
        shift = 0.3 + 0.1 * jnp.cos(1.0 + number + jnp.arange(free.size)).reshape(free.shape)
        out[name] = site.transform(free + shift)
    return out


def meetings(predict: Predict, vectors: Vectors, probe: Probe) -> tuple[Array, list[Array], list[Array]]:
    """Strength with which components meet, and differences of coefficients between cells.

    :return: the largest product of each component of the rows with each of the columns; the smallest and largest value
        over the cells of combinations of the coupling, of the linear terms of the rows and of the columns; and the
        largest linear terms of each component of the rows and of the columns.
    """
    slopes = jax.grad(lambda x: jnp.dot(probe.weights, predict(x)))

    def products_of(position: Array) -> Array:
        return _along(vectors.direction(0, position, probe.amounts[0]), slopes, probe.unknowns)

    found = jax.lax.map(products_of, jnp.arange(vectors.sizes[0]))
    largest = jnp.max(jnp.abs(found[:, jnp.asarray(vectors.elements[1])]), axis=1)
    rows, columns = (vectors.spread(side, probe.tests[side], probe.amounts[side]) for side in (0, 1))

    row_slopes, products = map(_limits, jax.jvp(partial(_along, rows, predict), (vectors.zeros,), (columns,)))
    at_zero = jnp.abs(slopes(vectors.zeros))
    linear = [jnp.max(at_zero[jnp.asarray(elements)], axis=0) for elements in vectors.elements]
    return largest, [products, row_slopes, _limits(_along(columns, predict, vectors.zeros))], linear


def find_pairs(largest: np.ndarray) -> tuple[int | None, tuple[np.ndarray, np.ndarray]]:
    """Pairs of components, if each meets at most one of the other side.

    :param largest: how strongly components meet, from :func:`meetings`.
    :return: how many pairs there are, ``None`` if some component meets several; and the orders of the components of
        rows and columns in which pairs come first.
    """
    rounding = 1e-9 if largest.dtype == np.float64 else 1e-5
    meets = largest > rounding * np.max(largest, initial=0.0)
    is_matching = bool(meets.any() and np.all(meets.sum(0) <= 1) and np.all(meets.sum(1) <= 1))
    rows, columns = np.nonzero(meets) if is_matching else (np.zeros(0, int), np.zeros(0, int))
    orders = tuple(
        np.concatenate([first, np.setdiff1d(np.arange(size), first)])
        for first, size in zip((rows, columns), meets.shape, strict=True)
    )
    return len(rows) if is_matching else None, (orders[0], orders[1])


def find_design(
    num_pairs: int | None,
    ranges: Sequence[np.ndarray],
    linear: Sequence[np.ndarray],
    orders: Sequence[np.ndarray],
    vectors: Vectors,
) -> Design:
    """Find the coefficients.

    :param num_pairs: see :func:`find_pairs`.
    :param ranges: of combinations of the coefficients, from :func:`meetings`.
    :param linear: largest linear terms of each component of rows and columns, from there too.
    :param orders: of the components, from :func:`find_pairs`.
    :param Vectors vectors: of the model.
    :raises ModelStructureError: if there are too many.
    """
    # Of coupled sides they are, by :func:`~.incidence.find_incidence`.
    coupled = (any(vectors.is_coupled), *vectors.is_coupled)
    is_shared = [known or _is_shared(limits) for known, limits in zip(coupled, ranges, strict=True)]
    num_cells, sizes = vectors.of_cells[0].size, vectors.sizes
    if num_pairs is None and not is_shared[0] and num_cells * sizes[0] * sizes[1] > _LARGEST_COUPLING:
        raise ModelStructureError(
            f"the {num_cells} cells have products of {sizes[0]} x {sizes[1]} components each, which is more "
            "than can be kept. Write the predictor as a sum of products of single components, or, if cells touch "
            "several vectors of a side, take covariance={...: 'component'} for that."
        )
    has_linear = bool(np.any(ranges[1])), bool(np.any(ranges[2]))
    is_mixed = num_pairs is not None and any(
        np.any(terms[order[:num_pairs]] > 0.0) for terms, order in zip(linear, orders, strict=True)
    )
    return Design(num_pairs, is_shared[0], has_linear, (is_shared[1], is_shared[2]), is_mixed)


def coefficients(predict: Predict, vectors: Vectors, design: Design) -> tuple[Array, Array, Array]:
    """The coupling and the linear coefficients of rows and columns, as :class:`~.form.Bilinear` holds them."""
    sizes = vectors.sizes
    is_shared = (design.is_coupling_shared, *design.is_linear_shared)
    first = _first_cell(predict, vectors, design) if any(is_shared) else ()
    if design.is_coupling_shared:
        coupling = first[0]
    elif design.num_pairs is not None:
        positions = np.arange(design.num_pairs)
        coupling = _mixed(predict, vectors, positions, positions)
    else:
        coupling = _mixed(predict, vectors, *np.divmod(np.arange(sizes[0] * sizes[1]), sizes[1]))
        coupling = coupling.reshape(-1, *sizes)

    def linear(side: int) -> Array:
        if not design.has_linear[side]:
            return jnp.zeros((1, 0))
        return first[1 + side] if is_shared[1 + side] else _slopes(predict, vectors, side)

    return coupling, linear(0), linear(1)


def _first_cell(predict: Predict, vectors: Vectors, design: Design) -> tuple[Array, ...]:
    """Coupling and both linear coefficients of the first cell, each with a leading axis of length one."""
    zeros = vectors.zeros
    cell, *first = vectors.first
    rows, columns = (jnp.asarray(e)[i] for e, i in zip(vectors.elements, first, strict=True))
    slope = jax.grad(lambda x: predict(x)[cell])

    def product(places: Array) -> Array:
        """Products of all components of the row with the sum of some of the column."""
        return _along(zeros.at[places].set(1.0), slope, zeros)[rows]

    if design.num_pairs is not None:
        coupling = product(columns)[: design.num_pairs]
    else:
        coupling = jax.lax.map(product, columns).T
    at_zero = slope(zeros)
    return coupling[None], at_zero[rows][None], at_zero[columns][None]


def _slopes(predict: Predict, vectors: Vectors, side: int) -> Array:
    """Slopes of the predictors in each component where all else is zero, shape ``(cells, size)``."""

    def one(position: Array) -> Array:
        return _along(vectors.direction(side, position), predict, vectors.zeros)

    return jax.lax.map(one, jnp.arange(vectors.sizes[side])).T


def _mixed(predict: Predict, vectors: Vectors, row_positions: np.ndarray, column_positions: np.ndarray) -> Array:
    """Mixed second derivatives in pairs of components, shape ``(cells, pairs)``."""

    def one(pair: tuple[Array, Array]) -> Array:
        row, column = vectors.direction(0, pair[0]), vectors.direction(1, pair[1])
        return _along(column, partial(_along, row, predict), vectors.zeros)

    return jax.lax.map(one, (jnp.asarray(row_positions), jnp.asarray(column_positions))).T


def _along(direction: Array, function: Predict, x: Array) -> Array:
    """The derivative of a function at ``x`` along a direction."""
    return jax.jvp(function, (x,), (direction,))[1]


def _limits(x: Array) -> Array:
    return jnp.stack([jnp.min(x), jnp.max(x)])


def _is_shared(limits: np.ndarray) -> bool:
    """True if what lies between two limits is the same up to rounding."""
    return bool(np.ptp(limits) <= 16 * np.finfo(limits.dtype).eps * np.abs(limits).max())
