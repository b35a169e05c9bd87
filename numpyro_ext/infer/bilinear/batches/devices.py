"""Visits to batches on one device, on several, or on those of several processes, each of which has its own batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ....compilation.pytree import PyTree
from ....compilation.store import shared as made_once
from ..algorithms.quadratic import Elsewhere, Options, visit_closed
from ..algorithms.schedules.devices import AXIS
from ..algorithms.schedules.methods import Prepared
from ..algorithms.schedules.visits import Moves, SharedVectors, Visited, visit_batch

_BY_PART: Any = PartitionSpec(AXIS)
_EVERYWHERE: Any = PartitionSpec()
_VISITED: Any = Visited(_BY_PART, *(_EVERYWHERE for _ in Visited._fields[1:]))


class BatchDevices:
    """Devices, each of which has a part of every batch; the shared vectors are on all.

    :param devices: the same in all processes; by default the one that JAX takes.
    """

    def __init__(self, devices: Sequence[jax.Device] | None) -> None:
        found = jnp.zeros(()).devices() if devices is None else devices
        self.all = tuple(sorted(found, key=lambda device: (device.process_index, device.id)))
        self.local = [device for device in self.all if device.process_index == jax.process_index()]
        self.processes = sorted({device.process_index for device in self.all})
        self._programs = made_once(_Programs, self.all)

    def visit(
        self,
        prepared: Prepared,
        visited: Visited,
        shared: SharedVectors,
        moves: Moves,
        elsewhere: Elsewhere | None,
        closed: Options | None,
    ) -> tuple[Visited, SharedVectors]:
        """See :func:`~numpyro_ext.infer.bilinear.algorithms.schedules.visits.visit_batch`.

        :param Prepared prepared: on the host, with a leading axis for the devices of this process.
        :param Visited visited: on the host; its own vectors have such an axis.
        :param Options closed: of closed updates, where these take the place of steps.
        :return: the outcome on the host, and the shared vectors, which stay on the devices.
        """
        # All are put, as arrays of the host have another type than those that are on the devices, and another program.
        nothing: Any = ()
        own, factor = self._put(visited.own), visited._replace(own=nothing)
        rest = factor, shared, jax.tree.map(np.asarray, moves), elsewhere
        factor, *everywhere = jax.tree.map(self._spread, rest)
        program = made_once(_Visits, self.all, closed).program
        visited, shared = program(self._put(prepared), factor._replace(own=own), *everywhere)
        return jax.tree.map(self._get, visited), shared

    def of_all_processes(self, own: np.ndarray) -> np.ndarray:
        """An array of each process, with a leading axis for the processes; all have the same shape."""
        gathered = self._programs.gather(self._put(np.stack([own] * len(self.local))))
        first = [[d.process_index for d in self.all].index(process) for process in self.processes]
        return np.asarray(gathered)[first]

    def _put(self, parts: PyTree) -> PyTree:
        sharding = NamedSharding(self._programs.mesh, _BY_PART)

        def put(x: np.ndarray) -> jax.Array:
            pieces = [jax.device_put(x[i : i + 1], device) for i, device in enumerate(self.local)]
            return jax.make_array_from_single_device_arrays((len(self.all), *x.shape[1:]), sharding, pieces)

        return jax.tree.map(put, parts)

    def _spread(self, x: PyTree) -> jax.Array:
        """An array on every device."""
        sharding = NamedSharding(self._programs.mesh, _EVERYWHERE)
        if isinstance(x, jax.Array) and x.sharding == sharding:
            return x
        pieces = [jax.device_put(x, device) for device in self.local]
        return jax.make_array_from_single_device_arrays(np.shape(x), sharding, pieces)

    def _get(self, x: jax.Array) -> np.ndarray:
        """The parts of this process, or all of an array that is everywhere."""
        if x.is_fully_replicated:
            return np.asarray(x)
        found = {shard.device: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(found[device]) for device in self.local])


class _Programs:
    """Programs that are compiled for some devices.

    :param devices: in the order of the parts.
    """

    def __init__(self, devices: tuple[jax.Device, ...]) -> None:
        self.mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        self.gather = jax.jit(lambda x: x, out_shardings=NamedSharding(self.mesh, _EVERYWHERE))


class _Visits:
    """Visits that are compiled for some devices.

    :param devices: in the order of the parts.
    :param Options closed: of closed updates, where these take the place of steps.
    """

    def __init__(self, devices: tuple[jax.Device, ...], closed: Options | None) -> None:
        specs = (_BY_PART, _VISITED, _EVERYWHERE, _EVERYWHERE, _EVERYWHERE), (_VISITED, _EVERYWHERE)
        visit = partial(_visit_part, visit_batch if closed is None else partial(visit_closed, options=closed))
        mesh = made_once(_Programs, devices).mesh
        self.program = jax.jit(jax.shard_map(visit, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False))


def _visit_part(
    visit: Callable[..., tuple[Visited, SharedVectors]],
    prepared: Prepared,
    visited: Visited,
    shared: SharedVectors,
    moves: Moves,
    elsewhere: Elsewhere | None,
) -> tuple[Visited, SharedVectors]:
    """A visit of one device to its part."""
    prepared, own = jax.tree.map(lambda x: x[0], (prepared, visited.own))
    visited, shared = visit(prepared, visited._replace(own=own), shared, moves, elsewhere, axis_name=AXIS)
    return visited._replace(own=jax.tree.map(lambda x: x[None], visited.own)), shared
