"""Curvature of the objective at the end of a search, from differences of its gradient."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .digits import difference_step
from .search import SearchState

_LARGEST_TRUNCATION = 10.0
_PLATEAU = 1e-2
_LEAST_VARIANCE = 1e-6
"""In the metric of the diagonal, where an axis that curves has a variance of one at least, or a part of it where it is
confounded with others; below it is rounding of an axis that is flat."""
_MOST_UNSEEN = 0.01
"""Share of an axis' variance that directions without curvature may add to it."""


def hessian(state: SearchState, *, tol: float) -> np.ndarray:
    """Second derivatives of the objective at ``state.values`` by central differences of its gradient.

    :param SearchState state: of a finished search.
    :param float tol: as given to :func:`search`.
    :return: symmetric array of shape ``(d, d)``; meaningless before ``num_probes`` has reached ``2 d``.
    """
    probes = np.asarray(state.probes)
    rows = (probes[:, 0] - probes[:, 1]) / (2.0 * difference_step(probes.dtype, tol))
    return 0.5 * (rows + rows.T)


class Curvature(NamedTuple):
    """Curvature of the objective at the end of a search, as far as differences of its gradient can tell.

    Directions are judged in the metric of the diagonal, in which errors of the differences are alike in all of them:
    each curves downwards, upwards, or is flat within these errors.
    """

    covariance: np.ndarray
    """Inverse of the negative Hessian over the directions that curve downwards, zero in the others; ``(d, d)``."""
    rising: np.ndarray
    """Unit vectors along which the objective curves upwards, shape ``(k, d)``."""
    flat: np.ndarray
    """Unit vectors along which it does neither, shape ``(l, d)``."""
    wide_axes: np.ndarray
    """Axes along which the objective falls by less than a half over ten units: a plateau, shape ``(d,)``, boolean."""
    has_error: np.ndarray
    """Axes that have a standard error, as no flat direction has a part in them; none at a saddle. Shape ``(d,)``."""

    @property
    def is_peak(self) -> bool:
        """True if the objective curves downwards in every direction, so that standard errors exist."""
        return not len(self.rising) and not len(self.flat)


def curvature(second_derivatives: np.ndarray, *, tol: float) -> Curvature:
    """Curvature at a stationary point from second derivatives by central differences of a gradient.

    :param second_derivatives: the Hessian of the objective, shape ``(d, d)``.
    :param float tol: as given to :func:`search`.
    :return: directions up, down and flat, and the covariance.
    """
    matrix = np.asarray(second_derivatives)
    step = difference_step(matrix.dtype, tol)
    # The step balances both errors: of the gradient, over the step, and of the difference, relative.
    least, truncation = step**2, _LARGEST_TRUNCATION * step**2
    diagonal = np.abs(np.diagonal(matrix))
    units = 1.0 / np.sqrt(np.maximum(diagonal, least))
    eigenvalues, vectors = np.linalg.eigh(units[:, None] * matrix * units)
    directions = units * vectors.T
    squared_length = np.sum(np.square(directions), axis=1)
    is_known = (np.abs(eigenvalues) > truncation) & (np.abs(eigenvalues) > least * squared_length)
    down, up = is_known & (eigenvalues < 0.0), is_known & (eigenvalues > 0.0)
    covariance = (directions[down].T / -eigenvalues[down]) @ directions[down]
    # Rounding on a flat axis stands in proportion to other axes, and would explain all of their variance.
    has_variance = np.diagonal(covariance) > _LEAST_VARIANCE * np.square(units)
    covariance = np.where(has_variance[:, None] & has_variance, covariance, 0.0)
    # The variance along a flat direction is one over its curvature, of which only a bound is known.
    unseen = np.sum(np.square(vectors[:, ~is_known]), axis=1) / truncation * np.square(units)
    has_error = has_variance & (unseen <= _MOST_UNSEEN * np.diagonal(covariance)) & (not up.any())
    directions /= np.sqrt(squared_length)[:, None]
    return Curvature(covariance, directions[up], directions[~is_known], diagonal <= _PLATEAU, has_error)


def hessian_error(matrix: np.ndarray, direction: np.ndarray, product: np.ndarray, *, tol: float) -> float:
    """The error of second derivatives along one direction, in units of what :func:`curvature` reckons with.

    :param matrix: the Hessian in question; ``tol`` as given to :func:`search`.
    :param direction: unit vector; ``product`` a central difference of gradients along it.
    :return: below one, if the error says nothing about directions that the judgement calls up or down.
    """
    least = difference_step(matrix.dtype, tol) ** 2
    units = 1.0 / np.sqrt(np.maximum(np.abs(np.diagonal(matrix)), least))  # as in :func:`curvature`
    allowed = _LARGEST_TRUNCATION * least * np.linalg.norm(direction / units) + least * np.linalg.norm(units)
    return float(np.linalg.norm(units * (matrix @ direction - product)) / allowed)
