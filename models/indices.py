"""Indices of items, users and cells among the arguments of a model."""

from __future__ import annotations

import numpy as np
from jax.typing import ArrayLike

__all__ = ["checked_indices"]


def checked_indices(**indices: tuple[ArrayLike, int | None]) -> list[np.ndarray]:
    """Indices as concrete arrays of one length, which JAX would clip without a word were they out of range.

    Each name has its values and how many places there are; ``None`` for one more than the largest value.
    """
    out = []
    for name, (values, given) in indices.items():
        index = np.asarray(values)
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
            raise ValueError(f"{name} must be a vector of integers; got {index.dtype} of shape {index.shape}.")
        size = int(index.max(initial=-1)) + 1 if given is None else given
        if index.size and not 0 <= index.min() <= index.max() < size:
            raise ValueError(f"{name} must lie in 0, ..., {size - 1}; got values from {index.min()} to {index.max()}.")
        out.append(index)
    if len({index.shape for index in out}) > 1:
        shapes = " and ".join(str(index.shape) for index in out)
        raise ValueError(f"{' and '.join(indices)} must have the same length; got {shapes}.")
    return out
