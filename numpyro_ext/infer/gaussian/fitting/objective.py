"""The objective of a search for hyperparameters, with the field fitted at each of their values, and its curvature."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array

from ....compilation.pytree import PyTree
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian.form import LatentGaussian
from ...hyper.evaluation import Evaluation, evaluation_and_held_fn, evaluation_fn
from ...hyper.search import SearchState
from ...hyper.space import UnconstrainedSpace
from ..algorithms.algorithm import Algorithm
from .local_probes import with_local_probes, with_probes_of


class Objective:
    """Log evidence and log prior of the hyperparameters, as functions of ``(data, fixed, values, ...)``.

    Parameters are those of :class:`~numpyro_ext.infer.gaussian.programs.Programs`.

    :ivar algorithm: fits the field.
    :ivar space: of the hyperparameters that are learned.
    :ivar tol: at which a fit of the field ends.
    :ivar evaluate: the objective at ``(data, fixed, values, state, tol, with_gradient=True, floor=None)``; see
        :func:`~numpyro_ext.infer.hyper.evaluation.evaluation_and_held_fn`. Below a floor it has few digits.
    :ivar evaluate_and_hold: the same, and what the fit of the field has at hand at its end.
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
        is_density_unconstrained: bool = False,
    ) -> None:
        self._reading = reading
        self.algorithm = algorithm
        self.space = space
        self._num_steps = num_steps
        self.tol = tol
        self._hyper_tol = hyper_tol
        self._is_density_unconstrained = is_density_unconstrained
        # Compiled only as a part of others, but traced once for all of them.
        self._form = jax.jit(reading.form)
        self.evaluate = jax.jit(self._evaluate)
        self.evaluate_and_hold = jax.jit(self._evaluate_and_hold)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of states: that of the algorithm, and the tolerances at which fits and searches end."""
        return (self.algorithm.state_key, self.tol, self._hyper_tol)

    def form(self, hyper: dict[str, Array], data: object) -> LatentGaussian:
        """The form of the reading, which programs trace once."""
        return self._form(hyper, data)

    def form_at(self, data: object, fixed: dict[str, Array]) -> Callable[[Array], LatentGaussian]:
        """Function from unconstrained hyperparameters to the form."""
        return lambda values: self.form(self.space.unpack(values, fixed), data)

    def log_prior(self, data: PyTree, fixed: dict[str, Array], values: Array) -> Array:
        """Log prior density of unconstrained hyperparameters, which the objective has beside the evidence."""
        total = self._reading.log_prior(self.space.unpack(values, fixed), data)
        return total + self.space.log_volume(values) if self._is_density_unconstrained else total

    def _evaluate(self, *args: Any) -> Evaluation:
        return self.evaluate_and_hold(*args)[0]

    def _evaluate_and_hold(
        self,
        data: object,
        fixed: dict[str, Array],
        values: Array,
        state: object,
        tol: Any,
        with_gradient: bool | Array = True,
        floor: Any = None,
    ) -> tuple[Evaluation, Any]:
        algorithm = self.algorithm

        def solve(form: LatentGaussian, state: object) -> Any:
            if floor is None:
                return algorithm.solve_and_hold(form, state, num_steps=self._num_steps, tol=tol)
            lowest = floor - self.log_prior(data, fixed, values)  # the objective has the prior beside the evidence
            return algorithm.solve_above(form, state, lowest, num_steps=self._num_steps, tol=tol)

        evaluate = evaluation_and_held_fn(
            form_fn=self.form_at(data, fixed),
            log_prior_fn=lambda values: self.log_prior(data, fixed, values),
            solve_fn=solve,
            log_evidence_fn=algorithm.held_evidence,
            value_fn=algorithm.known_evidence,
        )
        return evaluate(values, state, with_gradient)

    def _evaluation(
        self,
        data: Any,
        fixed: dict[str, Array],
        form_fn: Callable[[Array], LatentGaussian],
        tol: Any,
        solve_fn: Callable[..., tuple[Any, Any]],
    ) -> Callable[..., Evaluation]:
        """The objective of another form, and of another way to fit it."""
        return evaluation_fn(
            form_fn=form_fn,
            log_prior_fn=lambda values: self.log_prior(data, fixed, values),
            solve_fn=partial(solve_fn, num_steps=self._num_steps, tol=tol),
            log_evidence_fn=self.algorithm.log_evidence,
            value_fn=self.algorithm.known_evidence,
        )

    def _probe_locally(
        self, data: object, fixed: dict[str, Array], state: SearchState, is_held: bool | Array = False
    ) -> SearchState:
        """The probes of the curvature at the best point of a search, if they cost little: those of known second
        derivatives, or of local factors, see :func:`~.local_probes.with_local_probes`."""
        exact = self.algorithm.block_curvature(self.form_at(data, fixed), state.values, state.best.state)
        if exact is not None:
            of_prior = jax.hessian(lambda values: self.log_prior(data, fixed, values))(state.values)
            return with_probes_of(exact[0] + exact[1] + of_prior, state, hyper_tol=self._hyper_tol)
        # To a small part of the gradients' own tolerance, which is what the step of the differences reckons with.
        tol = max(self.tol, 1e-2 * self._hyper_tol)
        return with_local_probes(
            self.algorithm,
            self.form_at(data, fixed),
            lambda form_fn, solve: self._evaluation(data, fixed, form_fn, tol, solve),
            state,
            is_held=is_held,
            hyper_tol=self._hyper_tol,
        )
