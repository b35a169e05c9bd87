r"""Heavy tails of a density of hyperparameters: looks far from its mode, and points further out while mass is found.

Coordinates are standardised, so that the density is about ``N(0, I)`` around its mode. Where a density of :math:`k`
coordinates falls as :math:`r^{-k-\nu}`, about :math:`r` times its height at a distance :math:`r` lies beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import chdtri, gammaln

from .cloud import Cloud, draw_cloud, spread_out
from .emulator import Emulator, emulate

_FAR = 4.5
"""Standard deviations from the mean to a look on an axis, at least."""
_LITTLE = 1e-4
"""Share of the second moment of a normal density beyond looks in all directions."""
_FEWEST_DIRECTIONS = 4
_FURTHER = 1.5
"""Factor of the distance of a look further out."""
LARGEST_MISSED = 0.05
"""Share of a variance that may lie where points are few or none, for no more points to be sought there."""
_OUTSIDE, _MORE_OUTSIDE = 1.05, 4
"""Factors of the distance to the edge of a box, and of the number of directions."""
_MOST_ROUNDS = 5
_BEYOND = 0.5
"""Distance of new points beyond the known ones, in the range of these."""
_FEW_DRAWS = 500
"""Draws by which variances of values are taken that cost more than coordinates."""
_LARGEST_STEP = 0.7
"""Logarithm of the factor by which looks in all directions are nearer or further, at random."""


class FarLook(NamedTuple):
    """Points far out on each axis, then in directions at random."""

    points: np.ndarray
    """Shape ``(m, k)``."""
    volumes: np.ndarray
    """Volume that each point stands for: times its density, over that at the origin, the share of all mass that lies
    beyond, shape ``(m,)``."""
    mean: np.ndarray
    """Center of what is known, shape ``(k,)``."""

    @classmethod
    def around(
        cls,
        mean: np.ndarray,
        covariance: np.ndarray,
        log_integral: float,
        box: tuple[np.ndarray, np.ndarray],
        generator: np.random.Generator,
        nearness: float = 1.0,
        *,
        is_outside: bool = False,
        on_axes_alone: bool = False,
    ) -> FarLook:
        """Points beyond a box on each axis, and in opposite directions at random.

        :param mean: of the density as it is known, shape ``(k,)``.
        :param covariance: shape ``(k, k)``.
        :param float log_integral: log integral of the density over its value at the origin.
        :param box: lower and upper ends of the axes, between which it is known, shape ``(k,)`` each.
        :param generator: of the directions.
        :param float nearness: factor of the distance in these.
        :param bool is_outside: whether points in these directions are beyond the box, too.
        :param bool on_axes_alone: whether to leave these directions out.

        >>> edge = np.full(2, 3.0)
        >>> log_integral, generator = math.log(2.0 * math.pi), np.random.default_rng(0)
        >>> look = FarLook.around(np.zeros(2), np.eye(2), log_integral, (-edge, edge), generator)
        >>> masses = look.volumes * np.exp(-0.5 * np.sum(look.points**2, axis=1))
        >>> look.points.shape, bool(np.all(look.shares(masses, look.points, np.ones(2)) < 0.01))
        ((8, 2), True)
        """
        size, sd, (low, high) = len(mean), np.sqrt(np.diagonal(covariance)), box
        root = np.linalg.cholesky(covariance + 1e-12 * np.eye(size))
        log_root = float(np.sum(np.log(np.diagonal(root))))
        edges = np.concatenate([high - mean, mean - low])
        distance = np.maximum(_FAR * np.tile(sd, 2), edges + np.tile(sd, 2))
        axes = np.concatenate([np.eye(size), -np.eye(size)]) * distance[:, None]
        beyond = distance / math.sqrt(2.0 * math.pi)
        if size == 1 or on_axes_alone:
            return cls(mean + axes, beyond, mean)
        number = max(size, _FEWEST_DIRECTIONS) // 2 * (_MORE_OUTSIDE if is_outside else 1)
        directions = generator.standard_normal((number, size))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        steps = np.concatenate([directions, -directions]) @ root.T
        radius = np.full(2 * number, nearness * math.sqrt(chdtri(size + 2, _LITTLE)))
        if is_outside:
            ends = np.where(steps > 0.0, high - mean, low - mean) / np.where(steps == 0.0, 1e-12, steps)
            radius = np.maximum(radius, _OUTSIDE * ends.min(axis=1))
        log_sphere = math.log(2.0) + 0.5 * size * math.log(math.pi) - gammaln(0.5 * size)
        shells = np.exp(log_sphere + size * np.log(radius) + log_root - log_integral) / (2 * number)
        return cls(mean + np.concatenate([axes, radius[:, None] * steps]), np.concatenate([beyond, shells]), mean)

    def shares(self, masses: np.ndarray, rest: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """Change of variances by masses at the points, over the variances: by those on the axes, or by those in all
        directions, whichever is more.

        :param masses: shape ``(m,)``; negative where less lies there than was thought.
        :param rest: values at the points less their means, shape ``(m, v)``.
        :param variance: shape ``(v,)``; what has none gains nothing.
        """
        moments, num_axes = second_moments(masses, rest), 2 * self.points.shape[1]
        gain = np.maximum(np.abs(moments[:num_axes].sum(axis=0)), np.abs(moments[num_axes:].sum(axis=0)))
        return np.divide(gain, variance, out=np.zeros_like(gain), where=variance > 0.0)

    def further(self) -> FarLook:
        """Points in the same directions, further out."""
        size = self.points.shape[1]
        growth = np.full(len(self.points), _FURTHER**size)
        growth[: 2 * size] = _FURTHER
        return FarLook(self.mean + _FURTHER * (self.points - self.mean), growth * self.volumes, self.mean)

    def share_beyond(self, near: np.ndarray, far: np.ndarray) -> np.ndarray:
        """The part of shares that is right if tails go on to fall as they do from this look to the one further out, as
        a power; one where this is the third power less the number of coordinates, or a smaller one.

        :param near: shares by this look, shape ``(v,)``.
        :param far: shares by that one.

        >>> look = FarLook(np.zeros((2, 1)), np.ones(2), np.zeros(1))
        >>> look.share_beyond(np.array([0.5, 0.5, 0.0, np.inf]), np.array([0.5, 0.0, 0.0, np.inf])).tolist()
        [1.0, 0.0, 0.0, 1.0]
        """
        is_finite = np.isfinite(near) & np.isfinite(far)
        falls = np.where(is_finite & (far == 0.0), np.inf, 0.0)
        with np.errstate(divide="ignore", over="ignore"):  # where nothing is in this look, or next to nothing in that
            np.divide(near, far, out=falls, where=is_finite & (far > 0.0))
            return np.minimum(1.0, math.log(_FURTHER) / np.maximum(np.log(falls), 1e-12))


def second_moments(masses: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Masses times squares, none where there is no mass, even if values are beyond all numbers there.

    >>> second_moments(np.array([0.0, 0.5]), np.array([[np.inf], [2.0]])).ravel().tolist()
    [0.0, 2.0]

    :param masses: shape ``(m,)``.
    :param rest: values less their means, shape ``(m, v)``.
    """
    with np.errstate(over="ignore"):
        squares = np.square(rest)
    there = np.broadcast_to(masses[:, None] != 0.0, squares.shape)
    return np.multiply(masses[:, None], squares, out=np.zeros_like(squares), where=there)


