"""Garbage collection, which finds nothing while programs are traced."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
