"""Learning hyperparameters: searches, a judgement of where they ended, and the way on from what is no maximum.

A search ends where the gradient vanishes. That may be a saddle (loadings of a factor model at zero), a plateau (a scale
that a step of the search made tiny), or no stationary point at all but a step function, whose derivative is zero
everywhere. So the point reached is judged by its curvature and by other points, and the search goes on from a better
one until there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....display import listed
from ....structure import ModelStructureError
from ...hyper.curvature import Curvature
from ...hyper.search import SearchState
from ..results import HyperDiagnostics
from .chunks import Interruption
from .climbs import Climb, Searches
from .ends import edges_of, other_maxima
from .symmetries import names_of_directions, why_no_errors

_NO_END = (
    "The search did not come to an end: where it stopped, the objective was higher further back, towards where it "
    "started. Go on from there (init_state=last_state), or give other starting values (init_values)."
)
_ESCAPE_STEPS = (0.5, -0.5, 0.05, -0.05)
_MOST_AXES = 20
_NUM_ROUNDED, _FEW_PLACES, _LARGEST_ROUNDING = 4, 8.0, 4.0
"""Points at which the rounding of derivatives is measured, how many last places they differ by, and what derivatives
may be, in its root mean square: those at the end differ from the true ones as those at the points do."""
_NUM_RANDOM_POINTS = 6


class Learned(NamedTuple):
    """End of the searches."""

    search: SearchState
    curvature: Curvature | None
    """Curvature of the objective there, in the coordinates of the search; ``None`` where it was not computed."""
    diagnostics: HyperDiagnostics
    edges: tuple[str, ...]
    """Hyperparameters at the edge of their support."""
    messages: tuple[str, ...]
    is_interrupted: bool


def learn(
    climb: Climb,
    starts: Sequence[Array],
    rng_key: Array,
    *,
    state: Any = None,
    resumed: SearchState | None = None,
    searched: tuple[SearchState, np.ndarray] | None = None,
    bar: Any,
) -> Learned | None:
    """Search from each start, keep the best end, and go on from it while it is no maximum.

    :param Climb climb: the problem.
    :param starts: coordinates, each of shape ``(d,)``.
    :param rng_key: for the directions in which saddles are left.
    :param state: of the field, where the first fit of each search starts; ``None`` for a cold start.
    :param SearchState resumed: a search to go on with, instead of the starts.
    :param searched: the search from the first start and its objectives, where it has been made already.
    :param bar: of the progress.
    :return: the best end; ``None`` if no start has a finite objective.
    :raises ModelStructureError: if the evidence is a step function of a hyperparameter.
    :raises KeyboardInterrupt: if interrupted before there is anything to keep.
    """
    messages: list[str] = []
    ends: list[SearchState] = []
    with Interruption() as interruption:
        run = Searches(climb, interruption, bar.update)
        try:
            for number, start in enumerate(starts if resumed is None else [resumed.values]):
                if searched is not None and number == 0:
                    begun = searched[0]
                    run.traces.append(searched[1])
                    run.num_evaluations = int(begun.num_evaluations)
                else:
                    begun = climb.begin(start, state) if resumed is None else _reopen(resumed, climb)
                # nothing, where it has ended
                found = run.climb_from(begun, 0 if searched is not None and number == 0 else None)
                ends.append(found)
                if not run.keep(found) and int(found.num_iterations) == 0 and not interruption:
                    messages.append(f"Restart {number} began where the log evidence is not finite and was left out.")
                if interruption:
                    break
            if run.best is None and interruption:
                raise KeyboardInterrupt
            if run.best is None:
                return None
            failure = _go_on(run, rng_key)
        except KeyboardInterrupt:
            if run.current is not None:
                run.keep(run.current)
            if run.best is None:
                raise
            interruption.is_asked, failure = True, None
    curvature = run.curvature()  # which may go on to a better point
    best = run.best
    edges: tuple[str, ...] = ()
    if curvature is not None and curvature.wide_axes.any():
        edges = edges_of(climb.space, jnp.asarray(climb.origin + climb.units * best.values), curvature.wide_axes)
    if not failure and not interruption and bool(best.converged):
        failure = _runaway(run, curvature, edges)
    if interruption:
        messages.append(f"Interrupted after {run.num_evaluations} evaluations.")
    converged = failure is None and _is_top(run, best, curvature, is_interrupted=bool(interruption))
    others = other_maxima(ends, best, curvature, climb.hyper) if len(ends) > 1 else None
    if others is not None:
        messages.append(others)
    if failure is not None:
        messages.append(failure)
    elif curvature is not None and not curvature.is_peak:
        values = np.asarray(climb.origin + climb.units * best.values)
        messages.append(why_no_errors(climb.space, values, np.broadcast_to(climb.units, values.shape), curvature))
    learning = HyperDiagnostics(
        converged=converged,
        num_iterations=int(best.num_iterations) - 1,  # the first evaluation is no step
        num_evaluations=run.num_evaluations,
        objective_trace=np.concatenate(run.traces),
        max_gradient=float(np.max(np.abs(best.best.gradient))),
    )
    return Learned(best, curvature, learning, edges, tuple(messages), bool(interruption))


def _is_top(run: Searches, best: SearchState, curvature: Curvature | None, *, is_interrupted: bool) -> bool:
    """True if a search has ended at a maximum, to rounding."""
    climb, gradient = run.climb, np.asarray(best.best.gradient)
    if curvature is None:
        return bool(best.converged)
    if bool(best.converged):
        # The line search may have met rounding: that is the top only if a Newton step promises nothing.
        is_steep = float(np.max(np.abs(gradient))) > climb.tol
        return not is_steep or 0.5 * float(gradient @ curvature.covariance @ gradient) <= climb.tol
    if is_interrupted or not curvature.is_peak:
        return False
    # Searches that find their curvature themselves have no derivatives that could be rounding.
    return climb.find_curvature is None and _is_top_but_for_rounding(run, curvature)


def _reopen(search: SearchState, climb: Climb) -> SearchState:
    """A search that stopped for want of steps goes on; its curvature is then of no more use."""
    unfinished, none = ~search.converged, 0 if climb.probe_locally is None else 2 * search.values.size + 1
    return search._replace(is_searching=unfinished, num_probes=jnp.where(unfinished, none, search.num_probes))


def _go_on(run: Searches, rng_key: Array) -> str | None:
    """Leave the best point while it is no maximum; says why if it cannot be left."""
    for number in range(run.climb.most_escapes + 1):
        assert run.best is not None
        if run.interruption:
            return None
        curvature = run.curvature()
        higher = _from_unmoved(run)
        if not bool(run.best.converged):
            return None
        if higher is None and curvature is not None:
            higher = _from_plateau(run, curvature)
        if higher is not None:
            start = jnp.asarray(higher, run.climb.origin.dtype)
            is_left = number < run.climb.most_escapes
            is_left = is_left and run.keep(run.climb_from(run.climb.begin(start, run.best.best.state)))
            if not is_left:
                return None if run.interruption else _NO_END
        elif curvature is None or not len(curvature.rising):
            return None
        elif number == run.climb.most_escapes or not _leave_saddle(run, curvature, jax.random.fold_in(rng_key, number)):
            break
    assert curvature is not None
    names = names_of_directions(run.climb.space, curvature.rising)
    return (
        f"The point reached is not a maximum: the objective curves upwards there ({names}), and no search from beside "
        "it ended higher. Give other starting values (init_values) or num_restarts."
    )


def _leave_saddle(run: Searches, curvature: Curvature, rng_key: Array) -> bool:
    """Search from beside a point, in a random direction among those in which the objective curves upwards."""
    assert run.best is not None
    saddle = run.best
    weights = np.asarray(jax.random.normal(rng_key, (len(curvature.rising),)))
    direction = weights @ curvature.rising
    direction /= np.linalg.norm(direction)
    for step in _ESCAPE_STEPS:
        found = run.climb_from(
            run.climb.begin(saddle.values + jnp.asarray(step * direction, saddle.values.dtype), saddle.best.state)
        )
        if run.keep(found):
            return True
        if run.interruption:
            return False
    return False


def _from_plateau(run: Searches, curvature: Curvature) -> np.ndarray | None:
    """A higher point on the way back from a plateau of the objective, if there is one."""
    assert run.best is not None
    values = np.asarray(run.best.values)
    reference = run.climb.coordinates(run.climb.space.initial())
    best, height = None, run.height + max(run.climb.tol, run.rounding)
    for axis in np.flatnonzero(curvature.wide_axes)[:_MOST_AXES]:
        way = reference[axis] - values[axis]
        offsets = way * np.array([0.25, 0.5, 0.75, 1.0]) if abs(way) > 1.0 else np.array([-4.0, -2.0, 2.0, 4.0])
        for offset in offsets:
            point = values.copy()
            point[axis] += offset
            found = float(run.look(point).best.objective)
            if found > height:
                best, height = point, found
    return best


def _runaway(run: Searches, curvature: Curvature | None, edges: tuple[str, ...]) -> str | None:
    """Says which hyperparameters are on a plateau that rises from their start and does not end: there is no maximum."""
    if curvature is None:
        return None
    space = run.climb.space
    reference = run.climb.coordinates(space.initial())
    found: dict[str, list[str]] = {}
    for axis in np.flatnonzero(curvature.wide_axes)[:_MOST_AXES]:
        name, part = next((n, p) for n, p in space.slices.items() if p.start <= axis < p.stop)
        point, height = np.asarray(run.best.values if run.best is not None else reference), run.height
        way = np.zeros_like(point)
        way[axis] = point[axis] - reference[axis]
        if name in edges or np.abs(way[axis]) <= 1.0:
            continue
        behind, ahead = (float(run.look(point + step * way).best.objective) for step in (-1.0, 1.0))
        if behind < height - run.climb.tol and abs(ahead - height) <= run.climb.tol:
            found.setdefault(name, []).append(str(axis - part.start))
    if not found:
        return None
    named = [f"{n!r} ({listed('element', places)})" for n, places in found.items()]
    return (
        f"{', '.join(named)} would grow for ever, or shrink towards the edge of its support: the log evidence rises "
        "towards a plateau without a maximum, as where all observations behind a parameter are the same (a constant "
        "column, separated classes). Give a prior, or leave such data out."
    )


def _is_top_but_for_rounding(run: Searches, curvature: Curvature) -> bool:
    """True if a Newton step promises nothing and the derivatives are no larger than their own rounding, which shows
    in how they differ at points that differ in the last places."""
    assert run.best is not None
    gradient, values = np.asarray(run.best.best.gradient), np.asarray(run.best.values)
    if not 0.5 * float(gradient @ curvature.covariance @ gradient) <= run.climb.tol:
        return False
    spacing = _FEW_PLACES * np.spacing(np.maximum(1.0, np.abs(values)).astype(values.dtype))
    slopes = np.linalg.inv(curvature.covariance)
    off = []
    for signs in np.random.default_rng(0).choice([-1.0, 1.0], (_NUM_ROUNDED, values.size)):
        found = run.look(values + signs * spacing).best.gradient
        off.append(np.asarray(found) - gradient + slopes @ (signs * spacing))
    noise = np.sqrt(np.mean(np.square(off), axis=0))
    return bool(np.all(np.abs(gradient) <= np.maximum(run.climb.tol, _LARGEST_ROUNDING * noise)))


def _from_unmoved(run: Searches) -> np.ndarray | None:
    """Start of a search whose log evidence never had a derivative: a point at which it depends on the hyperparameter,
    if there is one.

    :return: a higher point, if it turns out to have derivatives elsewhere.
    :raises ModelStructureError: if it changes without ever having one.
    """
    if run.moved.all():
        return None
    assert run.best is not None
    climb, origin = run.climb, run.best
    best, height = None, run.height + max(climb.tol, run.rounding)
    least = max(climb.tol, 1e-6 * abs(float(origin.best.log_evidence)))
    for name, part in climb.space.slices.items():
        still = np.flatnonzero(~run.moved[part]) + part.start
        if not len(still):
            continue
        changes, has_slope = False, False
        # The same points in every run: what is refused should not depend on a key.
        shifts = 2.0 * np.random.default_rng(0).normal(size=(_NUM_RANDOM_POINTS, len(still)))
        for shift in shifts:
            point = np.asarray(origin.values).copy()
            point[still] += shift / np.broadcast_to(climb.units, point.shape)[still]
            found = run.look(point)
            changes |= abs(float(found.best.log_evidence) - float(origin.best.log_evidence)) > least
            has_slope |= bool(np.asarray(found.moved)[still].any())
            if float(found.best.objective) > height:
                best, height = point, float(found.best.objective)
        if changes and not has_slope:
            raise ModelStructureError(
                f"Hyperparameter {name!r} cannot be learned by its derivative: the log evidence changes with it, but "
                "in steps, with derivative zero everywhere (it enters through a comparison, an index or rounding). "
                f"Give its value (hyper_values={{{name!r}: ...}}) and compare log_evidence, write a smooth version "
                "(jax.nn.sigmoid((x - threshold) / width) for x > threshold), sum over its values inside the model, "
                "or sample it by MCMC."
            )
    return best
