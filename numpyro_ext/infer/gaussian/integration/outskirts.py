"""Mass far from the mode of the hyperparameters, where a design has few points or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from scipy.special import ndtri

from ...hyper.density.adaptive import Followed
from ...hyper.density.design import Design, central_composite, stretch
from ...hyper.density.skewed_normal import SkewedNormal
from ...hyper.density.tails import FarLook, second_moments
from ..fitting.point_fit import PointFit

_ENOUGH_FOR_ANOTHER = 0.1
"""Share of a variance from which on another look is taken."""
_OUTER, _WIDTH_OF_OUTER = 2.4, 0.9
"""Deviations, in the coordinates of a design, at which it is looked at among its outermost points, which are few, and
the range for which such a look stands."""
_NUM_MANY = 4000
"""Points that have the moments of a density which a design has few points for."""

FitsAt = Callable[[np.ndarray], PointFit]
"""Fits at points of shape ``(n, k)``."""


def missed_by_points(fits_at: FitsAt, mode: float, followed: Followed, fits: PointFit) -> dict[str, float]:
    """Shares of variances that points miss that follow a density; see :func:`missed_by_design`.

    :param FitsAt fits_at: brief fits, known already at the points of the looks that were taken.
    :param float mode: log density at the mode.
    :param Followed followed: the points.
    :param PointFit fits: those at the points.
    """
    look = followed.seen.look
    return _missed(
        fits_at, mode, look, followed.seen.missed / look.volumes, fits_at(look.points), fits, followed.weights
    )


def missed_by_design(
    fits_at: FitsAt,
    mode: float,
    turn: np.ndarray,
    points: np.ndarray,
    log_integral: float,
    fits: PointFit,
    weights: np.ndarray,
    *,
    follows: bool = False,
) -> dict[str, float]:
    """Largest share of a variance of each site that lies beyond the points of a design.

    Cost: brief fits, two for a coordinate, four for two of which the points follow the density, and about three for
    each of more; as many again where much is there.

    :param FitsAt fits_at: brief fits.
    :param float mode: log density at the mode.
    :param turn: from points of the design to coordinates of which each is close to one hyperparameter, orthogonal,
        shape ``(k, k)``.
    :param points: shape ``(n, k)``.
    :param float log_integral: of the density over that at the mode.
    :param PointFit fits: those at the points.
    :param weights: masses of the points, shape ``(n,)``.
    :param bool follows: whether the points follow the density in all directions, as those of a lattice do.
    :return: by name.
    """
    turned = points @ turn
    mean = weights @ turned
    covariance = (turned - mean).T @ ((turned - mean) * weights[:, None])
    box = turned.min(axis=0), turned.max(axis=0)

    def fits_at_turned(at: np.ndarray) -> PointFit:
        return fits_at(at @ turn.T)

    def missed(*, on_axes_alone: bool) -> dict[str, float]:
        generator = np.random.default_rng(0)
        look = FarLook.around(mean, covariance, log_integral, box, generator, on_axes_alone=on_axes_alone)
        far = fits_at_turned(look.points)
        return _missed(fits_at_turned, mode, look, _over_mode(far, mode), far, fits, weights)

    # Of two coordinates a tenth on the axes is what joint tails have there, of which most is between them.
    is_brief = follows and len(mean) == 2
    found = missed(on_axes_alone=is_brief)
    if is_brief and not all(share <= _ENOUGH_FOR_ANOTHER for share in found.values()):
        found = missed(on_axes_alone=False)
    return found


def missed_among_outermost(
    fits_at: FitsAt,
    mode: float,
    design: SkewedNormal | np.ndarray,
    fits: PointFit,
    weights: np.ndarray,
    *,
    is_signed: bool = False,
) -> dict[str, float]:
    """Largest share of a variance of each site by which the density is above that of a design among its outermost
    points, as on a shoulder; arguments as in :func:`missed_by_design`.

    :param design: the density that it was made for, or by how much the log density falls on both sides of each axis;
        see :func:`~numpyro_ext.infer.hyper.density.design.stretch`.
    :param bool is_signed: whether less mass than that of the design counts as well, on all axes together: a correction
        of variances of the design.
    """
    size = len(design.shift) if isinstance(design, SkewedNormal) else design.shape[1]
    axes = _OUTER * np.concatenate([np.zeros((1, size)), np.eye(size), -np.eye(size)])
    plain = Design(axes, 0.5 * np.sum(np.square(axes), axis=1))
    own = design.design(axes) if isinstance(design, SkewedNormal) else stretch(plain, design)
    there = fits_at(own.points[1:])
    # in coordinates in which the design is normal
    lift = np.exp(own.log_volumes[1:] - own.log_volumes[0] - 0.5 * _OUTER**2)
    densities = _over_mode(there, mode) * lift - math.exp(-0.5 * _OUTER**2)
    densities = densities if is_signed else np.maximum(densities, 0.0)
    masses = _WIDTH_OF_OUTER / math.sqrt(2.0 * math.pi) * densities
    missed = {}
    for name, (rest, variance) in _spreads(there, fits, weights).items():
        gains = second_moments(masses, rest)
        gain = (gains.sum(axis=0) if is_signed else gains.max(axis=0))[variance > 0.0]
        missed[name] = float(np.max(gain / variance[variance > 0.0], initial=-np.inf if is_signed else 0.0))
    return missed


def missed_between_points(
    sites_at: Callable[[np.ndarray], Mapping[str, np.ndarray]], falls: np.ndarray
) -> dict[str, float]:
    """Largest share of a variance of each site by which the few points of a central composite design fall short of the
    density that they stand for, a normal one with a scale for each side of each axis.

    Means and variances of the coordinates are exact; those of what bends in them, as the exponential of a logarithm
    does, are not. Cost: no fits.

    :param sites_at: values of each site at points, shapes ``(n, k)`` and ``(n, v)``.
    :param falls: of the log density on both sides of each axis, shape ``(2, k)``.
    """

    def variances(design: Design, log_masses: np.ndarray) -> dict[str, np.ndarray]:
        own = stretch(Design(design.points, log_masses), falls)
        weights = np.exp(own.log_volumes - np.max(own.log_volumes))
        weights /= weights.sum()
        found = sites_at(own.points)
        return {name: weights @ np.square(value - weights @ value) for name, value in found.items()}

    size = falls.shape[1]
    few, many = central_composite(size), Design(_evenly(size), np.zeros(_NUM_MANY))
    known = variances(few, few.log_volumes - 0.5 * np.sum(np.square(few.points), axis=1))
    missed = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for name, variance in variances(many, many.log_volumes).items():
            is_free = known[name] > 0.0
            missed[name] = float(np.max(variance[is_free] / known[name][is_free] - 1.0, initial=0.0))
    return missed


def _evenly(size: int) -> np.ndarray:
    """Many points of ``N(0, I)`` of equal mass, by quantiles of a sequence that fills a cube evenly: multiples of
    powers of a number with ``x^(size + 1) = x + 1`` (Niederreiter 1992, chapter 4); shape ``(n, size)``."""
    number = max(np.roots([1.0, *np.zeros(size - 1), -1.0, -1.0]).real)
    steps = number ** -np.arange(1.0, size + 1.0)
    return np.asarray(ndtri((0.5 + np.arange(_NUM_MANY)[:, None] * steps) % 1.0))


def _missed(
    fits_at: FitsAt,
    mode: float,
    look: FarLook,
    densities: np.ndarray,
    far: PointFit,
    fits: PointFit,
    weights: np.ndarray,
) -> dict[str, float]:
    """Shares of variances by a look, and by another one further out where these are large: tails that are not heavy
    fall faster from one to the other, so that less lies beyond."""

    def shares(look: FarLook, densities: np.ndarray, far: PointFit) -> dict[str, np.ndarray]:
        spreads = _spreads(far, fits, weights)
        return {name: look.shares(look.volumes * densities, *spread) for name, spread in spreads.items()}

    found = shares(look, densities, far)
    if not all(np.all(share <= _ENOUGH_FOR_ANOTHER) for share in found.values()):
        further = look.further()
        there = fits_at(further.points)
        for name, share in shares(further, _over_mode(there, mode), there).items():
            found[name] *= look.share_beyond(found[name], share)
    return {name: float(np.max(share, initial=0.0)) for name, share in found.items()}


def _spreads(far: PointFit, fits: PointFit, weights: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Values of each site far out less their means, shape ``(m, v)``, and their variances, ``(v,)``."""
    out = {}
    for name in fits.hyper:
        values, there = (np.asarray(part, float).reshape(len(part), -1) for part in (fits.hyper[name], far.hyper[name]))
        mean = weights @ values
        out[name] = there - mean, weights @ np.square(values - mean)
    return out


def _over_mode(fits: PointFit, mode: float) -> np.ndarray:
    """Densities over that at the mode, one at most."""
    return np.exp(np.where(np.isfinite(fits.objective), np.minimum(fits.objective - mode, 0.0), -np.inf))
