"""The compiled functions that a run is made of, shared by all runs of the same structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.recent import Recent
from ...structure import LatentGaussianReading
from ...structure.latent_gaussian.form import AffineMap, LatentGaussian
from ...structure.program.chosen_rows import ChosenIndices, ChosenRows
from ..front.answers.draws import Draws
from ..hyper import search as hyper_search
from ..hyper.search import EVALUATIONS_PER_CHUNK, Evaluation, SearchState
from ..hyper.space import UnconstrainedSpace
from ..hyper.visits import Visits, search_and_visit
from .algorithms.algorithm import Algorithm
from .answers.leave_one_out import log_factors_at_draws, log_leave_one_out
from .answers.prediction import log_predictive_factors

__all__ = ["MOST_CURVED", "POINTS_PER_CALL", "PointFit", "Programs", "compiled_form", "compiled_programs"]

_LARGEST_BATCH = 10_000_000
_MOST_SMALL_ROWS, _MOST_SMALL_NUMBERS = 500, 20_000
_LEAST_HYPER, _LEAST_PROBES = 8, 50_000
"""Hyperparameters, and these times rows, from which probes by the model take longer than to compile others."""
MOST_CURVED, _MOST_LOCAL = 50, 500
"""Numbers of ``param`` sites, which have no density, up to which the curvature of their evidence is computed: by two
fits of the field for each, and by local factors."""
POINTS_PER_CALL = 9
"""Points of the hyperparameters, filled up, at which one call fits the field."""
_LONGEST_TRACE = 500
"""Evaluations of a whole search whose objectives are kept; a search may make more."""
_COMPILED, _FORMS = Recent(16), Recent(16)


class PointFit(NamedTuple):
    """The fit of the field at one point of the hyperparameters."""

    objective: Array
    """Log evidence plus log prior density, as in the search."""
    log_evidence: Array
    state: Any
    converged: Array
    hyper: dict[str, Array]
    """All hyperparameters, constrained."""
    marginals: Any
    """What was asked of the posterior there."""


class Programs:
    """Compiled functions of ``(data, hyper, ...)`` for one model structure and one algorithm.

    ``data`` are the arrays of a reading, ``hyper`` its hyperparameters (constrained), ``state`` the state of the
    algorithm. Functions compile on first use; another reading of the same structure runs them as they are.

    :param LatentGaussianReading reading: any reading of the structure.
    :param Algorithm algorithm: the algorithm.
    :param UnconstrainedSpace space: of the hyperparameters that are learned.
    :param int num_steps: steps of one fit of the field at most.
    :param float tol: at which the algorithm stops.
    :param float hyper_tol: largest derivative of the objective at which the hyperparameters are accepted.
    :param int max_iterations: steps of the hyperparameter search at most.
    :param bool is_density_unconstrained: whether the prior density of the hyperparameters is per unit of the
        unconstrained space, in which they are to be integrated, and not per unit of their own.
    :param marginals_fn: what :meth:`fits` are to find at points of the hyperparameters; ``None`` if none are planned.
    """

    def __init__(
        self,
        reading: LatentGaussianReading,
        algorithm: Algorithm,
        space: UnconstrainedSpace,
        *,
        num_steps: int,
        tol: float,
        hyper_tol: float,
        max_iterations: int,
        is_density_unconstrained: bool = False,
        marginals_fn: Callable[..., Any] | None = None,
    ) -> None:
        self._reading = reading
        self._algorithm = algorithm
        self._space = space
        self._num_steps = num_steps
        self.tol = tol
        self._hyper_tol = hyper_tol
        self._max_iterations = max_iterations
        self._is_density_unconstrained = is_density_unconstrained
        self._marginals_fn = marginals_fn if space.size else None

        # Whether the curvature is left to `probe_locally`.
        num_probes, num_params = space.size * reading.abstract_form.num_rows, space.size - len(space.integrable)
        self.probes_locally = algorithm.localised is not None and num_params <= _MOST_LOCAL
        self.probes_locally &= space.size >= _LEAST_HYPER and num_probes >= _LEAST_PROBES
        self.has_curvature = self.probes_locally or num_params <= MOST_CURVED

        # Compiled only as a part of others, but traced once for all of them.
        self.evaluate = jax.jit(self._evaluate)
        # Of an evaluation, by shapes and dtypes of its point and of the state that it starts from.
        self._shapes: dict[Any, Evaluation] = {}
        compile_ = partial(quick_jit, is_small=_is_small(reading.abstract_form))
        self.solve = compile_(self._solve, static_argnames="num_steps")
        self.init_state = compile_(self._init_state)
        self._search_alone = compile_(self._search)
        self._search_and_visit = compile_(self._visit)
        self.probe_locally = compile_(self._probe_locally)
        # These run often, so that optimisation pays.
        self.searches = quick_jit(self._searches, static_argnames="max_iterations")
        self.solves = quick_jit(self._solves, static_argnames="num_steps")
        self.draws_over = quick_jit(self._draws_over, static_argnames=("num_samples", "is_weighted"))
        self._fits_alone = compile_(self._fits, static_argnames="marginals_fn")
        self.moments = compile_(self._moments)
        self.covariance = compile_(self._covariance, static_argnames="name")
        self.chosen_marginals = compile_(self._chosen_marginals, static_argnames=("chosen", "marginals_fn"))
        self.chosen_covariance = compile_(self._chosen_covariance, static_argnames="chosen")
        self.draw_site = compile_(self._draw_site, static_argnames=("name", "num_samples"))
        self.draws = compile_(self._draws, static_argnames=("num_samples", "is_weighted"))
        self.stacked_moments = compile_(self._stacked_moments, static_argnames="names")
        self.marginals = compile_(self._marginals, static_argnames="marginals_fn")
        self.rows = compile_(self._rows)
        self.log_predictive = compile_(self._log_predictive)
        self.leave_one_out = compile_(self._leave_one_out)
        self.log_factors_at_draws = compile_(self._log_factors_at_draws)
        self.weight_inputs = compile_(self._weight_inputs)
        self.fold_predictive = compile_(self._fold_predictives, static_argnames="batch_size")

    def _evaluate(self, data: Any, fixed: dict[str, Array], values: Array, state: Any, tol: Any) -> Evaluation:
        """The objective of the hyperparameter search; see :func:`~numpyro_ext.infer.hyper.search.evaluation_fn`."""
        reading, space = self._reading, self._space
        evaluate = self._evaluation(data, fixed, lambda values: reading.form(space.unpack(values, fixed), data), tol)
        return evaluate(values, state)

    def _evaluation(
        self,
        data: Any,
        fixed: dict[str, Array],
        form_fn: Callable[[Array], LatentGaussian],
        tol: Any,
        solve_fn: Callable[..., tuple[Any, Any]] | None = None,
    ) -> Callable[[Array, Any], Evaluation]:
        return hyper_search.evaluation_fn(
            form_fn=form_fn,
            log_prior_fn=lambda values: self._log_prior(data, fixed, values),
            solve_fn=partial(solve_fn or self._algorithm.solve, num_steps=self._num_steps, tol=tol),
            log_evidence_fn=self._algorithm.log_evidence,
            value_fn=lambda info: info.objective,
        )

    def _probe_locally(
        self, data: Any, fixed: dict[str, Array], state: SearchState, is_held: bool | Array = False
    ) -> SearchState:
        """The probes of the curvature at the best point of a search, with factors that cost little in the place of the
        model's; none where there are no such factors.

        ``is_held`` leaves out how the field answers: the curvature is then one of the evidence that holds its state,
        which takes no fits, and is that of the evidence but for information that the field hides.
        """
        algorithm = self._algorithm

        def form_fn(values: Array) -> LatentGaussian:
            return self._reading.form(self._space.unpack(values, fixed), data)

        near = None if algorithm.localised is None else algorithm.localised(form_fn(state.values), state.best.state)
        if near is None:
            return state

        def solve(form: LatentGaussian, start: Any, **options: Any) -> tuple[Any, Any]:
            held = start, state.best.info
            fitted: tuple[Any, Any] = jax.lax.cond(
                is_held, lambda: held, lambda: algorithm.solve(form, start, **options)
            )
            return fitted

        # To a small part of the gradients' own tolerance, which is what the step of the differences reckons with.
        tol = max(self.tol, 1e-2 * self._hyper_tol)
        evaluate = self._evaluation(data, fixed, lambda values: near(form_fn(values)), tol, solve)
        axes = np.eye(state.values.size, dtype=state.values.dtype)
        steps = hyper_search.difference_step(axes.dtype, self._hyper_tol) * np.stack([axes, -axes], axis=1)
        probes = jax.lax.map(
            lambda step: evaluate(state.values + step, state.best.state).gradient, steps.reshape(-1, len(axes))
        )
        num_probes = jnp.asarray(len(probes), state.num_probes.dtype)
        return state._replace(probes=probes.reshape(state.probes.shape), num_probes=num_probes)

    def _objective(self, data: Any, fixed: dict[str, Array]) -> Callable[[Array, Any], Evaluation]:
        """The objective with the fields of the run's own tolerance."""
        tol = np.asarray(self.tol, jnp.result_type(float))
        return lambda values, state: self.evaluate(data, fixed, values, state, tol)

    def _log_prior(self, data: Any, fixed: dict[str, Array], values: Array) -> Array:
        total = self._reading.log_prior(self._space.unpack(values, fixed), data)
        return total + self._space.log_volume(values) if self._is_density_unconstrained else total

    def search(
        self, data: Any, fixed: dict[str, Array], state: SearchState, max_iterations: int, num_evaluations: int
    ) -> tuple[SearchState, Array]:
        """A chunk of a search, see :func:`~numpyro_ext.infer.hyper.search.search`."""
        if self._marginals_fn is None:
            found: tuple[SearchState, Array] = self._search_alone(data, fixed, state, max_iterations, num_evaluations)
            return found
        points, states = jax.tree.map(
            lambda leaf: np.zeros((POINTS_PER_CALL, *leaf.shape), leaf.dtype), (state.values, state.best.state)
        )
        visits = Visits(points, states, 0, np.asarray(self.tol, points.dtype))
        state, trace, _ = self._search_and_visit(data, fixed, state, visits, False, max_iterations, num_evaluations)
        return state, trace

    def fits(
        self,
        data: Any,
        fixed: dict[str, Array],
        points: Any,
        num_points: int,
        states: Any,
        tol: Any,
        with_marginals: bool,
        *,
        marginals_fn: Callable[..., Any],
    ) -> PointFit:
        """Fit the field at the first ``num_points`` of :data:`POINTS_PER_CALL` unconstrained ``points``, one after the
        other, each from the state that stands beside it; of one point, where there is nothing to learn.

        ``marginals_fn`` is a function of the posterior and the maps of the affine sites, for which there are zeros
        where marginals are not asked for.
        """
        if marginals_fn is not self._marginals_fn:
            fits: PointFit = self._fits_alone(
                data, fixed, points, num_points, states, tol, with_marginals, marginals_fn=marginals_fn
            )
            return fits
        search = self.init_search(data, fixed, points[0], jax.tree.map(itemgetter(0), states))
        none: Any = np.asarray(2 * search.values.size + 1, np.int32)
        search = search._replace(is_searching=np.asarray(False), num_probes=none)  # type: ignore[arg-type]
        visits = Visits(points, states, num_points, tol)
        found: PointFit = self._search_and_visit(data, fixed, search, visits, with_marginals, 0, 0)[2]
        return found

    def _visit(
        self,
        data: Any,
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
            lambda values, state, tol: self.evaluate(data, fixed, values, state, tol),
            lambda values, found, is_visit: self._point_fit(
                data, fixed, values, found, is_visit & with_marginals, marginals_fn
            ),
            state,
            visits,
            num_evaluations=num_evaluations,
            field_tol=np.asarray(self.tol, jnp.result_type(float)),
            tol=self._hyper_tol,
            max_iterations=max_iterations,
            trace_length=EVALUATIONS_PER_CHUNK,
        )

    def _fits(
        self,
        data: Any,
        fixed: dict[str, Array],
        points: Array,
        num_points: int | Array,
        states: Any,
        tol: Any,
        with_marginals: bool | Array,
        *,
        marginals_fn: Callable[..., Any],
    ) -> PointFit:
        """:meth:`fits` alone, where there is no search, or one that has been made for another engine."""

        @jax.jit  # traced once, for the shapes and for the loop
        def at(point: tuple[Array, Any]) -> PointFit:
            values, state = point
            found = self.evaluate(data, fixed, values, state, tol)
            return self._point_fit(data, fixed, values, found, with_marginals, marginals_fn)

        found: PointFit = _at_each(at, (points, states), num_points)
        return found

    def _point_fit(
        self,
        data: Any,
        fixed: dict[str, Array],
        values: Array,
        found: Evaluation,
        with_marginals: bool | Array,
        marginals_fn: Callable[..., Any],
    ) -> PointFit:
        hyper = self._space.unpack(values, fixed)

        def compute() -> Any:
            return marginals_fn(self._posterior(data, hyper, found.state), self._reading.maps(hyper, data))

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(compute))
        marginals = jax.lax.cond(with_marginals, compute, lambda: zeros)
        return PointFit(found.objective, found.log_evidence, found.state, found.info.converged, hyper, marginals)

    def _solve(self, data: Any, hyper: dict[str, Array], state: Any, *, num_steps: int) -> tuple[Any, Any, Array]:
        form = self._reading.form(hyper, data)
        state = self._algorithm.init(form) if state is None else state
        state, info = self._algorithm.solve(form, state, num_steps=num_steps, tol=self.tol)
        log_evidence = self._algorithm.log_evidence(form, state) if info.objective is None else info.objective
        return state, info, log_evidence

    def _solves(self, data: Any, hyper: dict[str, Array], *, num_steps: int) -> tuple[Any, Any, Array]:
        """:meth:`_solve` from the start, for data of several data sets, stacked."""
        found: tuple[Any, Any, Array] = jax.lax.map(
            lambda one: self._solve(one, hyper, None, num_steps=num_steps), data
        )
        return found

    def _init_state(self, data: Any, hyper: dict[str, Array]) -> Any:
        return self._algorithm.init(self._reading.form(hyper, data))

    def init_search(self, data: Any, fixed: dict[str, Array], values: Array, state: Any) -> SearchState:
        """The search before its first evaluation; ``state`` may be ``None`` for a cold start of the field."""
        if state is None:
            state = self.init_state(data, self._space.unpack(values, fixed))
        key = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((values, state)))
        if key not in self._shapes:
            self._shapes[key] = jax.eval_shape(self._objective(data, fixed), values, state)
        shapes = self._shapes[key]
        has = {"has_metric": self.probes_locally, "has_curvature": self.has_curvature}
        start = hyper_search.init_search(shapes, values, state, **has)
        none: Any = np.asarray(2 * values.size + 1, np.int32)
        return start._replace(num_probes=none) if self.probes_locally else start

    def _searches(
        self, data: Any, fixed: dict[str, Array], values: Array, *, max_iterations: int
    ) -> tuple[SearchState, Array]:
        """Whole searches and their objectives, for data and starting values of several data sets, stacked.

        One after the other: together, each would wait for the slowest, and conditions would compute both branches.
        """

        def one(inputs: tuple[Any, Array]) -> tuple[SearchState, Array]:
            data, values = inputs
            state = self._init_state(data, self._space.unpack(values, fixed))
            start = jax.tree.map(jnp.asarray, self.init_search(data, fixed, values, state))
            return self._search(data, fixed, start, max_iterations, jnp.iinfo(jnp.int32).max, _LONGEST_TRACE)

        found: tuple[SearchState, Array] = jax.lax.map(one, (data, values))
        return found

    def _search(
        self,
        data: Any,
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
        )

    def _posterior(self, data: Any, hyper: dict[str, Array], state: Any) -> Any:
        return self._algorithm.posterior(self._reading.form(hyper, data), state)

    def _moments(self, data: Any, hyper: dict[str, Array], state: Any) -> dict[str, tuple[Array, Array]]:
        posterior = self._posterior(data, hyper, state)
        return {n: posterior.mean_and_variance(map_) for n, map_ in self._reading.maps(hyper, data).items()}

    def _marginals(self, data: Any, hyper: dict[str, Array], state: Any, *, marginals_fn: Callable[..., Any]) -> Any:
        return marginals_fn(self._posterior(data, hyper, state), self._reading.maps(hyper, data))

    def _rows(self, data: Any, hyper: dict[str, Array], state: Any) -> tuple[Any, Array, Array, Array]:
        """The posterior, mean and variance of the predictors, and log factors a deviation below, at and above them."""
        form, posterior = self._reading.form(hyper, data), self._posterior(data, hyper, state)
        mean, variance = posterior.predictor_moments()
        points = mean + jnp.sqrt(jnp.maximum(variance, 0.0)) * jnp.array([[-1.0], [0.0], [1.0]])
        return posterior, mean, variance, jax.vmap(form.log_factors)(points)

    def _covariance(self, data: Any, hyper: dict[str, Array], state: Any, *, name: str) -> Array:
        covariance: Array = self._posterior(data, hyper, state).covariance(self._reading.maps(hyper, data)[name])
        return covariance

    def _chosen_marginals(
        self,
        data: Any,
        hyper: dict[str, Array],
        state: Any,
        indices: ChosenIndices,
        *,
        chosen: ChosenRows,
        marginals_fn: Callable[..., Any],
    ) -> Any:
        """The marginals of chosen elements of a large site."""
        affine_map = self._reading.chosen_map(chosen, indices, hyper, data)
        return marginals_fn(self._posterior(data, hyper, state), {"chosen": affine_map})["chosen"]

    def _chosen_covariance(
        self, data: Any, hyper: dict[str, Array], state: Any, indices: ChosenIndices, *, chosen: ChosenRows
    ) -> Array:
        affine_map, posterior = (
            self._reading.chosen_map(chosen, indices, hyper, data),
            self._posterior(data, hyper, state),
        )
        found: Array = posterior.covariance_of(affine_map, jnp.asarray(indices.used), jnp.asarray(indices.places))
        return found

    def _draw_site(
        self, data: Any, hyper: dict[str, Array], state: Any, rng_key: Array, *, name: str, num_samples: int
    ) -> Array:
        design, offset = self._reading.maps(hyper, data)[name]
        return design.matvec(self._posterior(data, hyper, state).sample(rng_key, num_samples)) + offset

    def _draws(
        self,
        data: Any,
        hyper: dict[str, Array],
        state: Any,
        rng_key: Array,
        *,
        num_samples: int,
        is_weighted: bool = False,
    ) -> Draws:
        """Draws of every site, the log density of each with the data and the hyperparameters' prior, and the log
        weight of those of the field, if asked for."""
        form = self._reading.form(hyper, data)
        posterior = self._algorithm.posterior(form, state)
        unknowns = posterior.sample(rng_key, num_samples)
        log_weight = posterior.log_weight_fn() if is_weighted else lambda e: None

        def at(e: Array) -> Draws:
            sites = self._reading.values(hyper, e, data)
            # batches of arrays without elements cannot be put together
            sites = {name: value for name, value in sites.items() if value.size}
            return Draws(sites, form.log_density(e), log_weight(e))

        # Batches bound the memory that the factors of many observations take at many draws.
        batch_size = min(num_samples, max(1, _LARGEST_BATCH // max(1, form.num_rows)))
        found: Draws = jax.lax.map(at, unknowns, batch_size=batch_size)
        shapes = self._reading.site_shapes
        empty = {n: jnp.zeros((num_samples, *shapes[n])) for n in shapes if 0 in shapes[n] and n not in found.sites}
        found = found._replace(sites=found.sites | empty)
        return found._replace(log_density=found.log_density + self._reading.log_prior(hyper, data))

    def _draws_over(
        self,
        data: Any,
        hypers: dict[str, Array],
        states: Any,
        rng_keys: Array,
        num_points: int | Array,
        *,
        num_samples: int,
        is_weighted: bool = False,
    ) -> Draws:
        """:meth:`_draws` at the first ``num_points`` of several hyperparameters, whose values, states and keys are
        stacked; zeros at the others."""
        points = hypers, states, rng_keys

        @jax.jit  # traced once, for the shapes and for the loop
        def draw(point: tuple[Any, Any, Array]) -> Draws:
            return self._draws(data, *point, num_samples=num_samples, is_weighted=is_weighted)

        found: Draws = _at_each(draw, points, num_points)
        return found

    def _stacked_moments(
        self, data: Any, hyper: dict[str, Array], state: Any, *, names: tuple[str, ...]
    ) -> tuple[Array, Array]:
        """Joint mean of the named sites, flattened one after the other, and a factor ``F`` of their covariance
        ``F F^T``, of shape ``(total size, num_columns)``."""
        maps = self._reading.maps(hyper, data)
        posterior = self._posterior(data, hyper, state)
        design = jnp.concatenate([maps[name].design.to_dense() for name in names])
        offset = jnp.concatenate([maps[name].offset for name in names])
        return design @ posterior.mean + offset, design @ posterior.scale_tril()

    def _log_predictive(
        self, data: Any, hyper: dict[str, Array], state: Any, new: LatentGaussian | None = None
    ) -> tuple[Array, Array]:
        """Log predictive density of every factor and whether it is observed, of the fit itself or of another form on
        the same unknowns."""
        form = self._reading.form(hyper, data)
        posterior = self._algorithm.posterior(form, state)
        if new is None:
            new, moments = form, posterior.predictor_moments()
        else:
            moments = posterior.mean_and_variance(AffineMap(new.design, new.offset))
        return log_predictive_factors(new, *moments), jnp.concatenate(new.observed)

    def _leave_one_out(self, data: Any, hyper: dict[str, Array], state: Any) -> tuple[Array, Array]:
        """Log predictive density of every factor without and with its own observation."""
        form = self._reading.form(hyper, data)
        return log_leave_one_out(form, self._algorithm.posterior(form, state))

    def _log_factors_at_draws(self, data: Any, hyper: dict[str, Array], state: Any) -> Array:
        form = self._reading.form(hyper, data)
        return log_factors_at_draws(form, self._algorithm.posterior(form, state))

    def _weight_inputs(self, data: Any, hyper: dict[str, Array], state: Any) -> tuple[LatentGaussian, Array, Array]:
        """The form, and mean and lower Cholesky factor of its unknowns: what importance weights are made of."""
        form = self._reading.form(hyper, data)
        posterior = self._algorithm.posterior(form, state)
        return form, posterior.mean, posterior.scale_tril()

    def _fold_predictives(
        self, data: Any, fixed: dict[str, Array], values: Array, *, batch_size: int | None
    ) -> tuple[Array, SearchState | None, Any]:
        """:meth:`_fold_predictive` for folds whose ``data`` are stacked, so many of them at a time."""
        found: tuple[Array, SearchState | None, Any] = jax.lax.map(
            lambda fold: self._fold_predictive(fold, fixed, values), data, batch_size=batch_size
        )
        return found

    def _fold_predictive(
        self, data: Any, fixed: dict[str, Array], values: Array
    ) -> tuple[Array, SearchState | None, Any]:
        """Fit one fold and score all its factors: predictive densities, the search, and the algorithm's info."""
        reading, space = self._reading, self._space
        if space.size:
            evaluate = self._objective(data, fixed)
            start = self._algorithm.init(reading.form(space.unpack(values, fixed), data))
            final = hyper_search.maximise(
                evaluate, values, start, tol=self._hyper_tol, max_iterations=self._max_iterations, with_curvature=False
            )
            hyper, state, info = space.unpack(final.values, fixed), final.best.state, final.best.info
        else:
            final, hyper = None, dict(fixed)
            state, info, _ = self._solve(data, hyper, None, num_steps=self._num_steps)
        return self._log_predictive(data, hyper, state)[0], final, info


def _at_each(function: Callable[[Any], Any], stacked: Any, number: int | Array) -> Any:
    """The function of each of the first ``number`` of stacked arguments, one after the other; zeros at the others."""

    def step(k: Array, found: Any) -> Any:
        here = function(jax.tree.map(lambda leaf: leaf[k], stacked))
        return jax.tree.map(lambda leaves, leaf: leaves.at[k].set(leaf), found, here)

    shapes = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], stacked))
    length = len(jax.tree.leaves(stacked)[0])
    nothing = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape), leaf.dtype), shapes)
    return jax.lax.fori_loop(0, number, step, nothing)


