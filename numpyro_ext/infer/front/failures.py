"""Where in a model something failed, in words."""

from __future__ import annotations

import numpy as np
from jax import Array

__all__ = ["at_values"]


def at_values(hyper: dict[str, Array]) -> str:
    """The words " at name = value, ..." for an error message; those of more than four numbers are left out."""
    values = [f"{name} = {np.asarray(value)}" for name, value in hyper.items() if np.size(value) <= 4]
    return f" at {', '.join(values)}" if values else ""
