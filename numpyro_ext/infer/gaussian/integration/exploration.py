"""The field at points of a design over the hyperparameters, placed around their mode (Rue, Martino and Chopin 2009,
§6.5)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from scipy.special import logsumexp

from ....structure import ModelStructureError
from ...hyper.density.adaptive import Followed, effective_share, follow
from ...hyper.density.design import (
    LARGEST_DIMENSION,
    PROBE,
    Design,
    central_composite,
    explore_lattice,
    normal_points,
    stretch,
)
from ...hyper.density.known_points import KnownPoints
from ...hyper.density.skewed_normal import NUM_NORMAL_POINTS, SkewedNormal, skewed_normal
from ...hyper.space import UnconstrainedSpace
from ..fitting.costs import FIT_COSTS
from ..fitting.point_fit import PointFit
from .judgement import (
    LARGEST_RISE,
    bent_message,
    highest_above_mode,
    judge_normal,
    judge_points,
    judge_ratios,
    judge_tails,
    opposite_mode,
)
from .outskirts import missed_among_outermost, missed_by_design, missed_by_points
from .surroundings import NoDesign, Surroundings

Integrate = Literal["auto", "none", "normal", "grid", "ccd", "adaptive"]

_LARGEST_LATTICE = 4
"""Hyperparameters over which a lattice stays below thousands of points."""
MANY_ROWS = 5_000
"""Rows from which on fits of the field are saved where they can be."""
_LARGEST_LATTICE_DIMENSION, _MOST_ADAPTIVE = 2, 20
_NUM_CLOUD = 4000
FEW_DIGITS = 1e-2
"""Tolerance of fits for draws."""
_LITTLE_MASS = 0.01
"""Mass of points far out on the sides, where rounding may keep fits from their tolerance, which nobody needs to know
of."""
_LARGEST_FALL = 5.0
"""Fall of the log density on both sides of an axis, to where that of a normal density has fallen by one."""
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


_LOADINGS = (
    " If vectors among them multiply the field, as tastes do items' traits, name what is to be the field by "
    "`field=[...]`, or take `BilinearVG`."
)


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
    factor, parts = around.factor, list[PointFit]()
    known, looked = KnownPoints(), list[tuple[np.ndarray, np.ndarray]]()

    def heights(points: np.ndarray, found: PointFit) -> tuple[PointFit, np.ndarray]:
        found = without_false_peaks(found, looked[0][1][0] if looked else found.objective[0])
        looked.append((points, np.where(np.isfinite(found.objective), found.objective, -np.inf)))
        return found, looked[-1][1]

    def evaluate(points: np.ndarray) -> np.ndarray:
        found, values = heights(points, around.fits(points, known=known))
        parts.append(found)
        return values

    def briefly(points: np.ndarray, states: object) -> PointFit:
        return heights(points, around.fits(points, states, FEW_DIGITS, with_marginals=False))[0]

    spread: PointFit | None = None
    looks: list[tuple[np.ndarray, PointFit]] = []

    def evaluate_last(points: np.ndarray) -> np.ndarray:
        nonlocal spread
        spread = briefly(points, known.states_at(points))
        return looked[-1][1]

    def look(points: np.ndarray) -> np.ndarray:
        looks.append((points, briefly(points, known.states_at(points))))
        return looked[-1][1]

    def slopes(points: np.ndarray) -> np.ndarray:
        return around.slopes(around.fits(points, tol=FEW_DIGITS, with_marginals=False, with_gradient=True))

    followed: Followed | None = None
    nearly_normal: SkewedNormal | None = None
    error, cut, is_bent = None, None, False
    if size == 0:
        evaluate(np.zeros((1, 0)))
        design, chosen = Design(np.zeros((1, 0)), np.zeros(1)), np.zeros(1, int)
    elif name == "grid":
        design, chosen, reach = explore_lattice(
            evaluate, size, options.grid_step, options.log_density_drop, options.most_points
        )
        cut = reach if reach < options.log_density_drop else None
    elif name == "adaptive":
        followed = follow(
            evaluate,
            size,
            evaluate_last,
            look,
            is_dear=around.num_rows > MANY_ROWS,
            values_at=around.constrained,
            has_heavy_tails=has_heavy_tails,
        )
        with np.errstate(divide="ignore"):  # of points without mass
            design, chosen = Design(followed.points, np.log(followed.weights)), followed.chosen
    elif name == "ccd":
        probes = evaluate(_on_axes(size, PROBE))
        falls = (probes[0] - probes[1:]).reshape(2, size)
        is_bent = bool(np.any(np.min(falls, axis=0) > _LARGEST_FALL))
        design = stretch(central_composite(size), falls)
        inside = np.flatnonzero(np.isfinite(evaluate(design.points)))
        design = Design(design.points[inside], design.log_volumes[inside])
        chosen = len(probes) + inside
    else:
        nearly_normal = skewed_normal(slopes, size)
        design = nearly_normal.design(normal_points(size, NUM_NORMAL_POINTS).points)
        found = evaluate(np.concatenate([np.zeros((1, size)), design.points]))
        chosen = 1 + np.flatnonzero(np.isfinite(found[1:]))
        design = Design(design.points[chosen - 1], design.log_volumes[chosen - 1])
    fits = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    mode = float(fits.objective[0])
    parts.clear()  # which functions hold in a circle, so that it would stay until it is collected
    if not len(chosen):
        raise NoDesign("the evidence is not finite at any point of the design around its mode")
    log_volume = 0.5 * np.linalg.slogdet(factor.T @ factor)[1] if size else 0.0
    if nearly_normal is not None:
        log_weights = fits.objective[chosen] + design.log_volumes
        log_evidence = float(logsumexp(log_weights)) - math.log(len(chosen)) + log_volume
        error = math.sqrt((1.0 / effective_share(log_weights) - 1.0) / len(chosen))
        weights = np.full(len(chosen), 1.0 / len(chosen))
    elif followed is not None:
        log_evidence = mode + followed.log_integral + log_volume
        error, weights = followed.error, followed.weights
        with np.errstate(divide="ignore"):
            design = design._replace(log_volumes=np.log(weights) - fits.objective[chosen])
    else:
        log_masses = fits.objective[chosen] + design.log_volumes + log_volume
        log_evidence = float(logsumexp(log_masses))
        weights = np.exp(log_masses - log_evidence)
    # Rounding must not be visible where probabilities are asked to sum to one.
    weights = weights / weights.sum()
    whole, fits = fits, jax.tree.map(lambda leaf: leaf[chosen], fits)
    is_cheap = 0 < size <= _MOST_ADAPTIVE and around.num_rows <= MANY_ROWS
    missed = dict[str, float]()

    def there(points: np.ndarray) -> PointFit:
        # beyond a lattice what it knows predicts states; other designs have no points near by
        return briefly(points, known.states_at(points) if name == "grid" else None)

    if followed is not None:
        far = next(found for points, found in looks if points is followed.seen.look.points)
        missed = missed_by_points(there, mode, followed, far, fits)
    elif is_cheap:
        log_integral = log_evidence - log_volume - mode
        missed = missed_by_design(
            there, mode, around.turn(), design.points, log_integral, fits, weights, follows=name == "grid"
        )
        if name != "grid":
            outer = missed_among_outermost(
                there, mode, falls if nearly_normal is None else nearly_normal, fits, weights
            )
            missed = {site: max(share, outer[site]) for site, share in missed.items()}
    known.clear()
    looks.clear()
    opposite = None
    if around.num_rows <= MANY_ROWS:
        brief = partial(around.fits_of, tol=FEW_DIGITS, with_marginals=False)
        opposite = opposite_mode(around.space, np.asarray(around.fit.last_state.values), brief, mode)
    points, found_heights = (np.concatenate(found) for found in zip(*looked, strict=True))
    highest = highest_above_mode(found_heights)
    higher, rise = None, None
    if highest is not None:
        higher, rise = around.place(points[[highest]])[0], float(found_heights[highest] - found_heights[0])
    messages = judge_points(whole.objective, cut, around.space.names, rise)
    is_followed = size == len(factor)  # no point follows the density along a direction that is left out
    if followed is not None:
        said = judge_ratios(followed.log_ratios)
        is_followed, messages = is_followed and not said, (*messages, *said)
    elif name == "normal" and size:
        said = judge_normal(fits.objective + design.log_volumes, size > _MOST_ADAPTIVE)
        is_followed, messages = is_followed and not said, (*messages, *said)
    if is_bent:
        messages = (*messages, bent_message(around.space.names))
    num_hyper = len(factor)
    if size < num_hyper:
        messages = (
            *messages,
            f"Along {num_hyper - size} of {num_hyper} directions the density of the hyperparameters "
            "does not curve: there they are at their mode and not integrated over."
            + (_LOADINGS if any(math.prod(shape) > 1 for shape in around.space.shapes.values()) else ""),
        )
    if opposite is not None:
        messages += opposite.message(around.place(design.points), around.cell(math.sqrt(12.0)), log_evidence)
    if higher is None and opposite is None:  # of which there is a message
        if options.integrate == "auto" and name == "grid" and max(missed.values(), default=0.0) > _LARGEST_MISSED:
            other = explore(around, options._replace(integrate="adaptive"), has_heavy_tails=True)
            if other.is_whole:
                return other
        said = judge_tails(missed, is_followed=followed is not None)
        is_followed, messages = is_followed and not said, (*messages, *said)
    unfinished = ~np.asarray(fits.converged)
    share = float(weights[unfinished].sum())
    if share > _LITTLE_MASS:
        messages = (
            *messages,
            f"At {int(unfinished.sum())} of {unfinished.size} points, which have {100 * share:.3g} % of the mass, the "
            "field did not converge.",
        )
    return Exploration(
        design.points,
        around.place(design.points),
        weights,
        design.log_volumes,
        fits,
        log_evidence,
        messages,
        _METHODS[name].format(len(weights)) if size else "",
        cell=around.cell(options.grid_step) if name == "grid" else None,
        is_whole=not is_bent and is_followed and (cut is None or cut >= _LEAST_REACH),
        around=around,
        followed=followed,
        spread=spread,
        nearly_normal=nearly_normal,
        error=error,
        higher=higher,
    )


def _on_axes(size: int, distance: float) -> np.ndarray:
    """The centre, and a point on the positive and the negative side of each axis."""
    steps = distance * np.eye(size)
    return np.concatenate([np.zeros((1, size)), steps, -steps])


def without_false_peaks(fits: PointFit, mode: Any) -> PointFit:
    """Fits without the density of those that did not converge and stand above the mode.

    Where its iteration does not settle, the evidence of expectation propagation may be any number: one such point would
    outweigh all others.
    """
    is_false = ~fits.converged & (fits.objective > mode + LARGEST_RISE)
    kept: Any = np.where(is_false, np.nan, fits.objective)
    return fits._replace(objective=kept)
