"""Draws from an emulated density of hyperparameters, which cost no fits."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import gammaln, logsumexp

from .emulator import Emulator, log_axes

_POINTS_PER_DRAW = 4
_NUM_MOVES = 12
_TEMPERATURE = 1.2
"""By which axes are flattened: the tails of what proposes must not be the lighter ones."""
_WIDENING = 1.15
_FLATTENING = 0.5
"""The part of the log density that is taken off for points that are to know its tails, for one coordinate."""
_LARGEST_CELL = 32
_GRID = np.sinh(np.linspace(-7.0, 7.0, 1401)) * 0.15
"""Ends of cells of an axis, from -82 to 82, narrow in the middle."""


class Cloud(NamedTuple):
    """Many points with weights, and draws of equal weight."""

    points: np.ndarray
    """Shape ``(n, k)``."""
    weights: np.ndarray
    """Shape ``(n,)``, summing to one."""
    heights: np.ndarray
    """Log density of the emulator at the points, shape ``(n,)``."""
    draws: np.ndarray
    """Shape ``(m, k)``."""
    log_integral: float
    error: float
    """Standard error of the log integral, as the weights tell it."""


def systematic(weights: np.ndarray, number: int, start: float | np.ndarray) -> np.ndarray:
    """Numbers of the points that draws come from, in order: each as often as its weight says, but for less than one.

    :param weights: of the points, which need not sum to one.
    :param int number: of draws.
    :param start: place of each draw in its own part of the total weight, from zero to one; one place for all, or as
        many.
    """
    ends = np.cumsum(weights)
    return np.minimum(np.searchsorted(ends / ends[-1], (np.arange(number) + start) / number), len(ends) - 1)


def draw_cloud(
    emulator: Emulator,
    before: np.ndarray | None,
    generator: np.random.Generator,
    num_draws: int = 1024,
    *,
    reach: float | np.ndarray = math.inf,
) -> Cloud:
    """Importance sampling from the axes of an emulator, flattened, and random walks from where it ends.

    :param Emulator emulator: of the density.
    :param before: draws from a density like it, shape ``(m, k)``, if there are any: half of the points are then of a
        Student t with their moments, which knows how axes depend on each other.
    :param generator: of all draws.
    :param int num_draws: how many draws; there are four times as many points.
    :param reach: how far beyond the points where the density is known there is any, along each axis.
    """
    low, high = emulator.points.min(axis=0) - reach, emulator.points.max(axis=0) + reach
    size, number = emulator.points.shape[1], _POINTS_PER_DRAW * num_draws
    number = number if before is None else number // 2
    tables = _tables(emulator.tails)
    points, logs = _draw_axes(tables, number, generator), []
    if before is not None:
        normal = before.mean(axis=0), np.linalg.cholesky(_covariance(before))
        freedom = _freedom(emulator)
        points = np.concatenate([points, _draw_student(*normal, freedom, number, generator)])
        logs = [_student_density(points, *normal, freedom)]
    logs.append(_axes_density(tables, points))
    log_proposal = np.asarray(logsumexp(np.stack(logs), axis=0)) - math.log(len(logs))
    is_beyond = np.any((points < low) | (points > high), axis=1)
    point_heights = emulator.log_density(points)
    log_weights = np.where(is_beyond, -np.inf, point_heights - log_proposal)
    total = float(logsumexp(log_weights))
    weights = np.exp(log_weights - total)
    error = math.sqrt(max(float(weights @ weights) - 1.0 / len(weights), 0.0))
    draws = points[systematic(weights, num_draws, generator.random())]
    heights = emulator.log_density(draws)
    step = np.linalg.cholesky(_covariance(draws)) * min(1.0, 2.0 / math.sqrt(size))
    for _ in range(_NUM_MOVES):
        proposed = draws + generator.standard_normal(draws.shape) @ step.T
        is_beyond = np.any((proposed < low) | (proposed > high), axis=1)
        new = np.where(is_beyond, -np.inf, emulator.log_density(proposed))
        is_taken = np.log(generator.random(len(new))) < new - heights
        draws, heights = np.where(is_taken[:, None], proposed, draws), np.where(is_taken, new, heights)
    return Cloud(points, weights, point_heights, draws, total - math.log(len(weights)), error)


def spread_out(
    cloud: Cloud, number: int, generator: np.random.Generator, *, is_heavy: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Points of a cloud that are spread evenly over its density, flattened so that its tails have some.

    :param Cloud cloud: of the density.
    :param int number: of points, or a few less where some are drawn twice.
    :param generator: of the places.
    :param bool is_heavy: whether the density is lifted by squared distances, as heavy tails have most of a variance.
    :return: indices, and the log of what the emulated density at each is to be divided by, up to a constant.
    """
    heights = cloud.heights
    flattening = _FLATTENING / math.sqrt(cloud.points.shape[1])
    with np.errstate(divide="ignore"):  # of points without weight
        lift = tail_lift(cloud.points, cloud.points, cloud.weights) if is_heavy else -flattening * heights
        log_flat = np.log(cloud.weights) + lift
    flat = np.exp(log_flat - np.max(log_flat))
    order = _in_cells(cloud.points)
    chosen = np.unique(order[systematic(flat[order], number, generator.random(number))])
    return chosen, (heights + lift)[chosen]


