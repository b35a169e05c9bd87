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

from ..background import even_zero
from ..cells import over_devices
from ..schedules.methods import Prepared
from ..schedules.visits import Factor, SharedVectors, Visited
from ..steps import divergence
from ..sweeps import State
from .sums import vector_values
from .sweep import (
    Elsewhere,
    Options,
    blocks_of,
    common_with_sums,
    side_with_sums,
    tangents_of,
    update_side,
    with_tangents,
)


def visit_closed(
    prepared: Prepared,
    visited: Visited,
    shared: SharedVectors,
    moves_shared: Array,
    elsewhere: Elsewhere | None = None,
    *,
    options: Options,
    axis_name: str | None = None,
) -> tuple[Visited, SharedVectors]:
    """Update the batch's rows and then the shared columns, and renew the batch's factor.

    Arguments and results are those of :func:`~numpyro_ext.infer.bilinear.algorithms.schedules.visits.visit_batch`.

    :param Elsewhere elsewhere: what other batches say of a tangent that all share, if there is one.
    :param Options options: static choices.

    Cost: that of a sweep over the batch, and for each column a solve more.
    """
    options = options._replace(axis_name=axis_name)
    form, views = prepared.form, prepared.views._replace(elsewhere=elsewhere)
    form = form._replace(columns=shared.total.without(visited.factor))
    state = State.beginning_at(visited.own.block, shared.block, -jnp.inf)._replace(common=shared.common)
    cells, common_factor = views.at_cells(state, "rows", options), None
    if form.common is not None:
        assert shared.common_total is not None and visited.common_factor is not None
        form = form._replace(common=form.common._replace(prior=shared.common_total.without(visited.common_factor)))
        moved, sums = common_with_sums(form, state, with_tangents(views, state, options, cells), options, cells)
        state, common_factor = _if(moves_shared, moved, state), Factor(*sums)
    best = with_tangents(views, state, options, cells)
    state = update_side(form, state, best, "rows", options, cells=cells)

    cells = views.at_cells(state, "columns", options)
    left = None
    if views.pairs is not None:
        tangents, left = tangents_of(views, state, options, cells)
        views = views._replace(pairs=views.pairs._replace(own_bound=even_zero(tangents)))
        left = None if elsewhere is None else over_devices(jnp.sum(left, 0), axis_name)
    problem = views.problem("columns", options)
    values = vector_values(problem, cells.products, *blocks_of(state, "columns"), state.common)
    objective = jnp.sum(values) - jnp.sum(divergence(state.rows, form.rows)) + form.log_constant
    moved, sums = side_with_sums(form, state, views, "columns", options, cells=cells)
    state = _if(moves_shared, moved, state)
    rows, columns = blocks_of(state)
    own = visited.own._replace(block=rows)
    found = Visited(own, Factor(*sums), over_devices(objective, axis_name), common_factor, left)
    shared = shared._replace(block=columns, common=state.common)
    return found, shared.with_factors(visited, found)


def _if(condition: Array, one: State, other: State) -> State:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)
