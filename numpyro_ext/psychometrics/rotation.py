"""Rotations of loadings to simple structure or to a target, and correlations between spaces of traits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

_MOST_STEPS = 2000
_TOLERANCE = 1e-8
_NUM_STARTS = 8


class Rotation(NamedTuple):
    """Rotated loadings."""

    loadings: np.ndarray
    """Shape ``(items, traits)``."""
    matrix: np.ndarray
    """Traits of people, in rows, times this are the rotated traits; shape ``(traits, traits)``."""
    correlation: np.ndarray
    """Correlations of the rotated traits."""
    converged: bool


class CanonicalCorrelations(NamedTuple):
    """Correlations of the best matching directions of two spaces, the largest first."""

    correlations: np.ndarray
    permuted: np.ndarray
    """The same with the rows of one side permuted, shape ``(permutations, directions)``: what chance gives."""


_Criterion = Callable[[np.ndarray], tuple[float, np.ndarray]]


def rotate(loadings: ArrayLike, method: object = "varimax", *, oblique: bool | None = None, seed: int = 0) -> Rotation:
    r"""Rotate loadings, which several traits without a pattern leave undetermined.

    ``"varimax"`` maximises the variance of squared loadings within traits (Kaiser, 1958). ``"oblimin"`` minimises
    :math:`\sum_{j \ne k} \sum_i \lambda_{ij}^2 \lambda_{ik}^2` and lets traits correlate (direct quartimin, Jennrich
    and Sampson, 1966). A target is fitted by least squares. By projected gradients (Bernaards and Jennrich, 2005) from
    several starts, of which the best end counts. Columns of the first two are turned and ordered, so that their sums
    are positive and their sums of squares fall. A predictor of rotated traits and loadings is that of the given ones.

    **Example:**

    >>> import numpy as np
    >>> from numpyro_ext.psychometrics import rotate
    >>> mixed = np.array([[1.0, 0.0], [0.9, 0.0], [0.0, 0.7]]) @ np.array([[0.8, -0.6], [0.6, 0.8]])
    >>> print(rotate(mixed, "varimax").loadings.round(3) + 0.0)
    [[1.  0. ]
     [0.9 0. ]
     [0.  0.7]]

    :param loadings: slopes, shape ``(items, traits)``.
    :param method: ``"varimax"``, ``"oblimin"``, or a target of the shape of the loadings, ``nan`` where it leaves them
        free.
    :param bool oblique: whether traits may correlate; by default not with ``"varimax"``, else yes.
    :param int seed: of the random starts.
    :return: the rotation.
    :raises ValueError: for an unknown method, and loadings or targets that do not fit.
    """
    a = np.asarray(loadings, float)
    if a.ndim != 2 or not np.isfinite(a).all() or a.shape[0] < a.shape[1]:
        raise ValueError(f"Loadings must be finite, items by traits, with no more traits than items; got {a.shape}.")
    is_target = not isinstance(method, str)
    if is_target:
        criterion = _to_target(np.asarray(method, float), a.shape)
    elif method == "varimax":
        criterion = _varimax
    elif method == "oblimin":
        criterion = _quartimin
    else:
        raise ValueError(f"method must be 'varimax', 'oblimin' or a target; got {method!r}.")
    oblique = method != "varimax" if oblique is None and not is_target else oblique is not False
    rng, size = np.random.default_rng(seed), a.shape[1]
    starts = [np.eye(size)] + [np.linalg.qr(rng.normal(size=(size, size)))[0] for _ in range(_NUM_STARTS - 1)]
    ends = [_projected_gradients(a, criterion, start, oblique) for start in starts]
    value, t, converged = min(ends, key=lambda end: end[0])
    if not is_target:
        rotated = a @ np.linalg.inv(t).T
        order = np.argsort(-np.sum(rotated**2, 0), kind="stable")
        t = (t * np.where(rotated.sum(0) < 0, -1.0, 1.0))[:, order]
    return Rotation(a @ np.linalg.inv(t).T, t, t.T @ t, converged)


def _varimax(loadings: np.ndarray) -> tuple[float, np.ndarray]:
    squares = loadings**2
    centred = squares - squares.mean(0)
    return -0.25 * float(np.sum(centred**2)), -loadings * centred


def _quartimin(loadings: np.ndarray) -> tuple[float, np.ndarray]:
    squares = loadings**2
    others = squares.sum(1, keepdims=True) - squares
    return 0.25 * float(np.sum(squares * others)), loadings * others


def _to_target(target: np.ndarray, shape: tuple[int, ...]) -> _Criterion:
    if target.shape != shape or np.isinf(target).any():
        raise ValueError(f"A target must be finite or nan, of the shape {shape} of the loadings; got {target.shape}.")
    known = ~np.isnan(target)
    goal = np.where(known, target, 0.0)

    def criterion(loadings: np.ndarray) -> tuple[float, np.ndarray]:
        gap = np.where(known, loadings - goal, 0.0)
        return float(np.sum(gap**2)), 2.0 * gap

    return criterion


def _projected_gradients(
    a: np.ndarray, criterion: _Criterion, t: np.ndarray, oblique: bool
) -> tuple[float, np.ndarray, bool]:
    """Smallest value of a criterion found, the matrix there, and whether the projected gradient vanishes."""

    def evaluate(t: np.ndarray) -> tuple[float, np.ndarray]:
        inverse = np.linalg.inv(t)
        loadings = a @ inverse.T
        value, slope = criterion(loadings)
        return value, -(loadings.T @ slope @ inverse).T

    def tangent(t: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        if oblique:
            return np.asarray(gradient - t * np.sum(t * gradient, 0))
        middle = t.T @ gradient
        return np.asarray(gradient - t @ (middle + middle.T) / 2.0)

    def onto(t: np.ndarray) -> np.ndarray:
        """The nearest matrix with columns of length one, or with orthogonal ones."""
        if oblique:
            return np.asarray(t / np.linalg.norm(t, axis=0))
        u, _, v = np.linalg.svd(t)
        return np.asarray(u @ v)

    value, gradient = evaluate(t)
    step, scale = 1.0, max(float(np.sum(a**4)), np.finfo(float).tiny)
    for _ in range(_MOST_STEPS):
        direction = tangent(t, gradient)
        length = float(np.sum(direction**2))
        if np.sqrt(length) < _TOLERANCE * scale:
            return value, t, True
        step *= 2.0
        for _ in range(40):
            trial = onto(t - step * direction)
            found, slope = evaluate(trial)
            if found < value - 0.5 * step * length:
                break
            step /= 2.0
        else:
            # No step improves: the value is at its digits.
            return value, t, bool(np.sqrt(length) < 1e-5 * scale)
        t, value, gradient = trial, found, slope
    return value, t, False


def canonical_correlations(
    first: ArrayLike, second: ArrayLike, *, num_permutations: int = 100, seed: int = 0
) -> CanonicalCorrelations:
    """Correlations of the best matching directions of two sets of columns, beside those of permuted rows.

    Of loadings with a scoring key, or of estimated traits with others: neither depends on the rotation of either side.

    **Example:**

    >>> import numpy as np
    >>> from numpyro_ext.psychometrics import canonical_correlations
    >>> x = np.random.default_rng(0).normal(size=(50, 2))
    >>> print(canonical_correlations(x, x @ [[0.6, -0.8], [0.8, 0.6]]).correlations)
    [1. 1.]

    :param first: shape ``(n, p)``.
    :param second: shape ``(n, q)``.
    :param int num_permutations: of the rows of the second, for the baseline.
    :param int seed: of these.
    :return: ``min(p, q)`` correlations, and those of the permutations.
    :raises ValueError: if rows differ in number, are fewer than columns, or a column is constant.
    """
    x, y = (np.asarray(value, float) for value in (first, second))
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise ValueError(f"Both must have as many rows and be matrices; got shapes {x.shape} and {y.shape}.")
    bases = [_basis(x), _basis(y)]
    rng = np.random.default_rng(seed)
    permuted = [_correlations(bases[0], bases[1][rng.permutation(len(x))]) for _ in range(num_permutations)]
    size = min(x.shape[1], y.shape[1])
    return CanonicalCorrelations(_correlations(*bases), np.array(permuted).reshape(num_permutations, size))


def _basis(columns: np.ndarray) -> np.ndarray:
    """Orthonormal columns with the span of the centred ones."""
    centred = columns - columns.mean(0)
    if len(columns) <= columns.shape[1] or np.linalg.matrix_rank(centred) < columns.shape[1]:
        raise ValueError(f"Columns of shape {columns.shape} are constant, depend on each other or are too many.")
    return np.asarray(np.linalg.qr(centred)[0])


def _correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.asarray(np.minimum(np.linalg.svd(first.T @ second, compute_uv=False), 1.0))
