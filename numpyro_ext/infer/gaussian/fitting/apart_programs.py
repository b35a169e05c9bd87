"""Evaluations and second derivatives in two programs each: one passes over all observations, often, one over the rest.

The first takes its time to run, and is optimised. The second sees little, such as parameters of columns, or runs once
for each fit, but is long: to optimise it takes longer than all its calls.

Where an algorithm knows a form in brief, what few fits need beyond it is compiled for the first of these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from ....compilation.quick_jit import quick_jit
from ....structure.latent_gaussian.form import LatentGaussian
from ...hyper.evaluation import Evaluation, evaluation_and_held_fn
from ...hyper.search import SearchState
from ..algorithms.algorithm import Algorithm


class ApartPrograms:
    """Compiled functions of ``(data, fixed, values, ...)`` for algorithms that know their evidence at the end of a fit.

    :param Algorithm algorithm: with :meth:`~.Algorithm.solve_and_hold` and :meth:`~.Algorithm.held_evidence`.
    :param LatentGaussian form: of shapes alone.
    :param form_at: from data and fixed hyperparameters to the form as a function of the others, unconstrained.
    :param log_prior: of data, fixed and the others.
    :param int num_steps: of one fit at most.
    :param bool is_small: whether a pass over all observations takes less time than to optimise it.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        form: LatentGaussian,
        form_at: Callable[[Any, dict[str, Array]], Callable[[Array], LatentGaussian]],
        log_prior: Callable[[Any, dict[str, Array], Array], Array],
        num_steps: int,
        is_small: bool,
    ) -> None:
        self._algorithm, self._form_at, self._log_prior, self._num_steps = algorithm, form_at, log_prior, num_steps
        self._has_brief = algorithm.in_brief(form) is not None
        self._solve_briefly: Any = quick_jit(partial(self._solution, is_brief=True))
        self._slope_briefly: Any = quick_jit(partial(self._evaluation, is_brief=True), is_small=True)
        # asked by few fits of few models
        self.solve: Any = quick_jit(self._solution, is_small=is_small or self._has_brief)
        self._slope: Any = quick_jit(self._evaluation, is_small=True)

    def shapes(self, data: object, fixed: dict[str, Array], values: Array, state: object, tol: object) -> Evaluation:
        """Shapes of an evaluation, by the traces of its programs."""
        solve, slope = (self._solve_briefly, self._slope_briefly) if self._has_brief else (self.solve, self._slope)
        found: Evaluation = slope.eval_shape(
            data, fixed, values, solve.eval_shape(data, fixed, values, state, tol), True
        )
        return found

    def evaluate(
        self, data: object, fixed: dict[str, Array], values: Array, state: object, tol: Any, with_gradient: bool = True
    ) -> tuple[Evaluation, Any]:
        """The objective of a search, and what the fit of the field has at hand at its end."""
        solution = self._solved(data, fixed, values, state, tol)
        arguments = data, fixed, values, solution, with_gradient
        if self._has_brief:
            # a factor that quick rules do not serve adds to a gradient what is no number, if it adds anything
            found = self._slope_briefly(*arguments)
            if np.isfinite(np.asarray(found.gradient)).all() or not np.isfinite(found.objective):
                return found, solution[2]
        return self._slope(*arguments), solution[2]

    def _solved(self, data: object, fixed: dict[str, Array], values: Array, state: object, tol: Any) -> Any:
        """A fit of the form in brief, if that serves all factors at its end, or of the form itself from there."""
        if self._has_brief:
            solution = self._solve_briefly(data, fixed, values, state, tol)
            info = jax.device_get(solution[1])  # NumPy compiles nothing
            if np.isfinite(info.objective) and not info.skipped.any():
                return solution
            if np.isfinite(info.max_change):
                state = solution[0]
        return self.solve(data, fixed, values, state, tol)

    def _form_fn(self, data: object, fixed: dict[str, Array], is_brief: bool) -> Callable[[Array], LatentGaussian]:
        form_at = self._form_at(data, fixed)
        if not is_brief:
            return form_at

        def in_brief(values: Array) -> LatentGaussian:
            form = self._algorithm.in_brief(form_at(values))
            assert form is not None  # as of its shapes
            return form

        return in_brief

    def _solution(
        self, data: object, fixed: dict[str, Array], values: Array, state: object, tol: Any, *, is_brief: bool = False
    ) -> Any:
        form = self._form_fn(data, fixed, is_brief)(values)
        return self._algorithm.solve_and_hold(form, state, num_steps=self._num_steps, tol=tol)

    def _evaluation(
        self,
        data: object,
        fixed: dict[str, Array],
        values: Array,
        solution: Any,
        with_gradient: bool | Array,
        *,
        is_brief: bool = False,
    ) -> Evaluation:
        evaluate = evaluation_and_held_fn(
            form_fn=self._form_fn(data, fixed, is_brief),
            log_prior_fn=lambda x: self._log_prior(data, fixed, x),
            solve_fn=lambda form, state: solution,
            log_evidence_fn=self._algorithm.held_evidence,
            value_fn=self._algorithm.known_evidence,
        )
        return evaluate(values, None, with_gradient)[0]


class SecondDerivatives:
    """Second derivatives of the objective, where the algorithm knows them.

    :param Algorithm algorithm: that knows them, by :meth:`~.Algorithm.complete_derivatives` and
        :meth:`~.Algorithm.missing_derivatives`.
    :param form_at: as for :class:`ApartPrograms`, like ``log_prior``.
    :param solve: ``(data, fixed, values, state)`` to the state of a fit and what it holds; compiled.
    :param bool is_small: as there.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        form_at: Callable[[Any, dict[str, Array]], Callable[[Array], LatentGaussian]],
        log_prior: Callable[[Any, dict[str, Array], Array], Array],
        solve: Callable[[Any, dict[str, Array], Array, Any], tuple[Any, Any]],
        is_small: bool,
    ) -> None:
        self._algorithm, self._form_at, self._log_prior, self._solve = algorithm, form_at, log_prior, solve
        self._complete = quick_jit(self._complete_derivatives, is_small=True)
        self._missing = quick_jit(self._missing_derivatives, is_small=is_small)

    def __call__(
        self, data: object, fixed: dict[str, Array], search: SearchState, *, is_rough: bool | Array
    ) -> tuple[Array, Array]:
        """Second derivatives at the best point of a search, as the sum of two arrays; see
        :meth:`~numpyro_ext.infer.Algorithm.second_derivatives`."""
        values = search.values
        state, held = self._solve(data, fixed, values, search.best.state)
        complete, slopes = self._complete(data, fixed, values, state, held)
        return complete, self._missing(data, fixed, values, state, held, slopes, is_rough)

    def _complete_derivatives(
        self, data: object, fixed: dict[str, Array], values: Array, state: object, held: object
    ) -> tuple[Array, Any]:
        found, slopes = self._algorithm.complete_derivatives(self._form_at(data, fixed), values, state, held)
        return found + jax.hessian(lambda x: self._log_prior(data, fixed, x))(values), slopes

    def _missing_derivatives(
        self,
        data: object,
        fixed: dict[str, Array],
        values: Array,
        state: object,
        held: object,
        slopes: object,
        is_rough: bool | Array,
    ) -> Array:
        form = self._form_at(data, fixed)(values)
        return self._algorithm.missing_derivatives(form, state, held, slopes, is_rough=is_rough)
