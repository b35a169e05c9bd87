"""Hyperparameters between the points of a design, for draws: nothing in a histogram of draws shows a lattice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from scipy.special import ndtri

from ....compilation.transfer import generator_of, to_device
from ...hyper.density.design import normal_points, split_normal
from ...hyper.density.skewed_normal import SkewedNormal
from ..fitting.point_fit import PointFit
from .exploration import Exploration
from .interpolation import interpolated
from .placement import FEW_DIGITS, without_false_peaks
from .surroundings import Surroundings

NUM_POINTS = 64
"""Points of draws where each of them needs a fit."""
_WIDENING = 1.1
"""Widening of the proposal over the density of the design: its tails must not be the lighter ones."""
_LEAST_EFFECTIVE = 0.2
_ROUNDING = 0.4
"""Rounding of widths within a row of a lattice, in its steps: its points do not tell more."""


_Place = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From points of the unit cube to points of a proposal, and minus their log density up to a constant."""


class Scatter(NamedTuple):
    """Points with weights, and the field there."""

    weights: np.ndarray
    """By which points are drawn, summing to one."""
    log_volumes: np.ndarray
    """Log volume of the space that each point stands for, up to a constant."""
    fits: PointFit

    @property
    def log_weights(self) -> np.ndarray:
        """Log weights that turn draws by ``weights`` into draws from the prior of the hyperparameters, up to a
        constant."""
        with np.errstate(divide="ignore"):  # of points that are never drawn
            log_prior = np.asarray(self.fits.objective - self.fits.log_evidence)
            return log_prior + self.log_volumes - np.log(self.weights)

    @classmethod
    def of(cls, found: Exploration) -> Scatter:
        """The points of the design themselves."""
        return cls(found.weights, found.log_volumes, found.fits)


def scatter(
    around: Surroundings,
    found: Exploration,
    generator: np.random.Generator,
    design: str,
    num_points: int = NUM_POINTS,
) -> Scatter:
    """Evenly spread points of a Gaussian with a width of its own on each side of each axis, weighted by the density.

    The widths are those of the design. The fits there are those of :func:`.interpolation.interpolated`, where the
    design is a lattice and they are as good; others start from the nearest of its points and end early, as draws need
    fewer digits. Where the weights say that the density is another one, points along the rows of a lattice are tried,
    and then the points of the design stand for it.

    :param Surroundings around: the mode.
    :param Exploration found: the design around it.
    :param generator: of where the sequence starts.
    :param str design: its name.
    :param int num_points: points where a lattice tells the field between them, so that they need no fits, and of a
        nearly normal density.
    """
    around = around if found.around is None else found.around
    size = around.size
    if found.followed is not None and found.spread is not None:
        # The points by which the design was judged, where they hold.
        followed = found.followed
        is_held = followed.share >= _LEAST_EFFECTIVE
        return Scatter(followed.spread_weights, -followed.log_proposal, found.spread) if is_held else Scatter.of(found)
    if found.nearly_normal is not None:
        return _nearly_normal(around, found, found.nearly_normal, generator, num_points)
    uniforms = _even(NUM_POINTS, size, generator)
    finer = uniforms if num_points <= NUM_POINTS else _between(uniforms, num_points, generator)
    widths = _WIDENING * _widths(found)
    units = widths.mean(axis=0)
    drawn = _drawn(around, found, partial(split_normal, widths=widths), uniforms, finer, units, design)
    if drawn is None and design == "grid" and size > 1:
        drawn = _drawn(around, found, partial(_from_rows, found), uniforms, finer, units, design)
    return Scatter.of(found) if drawn is None else drawn


def _nearly_normal(
    around: Surroundings, found: Exploration, density: SkewedNormal, generator: np.random.Generator, num_points: int
) -> Scatter:
    """Fits at draws of a nearly normal density, which is taken as it is: there are no weights."""
    points, log_volumes = density.design(normal_points(around.size, num_points, generator).points)
    squares = np.sum(found.points**2, axis=1) - 2.0 * points @ found.points.T
    states = jax.tree.map(lambda leaf: leaf[np.argmin(squares, axis=1)], found.fits.state)
    fits = around.fits(points, states, tol=FEW_DIGITS, with_marginals=False, task="Draws")
    is_finite = np.isfinite(fits.objective)
    return Scatter(is_finite / is_finite.sum(), log_volumes, fits) if is_finite.any() else Scatter.of(found)


def _drawn(
    around: Surroundings,
    found: Exploration,
    place: _Place,
    uniforms: np.ndarray,
    finer: np.ndarray,
    units: np.ndarray,
    design: str,
) -> Scatter | None:
    """Fits at points that were drawn, or among them by the lattice, and their weights; ``None`` where these rest on few
    of them.

    :param place: from the unit cube to points.
    :param uniforms: places of points to fit at, shape ``(64, k)``.
    :param finer: places among them, of points that are told by the lattice if it can.
    """
    points, log_volumes = place(uniforms)
    distance = np.sum(((points[:, None] - found.points) / units) ** 2, axis=-1)
    nearest = np.argmin(distance, axis=1)
    states = jax.tree.map(lambda leaf: leaf[nearest], found.fits.state)
    fits: PointFit | None = None
    if design == "grid":
        between, volumes_between = place(finer)
        fits = interpolated(around, found, points, states, between)
    if fits is None:
        fits = around.fits(points, states, tol=FEW_DIGITS, with_marginals=False, task="Draws")
    else:
        points, log_volumes = between, volumes_between
    fits = without_false_peaks(fits, np.max(found.fits.objective))
    is_finite = np.isfinite(fits.objective)
    log_weights = np.where(is_finite, fits.objective + log_volumes, -np.inf)
    if not is_finite.any():
        return None
    weights = np.exp(log_weights - np.max(log_weights))
    weights /= weights.sum()
    if 1.0 / np.sum(weights**2) < _LEAST_EFFECTIVE * len(weights):
        return None
    return Scatter(weights, log_volumes, fits)


