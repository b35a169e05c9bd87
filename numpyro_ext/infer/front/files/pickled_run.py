"""Pickles and copies of engines that have run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

__all__ = ["PickledRun"]


class PickledRun(ABC):
    """An engine whose pickles and deep copies hold of its run what files hold.

    Compiled and traced programs stay behind, and the model, which has to be picklable for the engine to be, makes them
    again. A class keeps its run in the attribute ``_run``, which is ``None`` before the first one.
    """

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """What is kept of the finished run."""

    @abstractmethod
    def _with_content(self, content: Mapping[str, Any]) -> Self:
        """This engine with the run that its model makes of :meth:`_content`."""

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        return state if state.pop("_run") is None else state | {"_content_of_run": self._content()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        content = state.pop("_content_of_run", None)
        vars(self).update(state, _run=None)
        if content is not None:
            self._with_content(content)

    def __copy__(self) -> Self:
        """Shallow copies share the run."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made
