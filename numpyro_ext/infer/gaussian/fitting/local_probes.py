"""Curvature of the objective of hyperparameters from cheap factors in the place of the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....structure.latent_gaussian.form import LatentGaussian
from ...hyper.digits import difference_step
from ...hyper.evaluation import Evaluation
from ...hyper.search import SearchState
from ..algorithms.algorithm import Algorithm

FormFn = Callable[[Array], LatentGaussian]


def with_local_probes(
    algorithm: Algorithm,
    form_fn: FormFn,
    evaluation: Callable[[FormFn, Callable[..., tuple[Any, Any]]], Callable[..., Evaluation]],
    state: SearchState,
    *,
    is_held: bool | Array,
    hyper_tol: float,
) -> SearchState:
    """The state with probes of the curvature at its best point, with factors that cost little in the place of the
    model's; the state as it is where there are no such factors.

    :param form_fn: the form at unconstrained hyperparameters.
    :param evaluation: makes the objective of another form and of another way to fit it.
    :param is_held: leaves out how the field answers: the curvature is then one of the evidence that holds its state,
        which takes no fits, and is that of the evidence but for information that the field hides.
    :param hyper_tol: tolerance of the search.
    """
    near = algorithm.localised(form_fn(state.values), state.best.state)
    if near is None:
        return state

    def solve(form: LatentGaussian, start: Any, **options: Any) -> tuple[Any, Any]:
        held = start, state.best.info
        return jax.lax.cond(is_held, lambda: held, lambda: algorithm.solve(form, start, **options))

    evaluate = evaluation(lambda values: near(form_fn(values)), solve)
    axes = np.eye(state.values.size, dtype=state.values.dtype)
    steps = difference_step(axes.dtype, hyper_tol) * np.stack([axes, -axes], axis=1)
    probes = jax.lax.map(
        lambda step: evaluate(state.values + step, state.best.state).gradient, steps.reshape(-1, len(axes))
    )
    return _with_probes(state, probes)


def with_probes_of(second_derivatives: Array, state: SearchState, *, hyper_tol: float) -> SearchState:
    """The state with the probes of a quadratic function, for who takes differences of them."""
    rows = difference_step(state.values.dtype, hyper_tol) * second_derivatives
    return _with_probes(state, jnp.stack([rows, -rows], axis=1))


def _with_probes(state: SearchState, probes: Array) -> SearchState:
    num_probes = jnp.asarray(2 * state.values.size, state.num_probes.dtype)
    return state._replace(probes=probes.reshape(state.probes.shape), num_probes=num_probes)
