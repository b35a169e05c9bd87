"""The field at points of a design over the hyperparameters, placed around their mode (Rue, Martino and Chopin 2009,
§6.5)."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import numpy as np

from ....structure import ModelStructureError
from ...hyper.density.adaptive import Followed
from ...hyper.density.design import LARGEST_DIMENSION, Design, normal_points
from ...hyper.density.skewed_normal import SkewedNormal
from ...hyper.space import UnconstrainedSpace
from ..fitting.costs import FIT_COSTS
from ..fitting.point_fit import PointFit
from .judgement import (
    bent_message,
    judge_directions,
    judge_normal,
    judge_points,
    judge_ratios,
    judge_tails,
    judge_unfinished,
    opposite_mode,
)
from .outskirts import missed_among_outermost, missed_between_points, missed_by_design, missed_by_points
from .placement import (
    FEW_DIGITS,
    FieldFits,
    Masses,
    Placed,
    masses,
    place_adaptively,
    place_composite,
    place_lattice,
    place_mode,
    place_normal,
)
from .surroundings import NoDesign, Surroundings

Integrate = Literal["auto", "none", "normal", "grid", "ccd", "adaptive"]

_LARGEST_LATTICE = 4
"""Hyperparameters over which a lattice stays below thousands of points."""
MANY_ROWS = 5_000
"""Rows from which on fits of the field are saved where they can be."""
_LARGEST_LATTICE_DIMENSION, _MOST_ADAPTIVE = 2, 20
_NUM_CLOUD = 4000
_LARGEST_MISSED = 0.2
"""Share of a variance beyond a lattice at which points that follow the density are tried instead."""
_LEAST_REACH = 3.0
"""By how much the log density has to fall to where a lattice is cut, for what is cut to be little."""


_METHODS = {
    "grid": "a lattice of {} points",
    "ccd": "a central composite design of {} points",
    "normal": "{} points of their normal approximation",
    "adaptive": "{} points that follow the density",
}


class Integration(NamedTuple):
    """Options of the integration over hyperparameters; see :class:`~numpyro_ext.infer.Engine`."""

    integrate: Integrate
    grid_step: float = 1.25
    """Step of a lattice, in standard deviations: sums over it converge exponentially for smooth densities."""
    log_density_drop: float = 3.8
    """Log density below the mode at which a lattice does not go on."""
    progress_bar: bool = False
    most_points: int = FIT_COSTS.most_points
    """Points at which a lattice is cut."""

    def design(self, size: int, num_rows: int) -> str:
        """The design for so many hyperparameters of a form with so many rows."""
        if self.integrate != "auto":
            return self.integrate
        # A lattice of two takes about twice the fits of a central composite design.
        if size == _LARGEST_LATTICE_DIMENSION and num_rows > MANY_ROWS:
            return "ccd"
        return "grid" if size <= _LARGEST_LATTICE_DIMENSION else "adaptive" if size <= _MOST_ADAPTIVE else "normal"


def check_design(integrate: Integrate, space: UnconstrainedSpace) -> None:
    """Refuse a design that does not take so many hyperparameters.

    :raises ModelStructureError: with their number and what to do.
    """
    largest = {"grid": _LARGEST_LATTICE, "ccd": LARGEST_DIMENSION}.get(integrate)
    if largest is not None and len(space.integrable) > largest:
        sizes = ", ".join(f"{name!r} ({math.prod(space.shapes[name])})" for name in space.names)
        raise ModelStructureError(
            f"integrate={integrate!r} takes up to {largest} hyperparameters, and this model has "
            f"{len(space.integrable)}: {sizes}. Use integrate='normal', or give values to some of them in "
            "hyper_values."
        )


class Exploration(NamedTuple):
    """The field at the points of a design over the hyperparameters."""

    points: np.ndarray
    """Points of the design, shape ``(K, k)``."""
    values: np.ndarray
    """Unconstrained hyperparameters there, shape ``(K, d)``."""
    weights: np.ndarray
    """Posterior masses, shape ``(K,)``, summing to one."""
    log_volumes: np.ndarray
    """Log volume of the space that each point stands for, up to a constant, shape ``(K,)``."""
    fits: PointFit
    """Fits of the field, with a leading axis of ``K``."""
    log_evidence: float
    messages: tuple[str, ...]
    method: str
    """Description of the points in words, as ``"a lattice of 7 points"``; empty where nothing is integrated over."""
    cell: np.ndarray | None = None
    """Standard deviations of the unconstrained hyperparameters within a cell of a lattice, shape ``(d,)``."""
    is_whole: bool = True
    """True if nothing that matters is known to be missing: false of a lattice that was cut near the mode, of a
    central composite design across a bent ridge, and of points that could not follow the density."""
    around: Surroundings | None = None
    """Coordinates of the points."""
    followed: Followed | None = None
    """The density that was emulated through adaptive points."""
    spread: PointFit | None = None
    """Fits at the points by which that was judged, without marginals."""
    nearly_normal: SkewedNormal | None = None
    """The density of which the points are draws of equal mass."""
    error: float | None = None
    """Standard error of the log evidence, where it is estimated."""
    higher: np.ndarray | None = None
    """Unconstrained hyperparameters of a point with a larger density than the mode, shape ``(d,)``."""

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean ``(d,)`` and covariance ``(d, d)`` of the unconstrained hyperparameters.

        They are those of thousands of points where these are known: points of the design are often too few, or too
        unequal in mass, to span the space.
        """
        values, weights = self.values, self.weights
        if self.cloud is not None and self.around is not None:
            points, weights = self.cloud
            values = self.around.place(points)
        mean = weights @ values
        rest = values - mean
        return mean, (rest.T * weights) @ rest

    @property
    def cloud(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Thousands of points and their weights, where the density is known without fits there."""
        if self.followed is not None:
            return self.followed.cloud.points, self.followed.cloud.weights
        if self.nearly_normal is None:
            return None
        normal = normal_points(self.points.shape[1], _NUM_CLOUD).points
        return self.nearly_normal.places(normal), np.full(_NUM_CLOUD, 1.0 / _NUM_CLOUD)


def explore(around: Surroundings, options: Integration, *, has_heavy_tails: bool = False) -> Exploration:
    """Fit the field at the points of a design around the mode of the hyperparameters.

    :param Surroundings around: the mode.
    :param Integration options: which design.
    :param bool has_heavy_tails: whether points that follow the density go outwards in any case.
    :raises NoDesign: if the evidence is finite at none of its points.
    """
    size = around.size
    name = options.design(size, around.num_rows)
    if name in ("adaptive", "normal"):
        around = around.turned()
    at = FieldFits(around)
    if not size:
        placed = place_mode(at)
    elif name == "grid":
        placed = place_lattice(at, options.grid_step, options.log_density_drop, options.most_points)
    elif name == "adaptive":
        placed = place_adaptively(at, is_dear=around.num_rows > MANY_ROWS, has_heavy_tails=has_heavy_tails)
    else:
        placed = place_composite(at) if name == "ccd" else place_normal(at)
    whole = at.take()
    if not len(placed.chosen):
        raise NoDesign("the evidence is not finite at any point of the design around its mode")
    mode, fits = float(whole.objective[0]), jax.tree.map(lambda leaf: leaf[placed.chosen], whole)
    log_volume = 0.5 * np.linalg.slogdet(around.factor.T @ around.factor)[1] if size else 0.0
    found = masses(placed, fits.objective, mode, log_volume)
    missed = _missed(at, placed, found, fits, mode, found.log_evidence - log_volume - mode)
    spread = None if placed.followed is None else at.look(placed.followed.spread)
    at.forget()
    opposite = None
    if around.num_rows <= MANY_ROWS:
        brief = partial(around.fits_of, tol=FEW_DIGITS, with_marginals=False)
        opposite = opposite_mode(around.space, np.asarray(around.fit.last_state.values), brief, mode)
    higher = at.higher()
    if higher is not None or opposite is not None:
        missed = {}  # of which there is a message
    elif (
        options.integrate == "auto" and name == "grid" and not all(part <= _LARGEST_MISSED for part in missed.values())
    ):
        other = explore(around, options._replace(integrate="adaptive"), has_heavy_tails=True)
        if other.is_whole:
            return other
    names, design = around.space.names, Design(placed.design.points, found.log_volumes)
    messages = judge_points(np.asarray(whole.objective), placed.cut, names, None if higher is None else higher.rise)
    of_shape = _judge_shape(placed, fits.objective + design.log_volumes)
    messages += of_shape
    if placed.is_bent:
        messages += bent_message(names)
    messages += judge_directions(size, around.space)
    if opposite is not None:
        messages += opposite.message(around.place(design.points), around.cell(math.sqrt(12.0)), found.log_evidence)
    # "auto" has tried to follow them
    of_tails = judge_tails(missed, is_followed=placed.followed is not None or options.integrate == "auto")
    messages += of_tails + judge_unfinished(~np.asarray(fits.converged), found.weights)
    # no point follows the density along a direction that is left out
    is_followed = size == len(around.factor) and not of_shape and not of_tails
    return Exploration(
        design.points,
        around.place(design.points),
        found.weights,
        design.log_volumes,
        fits,
        found.log_evidence,
        messages,
        _METHODS[name].format(len(found.weights)) if size else "",
        cell=around.cell(options.grid_step) if name == "grid" else None,
        is_whole=not placed.is_bent and is_followed and (placed.cut is None or placed.cut >= _LEAST_REACH),
        around=around,
        followed=placed.followed,
        spread=spread,
        nearly_normal=placed.nearly_normal,
        error=found.error,
        higher=None if higher is None else higher.place,
    )


def _missed(
    at: FieldFits, placed: Placed, found: Masses, fits: PointFit, mode: float, log_integral: float
) -> dict[str, float]:
    """Largest share of a variance of each site that lies where the design has few points or none; nothing where a fit
    is dear or coordinates are many.

    :param FieldFits at: all fits so far.
    :param Placed placed: the design.
    :param Masses found: its masses.
    :param PointFit fits: those at its points.
    :param float mode: log density at the mode.
    :param float log_integral: of the density over that at the mode.
    """
    around, points = at.around, placed.design.points
    if placed.followed is not None:
        return missed_by_points(partial(at.look, from_mode=True), mode, placed.followed, fits)
    if not 0 < around.size <= _MOST_ADAPTIVE or around.num_rows > MANY_ROWS:
        return {}
    # beyond a lattice what it knows predicts states; other designs have no points near by
    fits_at = partial(at.look, from_mode=placed.inner is not None)
    weights, follows = found.weights, placed.inner is None
    missed = missed_by_design(fits_at, mode, around.turn(), points, log_integral, fits, weights, follows=follows)
    if placed.inner is None:
        return missed
    falls = placed.inner if isinstance(placed.inner, np.ndarray) else None
    outer = missed_among_outermost(fits_at, mode, placed.inner, fits, weights, is_signed=falls is not None)
    if falls is not None:
        between = missed_between_points(around.constrained_sites, falls)
        outer = {site: max(0.0, between[site] + share) for site, share in outer.items()}
    # of mass in two places: among the points, and beyond them
    return {site: share + outer[site] for site, share in missed.items()}


def _judge_shape(placed: Placed, log_weights: np.ndarray) -> tuple[str, ...]:
    """Messages on a density that points do not follow, by importance weights; none of designs without such."""
    if placed.followed is not None:
        return judge_ratios(placed.followed.log_ratios)
    if placed.nearly_normal is not None:
        return judge_normal(log_weights, placed.design.points.shape[1] > _MOST_ADAPTIVE)
    return ()
