"""Closed updates in the loop of sweeps of every run, and of new vectors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .....structure.bilinear.form import Bilinear
from .. import sweeps as core
from ..cells import Side
from ..incidence import SideBlock
from ..schedules.methods import Prepared, Steps
from ..steps import divergence
from . import sweep as closed


class ClosedUpdates(Steps):
    """Sweeps of closed updates.

    :param Options options: static choices.
    :param bool has_fixed_predictors: whether predictors know of no hyperparameter.
    """

    def __init__(self, options: closed.Options, has_fixed_predictors: bool) -> None:
        super().__init__()
        self._options, self._has_fixed_predictors = options, has_fixed_predictors

    def make_views(
        self,
        form: Bilinear,
        rows: SideBlock,
        columns: SideBlock,
        *,
        is_cell: Array | None = None,
        axis_name: str | None = None,
    ) -> closed.Views:
        return closed.make_views(form, self._on(axis_name), is_cell)

    def sweep(
        self, form: Bilinear, views: closed.Views, state: core.State, *, axis_name: str | None = None
    ) -> tuple[core.State, core.Info]:
        return closed.sweep(form, state, self._on(axis_name), views=views, with_gauge=True)

    def begin(
        self, form: Bilinear, views: closed.Views, state: core.State, *, axis_name: str | None = None
    ) -> core.State:
        return state._replace(objective=self.bound(form, views, state, axis_name=axis_name))

    def bound(self, form: Bilinear, views: closed.Views, state: core.State, *, axis_name: str | None = None) -> Array:
        return closed.bound_of(form, state, views, self._on(axis_name))

    def bound_at_moments(self, prepared: Prepared, state: core.State) -> Callable[[Prepared], Array] | None:
        if not self._has_fixed_predictors or prepared.views.pairs is not None:
            return None
        bound = closed.bound_at_moments(state, prepared.views, self._options)
        return lambda other: bound(other.form, other.views)

    def _on(self, axis_name: str | None) -> closed.Options:
        return self._options._replace(axis_name=axis_name)


def fold_closed(
    form: Bilinear, state: core.State, side: Side, options: closed.Options, *, num_steps: int, limit: float
) -> tuple[core.State, Array, Array]:
    """The optimum of the vectors of one side, while all else is held.

    :param Bilinear form: with the cells of these vectors alone.
    :param State state: where to start.
    :param str side: that moves.
    :param int num_steps: updates at most.
    :param float limit: largest relative gain of a vector at which updates end.
    :return: the state, the part of the objective that belongs to each vector, and the last gain.
    """
    views = closed.make_views(form, options)

    def values_of(state: core.State) -> Array:
        own = getattr(state, side)
        return closed.values_of_side(state, views, side, options) - divergence(own, getattr(form, side))

    def proceed(carry: tuple[object, Array, Array, Array]) -> Array:
        _, _, change, count = carry
        return (count < num_steps) & ~(change < limit)

    def advance(carry: tuple[Any, Array, Array, Array]) -> tuple[Any, Array, Array, Array]:
        state, before, _, count = carry
        cells = views.at_cells(state, side, options)
        best = closed.with_tangents(views, state, options, cells)
        state, _ = closed.update_side(form, state, best, side, options, cells=cells)
        after = values_of(state)
        return state, after, jnp.max(jnp.abs(after - before) / (1.0 + jnp.abs(after))), count + 1

    before = values_of(state)
    start = state, before, jnp.asarray(jnp.inf, before.dtype), jnp.asarray(0)
    state, values, change, _ = lax.while_loop(proceed, advance, start)
    return state, values, change