def compiled_form(reading: LatentGaussianReading, hyper: Mapping[str, Any]) -> LatentGaussian:
    """The form of a reading at given hyperparameters, by one compiled function instead of one for each operation.

    :param LatentGaussianReading reading: of the model.
    :param hyper: all hyperparameters, constrained.
    """
    form = _FORMS.get(reading.structure_key, lambda: quick_jit(reading.skeleton().form, is_small=True))
    found: LatentGaussian = form(hyper, reading.data)
    return found


def _is_small(form: LatentGaussian) -> bool:
    """Whether fits of such a form take a tenth of a second, whatever the compiler makes of it."""
    return form.num_rows <= _MOST_SMALL_ROWS and holds_little(form, _MOST_SMALL_NUMBERS)


def compiled_programs(
    reading: LatentGaussianReading, algorithm: Algorithm, space: UnconstrainedSpace, **options: Any
) -> Programs:
    """The programs for this structure, from the cache if a run of the same structure has been made before.

    :param LatentGaussianReading reading: of the model.
    :param Algorithm algorithm: with its options bound.
    :param UnconstrainedSpace space: of the hyperparameters that are learned.
    :param options: as for :class:`Programs`.
    """
    key = (reading.structure_key, algorithm.key, space.key, tuple(sorted(options.items())))
    return _COMPILED.get(key, lambda: Programs(reading.skeleton(), algorithm, space.skeleton(), **options))
