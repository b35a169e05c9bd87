"""Loop over epochs and batches: validation, interrupts, losses that are not finite, checkpoints."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..front.files.archive import write_archive
from ..front.running.progress import progress_bar, warn
from .chunks import Batch
from .data import Rows, Sequences
from .fit import TrainingState, mean_error
from .program import Program
from .sampled_softmax import log_proposals
from .setting import Setting

MOST_FAILURES = 3
"""Losses that are not finite after which training stops."""


class Checkpoint:
    """File that the state is written to every some minutes."""

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.seconds, self.written = path, 60.0 * minutes, time.monotonic()

    def write(self, training: Training, *, now: bool = False) -> None:
        """Write the state if it is time."""
        if now or time.monotonic() - self.written >= self.seconds:
            write_archive(self.path, {"training": training.whole_state.packed()})
            self.written = time.monotonic()


class Training:
    """One run.

    :param program: initialised.
    :param source: the data.
    :param state: to go on from.
    """

    def __init__(
        self,
        program: Program,
        source: Rows | Sequences,
        setting: Setting,
        batch_size: int,
        state: TrainingState,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.program, self.source, self.setting, self.batch_size = program, source, setting, batch_size
        self.state = state._replace(parameters=program.put(state.parameters))
        self.checkpoint = checkpoint
        self.notes: list[str] = []
        self._proposal: dict[str, jax.Array] = {}
        if program.sampled_softmax is not None and isinstance(source, Sequences):
            self._proposal = {"log_proposal": log_proposals(source.events.items, source.num_items)}

    @property
    def whole_state(self) -> TrainingState:
        """State as one device would have it."""
        return self.state._replace(parameters=self.program.whole(self.state.parameters))

    def run(self, num_epochs: int, patience: int | None, show: bool) -> str:
        """Train, and say why it ended."""
        with progress_bar(None, "training", unit="batches", enabled=show) as bar, _interrupts() as interrupted:
            stopped = self._epochs(num_epochs, patience, bar, interrupted)
        if self.checkpoint is not None:
            self.checkpoint.write(self, now=True)
        if self.state.num_failures:
            self.notes.append(f"{self.state.num_failures} losses were not finite; the rate was halved each time")
        self._tell_of_a_rise()
        return stopped

    def _epochs(self, num_epochs: int, patience: int | None, bar: Any, interrupted: list[bool]) -> str:
        while self.state.epoch < num_epochs:
            if self.state.num_failures >= MOST_FAILURES:
                return "not finite"
            if patience is not None and self.state.best_epoch and self.state.epoch - self.state.best_epoch >= patience:
                return "patience"
            batches = self._batches()
            for batch in batches[self.state.batch :]:
                if interrupted:
                    warn(f"ChunkedSVI: interrupted in epoch {self.state.epoch + 1}; the best so far is returned.")
                    return "interrupted"
                if not self._step(batch):
                    self._after_failure()
                    if self.state.num_failures >= MOST_FAILURES:
                        return "not finite"
                bar.set_postfix_str(self._progress(), refresh=False)
                bar.update()
                if self.checkpoint is not None:
                    self.checkpoint.write(self)
            self._end_of_epoch()
        return "num_epochs"

    def _batches(self) -> list[Batch]:
        """Batches of the epoch, which depend on nothing but its number and the key of the run."""
        key = jax.random.fold_in(self.state.order_key, self.state.epoch)
        return self.source.batches(self.batch_size, jax.random.uniform(key, (2 * self.source.num_rows,)))

    def _step(self, batch: Batch) -> bool:
        state = self.state
        lent, rows = self.program.lend(state.parameters, batch.users)
        start = (lent, state.key, state.rate, jnp.asarray(batch.users))
        if isinstance(self.source, Sequences):
            given = (*start, batch.num_chunks, self.source.events, self.setting)
            lent, key, loss, good = self.program.run_chunks(*given, **self._proposal, rows=rows, width=batch.width)
        else:
            lent, key, loss, good = self.program.run_rows(*start, self.source.data, self.setting, rows)
        self.state = state._replace(
            parameters=self.program.take_back(state.parameters, batch.users, lent),
            key=key,
            batch=state.batch + 1,
            total=state.total + float(loss),
            seen=state.seen + self.source.size(batch),
        )
        return bool(good)

    def _after_failure(self) -> None:
        self.state = self.state._replace(num_failures=self.state.num_failures + 1, rate=self.state.rate / 2)
        where = f"a loss of epoch {self.state.epoch + 1} was not finite, and its step was not taken"
        if self.state.num_failures < MOST_FAILURES:
            warn(f"ChunkedSVI: {where}; the rate is halved.")
        else:
            warn(f"ChunkedSVI: {where}. It is the third time, so training ends; try a smaller rate.")

    def _tell_of_a_rise(self) -> None:
        """Say that the loss is far above that of the first epoch: steps so long diverge without overflowing."""
        losses = self.state.losses
        if len(losses) > 1 and losses[-1] - losses[0] > abs(losses[0]):
            note = f"the loss of epoch {len(losses)} is {losses[-1]:.4g} nats, of the first {losses[0]:.4g}"
            self.notes.append(note)
            warn(f"ChunkedSVI: {note}: training diverges; try a smaller rate.")

    def _progress(self) -> str:
        error = f", validation {self.state.errors[-1]:.4f}" if self.state.errors else ""
        return f"epoch {self.state.epoch + 1}, {self.state.total / max(self.state.seen, 1):.4f} nats{error}"

    def _end_of_epoch(self) -> None:
        state = self.state
        losses = (*state.losses, state.total / max(state.seen, 1))
        state = state._replace(epoch=state.epoch + 1, batch=0, total=0.0, seen=0, losses=losses)
        if isinstance(self.source, Sequences) and self.source.validation is not None:
            events, counts = self.source.validation
            values = self.program.values_to_validate(state.parameters)
            key = jax.random.fold_in(state.order_key, 2**31)
            error = mean_error(
                events, self.program.event_scores(values, key, events, self.batch_size, self.setting), counts
            )
            if not math.isfinite(error):
                self.notes.append(f"the validation error of epoch {state.epoch} is {error}")
            if error < min((e for e in state.errors if not math.isnan(e)), default=math.inf):
                self.state = state = state._replace(best=None)  # not two of them at once
                # a copy, since steps overwrite their buffers
                best = self.program.owned(self.program.whole(state.parameters)._replace(shared_state=(), row_states=()))
                best_values = {"shared": best.shared, "tables": best.tables}
                state = state._replace(best=best_values, best_epoch=state.epoch)
            state = state._replace(errors=(*state.errors, error))
        self.state = state


@contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """List that is filled by the first interrupt from the keyboard, which waits for the end of a batch."""
    asked: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, before)  # a second one ends the program's patience

    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
