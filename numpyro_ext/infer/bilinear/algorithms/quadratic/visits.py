"""Closed updates of batches of rows: each visit updates the rows of a batch, and then all columns.

As in :mod:`~numpyro_ext.infer.bilinear.algorithms.schedules.visits` the columns keep a Gaussian factor of every batch.
Here it is the bound of the batch's factors at the tangents of its last visit, so that an update of the columns is
exact. A visit of one batch that is all rows is a sweep; visits of several raise the sum of these bounds, batch by batch
(Neal and Hinton 1998), and end where sweeps end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..background import even_zero
from ..cells import over_devices
from ..schedules.methods import Prepared
from ..schedules.visits import BatchSelection, Factor, Moves, SharedSelection, SharedVectors, Visited, own_moments
from ..selection import Selected
from ..steps import divergence
from ..sweeps import State
from .sums import vector_values
from .sweep import (
    Elsewhere,
    Options,
    Views,
    blocks_of,
    tangents_of,
    update_common,
    update_side,
    with_counts,
    with_shares,
    with_tangents,
)


def visit_closed(
    prepared: Prepared,
    visited: Visited,
    shared: SharedVectors,
    moves: Moves,
    elsewhere: Elsewhere | None = None,
    *,
    options: Options,
    axis_name: str | None = None,
) -> tuple[Visited, SharedVectors]:
    """Update the batch's rows and then the shared columns, and renew the batch's factor.

    Arguments and results are those of :func:`~numpyro_ext.infer.bilinear.algorithms.schedules.visits.visit_batch`.

    :param Elsewhere elsewhere: what other batches say of tangents and shares, if these belong to all.
    :param Options options: static choices.

    Cost: that of a sweep over the batch, and for each column a solve more.
    """
    options = options._replace(axis_name=axis_name)
    form, views = prepared.form, prepared.views._replace(elsewhere=elsewhere)
    form = form._replace(columns=shared.total.without(visited.factor))
    state = State.beginning_at(visited.own.block, shared.block, -jnp.inf)._replace(common=shared.common)
    if shared.selection is not None:
        views, state = _with_selection(views, state, visited, shared.selection)
    cells, common_factor, total = views.at_cells(state, "rows", options), None, None
    if form.common is not None:
        assert shared.common_total is not None and visited.common_factor is not None
        form = form._replace(common=form.common._replace(prior=shared.common_total.without(visited.common_factor)))
        moved, of_common = update_common(form, state, with_tangents(views, state, options, cells), options, cells)
        state, common_factor = _if(moves.shared, moved, state), Factor(of_common.matrices, of_common.linear)
    if state.selected is not None:
        moved, _, total = with_shares(state, views, options, cells)
        state = _if(moves.shares, moved, state)
    state, _ = update_side(form, state, with_tangents(views, state, options, cells), "rows", options, cells=cells)

    cells, left, values = views.at_cells(state, "columns", options), None, None
    if views.pairs is not None:
        weighted = views if state.selected is None else with_tangents(views, state, options)
        tangents, left = tangents_of(weighted, state, options, cells)
        left = None if elsewhere is None else over_devices(jnp.sum(left, 0), axis_name)
        if state.selected is None:
            views = views._replace(pairs=views.pairs._replace(own_bound=even_zero(tangents)))
        else:
            moved = state._replace(selected=state.selected._replace(tangent=tangents[0]))
            moved, values, _ = with_shares(moved, views, options, cells)
            state = _if(moves.shared, moved, state)
            views = with_tangents(views, state, options, cells)
    problem = views.problem("columns", options)
    expected = vector_values(problem, cells.products, *blocks_of(state, "columns"), state.common)
    objective = jnp.sum(expected) - jnp.sum(divergence(state.rows, form.rows)) + form.log_constant
    moved, sums = update_side(form, state, views, "columns", options, cells=cells)
    assert sums is not None  # only those of rows are not kept
    state = _if(moves.shared, moved, state)

    rows, columns = blocks_of(state)
    own, objective = visited.own._replace(block=rows), over_devices(objective, axis_name)
    moments = own_moments(form, rows, axis_name)
    found = Visited(own, Factor(sums.matrices, sums.linear), objective, common_factor, left, moments=moments)
    shared = shared._replace(block=columns, common=state.common)
    if state.selected is not None:
        found, shared = _seen(found, shared, visited, views, state.selected, total, values, axis_name)
    return found, shared.with_factors(visited, found)


def _with_selection(views: Views, state: State, visited: Visited, selection: SharedSelection) -> tuple[Views, State]:
    """Views and state with the selection of pairs of which some are censored."""
    own = visited.own
    assert views.censored is not None and visited.selection is not None
    assert own.log_shares is not None and own.counts is not None
    views = views._replace(censored=views.censored._replace(counts=(views.censored.counts[0], selection.listed)))
    log_rows = own.log_shares + visited.selection.log_share
    selected = Selected(own.counts, selection.counts, log_rows, selection.log_shares, selection.tangent)
    return views, with_counts(state._replace(selected=selected), views)


def _seen(
    found: Visited,
    shared: SharedVectors,
    before: Visited,
    views: Views,
    selected: Selected,
    log_total: Array | None,
    values: Array | None,
    axis_name: str | None,
) -> tuple[Visited, SharedVectors]:
    """Outcome of a visit, and what is shared, with the selection of pairs."""
    assert views.censored is not None and before.selection is not None and shared.selection is not None
    assert log_total is not None and values is not None
    rows, columns = views.censored.terms(selected, axis_name)
    log_share = before.selection.log_share
    own = found.own._replace(log_shares=selected.log_rows - log_share, counts=selected.row_counts)
    selection = BatchSelection(log_share, log_total, jnp.exp(log_share), values, rows)
    of_all = shared.selection._replace(
        log_shares=selected.log_columns, counts=selected.column_counts, tangent=selected.tangent, terms=columns
    )
    return found._replace(own=own, selection=selection), shared._replace(selection=of_all)


def _if(condition: ArrayLike, one: State, other: State) -> State:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)
