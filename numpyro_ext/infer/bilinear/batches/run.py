"""The batches that a fit has read, and where it is."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ....compilation.pytree import PyTree
from ....structure.bilinear.form import Bilinear, GaussianSide
from ....structure.bilinear.read import read_like
from ....structure.bilinear.reading import BilinearReading
from ...front.results import Diagnostics
from ...front.state import data_digest
from ...hyper.space import UnconstrainedSpace
from ..algorithms import sweeps as core
from ..algorithms.cells import Block
from ..algorithms.quadratic import Options
from ..algorithms.schedules.visits import (
    Moves,
    SharedVectors,
    Visited,
    start_visited,
    with_equal_shares,
    with_shares_by_totals,
)
from ..engines.engine import BilinearVG
from ..runs.run import BilinearRun
from .call import Batch, Call
from .checkpoints import BatchCheckpoints, Progress
from .devices import BatchDevices
from .parts import BatchStore, DividedBatch, Sizes
from .processes import Processes, Record
from .together import after_silent_step, check_alike, elsewhere_of, objective_of, selected_of


class BatchRun:
    """A fit to batches in this process, and possibly in others with batches of their own.

    The first batches of all processes are one batch whose own vectors are divided between all devices, the second
    batches another one, and so on.

    :param Call call: what is asked for.
    :param batches: of this process.
    :param path: of a checkpoint.
    :param BatchStore store: of an empty folder.
    """

    def __init__(
        self, call: Call, batches: Iterable[Batch], path: str | os.PathLike[str] | None, store: BatchStore
    ) -> None:
        self.call, self._store = call, store
        self._devices = BatchDevices(call.engine.devices)
        # Models are read, and answer, on one device of this process.
        self._engine = copy.copy(call.engine)
        self._engine.devices = None
        self.processes = Processes(self._devices)
        self.progress = Progress()
        self._visited: list[Visited] = []
        self._num_of_all = [0] * len(self.processes.numbers)
        self._digests: list[str] = []
        self._checkpoints = BatchCheckpoints(path, self.processes)
        self._has_begun = False

        def begin() -> Record:
            call.check()
            if not isinstance(batches, Iterable):
                raise TypeError(f"batches must be a list or generator of batches, got {type(batches).__name__}.")
            self._source = iter(batches)
            return {"epochs": self._checkpoints.epochs(), "has_checkpoint": path is not None}

        found = self.processes.share(begin, "before the first batch")
        self.processes.check_equal([{"Is checkpoint= given?": record["has_checkpoint"]} for record in found])
        self._checkpoints.choose([record["epochs"] for record in found])

    _source: Iterator[Batch]
    _reading: BilinearReading
    """The model on the first batch."""
    _read_last: tuple[BilinearReading, DividedBatch]
    _last: tuple[int, BilinearReading, DividedBatch]
    """The last batch of this process that may be visited, with its number."""
    _form: Bilinear
    """Form of the first batch, without its cells."""
    _space: UnconstrainedSpace
    _shared: SharedVectors
    _closed: Options | None
    """Closed updates, where these take the place of steps."""

    @property
    def num_batches(self) -> int:
        """Batches of the process that has most."""
        return len(self._visited)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on what may be other than it was meant."""
        if len(set(self._num_of_all)) == 1:
            return ()
        return (
            f"The processes {self.processes.numbers} had {self._num_of_all} batches: those with fewer waited for the "
            "others.",
        )

    @property
    def may_be_cut_short(self) -> bool:
        """True if there is something to answer with, and no other process would wait for this one."""
        visits_first = not self._checkpoints.is_resumed and not self._is_censored
        return self.processes.is_alone and bool(self._visited) and (self._has_begun or visits_first)

    @property
    def _is_censored(self) -> bool:
        return self._shared.selection is not None

    # Reading

    def add(self) -> bool:
        """Read the next batch of every process and visit it; false if there is none."""
        number = self.num_batches
        where = f"in batch {number}, counted from zero"
        records = self.processes.share(self._read_next, where)
        found = [Sizes(*record["sizes"]) for record in records if record["sizes"]]
        if not number:
            self._check_all_begin(records)
        if not found:
            return False
        self._num_of_all = [num + bool(record["sizes"]) for num, record in zip(self._num_of_all, records, strict=True)]
        sizes = Sizes(*map(max, zip(*found, strict=True))).rounded()
        same = self.processes.share(partial(self._store_batch, sizes), where)
        self.processes.check_equal(same)
        if self._is_censored:
            self._count_pairs()
        if not self._checkpoints.is_resumed and not self._is_censored:
            # Shared vectors that have seen other batches must not forget them before these have been visited.
            self.visit(number, moves_shared=self.call.init_state is None)
        return True

    def _check_all_begin(self, records: list[Record]) -> None:
        without = [n for n, record in zip(self.processes.numbers, records, strict=True) if not record["sizes"]]
        if without:
            what = "" if self.processes.is_alone else f" in process {without[0]}"
            others = "" if self.processes.is_alone else " Every process needs one: start fewer, or divide otherwise."
            raise ValueError(f"There is no batch{what}: batches is empty.{others}")
        self.processes.check_equal([record["call"] for record in records])

    def _read_next(self) -> Record:
        batch = next(self._source, None)
        self._has_next = batch is not None
        if batch is None:
            return {"sizes": None}
        try:
            self._read(batch)
        except Exception as error:
            error.add_note(f"In batch {self.num_batches}, counted from zero.")
            raise
        return {"sizes": list(self._read_last[1].sizes), "call": {} if self.num_batches else self._described()}

    def _read(self, batch: Batch) -> None:
        engine, number = self._engine, self.num_batches
        if isinstance(batch, str) or not isinstance(batch, Mapping | tuple | list):
            raise TypeError(
                "A batch is a tuple of positional or a dictionary of keyword arguments of the model, and batches a "
                f"list or generator of such; got a batch that is a {type(batch).__name__}."
            )
        args = () if isinstance(batch, Mapping) else tuple(batch)
        kwargs = {**self.call.kwargs, **(batch if isinstance(batch, Mapping) else {})}
        key = jax.random.fold_in(self.call.rng_key, number)
        if number:
            unlisted = engine.unlisted_cells
            reading = read_like(self._reading, args, kwargs, key, unlisted_cells=unlisted, with_censored=True)
        else:
            reading, self._space, *_ = engine._prepare(key, args, kwargs)
            self._reading = reading
            self.call.check_reading(reading, self._space)
        space = self._space
        programs, given = engine._programs(reading, space), (reading.data, space.fixed)
        form, start = programs.form(*given), programs.init_state(*given, key)
        form = form if self.call.is_over_rows(reading) else form.transposed()
        own, shared = self.call.sides(reading, start.rows, start.columns)
        assert isinstance(own, Block) and isinstance(shared, Block)
        # The cells of a batch are few of those that a matrix of its vectors would have, and batches are of one kind.
        closed = programs.closed and programs.closed._replace(kind="tiles")
        if number:
            check_alike(self._form, form, self.call.sides(reading, *reading.sides)[1], number)
            self._check_updates(closed)
        else:
            self._form = core.without_cells(form)
            self._shared = self.call.first_shared(reading, form, start)
            self._closed = closed
        # The shared vectors have random signs, and the own ones follow, however they are divided.
        own = own._replace(mean=form.rows.mean)
        self._read_last = reading, DividedBatch(form, own, shared, closed, len(self._devices.local))
        self._digests.append(data_digest(reading.written_data, space.fixed, reading.key))

    def _store_batch(self, sizes: Sizes) -> Record:
        """Keep what was read; where a process has no batch any more, the last one without weight."""
        reading, batch = self._read_last
        prepared, own = batch.prepare(sizes, is_filler=not self._has_next)
        self._store.append(prepared)
        has_shared_tangent = self.call.has_shared_tangent(reading)
        form = None if self._closed is None else prepared.form
        self._visited.append(start_visited(own, self._shared, has_shared_tangent=has_shared_tangent, form=form))
        if self._has_next:
            self._last = self.num_batches - 1, reading, batch
        leaves, structure = jax.tree.flatten_with_path(prepared)
        shapes = {f"Array {jax.tree_util.keystr(path)}": f"{x.dtype}{list(x.shape)}" for path, x in leaves}
        text = hashlib.sha256(str(structure).encode()).hexdigest()[:16]
        return {"Structure of a batch (of a single cell it is another: give two or more)": text, **shapes}

    def _count_pairs(self) -> None:
        """Vectors and listed pairs of the batch that was read last, of all processes."""
        selection = self._shared.selection
        assert selection is not None
        form = self._read_last[1].form
        listed = np.asarray(form.listed_counts()[1])
        own = np.append(listed, form.rows.mean.shape[0]).astype(listed.dtype) * self._has_next
        of_all = own if self.processes.is_alone else self._devices.of_all_processes(own).sum(0)
        self._visited[-1] = with_equal_shares(self._visited[-1], selection, of_all[-1])
        self._shared = self._shared._replace(selection=selection._replace(listed=selection.listed + of_all[:-1]))

    def _described(self) -> Record:
        """Options that are the same in all processes."""
        call, families, prior = self.call, self._engine._families(self._reading), self._form.columns
        assert isinstance(prior, GaussianSide)
        background, censored = self._form.background, {}
        if background is not None and background.selection is not None:
            censored = {
                "num_censored": float(background.exposure),
                "Prior of the selection of shared vectors (sums)": _sums(background.selection.columns),
            }
        return censored | {
            "over": call.over,
            "num_epochs": call.num_epochs,
            "tol": call.engine._tolerance(),
            "rng_key": jax.random.key_data(call.rng_key).ravel().tolist(),
            "Sites of rows and columns": [list(names) for names in self._reading.sides],
            "covariance of rows and columns": list(families),
            "Updates": str(self._closed),
            "Number of shared vectors": prior.mean.shape[0],
            "Components of a shared vector": prior.mean.shape[1],
            "Numbers are": str(prior.mean.dtype),
            "Prior of the shared vectors (sums)": _sums((prior.mean, prior.precision)),
            "Start of the shared vectors (sums)": _sums((self._shared.block, self._shared.common)),
        }

    def _check_updates(self, closed: Options | None) -> None:
        if closed != self._closed:
            raise ValueError(
                f"The coefficients of predictors are the same in all cells of some batches, and not in all of batch "
                f"{self.num_batches}, counted from zero: leave bound out, or divide the cells otherwise."
            )

    # Visits

    def visit(self, number: int, *, moves_shared: bool = True, moves_shares: bool | None = None) -> None:
        """Visit a batch of every process.

        :param bool moves_shares: whether shares in censored pairs move, by default as what is shared.
        """
        visited, shared = self._devices.visit(
            self._store[number],
            self._visited[number],
            self._shared,
            Moves(moves_shared, moves_shared if moves_shares is None else moves_shares),
            elsewhere_of(self._visited, number),
            self._closed,
        )
        # Together, once both are there: an interruption must not leave a factor that is counted twice.
        self._visited[number], self._shared = visited, shared
        if not np.isfinite(visited.objective):
            raise ValueError(
                f"The objective of batch {number}, counted from zero, is {float(visited.objective)}: its counts or "
                "covariates are not finite, or its rates overflow. Run the engine on this batch alone for the reason."
            )

    def begin(self) -> None:
        """Count the visits while reading as the first epoch, or go on from a checkpoint.

        Where pairs are censored nothing was visited yet, as rows share them with those of batches that come later.
        """
        if self._checkpoints.is_resumed:
            self.processes.share(self._resume, "while it read its checkpoint")
        elif not self._is_censored:
            self.end_epoch(moves_shared=self.call.init_state is None)
        else:
            self._visited = jax.tree.map(np.asarray, with_shares_by_totals(self._visited))
        self._has_begun = True
        if self._is_censored and self.call.init_state is not None and not self.progress.trace:
            for number in range(self.num_batches):
                self.visit(number, moves_shared=False, moves_shares=True)
            self.end_epoch()

    def end_epoch(self, *, moves_shared: bool = True) -> None:
        """Move along directions in which data are silent, find the objective, and write a checkpoint."""
        if moves_shared:
            self._visited, self._shared = after_silent_step(self._visited, self._shared, self._form)
        self.progress.advance(self.objective(), self.call.engine._tolerance())
        if self._is_censored:
            self._visited = jax.tree.map(np.asarray, with_shares_by_totals(self._visited))
        self._checkpoints.write(self._shared, self._visited, self.progress, self._digest)

    def _resume(self) -> Record:
        found = self._checkpoints.read(self._shared, self._visited, self._digest)
        self._shared, self._visited, self.progress = found
        return {}

    @property
    def _digest(self) -> str:
        return data_digest((), {}, *self._digests, len(self._devices.all), *self.processes.numbers)

    def objective(self) -> float:
        """Objective of all batches, each as of its last visit."""
        return objective_of(self._visited, self._shared, self._form)

    def finish(self, bound: float, diagnostics: Diagnostics) -> BilinearVG:
        """The engine of the last batch of this process."""
        number, reading, batch = self._last
        last = self._visited[number]
        own = batch.in_order((last.own.block, last.own.step))
        found = self._shared.block, self._shared.step, self._shared.common
        *shared, common = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, found))
        (rows, row_step), (columns, column_step) = self.call.sides(reading, own, tuple(shared))
        selected = None
        if self._shared.selection is not None:
            shares = batch.in_order((last.own.log_shares, last.own.counts))
            selected = selected_of(last, shares, self._shared.selection)
            selected = selected if self.call.is_over_rows(reading) else selected.transposed()
        state = core.State(rows, columns, row_step, column_step, jnp.asarray(bound), jnp.asarray(0), common, selected)
        call, space = self.call, self._space
        programs = self._engine._programs(reading, space)
        return call.engine._with_run(
            BilinearRun.ended_at(
                reading, space, programs, state, bound, diagnostics, call.rng_key, call.engine.num_samples
            )
        )


def _sums(arrays: PyTree) -> list[float]:
    """Sums with weights, that tell arrays apart."""
    leaves = [np.asarray(x, float).ravel() for x in jax.tree.leaves(arrays)]
    return [float(f"{x @ np.cos(np.arange(x.size)):.6g}") for x in leaves]
