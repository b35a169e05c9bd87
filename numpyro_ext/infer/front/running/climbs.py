"""Searches of one run: each climbs in chunks to its end or an interruption, and the best end is kept,
with the gradients beside it that its curvature is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...hyper import search as hyper_search
from ...hyper.curvature import Curvature, curvature, hessian, hessian_error
from ...hyper.digits import difference_step
from ...hyper.metric import is_due, with_metric, without_leaps
from ...hyper.search import EVALUATIONS_PER_CHUNK, SearchState
from ...hyper.space import UnconstrainedSpace
from .chunks import Interruption

_EVALUATIONS_OF_METRICS = 4, 13
"""Evaluations after which a rough metric is made anew, and up to which; later it is an exact one, after each chunk."""
_EVALUATIONS_BEFORE_DIFFERENCES = 3
"""Evaluations after which a metric is measured by differences; shorter searches need none."""


class Climb(NamedTuple):
    """A search problem in coordinates ``x``; the unconstrained hyperparameters are the first ``d`` of
    ``origin + units x``, and all of them unless the field is searched over as well."""

    begin: Callable[[Array, Any], SearchState]
    """``(x, state)``: a search before its first evaluation; ``state`` of the field, or ``None`` for a cold start."""
    advance: Callable[[SearchState, int, int], tuple[SearchState, Array]]
    """``(search, max_iterations, num_evaluations)``: the search after a chunk, and the objectives in it."""
    space: UnconstrainedSpace
    origin: Array | np.ndarray
    units: Array | np.ndarray
    tol: float
    max_steps: int
    """Accepted steps of each search at most."""
    with_curvature: bool = True
    find_curvature: Callable[[Searches], Curvature] | None = None
    """Curvature at the best point, where searches make no probes; it may go on to a better one before."""
    probe_locally: Callable[[SearchState, Any], SearchState] | None = None
    """``(search, is_held)``: the probes of a search that has made none, at less than their cost, see
    :func:`~.probes.probed`; or at the cost of a few evaluations those with a curvature that will do as a metric."""
    second_derivatives: Callable[..., tuple[Array, Array]] | None = None
    """``(search, is_rough=)``: second derivatives of the objective at the best point of a search, where they are
    known without probes, as the sum of those with the unknowns known and what is lost as they are not; a rough estimate
    of them is a metric from the first step on."""
    differences: Callable[[SearchState], np.ndarray] | None = None
    """Second derivatives of the objective near the best point of a search, by an evaluation for each coordinate, for a
    metric soon after the start."""
    information: Callable[[SearchState], np.ndarray] | None = None
    """About minus the second derivatives of the objective at the best point of a search, at the cost of an evaluation
    or two: a metric from the first step on."""
    num_first: int = 1
    """Evaluations of the first chunk of a search: one, to have something soon, where they take time."""
    most_escapes: int = 5
    """Points that are no maximum which a run leaves at most."""

    def hyper(self, x: Array) -> dict[str, Array]:
        """All hyperparameters, constrained."""
        return self.space.unpack(jnp.asarray(self.origin + self.units * x))

    def coordinates(self, values: Array) -> np.ndarray:
        """The inverse: from unconstrained hyperparameters."""
        return (np.asarray(values) - np.asarray(self.origin)) / np.asarray(self.units)


class Searches:
    """The searches of one run: the best end so far, and what they have met on their way."""

    def __init__(self, climb: Climb, interruption: Interruption, progress: Callable[[int], object]) -> None:
        self.climb, self.interruption, self.progress = climb, interruption, progress
        self.best: SearchState | None = None
        self.current: SearchState | None = None
        self._judged: tuple[SearchState, Curvature] | None = None
        self.moved = np.zeros(climb.space.size, bool)
        self.traces = [np.zeros(0)]
        self.num_evaluations = 0

    def climb_from(self, search: SearchState, begun_at: int | None = None) -> SearchState:
        """Search to the end, or to an interruption.

        :param begun_at: of its iterations, the one from which steps are counted; by default the current one.
        """
        limit = (int(search.num_iterations) if begun_at is None else begun_at) + self.climb.max_steps
        is_first = True
        while True:
            if bool(hyper_search.is_finished(search)):
                if not search.is_coarse or int(search.num_iterations) == 0:
                    break
                search = self.current = self._with_digits(search, limit)
                continue
            if self.interruption and not (is_first and self.best is None):
                if search.is_coarse and int(search.num_iterations) > 0:
                    search = self.current = self._with_digits(search, limit)
                break
            before = int(search.num_iterations)
            search, trace = self._advance(search, limit, self._num_evaluations(search, is_first))
            self.current = search
            self.traces.append(trace)
            self.progress(int(search.num_iterations) - before)
            if self._is_metric_due(search):
                search = self.current = with_metric(search, self._metric(search))
            if self.climb.differences is not None and not is_first and self._is_unmeasured(search):
                curved = self.climb.differences(search)
                self.num_evaluations += len(curved)
                search = self.current = with_metric(search, curved)
            is_first = False
            probe_locally = self.climb.probe_locally if self.climb.information is None else None
            if probe_locally is not None and search.metric is not None and is_due(search):
                measured = probe_locally(search, np.asarray(True))
                search = self.current = with_metric(search, hessian(measured, tol=self.climb.tol))
        self.moved |= np.asarray(search.moved)
        return search

    def _num_evaluations(self, search: SearchState, is_first: bool) -> int:
        """Evaluations of the next chunk."""
        if is_first:
            return self.climb.num_first
        if self.climb.differences is not None and self._is_unmeasured(search):
            return max(1, _EVALUATIONS_BEFORE_DIFFERENCES - int(search.num_evaluations))
        has_metrics = self.climb.second_derivatives is not None or self.climb.information is not None
        is_early = has_metrics and int(search.num_evaluations) < _EVALUATIONS_OF_METRICS[-1]
        return _EVALUATIONS_OF_METRICS[0] if is_early else EVALUATIONS_PER_CHUNK

    def _is_unmeasured(self, search: SearchState) -> bool:
        return bool(search.is_searching) and int(search.num_iterations) > 0 and not np.any(search.metric)

    def _is_metric_due(self, search: SearchState) -> bool:
        if not bool(search.is_searching) or int(search.num_iterations) == 0:
            return False
        if self.climb.information is None:
            return self.climb.second_derivatives is not None
        # What the steps have told of it is worth keeping, once the metric is that of the maximum.
        return int(search.num_evaluations) <= _EVALUATIONS_OF_METRICS[-1] or is_due(search)

    def _metric(self, search: SearchState) -> np.ndarray:
        if self.climb.information is not None:
            return -self.climb.information(search)
        is_rough = int(search.num_evaluations) <= _EVALUATIONS_OF_METRICS[-1]
        return without_leaps(*self._second_derivatives(search, is_rough))

    def _with_digits(self, search: SearchState, limit: int) -> SearchState:
        """A search that has ended with few digits of the field goes on with all of them, if it has steps left."""
        found = self._look(search.values, search.best.state)
        best, is_known = found.best, int(found.num_iterations) > 0
        gradient, number = np.asarray(best.gradient), int(search.num_probes)
        is_top = is_known and float(np.max(np.abs(gradient), initial=0.0)) <= self.climb.tol
        constant: Callable[..., Any] = np.array
        direction: Any = gradient / np.maximum(1.0, np.linalg.norm(gradient)).astype(gradient.dtype)
        return search._replace(
            best=best if is_known else search.best,
            direction=direction,
            step_size=constant(1.0, gradient.dtype),
            lower=constant(0.0, gradient.dtype),
            upper=constant(np.inf, gradient.dtype),
            num_trials=constant(0, np.int32),
            num_probes=constant(0 if number <= 2 * gradient.size else number, np.int32),
            is_searching=constant(is_known and not is_top and int(search.num_iterations) <= limit),
            converged=constant(is_top),
            is_coarse=constant(False),
        )

    def _advance(self, search: SearchState, limit: int, num_evaluations: int) -> tuple[SearchState, np.ndarray]:
        before = int(search.num_evaluations)
        search, trace = jax.block_until_ready(self.climb.advance(search, limit, num_evaluations))
        self.num_evaluations += int(search.num_evaluations) - before
        self.moved |= np.asarray(search.moved)
        return search, np.asarray(trace)[~np.isnan(np.asarray(trace))]

    def keep(self, search: SearchState) -> bool:
        """True if a search ended higher than all before it; it is then the best."""
        if int(search.num_iterations) == 0:
            return False
        if self.best is not None and not float(search.best.objective) > self.height + self.rounding:
            return False
        self.best = search
        return True

    @property
    def height(self) -> float:
        return float(self.best.best.objective) if self.best is not None else -np.inf

    @property
    def rounding(self) -> float:
        return 10.0 * float(jnp.finfo(self.climb.origin.dtype).eps) * max(1.0, abs(self.height))

    def look(self, x: np.ndarray) -> SearchState:
        """A single evaluation, from the state of the best point."""
        assert self.best is not None
        return self._look(x, self.best.best.state)

    def _look(self, x: np.ndarray | Array, state: object) -> SearchState:
        start = self.climb.begin(jnp.asarray(x, self.climb.origin.dtype), state)
        start = start._replace(num_probes=jnp.asarray(2 * start.values.size, jnp.int32))
        found, trace = self._advance(start, 0, 1)
        self.traces.append(trace)
        return found

    def _second_derivatives(self, search: SearchState, is_rough: bool) -> tuple[np.ndarray, np.ndarray]:
        assert self.climb.second_derivatives is not None
        complete, lost = map(np.asarray, self.climb.second_derivatives(search, is_rough=is_rough))
        return 0.5 * (complete + complete.T), 0.5 * (lost + lost.T)

    def curvature(self) -> Curvature | None:
        """Curvature at the best point, if all its probes were made and finite."""
        search, climb = self.best, self.climb
        assert search is not None
        if climb.second_derivatives is not None:
            if int(search.num_iterations) == 0:
                return None
            if self._judged is None or self._judged[0] is not search:
                matrix = np.sum(self._second_derivatives(search, False), axis=0)
                if not np.isfinite(matrix).all():
                    return None
                self._judged = search, curvature(matrix, tol=climb.tol)
            return self._judged[1]
        if climb.find_curvature is not None:
            if self._judged is None or self._judged[0] is not search:
                found = climb.find_curvature(self)  # which may go on to a better point
                assert self.best is not None
                self._judged = self.best, found
            return self._judged[1]
        if climb.probe_locally is not None and int(search.num_probes) > 2 * search.values.size:
            search = self.best = probed(self, climb.probe_locally, search)
        is_rough = climb.with_curvature and int(search.num_probes) == 2 * search.values.size
        if not is_rough or not bool(np.all(np.isfinite(search.probes))):
            return None
        return curvature(hessian(search, tol=climb.tol), tol=climb.tol)


def probed(run: Any, probe_locally: Callable[[SearchState, object], SearchState], search: SearchState) -> SearchState:
    """An ended search with its probes: the cheap ones if the model agrees with them, else its own.

    The second derivatives of the cheap ones are compared with the model's along a direction that all coordinates have a
    part in, so that an error in any of them is in the product, and along the one in which they curve downwards the
    least: what is judged is never a curvature of something else.

    :param run: the searches of the run, for evaluations of the model.
    :param probe_locally: ``(search, is_held)``: fills in cheap probes, or leaves the search as it is where there are
        none.
    :param SearchState search: without probes.
    :return: with probes, unless the run was interrupted.
    """
    found = probe_locally(search, np.asarray(False))
    if int(found.num_probes) == 2 * search.values.size and bool(np.all(np.isfinite(found.probes))):
        matrix = hessian(found, tol=run.climb.tol)
        if all(_agrees(run, search, matrix, direction) for direction in _directions(matrix)):
            return found
    return run.climb_from(search._replace(num_probes=jnp.zeros_like(jnp.asarray(search.num_probes))))


def _directions(matrix: np.ndarray) -> list[np.ndarray]:
    units = 1.0 / np.sqrt(np.maximum(np.abs(np.diagonal(matrix)), np.finfo(matrix.dtype).tiny))
    units = np.minimum(units, 1e3 * units.min())  # a plateau does not drown the others
    # The same direction in every run: what is judged should not depend on a key.
    noise = np.random.default_rng(0).normal(size=units.shape).astype(matrix.dtype)
    least = np.linalg.eigh(units[:, None] * matrix * units)[1][:, -1]
    return [units * x / np.linalg.norm(units * x) for x in (noise, least)]


def _agrees(run: Any, search: SearchState, matrix: np.ndarray, direction: np.ndarray) -> bool:
    step = difference_step(matrix.dtype, run.climb.tol)
    ahead, behind = (run.look(np.asarray(search.values) + side * direction).best for side in (step, -step))
    if not (np.isfinite(ahead.objective) and np.isfinite(behind.objective)):
        return False
    product = (np.asarray(ahead.gradient) - np.asarray(behind.gradient)) / (2.0 * step)
    return hessian_error(matrix, direction, product, tol=run.climb.tol) < 1.0
