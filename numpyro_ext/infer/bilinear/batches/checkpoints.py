"""Checkpoints of a fit to batches: a file for each process, and the last epoch that all of them have."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...front.files.archive import read_archive
from ...front.files.checkpoints import read_checkpoint, write_checkpoint
from ...front.state import EngineState
from ..algorithms.schedules.visits import SharedVectors, Visited
from .processes import Processes


@dataclass
class Progress:
    """Epochs of a fit so far."""

    trace: list[float] = field(default_factory=list)
    num_quiet: int = 0
    """Epochs in a row that changed the objective by less than the tolerance."""
    change: float = np.inf

    def advance(self, objective: float, tol: float) -> None:
        """Count one more epoch."""
        if self.trace:
            self.change = abs(objective - self.trace[-1]) / (1.0 + abs(objective))
            self.num_quiet = self.num_quiet + 1 if self.change < tol else 0
        self.trace.append(objective)


class BatchCheckpoints:
    """Files of this process, and which of them a fit goes on from.

    One process writes ``path``. Each of several writes in turn to ``path.NUMBER.0`` and ``path.NUMBER.1``, as one may
    be killed before it has written an epoch that another has.

    :param path: ``None`` writes nothing.
    :param Processes processes: of the fit.
    """

    def __init__(self, path: str | os.PathLike[str] | None, processes: Processes) -> None:
        self._processes = processes
        self._files: list[Path] = []
        self._epoch: int | None = None
        if path is not None:
            own = f"{os.fspath(path)}.{processes.place}"
            self._files = [Path(path)] if processes.is_alone else [Path(f"{own}.{turn}") for turn in range(2)]

    def epochs(self) -> list[int]:
        """Epochs of which this process has files."""
        return [number for number, _ in self._found()]

    def choose(self, epochs: list[list[int]]) -> None:
        """Choose the last epoch of which all processes have a file.

        :param epochs: of each process.
        :raises ValueError: if some have files of later epochs than the first, and no epoch is in all.
        """
        common = set.intersection(*map(set, epochs))
        self._epoch = max(common, default=None)
        latest = [max(found, default=0) for found in epochs]
        if not common and max(latest) > 1:
            raise ValueError(
                f"Checkpoints of the processes {self._processes.numbers} end at the epochs {latest}, and none is in "
                "all: start as many processes as before, with their files, or give another path."
            )

    @property
    def is_resumed(self) -> bool:
        return self._epoch is not None

    def write(self, shared: SharedVectors, visited: list[Visited], progress: Progress, digest: str) -> None:
        """Write the end of an epoch."""
        if self._files:
            values = np.array([progress.num_quiet, progress.change, *progress.trace])
            epoch = len(progress.trace)
            arrays = jax.tree.map(np.asarray, (shared, visited))
            state = EngineState(jnp.asarray(values), arrays, None, epoch, digest)
            write_checkpoint(self._files[epoch % len(self._files)], state)

    def read(
        self, shared: SharedVectors, visited: list[Visited], digest: str
    ) -> tuple[SharedVectors, list[Visited], Progress]:
        """The chosen epoch; of the arguments only the shapes count.

        :raises ValueError: if the file is of other data or another model.
        """
        file = dict(self._found())[self._epoch]
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (shared, visited))
        state = read_checkpoint(file, shapes, digest)
        assert state is not None
        num_quiet, change, *trace = np.asarray(state.values).tolist()
        shared, visited = jax.tree.map(np.asarray, state.state)
        return shared, visited, Progress(trace, int(num_quiet), change)

    def _found(self) -> list[tuple[Any, Path]]:
        return [(read_archive(file).get("num_steps", 0), file) for file in self._files if file.exists()]
