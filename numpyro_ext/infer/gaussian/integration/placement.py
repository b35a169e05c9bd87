"""Points of each design over the hyperparameters, and their masses."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.special import logsumexp

from ...hyper.density.adaptive import Followed, effective_share, follow
from ...hyper.density.design import PROBE, Design, central_composite, explore_lattice, normal_points, stretch
from ...hyper.density.known_points import KnownPoints
from ...hyper.density.skewed_normal import NUM_NORMAL_POINTS, SkewedNormal, skewed_normal
from ..fitting.point_fit import PointFit
from .judgement import LARGEST_RISE, highest_above_mode
from .surroundings import Surroundings

FEW_DIGITS = 1e-2
"""Tolerance of fits for draws, and of looks."""
_NOTHING = 40.0
"""Fall of the log density from which on looks need no digits: what lies there has no mass."""
_LARGEST_FALL = 5.0
"""Fall of the log density on both sides of an axis, to where that of a normal density has fallen by one."""


class Higher(NamedTuple):
    """A point with a larger density than the mode."""

    place: np.ndarray
    """Unconstrained hyperparameters there, shape ``(d,)``."""
    rise: float
    """Log density there less that at the mode."""


class FieldFits:
    """Fits of the field at all points that an exploration visits, the first of which is the mode.

    :param Surroundings around: coordinates around the mode.
    """

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self._known = KnownPoints()
        self._visited, self._heights, self._kept = list[np.ndarray](), list[np.ndarray](), list[PointFit]()
        self._looks = dict[bytes, PointFit]()

    def heights_at(self, points: np.ndarray) -> np.ndarray:
        """Log densities at points that may have masses, shapes ``(n, k)`` and ``(n,)``; ``-inf`` where there is none.
        Their fits are kept, and tell those that follow where to start."""
        self._kept.append(self._noted(points, self.around.fits(points, known=self._known)))
        return self._heights[-1]

    def brief_heights_at(self, points: np.ndarray) -> np.ndarray:
        """The same of :meth:`look`."""
        return _heights(self.look(points))

    def look(self, points: np.ndarray, *, from_mode: bool = False) -> PointFit:
        """Fits with few digits and without marginals, once for the same points; where there is no mass their heights
        are rough.

        :param bool from_mode: whether they start from the mode, not from what other fits predict.
        """
        key = points.tobytes()
        if key not in self._looks:
            states = None if from_mode else self._known.states_at(points)
            floor = float(self._heights[0][0]) - _NOTHING if self._heights else -math.inf
            found = self.around.fits(points, states, FEW_DIGITS, with_marginals=False, floor=floor)
            self._looks[key] = self._noted(points, found)
        return self._looks[key]

    def slopes_at(self, points: np.ndarray) -> np.ndarray:
        """Gradients of the log density, shape ``(n, k)``."""
        return self.around.slopes(self.around.fits(points, tol=FEW_DIGITS, with_marginals=False, with_gradient=True))

    def take(self) -> PointFit:
        """All fits of :meth:`heights_at`, in their order; they are not kept any more."""
        found: PointFit = jax.tree.map(lambda *leaves: np.concatenate(leaves), *self._kept)
        self._kept.clear()
        return found

    def forget(self) -> None:
        """Let states and looks go, which are large."""
        self._known.clear()
        self._looks.clear()

    def higher(self) -> Higher | None:
        """The highest of all points, if it is so far above the mode that there is another one."""
        points, heights = np.concatenate(self._visited), np.concatenate(self._heights)
        highest = highest_above_mode(heights)
        if highest is None:
            return None
        return Higher(self.around.place(points[[highest]])[0], float(heights[highest] - heights[0]))

    def _noted(self, points: np.ndarray, found: PointFit) -> PointFit:
        found = without_false_peaks(found, self._heights[0][0] if self._heights else found.objective[0])
        self._visited.append(points)
        self._heights.append(_heights(found))
        return found


def _heights(fits: PointFit) -> np.ndarray:
    return np.where(np.isfinite(fits.objective), fits.objective, -np.inf)


def without_false_peaks(fits: PointFit, mode: Any) -> PointFit:
    """Fits without the density of those that did not converge and stand above the mode.

    Where its iteration does not settle, the evidence of expectation propagation may be any number: one such point would
    outweigh all others.
    """
    is_false = ~fits.converged & (fits.objective > mode + LARGEST_RISE)
    kept: Any = np.where(is_false, np.nan, fits.objective)
    return fits._replace(objective=kept)


class Placed(NamedTuple):
    """Points of a design, where the field has been fitted."""

    design: Design
    chosen: np.ndarray
    """Indices of its points among all that may have masses, shape ``(n,)``."""
    cut: float | None = None
    """Fall of the log density to where a lattice was cut, if it was."""
    inner: np.ndarray | SkewedNormal | None = None
    """Density for which a design was made that does not follow the true one: falls of the log density on both sides of
    each axis, shape ``(2, k)``, or a skewed normal one."""
    followed: Followed | None = None
    """The density that was emulated through adaptive points."""

    @property
    def is_bent(self) -> bool:
        """True if the density falls so fast on both sides of an axis that it goes on elsewhere."""
        return isinstance(self.inner, np.ndarray) and bool(np.any(np.min(self.inner, axis=0) > _LARGEST_FALL))

    @property
    def nearly_normal(self) -> SkewedNormal | None:
        """The density of which the points are draws of equal mass."""
        return self.inner if isinstance(self.inner, SkewedNormal) else None


def place_mode(at: FieldFits) -> Placed:
    """The mode alone, where there is nothing to integrate over."""
    at.heights_at(np.zeros((1, 0)))
    return Placed(Design(np.zeros((1, 0)), np.zeros(1)), np.zeros(1, int))


def place_lattice(at: FieldFits, step: float, drop: float, most_points: int) -> Placed:
    """A lattice that goes on until the log density has fallen by ``drop``."""
    design, chosen, reach = explore_lattice(at.heights_at, at.around.size, step, drop, most_points)
    return Placed(design, chosen, cut=reach if reach < drop else None)


def place_adaptively(at: FieldFits, *, is_dear: bool, has_heavy_tails: bool) -> Placed:
    """Points that follow the density; options as in :func:`~numpyro_ext.infer.hyper.density.adaptive.follow`."""
    followed = follow(
        at.heights_at,
        at.around.size,
        at.brief_heights_at,
        is_dear=is_dear,
        values_at=at.around.constrained,
        has_heavy_tails=has_heavy_tails,
    )
    with np.errstate(divide="ignore"):  # of points without mass
        return Placed(Design(followed.points, np.log(followed.weights)), followed.chosen, followed=followed)


def place_composite(at: FieldFits) -> Placed:
    """A central composite design, stretched along each axis as the density is."""
    size = at.around.size
    steps = PROBE * np.eye(size)
    probes = at.heights_at(np.concatenate([np.zeros((1, size)), steps, -steps]))
    falls = (probes[0] - probes[1:]).reshape(2, size)
    design = stretch(central_composite(size), falls)
    inside = np.flatnonzero(np.isfinite(at.heights_at(design.points)))
    return Placed(Design(design.points[inside], design.log_volumes[inside]), len(probes) + inside, inner=falls)


def place_normal(at: FieldFits) -> Placed:
    """Points of a normal density with skewness."""
    size = at.around.size
    density = skewed_normal(at.slopes_at, size)
    design = density.design(normal_points(size, NUM_NORMAL_POINTS).points)
    heights = at.heights_at(np.concatenate([np.zeros((1, size)), design.points]))
    inside = np.flatnonzero(np.isfinite(heights[1:]))
    return Placed(Design(design.points[inside], design.log_volumes[inside]), 1 + inside, inner=density)


class Masses(NamedTuple):
    """Posterior masses of the points of a design."""

    weights: np.ndarray
    """Masses, shape ``(n,)``, summing to one."""
    log_volumes: np.ndarray
    """Log volume that each point stands for, up to a constant, shape ``(n,)``."""
    log_evidence: float
    error: float | None = None
    """Standard error of the log evidence, where it is estimated."""


def masses(placed: Placed, heights: np.ndarray, mode: float, log_volume: float) -> Masses:
    """Masses of points by the density there.

    :param Placed placed: the points.
    :param heights: log density at them, shape ``(n,)``.
    :param float mode: that at the mode.
    :param float log_volume: of a unit cube of their coordinates in those of the hyperparameters.
    """
    log_volumes, error = placed.design.log_volumes, None
    log_weights = heights + log_volumes
    if placed.followed is not None:
        log_evidence = mode + placed.followed.log_integral + log_volume
        error, weights = placed.followed.error, placed.followed.weights
        with np.errstate(divide="ignore"):
            log_volumes = np.log(weights) - heights
    elif placed.nearly_normal is not None:
        number = len(heights)
        log_evidence = float(logsumexp(log_weights)) - math.log(number) + log_volume
        error = math.sqrt((1.0 / effective_share(log_weights) - 1.0) / number)
        weights = np.full(number, 1.0 / number)
    else:
        log_evidence = float(logsumexp(log_weights + log_volume))
        weights = np.exp(log_weights + log_volume - log_evidence)
    # Rounding must not be visible where probabilities are asked to sum to one.
    return Masses(weights / weights.sum(), log_volumes, log_evidence, error)
