"""Iterations in compiled chunks: between them a bar moves and a person may interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from .progress import progress_bar


class Interruption:
    """Holds back Ctrl-C while a chunk is computed, whose result it would throw away.

    A context in which the first Ctrl-C makes the object true, to be looked at between chunks, and the second one raises
    :class:`KeyboardInterrupt` at once. Outside the main thread, and where a program handles Ctrl-C in its own way,
    nothing is held back.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._is_installed = False

    def __bool__(self) -> bool:
        return self.is_asked

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._ask)
            self._is_installed = True
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            signal.default_int_handler(number, frame)
        self.is_asked = True


class Chunks(NamedTuple):
    """End of the iterations."""

    carry: Any
    """Carry of the last chunk."""
    info: Any
    """Report of the last chunk."""
    objective: float
    """After it; iterations stop where it is not finite."""
    trace: np.ndarray
    """The objective after each step."""
    num_steps: int
    """Taken in all chunks, and before them."""
    messages: list[str]
    """Says that the run was interrupted, or nothing."""


def run_in_chunks(
    advance: Callable[[Any, int, int], tuple[Any, Any, Any]],
    carry: Any,
    *,
    num_steps: int,
    chunk: int,
    before: int,
    name: str,
    unit: str,
    show_bar: bool,
) -> Chunks:
    """Advance until convergence, a value that is not finite, ``num_steps`` steps, or an interruption.

    :param advance: maps a carry, the largest number of steps and the number of all steps so far to a carry, an info
        (with ``num_steps``, ``converged`` and ``objective_trace``) and the objective.
    :param carry: to start from.
    :param int num_steps: steps at most.
    :param int chunk: steps of one call at most.
    :param int before: steps that an earlier run has taken.
    :param str name: beside the bar.
    :param str unit: of the steps, in the plural.
    :param bool show_bar: whether there is a bar.
    :raises KeyboardInterrupt: if interrupted twice before the first chunk has ended.
    """
    info: Any = None
    objective: Any = np.nan
    traces: list[np.ndarray] = []
    messages: list[str] = []
    done = 0
    with progress_bar(None, name, unit=unit, enabled=show_bar) as bar, Interruption() as interruption:
        try:
            while done < num_steps and (info is None or not interruption):
                length = min(chunk, num_steps - done)
                carry, info, objective = jax.block_until_ready(advance(carry, length, before + done))
                taken = int(info.num_steps)
                traces.append(np.asarray(info.objective_trace)[:taken])
                done += taken
                bar.update(taken)
                if bool(info.converged) or taken < length or not np.isfinite(objective):
                    break
        except KeyboardInterrupt:
            if info is None:
                raise
            interruption.is_asked = True
        if interruption:
            messages.append(f"Interrupted after {before + done} {unit}.")
    return Chunks(carry, info, float(objective), np.concatenate(traces), before + done, messages)
