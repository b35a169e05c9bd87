"""Weights of points that give the moments of a design, so that draws and marginals are of one posterior."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....linalg.exponential_tilting import exponentially_tilted, values_and_squares

_FEWEST_POINTS = 24
"""Effective number of points below which their weights stay: quantiles by so few move with each of them."""
_LEAST_EFFECTIVE = 0.8
"""Share of the effective number of points that new weights keep; otherwise moments are those of another shape."""
_DEPENDENT = 1e-6


def features_of(values: Sequence[np.ndarray]) -> np.ndarray:
    """Values of all elements, then their squares, shape ``(points, features)``.

    :param values: of several sites, each with the points on its first axis.
    """
    flat = np.concatenate([np.reshape(value, (len(value), -1)) for value in values], axis=1)
    return values_and_squares(flat)


def matched_weights(weights: np.ndarray, features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The weights nearest to given ones under which features have given means, where enough of them is left.

    >>> points = np.array([[-1.0], [0.0], [1.0], [2.0]])
    >>> found = matched_weights(np.full(4, 0.25), points, np.array([0.25]))
    >>> print((found @ points).round(6), found.round(3))
    [0.25] [0.33 0.27 0.22 0.18]

    :param weights: shape ``(points,)``, summing to one.
    :param features: shape ``(points, features)``.
    :param target: means, shape ``(features,)``.
    :return: weights; those given where few points have most of the mass, where no points have such means, or a fifth
        of their effective number would be lost.
    """
    if np.sum(weights**2) * _FEWEST_POINTS > 1.0 and len(weights) > _FEWEST_POINTS:
        return weights
    centre = weights @ features
    with np.errstate(over="ignore", invalid="ignore"):  # values that are beyond all numbers once squared
        spread = np.sqrt(weights @ np.square(features - centre))
    is_free = (spread > 1e-9 * (1.0 + np.abs(centre))) & np.isfinite(spread) & np.isfinite(target)
    if not is_free.any():
        return weights
    scaled = (features[:, is_free] - centre[is_free]) / spread[is_free]
    # Elements of simplices, and squares of such of correlations, depend on each other.
    values, vectors = np.linalg.eigh((scaled.T * weights) @ scaled)
    basis = vectors[:, values > _DEPENDENT * values[-1]] / np.sqrt(values[values > _DEPENDENT * values[-1]])
    rows = (scaled - (target - centre)[is_free] / spread[is_free]) @ basis
    found = exponentially_tilted(weights, rows)
    if found is None:
        return weights
    is_found = np.max(np.abs(found @ rows)) < 1e-4
    is_worth = np.sum(weights**2) >= _LEAST_EFFECTIVE * np.sum(found**2)
    return found if is_found and is_worth else weights
