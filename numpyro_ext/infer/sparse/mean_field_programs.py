"""The compiled functions that structured mean field is run and questioned with, shared by runs of one structure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...linalg.cholesky import cholesky, solve_lower, solve_upper
from ...linalg.operators.operator import LinearOperator
from ...linalg.solvers.perturb_and_map import draw_perturbations, perturb_and_map
from ...linalg.solvers.posterior_precision import PosteriorPrecision, gram_diagonal
from ...structure import SparseLinearReading
from ..front.running.iterations import StepInfo
from ..hyper import search as hyper_search
from ..hyper.evaluation import evaluation_fn
from ..hyper.space import UnconstrainedSpace
from . import mean_field as core
from .programs import DRAWS_AT_A_TIME, Inputs, SparsePrograms
from .trees import learning as tree_learning

CHUNK = 10
_LEARNING_STEPS = 50


class MeanFieldPrograms(SparsePrograms):
    """Compiled functions of structured mean field for one model structure; what is prepared is its workspace.

    :param SparseLinearReading reading: any reading of the structure.
    :param UnconstrainedSpace space: of the hyperparameters that are learned.
    :param Options options: of the core.
    :param float tol: at which the iteration has converged.
    """

    def __init__(
        self, reading: SparseLinearReading, space: UnconstrainedSpace, options: core.Options, tol: float
    ) -> None:
        super().__init__(reading, space)
        self._tol, self.options = tol, options
        self.make_workspace = jax.jit(self._make_workspace)
        self.init_state = jax.jit(self._init_state)
        self.solve = jax.jit(self._solve)
        self.row_variance = jax.jit(self._row_variance, static_argnames="name")
        self.row_covariance = jax.jit(self._row_covariance, static_argnames="name")

    def state_shapes(self, data: object, hyper: dict[str, Array], workspace: core.Workspace) -> core.State:
        """Shapes and dtypes of the state."""
        return jax.eval_shape(self._init_state, data, hyper, workspace, None)

    def _make_workspace(self, data: Sequence[object], hyper: dict[str, Array], rng_key: Array) -> core.Workspace:
        return core.make_workspace(self._reading.form(hyper, data), rng_key, self.options)

    def _init_state(
        self, data: Sequence[object], hyper: dict[str, Array], workspace: core.Workspace, coefficients: Array | None
    ) -> core.State:
        return core.init(self._reading.form(hyper, data), workspace, self.options, coefficients)

    def _solve(
        self,
        data: Sequence[object],
        fixed: dict[str, Array],
        values: Array,
        workspace: core.Workspace,
        state: core.State,
        num_steps: Array,
        is_learning: Array,
    ) -> tuple[Array, core.State, StepInfo]:
        """Run at most :data:`CHUNK` steps, each with an update of the hyperparameters where there are any."""
        reading, space = self._reading, self._space

        def make_form(form: tuple[Array, Array]) -> Any:
            return reading.form(space.unpack(form[0], fixed), data)

        def learn(form: tuple[Array, Array], state: core.State) -> tuple[Array, Array]:
            update = partial(self._learn, data, fixed)
            return lax.cond(is_learning, update, lambda values, moved, _: (values, moved), *form, state)

        start = values, jnp.zeros(values.shape, bool)
        *learned, state, info = core.solve(
            start,
            workspace,
            state,
            self.options,
            num_steps=num_steps,
            tol=self._tol,
            trace_length=CHUNK,
            accelerates=self.options.variances == "exact",
            make_form=make_form,
            learn=learn if space.size else None,
        )
        values, moved = learned[0] if space.size else start
        hyper = space.unpack(values, fixed)
        log_evidence = info.objective + reading.log_constant(hyper, data)
        return values, state, StepInfo(info, log_evidence, reading.log_prior(hyper, data), moved)

    def _learn(
        self, data: Sequence[object], fixed: dict[str, Array], values: Array, moved: Array, state: core.State
    ) -> tuple[Array, Array]:
        """The maximum of the expected log joint density plus log prior, by L-BFGS.

        Groups of few and of many coefficients have curvatures that are orders of magnitude apart. So the search is in
        units of the curvature along each axis, by one product of the second derivatives with random signs: exact where
        hyperparameters do not interact, as those of a tree do not.
        """
        reading, space = self._reading, self._space
        form = reading.form(space.unpack(values, fixed), data)
        statistics = tree_learning.statistics(form, state)

        def log_prior(values: Array) -> Array:
            return reading.log_prior(space.unpack(values, fixed), data)

        def expected(values: Array) -> Array:
            hyper = space.unpack(values, fixed)
            prior, noise = reading.prior(hyper, data), reading.noise_variance(hyper, data)
            total = tree_learning.expected_log_joint(reading.forest, prior, noise, statistics, weight=form.weight)
            return total + reading.log_constant(hyper, data)

        signs = jax.random.rademacher(jax.random.key(0), values.shape, values.dtype)
        gradient = jax.grad(lambda values: expected(values) + log_prior(values))
        curvature = jnp.abs(signs * jax.jvp(gradient, (values,), (signs,))[1])
        # At most one unit of the unconstrained hyperparameters, also where the objective is flat.
        unit = lax.rsqrt(jnp.maximum(jnp.where(jnp.isfinite(curvature), curvature, 1.0), 1.0))
        evaluate = evaluation_fn(
            form_fn=lambda shift: values + unit * shift,
            log_prior_fn=lambda shift: log_prior(values + unit * shift),
            solve_fn=lambda form, state: (state, ()),
            log_evidence_fn=lambda values, _: expected(values),
        )
        found = hyper_search.maximise(
            evaluate, jnp.zeros_like(values), (), tol=1e-4, max_iterations=_LEARNING_STEPS, with_curvature=False
        )
        assert found.moved is not None
        return values + unit * found.values, moved | found.moved

    def _precision(self, inputs: Inputs) -> PosteriorPrecision:
        form = self._reading.form(inputs.hyper, inputs.data)
        return core.posterior_precision(form, inputs.prepared, inputs.state)

    def _gram(self, precision: PosteriorPrecision) -> Array:
        return gram_diagonal(precision.operator, precision.noise_variance, self.options.solver == "diagonal")

    def has_exact_variance(self, name: str) -> bool:
        solver = self.options.solver
        return solver == "dense" or (solver == "diagonal" and (self._is_small or self._reading.is_selection(name)))

    @property
    def _is_small(self) -> bool:
        return self._reading.num_columns <= self.options.costs.largest_dense

    def _mean(self, inputs: Inputs) -> Array:
        return inputs.state.mean

    def _site_variance(self, inputs: Inputs, *, name: str) -> Array:
        operator, _ = self._map(inputs, name)
        precision = self._precision(inputs)
        if self.options.solver == "diagonal":
            variance = 1.0 / (self._gram(precision) + precision.precision)
            if self._reading.is_selection(name):
                return operator @ variance
            return jnp.square(operator.materialise()) @ variance
        return jnp.sum(jnp.square(self._root(precision, operator)), axis=0)

    def _root(self, precision: PosteriorPrecision, operator: LinearOperator) -> Array:
        """``F`` with ``F^T F`` the covariance of what the operator makes of the coefficients."""
        return solve_lower(cholesky(precision.dense()), operator.materialise().T)

    def _site_covariance(self, inputs: Inputs, *, name: str) -> Array:
        operator, _ = self._map(inputs, name)
        precision = self._precision(inputs)
        if self._is_small:
            root = self._root(precision, operator)
            return root.T @ root
        rows = lax.map(operator.T.matvec, jnp.eye(operator.shape[0]), batch_size=DRAWS_AT_A_TIME)
        return lax.map(operator.matvec, self._solve_rows(precision, rows), batch_size=DRAWS_AT_A_TIME)

    def _solve_rows(self, precision: PosteriorPrecision, rows: Array) -> Array:
        gram = self._gram(precision)
        if self.options.solver == "diagonal":
            return rows / (gram + precision.precision)
        if self.options.solver == "dense":
            factor = cholesky(precision.dense())
            return solve_upper(factor, solve_lower(factor, rows.T)).T
        solve = partial(
            precision.solve, gram_diagonal=gram, tol=self.options.mean_tol, max_iterations=self.options.max_iterations
        )
        return lax.map(lambda row: solve(row).solution, rows)

    def _draw(self, inputs: Inputs, rng_key: Array, *, num_samples: int) -> Array:
        precision, mean = self._precision(inputs), self._mean(inputs)
        size = precision.shape[0]
        if self.options.solver != "conjugate-gradient":
            white = jax.random.normal(rng_key, (num_samples, size), mean.dtype)
            if self.options.solver == "diagonal":
                return mean + white / jnp.sqrt(self._gram(precision) + precision.precision)
            return mean + solve_upper(cholesky(precision.dense()), white.T).T
        gram = self._gram(precision)

        def some(rng_key: Array) -> Array:
            sizes = precision.operator.shape[0], precision.precision.size
            perturbations = draw_perturbations(rng_key, batch, sizes)
            tol, max_iterations = self.options.reported_draw_tol, self.options.max_iterations
            return perturb_and_map(precision, perturbations, gram, tol=tol, max_iterations=max_iterations).solution

        batch = min(num_samples, DRAWS_AT_A_TIME)
        parts: Array = lax.map(some, jax.random.split(rng_key, -(-num_samples // batch)))
        return mean + parts.reshape(-1, size)[:num_samples]

    def _state_probabilities(self, inputs: Inputs) -> Array:
        form = self._reading.form(inputs.hyper, inputs.data)
        return tree_learning.states_given(form, inputs.state.second_moment).marginals

    def _row_variance(self, inputs: Inputs, rows: LinearOperator | Array, *, name: str) -> Array:
        """Variances of linear functionals of a site."""
        functionals, solved = self._solved_functionals(inputs, rows, name)
        return jnp.sum(functionals * solved, axis=-1)

    def _row_covariance(self, inputs: Inputs, rows: LinearOperator | Array, *, name: str) -> Array:
        functionals, solved = self._solved_functionals(inputs, rows, name)
        found = functionals @ solved.T
        return 0.5 * (found + found.T)

    def _solved_functionals(self, inputs: Inputs, rows: LinearOperator | Array, name: str) -> tuple[Array, Array]:
        """Linear functionals of a site as those of the coefficients, and their products with the covariance."""
        dtype = self._mean(inputs).dtype
        if isinstance(rows, LinearOperator):
            functionals = lax.map(rows.rmatvec, jnp.eye(rows.shape[0], dtype=dtype), batch_size=DRAWS_AT_A_TIME)
        else:
            functionals = rows.astype(dtype)
        operator, _ = self._map(inputs, name)
        functionals = lax.map(operator.rmatvec, functionals, batch_size=DRAWS_AT_A_TIME)
        return functionals, self._solve_rows(self._precision(inputs), functionals)
