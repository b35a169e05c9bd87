"""Arguments of a model beside its batches, which compiled programs are shared by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

__all__ = ["Setting"]


class Setting:
    """Arguments of a model beside its batches; equal ones share compiled programs.

    :param kwargs: keyword arguments: arrays are data of the program, all others constants in it.
    :param carry: state of one user before the first event; ``None`` without chunks.
    :param int num_rows: size of the plate.
    """

    def __init__(self, kwargs: Mapping[str, Any], carry: object, num_rows: int) -> None:
        self.kwargs, self.carry, self.num_rows = dict(kwargs), carry, num_rows
        self.arrays = {name: value for name, value in kwargs.items() if isinstance(value, jax.Array | np.ndarray)}
        self.options = {name: value for name, value in kwargs.items() if name not in self.arrays}
        self._key: Any = (num_rows, *((name, type(value), value) for name, value in sorted(self.options.items())))
        try:
            hash(self._key)
        except TypeError:
            self._key = id(self)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and self._key == other._key
