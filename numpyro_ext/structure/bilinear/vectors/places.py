"""The places along an axis of a site that each observation may depend on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from ...program.dependence import dependence
from ...program.patterns import DenseDependence, deduplicate, merge, same_width
from ...program.questions import Questions


class Predictor(NamedTuple):
    """Elements of a value of the program that are the predictors of one observed site."""

    name: str
    atom: int
    rows: np.ndarray
    """Flat indices of the elements, one per observation in use."""


def places_along(
    questions: Questions, number: int, shape: tuple[int, ...], axis: int, predictors: Sequence[Predictor]
) -> np.ndarray:
    """The places along an axis of a site that each observation may depend on.

    :param number: input of the program that is the site.
    :param shape: of the site.
    :return: shape ``(observations, k)``, padded with ``-1``.
    """
    ids = np.broadcast_to(np.arange(shape[axis]).reshape(-1, *(1,) * (len(shape) - axis - 1)), shape)
    found = dependence(questions, {number: ids[..., None].astype(np.int64)}, [p.atom for p in predictors])
    parts = []
    for predictor in predictors:
        pattern = found.get(predictor.atom)
        if pattern is None:
            parts.append(np.full((predictor.rows.size, 1), -1))
        elif isinstance(pattern, DenseDependence):
            parts.append(np.broadcast_to(pattern.ids, (predictor.rows.size, pattern.ids.size)))
        else:
            parts.append(pattern.reshape(-1, pattern.shape[-1])[predictor.rows])
    return union_of_places([np.concatenate(same_width(parts))])


def axis_of_vectors(
    questions: Questions,
    number: int,
    shape: tuple[int, ...],
    coupled: Collection[int],
    predictors: Sequence[Predictor],
) -> tuple[int, np.ndarray]:
    """The axis along which the vectors of a site are counted, and what observations see along it.

    That is the axis along which the prior is correlated, else the one of which observations see the least.

    :param coupled: axes along which the prior is correlated.
    """
    found = {axis: places_along(questions, number, shape, axis, predictors) for axis in coupled or range(len(shape))}
    axis = min(found, key=lambda axis: found[axis].shape[1] / shape[axis])
    return axis, found[axis]


def union_of_places(places: Sequence[np.ndarray]) -> np.ndarray:
    """All places of some arrays for the same observations, each once, in order behind the padding."""
    return np.sort(deduplicate(merge([np.sort(p, axis=-1) for p in places])), axis=-1)


def same_places(one: np.ndarray, other: np.ndarray) -> bool:
    """True if two arrays of :func:`union_of_places` say the same."""
    return one.shape == other.shape and bool(np.array_equal(one, other))
