"""Batches divided between devices, and kept in files until they are visited."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.pytree import PyTree
from ....linalg.padding import rounded_up
from ....structure.bilinear.form import Bilinear, GaussianSide
from ..algorithms import sweeps as core
from ..algorithms.cells import Block
from ..algorithms.quadratic import Options
from ..algorithms.quadratic import make_views as make_closed_views
from ..algorithms.schedules.devices import place_rows
from ..algorithms.schedules.methods import Prepared


class Sizes(NamedTuple):
    """Numbers of cells and of own vectors on the device that has most."""

    num_cells: int
    num_vectors: int

    def rounded(self) -> Sizes:
        """Sizes of arrays, which batches of similar sizes share."""
        return Sizes(*map(rounded_up, self))


class DividedBatch:
    """A batch whose own vectors, with all of their cells, are divided between the devices of this process.

    :param Bilinear form: of the batch, whose own vectors are the rows.
    :param Block own: start of these vectors.
    :param Block shared: the other side; only its shapes count.
    :param Options closed: of closed updates, where these take the place of steps.
    :param int num_devices: of this process.
    """

    def __init__(self, form: Bilinear, own: Block, shared: Block, closed: Options | None, num_devices: int) -> None:
        self._own, self._shared, self._closed = own, shared, closed
        self.form: Bilinear = jax.tree.map(np.asarray, form)
        self._places = place_rows(self.form.row_index, self.form.column_index, own.mean.shape[0], num_devices)
        self._num_devices = num_devices

    @property
    def sizes(self) -> Sizes:
        """Sizes of the largest part."""
        return Sizes(self._places.cells.shape[1], self._length)

    @property
    def _length(self) -> int:
        return len(self._places.source) // self._num_devices

    def prepare(self, sizes: Sizes, *, is_filler: bool = False) -> tuple[Prepared, Block]:
        """Ordered cells of all parts, and the start of their vectors, with a leading axis for the devices.

        :param Sizes sizes: to which every part is filled up with what has no weight.
        :param bool is_filler: give no weight to anything, in the place of a batch that there is not.
        """
        parts = [self._part(device, sizes, is_filler) for device in range(self._num_devices)]
        prepared, own = zip(*parts, strict=True)
        return _stacked(prepared), _stacked(own)

    def in_order(self, own: PyTree) -> PyTree:
        """Arrays of own vectors, as all parts have them, in the order of the batch."""
        device, place = np.divmod(self._places.position, self._length)
        return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[device, place]), own)

    def _part(self, device: int, sizes: Sizes, is_filler: bool) -> tuple[Prepared, Block]:
        form, places = self.form, self._places
        cells = _extended(places.cells[device], sizes.num_cells)
        is_cell = np.arange(sizes.num_cells) < (0 if is_filler else places.is_cell[device].sum())
        vectors = _extended(places.source.reshape(self._num_devices, -1)[device], sizes.num_vectors)
        is_used = places.is_used.reshape(self._num_devices, -1)[device]
        is_used = np.arange(sizes.num_vectors) < (0 if is_filler else is_used.sum())

        def take(x: np.ndarray) -> np.ndarray:
            return x[cells] if x.shape[:1] == (form.num_cells,) else x

        names = ("coupling", "row_linear", "column_linear", "offset", "potential")
        taken: dict[str, Any] = {name: jax.tree.map(take, getattr(form, name)) for name in names}
        taken["weight"] = np.where(is_cell, form.weight[cells], 0.0)
        for name, index in (("row", places.local_row), ("column", places.column)):
            found = _extended(index[device], sizes.num_cells)
            taken |= {f"{name}_index": found, f"{name}_order": np.argsort(found, kind="stable")}
        assert isinstance(form.rows, GaussianSide)  # by BatchRun
        weight = jnp.asarray(is_used, form.rows.mean.dtype)
        taken["rows"] = GaussianSide(form.rows.mean[vectors], form.rows.precision[vectors], weight)
        if form.background is not None and form.background.selection is not None:
            selection = form.background.selection
            selection = selection._replace(rows=selection.rows[vectors])
            taken["background"] = form.background._replace(selection=selection)
        taken["log_constant"] = form.log_constant * (device == 0 and not is_filler)
        part = jax.tree.map(jnp.asarray, form._replace(**taken))
        own = jax.tree.map(lambda x: np.asarray(x)[vectors], self._own)
        prepared = _prepare(part, own, self._shared, jnp.asarray(is_cell), closed=self._closed)
        return prepared, own


@partial(jax.jit, static_argnames="closed")
def _prepare(form: Bilinear, own: Block, shared: Block, is_cell: Array, *, closed: Options | None) -> Prepared:
    """Order the cells of a part."""
    views = core.make_views(form, own, shared) if closed is None else make_closed_views(form, closed, is_cell)
    return Prepared(core.without_cells(form), views)


def _stacked(parts: tuple[PyTree, ...]) -> PyTree:
    return jax.tree.map(lambda *found: np.stack([np.asarray(x) for x in found]), *parts)


def _extended(index: np.ndarray, length: int) -> np.ndarray:
    """The first entries of an index, its last one repeated where there are too few."""
    return index[np.minimum(np.arange(length), len(index) - 1)]


class BatchStore:
    """Prepared batches in files of a folder.

    :param folder: an empty one.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._structures: list[Any] = []

    def __len__(self) -> int:
        return len(self._structures)

    def append(self, prepared: Prepared) -> None:
        """Write one more."""
        leaves, structure = jax.tree.flatten(prepared)
        np.savez(self._path(len(self)), *map(np.asarray, leaves))
        self._structures.append(structure)

    def __getitem__(self, number: int) -> Prepared:
        with np.load(self._path(number)) as content:
            leaves = [content[f"arr_{i}"] for i in range(len(content.files))]
        return jax.tree.unflatten(self._structures[number], leaves)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.npz"
