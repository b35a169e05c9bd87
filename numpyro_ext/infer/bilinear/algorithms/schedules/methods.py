"""Steps of vectors as a way to sweep over a bilinear form, and what other ways to sweep have in common with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .....compilation.pytree import PyTree
from .....structure.bilinear.form import Bilinear
from .. import steps
from .. import sweeps as core
from ..cells import Block, over_devices
from ..incidence import SideBlock, touched


class Prepared(NamedTuple):
    """A form as sweeps take it: its cells in the views, the rest in the form."""

    form: Bilinear
    views: PyTree
    """Cells by rows and by columns: :class:`~numpyro_ext.infer.bilinear.algorithms.sweeps.Views`, or those of closed
    updates."""


class Steps:
    """Sweeps by steps of all vectors of one side and then of the other.

    Other ways to sweep have the same methods. All take ``axis_name``, the axis of devices between which the rows are
    divided, or ``None``; with it they are called by every device with the rows and cells that it holds.

    :param Callable take_step: see :func:`~numpyro_ext.infer.bilinear.algorithms.sweeps.sweep`.
    """

    def __init__(self, take_step: Callable[..., tuple[Block, Array, Array, Array]] = steps.step_side) -> None:
        self._take_step = take_step

    def make_views(
        self,
        form: Bilinear,
        rows: SideBlock,
        columns: SideBlock,
        *,
        is_cell: Array | None = None,
        axis_name: str | None = None,
    ) -> PyTree:
        """Order the cells; of the blocks only the shapes count.

        :param is_cell: false for cells that only fill up an array, and have no weight.
        """
        return core.make_views(form, rows, columns)

    def sweep(
        self, form: Bilinear, views: PyTree, state: core.State, *, axis_name: str | None = None
    ) -> tuple[core.State, core.Info]:
        """One sweep, see :func:`~numpyro_ext.infer.bilinear.algorithms.sweeps.sweep`."""
        return core.sweep(form, views, state, axis_name=axis_name, take_step=self._take_step)

    def begin(self, form: Bilinear, views: PyTree, state: core.State, *, axis_name: str | None = None) -> core.State:
        """The state with rows at which all expectations exist, and its objective."""
        view = core.with_tangents(views, state.rows, state.columns).rows
        rows, values = steps.make_feasible(view, state.rows, touched(state.columns, form.columns), form.rows)
        state = state._replace(rows=rows)
        value = over_devices(jnp.sum(values), axis_name) - core.cost_of(form, state, axis_name)
        return state._replace(objective=form.log_constant + value)

    def bound(self, form: Bilinear, views: PyTree, state: core.State, *, axis_name: str | None = None) -> Array:
        """The objective of a state."""
        rows, columns = state.rows, state.columns
        view = core.with_tangents(views, rows, columns).rows
        value = jnp.sum(steps.block_objective(view, rows, touched(columns, form.columns), form.rows))
        return form.log_constant + over_devices(value, axis_name) - jnp.sum(steps.divergence(columns, form.columns))

    def bound_at_moments(self, prepared: Prepared, state: core.State) -> Callable[[Prepared], Array] | None:
        """The objective of a state on one device as a function of the form, by what does not depend on this; ``None``
        if all of it does."""
        return None
