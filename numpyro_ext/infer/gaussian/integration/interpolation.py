"""Fits of the field between the points of a lattice, without fitting it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ....compilation.transfer import to_device
from ...hyper.density.known_points import length_of, predicted, shares
from ..fitting.point_fit import PointFit
from .exploration import Exploration
from .surroundings import Surroundings

_MOST_CHECKED, _FEW_POINTS = 9, 64
_LARGEST_ERROR = 0.02
"""Largest error of log densities, of means in standard deviations and of variances, relative: below what a thousand
draws tell."""
_TOL = 0.25 * _LARGEST_ERROR
"""Tolerance of the fits that are compared."""


def interpolated(
    around: Surroundings, found: Exploration, points: np.ndarray, states: object, others: np.ndarray | None = None
) -> PointFit | None:
    """The density and the state at points among those of a lattice, by a Gaussian process, without marginals.

    The field is fitted at five or nine of the points, the outermost among them, and compared: ``None`` where density or
    marginals differ by more than draws show. These fits start from the process's own states, where one step shows
    whether they are fixed points. One of the outermost starts elsewhere: of an iteration so slow that a step shows
    nothing it ends elsewhere, too.

    :param Surroundings around: the mode.
    :param Exploration found: the lattice around it.
    :param points: of shape ``(n, k)``.
    :param states: of the nearest points of the lattice, stacked.
    :param others: points that density and state are wanted at, no farther out than those that are compared; the same if
        not given.
    """
    known = found.fits
    length = length_of(found.points, np.asarray(known.objective), found.weights)
    state = predicted([known.state], found.points, points, length)
    extremes = np.concatenate([np.argmin(points, axis=0), np.argmax(points, axis=0)])
    number = min(1 + 4 * points.shape[1], _MOST_CHECKED)
    checked = np.array(list(dict.fromkeys([*extremes.tolist(), *range(len(points))]))[:number])

    def begun(leaf: Any, nearest: Any) -> np.ndarray:
        out = np.array(leaf[checked])
        out[0] = nearest[checked[0]]
        return out

    fits = around.fits(points[checked], jax.tree.map(begun, state, states), _TOL, task="Draws")
    parts = shares(found.points, points, length)
    objective, log_evidence = parts @ known.objective, parts @ known.log_evidence
    errors = [objective[checked] - fits.objective, log_evidence[checked] - fits.log_evidence]
    for name, moments in fits.marginals.items():
        mean, variance = (parts[checked] @ moment for moment in known.marginals[name][:2])
        safe = np.where(moments.variance > 0.0, moments.variance, 1.0)
        errors += [(mean - moments.mean) / np.sqrt(safe), (variance - moments.variance) / safe]
    if not all(np.all(np.abs(error) <= _LARGEST_ERROR) for error in errors):
        return None
    if others is not None and others is not points:
        points, state = others, predicted([known.state], found.points, others, length)
        parts = shares(found.points, points, length)
        objective, log_evidence = parts @ known.objective, parts @ known.log_evidence
    values = around.place(points).astype(around.fit.last_state.values.dtype)
    hyper: dict[str, np.ndarray]
    if len(points) <= _FEW_POINTS:
        # One after the other: of these shapes there are compiled programs.
        hypers = [around.space.unpack(point, around.space.fixed) for point in values]
        hyper = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *hypers)
    else:
        hyper = jax.tree.map(np.asarray, around.programs.constrained(to_device(values), around.space.fixed))
    gradient, converged = np.full_like(values, np.nan), np.ones(len(points), bool)
    return PointFit(objective, gradient, log_evidence, state, converged, hyper, None)  # type: ignore[arg-type]
