"""Engines that have run, in files, pickles and copies."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

from ..options import plain_number
from .archive import read_archive, write_archive

_NO_OPTIONS = ("model", "options", "unknown", "devices")
"""Arguments of constructors that are in no file: the model, names for the rest, and what is of one machine."""


class KeptRun(ABC):
    """An engine whose files, pickles and deep copies hold the same of its run.

    Compiled and traced programs stay behind, and the model, which has to be picklable for pickles of the engine, makes
    them again. A class keeps its run in the attribute ``_run``, which is ``None`` before the first one, and the
    arguments of its constructor in attributes of the same names.
    """

    @abstractmethod
    def _content(self) -> dict[str, object]:
        """Content of the finished run that is kept."""

    @abstractmethod
    def _with_content(self, content: Mapping[str, object]) -> Self:
        """This engine with the run that its model makes of :meth:`_content`."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a file from which :meth:`load` makes an engine with the same results.

        :param path: of the file.
        :raises TypeError: if an argument of the model is something other than arrays, numbers, strings, tables
            of pandas, linear operators, containers and objects of classes with a name in files
            (:func:`~numpyro_ext.linalg.saved_as`).
        """
        write_archive(path, self._file_content())

    def _file_content(self) -> dict[str, object]:
        """Content of a file from which :meth:`load` makes the engine again."""
        return {"engine": type(self).__name__, "options": self._options_given(), **self._content()}

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Callable[..., object]) -> Self:
        """An engine with the options and results of a saved run, without running again.

        :param path: of a file written by :meth:`save`.
        :param model: the model, which is not in the file.
        :return: the engine.
        :raises ValueError: if the file is damaged or of another engine, or the model is not the one of the run.
        """
        content = read_archive(path)
        if "engine" not in content:
            raise ValueError(f"{os.fspath(path)!r} is a checkpoint: give it to run(..., checkpoint=...).")
        if content["engine"] != cls.__name__:
            raise ValueError(f"{os.fspath(path)!r} holds a run of {content['engine']}; load it with that class.")
        make: Callable[..., Self] = cls
        return make(model, **content["options"])._with_content(content)

    def _options_given(self) -> dict[str, Any]:
        return {name: plain_number(getattr(self, name)) for name in self._option_names()}

    @classmethod
    def _option_names(cls) -> list[str]:
        """Arguments of the constructor that a file holds."""
        names: dict[str, None] = {}
        for part in cls.__mro__:
            if "__init__" in vars(part) and part is not object and issubclass(part, KeptRun):
                names |= dict.fromkeys(inspect.signature(part).parameters)
        return [name for name in names if name not in _NO_OPTIONS]

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
