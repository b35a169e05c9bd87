"""Bars between compiled chunks, and warnings at the caller's line."""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from tqdm.auto import tqdm

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep


class _Bar(tqdm):
    """Says that the compiler is at work where nothing has been done yet, and leaves its time out of the estimate."""

    def __init__(self, *, delay: float, **options: object) -> None:
        super().__init__(delay=delay, **options)
        self._is_first = True
        self._is_compiling = False
        self._timer = threading.Timer(delay, self._say)
        self._timer.daemon = True
        if not self.disable:
            jax.monitoring.register_event_duration_secs_listener(self._listen)
            self._timer.start()

    def _listen(self, event: str, duration_secs: float, **info: str | int) -> None:
        self._is_compiling |= event == "/jax/core/compile/jaxpr_trace_duration"

    def _say(self) -> None:
        if self._is_first and self._is_compiling:
            self.delay = 0.0  # shown from now on
            self.set_postfix_str("compiling")

    def update(self, n: float | None = 1) -> bool | None:
        if self._is_first and not self.disable:
            self._begin(n or 0)
        return super().update(n)

    def _begin(self, done: float) -> None:
        self._is_first = False
        self._timer.cancel()
        self.set_postfix_str("", refresh=False)
        self.initial = self.last_print_n = self.n + done
        self.start_t = self.last_print_t = self._time()

    def close(self) -> None:
        if not self.disable:
            self._timer.cancel()
            jax.monitoring.unregister_event_duration_listener(self._listen)
        super().close()


@contextmanager
def progress_bar(
    total: int | None, description: str, *, unit: str = "it", enabled: bool = True, delay: float = 1.0
) -> Iterator[tqdm]:
    """A bar of ``total`` units that shows itself only once ``delay`` seconds have passed.

    Before the first units are done it says "compiling" where a program is compiled, and it counts time from then on.

    :param int total: the number of units; ``None`` where it is not known, as of iterations that end when they have
        converged: these are counted, and nothing is said of how many there may be.
    :param str description: shown on the left.
    :param str unit: of what is counted, where its number is not known.
    :param bool enabled: false for no bar at all.
    :param float delay: runs shorter than this draw nothing.
    :return: a context manager giving the bar, to be advanced with ``update``.
    """
    unit = unit if total is not None else f" {unit}"
    bar = _Bar(total=total, desc=description, unit=unit, delay=delay, disable=not enabled, leave=True)
    try:
        yield bar
    finally:
        bar.close()


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the first line outside this package.

    :param str message: the text.
    :param category: the class of the warning.
    """
    level, frame = 1, inspect.currentframe()
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
