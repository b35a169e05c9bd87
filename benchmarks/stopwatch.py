"""Seconds of a stretch of code, those of compilation apart as JAX itself reports them, and of calls of a function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

_EVENTS = ("/jax/core/compile/backend_compile_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")
_running: list[Stopwatch] = []


class Stopwatch:
    """Seconds between entering and leaving :func:`stopwatch`."""

    total: float = 0.0
    compiling: float = 0.0

    @property
    def without_compilation(self) -> float:
        """Seconds that a second run of the same shapes would take."""
        return self.total - self.compiling


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event in _EVENTS:
        for watch in _running:
            watch.compiling += duration_secs


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Measure the time of a block, and the part of it spent in compilation."""
    watch = Stopwatch()
    _running.append(watch)
    start = time.perf_counter()
    try:
        yield watch
    finally:
        watch.total = time.perf_counter() - start
        _running.remove(watch)


def shortest(function: Callable[..., Any], *args: Any, rounds: int = 3) -> float:
    """CPU-seconds of the fastest of a few runs, compiled before: others may be at work on the machine."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(rounds):
        start = time.process_time()
        jax.block_until_ready(function(*args))
        times.append(time.process_time() - start)
    return min(times)