def _from_rows(found: Exploration, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points along a bent ridge, and minus their log density, up to a constant.

    One coordinate has the density of the rows of the lattice, linear between them; the others are normal around the
    means of the rows, that is around a curve. The coordinate is the one that says most of the others.
    """
    from scipy.interpolate import PchipInterpolator  # brings scipy.optimize, which takes its time

    size, best = found.points.shape[1], None
    for axis in range(size):
        others = np.delete(found.points, axis, axis=1)
        rows, row = np.unique(found.points[:, axis], return_inverse=True)
        mass = np.bincount(row, found.weights)
        safe = np.maximum(mass, 1e-300)[:, None]
        moments = (np.stack([np.bincount(row, found.weights * x**k) for x in others.T], 1) / safe for k in (1, 2))
        mean, square = moments
        variance = np.maximum(square - mean**2, 0.0)
        spread = np.sum(mass @ variance / (found.weights @ (others - found.weights @ others) ** 2 + 1e-12))
        if len(rows) > 2 and (best is None or spread < best[0]):
            best = spread, axis, rows, mass, mean, variance
    if best is None:
        return np.zeros((len(uniforms), size)), np.zeros(len(uniforms))
    _, axis, rows, mass, mean, variance = best
    step = np.min(np.diff(rows))
    ends = np.cumsum(mass) / mass.sum()
    chosen = np.minimum(np.searchsorted(ends, uniforms[:, axis]), len(rows) - 1)
    rest = np.clip((uniforms[:, axis] - ends[chosen]) / mass[chosen] * mass.sum() + 1.0, 0.0, 1.0)
    shift = np.where(rest < 0.5, np.sqrt(2.0 * rest) - 1.0, 1.0 - np.sqrt(np.maximum(2.0 - 2.0 * rest, 0.0)))
    along = rows[chosen] + step * shift
    density = np.interp(along, [rows[0] - step, *rows, rows[-1] + step], [0.0, *mass, 0.0])
    widths = np.sqrt(_WIDENING * variance + (_ROUNDING * step) ** 2)
    sd = np.stack([np.interp(along, rows, width) for width in widths.T], axis=1)
    scaled = ndtri(np.delete(uniforms, axis, axis=1))
    points = np.insert(PchipInterpolator(rows, mean)(along) + sd * scaled, axis, along, axis=1)
    log_volumes = 0.5 * np.sum(scaled**2, axis=1) + np.sum(np.log(sd), axis=1) - np.log(np.maximum(density, 1e-300))
    return points, log_volumes


def _even(num_points: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """Points that fill the unit cube evenly: multiples of powers of the inverse of the root of ``x^(k+1) = x + 1``."""
    root = 2.0
    for _ in range(50):
        root = (1.0 + root) ** (1.0 / (size + 1))
    steps = root ** -np.arange(1.0, size + 1)
    uniforms = (generator.random(size) + np.arange(1, num_points + 1)[:, None] * steps) % 1.0
    return np.clip(uniforms, 1e-6, 1.0 - 1e-6)


def _between(uniforms: np.ndarray, num_points: int, generator: np.random.Generator) -> np.ndarray:
    """Evenly spread points within the range and the radius of given ones: the lattice was compared with fits as far out
    as these are."""
    low, high = uniforms.min(axis=0), uniforms.max(axis=0)
    # A fifth more, as the corners of the range are left out.
    found = low + (high - low) * _even(num_points + num_points // 5, uniforms.shape[1], generator)
    radius, largest = (np.linalg.norm(ndtri(part), axis=1) for part in (found, uniforms))
    inside: np.ndarray = found[radius <= largest.max()]
    return inside[:num_points]


def _widths(found: Exploration) -> np.ndarray:
    """Root mean squares of the design on the positive and the negative side of each axis, shape ``(2, k)``."""
    out = []
    for side in (found.points > 0.0, found.points < 0.0):
        mass = found.weights @ (side + 0.5 * (found.points == 0.0))
        out.append(np.sqrt(found.weights @ (side * found.points**2) / np.maximum(mass, 1e-12)))
    return np.maximum(out, 0.1)


def generator_and_keys(rng_key: Array) -> tuple[np.random.Generator, Callable[[int], Array]]:
    """NumPy's generator from a random key, and a function that makes so many keys of the same kind from it."""
    is_typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    data, generator = np.asarray(random.key_data(rng_key)), generator_of(rng_key)

    def make_keys(number: int) -> Array:
        fresh = to_device(generator.integers(2**32, size=(number, *data.shape), dtype=data.dtype))
        return random.wrap_key_data(fresh, impl=random.key_impl(rng_key)) if is_typed else fresh

    return generator, make_keys
