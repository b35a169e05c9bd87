"""Sweeps over the cells of a bilinear form on one device, or on several: rows divided between them, columns on all.

Each device holds some of the rows, with all of their cells. Steps of rows need no communication; for a step of the
columns the sums over cells are added over the devices (numbers of the order of the posterior of the columns, twice per
sweep), and then every device takes the same step. Devices may belong to several processes: nothing else is exchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .....compilation.pytree import PyTree
from .....linalg.padding import places_within
from .....structure.bilinear.form import Bilinear, GaussianSide, Side
from .. import sweeps as core
from ..incidence import SideBlock
from .methods import Prepared, Steps

_Result = TypeVar("_Result")
AXIS = "rows"
"""Name of the axis of devices."""
# In place of arrays, in trees that specify where these are.
BY_ROW: Any = PartitionSpec(AXIS)
EVERYWHERE: Any = PartitionSpec()
_FORM = Bilinear(BY_ROW, *(EVERYWHERE for _ in Bilinear._fields[1:]))


class OneDevice:
    """Sweeps where everything is on one device.

    What is computed is written once, in the method; what several devices do otherwise is where arrays are.

    :param Steps method: how vectors move, by default steps along natural gradients.
    """

    places: RowPlaces | None = None
    """Rows and cells of each device, if there are several."""
    _axis_name: str | None = None

    def __init__(self, method: Steps | None = None) -> None:
        self._method = Steps() if method is None else method

    def _on_devices(
        self, function: Callable[..., _Result], in_specs: object, out_specs: object
    ) -> Callable[..., _Result]:
        """A function that every device computes of the parts that it holds of the arguments."""
        return function

    def _run(self, method: Callable[..., _Result], prepared: Prepared, state: core.State, out_specs: object) -> _Result:
        function = partial(method, axis_name=self._axis_name)
        return self._on_devices(function, (_FORM, BY_ROW, specs_of(state)), out_specs)(*prepared, state)

    def sweep(self, prepared: Prepared, state: core.State) -> tuple[core.State, core.Info]:
        """One sweep over both sides."""
        return self._run(self._method.sweep, prepared, state, (specs_of(state), EVERYWHERE))

    def begin(self, prepared: Prepared, state: core.State) -> core.State:
        """The state from which sweeps can start, with its objective."""
        return self._run(self._method.begin, prepared, state, specs_of(state))

    def bound(self, prepared: Prepared, state: core.State) -> Array:
        """The objective of a state."""
        return self._run(self._method.bound, prepared, state, EVERYWHERE)

    def cost(self, form: Bilinear, state: core.State) -> Array:
        """The divergences of all unknowns from their priors."""
        function = partial(core.cost_of, axis_name=self._axis_name)
        return self._on_devices(function, (_FORM, specs_of(state)), EVERYWHERE)(form, state)

    def bound_of_form(self, prepared: Prepared, state: core.State) -> Callable[[Prepared], Array]:
        """The objective of a state as a function of the form, given the form that the state belongs to."""
        return self._method.bound_at_moments(prepared, state) or (lambda other: self.bound(other, state))

    # Where arrays are

    def prepare(self, form: Bilinear, rows: SideBlock, columns: SideBlock, places: RowPlaces | None = None) -> Prepared:
        """Order the cells; of the blocks only the shapes count.

        :param places: :attr:`places` as an argument of the program, in which they would be long constants else.
        """
        return Prepared(core.without_cells(form), self._method.make_views(form, rows, columns))

    def arrange(self, rows: Side) -> Side:
        """The prior of the rows in the order of the devices."""
        return rows

    def put_cells(self, prepared: Prepared) -> Prepared:
        """Move cells to the devices."""
        return prepared

    def put_shared(self, arrays: PyTree) -> PyTree:
        """Arrays that all devices may need."""
        return arrays

    def put(self, values: Array, state: core.State) -> tuple[Array, core.State]:
        """Move hyperparameters and a state to the devices."""
        return values, state

    def get(self, values: Array, state: core.State) -> tuple[Array, core.State]:
        """Hyperparameters and a state from the devices, with rows in their own order."""
        return values, state

    def compile_solve(self, solve: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """``jit`` for a function that returns hyperparameters, a state and an info."""
        return jax.jit(solve)


def specs_of(state: core.State) -> PyTree:
    """Places of the arrays of a state, as a tree that is a prefix of the state."""
    specs: Any = jax.tree.map(lambda x: EVERYWHERE, state)
    selected = None
    if state.selected is not None:
        selected = specs.selected._replace(row_counts=BY_ROW, log_rows=BY_ROW)
    moments = None if state.moments is None else (BY_ROW, EVERYWHERE)
    return specs._replace(rows=BY_ROW, row_step=BY_ROW, selected=selected, moments=moments)


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


def mesh_of(devices: Sequence[object]) -> Mesh:
    """The axis of devices."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


