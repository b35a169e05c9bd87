"""The run that an engine answers for: none before the first, and none after one that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["LastRun"]

_MOST_LETTERS = 200


class LastRun:
    """An engine whose answers are those of its last run: where that failed there are none, and they say so.

    Answers of the run before would be those of other data or other options, without a sign of it.
    """

    _run: Any = None
    _failure: str | None = None

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Where a run is made and kept."""
        self._run, self._failure = None, None
        try:
            yield
        except BaseException as error:
            said = str(error)
            said = said if len(said) <= _MOST_LETTERS else f"{said[:_MOST_LETTERS]}..."
            self._failure = f"{type(error).__name__}: {said}" if said else type(error).__name__
            raise

    def _not_run(self) -> RuntimeError:
        name = type(self).__name__
        if self._failure is None:
            return RuntimeError(f"run(...) should be called first to obtain results from {name}.")
        return RuntimeError(f"The last run(...) of {name} failed and has no results. It said: {self._failure}")
