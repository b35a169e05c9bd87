"""Evaluations and second derivatives in two programs each: one passes over all observations, often, one over the rest.

The first takes its time to run, and is optimised. The second sees little, such as parameters of columns, or runs once
for each fit, but is long: to optimise it takes longer than all its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    :param form_at: from data and fixed hyperparameters to the form as a function of the others, unconstrained.
    :param log_prior: of data, fixed and the others.
    :param int num_steps: of one fit at most.
    :param float tol: of fits at which second derivatives are taken.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        form_at: Callable[[Any, dict[str, Array]], Callable[[Array], LatentGaussian]],
        log_prior: Callable[[Any, dict[str, Array], Array], Array],
        num_steps: int,
        tol: float,
    ) -> None:
        self._tol = np.asarray(tol, jnp.result_type(float))
        self._algorithm, self._form_at, self._log_prior, self._num_steps = algorithm, form_at, log_prior, num_steps
        self._solve = quick_jit(self._solution)
        self._slope = quick_jit(self._evaluation, is_small=True)
        self._complete = quick_jit(self._complete_derivatives, is_small=True)
        self._missing = quick_jit(self._missing_derivatives)

    def evaluate(
        self, data: object, fixed: dict[str, Array], values: Array, state: object, tol: Any, with_gradient: bool = True
    ) -> tuple[Evaluation, Any]:
        """The objective of a search, and what the fit of the field has at hand at its end."""
        solution = self._solve(data, fixed, values, state, tol)
        return self._slope(data, fixed, values, solution, with_gradient), solution[2]

    def second_derivatives(
        self, data: object, fixed: dict[str, Array], search: SearchState, *, is_rough: bool | Array
    ) -> tuple[Array, Array]:
        """Second derivatives of the objective at the best point of a search, as the sum of two arrays."""
        values = search.values
        state, _, held = self._solve(data, fixed, values, search.best.state, self._tol)
        complete, slopes = self._complete(data, fixed, values, state, held)
        return complete, self._missing(data, fixed, values, state, held, slopes, is_rough)

    def _solution(self, data: object, fixed: dict[str, Array], values: Array, state: object, tol: Any) -> Any:
        form = self._form_at(data, fixed)(values)
        return self._algorithm.solve_and_hold(form, state, num_steps=self._num_steps, tol=tol)

    def _evaluation(
        self, data: object, fixed: dict[str, Array], values: Array, solution: Any, with_gradient: bool | Array
    ) -> Evaluation:
        evaluate = evaluation_and_held_fn(
            form_fn=self._form_at(data, fixed),
            log_prior_fn=lambda x: self._log_prior(data, fixed, x),
            solve_fn=lambda form, state: solution,
            log_evidence_fn=self._algorithm.held_evidence,
            value_fn=self._algorithm.known_evidence,
        )
        return evaluate(values, None, with_gradient)[0]

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
