"""Bilinear models fitted to batches of rows or columns, for data that do not fit in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...structure.bilinear.form import GaussianSide
from ...structure.bilinear.read import read_like
from ...structure.bilinear.reading import BilinearReading
from ...structure.model.running.execution import check_key
from ..front.options import check_kind
from ..front.results import Diagnostics
from ..front.running.progress import progress_bar, warn
from ..front.state import EngineState
from ..hyper.space import UnconstrainedSpace
from .algorithms import steps
from .algorithms import sweeps as core
from .algorithms.cells import Block, Side
from .algorithms.schedules.visits import (
    BatchStore,
    SharedVectors,
    Visited,
    prepare_batch,
    start_shared,
    start_visited,
    visit_batch,
)
from .engine import BilinearVG
from .run import BilinearRun


def fit_batches(
    engine: BilinearVG,
    rng_key: Array,
    batches: Iterable[tuple[object, ...] | Mapping[str, object]],
    *,
    over: str,
    num_epochs: int = 50,
    init_state: EngineState | None = None,
    **kwargs: object,
) -> BilinearVG:
    """Fit a bilinear model to data that come in batches, each with some vectors of one side and all of their cells.

    The other side is shared. Every batch is read once; its cells, ordered, are kept in a file of the folder for
    temporary files, about 100 bytes each, and memory holds those of one batch at a time. An epoch visits all batches;
    the end is an optimum of the objective of :class:`BilinearVG` on all data together, not only near one.

    Hyperparameters are given and not learned: fit some of the batches with ``engine.run`` first, and pass what it
    learned.

    :param BilinearVG engine: its model and options are used; what it has run itself is not.
    :param rng_key: random number generator key.
    :param batches: for each batch the arguments of the model on its vectors alone, numbered from zero: a tuple of
        positional or a dictionary of keyword arguments. It may be a generator that loads one after the other.
    :param str over: a site of the side that is divided into batches, such as ``"w"``.
    :param int num_epochs: visits of each batch at most.
    :param EngineState init_state: ``last_state`` of an engine, to go on from its shared vectors: of an earlier call,
        also one that was interrupted, or of a run on some of the data.
    :param kwargs: keyword arguments of the model that are the same for all batches.
    :return: an engine that has run. Its ``log_evidence`` is that of all batches, its posterior that of the shared
        vectors and of the *last* batch; for the vectors of another use ``fold_in`` with its arguments.
        ``diagnostics.objective_trace`` has the sums over the visits of each epoch, and at its end the value that
        ``log_evidence`` has.
    :raises ValueError: if there is no batch, hyperparameters are left to learn, ``over`` is no Gaussian site, the
        shared vectors of batches have other shapes or priors, or an objective is not finite.

    Cost: per epoch about ten to twenty sweeps over all cells. Memory, beside that of one batch: for each batch its own
    posterior, and ``size * (size + 1)`` numbers for each shared vector.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> import numpy as np
        >>> from numpyro_ext.infer import BilinearVG, fit_batches
        >>> from numpyro_ext.models import poisson_factorization

        >>> rng = np.random.default_rng(0)
        >>> def load(number):
        ...     rows, cols = np.divmod(np.arange(60), 6)
        ...     return {"rows": rows, "cols": cols, "counts": rng.poisson(2.0, 60), "num_rows": 10}

        >>> scales = {"row_scale": 0.5, "row_bias_scale": 0.5, "col_bias_scale": 0.5}
        >>> engine = BilinearVG(poisson_factorization, hyper_values=scales, progress_bar=False)
        >>> batches = (load(number) for number in range(3))
        >>> fitted = fit_batches(engine, jax.random.key(0), batches, over="w", num_cols=6, rank=1)
        >>> bool(fitted.log_evidence.is_lower_bound), fitted.posterior["z"].mean.shape
        (True, (6, 1))
    """
    check_kind("fit_batches", engine, BilinearVG, "a BilinearVG")
    check_key(rng_key)
    if num_epochs < 1:
        raise ValueError(f"num_epochs must be at least 1, got {num_epochs}.")
    is_plain = engine.devices is None and engine.solver == "natural-gradient" and engine.bound == "exact"
    if not is_plain or engine.unlisted_cells != "missing":
        raise ValueError(
            "Batches are fitted on one device, by natural gradients, to the cells that are listed: leave devices, "
            "solver, bound and unlisted_cells at their defaults."
        )
    with tempfile.TemporaryDirectory(prefix="numpyro_ext_") as folder:
        run = _BatchRun(engine, rng_key, over, kwargs, init_state, BatchStore(folder))
        return _iterate(run, batches, num_epochs)


def _iterate(
    run: _BatchRun, batches: Iterable[tuple[object, ...] | Mapping[str, object]], num_epochs: int
) -> BilinearVG:
    """Epochs, and a last one that leaves the shared vectors where they are and finds the objective."""
    engine = run.engine
    trace: list[float] = []
    messages: list[str] = []
    num_quiet, change = 0, np.inf
    with progress_bar(None, "BilinearVG", unit="batches", enabled=engine.progress_bar) as bar:
        try:
            for batch in batches:
                run.add(batch)
                bar.update()
            run.check_not_empty()
            trace.append(run.objective())
            while len(trace) < num_epochs and num_quiet < 2:
                for i in range(run.num_batches):
                    run.visit(i)
                    bar.update()
                trace.append(run.objective())
                change = abs(trace[-1] - trace[-2]) / (1.0 + abs(trace[-1]))
                num_quiet = num_quiet + 1 if change < engine._tolerance() else 0
        except KeyboardInterrupt:
            run.check_not_empty()
            messages.append(f"Interrupted after {len(trace)} epochs.")
        for i in range(run.num_batches):
            run.visit(i, moves_shared=False)
            bar.update()
    bound = run.objective()
    if num_quiet < 2 and not messages:
        messages.append(
            f"The relative change of the objective in the last of {len(trace)} epochs is {change:.2g}, the tolerance "
            f"{engine._tolerance():.2g}. Give more epochs (num_epochs)."
        )
    if messages:
        warn("fit_batches did not converge. " + " ".join(messages))
    values = np.array([*trace, bound])
    diagnostics = Diagnostics(not messages, len(trace), values, float(change), 0, {}, None, tuple(messages))
    return run.finish(bound, diagnostics)


@dataclass
class _BatchRun:
    """The batches that have been read, and where their fit is."""

    engine: BilinearVG
    rng_key: Array
    over: str
    kwargs: dict[str, Any]
    init_state: EngineState | None
    store: BatchStore
    visited: list[Visited] = field(default_factory=list)
    num_own: int = 0
    _reading: BilinearReading = field(init=False)
    _space: UnconstrainedSpace = field(init=False)
    _shared: SharedVectors = field(init=False)
    _prior: GaussianSide = field(init=False)
    _own: Side = field(init=False)

    @property
    def num_batches(self) -> int:
        return len(self.visited)

    def check_not_empty(self) -> None:
        if not self.num_batches:
            raise ValueError("There is no batch: batches is empty.")

    def add(self, batch: tuple[object, ...] | Mapping[str, object]) -> None:
        """Read one more batch and visit it."""
        try:
            self._read(batch)
        except Exception as error:
            error.add_note(f"In batch {self.num_batches}, counted from zero.")
            raise
        # Shared vectors that have seen other batches must not forget them before these have been visited.
        self.visit(self.num_batches - 1, moves_shared=self.init_state is None)

    def _read(self, batch: tuple[object, ...] | Mapping[str, object]) -> None:
        engine, number = self.engine, self.num_batches
        args = () if isinstance(batch, Mapping) else tuple(batch)
        kwargs = {**self.kwargs, **(batch if isinstance(batch, Mapping) else {})}
        key = jax.random.fold_in(self.rng_key, number)
        if number:
            self._reading = read_like(self._reading, args, kwargs, key)
        else:
            # What all cells see is given, as any other hyperparameter.
            self._reading, self._space, _ = engine._prepare(key, args, kwargs, with_common=False)
            self._check_first()
        programs, given = engine._programs(self._reading, self._space), (self._reading.data, self._space.fixed)
        form, start = programs.form(*given), programs.init_state(*given, key)
        is_rows = self._own == "rows"
        own, shared = (start.rows, start.columns) if is_rows else (start.columns, start.rows)
        prior = form.columns if is_rows else form.rows
        assert isinstance(own, Block) and isinstance(shared, Block) and isinstance(prior, GaussianSide)
        if number:
            self._check_shared(prior)
        else:
            self._prior, self._shared = prior, start_shared(self._first_shared(shared), prior)
        self.num_own = own.mean.shape[0]
        prepared = prepare_batch(form, self._own, own, shared)
        self.store.append(prepared)
        self.visited.append(start_visited(prepared, own, self._shared))

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
        if self.over not in self._reading.field:
            raise ValueError(f"over must be a site of one of the sides, {sides[0]} or {sides[1]}; got {self.over!r}.")
        self._own = "rows" if self.over in sides[0] else "columns"

    def _first_shared(self, start: Block) -> Block:
        """Start of the shared vectors: at random, or where an earlier fit left them."""
        if self.init_state is None:
            return start
        state = self.init_state.state
        found: Block = state.columns if self._own == "rows" else state.rows
        shapes = [None if x is None else x.shape for x in (*start, *found)]
        if shapes[:2] != shapes[2:]:
            raise ValueError(
                f"init_state has shared vectors with means and covariances of the shapes {shapes[2:]}; on these "
                f"batches they have {shapes[:2]}."
            )
        return found

    def _check_shared(self, prior: GaussianSide) -> None:
        expected, found = (jax.tree.map(np.asarray, (p.mean, p.precision)) for p in (self._prior, prior))
        names = self._reading.sides[1 if self._own == "rows" else 0]
        what = f"{list(names)} of batch {self.num_batches}, counted from zero,"
        if expected[0].shape != found[0].shape:
            raise ValueError(
                f"{what} are {found[0].shape[0]} vectors of {found[0].shape[1]} components, in the first batch "
                f"{expected[0].shape[0]} of {expected[0].shape[1]}: all batches must share them."
            )
        if not all(np.allclose(x, y, equal_nan=True) for x, y in zip(expected, found, strict=True)):
            raise ValueError(f"{what} have another prior than in the first batch: all batches must share it.")

    def visit(self, number: int, *, moves_shared: bool = True) -> None:
        visited, shared = visit_batch(self.store[number], self.visited[number], self._shared, jnp.asarray(moves_shared))
        visited = jax.tree.map(np.asarray, visited)
        # Together, once both are there: an interruption must not leave a factor that is counted twice.
        self.visited[number], self._shared = visited, shared
        if not np.isfinite(visited.objective):
            raise ValueError(
                f"The objective of batch {number}, counted from zero, is {float(visited.objective)}: its counts or "
                "covariates are not finite, or its rates overflow. Run the engine on this batch alone for the reason."
            )

    def objective(self) -> float:
        """Objective of all batches, each as of its last visit."""
        return float(
            sum(float(v.objective) for v in self.visited) - jnp.sum(steps.divergence(self._shared.block, self._prior))
        )

    def finish(self, bound: float, diagnostics: Diagnostics) -> BilinearVG:
        """The engine of the last batch."""
        last, num = self.visited[-1], self.num_own
        own: tuple[Block, Array] = jax.tree.map(lambda x: jnp.asarray(x[:num]), (last.own, last.own_step))
        sides = own, (self._shared.block, self._shared.step)
        (rows, row_step), (columns, column_step) = sides if self._own == "rows" else sides[::-1]
        state = core.State(rows, columns, row_step, column_step, jnp.asarray(bound), jnp.asarray(0))
        engine, reading, space = self.engine, self._reading, self._space
        programs = engine._programs(reading, space)
        return engine._with_run(
            BilinearRun.ended_at(reading, space, programs, state, bound, diagnostics, self.rng_key, engine.num_samples)
        )
