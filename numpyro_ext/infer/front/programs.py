"""The store of what has been compiled: runs of one structure share their programs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from ...compilation.recent import Recent
from ...structure.model.reading import ModelReading
from ..hyper.space import UnconstrainedSpace

__all__ = ["compiled"]

_Programs = TypeVar("_Programs")
_COMPILED = Recent(48)


def compiled(
    make: Callable[..., _Programs], reading: ModelReading, space: UnconstrainedSpace, *options: Hashable
) -> _Programs:
    """Compiled functions for a structure: those of an earlier run of the same structure, if there was one.

    :param make: the class of the functions, which takes what follows.
    :param ModelReading reading: of the model. Of it and the space only skeletons are kept.
    :param UnconstrainedSpace space: of the hyperparameters that are learned.
    :param options: static choices.
    """
    key = (make, reading.structure_key, space.key, *options)
    return _COMPILED.get(key, lambda: make(reading.skeleton(), space.skeleton(), *options))
