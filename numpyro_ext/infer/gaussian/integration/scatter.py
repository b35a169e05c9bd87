"""Hyperparameters between the points of a design, for draws: nothing in a histogram of draws shows a lattice."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from scipy.special import ndtri

from ..fitting_programs import PointFit
from .exploration import Exploration, Surroundings, without_false_peaks
from .interpolation import FEW_DIGITS, interpolated

__all__ = ["Scatter", "scatter"]

_NUM_POINTS = 64
_WIDENING = 1.1
"""Of the density that proposes, over that of the design: its tails must not be the lighter ones."""
_LEAST_EFFECTIVE = 0.2


class Scatter(NamedTuple):
    """Points with weights, and the field there."""

    weights: np.ndarray
    """By which points are drawn, summing to one."""
    log_volumes: np.ndarray
    """Of the space that each stands for, up to a constant."""
    fits: PointFit

    @property
    def log_weights(self) -> np.ndarray:
        """What turns draws by ``weights`` into draws from the prior of the hyperparameters, up to a constant."""
        with np.errstate(divide="ignore"):  # of points that are never drawn
            log_prior = np.asarray(self.fits.objective - self.fits.log_evidence)
            found: np.ndarray = log_prior + self.log_volumes - np.log(self.weights)
            return found

    @classmethod
    def of(cls, found: Exploration) -> Scatter:
        """The points of the design themselves."""
        return cls(found.weights, found.log_volumes, found.fits)


def scatter(around: Surroundings, found: Exploration, generator: np.random.Generator, design: str) -> Scatter:
    """Evenly spread points of a Gaussian with a width of its own on each side of each axis, weighted by the density.

    The widths are those of the design. The fits there are those of :func:`.interpolation.interpolated`, where the
    design is a lattice and they are as good; others start from the nearest of its points and end early, as draws need
    fewer digits. Where the weights say that the density is another one, the points of the design stand for it.

    :param Surroundings around: the mode.
    :param Exploration found: the design around it.
    :param generator: of where the sequence starts.
    :param str design: its name; the hyperparameters of ``"normal"`` ones are taken as normal: there are no weights.
    """
    is_normal = design == "normal"
    size = around.size
    uniforms = _even(_NUM_POINTS, size, generator)
    widths = np.ones((2, size)) if is_normal else _WIDENING * _widths(found)
    share = widths[0] / widths.sum(axis=0)
    below = widths[0] * ndtri(0.5 * uniforms / share)
    above = widths[1] * ndtri(0.5 + 0.5 * (uniforms - share) / (1.0 - share))
    points = np.where(uniforms < share, below, above)
    scaled = points / np.where(uniforms < share, widths[0], widths[1])
    distance = np.sum(((points[:, None] - found.points) / widths.mean(axis=0)) ** 2, axis=-1)
    nearest = np.argmin(distance, axis=1)
    states = jax.tree.map(lambda leaf: leaf[nearest], found.fits.state)
    fits = interpolated(around, found, points, states) if design == "grid" else None
    if fits is None:
        fits = around.fits(points, states, tol=FEW_DIGITS, with_marginals=False, task="Draws")
    fits = without_false_peaks(fits, np.max(found.fits.objective))
    is_finite = np.isfinite(fits.objective)
    log_volumes = 0.5 * np.sum(scaled**2, axis=1)
    log_weights = np.zeros(len(points)) if is_normal else fits.objective + log_volumes
    log_weights = np.where(is_finite, log_weights, -np.inf)
    if not is_finite.any():
        return Scatter.of(found)
    weights = np.exp(log_weights - np.max(log_weights))
    weights /= weights.sum()
    if 1.0 / np.sum(weights**2) < _LEAST_EFFECTIVE * len(weights):
        return Scatter.of(found)
    return Scatter(weights, log_volumes, fits)


def _even(num_points: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """Points that fill the unit cube evenly: multiples of powers of the inverse of the root of ``x^(k+1) = x + 1``."""
    root = 2.0
    for _ in range(50):
        root = (1.0 + root) ** (1.0 / (size + 1))
    steps = root ** -np.arange(1.0, size + 1)
    uniforms = (generator.random(size) + np.arange(1, num_points + 1)[:, None] * steps) % 1.0
    return np.clip(uniforms, 1e-6, 1.0 - 1e-6)


def _widths(found: Exploration) -> np.ndarray:
    """Root mean squares of the design on the negative and the positive side of each axis, shape ``(2, k)``."""
    out = []
    for side in (found.points < 0.0, found.points > 0.0):
        mass = found.weights @ (side + 0.5 * (found.points == 0.0))
        out.append(np.sqrt(found.weights @ (side * found.points**2) / np.maximum(mass, 1e-12)))
    return np.maximum(out, 0.1)