def tail_lift(points: np.ndarray, draws: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Logarithm of one more than squared distances from the mean of draws, in variances, as a mean over coordinates.

    :param points: shape ``(n, k)``.
    :param draws: shape ``(m, k)``.
    :param weights: of the draws, shape ``(m,)``, summing to one.
    """
    mean = weights @ draws
    return np.log1p(np.mean(np.square(points - mean) / (weights @ np.square(draws - mean)), axis=1))


def _in_cells(points: np.ndarray) -> np.ndarray:
    """An order in which neighbours stand together: halves along the axis of the largest variance, again and again."""
    out, waiting = [], [np.arange(len(points))]
    while waiting:
        index = waiting.pop()
        here = points[index]
        rest = here - here.sum(axis=0) / len(here)
        index = index[np.argsort(here[:, np.argmax(np.einsum("ij,ij->j", rest, rest))])]
        if len(index) <= _LARGEST_CELL:
            out.append(index)
        else:
            waiting += [index[len(index) // 2 :], index[: len(index) // 2]]
    return np.concatenate(out)


def _covariance(points: np.ndarray) -> np.ndarray:
    size = points.shape[1]
    return np.cov(points.T).reshape(size, size) + 1e-6 * np.eye(size)


def _tables(tails: np.ndarray) -> np.ndarray:
    """Masses of the cells of each axis, shape ``(cells, k)``."""
    middles = 0.5 * (_GRID[1:] + _GRID[:-1])[:, None]
    log_masses = log_axes(middles, tails) / _TEMPERATURE + np.log(np.diff(_GRID))[:, None]
    masses = np.exp(log_masses - log_masses.max(axis=0)) + 1e-300
    return masses / masses.sum(axis=0)


def _draw_axes(tables: np.ndarray, number: int, generator: np.random.Generator) -> np.ndarray:
    """A Latin hypercube: axis by axis, as many draws in each part of the same mass."""
    out = []
    for masses in tables.T:
        uniforms = (generator.permutation(number) + generator.random(number)) / number
        out.append(np.interp(uniforms, np.concatenate([[0.0], np.cumsum(masses)]), _GRID))
    return np.stack(out, axis=1)


def _axes_density(tables: np.ndarray, points: np.ndarray) -> np.ndarray:
    cells = np.clip(np.searchsorted(_GRID, points, side="right") - 1, 0, len(_GRID) - 2)
    log_heights = np.log(tables) - np.log(np.diff(_GRID))[:, None]
    return np.sum(log_heights[cells, np.arange(points.shape[1])], axis=1)


def _draw_student(
    mean: np.ndarray, root: np.ndarray, freedom: float, number: int, generator: np.random.Generator
) -> np.ndarray:
    shrink = np.sqrt(freedom / generator.chisquare(freedom, (number, 1)))
    return mean + _WIDENING * (generator.standard_normal((number, len(mean))) * shrink) @ root.T


def _student_density(points: np.ndarray, mean: np.ndarray, root: np.ndarray, freedom: float) -> np.ndarray:
    size = len(mean)
    scaled = solve_triangular(_WIDENING * root, (points - mean).T, lower=True)
    constant = gammaln(0.5 * (freedom + size)) - gammaln(0.5 * freedom) - 0.5 * size * math.log(freedom * math.pi)
    constant -= np.sum(np.log(_WIDENING * np.diagonal(root)))
    return constant - 0.5 * (freedom + size) * np.log1p(np.sum(scaled**2, axis=0) / freedom)


def _freedom(emulator: Emulator) -> float:
    size = emulator.points.shape[1]
    return 5.0 + 3.0 * size if emulator.joint == 0.0 else (1.0 / emulator.joint - size) / _TEMPERATURE
