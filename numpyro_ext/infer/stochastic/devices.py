"""Places of tables and batches: one device, several between which members are divided, or the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ...compilation.pytree import PyTree
from ..front.options import device_tuple

_AXIS = "members"


class OneDevice:
    """All on JAX's default device."""

    def home(self) -> AbstractContextManager[object]:
        """Context in which whole tables are computed."""
        return nullcontext()

    def owned(self, tables: PyTree) -> PyTree:
        """Copies of tables that steps may overwrite."""
        return jax.tree.map(jnp.array, tables)

    def states(self, states_of: Callable[[PyTree], PyTree], tables: dict[str, PyTree]) -> PyTree:
        """State of an optimiser for each row of the tables, by a compiled function of some rows."""
        return states_of(tables)

    def put(self, tables: PyTree) -> PyTree:
        """Give every device its rows of the tables."""
        return tables

    def lend(self, tables: PyTree, rows: np.ndarray, axis: int = 0) -> tuple[PyTree, PyTree]:
        """Tables for a compiled program, and where some rows are in them; ``None`` where they always are."""
        return tables, None

    def take_back(self, tables: PyTree, rows: np.ndarray | slice, lent: PyTree) -> PyTree:
        """Tables after a program that got them by :meth:`lend` and returns them."""
        return lent

    def whole(self, tables: PyTree, num_rows: int) -> PyTree:
        """Tables as one device would have them, from :meth:`put`."""
        return tables

    def divided(self, arrays: PyTree) -> PyTree:
        """Arrays of compiled programs, of which every device has its rows."""
        return arrays


class Host(OneDevice):
    """Tables in the memory of the host, as arrays of NumPy, of which the rows of a batch travel to the device.

    A program is the one of a single device on tables of these rows alone, so that numbers are the same.

    :param int rows_at_once: rows whose states of an optimiser are made together.
    """

    def __init__(self, rows_at_once: int = 4096) -> None:
        self._rows_at_once = rows_at_once

    def home(self) -> AbstractContextManager[object]:
        return jax.default_device(jax.local_devices(backend="cpu")[0])

    def owned(self, tables: PyTree) -> PyTree:
        return jax.tree.map(np.array, tables)

    def states(self, states_of: Callable[[PyTree], PyTree], tables: dict[str, PyTree]) -> PyTree:
        found = None
        num_rows = len(next(iter(tables.values())))
        for start in range(0, num_rows, self._rows_at_once):
            rows = slice(start, start + self._rows_at_once)
            states = states_of({name: table[rows] for name, table in tables.items()})
            if found is None:
                found = jax.tree.map(lambda x: np.empty((num_rows, *x.shape[1:]), x.dtype), states)
            self.take_back(found, rows, states)
        return found

    def lend(self, tables: PyTree, rows: np.ndarray, axis: int = 0) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda x: jnp.array(np.take(np.asarray(x), rows, axis)), tables), np.arange(len(rows))

    def take_back(self, tables: PyTree, rows: np.ndarray | slice, lent: PyTree) -> PyTree:
        for table, new in zip(jax.tree.leaves(tables), jax.tree.leaves(lent), strict=True):
            table[rows] = new
        return tables


class SeveralDevices(OneDevice):
    """Rows of tables divided between devices, and those of a batch too.

    A program is the one of a single device. Each device computes the steps of its part of a batch; gradients of what is
    shared are added over the devices, and every device takes the same step. Rows of the batch travel between the
    devices, no table does.

    :param devices: of this process.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
        self._number, self._by_row = len(devices), NamedSharding(mesh, PartitionSpec(_AXIS))

    def put(self, tables: PyTree) -> PyTree:
        # rows that nobody has at the end, so that all devices have as many
        def put(table: Array) -> Array:
            rest = -len(table) % self._number
            return jax.device_put(jnp.pad(table, [(0, rest)] + [(0, 0)] * (table.ndim - 1)), self._by_row)

        return jax.tree.map(put, tables)

    def whole(self, tables: PyTree, num_rows: int) -> PyTree:
        return jax.tree.map(lambda table: table[:num_rows], tables)

    def divided(self, arrays: PyTree) -> PyTree:
        def divide(array: Array) -> Array:
            is_even = len(array) % self._number == 0  # a last batch may not be
            return lax.with_sharding_constraint(array, self._by_row) if is_even else array

        return jax.tree.map(divide, arrays)


def checked_devices(devices: Sequence[jax.Device], batch_size: int, local: str | None) -> tuple[jax.Device, ...]:
    """Devices between which batches of this size can be divided.

    :raises ValueError: if they cannot.
    """
    found = device_tuple(devices) or ()
    if not all(one in jax.local_devices(backend=one.platform) for one in found):
        raise ValueError(f"ChunkedSVI: devices are some of this process, such as jax.devices(); got {devices!r}.")
    if batch_size % len(found):
        raise ValueError(
            f"ChunkedSVI: a batch is divided between the devices, so batch_size is a multiple of {len(found)}; got "
            f"{batch_size}."
        )
    if local is not None:
        raise ValueError(
            'ChunkedSVI: local="laplace" takes people one after the other, on one device: leave devices out.'
        )
    return found