class Seen(NamedTuple):
    """Outcome of a look."""

    look: FarLook
    heights: np.ndarray
    """Log density at the points, less that at the origin, shape ``(m,)``."""
    masses: np.ndarray
    """Mass that an emulator lacks there, negative where it has too much, shape ``(m,)``."""
    share: float
    """Largest share by which the variance of a coordinate changes with it."""

    @property
    def missed(self) -> np.ndarray:
        """Mass that is lacking."""
        return np.maximum(self.masses, 0.0)


class Known(NamedTuple):
    """Points, and log densities there less that at the origin."""

    points: np.ndarray
    heights: np.ndarray

    def plus(self, points: np.ndarray, heights: np.ndarray) -> Known:
        """These and further ones."""
        return Known(np.concatenate([self.points, points]), np.concatenate([self.heights, heights]))


Heights = Callable[[np.ndarray], np.ndarray]
"""Log densities at points of shape ``(n, k)``, less that at the origin."""


def look_beyond(
    heights_at: Heights,
    emulator: Emulator,
    cloud: Cloud,
    generator: np.random.Generator,
    *,
    reach: float | None = None,
    nearness: float = 1.0,
    is_lacking: bool = False,
    log_integral: float | None = None,
    values_at: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Seen:
    """The density far out, beside that of an emulator.

    :param Heights heights_at: the log density.
    :param Emulator emulator: of it.
    :param Cloud cloud: draws from it.
    :param reach: how far beyond its points the emulator is believed, if all looks are to be further out.
    :param float nearness: as in :meth:`FarLook.around`.
    :param bool is_lacking: whether only the mass that the emulator lacks counts, and only where it does not fall much
        faster than heavy tails.
    :param log_integral: if that of the cloud is not the best known.
    :param values_at: values whose variances count, shape ``(n, v)``, at points; by default the coordinates.
    """
    margin = reach or 0.0
    low, high = emulator.points.min(axis=0) - margin, emulator.points.max(axis=0) + margin
    mean, size = cloud.draws.mean(axis=0), cloud.draws.shape[1]
    covariance = np.cov(cloud.draws.T).reshape(size, size)
    log_integral = cloud.log_integral if log_integral is None else log_integral
    is_outside = reach is not None
    look = FarLook.around(mean, covariance, log_integral, (low, high), generator, nearness, is_outside=is_outside)
    heights = heights_at(look.points)
    is_inside = np.all((look.points >= low) & (look.points <= high), axis=1)
    claimed = np.where(is_inside, emulator.log_density(look.points), -np.inf)
    masses = look.volumes * (_densities(heights) - _densities(claimed))
    kept = np.maximum(masses, 0.0) if is_lacking else masses
    values_at = values_at or _coordinates
    known = values_at(cloud.draws[:_FEW_DRAWS] if values_at is not _coordinates else cloud.draws)
    center, variance = known.mean(axis=0), known.var(axis=0)
    shares = look.shares(kept, values_at(look.points) - center, variance)
    if is_lacking and not np.max(shares) <= LARGEST_MISSED:
        further = look.further()
        beyond = further.volumes * _densities(heights_at(further.points))
        lies_there = further.shares(beyond, values_at(further.points) - center, variance)
        shares = shares * look.share_beyond(shares, lies_there)
    return Seen(look, heights, masses, float(np.max(shares)))


def _coordinates(points: np.ndarray) -> np.ndarray:
    return points


def _densities(heights: np.ndarray) -> np.ndarray:
    """Densities over that at the origin, one at most, and none where they are not finite."""
    return np.exp(np.where(np.isfinite(heights), np.minimum(heights, 0.0), -np.inf))


def go_outwards(
    heights_at: Heights,
    briefly: Heights,
    inner: Known,
    known: Known,
    draws: np.ndarray,
    per_round: int,
    generator: np.random.Generator,
) -> tuple[Known, Known, np.ndarray, bool]:
    """Evaluate a density of heavy tails at points further and further out, until looks find no more mass there.

    Cost: five rounds at most.

    :param Heights heights_at: the log density, at points that are to have masses.
    :param Heights briefly: the same, at points of looks.
    :param Known inner: points that may have masses.
    :param Known known: these, and those of looks.
    :param draws: of an emulation, shape ``(n, k)``.
    :param int per_round: points of a round.
    :param generator: of draws.
    :return: ``inner`` and ``known`` with all that was evaluated, draws of the last emulation, and whether its tails
        fall as powers.
    """
    for number in range(_MOST_ROUNDS):
        emulator = emulate(known.points, known.heights, is_heavy=True)
        cloud = draw_cloud(emulator, draws, generator, reach=reach_of(known))
        draws = cloud.draws
        if number:
            nearness = math.exp(generator.uniform(-_LARGEST_STEP, _LARGEST_STEP))
            seen = look_beyond(briefly, emulator, cloud, generator, nearness=nearness)
            known = known.plus(seen.look.points, seen.heights)
            if seen.share <= LARGEST_MISSED and (number > 1 or not emulator.is_heavy):
                break
        new = cloud.points[spread_out(cloud, per_round, generator, is_heavy=True)[0]]
        heights = heights_at(new)
        inner, known = inner.plus(new, heights), known.plus(new, heights)
    return inner, known, draws, emulator.is_heavy


def reach_of(known: Known) -> np.ndarray:
    """Distance beyond known points up to which the density of heavy tails is drawn from, shape ``(k,)``."""
    return _BEYOND * np.ptp(known.points, axis=0)