class SeveralDevices(OneDevice):
    """Sweeps with the rows divided between devices.

    :param Division division: which device has which rows.
    :param Steps method: see :class:`OneDevice`.
    """

    _axis_name = AXIS

    def __init__(self, division: Division, method: Steps | None = None) -> None:
        super().__init__(method)
        self.all = division.devices
        self._mesh = mesh_of(division.devices)
        self.places: RowPlaces = division.places
        self._num_devices = len(division.devices)
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(self._mesh, EVERYWHERE))

    def _on_devices(
        self, function: Callable[..., _Result], in_specs: object, out_specs: object
    ) -> Callable[..., _Result]:
        return jax.shard_map(function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _run(self, method: Callable[..., _Result], prepared: Prepared, state: core.State, out_specs: object) -> _Result:
        # Views have a leading axis for the devices.
        def run(form: Bilinear, views: PyTree, state: core.State, **options: str | None) -> _Result:
            return method(form, jax.tree.map(lambda x: x[0], views), state, **options)

        return super()._run(run, prepared, state, out_specs)

    def bound_of_form(self, prepared: Prepared, state: core.State) -> Callable[[Prepared], Array]:
        return lambda other: self.bound(other, state)

    def prepare(self, form: Bilinear, rows: SideBlock, columns: SideBlock, places: RowPlaces | None = None) -> Prepared:
        """Views with a leading axis for the devices."""
        places, num_cells = self.places if places is None else places, form.num_cells
        is_of_cell: dict[str, Any] = {
            name: jax.tree.map(lambda x: x.shape[:1] == (num_cells,), getattr(form, name))
            for name in ("coupling", "row_linear", "column_linear", "offset", "potential", "weight")
        }
        is_of_cell |= {name: True for name in ("row_index", "column_index", "row_order", "column_order")}
        if form.common is not None:
            is_of_cell["common"] = jax.tree.map(lambda x: False, form.common)._replace(coefficients=True)

        def take(is_taken: bool, x: Array) -> Array:
            return x[places.cells] if is_taken else x

        def cut(x: Array) -> Array:
            return x.reshape(self._num_devices, -1, *x.shape[1:])

        local = {name: jax.tree.map(take, is_of_cell[name], getattr(form, name)) for name in is_of_cell}
        local |= {
            "rows": jax.tree.map(cut, self.arrange(form.rows)),
            "row_index": jnp.asarray(places.local_row),
            "column_index": jnp.asarray(places.column),
            "row_order": jnp.broadcast_to(jnp.arange(places.cells.shape[1]), places.cells.shape),
            "column_order": jnp.asarray(places.column_order),
            "weight": jnp.where(places.is_cell, local["weight"], 0.0),
        }
        axes: dict[str, Any] = {"rows": 0, "columns": None, "log_constant": None}
        axes |= {name: jax.tree.map(lambda taken: 0 if taken else None, found) for name, found in is_of_cell.items()}
        background: Any = form.background
        if background is not None and background.selection is not None:
            rows_of_all, selection = background.selection.rows[places.source], background.selection
            local["background"] = background._replace(selection=selection._replace(rows=cut(rows_of_all)))
            axes["background"] = background._replace(exposure=None, selection=selection._replace(rows=0, columns=None))

        def make_views(local: Bilinear, is_cell: Array) -> PyTree:
            return self._method.make_views(local, rows, columns, is_cell=is_cell, axis_name=AXIS)

        # the axis of devices, over which sums can be taken
        make_all = jax.vmap(make_views, in_axes=(Bilinear(**axes), 0), axis_name=AXIS, axis_size=self._num_devices)
        views = make_all(form._replace(**local), jnp.asarray(places.is_cell))
        return Prepared(core.without_cells(form)._replace(rows=self.arrange(form.rows)), views)

    def arrange(self, rows: Side) -> Side:
        """The rows of each device, filled up to the same number."""
        assert isinstance(rows, GaussianSide)  # others are refused, see families.py
        places = self.places
        weight = jnp.asarray(places.is_used, rows.mean.dtype)
        return GaussianSide(rows.mean[places.source], rows.precision[places.source], weight)

    def put_cells(self, prepared: Prepared) -> Prepared:
        """Give every device its part; each process needs the whole."""
        form, views = prepared
        nothing: Any = ()
        rows, views = jax.tree.map(lambda x: self._put(x, BY_ROW), (form.rows, views))
        form = jax.tree.map(lambda x: self._put(x, EVERYWHERE), form._replace(rows=nothing))
        return Prepared(form._replace(rows=rows), views)

    def put_shared(self, arrays: PyTree) -> PyTree:
        """Leave them on the host: they are the same for all devices, and what a program does not use stays there."""
        return jax.tree.map(np.asarray, arrays)

    def put(self, values: Array, state: core.State) -> tuple[Array, core.State]:
        """Give every device its rows, and all columns."""
        source = self.places.source

        def put(spec: PartitionSpec, x: Array) -> Array:
            return self._put(np.asarray(x)[source] if spec == BY_ROW else x, spec)

        return self._put(values, EVERYWHERE), _by_place(put, state)

    def get(self, values: Array, state: core.State) -> tuple[Array, core.State]:
        """All of them, in every process."""
        position = self.places.position

        def take(spec: PartitionSpec, x: Array) -> np.ndarray:
            return np.asarray(x)[position] if spec == BY_ROW else np.asarray(x)

        found = _by_place(take, self._gather(state))
        return jax.tree.map(jnp.asarray, (np.asarray(values), found))

    def compile_solve(self, solve: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """``jit`` that leaves the state where it is."""

        def run(*arguments: PyTree) -> PyTree:
            values, state, info = solve(*arguments)
            specs = EVERYWHERE, specs_of(state), EVERYWHERE
            shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs, is_leaf=_is_spec)
            return jax.lax.with_sharding_constraint((values, state, info), shardings)

        return jax.jit(run)

    def put_at(self, arrays: PyTree, specs: PyTree) -> PyTree:
        """Arrays in the places that a tree of specs says, which is a prefix of theirs."""

        def put(spec: PartitionSpec, part: PyTree) -> PyTree:
            return jax.tree.map(lambda x: self._put(x, spec), part)

        return jax.tree.map(put, specs, arrays, is_leaf=_is_spec)

    def _put(self, x: object, spec: PartitionSpec) -> Array:
        array = np.asarray(x)
        return jax.make_array_from_callback(array.shape, NamedSharding(self._mesh, spec), lambda index: array[index])


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def _by_place(function: Callable[[PartitionSpec, Array], PyTree], state: core.State) -> PyTree:
    """The state with ``function(spec, x)`` in the place of each array, given where this is."""

    def apply(spec: PartitionSpec, part: PyTree) -> PyTree:
        return jax.tree.map(lambda x: function(spec, x), part)

    return jax.tree.map(apply, specs_of(state), state, is_leaf=_is_spec)
