"""Searches and visits whose evaluations are calls of a program of their own.

Of an evaluation that takes milliseconds, an optimised program pays; of the steps between evaluations it does not, and
they are most of what there is to compile. In one program both are optimised, or neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from .digits import field_tolerance
from .evaluation import Evaluation
from .search import SearchState, is_finished, proposal, take


def turn(
    state: SearchState,
    trial: Array,
    new: Evaluation,
    is_new: bool | Array,
    max_iterations: int | Array,
    *,
    field_tol: object,
    tol: float,
) -> tuple[SearchState, Array, Any, Array]:
    """Turn from one evaluation of a search to the next.

    :param SearchState state: before the last evaluation.
    :param trial: its point, from the last turn.
    :param Evaluation new: the evaluation.
    :param is_new: false if there is none yet.
    :param field_tol: of the field, as for :func:`~.search.search`, like all that follows.
    :return: the state after it, the next point, the tolerance of the field there, and whether the search is finished.
    """
    state = lax.cond(is_new, lambda: take(state, trial, new, tol, max_iterations), lambda: state)
    next_tol = field_tolerance(state, field_tol, tol, max_iterations)
    return state, proposal(state, tol), next_tol, is_finished(state)


def search_apart(
    evaluate: Callable[[Array, object, object], Evaluation],
    turn: Callable[..., tuple[SearchState, Array, Any, Array]],
    state: SearchState,
    *,
    num_evaluations: int,
    max_iterations: int,
    trace_length: int,
) -> tuple[SearchState, Array]:
    """Go on with a search as :func:`~.search.search` does, from outside of any program.

    :param evaluate: ``(values, state, tol)``: compiled.
    :param turn: :func:`turn` with its options, compiled.
    :param SearchState state: of the search.
    :param int num_evaluations: of this chunk.
    :param int max_iterations: accepted steps of the search at most.
    :param int trace_length: of the trace.
    :return: the new state, and the objective at each evaluation of this chunk, ``nan`` where none was made.
    """
    trace: Any = np.full((trace_length,), np.nan, state.best.objective.dtype)
    state, trial, tol, is_over = turn(state, state.values, state.best, False, max_iterations)
    for number in range(num_evaluations):
        if is_over:
            break
        new = evaluate(trial, state.best.state, tol)
        trace[number] = new.objective if np.isfinite(new.objective) else -np.inf
        state, trial, tol, is_over = turn(state, trial, new, True, max_iterations)
    return state, trace


def visit_apart(
    evaluate: Callable[[Array, object], tuple[Evaluation, Any]],
    note: Callable[[Array, Evaluation, Any], Any],
    points: Any,
    states: object,
    number: int,
) -> Any:
    """Notes of evaluations at the first ``number`` of some points, stacked, with zeros at the others.

    :param evaluate: ``(values, state)``: the evaluation, and what its fit has at hand; compiled.
    :param note: ``(values, evaluation, held)``: what is kept of them; compiled.
    :param points: shape ``(n, d)``.
    :param states: where fits start, stacked.
    """
    notes = []
    for k in range(number):
        values, begun = jax.tree.map(lambda leaf, k=k: leaf[k], (points, states))
        notes.append(note(values, *evaluate(values, begun)))

    def stacked(*leaves: Array) -> np.ndarray:
        found = np.zeros((len(points), *leaves[0].shape), leaves[0].dtype)
        found[:number] = leaves
        return found

    return jax.tree.map(stacked, *notes)
