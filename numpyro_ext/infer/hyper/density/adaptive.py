"""Points that follow the shape of a density of hyperparameters, chosen and weighted by an emulator of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from ....linalg.exponential_tilting import exponentially_tilted, values_and_squares
from .cloud import Cloud, draw_cloud, spread_out, tail_lift
from .design import PROBE
from .emulator import emulate
from .tails import Known, Seen, go_outwards, look_beyond, reach_of

_FEW, _FEW_PER_ROUND, _PER_ROUND = 4, 18, 27
"""Coordinates that are few, and points of a round, of few coordinates and of more."""
_MOST_EVALUATIONS = 60
"""Evaluations from which on no further round is begun."""
_ENOUGH_TO_GO_ON = 0.15
"""Share of a variance beyond all points from which on tails are followed."""
_REACH = 0.3
"""Standard deviations along each axis by which the density goes on beyond all points where it was evaluated."""
_NUM_SPREAD, _NUM_SPREAD_DEAR = 128, 36
_SHARE_UNCERTAIN = 3
"""One point in so many of a round is where the emulator knows least; the others are draws from it."""
_GOOD, _LARGEST_ERROR = 0.9, 0.5
"""Effective share of draws from an emulator, and its median error in nats where it knows least, at which it needs no
further round."""
_MOST_POINTS = 48
"""Points that are kept, more for many coordinates: answers take a computation of the field for each of them."""
_NUM_DRAWS = 256
"""Draws among which the points of a round are chosen."""
_RIDGES = (1e-4, 1e-3, 1e-2, 0.1, 1.0)
"""Ridges by which means are tilted, the first under which enough points have mass: where coordinates are many, no
weights of so few points have all moments that are asked for."""
_OF_SQUARES = 10.0
"""Ridge of squares over that of means: of what is nearly linear in the coordinates, means matter more than widths."""
_LEAST_KEPT = 0.2
"""Share of the effective number of points that tilted masses have to keep."""


class Followed(NamedTuple):
    """Points with masses, and the density that was emulated through all that were evaluated."""

    chosen: np.ndarray
    """Indices of the points that have mass, in the order of evaluation."""
    points: np.ndarray
    """The chosen ones, shape ``(n, k)``."""
    weights: np.ndarray
    """Their masses, shape ``(n,)``, summing to one."""
    cloud: Cloud
    earlier: Cloud
    """Draws of the emulation that knew none of the points evaluated last."""
    log_integral: float
    """Log integral of the density over its value at the origin."""
    error: float
    """Standard error of the log integral."""
    spread: np.ndarray
    """Points evaluated last, spread evenly over an earlier emulation that knew none of them, shape ``(m, k)``."""
    log_proposal: np.ndarray
    """Log density of these points, up to a constant, shape ``(m,)``."""
    log_ratios: np.ndarray
    """Log importance weights of these points, up to a constant, shape ``(m,)``."""
    seen: Seen
    """The last look far out."""

    @property
    def share(self) -> float:
        """Effective share of the importance weights."""
        return effective_share(self.log_ratios)

    @property
    def spread_weights(self) -> np.ndarray:
        """Masses of the spread points: importance weights tilted to the means and variances of the cloud, which are
        known better than by these few."""
        weights: np.ndarray = np.exp(self.log_ratios - np.max(self.log_ratios))
        kept = weights > 0.0
        weights[kept] = tilted(self.spread[kept], weights[kept], self.cloud)
        return weights


def follow(
    evaluate: Callable[[np.ndarray], np.ndarray],
    size: int,
    briefly: Callable[[np.ndarray], np.ndarray] | None = None,
    *,
    is_dear: bool = False,
    values_at: Callable[[np.ndarray], np.ndarray] | None = None,
    has_heavy_tails: bool = False,
) -> Followed:
    """Evaluate a log density along its axes, emulate it, draw from that, evaluate there, and so on until it holds;
    look far out, and go on there where tails are heavy; then evaluate it at points spread over the emulation, by which
    this is judged.

    Cost: two evaluations for each coordinate and one more, rounds of 18 (up to four coordinates) or 27 up to some 70
    evaluations, three for each coordinate far out, and the last 128; a tenth of a second besides. Where tails are heavy
    up to five rounds more, with looks, and half a second.

    :param evaluate: log density at points of shape ``(n, k)``, as ``(n,)``; ``-inf`` where there is none.
    :param int size: the number of coordinates, in which the density is about ``N(0, I)`` around its mode.
    :param briefly: the same with few digits, for points far out and the last ones.
    :param bool is_dear: whether to be content with one round, and 36 points at last.
    :param values_at: values at points, shape ``(n, v)``, whose variances decide whether tails are followed; by default
        the coordinates.
    :param bool has_heavy_tails: whether tails are followed in any case.
    :return: points and masses.

    >>> found = follow(lambda z: -0.5 * np.sum(z**2, axis=1), 3)
    >>> bool(abs(found.log_integral - 1.5 * math.log(2.0 * math.pi)) < 0.02)
    True
    >>> bool(np.all(np.abs(found.weights @ found.points**2 - 1.0) < 0.03))
    True
    """
    generator, of_looks = np.random.default_rng(0), np.random.default_rng(1)  # looks change no draws
    steps = PROBE * np.eye(size)
    points = np.concatenate([np.zeros((1, size)), steps, -steps])
    values = evaluate(points)
    origin = values[0]
    per_round = _FEW_PER_ROUND if size <= _FEW else _PER_ROUND
    num_uncertain, draws = per_round // _SHARE_UNCERTAIN, None
    while draws is None or (len(points) < _MOST_EVALUATIONS and not is_dear):
        emulator = emulate(points, values - origin)
        cloud = draw_cloud(emulator, draws, generator, _NUM_DRAWS)
        draws = cloud.draws
        plain = draws[generator.choice(len(draws), per_round - num_uncertain, replace=False)]
        wide = cloud.points[spread_out(cloud, _NUM_DRAWS, generator)[0]]
        new = np.concatenate([plain, wide[emulator.most_uncertain(wide, num_uncertain)]])
        found = evaluate(new)
        log_ratios = found - origin - emulator.log_density(new)
        points, values = np.concatenate([points, new]), np.concatenate([values, found])
        share, unsure = effective_share(log_ratios[: len(plain)]), np.median(np.abs(log_ratios[len(plain) :]))
        if share > _GOOD and unsure < _LARGEST_ERROR:
            break

    def heights_at(at: np.ndarray) -> np.ndarray:
        return evaluate(at) - origin

    def brief_heights_at(at: np.ndarray) -> np.ndarray:
        return (briefly or evaluate)(at) - origin

    log_integral = cloud.log_integral + _log_mean(log_ratios[: len(plain)])
    seen = look_beyond(
        brief_heights_at, emulator, cloud, of_looks, is_lacking=True, log_integral=log_integral, values_at=values_at
    )
    known, is_heavy = Known(points, values - origin), False
    goes_on = has_heavy_tails or not seen.share <= _ENOUGH_TO_GO_ON  # what is not a number is not small
    if goes_on:
        inner, all_known = known, known.plus(seen.look.points, seen.heights)
        inner, known, draws, is_heavy = go_outwards(
            heights_at, brief_heights_at, inner, all_known, draws, per_round, generator
        )
        points, values = inner.points, inner.heights + origin
    emulator = emulate(*known, is_heavy=is_heavy)
    earlier = draw_cloud(emulator, draws, generator, reach=reach_of(known) if is_heavy else math.inf)
    number = _NUM_SPREAD_DEAR if is_dear else _NUM_SPREAD
    index, log_proposal = spread_out(earlier, number, generator, is_heavy=is_heavy)
    spread = earlier.points[index]
    found = brief_heights_at(spread)
    log_ratios = np.where(np.isfinite(found), found - log_proposal, -np.inf)
    emulator = emulate(*known.plus(spread, found), is_heavy=is_heavy)
    cloud = draw_cloud(emulator, earlier.draws, generator, reach=_REACH)
    if goes_on:
        seen = look_beyond(brief_heights_at, emulator, cloud, of_looks, reach=_REACH)
    share = max(effective_share(log_ratios), 1e-12)
    error = math.hypot(cloud.error, math.sqrt((1.0 / share - 1.0) / len(spread)))
    inside = np.flatnonzero(np.isfinite(values))
    kept, weights = masses(points[inside], cloud, max(_MOST_POINTS, 4 * size), is_heavy=is_heavy)
    chosen = inside[kept]
    last = spread, log_proposal, log_ratios, seen
    return Followed(chosen, points[chosen], weights, cloud, earlier, cloud.log_integral, error, *last)


def _log_mean(log_ratios: np.ndarray) -> float:
    """The log of the mean of ratios; zero where none is finite, which tells nothing."""
    found = float(logsumexp(np.where(np.isfinite(log_ratios), log_ratios, -np.inf)))
    return found - math.log(len(log_ratios)) if math.isfinite(found) else 0.0


def effective_share(log_ratios: np.ndarray) -> float:
    """The effective number of importance weights over their number.

    >>> effective_share(np.zeros(5)), round(effective_share(np.array([0.0, -np.inf])), 3)
    (1.0, 0.5)
    """
    largest = np.max(log_ratios, initial=-np.inf)
    if not np.isfinite(largest):
        return 0.0
    ratios = np.exp(log_ratios - largest)
    return float(ratios.sum() ** 2 / (ratios @ ratios) / len(ratios))


def masses(points: np.ndarray, cloud: Cloud, most: int, *, is_heavy: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Masses of a few of the points, with the means and variances of a cloud along each axis.

    They are first the shares of draws that are nearest to each point, and then tilted by an exponential of squares.

    :param points: shape ``(n, k)``.
    :param int most: how many are kept, those with the largest shares.
    :param bool is_heavy: whether shares of far points, which may have less than one draw, matter as much.
    :return: indices of the points kept, and their masses.
    """
    kept = np.arange(len(points))
    draws = cloud.draws
    everywhere = (cloud.points, cloud.weights) if is_heavy else (draws, np.full(len(draws), 1.0 / len(draws)))
    shares = _shares(points, *everywhere)
    if len(points) > most:
        worth = shares * np.exp(tail_lift(points, *everywhere)) if is_heavy else shares
        kept = np.sort(np.argsort(-worth, kind="stable")[:most])
        shares = _shares(points[kept], *everywhere)
    kept, shares = kept[shares > 0.0], shares[shares > 0.0]
    return kept, tilted(points[kept], shares, cloud)


def tilted(points: np.ndarray, weights: np.ndarray, cloud: Cloud) -> np.ndarray:
    """Weights times an exponential of squares, so that means and variances along each axis are those of a cloud, as
    nearly as the points allow without one of them having all the mass.

    :param points: shape ``(n, k)``.
    :param weights: positive, shape ``(n,)``.
    :return: weights that sum to one.
    """
    everywhere = values_and_squares(cloud.points)
    mean = cloud.weights @ everywhere
    scale = np.sqrt(np.maximum(cloud.weights @ np.square(everywhere - mean), 1e-12))
    scale[points.shape[1] :] *= math.sqrt(_OF_SQUARES)
    rows, weights = (values_and_squares(points) - mean) / scale, weights / weights.sum()
    for ridge in _RIDGES:
        found = exponentially_tilted(weights, rows, ridge=ridge)
        if found is not None and weights @ weights >= _LEAST_KEPT * (found @ found):
            return found
    return weights


def _shares(points: np.ndarray, draws: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The share of draws with weights that are nearest to each point."""
    square = np.sum(points**2, axis=1) - 2.0 * draws @ points.T
    return np.bincount(np.argmin(square, axis=1), weights, minlength=len(points))
