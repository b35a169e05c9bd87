"""Seconds of the processor, which other processes on the machine change least, and memory of this process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import jax


def cpu_seconds(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
    """Result of a call, waited for, and its CPU-seconds."""
    start = time.process_time()
    found = jax.block_until_ready(function(*args, **kwargs))
    return found, time.process_time() - start


def first_and_next(run: Callable[[int], Any]) -> tuple[Any, float, float]:
    """Result of the second of two calls, given 0 and 1, and CPU-seconds of both: only the first compiles."""
    _, first = cpu_seconds(run, 0)
    found, later = cpu_seconds(run, 1)
    return found, first, later


def in_turns(rounds: int, *functions: Callable[[], Any]) -> list[float]:
    """Least CPU-seconds of functions that take turns, each of them called once before."""
    for function in functions:
        jax.block_until_ready(function())
    return [min(times) for times in zip(*([cpu_seconds(f)[1] for f in functions] for _ in range(rounds)), strict=True)]


def shortest(function: Callable[..., Any], *args: Any, rounds: int = 3, **kwargs: Any) -> float:
    """Least CPU-seconds of a few calls, compiled before."""
    return in_turns(rounds, lambda: function(*args, **kwargs))[0]


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
