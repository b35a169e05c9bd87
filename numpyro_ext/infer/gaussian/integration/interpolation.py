"""Fits of the field between the points of a lattice, without fitting it."""

from __future__ import annotations

from typing import Any, NamedTuple

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
_ROUNDS = 2
"""Number of times that fits are compared. A point far beyond the ends of a lattice, of which sixty-four have one now
and then, is known from the second time on."""

_Moments = dict[str, tuple[np.ndarray, np.ndarray]]


class _Known(NamedTuple):
    """Points at which the field is fitted."""

    points: np.ndarray
    """Shape ``(n, k)``."""
    states: tuple[Any, ...]
    """States there, each stacked along some of the points."""
    density: np.ndarray
    """Objective and log evidence, shape ``(2, n)``."""
    moments: _Moments
    """Means and variances of each site, stacked along the points."""

    def added(self, points: np.ndarray, fits: PointFit) -> _Known:
        """The same with further points."""
        density, moments = _compared(fits)
        both = jax.tree.map(lambda *parts: np.concatenate(parts), self.moments, moments)
        points, density = np.concatenate([self.points, points]), np.concatenate([self.density, density], axis=1)
        return _Known(points, (*self.states, fits.state), density, both)

    def agree(self, fits: PointFit, parts: np.ndarray) -> bool:
        """True if fits have the density and the moments that are predicted for them.

        :param parts: shares of the known values, shape ``(m, n)``.
        """
        density, moments = _compared(fits)
        errors = [self.density @ parts.T - density]
        for name, (mean, variance) in moments.items():
            known_mean, known_variance = (parts @ known for known in self.moments[name])
            safe = np.where(variance > 0.0, variance, 1.0)
            errors += [(known_mean - mean) / np.sqrt(safe), (known_variance - variance) / safe]
        return all(np.all(np.abs(error) <= _LARGEST_ERROR) for error in errors)


def _compared(fits: PointFit) -> tuple[np.ndarray, _Moments]:
    """Density and moments, by which fits are compared."""
    moments = {name: (found.mean, found.variance) for name, found in fits.marginals.items()}
    return np.stack([fits.objective, fits.log_evidence]), moments


def interpolated(
    around: Surroundings, found: Exploration, points: np.ndarray, states: object, others: np.ndarray | None = None
) -> PointFit | None:
    """The density and the state at points among those of a lattice, by a Gaussian process, without marginals.

    The field is fitted at five or nine of the points, the outermost among them, and compared. Where density or
    marginals differ by more than draws show, these fits are known too, and as many others, farther in, are compared;
    ``None`` where they differ as well. Fits start from the process's own states, where one step shows whether they are
    fixed points. One of the outermost starts elsewhere: of an iteration so slow that a step shows nothing it ends
    elsewhere, too.

    :param Surroundings around: the mode.
    :param Exploration found: the lattice around it.
    :param points: of shape ``(n, k)``.
    :param states: of the nearest points of the lattice, stacked.
    :param others: points that density and state are wanted at, no farther out than those that are compared; the same if
        not given.
    """
    known = _Known(found.points, (found.fits.state,), *_compared(found.fits))
    length = length_of(found.points, known.density[0], found.weights)
    number = min(1 + 4 * points.shape[1], _MOST_CHECKED)
    left = np.arange(len(points))
    for _ in range(_ROUNDS):
        state = predicted(known.states, known.points, points, length)
        extremes = left[np.concatenate([np.argmin(points[left], axis=0), np.argmax(points[left], axis=0)])]
        checked = np.array(list(dict.fromkeys([*extremes.tolist(), *left.tolist()]))[:number])

        def begun(leaf: Any, nearest: Any, checked: np.ndarray = checked) -> np.ndarray:
            out = np.array(leaf[checked])
            out[0] = nearest[checked[0]]
            return out

        fits = around.fits(points[checked], jax.tree.map(begun, state, states), _TOL, task="Draws")
        if known.agree(fits, shares(known.points, points[checked], length)):
            break
        is_good = np.flatnonzero(fits.converged & np.isfinite(fits.objective))
        known = known.added(points[checked[is_good]], jax.tree.map(lambda leaf, k=is_good: leaf[k], fits))
        left = np.setdiff1d(left, checked[is_good])
        if len(left) < number:
            return None
    else:
        return None
    if others is not None and others is not points:
        points, state = others, predicted(known.states, known.points, others, length)
    objective, log_evidence = known.density @ shares(known.points, points, length).T
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
