"""Arguments of a model beside its batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ...compilation.content import ByContent
from ...linalg.frozen_pytree import frozen_pytree


@dataclass(frozen=True, eq=False)
class _Constants(ByContent):
    """Constants of compiled programs: those of equal ones are shared."""

    options: dict[str, Any]
    num_rows: int


@frozen_pytree
class Setting:
    """Arguments of a model beside its batches: arrays and carry are data of compiled programs, all else constants."""

    arrays: dict[str, Any]
    """Keyword arguments that are arrays."""
    carry: Any
    """State of one user before the first event; ``None`` without chunks."""
    constants: _Constants = field(metadata={"static": True})

    @classmethod
    def of(cls, kwargs: Mapping[str, Any], carry: object, num_rows: int) -> Setting:
        """Arguments of a run.

        :param kwargs: keyword arguments of the model.
        :param int num_rows: size of the plate.
        """
        arrays = {name: value for name, value in kwargs.items() if isinstance(value, jax.Array | np.ndarray)}
        options = {name: value for name, value in kwargs.items() if name not in arrays}
        return cls(arrays, carry, _Constants(options, num_rows))

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the model."""
        return {**self.arrays, **self.constants.options}

    @property
    def num_rows(self) -> int:
        """Size of the plate."""
        return self.constants.num_rows
