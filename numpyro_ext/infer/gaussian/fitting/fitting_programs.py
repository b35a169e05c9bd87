"""The compiled functions that search for hyperparameters and fit the field, at points of them too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.collection import return_freed_memory, without_collection
from ....compilation.quick_jit import quick_jit
from ....structure import LatentGaussianReading
from ...hyper import search as hyper_search
from ...hyper.apart import search_apart, turn, visit_apart
from ...hyper.evaluation import Evaluation
from ...hyper.search import EVALUATIONS_PER_CHUNK, SearchState
from ...hyper.space import UnconstrainedSpace
from ...hyper.stacked import at_each
from ...hyper.visits import Visits, search_and_visit
from ..algorithms.algorithm import Algorithm
from .apart_programs import ApartPrograms, SecondDerivatives
from .block_scores import block_scores, has_block_scores, information
from .costs import FIT_COSTS, FitCosts, adds_much, is_small
from .objective import Objective
from .point_fit import PointFit

_MOST_QUICK_SCORES = 15_000
"""Blocks times hyperparameters, up to which second derivatives take less time than their optimisation."""
_LEAST_HYPER = 8
"""Hyperparameters from which probes by the model take longer than to compile others."""
_LEAST_SCORED = 20
"""Hyperparameters from which scores of blocks are a metric; steps of a search tell enough of fewer."""
MOST_CURVED, _MOST_LOCAL = 50, 500
"""Numbers of ``param`` sites, which have no density, up to which the curvature of their evidence is computed: by two
fits of the field for each, and by local factors."""
_STEP_OF_METRIC = 0.05
"""Step of the differences by which a metric is measured; their errors are small beside how curvatures change on the
way."""
POINTS_PER_CALL, _FEW_POINTS, _MOST_STACKED = 9, 3, 2**18
"""Points of the hyperparameters, filled up, at which one call fits the field; and at least, where that is more unknowns
than so many."""


class FittingPrograms(Objective):
    """Compiled functions of ``(data, fixed, values, ...)``: the field at given hyperparameters, and searches over them.
    Parameters are those of :class:`~numpyro_ext.infer.gaussian.programs.Programs`.
    """

    def __init__(
        self,
        reading: LatentGaussianReading,
        algorithm: Algorithm,
        space: UnconstrainedSpace,
        *,
        hyper_tol: float,
        max_iterations: int,
        costs: FitCosts = FIT_COSTS,
        marginals_fn: Callable[..., object] | None = None,
        runs_often: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(reading, algorithm, space, hyper_tol=hyper_tol, **options)
        self._max_iterations = max_iterations
        # One program for searches and fits is less to compile; one for fits alone is worth its optimisation.
        self._marginals_fn = marginals_fn if space.size and not runs_often else None
        form, work = reading.abstract_form, algorithm.numbers_in_evaluation(reading.abstract_form)
        self.is_small = is_small(form, costs) or (work is not None and work <= costs.most_quick_numbers)
        has_long_sweeps = algorithm.has_long_sweeps(form) and space.size > 0
        self._evaluates_apart = (work is not None or has_long_sweeps) and not self.is_small
        self._cuts_evaluations = form.num_rows <= (costs.most_rows_apart if work is None else costs.most_cells_apart)

        # Whether the curvature is left to `probe_locally`.
        num_probes, num_params = space.size * reading.abstract_form.num_rows, space.size - len(space.integrable)
        self.probes_locally = algorithm.has_local_factors and num_params <= _MOST_LOCAL
        self.probes_locally &= space.size >= _LEAST_HYPER and num_probes >= costs.least_probes
        self.has_second_derivatives = algorithm.has_second_derivatives and space.size > 0
        # One hyperparameter has no metric but its own step.
        self.measures_metric = self._marginals_fn is not None and 2 <= space.size < _LEAST_HYPER
        self.measures_metric &= not self.has_second_derivatives
        self.has_block_scores = algorithm.sums_over_blocks and space.size >= _LEAST_SCORED
        self.has_block_scores &= has_block_scores(form, space.size)
        self.measures_metric &= reading.abstract_form.num_rows >= costs.least_measured_rows
        self.has_curvature = self.probes_locally or self.has_second_derivatives or num_params <= MOST_CURVED

        # Of an evaluation, by shapes and dtypes of its point and of the state that it starts from.
        self._shapes: dict[Any, Evaluation] = {}
        self.is_large = POINTS_PER_CALL * form.num_columns > _MOST_STACKED
        few = max(_FEW_POINTS, min(space.size, POINTS_PER_CALL))
        self.points_per_call = few if self.is_large else POINTS_PER_CALL
        is_quick = self.is_small or (form.layout is not None and form.num_rows <= costs.most_sparse_rows)
        self._compile = compile_ = partial(quick_jit, is_small=is_quick)
        self.constrained = compile_(jax.vmap(space.unpack, (0, None)))
        self.solve = compile_(self.fitted, static_argnames="num_steps")
        # of what a run calls once
        self._compile_once = once = partial(quick_jit, is_small=is_quick or self._cuts_evaluations)
        self.init_state, self._init_state_at = once(self._init_state), once(self.first_state)
        self._adds_much = adds_much(form)
        self._search_alone = compile_(self._search, adds_much=self._adds_much)
        self._search_and_visit = compile_(self._visit, adds_much=self._adds_much)
        self._evaluate_alone: Callable[..., tuple[Evaluation, Any]] = compile_(self._evaluate_and_hold)
        self._turn = quick_jit(partial(turn, field_tol=self._field_tol, tol=hyper_tol), is_small=True)
        note = partial(quick_jit, is_small=is_quick or has_long_sweeps)
        self._note = note(self._point_fit, static_argnames="marginals_fn")
        self.probe_locally = compile_(self._probe_locally)
        self._scores = once(self._scores_at)
        num_scores = form.blocks.rows.shape[0] * space.size
        self._apart = ApartPrograms(algorithm, form, self.form_at, self.log_prior, self._num_steps, self.is_small)
        if self._evaluates_apart and self._cuts_evaluations:
            self._evaluate_alone = self._apart.evaluate
        self.second_derivatives = SecondDerivatives(
            algorithm, self.form_at, self.log_prior, self._held_at, self.is_small and num_scores <= _MOST_QUICK_SCORES
        )
        self._fits_alone = quick_jit(
            self._fits,
            is_small=self.is_small and not runs_often,
            adds_much=self._adds_much,
            static_argnames="marginals_fn",
        )

    @property
    def _field_tol(self) -> np.ndarray:
        return np.asarray(self.tol, jnp.result_type(float))

    def differences(self, data: object, fixed: dict[str, Array], search: SearchState) -> np.ndarray:
        """Second derivatives of the objective near the best point of a search, by a difference of gradients along each
        axis: rough ones, for a metric."""
        assert self._marginals_fn is not None
        best, values = search.best, np.asarray(search.values)
        number = self.points_per_call
        index = np.minimum(np.arange(number), values.size - 1)
        points = values + _STEP_OF_METRIC * np.eye(values.size, dtype=values.dtype)
        states = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], number, axis=0), best.state)
        tol = np.asarray(max(self.tol, self._hyper_tol), values.dtype)
        found = self.fits(
            data, fixed, points[index], values.size, states, tol, False, True, marginals_fn=self._marginals_fn
        )
        matrix = (np.asarray(found.gradient)[: values.size] - np.asarray(best.gradient)) / _STEP_OF_METRIC
        return 0.5 * (matrix + matrix.T)

    @without_collection()
    def information(self, data: object, fixed: dict[str, Array], search: SearchState) -> np.ndarray:
        """About minus the second derivatives of the objective at the best point of a search, from the scores of
        independent blocks."""
        scores, prior = self._scores(data, fixed, search)
        return information(np.asarray(scores)) - np.asarray(prior)

    def _scores_at(self, data: object, fixed: dict[str, Array], search: SearchState) -> tuple[Array, Array]:
        scores = block_scores(self.algorithm, self.form_at(data, fixed), search.values, search.best.state)
        return scores, jax.hessian(lambda values: self.log_prior(data, fixed, values))(search.values)

    def _held_at(self, data: object, fixed: dict[str, Array], values: Array, state: object) -> tuple[object, object]:
        """A fit of the field and what it has at hand at its end, by a program of the search if there is one."""
        if self._evaluates_apart and not self._cuts_evaluations:
            found, held = self._evaluate_alone(data, fixed, values, state, self._field_tol)
            return found.state, held
        state, _, held = self._apart.solve(data, fixed, values, state, self._field_tol)
        return state, held

    def _objective(self, data: object, fixed: dict[str, Array]) -> Callable[..., Evaluation]:
        """The objective with fields of the run's own tolerance, or of another one."""
        # Visits, where there are any, make no gradient: one trace for both. What is not given is no input of a program.
        with_gradient = () if self._marginals_fn is None else (np.asarray(True),)

        def objective(values: Array, state: object, tol: object = self._field_tol) -> Evaluation:
            return self.evaluate(data, fixed, values, state, tol, *with_gradient)

        return objective

    @without_collection()
    def search(
        self, data: object, fixed: dict[str, Array], state: SearchState, max_iterations: int, num_evaluations: int
    ) -> tuple[SearchState, Array]:
        """A chunk of a search, see :func:`~numpyro_ext.infer.hyper.search.search`."""
        if self.is_large:
            return_freed_memory()
        if self._evaluates_apart:
            return search_apart(
                lambda values, begun, tol: self._evaluate_alone(data, fixed, values, begun, tol)[0],
                self._turn,
                state,
                num_evaluations=num_evaluations,
                max_iterations=max_iterations,
                trace_length=EVALUATIONS_PER_CHUNK,
            )
        if self._marginals_fn is None:
            return self._search_alone(data, fixed, state, max_iterations, num_evaluations)
        points, states = jax.tree.map(
            lambda leaf: np.zeros((self.points_per_call, *leaf.shape), leaf.dtype), (state.values, state.best.state)
        )
        visits = Visits(points, states, 0, np.asarray(self.tol, points.dtype), floor=_nowhere(points.dtype))
        state, trace, _ = self._search_and_visit(data, fixed, state, visits, False, max_iterations, num_evaluations)
        return state, trace

    @without_collection()
    def fits(
        self,
        data: Any,
        fixed: dict[str, Array],
        points: Any,
        num_points: int,
        states: Any,
        tol: Any,
        with_marginals: bool,
        with_gradient: bool = False,
        floor: Any = None,
        *,
        marginals_fn: Callable[..., Any],
    ) -> PointFit:
        """Fit the field at the first ``num_points`` of :attr:`points_per_call` unconstrained ``points``, one after the
        other, each from the state that stands beside it; of one point, where there is nothing to learn.

        ``marginals_fn`` is a function of the posterior and the maps of the affine sites, for which there are zeros
        where marginals are not asked for. Gradients may be zero where they are not. Objectives that are below a floor
        may have few digits.
        """
        floor = _nowhere(points.dtype) if floor is None else np.asarray(floor, points.dtype)
        if self.is_large:
            return_freed_memory()
        if self._evaluates_apart:
            return visit_apart(
                lambda values, begun: self._evaluate_alone(data, fixed, values, begun, tol, with_gradient),
                lambda values, found, held: self._note(
                    data, fixed, values, found, held, with_marginals, marginals_fn=marginals_fn
                ),
                points,
                states,
                num_points,
            )
        if marginals_fn is not self._marginals_fn:
            wanted = tol, with_marginals, with_gradient, floor
            return self._fits_alone(data, fixed, points, num_points, states, *wanted, marginals_fn=marginals_fn)
        search = self.init_search(data, fixed, points[0], jax.tree.map(itemgetter(0), states))
        none: Any = np.asarray(2 * search.values.size + 1, np.int32)
        search = search._replace(is_searching=np.asarray(False), num_probes=none)  # type: ignore[arg-type]
        visits = Visits(points, states, num_points, tol, with_gradient, floor)
        return self._search_and_visit(data, fixed, search, visits, with_marginals, 0, 0)[2]

    def _visit(
        self,
        data: object,
        fixed: dict[str, Array],
        state: SearchState,
        visits: Visits,
        with_marginals: bool | Array,
        max_iterations: int | Array,
        num_evaluations: int | Array,
    ) -> tuple[SearchState, Array, PointFit]:
        """A search, and fits at points, in one program: most of it is what fits the field."""
        marginals_fn = self._marginals_fn
        assert marginals_fn is not None  # else there are programs for each
        return search_and_visit(
            partial(self.evaluate_and_hold, data, fixed),
            lambda values, found, held, is_visit: self._point_fit(
                data, fixed, values, found, held, is_visit & with_marginals, marginals_fn
            ),
            state,
            visits,
            num_evaluations=num_evaluations,
            field_tol=self._field_tol,
            tol=self._hyper_tol,
            max_iterations=max_iterations,
            trace_length=EVALUATIONS_PER_CHUNK,
        )

    def _fits(
        self,
        data: object,
        fixed: dict[str, Array],
        points: Array,
        num_points: int | Array,
        states: object,
        tol: object,
        with_marginals: bool | Array,
        with_gradient: bool | Array,
        floor: Any,
        *,
        marginals_fn: Callable[..., object],
    ) -> PointFit:
        """:meth:`fits` alone, where there is no search, or one that has been made for another engine."""

        @jax.jit  # traced once, for the shapes and for the loop
        def at(point: tuple[Array, object]) -> PointFit:
            values, state = point
            found, held = self.evaluate_and_hold(data, fixed, values, state, tol, with_gradient, floor)
            return self._point_fit(data, fixed, values, found, held, with_marginals, marginals_fn)

        return at_each(at, (points, states), num_points)

    def _point_fit(
        self,
        data: Any,
        fixed: dict[str, Array],
        values: Array,
        found: Evaluation,
        held: Any,
        with_marginals: bool | Array,
        marginals_fn: Callable[..., Any],
    ) -> PointFit:
        hyper = self.space.unpack(values, fixed)

        @jax.jit  # traced once, for the shapes and for the condition
        def compute() -> Any:
            posterior = self.algorithm.held_posterior(self.form(hyper, data), found.state, held)
            return marginals_fn(posterior, self._reading.maps(hyper, data))

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(compute))
        marginals = jax.lax.cond(with_marginals, compute, lambda: zeros)
        converged = found.info.converged
        return PointFit(found.objective, found.gradient, found.log_evidence, found.state, converged, hyper, marginals)

    def fitted(
        self, data: object, hyper: dict[str, Array], state: object, *, num_steps: int
    ) -> tuple[object, object, Array]:
        """A fit of the field at constrained hyperparameters: its state, how it ended, and the objective."""
        return self.algorithm.fit(self.form(hyper, data), state, num_steps=num_steps, tol=self.tol)

    def _init_state(self, data: object, hyper: dict[str, Array]) -> object:
        return self.algorithm.init(self.form(hyper, data))

    def first_state(self, data: object, fixed: dict[str, Array], values: Array) -> object:
        """The state from which a fit begins, at unconstrained hyperparameters."""
        return self._init_state(data, self.space.unpack(values, fixed))

    @without_collection()
    def init_search(self, data: object, fixed: dict[str, Array], values: Array, state: object) -> SearchState:
        """The search before its first evaluation; ``state`` may be ``None`` for a cold start of the field."""
        if state is None:
            state = self._init_state_at(data, fixed, values)
        key = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((values, state)))
        if key not in self._shapes:
            if self._evaluates_apart and self._cuts_evaluations:
                self._shapes[key] = self._apart.shapes(data, fixed, values, state, self._field_tol)
            else:
                self._shapes[key] = jax.eval_shape(self._objective(data, fixed), values, state)
        shapes = self._shapes[key]
        has_metric = self.has_block_scores or self.probes_locally or self.has_second_derivatives or self.measures_metric
        has_probes = self.has_curvature and not self.has_second_derivatives
        has = {"has_metric": has_metric, "has_curvature": has_probes, "may_be_coarse": True}
        start = hyper_search.init_search(shapes, values, state, **has)
        none: Any = np.asarray(2 * values.size + 1, np.int32)
        return start._replace(num_probes=none) if self.probes_locally else start

    def whole_search(
        self, data: object, fixed: dict[str, Array], start: SearchState, max_iterations: int, trace_length: int
    ) -> tuple[SearchState, Array]:
        """A search to its end within another program, and the objectives of its first evaluations."""
        start = jax.tree.map(jnp.asarray, start)
        return self._search(data, fixed, start, max_iterations, jnp.iinfo(jnp.int32).max, trace_length)

    def _search(
        self,
        data: object,
        fixed: dict[str, Array],
        state: SearchState,
        max_iterations: int | Array,
        num_evaluations: int | Array,
        trace_length: int = EVALUATIONS_PER_CHUNK,
    ) -> tuple[SearchState, Array]:
        return hyper_search.search(
            self._objective(data, fixed),
            state,
            num_evaluations=num_evaluations,
            tol=self._hyper_tol,
            max_iterations=max_iterations,
            trace_length=trace_length,
            field_tol=self._field_tol,
        )

    def posterior(self, data: Any, hyper: dict[str, Array], state: Any) -> Any:
        """The posterior of the unknowns, for programs that ask it something."""
        return self.algorithm.posterior(self.form(hyper, data), state)


def _nowhere(dtype: Any) -> np.ndarray:
    """A floor that nothing is below."""
    return np.asarray(-np.inf, dtype)
