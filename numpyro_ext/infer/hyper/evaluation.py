"""The objective of a search for hyperparameters at one point: a fit of the field, its log evidence and the slope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Evaluation(NamedTuple):
    """The objective at one point, and the fit of the field that it rests on."""

    objective: Array
    """Log evidence plus log prior."""
    gradient: Array
    """Gradient of the objective, shape ``(d,)``."""
    log_evidence: Array
    state: Any
    """State of the algorithm at its fixed point."""
    info: Any
    """Report of the algorithm about reaching it."""
    moves: Array | None = None
    """Along which axes the log evidence has a derivative other than zero, shape ``(d,)``, where that is asked."""


def evaluation_and_held_fn(
    form_fn: Callable[[Array], Any],
    log_prior_fn: Callable[[Array], Array],
    solve_fn: Callable[[Any, Any], tuple[Any, Any, Any]],
    log_evidence_fn: Callable[[Any, Any, Any], Array],
    value_fn: Callable[[Any], Array | None] = lambda info: None,
) -> Callable[..., tuple[Evaluation, Any]]:
    """The objective as a function of the unconstrained vector and of a state to start the field from, beside what a fit
    has made on its way.

    :param form_fn: the form that the algorithm runs on, as a function of the vector.
    :param log_prior_fn: log prior density of the hyperparameters, as a function of the vector.
    :param solve_fn: ``(form, state) -> (state, info, held)``, to the fixed point of the field; ``held`` is what the fit
        has computed there and others need, such as a factorisation.
    :param log_evidence_fn: ``(form, state, held) -> scalar`` whose gradient with state and ``held`` held is that of the
        log evidence.
    :param value_fn: maps the info to the log evidence, where the solver knows it, or to ``None``.
    :return: a function ``(vector, state, with_gradient=True) -> (Evaluation, held)``; pure, so that it may be compiled
        and batched. Where no gradient is asked for, and the solver knows the log evidence, the gradient is zero.
    """

    def evaluate(values: Array, state: object, with_gradient: bool | Array = True) -> tuple[Evaluation, Any]:
        solved, info, held = solve_fn(form_fn(values), state)
        # without weak types, by which another program would be asked for
        info = jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), info)
        solved, held = jax.lax.stop_gradient((solved, held))

        def differentiated() -> tuple[Array, Array]:
            return jax.value_and_grad(lambda x: log_evidence_fn(form_fn(x), solved, held))(values)

        log_evidence = value_fn(info)
        if log_evidence is None:
            log_evidence, slope = differentiated()
        elif with_gradient is True:
            slope = differentiated()[1]  # of the value, the compiler then leaves what the gradient does not need
        else:
            slope = jax.lax.cond(with_gradient, lambda: differentiated()[1], lambda: jnp.zeros_like(values))
        log_prior, prior_slope = jax.value_and_grad(log_prior_fn)(values)
        found = Evaluation(log_evidence + log_prior, slope + prior_slope, log_evidence, solved, info, slope != 0.0)
        return found, held

    return evaluate


def evaluation_fn(
    form_fn: Callable[[Array], Any],
    log_prior_fn: Callable[[Array], Array],
    solve_fn: Callable[[Any, Any], tuple[Any, Any]],
    log_evidence_fn: Callable[[Any, Any], Array],
    value_fn: Callable[[Any], Array | None] = lambda info: None,
) -> Callable[..., Evaluation]:
    """:func:`evaluation_and_held_fn` of fits that hold nothing: the evaluation alone.

    :param solve_fn: ``(form, state) -> (state, info)``.
    :param log_evidence_fn: ``(form, state) -> scalar``; all else as there.
    """
    evaluate = evaluation_and_held_fn(
        form_fn,
        log_prior_fn,
        lambda form, state: (*solve_fn(form, state), None),
        lambda form, state, _: log_evidence_fn(form, state),
        value_fn,
    )
    return lambda *args, **options: evaluate(*args, **options)[0]
