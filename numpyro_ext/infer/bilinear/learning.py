"""Updates of what is neither in the rows nor in the columns, between sweeps over these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...structure.bilinear.noisy.normal import NormalNoise
from ...structure.bilinear.reading import BilinearReading
from ..hyper import search as hyper_search
from ..hyper.evaluation import evaluation_fn
from ..hyper.space import UnconstrainedSpace
from .algorithms import sweeps as core
from .algorithms.quadratic.normal_noise import best_noise, noise_terms
from .algorithms.schedules.devices import OneDevice
from .algorithms.schedules.methods import Prepared

_STEPS = 5


class Learning:
    """Hyperparameters that raise the objective, and noise at its best, while the posterior of the vectors is held.

    :param BilinearReading reading: of the model.
    :param UnconstrainedSpace space: of hyperparameters and noise.
    :param devices: on which sums over cells are taken.
    :param data: of the reading.
    :param fixed: values of hyperparameters that are given.
    :param NormalNoise noise: sites that are integrated over.
    :param form_at: form with ordered cells at values of all sites outside the two sides.
    """

    def __init__(
        self,
        reading: BilinearReading,
        space: UnconstrainedSpace,
        devices: OneDevice,
        data: Any,
        fixed: dict[str, Array],
        noise: NormalNoise,
        form_at: Callable[[dict[str, Array]], Prepared],
    ) -> None:
        self._reading, self._space, self._devices = reading, space, devices
        self._data, self._fixed, self._noise, self._form_at = data, fixed, noise, form_at
        of_noise = np.zeros(space.size, bool)
        for name in noise.names:
            of_noise[space.slices[name]] = True
        self._of_noise, self._points = of_noise, np.flatnonzero(~of_noise)
        # Of vectors that depend on each other their coordinates are held, and what cells see of them moves.
        self._is_posterior_held = reading.is_design_fixed and not any(reading.is_coupled)

    def log_prior(self, values: Array) -> Array:
        """Log prior density of the hyperparameters that are points."""
        hyper = self._space.unpack(values, self._fixed)
        total = self._reading.log_prior(hyper, self._data)
        for name in self._noise.names:
            total -= self._reading.log_prior_of(name, hyper, self._data)
        return total

    def make_form(self, values: Array) -> Prepared:
        """The form with ordered cells, and with all that the bound has of noise in its constant."""
        hyper = self._space.unpack(values, self._fixed)
        found = self._form_at(hyper)
        if not self._noise.names:
            return found
        terms = noise_terms(self._noise, hyper, lambda n, at: self._reading.log_prior_of(n, at, self._data))
        return found._replace(form=found.form._replace(log_constant=found.form.log_constant + terms))

    def step(self, values: Array, state: core.State) -> tuple[Array, Array, Array]:
        """Values that raise the objective, the bound there, and in which of them it has a derivative."""
        values, state = self._with_best_noise(values, state)
        if not self._points.size:
            return values, state.objective, jnp.asarray(self._of_noise)
        return self._with_best_points(values, state)

    def _with_best_noise(self, values: Array, state: core.State) -> tuple[Array, core.State]:
        if not self._noise.names:
            return values, state
        hyper = self._space.unpack(values, self._fixed)
        bound = self._devices.bound_of_form(self._form_at(hyper), state)
        best = self._space.pack(best_noise(self._noise, hyper, lambda hyper: bound(self._form_at(hyper))))
        objective = bound(self.make_form(best))
        is_better = objective > state.objective
        values, objective = jax.tree.map(
            lambda new, old: jnp.where(is_better, new, old), (best, objective), (values, state.objective)
        )
        return values, state._replace(objective=objective)

    def _with_best_points(self, values: Array, state: core.State) -> tuple[Array, Array, Array]:
        bound = None if self._is_posterior_held else self._devices.bound_of_form(self.make_form(values), state)

        def expected(prepared: Prepared, _: object) -> Array:
            if bound is not None:
                return bound(prepared)
            return prepared.form.log_constant - self._devices.cost(prepared.form, state)

        def whole(points: Array) -> Array:
            return values.at[self._points].set(points) if self._noise.names else points

        evaluate = evaluation_fn(
            form_fn=lambda points: self.make_form(whole(points)),
            log_prior_fn=lambda points: self.log_prior(whole(points)),
            solve_fn=lambda form, state: (state, ()),
            log_evidence_fn=expected,
        )
        start = values[self._points] if self._noise.names else values
        found = hyper_search.maximise(evaluate, start, (), tol=1e-6, max_iterations=_STEPS, with_curvature=False)
        before = expected(self.make_form(values), ()) if self._is_posterior_held else state.objective
        objective = state.objective + (found.best.log_evidence - before)
        is_better = (found.best.objective > before + self.log_prior(values)) & jnp.all(jnp.isfinite(found.values))
        values, objective = jax.tree.map(
            lambda new, old: jnp.where(is_better, new, old),
            (whole(found.values), objective),
            (values, state.objective),
        )
        assert found.moved is not None
        moved = jnp.asarray(self._of_noise).at[self._points].set(found.moved) if self._noise.names else found.moved
        return values, objective, moved
