"""Sweeps of closed updates over the common unknowns and both sides of a bilinear model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .....potentials.families.binary import LogitPotential
from .....structure.bilinear.form import Bilinear, GaussianSide
from ..background import AllPairs, even_zero
from ..cells import Block, Side, oriented, over_devices
from ..gauge import gauge_step
from ..incidence import SideBlock
from ..selection import Censored, SelectionRule
from ..sweeps import Info, State, cost_of, relative_change
from .layout import Layout, LayoutKind, Products, make_layout
from .rules import Bound
from .sums import (
    Problem,
    VectorSums,
    best_tangents,
    common_sums,
    products_at,
    sums_of_some,
    values_at_moments,
    vector_sums,
    vector_values,
    zero_values,
    zeros_left,
)
from .updates import Stages, Update, closed_update, stages_of, update_in_parts, vectors_at_a_time

Zeros = Literal["by_row", "shared", "exact"]
"""Tangents of zeros that nobody listed: one for each row, one for all rows, or one for each of them."""


class Options(NamedTuple):
    """Static choices."""

    bound: Bound
    kind: LayoutKind
    is_diagonal: bool
    """True if components are independent on both sides, and in products or linear terms alone."""
    update: Update = "joint"
    zeros: Zeros = "by_row"
    selection: SelectionRule = "learned"
    """Shares of rows and columns in the censored pairs, where there are any: at their best, or without regard to the
    vectors, so that rare ones are not pruned."""
    axis_name: str | None = None
    """The axis of devices between which the rows are divided, if they are."""


class Elsewhere(NamedTuple):
    """Sums over the rows of other batches."""

    left: Array
    """Number, sum of predictors and sum of expected squares of their unlisted zeros, shape ``(3,)``."""
    values: Array | None = None
    """Bounds of the expected log probability that a pair with each column is censored, by the shares of their rows; for
    censored pairs alone."""
    share: Array | None = None
    """Sum of the shares of these rows."""
    log_own_share: Array | None = None
    """Log of the sum of the shares of the rows that are here."""


class Views(NamedTuple):
    """The cells in the order of either side, and the zeros that nobody listed."""

    rows: Layout
    columns: Layout
    pairs: AllPairs | None
    """Zeros of all pairs, seen from the rows."""
    censored: Censored | None = None
    elsewhere: Elsewhere | None = None
    """Sums over other batches, if there are any that share tangents or shares."""

    def problem(self, side: Side, options: Options) -> Problem:
        """The cells and zeros as one side sees them."""
        pairs = self.pairs if side == "rows" or self.pairs is None else self.pairs.seen_from_columns()
        return Problem(getattr(self, side), pairs, options.bound, options.is_diagonal, self.censored is not None)

    def at_cells(self, state: State, side: Side, options: Options) -> AtCells:
        """The products of a posterior in all cells, in the order of a side."""
        return AtCells(side, products_at(self.problem(side, options), *blocks_of(state, side)))


class AtCells(NamedTuple):
    """Moments of the products in all cells, which hold until vectors move."""

    side: Side
    """In whose order they are."""
    products: Products


def make_views(form: Bilinear, options: Options, is_cell: Array | None = None) -> Views:
    """Order the cells.

    :param Bilinear form: the model; all coefficients are the same for all cells.
    :param Options options: of these the layout counts.
    :param is_cell: false for cells that only fill up the arrays, by default true for all.
    """
    pairs, zero, background = None, None, form.background
    if background is not None and options.zeros == "exact" and background.selection is None:
        assert isinstance(form.potential, LogitPotential)
        zero = LogitPotential(jnp.zeros((), jnp.asarray(form.potential.label).dtype))
    elif background is not None:
        bound = even_zero(jnp.ones((), form.rows.mean.dtype))
        pairs = AllPairs.of_form(form, oriented(form, "rows")[2], bound, 1.0)
    layouts = (make_layout(form, side, options.kind, zero, is_cell) for side in ("rows", "columns"))
    return Views(next(layouts), next(layouts), pairs, Censored.of_form(form, options.axis_name))


def sweep(
    form: Bilinear,
    state: State,
    options: Options,
    *,
    views: Views | None = None,
    first: Side = "rows",
    refresh: bool = False,
    with_gauge: bool = False,
) -> tuple[State, Info]:
    """One update of the common unknowns, of all vectors of one side, and of all of the other.

    :param Bilinear form: the model.
    :param State state: where to start.
    :param Options options: static choices.
    :param Views views: its cells, from :func:`make_views`; by default they are made.
    :param str first: side that moves first.
    :param bool refresh: whether tangents are found anew before each group of components.
    :param bool with_gauge: whether the exact step along the directions in which the data is silent comes last.
    :return: the next state and what the sweep found. The objective never falls.
    """
    views = make_views(form, options) if views is None else views
    state = with_counts(state, views)
    cells = views.at_cells(state, first, options)
    if state.common is not None:
        state, _ = update_common(form, state, with_tangents(views, state, options, cells), options, cells)
    for side in (first, _other(first)):
        if side != first:
            cells = views.at_cells(state, side, options)
            state = _with_tangent(state, views, options, cells)
        if views.censored is not None:
            state = with_shares(state, views, options, cells).state
        views = with_tangents(views, state, options, cells)
        state, _ = update_side(form, state, views, side, options, refresh=refresh, cells=cells)
    if with_gauge and views.censored is None:
        state = _improved(form, state, options.axis_name)
    objective = bound_of(form, state, views, options)
    change = relative_change(objective, state.objective, jnp.zeros_like(objective))
    state = state._replace(objective=objective)
    return state, Info(objective, change, jnp.zeros_like(objective), jnp.asarray(0))


def _other(side: Side) -> Side:
    return "columns" if side == "rows" else "rows"


def with_tangents(views: Views, state: State, options: Options, cells: AtCells | None = None) -> Views:
    """The views with the tangents of zeros at their best, or with the zeros that a state says of censored pairs.

    :param AtCells cells: products of the state, where they are known.
    """
    if views.pairs is None:
        return views
    if views.censored is not None:
        selected = state.selected
        assert selected is not None
        shares = views.censored.shares(selected)
        weights = views.censored.number * shares[0], shares[1]
        tangent = jnp.broadcast_to(selected.tangent, weights[0].shape)
        pairs = views.pairs._replace(own_weight=weights[0], other_weight=weights[1], own_bound=even_zero(tangent))
        return views._replace(pairs=pairs)
    tangents, _ = tangents_of(views, state, options, cells)
    return views._replace(pairs=views.pairs._replace(own_bound=even_zero(tangents)))


def tangents_of(views: Views, state: State, options: Options, cells: AtCells | None) -> tuple[Array, Array]:
    """The best tangents of the zeros of each row, and what is summed over these."""
    side, products = views.at_cells(state, "rows", options) if cells is None else cells
    left = zeros_left(views.problem(side, options), products, *blocks_of(state), state.common)
    is_shared = options.zeros == "shared" or views.censored is not None
    elsewhere = views.elsewhere and views.elsewhere.left
    return best_tangents(left, is_shared=is_shared, axis_name=options.axis_name, elsewhere=elsewhere), left


def _with_tangent(state: State, views: Views, options: Options, cells: AtCells) -> State:
    """The state with the best tangent of the zeros of censored pairs, where there are any."""
    if state.selected is None:
        return state
    tangents, _ = tangents_of(with_tangents(views, state, options), state, options, cells)
    return state._replace(selected=state.selected._replace(tangent=tangents[0]))


def with_counts(state: State, views: Views) -> State:
    """The state with the best Dirichlet distributions of the selection, where pairs are censored."""
    if views.censored is None or state.selected is None:
        return state
    return state._replace(selected=views.censored.with_counts(state.selected))


class WithShares(NamedTuple):
    """A state with the best shares of a side in the censored pairs."""

    state: State
    values: Array
    """Bounds of the expected log probability that a pair with each vector is censored, by the shares that the vectors
    which are here have of the other side."""
    log_total: Array
    """Log of what the shares were divided by."""


def with_shares(state: State, views: Views, options: Options, cells: AtCells) -> WithShares:
    """The state with the best shares in the censored pairs of the side in whose order the cells are."""
    side, products = cells
    selected, elsewhere = state.selected, views.elsewhere
    assert selected is not None and views.censored is not None
    values = jnp.zeros_like(selected.row_counts if side == "rows" else selected.column_counts)
    if options.selection == "learned":
        problem = with_tangents(views, state, options).problem(side, options)
        values = zero_values(problem, products, *blocks_of(state, side), state.common)
        if side == "columns":
            values = over_devices(values, options.axis_name) / views.censored.number
    of_all, log_share = values, jnp.zeros(())
    if elsewhere is not None:
        assert elsewhere.values is not None and elsewhere.share is not None and elsewhere.log_own_share is not None
        if side == "rows":
            log_share = elsewhere.log_own_share
        else:
            of_all = (values + elsewhere.values) / (jnp.exp(elsewhere.log_own_share) + elsewhere.share)
    shares, total = views.censored.best_shares(selected, of_all, side, options.axis_name)
    selected = selected._replace(**{"log_rows" if side == "rows" else "log_columns": shares + log_share})
    return WithShares(state._replace(selected=selected), values, total)


def blocks_of(state: State, side: Side = "rows") -> tuple[Block, Block]:
    """The vectors of a side, and those of the other."""
    rows, columns = state.rows, state.columns
    assert isinstance(rows, Block) and isinstance(columns, Block)
    return (rows, columns) if side == "rows" else (columns, rows)


def update_side(
    form: Bilinear,
    state: State,
    views: Views,
    side: Side,
    options: Options,
    *,
    refresh: bool = False,
    stages: Stages | None = None,
    cells: AtCells | None = None,
) -> tuple[State, VectorSums | None]:
    """The state after an update of all vectors of a side, and the sums over cells that the last components moved by,
    which are not kept of many rows.

    :param Views views: whose tangents of zeros are used.
    :param bool refresh: whether tangents are found anew before each group of components.
    :param stages: groups of components that move, by default all of them in the order of the options.
    :param AtCells cells: products of the state in the order of the side, where they are known.
    """
    prior: GaussianSide = getattr(form, side)
    num_paired = form.coupling.shape[-1] if form.is_paired else prior.mean.shape[1]
    if stages is None:
        stages = stages_of(options.update, num_paired, prior.mean.shape[1], refresh=refresh)
    for groups in stages:
        own, other = blocks_of(state, side)
        _, products = views.at_cells(state, side, options) if cells is None else cells
        given = views.problem(side, options), products, own, other, state.common
        if side == "rows" and 2 * (length := vectors_at_a_time(own)) < len(own.mean):
            block, sums = update_in_parts(own, prior, sums_of_some(*given, length), groups, length), None
        else:
            sums = vector_sums(*given)
            if side == "columns":
                sums = over_devices(sums, options.axis_name)
            block = closed_update(own, prior, sums, groups)
        state, cells = with_side(state, side, block), None
    return state, sums


def with_side(state: State, side: Side, block: SideBlock) -> State:
    """The state with another posterior of a side."""
    return state._replace(rows=block) if side == "rows" else state._replace(columns=block)


def update_common(
    form: Bilinear, state: State, views: Views, options: Options, cells: AtCells | None = None
) -> tuple[State, VectorSums]:
    """The state after an update of the common unknowns, and the sums over cells that they moved by.

    :param AtCells cells: products of the state, where they are known.
    """
    assert state.common is not None and form.common is not None
    side, products = views.at_cells(state, "rows", options) if cells is None else cells
    sums = common_sums(views.problem(side, options), products, *blocks_of(state), state.common)
    sums = over_devices(sums, options.axis_name)
    size = state.common.mean.shape[1]
    return state._replace(common=closed_update(state.common, form.common.prior, sums, ((0, size),))), sums


def _improved(form: Bilinear, state: State, axis_name: str | None) -> State:
    """The state after the exact step that leaves all products as they are, where it does not cost more."""
    rows, columns = gauge_step(form, *blocks_of(state), axis_name=axis_name)
    after = state._replace(rows=rows, columns=columns)
    is_better = cost_of(form, after, axis_name) <= cost_of(form, state, axis_name)
    return jax.tree.map(lambda x, y: jnp.where(is_better, x, y), after, state)


def values_of_side(state: State, views: Views, side: Side, options: Options) -> Array:
    """Lower bounds of the expected log factors of each vector of a side, at the best tangents, shape ``(num,)``."""
    cells = views.at_cells(state, side, options)
    if side == "rows" and views.pairs is not None and views.censored is None:
        # All zeros of a row at once: those of its cells were never added, and need not be taken back.
        tangents, left = tangents_of(views, state, options, cells)
        problem = views.problem(side, options)._replace(pairs=None)
        values = vector_values(problem, cells.products, *blocks_of(state), state.common)
        return values + even_zero(tangents).total(*left.T)
    problem = with_tangents(views, state, options, cells).problem(side, options)
    return vector_values(problem, cells.products, *blocks_of(state, side), state.common)


def bound_at_moments(state: State, views: Views, options: Options) -> Callable[[Bilinear, Views], Array]:
    """The objective of a state as a function of the form, where predictors are the same in all of these."""
    _, products = views.at_cells(state, "rows", options)
    value = values_at_moments(views.problem("rows", options), products, state.common)
    return lambda form, views: form.log_constant + value(views.rows) - cost_of(form, state)


def bound_of(form: Bilinear, state: State, views: Views, options: Options) -> Array:
    """The objective, with the constants of all densities."""
    value = jnp.sum(values_of_side(state, views, "rows", options))
    value = form.log_constant + over_devices(value, options.axis_name)
    if views.censored is not None:
        assert state.selected is not None
        value += views.censored.bound(state.selected, options.axis_name)
    return value - cost_of(form, state, options.axis_name)
