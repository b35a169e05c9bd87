"""Evaluations at given points in the loop of a search, so that one compiled copy of the algorithm serves both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .digits import field_tolerance
from .evaluation import Evaluation
from .search import SearchState, is_finished, proposal, take
from .stacked import element_of, with_element


class Visits(NamedTuple):
    """Points to be evaluated before a search goes on."""

    points: Array
    """Unconstrained, shape ``(n, d)``."""
    states: Any
    """States of the field from which the fits there start, stacked."""
    number: int | Array
    """Number of points that are visited, the first ones."""
    tol: Any
    """Tolerance of the fits there."""
    with_gradient: bool | Array = False
    """True if gradients are computed there; else they may be zero."""
    floor: Any = None
    """Objective below which no digits are asked for there."""


def search_and_visit(
    evaluate: Callable[..., tuple[Evaluation, Any]],
    note: Callable[[Array, Evaluation, Any, Array], object],
    state: SearchState,
    visits: Visits,
    *,
    num_evaluations: int | Array,
    field_tol: object,
    tol: float,
    max_iterations: int | Array,
    trace_length: int,
) -> tuple[SearchState, Array, Any]:
    """Visit points, which leave the search as it is, and go on with the search.

    :param evaluate: ``(values, state, tol, with_gradient)``: the objective, with a fit of the field to this tolerance,
        and what that fit has at hand for ``note``. Where visits have a floor it is a fifth argument.
    :param note: ``(values, evaluation, held, is_visit)``: what is kept of a visit; of an evaluation of the search
        nothing is.
    :param SearchState state: of the search.
    :param Visits visits: the points.
    :param field_tol: of fits of the search, as for :func:`~.digits.field_tolerance`. All else as for
        :func:`~.search.search`.
    :return: what that returns, and what was noted, stacked, with zeros where no visit was made.
    """
    start = state.num_evaluations
    note = jax.jit(note)  # traced once, for the shapes and for the loop

    def unfinished(carry: tuple[SearchState, Array, object, Array]) -> Array:
        state, _, _, k = carry
        return (k < visits.number) | (~is_finished(state) & (state.num_evaluations - start < num_evaluations))

    def advance(carry: tuple[SearchState, Array, object, Array]) -> tuple[SearchState, Array, Any, Array]:
        state, trace, notes, k = carry
        is_visit = k < visits.number
        point, begun = element_of((visits.points, visits.states), k)
        own = proposal(state, tol), state.best.state
        values, begun = lax.cond(is_visit, lambda: (point, begun), lambda: own)
        own_tol = field_tolerance(state, field_tol, tol, max_iterations)
        wanted = jnp.where(is_visit, visits.tol, own_tol), ~is_visit | visits.with_gradient
        floors = () if visits.floor is None else (jnp.where(is_visit, visits.floor, -jnp.inf),)
        found, held = evaluate(values, begun, *wanted, *floors)
        noted = note(values, found, held, is_visit)
        notes = lax.cond(is_visit, lambda: with_element(notes, k, noted), lambda: notes)
        place = jnp.where(is_visit, trace_length, state.num_evaluations - start)
        height = jnp.where(jnp.isfinite(found.objective), found.objective, -jnp.inf)
        trace = trace.at[place].set(height, mode="drop")
        taken = take(state, values, found, tol, max_iterations)
        state = lax.cond(is_visit, lambda: state, lambda: taken)
        return state, trace, notes, k + 1

    def first(points: Array, states: object) -> Any:
        state = jax.tree.map(lambda leaf: leaf[0], states)
        return note(points[0], *evaluate(points[0], state, field_tol, start > 0), start > 0)

    shapes = jax.eval_shape(first, visits.points, visits.states)
    notes = jax.tree.map(lambda leaf: jnp.zeros((len(visits.points), *leaf.shape), leaf.dtype), shapes)
    trace = jnp.full((trace_length,), jnp.nan, state.best.objective.dtype)
    begin = (state, trace, notes, jnp.zeros((), jnp.int32))
    state, trace, notes, _ = lax.while_loop(unfinished, advance, begin)
    return state, trace, notes
