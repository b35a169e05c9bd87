"""Points at which to evaluate the density of a few hyperparameters, to integrate over them (Rue et al. 2009, §6.5).

Points are given in standardised coordinates ``z``, in which the density is about ``N(0, I)``. With weights that sum to
one for that density, the integral of any function ``f`` is about ``sum_k exp(log_volumes[k]) f(z_k)``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

LARGEST_DIMENSION = 6
PROBE = math.sqrt(2.0)
"""Distance from the centre at which the log density of ``N(0, I)`` has fallen by one."""
# Each of the added factors is the product of these others: no two products of two factors coincide.
_GENERATED_FACTORS: dict[int, tuple[int, ...]] = {5: (0, 1, 2, 3), 6: (0, 1, 2, 3, 4)}
_RADIUS_FACTOR = 1.1
_LARGEST_STRETCH = 3.0
_MOST_BALLS = 10
"""Points of a lattice above some level, in those that it has there for a normal density."""
_FEW_POINTS = 2000
"""Points of a lattice that are not counted by level."""
_FEW_AT_ONCE = 9
"""Points of a lattice that are looked at together, and not level by level."""
_LEVEL = 2.0
"""By how much the log density falls from one level of a lattice to the next, at most."""
_NOTHING = 10.0
"""A fall of the log density below which points of a lattice are left out."""
_MOST_STONES = 500
"""Points of a lattice that are looked at only because the log density rises towards them."""
_LEAST_RISE = 0.1
"""By how much the log density rises from a point of a lattice to the next where it is said to rise: above rounding."""


class Design(NamedTuple):
    """Points and the volumes that they stand for."""

    points: np.ndarray
    """Shape ``(num_points, d)``; the centre is the first."""
    log_volumes: np.ndarray
    """Shape ``(num_points,)``."""


class Lattice(NamedTuple):
    """Outcome of a walk over a lattice."""

    design: Design
    """The points that are not left out, in the order of evaluation."""
    chosen: np.ndarray
    """Their indices among all points that were evaluated."""
    reach: float
    """The fall of the log density down to which no point is missing: as asked for, unless the walk was cut."""


def central_composite(dimension: int) -> Design:
    r"""The centre, the ends of the axes, and corners of a cube, all but the first at one distance.

    The volumes make the integrals of :math:`N(z \mid 0, I)` and of its first, second and third moments exact.

    :param int dimension: from 1 to 6; the number of points is 3, 9, 15, 25, 27 or 45.
    :return: the design.
    :raises ValueError: for another dimension.

    >>> design = central_composite(3)
    >>> weights = np.exp(design.log_volumes - 0.5 * np.sum(design.points**2, axis=1)) / (2 * np.pi) ** 1.5
    >>> print(len(weights), weights.sum().round(12), (weights @ design.points**2).round(12))
    15 1.0 [1. 1. 1.]
    """
    if not 1 <= dimension <= LARGEST_DIMENSION:
        raise ValueError(f"A central composite design needs 1 to {LARGEST_DIMENSION} dimensions, got {dimension}.")
    radius = _RADIUS_FACTOR * math.sqrt(dimension)
    axes = radius * np.concatenate([np.eye(dimension), -np.eye(dimension)])
    parts = [np.zeros((1, dimension)), axes]
    if dimension > 1:
        generated = _GENERATED_FACTORS.get(dimension)
        free = dimension if generated is None else dimension - 1
        corners = np.array(list(itertools.product((-1.0, 1.0), repeat=free)))
        if generated is not None:
            corners = np.column_stack([corners, np.prod(corners[:, generated], axis=1)])
        parts.append(_RADIUS_FACTOR * corners)
    points = np.concatenate(parts)
    # The masses: those of the shell have the second moment of N(0, I), the centre has the rest.
    shell = 1.0 / _RADIUS_FACTOR**2
    masses = np.full(len(points), shell / (len(points) - 1))
    masses[0] = 1.0 - shell
    log_volumes = np.log(masses) + 0.5 * np.sum(points**2, axis=1) + 0.5 * dimension * math.log(2.0 * math.pi)
    return Design(points, log_volumes)


def normal_points(dimension: int, num_points: int, generator: np.random.Generator | None = None) -> Design:
    """Draws from ``N(0, I)`` and their opposites, with equal masses.

    Their means are exact; so are their covariances for at most ``num_points / 2`` dimensions, and variances for more.

    :param int dimension: any.
    :param int num_points: even.
    :param generator: of the draws; without it they are always the same.
    :return: the design.

    >>> points = normal_points(8, 64).points
    >>> bool(np.allclose(points.mean(0), 0.0)), bool(np.allclose(points.T @ points / 64, np.eye(8)))
    (True, True)
    """
    half = (generator or np.random.default_rng(0)).standard_normal((num_points // 2, dimension))
    if dimension <= len(half):
        half = math.sqrt(len(half)) * np.linalg.qr(half)[0]
    else:
        half /= np.sqrt(np.mean(half**2, axis=0))
    points = np.concatenate([half, -half])
    log_normaliser = 0.5 * dimension * math.log(2.0 * math.pi)
    return Design(points, 0.5 * np.sum(points**2, axis=1) + log_normaliser - math.log(num_points))


def split_normal(uniforms: np.ndarray, widths: np.ndarray) -> Design:
    """Points of a density that is Gaussian with a width of its own on each side of each axis.

    :param uniforms: points of the unit cube, shape ``(n, d)``.
    :param widths: standard deviations on the positive and the negative side of each axis, shape ``(2, d)``.
    :return: the points; volumes without their number.

    >>> design = split_normal(np.array([[0.25], [0.75], [0.95]]), np.array([[1.0], [3.0]]))
    >>> print(design.points[:, 0].round(3), (np.exp(design.log_volumes) / np.sqrt(2.0 * np.pi)).round(3))
    [-2.902  0.     1.282] [3.193 2.    4.546]
    """
    share = widths[1] / widths.sum(axis=0)
    below = ndtri(0.5 * np.minimum(uniforms / share, 1.0))
    above = ndtri(0.5 + 0.5 * np.maximum(uniforms - share, 0.0) / (1.0 - share))
    points = np.where(uniforms < share, widths[1] * below, widths[0] * above)
    scaled = np.where(uniforms < share, below, above)
    log_normaliser = np.sum(np.log(widths.mean(axis=0))) + 0.5 * len(share) * math.log(2.0 * math.pi)
    return Design(points, 0.5 * np.sum(scaled**2, axis=1) + log_normaliser)


def stretch(design: Design, falls: np.ndarray) -> Design:
    """Fit a design to a skewed density by a scale of its own for each side of each axis (Martins et al. 2013, §3.2).

    :param Design design: for ``N(0, I)``.
    :param falls: by how much the log density falls from the centre to the points at distance :data:`PROBE` on the
        positive and the negative side of each axis, shape ``(2, d)``.
    :return: the design for the density that is Gaussian with these scales on each side.

    >>> design = stretch(central_composite(1), np.array([[0.25], [4.0]]))
    >>> print(design.points[:, 0].round(3), np.exp(design.log_volumes)[0].round(3))
    [ 0.   2.2 -0.55] 0.544
    """
    safe = np.where(falls > 0.0, falls, 1.0)
    widths = np.clip(1.0 / np.sqrt(safe), 1.0 / _LARGEST_STRETCH, _LARGEST_STRETCH)
    scales = np.where(falls > 0.0, widths, 1.0)
    points = design.points
    factors = np.where(points > 0.0, scales[0], np.where(points < 0.0, scales[1], scales.mean(axis=0)))
    return Design(factors * points, design.log_volumes + np.sum(np.log(factors), axis=1))


def explore_lattice(
    evaluate: Callable[[np.ndarray], np.ndarray], dimension: int, step: float, drop: float, most_points: int = 20_000
) -> Lattice:
    """Walk over a lattice from the origin, as long as the log density has not fallen by more than ``drop``.

    Sums over a lattice (the trapezoidal rule) converge exponentially for smooth densities, so wide steps will do. The
    walk goes down level by level, so that the points of the largest density come first. At last it goes on along the
    axes from where the log density has fallen and rises again towards points not yet seen: a bent ridge that is
    narrower than the step goes on there. It is cut where ten times as many points are above a level as of a normal
    density: heavy tails are followed, what does not fall off is not.

    :param evaluate: log density at points of shape ``(n, d)``, as ``(n,)``.
    :param int dimension: the number of coordinates.
    :param float step: of the lattice, in standard deviations.
    :param float drop: where the walk does not go on, below the largest value found.
    :param int most_points: at which the lattice is cut.
    :return: the points, and how far down the walk went.

    >>> found = explore_lattice(lambda z: -0.5 * np.sum(z**2, axis=1), 2, 1.0, 8.0)
    >>> masses = np.exp(-0.5 * np.sum(found.design.points**2, axis=1) + found.design.log_volumes)
    >>> len(masses), found.reach, round(float(masses.sum() / (2 * np.pi)), 3)
    (61, 8.0, 1.0)
    """
    num_levels = math.ceil(drop / _LEVEL)
    levels = drop * np.arange(1, num_levels + 1) / num_levels
    ball, falls = _ball(dimension, step, drop)
    sizes = np.searchsorted(falls, levels, side="right")
    if len(ball) <= min(_FEW_AT_ONCE, most_points):
        sizes = np.full(num_levels, len(ball))
    order: list[tuple[int, ...]] = []
    known: set[tuple[int, ...]] = set()
    values, is_passed, reach, num_stones = np.zeros(0), np.zeros(0, bool), 0.0, 0
    for level, size in zip(levels.tolist(), sizes.tolist(), strict=True):
        bound = min(_MOST_BALLS * len(ball), max(_FEW_POINTS, _MOST_BALLS * size), most_points)
        frontier = [index for index in ball[:size] if index not in known]
        while True:
            if not frontier:  # on from all that are above the level
                is_next = ~is_passed & (values > np.max(values) - level)
                is_passed |= is_next
                frontier = sorted(_neighbours(np.array(order)[is_next]) - known)
            if not frontier and level == levels[-1]:
                frontier = sorted(_uphill(order, values, known))
                num_stones += len(frontier)
            if not frontier or len(order) - num_stones >= bound or num_stones > _MOST_STONES:
                break
            values = np.concatenate([values, evaluate(step * np.array(frontier, float).reshape(-1, dimension))])
            is_passed = np.concatenate([is_passed, np.zeros(len(frontier), bool)])
            order += frontier
            known.update(frontier)
            frontier = []
        if frontier:
            break
        reach = level
    inside = np.flatnonzero(values > np.max(values) - max(drop, _NOTHING))
    points = step * np.array(order, float).reshape(-1, dimension)[inside]
    return Lattice(Design(points, np.full(len(points), dimension * math.log(step))), inside, reach)


def _ball(dimension: int, step: float, drop: float) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Points of a lattice, from the origin outwards, to which a normal density falls by at most so much, and falls."""
    reach = math.floor(math.sqrt(2.0 * drop) / step)
    cube = np.indices((2 * reach + 1,) * dimension).reshape(dimension, -1).T - reach
    falls = 0.5 * step**2 * np.sum(cube**2, axis=1)
    order = np.argsort(falls, kind="stable")
    order = order[falls[order] <= drop]
    return [tuple(index) for index in cube[order].tolist()], falls[order]


def _neighbours(indices: Iterable[np.ndarray]) -> set[tuple[int, ...]]:
    out = set()
    for index in indices:
        for axis, shift in itertools.product(range(len(index)), (-1, 1)):
            moved = list(map(int, index))
            moved[axis] += shift
            out.add(tuple(moved))
    return out


def _uphill(order: list[tuple[int, ...]], values: np.ndarray, known: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Points not yet known to which the log density rises along an axis, as it did at the last two points before."""
    heights = dict(zip(order, values.tolist(), strict=True))
    out = set()
    for index, height in heights.items():
        for axis, shift in itertools.product(range(len(index)), (-1, 1)):
            behind, ahead = ((*index[:axis], index[axis] + step, *index[axis + 1 :]) for step in (-shift, shift))
            if ahead not in known and height > heights.get(behind, math.inf) + _LEAST_RISE:
                out.add(ahead)
    return out
