"""Sweeps over the cells of a bilinear form on one device, or on several: rows divided between them, columns on all.

Each device holds some of the rows, with all of their cells. Steps of rows need no communication; for a step of the
columns the sums over cells are added over the devices (numbers of the order of the posterior of the columns, twice per
sweep), and then every device takes the same step. Devices may belong to several processes: nothing else is exchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .....linalg.padding import places_within
from .....structure.bilinear.form import Bilinear, GaussianSide, Side
from .. import steps
from .. import sweeps as core
from ..cells import Block
from ..incidence import SideBlock, touched

_Result = TypeVar("_Result")
_AXIS = "rows"
# In place of arrays, in trees that specify where these are.
_BY_ROW: Any = PartitionSpec(_AXIS)
_EVERYWHERE: Any = PartitionSpec()
_STATE = core.State(_BY_ROW, _EVERYWHERE, _BY_ROW, _EVERYWHERE, _EVERYWHERE, _EVERYWHERE)
_FORM = Bilinear(_BY_ROW, *(_EVERYWHERE for _ in Bilinear._fields[1:]))


class Prepared(NamedTuple):
    """A form as sweeps take it: its cells in the views, the rest in the form."""

    form: Bilinear
    views: Any
    """Cells by rows and by columns: :class:`~numpyro_ext.infer.bilinear.algorithms.sweeps.Views`, or those of closed
    updates."""


class OneDevice:
    """Sweeps where everything is on one device.

    What is computed is written here once; what several devices do otherwise is where arrays are.

    :param Callable take_step: see :func:`~numpyro_ext.infer.bilinear.algorithms.sweeps.sweep`.
    """

    _axis_name: str | None = None

    def __init__(self, take_step: Callable[..., tuple[Block, Array, Array, Array]] = steps.step_side) -> None:
        self._take_step = take_step

    def _on_devices(
        self, function: Callable[..., _Result], in_specs: object, out_specs: object
    ) -> Callable[..., _Result]:
        """A function that every device computes of the parts that it holds of the arguments."""
        return function

    def sweep(self, prepared: Prepared, state: core.State) -> tuple[core.State, core.Info]:
        """See :func:`~numpyro_ext.infer.bilinear.algorithms.sweeps.sweep`."""

        def run(form: Bilinear, views: core.Views, state: core.State) -> tuple[core.State, core.Info]:
            return core.sweep(form, views, state, axis_name=self._axis_name, take_step=self._take_step)

        return self._on_devices(run, (_FORM, _BY_ROW, _STATE), (_STATE, _EVERYWHERE))(*prepared, state)

    def make_feasible(self, prepared: Prepared, rows: SideBlock, columns: SideBlock) -> tuple[SideBlock, Array]:
        """See :func:`~numpyro_ext.infer.bilinear.algorithms.steps.make_feasible`; the block is that of the rows."""

        def run(views: core.Views, rows: SideBlock, columns: SideBlock) -> tuple[SideBlock, Array]:
            view = core.with_tangents(views, rows, columns).rows
            return steps.make_feasible(view, rows, touched(columns, prepared.form.columns), prepared.form.rows)

        specs = (_BY_ROW, _BY_ROW, _EVERYWHERE)
        return self._on_devices(run, specs, (_BY_ROW, _BY_ROW))(prepared.views, rows, columns)

    def divergence(self, block: SideBlock, prior: Side) -> Array:
        """See :func:`~numpyro_ext.infer.bilinear.algorithms.steps.divergence`; the block is that of the rows."""
        return self._on_devices(steps.divergence, (_BY_ROW, _BY_ROW), _BY_ROW)(block, prior)

    def row_objective(self, prepared: Prepared, rows: SideBlock, columns: SideBlock) -> Array:
        """See :func:`~numpyro_ext.infer.bilinear.algorithms.steps.block_objective`."""

        def run(views: core.Views, rows: SideBlock, columns: SideBlock, prior: Side) -> Array:
            view = core.with_tangents(views, rows, columns).rows
            return steps.block_objective(view, rows, touched(columns, prepared.form.columns), prior)

        specs = (_BY_ROW, _BY_ROW, _EVERYWHERE, _BY_ROW)
        return self._on_devices(run, specs, _BY_ROW)(prepared.views, rows, columns, prepared.form.rows)

    def begin(self, prepared: Prepared, state: core.State) -> core.State:
        """The state with rows at which all expectations exist, and its objective."""
        rows, values = self.make_feasible(prepared, state.rows, state.columns)
        objective = prepared.form.log_constant + jnp.sum(values) - self.cost(prepared.form, rows, state.columns)
        return state._replace(rows=rows, objective=objective)

    def cost(self, form: Bilinear, rows: SideBlock, columns: SideBlock) -> Array:
        """The divergences of all vectors from their priors."""
        return jnp.sum(self.divergence(rows, form.rows)) + jnp.sum(steps.divergence(columns, form.columns))

    def bound(self, prepared: Prepared, state: core.State) -> Array:
        """The objective of a state."""
        form = prepared.form
        value = jnp.sum(self.row_objective(prepared, state.rows, state.columns))
        return form.log_constant + value - jnp.sum(steps.divergence(state.columns, form.columns))

    def bound_of_form(self, prepared: Prepared, state: core.State) -> Callable[[Prepared], Array]:
        """The objective of a state as a function of the form, given the form that the state belongs to."""
        return lambda other: self.bound(other, state)

    # Where arrays are

    def prepare(self, form: Bilinear, rows: SideBlock, columns: SideBlock) -> Prepared:
        """Order the cells; of the blocks only the shapes count."""
        return Prepared(core.without_cells(form), core.make_views(form, rows, columns))

    def arrange(self, rows: Side) -> Side:
        """The prior of the rows in the order of the devices."""
        return rows

    def put_cells(self, prepared: Prepared) -> Prepared:
        """Move cells to the devices."""
        return prepared

    def put_shared(self, arrays: Any) -> Any:
        """Arrays that all devices may need."""
        return arrays

    def put(self, values: Array, state: core.State) -> tuple[Array, core.State]:
        """Move hyperparameters and a state to the devices."""
        return values, state

    def get(self, values: Array, state: core.State) -> tuple[Array, core.State]:
        """Hyperparameters and a state from the devices, with rows in their own order."""
        return values, state

    def compile_solve(self, solve: Any) -> Any:
        """``jit`` for a function that returns hyperparameters, a state and an info."""
        return jax.jit(solve)


class RowPlaces(NamedTuple):
    """Rows and cells of each device."""

    position: np.ndarray
    """Place of each row among the rows of all devices, ``num_devices`` times the same number; shape ``(num_rows,)``."""
    source: np.ndarray
    """The row at each position; some row where there is none, shape ``(num_positions,)``."""
    is_used: np.ndarray
    """True where there is a row, shape ``(num_positions,)``."""
    cells: np.ndarray
    """Cells of each device in the order of its rows, shape ``(num_devices, num_local_cells)``."""
    is_cell: np.ndarray
    """False for what only fills up the array, of the same shape."""
    local_row: np.ndarray
    """Row of each of these cells, counted from the first row of the device."""
    column: np.ndarray
    column_order: np.ndarray
    """Positions of the cells in the order of their columns."""


def place_rows(row_index: np.ndarray, column_index: np.ndarray, num_rows: int, num_devices: int) -> RowPlaces:
    """Deal rows to devices, the longest first and to and fro, so that all have about as many cells.

    :param row_index: of each cell.
    :param column_index: of each cell.
    :param int num_rows: number of rows, also of those without a cell.
    :param int num_devices: between which to divide them.
    """
    by_length = np.argsort(-np.bincount(row_index, minlength=num_rows), kind="stable")
    turn, place = np.divmod(np.arange(num_rows), num_devices)
    device = np.zeros(num_rows, int)
    device[by_length] = np.where(turn % 2 == 0, place, num_devices - 1 - place)
    num_held = np.bincount(device, minlength=num_devices)
    length = max(int(num_held.max(initial=0)), 1)
    # on each device rows keep their order
    position = device * length + places_within(device, num_devices)
    source, is_used = np.zeros(num_devices * length, int), np.zeros(num_devices * length, bool)
    source[position], is_used[position] = np.arange(num_rows), True

    cell_position = position[row_index]
    cell_order = np.argsort(cell_position, kind="stable")
    num_cells = np.bincount(device[row_index], minlength=num_devices)
    starts, longest = np.cumsum(num_cells) - num_cells, max(int(num_cells.max(initial=0)), 1)
    offsets = np.arange(longest)
    is_cell = offsets < num_cells[:, None]
    # the last cell of a device is repeated, so that rows stay in order
    taken = starts[:, None] + np.minimum(offsets, np.maximum(num_cells - 1, 0)[:, None])
    cells = cell_order[np.minimum(taken, row_index.size - 1)]
    local_row = np.where(num_cells[:, None] > 0, cell_position[cells] % length, 0)
    column = column_index[cells]
    column_order = np.argsort(column, axis=1, kind="stable")
    return RowPlaces(position, source, is_used, cells, is_cell, local_row, column, column_order)


class Division:
    """Devices, and which of them has which rows and cells; equal where all of it is.

    :param devices: the same in all processes.
    :param row_index: of each cell.
    :param column_index: of each cell.
    :param int num_rows: number of rows.
    """

    def __init__(
        self, devices: Sequence[object], row_index: np.ndarray, column_index: np.ndarray, num_rows: int
    ) -> None:
        self.devices = tuple(devices)
        self.places = place_rows(row_index, column_index, num_rows, len(self.devices))
        digest = hashlib.blake2b(digest_size=16)
        for index in (row_index, column_index):
            digest.update(np.ascontiguousarray(index, np.int64).tobytes())
        self._key = self.devices, num_rows, digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Division) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class SeveralDevices(OneDevice):
    """Sweeps with the rows divided between devices.

    :param Division division: which device has which rows.
    """

    _axis_name = _AXIS

    def __init__(self, division: Division) -> None:
        super().__init__()
        self._mesh = Mesh(np.array(division.devices), (_AXIS,), axis_types=(AxisType.Auto,))
        self._places = division.places
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(self._mesh, _EVERYWHERE))

    def _on_devices(
        self, function: Callable[..., _Result], in_specs: object, out_specs: object
    ) -> Callable[..., _Result]:
        # Views have a leading axis for the devices.
        def run(*args: object) -> _Result:
            return function(*(jax.tree.map(lambda x: x[0], a) if isinstance(a, core.Views) else a for a in args))

        return jax.shard_map(run, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def prepare(self, form: Bilinear, rows: SideBlock, columns: SideBlock) -> Prepared:
        """Views with a leading axis for the devices."""
        places, num_cells = self._places, form.num_cells
        is_of_cell: dict[str, Any] = {
            name: jax.tree.map(lambda x: x.shape[:1] == (num_cells,), getattr(form, name))
            for name in ("coupling", "row_linear", "column_linear", "offset", "potential", "weight")
        }
        is_of_cell |= {name: True for name in ("row_index", "column_index", "row_order", "column_order")}

        def take(is_taken: bool, x: Array) -> Array:
            return x[places.cells] if is_taken else x

        local = {name: jax.tree.map(take, is_of_cell[name], getattr(form, name)) for name in is_of_cell}
        local |= {
            "row_index": jnp.asarray(places.local_row),
            "column_index": jnp.asarray(places.column),
            "row_order": jnp.broadcast_to(jnp.arange(places.cells.shape[1]), places.cells.shape),
            "column_order": jnp.asarray(places.column_order),
            "weight": jnp.where(places.is_cell, local["weight"], 0.0),
        }
        axes: dict[str, Any] = {"rows": None, "columns": None, "log_constant": None}
        axes |= {name: jax.tree.map(lambda taken: 0 if taken else None, found) for name, found in is_of_cell.items()}
        make_views = jax.vmap(lambda local: core.make_views(local, rows, columns), in_axes=(Bilinear(**axes),))
        views = make_views(form._replace(**local))
        return Prepared(core.without_cells(form)._replace(rows=self.arrange(form.rows)), views)

    def arrange(self, rows: Side) -> Side:
        """The rows of each device, filled up to the same number."""
        assert isinstance(rows, GaussianSide)  # others are refused, see families.py
        places = self._places
        weight = jnp.asarray(places.is_used, rows.mean.dtype)
        return GaussianSide(rows.mean[places.source], rows.precision[places.source], weight)

    def put_cells(self, prepared: Prepared) -> Prepared:
        """Give every device its part; each process needs the whole."""
        form, views = prepared
        nothing: Any = ()
        rows, views = jax.tree.map(lambda x: self._put(x, _BY_ROW), (form.rows, views))
        form = jax.tree.map(lambda x: self._put(x, _EVERYWHERE), form._replace(rows=nothing))
        return Prepared(form._replace(rows=rows), views)

    def put_shared(self, arrays: Any) -> Any:
        """Leave them on the host: they are the same for all devices, and what a program does not use stays there."""
        return jax.tree.map(np.asarray, arrays)

    def put(self, values: Array, state: core.State) -> tuple[Array, core.State]:
        """Give every device its rows, and all columns."""
        source = self._places.source

        def put_rows(x: Array) -> Array:
            return self._put(np.asarray(x)[source], _BY_ROW)

        nothing: Any = ()
        rows, row_step = jax.tree.map(put_rows, (state.rows, state.row_step))
        others = state._replace(rows=nothing, row_step=nothing)
        values, others = jax.tree.map(lambda x: self._put(x, _EVERYWHERE), (values, others))
        return values, others._replace(rows=rows, row_step=row_step)

    def get(self, values: Array, state: core.State) -> tuple[Array, core.State]:
        """All of them, in every process."""
        found = jax.tree.map(np.asarray, self._gather(state))
        position = self._places.position
        rows, row_step = jax.tree.map(lambda x: x[position], (found.rows, found.row_step))
        found = found._replace(rows=rows, row_step=row_step)
        return jax.tree.map(jnp.asarray, (np.asarray(values), found))

    def compile_solve(self, solve: Any) -> Any:
        """``jit`` that leaves the state where it is."""
        state, everywhere = (
            jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs) for specs in (_STATE, _EVERYWHERE)
        )
        return jax.jit(solve, out_shardings=(everywhere, state, everywhere))

    def _put(self, x: object, spec: PartitionSpec) -> Array:
        array = np.asarray(x)
        return jax.make_array_from_callback(array.shape, NamedSharding(self._mesh, spec), lambda index: array[index])
