"""Ends of searches that want a word: other maxima of the evidence, and hyperparameters at the edge of their support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from ...hyper.curvature import Curvature
from ...hyper.search import SearchState
from ...hyper.space import UnconstrainedSpace

_FAR = 4.0
"""Standard deviations of one maximum between two of them."""
_MOST_BELOW = 10.0
"""Nats between the highest maximum and one that is worth a word."""


def other_maxima(
    ends: Sequence[SearchState],
    best: SearchState,
    curvature: Curvature | None,
    hyper: Callable[[Array], dict[str, Array]],
) -> str | None:
    """Says which ends of searches are away from the best one and not much lower, highest first.

    :param ends: of the searches from all starts.
    :param SearchState best: the end that was kept.
    :param Curvature curvature: of the objective there; without one, coordinates of order one are a distance.
    :param hyper: constrained hyperparameters of coordinates.
    """
    height, far = float(best.best.objective), []
    known = [np.asarray(best.values)]
    for end in sorted(ends, key=lambda end: -float(end.best.objective)):
        values = np.asarray(end.values)
        is_low = not float(end.best.objective) > height - _MOST_BELOW
        if is_low or not bool(end.converged) or any(_are_near(values, other, curvature) for other in known):
            continue
        known.append(values)
        far.append(end)
    if not far:
        return None
    at_best = hyper(best.values)
    found = "; ".join(
        f"{_where(at_best, hyper(end.values))} ({height - float(end.best.objective):.2g} lower)" for end in far
    )
    return (
        f"Searches from other starts ended at other stationary points of the log evidence: {found}. Answers are those "
        "around the highest, and of others that points of the integration reach. Give a prior that decides between "
        "them, or weigh fits from init_values at each by their log_evidence."
    )


def _are_near(first: np.ndarray, second: np.ndarray, curvature: Curvature | None) -> bool:
    difference = first - second
    if curvature is None or not curvature.is_peak:
        return float(np.max(np.abs(difference), initial=0.0)) < 1.0
    deviations = np.sqrt(np.diagonal(curvature.covariance))
    return bool(np.all(np.abs(difference) < _FAR * deviations))


def _where(best: dict[str, Array], other: dict[str, Array]) -> str:
    """The hyperparameter that differs most between two points, with its values."""
    gaps = {name: np.abs(np.asarray(other[name]) - np.asarray(value)) for name, value in best.items()}
    name = max(gaps, key=lambda name: float(np.max(gaps[name] / (1e-12 + np.abs(np.asarray(best[name]))), initial=0.0)))
    index = np.unravel_index(np.argmax(gaps[name]), gaps[name].shape)
    element = f"[{', '.join(map(str, index))}]" if index else ""
    return (
        f"{name}{element} = {float(np.asarray(other[name])[index]):.3g} for {float(np.asarray(best[name])[index]):.3g}"
    )


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
