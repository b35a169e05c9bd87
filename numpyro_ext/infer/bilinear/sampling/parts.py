"""Minibatches of drawn cells on one device, or on several, each of which draws the cells of its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ....compilation.pytree import PyTree
from ....compilation.store import shared
from ....linalg.padding import rounded_up
from ....structure.bilinear.form import GaussianSide
from ..algorithms.quadratic.draws import (
    MOST_DRAWS,
    Cells,
    Part,
    Problem,
    bound_values,
    draw_minibatches,
)
from ..algorithms.schedules.devices import AXIS, BY_ROW, EVERYWHERE, RowPlaces, SeveralDevices, mesh_of, specs_of
from ..algorithms.sweeps import State
from .cells import CellSampler, Table

_SPREAD = 12.0
"""Standard deviations by which the draws of a device may exceed their mean: a probability below 1e-30."""


class Minibatches(Protocol):
    """Minibatches of one matrix, and the estimates of the bound from some cells."""

    def advance(self, state: State, done: int, number: int) -> tuple[State, int]:
        """The state after some minibatches, and the number of cells that were drawn."""
        ...

    def values(self, state: State) -> np.ndarray:
        """Estimates of the bound, one from each cell."""
        ...


_minibatches = jax.jit(draw_minibatches, static_argnames=("num_chunks", "chunk"))
_bound_values = jax.jit(bound_values)


class OnOneDevice:
    """Minibatches on one device.

    :param Problem problem: the model.
    :param CellSampler sampler: of the cells.
    :param key: of the run.
    :param Cells judged: cells by which the bound is estimated.
    :param int num_chunks: see :func:`~numpyro_ext.infer.bilinear.algorithms.quadratic.draws.draw_minibatches`.
    :param int chunk: see there.
    """

    def __init__(
        self, problem: Problem, sampler: CellSampler, key: Array, judged: Cells, num_chunks: int, chunk: int
    ) -> None:
        self._problem, self._sampler, self._key, self._judged = problem, sampler, key, judged
        self._sizes = {"num_chunks": num_chunks, "chunk": chunk}

    def advance(self, state: State, done: int, number: int) -> tuple[State, int]:
        given = self._problem, state, self._sampler, self._key, jnp.asarray(done), jnp.asarray(number)
        state, drawn = _minibatches(*given, **self._sizes)
        return state, int(drawn)

    def values(self, state: State) -> np.ndarray:
        return np.asarray(_bound_values(self._problem, state, self._judged), float)


class OnSeveralDevices:
    """Minibatches whose rows are divided between devices, also those of several processes; columns are on all.

    Of each minibatch every device draws the cells of its own rows, and as many as would fall to these if one device
    drew all of them, so that the distribution of minibatches is the same.

    :param SeveralDevices devices: with the rows of each.
    :param bool measures_draws: whether moments of the draws choose their number.
    """

    def __init__(
        self,
        problem: Problem,
        sampler: CellSampler,
        key: Array,
        judged: Cells,
        num_chunks: int,
        chunk: int,
        devices: SeveralDevices,
        *,
        measures_draws: bool,
    ) -> None:
        num_devices = len(devices.all)
        parts, masses = divided(sampler, devices.places, num_devices)
        most, own_chunk = num_chunks * chunk * (MOST_DRAWS if measures_draws else 1), -(-chunk // num_devices)
        mean = most * min(masses.max(), 1.0)
        room = rounded_up(-(-min(int(mean + _SPREAD * (np.sqrt(mean) + _SPREAD)), most) // own_chunk))
        part = Part(AXIS, own_chunk, room)
        self._programs = shared(_Programs, devices.all, num_chunks, chunk, part, str(jax.random.key_impl(key)))
        rows = devices.arrange(problem.rows)
        assert isinstance(rows, GaussianSide)
        self._problem = devices.put_at(problem._replace(rows=rows), _PROBLEM)
        self._parts = devices.put_at(parts, BY_ROW)
        # Small arguments are on the host, and a key is the numbers that it is made of: so all devices can have them.
        self._drawn_from = np.asarray(masses, parts.p_row.dtype), np.asarray(jax.random.key_data(key))
        dealt, self._order = _dealt(judged, devices.places, num_devices)
        self._judged = devices.put_at(dealt, BY_ROW)

    def advance(self, state: State, done: int, number: int) -> tuple[State, int]:
        counts = np.asarray(done), np.asarray(number)
        state, drawn = self._programs.advance(self._problem, state, self._parts, *self._drawn_from, *counts)
        return state, int(drawn)

    def values(self, state: State) -> np.ndarray:
        return np.asarray(self._programs.values(self._problem, state, self._judged), float)[self._order]


_PROBLEM = Problem(BY_ROW, *(EVERYWHERE for _ in Problem._fields[1:]))


class _Programs:
    """Programs that are compiled for some devices; the other arguments are those of :class:`OnSeveralDevices`.

    :param str implementation: of the keys.
    """

    def __init__(
        self, devices: tuple[object, ...], num_chunks: int, chunk: int, part: Part, implementation: str
    ) -> None:
        mesh = mesh_of(devices)

        def advance_part(
            problem: Problem, state: State, sampler: CellSampler, masses: Array, key: Array, done: Array, number: Array
        ) -> tuple[State, Array]:
            own, run_key = jax.tree.map(lambda x: x[0], sampler), jax.random.wrap_key_data(key, impl=implementation)
            sizes: Any = {"num_chunks": num_chunks, "chunk": chunk, "part": part}
            return draw_minibatches(problem, state, own, run_key, done, number, masses, **sizes)

        def values_of_part(problem: Problem, state: State, cells: Cells) -> Array:
            values = bound_values(problem, state, jax.tree.map(lambda x: x[0], cells), AXIS)
            return lax.all_gather(values, AXIS, tiled=True)

        def run(function: Callable[..., PyTree], state: State, rest: tuple[Any, ...], out_specs: Any) -> PyTree:
            in_specs = _PROBLEM, specs_of(state), *rest
            return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

        def advance(problem: Problem, state: State, *rest: Any) -> tuple[State, Array]:
            places = BY_ROW, *(EVERYWHERE for _ in rest[1:])
            found: tuple[State, Array] = run(advance_part, state, places, (specs_of(state), EVERYWHERE))(
                problem, state, *rest
            )
            return found

        def values(problem: Problem, state: State, cells: Cells) -> Array:
            found: Array = run(values_of_part, state, (BY_ROW,), EVERYWHERE)(problem, state, cells)
            return found

        self.advance, self.values = jax.jit(advance), jax.jit(values)


def divided(sampler: CellSampler, places: RowPlaces, num_devices: int) -> tuple[CellSampler, np.ndarray]:
    """Samplers of the rows of each device, with a leading axis of devices, and the probabilities of these rows.

    A cell that is drawn by a device that is itself drawn with these probabilities has those that ``sampler`` says.

    :param RowPlaces places: rows of each device.
    """
    length = len(places.source) // num_devices
    device, place = np.divmod(places.position, length)
    rows, columns, p_row, row_weights, column_weights = (
        np.asarray(x)
        for x in (sampler.rows, sampler.columns, sampler.p_row, sampler.row_weights, sampler.column_weights)
    )
    p_one = row_weights[1, rows] * column_weights[1, columns]
    room = rounded_up(int(np.bincount(device[rows], minlength=num_devices).max()))
    masses = np.bincount(device, p_row, num_devices)

    def part(number: int) -> CellSampler:
        held, mine = np.flatnonzero(device == number), device[rows] == number
        num_ones = int(mine.sum())
        # Where all cells are ones no zero may ever be looked for.
        is_full = num_ones == held.size * column_weights.shape[1]
        share = 1.0 if is_full else min(p_one[mine].sum() / masses[number], 1.0)
        weights, p = np.zeros((2, length)), np.zeros(length)
        weights[:, place[held]], p[place[held]] = row_weights[:, held], p_row[held]
        own_rows, own_columns = (np.pad(x[mine], (0, room - num_ones)) for x in (place[rows], columns))
        ends = np.cumsum(np.bincount(place[rows[mine]], minlength=length))
        tables = (
            Table.of(p_one[mine] if num_ones else np.ones(1), max(room, 1)),
            Table.of(row_weights[0, held] if held.size else np.ones(1), length),
            sampler.tables[2],
        )
        return CellSampler(
            jnp.asarray(own_rows, jnp.int32),
            jnp.asarray(own_columns, jnp.int32),
            jnp.asarray(np.concatenate([[0], ends]), jnp.int32),
            jnp.asarray(share, sampler.share.dtype),
            tables,
            jnp.asarray(weights, sampler.row_weights.dtype),
            sampler.column_weights,
            jnp.asarray(p, sampler.p_row.dtype),
            sampler.p_column,
        )

    parts = [jax.tree.map(np.asarray, part(number)) for number in range(num_devices)]
    return jax.tree.map(lambda *found: np.stack(found), *parts), masses


def _dealt(cells: Cells, places: RowPlaces, num_devices: int) -> tuple[Cells, np.ndarray]:
    """Cells of the rows of each device, the last one repeated where a device has fewer, and where each cell is among
    those of all devices."""
    device, place = np.divmod(places.position[np.asarray(cells.rows)], len(places.source) // num_devices)
    numbers = np.bincount(device, minlength=num_devices)
    width, order = rounded_up(int(numbers.max())), np.argsort(device, kind="stable")
    starts = np.cumsum(numbers) - numbers
    taken = starts[:, None] + np.minimum(np.arange(width), np.maximum(numbers - 1, 0)[:, None])
    source = order[np.minimum(taken, device.size - 1)]
    local = jax.tree.map(lambda x: np.asarray(x)[source], cells._replace(rows=place))
    within = np.empty(device.size, int)
    within[order] = np.arange(device.size) - starts[device[order]]
    return local, device * width + within
