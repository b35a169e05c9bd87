"""Weights of points that are tilted by an exponential until they have given means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_MOST_STEPS = 50
_TOL = 1e-8
_SMALLEST_CURVATURE = 1e-12
_ROUNDING = 1e-14


def values_and_squares(values: np.ndarray) -> np.ndarray:
    """Values and their squares side by side, shape ``(points, 2 k)``, whose means are first and second moments.

    :param values: shape ``(points, k)``.
    """
    with np.errstate(over="ignore"):
        return np.concatenate([values, np.square(values)], axis=1)


def exponentially_tilted(weights: np.ndarray, rows: np.ndarray, ridge: float = 0.0) -> np.ndarray | None:
    r"""The weights nearest to given ones under which rows have means of zero.

    They minimise :math:`\sum_k w_k \log(w_k / w_k^0)`, so that :math:`w_k \propto w_k^0 \exp(\lambda^T r_k)`, with
    :math:`\lambda` by Newton steps on the convex dual (entropy balancing, Hainmueller 2012).

    >>> points = np.array([[-1.0], [0.0], [1.0], [2.0]])
    >>> found = exponentially_tilted(np.full(4, 0.25), points - 0.25)
    >>> print((found @ points).round(6), found.round(3))
    [0.25] [0.33 0.27 0.22 0.18]

    :param weights: positive, shape ``(points,)``.
    :param rows: features less their means that are asked for, in units of their spread, shape ``(points, features)``.
    :param float ridge: of the dual; with one, means are met as nearly as the points allow.
    :return: weights that sum to one; ``None`` where Newton's method ends before the means are met.
    """

    def at(slope: np.ndarray) -> tuple[np.ndarray, float]:
        exponent = rows @ slope
        top = float(np.max(exponent))
        masses = weights * np.exp(exponent - top)
        return masses / masses.sum(), float(np.log(masses.sum()) + top + 0.5 * ridge * slope @ slope)

    slope = np.zeros(rows.shape[1])
    found, height = at(slope)
    for _ in range(_MOST_STEPS):
        mean = found @ rows
        gradient = mean + ridge * slope
        if np.max(np.abs(gradient), initial=0.0) < _TOL:
            break
        centred = rows - mean
        curvature = (centred.T * found) @ centred + max(ridge, _SMALLEST_CURVATURE) * np.eye(len(slope))
        try:
            step = np.linalg.solve(curvature, gradient)
        except np.linalg.LinAlgError:  # a mean that is so far from all rows that the others are lost in rounding
            return None
        lower = _lower(at, slope, step, gradient, height)
        if lower is None:
            return None
        slope, found, height = lower
    return found


def _lower(
    at: Callable[[np.ndarray], tuple[np.ndarray, float]],
    slope: np.ndarray,
    step: np.ndarray,
    gradient: np.ndarray,
    height: float,
) -> tuple[np.ndarray, np.ndarray, float] | None:
    """The first of halved steps that lowers the dual as far as its slope promises."""
    # The last steps gain less than the rounding of the dual.
    length, rounding = 1.0, _ROUNDING * (1.0 + abs(height))
    while length > 1e-4:
        found, lower = at(slope - length * step)
        if lower <= height - 1e-4 * length * float(gradient @ step) + rounding:
            return slope - length * step, found, lower
        length *= 0.5
    return None
