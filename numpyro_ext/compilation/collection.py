"""Garbage collection, which finds nothing while programs are traced, and memory that was freed."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_collection() -> Iterator[None]:
    """Python's collector of cycles waits, unless it was off before.

    Tracing makes a million objects that live as long as the program, and the collector walks through all of them, and
    all modules, again and again: a tenth of a first fit.

    >>> with without_collection():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library is GNU's.

    It keeps what each thread has freed for that thread, and arrays of a few megabytes are made and freed on several:
    at 10^5 unknowns the process would hold half as much again as it uses. Takes some milliseconds for 100 megabytes.
    """
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # of other C libraries
        return None
