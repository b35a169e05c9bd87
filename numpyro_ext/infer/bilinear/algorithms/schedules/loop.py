"""Sweeps over both sides of a bilinear model until they change nothing any more, and steps of one side alone.

>>> import jax, jax.numpy as jnp
>>> from numpyro_ext.infer.bilinear.algorithms import sweeps
>>> from numpyro_ext.infer.bilinear.algorithms.schedules.loop import solve
>>> from numpyro_ext.potentials import PoissonExpPotential
>>> from numpyro_ext.structure.bilinear import Bilinear, GaussianSide
>>> zero, one = jnp.zeros((1, 1)), jnp.ones((1, 1))
>>> first = jnp.zeros(1, int)
>>> form = Bilinear(
...     rows=GaussianSide(zero, one), columns=GaussianSide(zero, 2.0 * one), row_index=first, column_index=first,
...     coupling=one, row_linear=zero, column_linear=zero, offset=jnp.zeros(1),
...     potential=PoissonExpPotential(jnp.array([10.0]), jnp.ones(1)), weight=jnp.ones(1),
...     log_constant=jnp.zeros(()), row_order=first, column_order=first,
... )
>>> state = sweeps.init(form, jax.random.key(1), "full", "full")
>>> state, info = solve(form, state, num_sweeps=300, tol=1e-7)
>>> print(bool(info.converged), round(float(info.objective), 3))
True -7.872
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .....compilation.pytree import PyTree
from .....structure.bilinear import Bilinear, GaussianSide
from .. import steps
from .. import sweeps as core
from ..cells import Block, View
from .devices import OneDevice
from .methods import Prepared


class SolveInfo(NamedTuple):
    """End of a run of sweeps."""

    converged: Array
    num_steps: Array
    objective: Array
    """The bound at the end, without the log prior of what is learned."""
    objective_trace: Array
    """Bound plus that log prior after each sweep, as long as requested, padded with nan."""
    max_change: Array
    """:attr:`~.sweeps.Info.change` of the last sweep."""
    num_refused: Array


def solve(form: Bilinear, state: core.State, *, num_sweeps: int, tol: float) -> tuple[core.State, SolveInfo]:
    """Sweep until the objective has changed by less than ``tol`` of itself two times in a row.

    :param Bilinear form: the model; all of its parameters are given.
    :param State state: from :func:`~.sweeps.init`, or from a run on a form of the same shapes. Covariances of rows are
        reduced where an expectation does not exist.
    :param int num_sweeps: the largest number of sweeps.
    :param float tol: relative change of the objective.
    :return: the final state and how the run ended.
    """
    devices = OneDevice()
    prepared = devices.prepare(form, state.rows, state.columns)
    _, state, info, _ = iterate(
        lambda values: prepared,
        jnp.zeros((0,)),
        state,
        devices=devices,
        num_sweeps=num_sweeps,
        trace_length=num_sweeps,
        tol=tol,
    )
    return state, info


def iterate(
    make_form: Callable[[Array], Prepared],
    values: Array,
    state: core.State,
    *,
    devices: OneDevice,
    num_sweeps: int | Array,
    trace_length: int,
    tol: float,
    learn: Callable[[Array, core.State], tuple[Array, Array, Array]] | None = None,
    log_prior: Callable[[Array], Array] = lambda values: jnp.zeros(()),
    may_end: Array | bool = True,
) -> tuple[Array, core.State, SolveInfo, Array]:
    """The loop of sweeps of every run, each with an update of what is learned.

    :param make_form: from what is learned to the form with its ordered cells.
    :param values: where learning starts, of any shape.
    :param State state: see :func:`solve`.
    :param devices: that sweep.
    :param num_sweeps: at most.
    :param int trace_length: of the trace, at least ``num_sweeps``.
    :param float tol: see :func:`solve`.
    :param learn: maps values and a state to values, the bound there, and whether it had a derivative in each of them.
    :param log_prior: of the values.
    :param may_end: false where no sweep counts as the last.
    :return: values, state, how the run ended, and in which of the values the bound ever had a derivative.
    """

    def proceed(carry: PyTree) -> Array:
        _, state, _, _, _, count = carry
        return (count < num_sweeps) & (state.num_quiet < 2) & jnp.isfinite(state.objective)

    def advance(carry: PyTree) -> PyTree:
        values, state, moved, before, (trace, _), count = carry
        state, info = devices.sweep(make_form(values), state)
        if learn is not None:
            values, objective, moves = learn(values, state)
            state, moved = state._replace(objective=objective), moved | moves
        total = state.objective + log_prior(values)
        change = core.relative_change(total, before, info.loss)
        state = state._replace(num_quiet=jnp.where((change < limit) & may_end, state.num_quiet + 1, 0))
        return values, state, moved, total, (trace.at[count].set(total), info._replace(change=change)), count + 1

    limit = jnp.maximum(tol, 10 * jnp.finfo(state.rows.mean.dtype).eps)
    first = make_form(values)
    state = devices.begin(first, state)
    objective = state.objective
    state = state._replace(num_quiet=jnp.minimum(state.num_quiet, 1))
    infinite = jnp.full_like(objective, jnp.inf)
    blank = core.Info(objective, infinite, infinite, jnp.asarray(0))
    trace = jnp.full((trace_length,), jnp.nan, objective.dtype)
    moved = jnp.zeros(values.shape, bool)
    carry = (values, state, moved, objective + log_prior(values), (trace, blank), jnp.asarray(0))
    values, state, moved, _, (trace, info), count = lax.while_loop(proceed, advance, carry)
    converged = (state.num_quiet >= 2) & jnp.isfinite(state.objective)
    solved = SolveInfo(converged, count, state.objective, trace, info.change, info.num_refused)
    return values, state, solved, moved


def fit_side(
    find_view: Callable[[Block], View],
    own: Block,
    other: Block,
    prior: GaussianSide,
    step: Array,
    values: Array,
    *,
    num_steps: int,
    tol: Array | float,
    measure: Callable[[Array, Array], Array],
) -> tuple[Block, Array, Array, Array]:
    """Steps of the vectors of one side, whose optimum is unique, while the other is held.

    :param find_view: the cells in the order of this side, given its vectors.
    :param Block own: the vectors that move.
    :param Block other: those that are held.
    :param GaussianSide prior: of the vectors that move.
    :param step: their step sizes, shape ``(num,)``.
    :param values: their objectives at the start, minus infinity where they are not known.
    :param int num_steps: at most.
    :param tol: of ``measure``, below which the steps end.
    :param measure: maps what each vector gained, or would have lost by a step that it refused, and the objectives, to a
        scalar.
    :return: vectors, step sizes, objectives, and the last measure.
    """

    def proceed(carry: tuple[Block, Array, Array, Array, Array]) -> Array:
        _, _, _, change, count = carry
        return (count < num_steps) & ~(change < tol)

    def advance(carry: PyTree) -> PyTree:
        own, step, before, _, count = carry
        own, step, after, loss = steps.step_side(find_view(own), own, other, prior, step)
        change = measure(jnp.maximum(jnp.abs(after - before), loss), after)
        return own, step, after, change, count + 1

    start = own, step, values, jnp.asarray(jnp.inf, values.dtype), jnp.asarray(0)
    return lax.while_loop(proceed, advance, start)[:4]
