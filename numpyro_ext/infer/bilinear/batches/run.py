"""The batches that a fit has read, and where it is."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.pytree import PyTree
from ....structure.bilinear.form import GaussianSide
from ....structure.bilinear.read import read_like
from ....structure.bilinear.reading import BilinearReading
from ....structure.model.running.execution import check_key
from ...front.results import Diagnostics
from ...front.state import EngineState, data_digest
from ...hyper.space import UnconstrainedSpace
from ..algorithms import sweeps as core
from ..algorithms.cells import Block
from ..algorithms.quadratic import Elsewhere, Options
from ..algorithms.schedules.visits import SharedVectors, Visited, start_shared, start_visited
from ..engine import BilinearVG
from ..run import BilinearRun
from .checkpoints import BatchCheckpoints, Progress
from .devices import BatchDevices
from .parts import BatchStore, DividedBatch, Sizes
from .processes import Processes, Record

Batch: TypeAlias = tuple[object, ...] | Mapping[str, object]
_Part = TypeVar("_Part")


class Call(NamedTuple):
    """Arguments of :func:`~numpyro_ext.infer.fit_batches` that all processes share."""

    engine: BilinearVG
    rng_key: Array
    over: str
    num_epochs: int
    init_state: EngineState | None
    kwargs: dict[str, Any]

    def check(self) -> None:
        """Refuse what batches cannot do."""
        check_key(self.rng_key)
        engine = self.engine
        if self.num_epochs < 1:
            raise ValueError(f"num_epochs must be at least 1, got {self.num_epochs}.")
        if engine.solver != "natural-gradient":
            raise ValueError("Batches are fitted by natural gradients or closed updates: leave solver at its default.")
        if engine.unlisted_cells == "zero" and engine.zeros in ("exact", "sampled"):
            raise ValueError(
                f"zeros={engine.zeros!r} visits cells of the whole matrix, or draws them, and batches hold some rows: "
                "take zeros='by_row' or 'shared'."
            )


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
    _space: UnconstrainedSpace
    _shared: SharedVectors
    _prior: GaussianSide
    _common_prior: GaussianSide | None
    _is_over_rows: bool
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
        has_begun = bool(self.progress.trace) or not self._checkpoints.is_resumed
        return self.processes.is_alone and bool(self._visited) and has_begun

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
        if not self._checkpoints.is_resumed:
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
            reading = read_like(self._reading, args, kwargs, key, unlisted_cells=engine.unlisted_cells)
        else:
            reading, self._space, _ = engine._prepare(key, args, kwargs)
            self._reading = reading
            self._check_first()
        space = self._space
        programs, given = engine._programs(reading, space), (reading.data, space.fixed)
        form, start = programs.form(*given), programs.init_state(*given, key)
        form = form if self._is_over_rows else form.transposed()
        own, shared = self._sides(start.rows, start.columns)
        prior = form.columns
        assert isinstance(own, Block) and isinstance(shared, Block) and isinstance(prior, GaussianSide)
        # The cells of a batch are few of those that a matrix of its vectors would have, and batches are of one kind.
        closed = programs.closed and programs.closed._replace(kind="tiles")
        if number:
            self._check_shared(prior, form.common and form.common.prior)
            self._check_updates(closed)
        else:
            self._prior, self._common_prior = prior, form.common and form.common.prior
            self._shared = self._first_shared(start)
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
        self._visited.append(start_visited(own, self._shared, has_shared_tangent=self._has_shared_tangent))
        if self._has_next:
            self._last = self.num_batches - 1, reading, batch
        leaves, structure = jax.tree.flatten_with_path(prepared)
        shapes = {f"Array {jax.tree_util.keystr(path)}": f"{x.dtype}{list(x.shape)}" for path, x in leaves}
        text = hashlib.sha256(str(structure).encode()).hexdigest()[:16]
        return {"Structure of a batch (of a single cell it is another: give two or more)": text, **shapes}

    def _described(self) -> Record:
        """Options that are the same in all processes."""
        call, families = self.call, self._engine._families(self._reading)
        return {
            "over": call.over,
            "num_epochs": call.num_epochs,
            "tol": call.engine._tolerance(),
            "rng_key": jax.random.key_data(call.rng_key).ravel().tolist(),
            "Sites of rows and columns": [list(names) for names in self._reading.sides],
            "covariance of rows and columns": list(families),
            "Updates": str(self._closed),
            "Number of shared vectors": self._prior.mean.shape[0],
            "Components of a shared vector": self._prior.mean.shape[1],
            "Numbers are": str(self._prior.mean.dtype),
            "Prior of the shared vectors (sums)": _sums((self._prior.mean, self._prior.precision)),
            "Start of the shared vectors (sums)": _sums((self._shared.block, self._shared.common)),
        }

    def _check_first(self) -> None:
        if self._space.names:
            raise ValueError(
                f"{list(self._space.names)} would have to be learned, which batches cannot: fit some of the data with "
                "engine.run, and give BilinearVG(..., hyper_values=...) what it learned."
            )
        sides = self._reading.sides
        if any(self._reading.is_coupled):
            raise ValueError(
                "Batches share vectors that are independent, and covariance='component' is for vectors that depend on "
                "each other: fit with engine.run, and add rows to the fit by fold_in."
            )
        if self.call.over not in self._reading.field:
            raise ValueError(
                f"over must be a site of one of the sides, {sides[0]} or {sides[1]}; got {self.call.over!r}."
            )
        self._is_over_rows = self.call.over in sides[0]
        if self._reading.pair_sites is not None:
            raise ValueError(
                f"Site '{self._reading.pair_sites.name}' has censored pairs, whose rows share what was censored: fit "
                "all of them by engine.run."
            )

        if self._reading.unlisted_cells == "zero" and not self._is_over_rows and not self._has_shared_tangent:
            can_share = ", or zeros='shared'" if self.call.engine.bound == "jaakkola" else ""
            raise ValueError(
                f"Unlisted zeros have a tangent for each row, and batches over {self.call.over!r} are of columns: take "
                f"batches over one of {list(sides[0])}{can_share}."
            )

    @property
    def _has_shared_tangent(self) -> bool:
        """True if the unlisted zeros of all batches share a tangent."""
        engine = self.call.engine
        return engine.unlisted_cells == "zero" and engine.zeros == "shared" and engine.bound == "jaakkola"

    def _sides(self, rows: _Part, columns: _Part) -> tuple[_Part, _Part]:
        """Own and shared of two parts; or, the other way, those of rows and of columns."""
        return (rows, columns) if self._is_over_rows else (columns, rows)

    def _first_shared(self, start: core.State) -> SharedVectors:
        """Start of what is shared: at random, or where an earlier fit left it."""

        def blocks(state: core.State) -> tuple[Block, Block | None]:
            shared = self._sides(state.rows, state.columns)[1]
            assert isinstance(shared, Block)
            return shared, state.common

        block, common = blocks(start)
        if self.call.init_state is not None:
            block, common = blocks(self.call.init_state.state)
            found, expected = (
                [None if x is None else x.shape for b in parts if b is not None for x in b]
                for parts in ((block, common), blocks(start))
            )
            if found != expected:
                raise ValueError(
                    f"init_state has shared vectors with means and covariances of the shapes {found}; on these batches "
                    f"they have {expected}."
                )
        return start_shared(block, self._prior, common, self._common_prior)

    def _check_shared(self, *priors: GaussianSide | None) -> None:
        expected, found = (
            [np.asarray(x) for p in both if p is not None for x in (p.mean, p.precision)]
            for both in ((self._prior, self._common_prior), priors)
        )
        names = self._sides(*self._reading.sides)[1]
        what = f"{list(names)} of batch {self.num_batches}, counted from zero,"
        if expected[0].shape != found[0].shape:
            raise ValueError(
                f"{what} are {found[0].shape[0]} vectors of {found[0].shape[1]} components, in the first batch "
                f"{expected[0].shape[0]} of {expected[0].shape[1]}: all batches must share them."
            )
        if not all(np.allclose(x, y, equal_nan=True) for x, y in zip(expected, found, strict=True)):
            raise ValueError(f"{what} have another prior than in the first batch: all batches must share it.")

    def _check_updates(self, closed: Options | None) -> None:
        if closed != self._closed:
            raise ValueError(
                f"The coefficients of predictors are the same in all cells of some batches, and not in all of batch "
                f"{self.num_batches}, counted from zero: leave bound out, or divide the cells otherwise."
            )

    # Visits

    def visit(self, number: int, *, moves_shared: bool = True) -> None:
        """Visit a batch of every process."""
        visited, shared = self._devices.visit(
            self._store[number],
            self._visited[number],
            self._shared,
            moves_shared,
            self._elsewhere(number),
            self._closed,
        )
        # Together, once both are there: an interruption must not leave a factor that is counted twice.
        self._visited[number], self._shared = visited, shared
        if not np.isfinite(visited.objective):
            raise ValueError(
                f"The objective of batch {number}, counted from zero, is {float(visited.objective)}: its counts or "
                "covariates are not finite, or its rates overflow. Run the engine on this batch alone for the reason."
            )

    def _elsewhere(self, number: int) -> Elsewhere | None:
        """What all other batches say of a tangent that all share, if there is one."""
        if self._visited[number].left is None:
            return None
        others = [np.asarray(v.left) for i, v in enumerate(self._visited) if i != number]
        return Elsewhere(jnp.asarray(np.sum([np.zeros(3), *others], axis=0)))

    def begin(self) -> None:
        """Count the visits while reading as the first epoch, or go on from a checkpoint."""
        if self._checkpoints.is_resumed:
            self.processes.share(self._resume, "while it read its checkpoint")
        else:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Find the objective, and write a checkpoint."""
        self.progress.advance(self.objective(), self.call.engine._tolerance())
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
        block, common = jax.tree.map(np.asarray, (self._shared.block, self._shared.common))
        cost = self._shared._replace(block=block, common=common).divergence(self._prior, self._common_prior)
        return sum(float(v.objective) for v in self._visited) - float(cost)

    def finish(self, bound: float, diagnostics: Diagnostics) -> BilinearVG:
        """The engine of the last batch of this process."""
        number, reading, batch = self._last
        last = self._visited[number]
        own = batch.in_order((last.own.block, last.own.step))
        found = self._shared.block, self._shared.step, self._shared.common
        *shared, common = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, found))
        (rows, row_step), (columns, column_step) = self._sides(own, tuple(shared))
        state = core.State(rows, columns, row_step, column_step, jnp.asarray(bound), jnp.asarray(0), common)
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
