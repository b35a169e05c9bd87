"""Hyperparameters that a search has driven to the edge of their support."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array

from ...hyper.space import UnconstrainedSpace

_EDGE = 1e-2
"""Share of its value at the start below which the slope of a constrained value in its coordinate shows an edge."""


def edges_of(space: UnconstrainedSpace, values: Array, wide_axes: np.ndarray) -> tuple[str, ...]:
    """Sites on a plateau of the objective whose constrained value hardly answers to its coordinate any more.

    :param UnconstrainedSpace space: of the hyperparameters.
    :param values: where the search ended, unconstrained, shape ``(d,)``.
    :param wide_axes: which coordinates are on a plateau, shape ``(d,)``.
    """
    here, there = (space.unpack_unconstrained(x) for x in (values, space.initial()))
    out = []
    for name, part in space.slices.items():
        wide = wide_axes[part]
        if not wide.any():
            continue
        answer, before = (_answer(space.sites[name].transform, point[name]) for point in (here, there))
        if np.any(wide & (answer < _EDGE * before)):
            out.append(name)
    return tuple(out)


def _answer(transform: Any, value: Array) -> np.ndarray:
    """The length by which the constrained value moves per unit of each coordinate."""
    jacobian = np.asarray(jax.jacobian(transform)(value)).reshape(-1, value.size)
    return np.asarray(np.sqrt(np.sum(np.square(jacobian), axis=0)))
