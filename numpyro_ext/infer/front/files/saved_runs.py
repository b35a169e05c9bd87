"""The outcome of a run as plain containers, to be written to a file, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.pytree import PyTree
from ....structure.model.reading import ModelReading
from ....structure.program.run_compiled import run_compiled
from ...hyper.space import UnconstrainedSpace
from ..results import Diagnostics, HyperDiagnostics
from ..state import EngineState, Fit, as_numbers, fits, rebuilt
from .content import Content

_MOST_DRAWN = 2_000_000
"""Numbers of draws that are kept: making them again takes programs that compile for seconds."""


def outcome_to_content(fit: Fit) -> Content:
    """Content of any fit, whatever the algorithm, as dictionaries, lists, numbers and arrays.

    :param Fit fit: the outcome of a run.
    """
    last, diagnostics = fit.last_state, fit.diagnostics
    learning = diagnostics.hyper
    return {
        "values": last.values,
        "state": jax.tree.leaves(last.state),
        "covariance": fit.covariance,
        "has_error": fit.has_error,
        "log_evidence": fit.log_evidence,
        "diagnostics": diagnostics._replace(hyper=None)._asdict(),
        "hyper_diagnostics": None if learning is None else learning._asdict(),
    }


def draws_to_content(draws: tuple[dict[str, Array], Array | None] | None) -> Content:
    """Content of draws that have been made, with their log densities; nothing where there are many numbers."""
    if draws is None or sum(value.size for value in draws[0].values()) > _MOST_DRAWN:
        return {}
    return {"draws": draws[0], "log_density": draws[1]}


def errors_from_content(content: Content) -> np.ndarray:
    """Free hyperparameters with a standard error; files of versions 1 and 2 have them of all or of none."""
    if "has_error" in content:
        return np.asarray(content["has_error"])
    return np.full(np.shape(content["values"]), content["has_curvature"])


def diagnostics_from_content(content: Content) -> Diagnostics:
    """The diagnostics that :func:`outcome_to_content` took apart."""
    learning = content["hyper_diagnostics"]
    hyper = None if learning is None else HyperDiagnostics(**learning)
    return Diagnostics(**content["diagnostics"])._replace(hyper=hyper)


def fit_to_content(fit: Fit, reading: ModelReading) -> Content:
    """Take a fit apart into dictionaries, lists, numbers and arrays.

    :param Fit fit: the outcome of a run.
    :param ModelReading reading: of the model that was run.
    :return: what :func:`fit_from_content` understands.
    """
    last = fit.last_state
    return {
        **outcome_to_content(fit),
        "search": None if last.search is None else jax.tree.leaves(last.search),
        "num_steps": last.num_steps,
        "data_digest": last.data_digest,
        "form_totals": _form_totals(reading, fit.hyper),
    }


def fit_from_content(
    content: Content,
    reading: ModelReading,
    space: UnconstrainedSpace,
    init_state: Callable[[PyTree, dict[str, Array]], PyTree],
    init_search: Callable[[object, dict[str, Array], Array, object], object] | None = None,
) -> Fit:
    """Put a fit together again.

    :param dict content: from :func:`fit_to_content`.
    :param ModelReading reading: of the model on the saved arguments.
    :param UnconstrainedSpace space: of its hyperparameters.
    :param init_state: ``(data, hyper)``: the state of the algorithm before its first step, or its shapes.
    :param init_search: ``(data, fixed, values, state)``: that of a search around it, where there is one.
    :return: the fit.
    :raises ValueError: if model or algorithm are not those of the run.
    """
    values, state = state_from_content(content, reading, space, init_state)
    hyper, search = space.unpack(values), None
    if content["search"] is not None and init_search is not None:
        shapes = jax.eval_shape(init_search, reading.data, space.fixed, values, state)
        # A release that searches in another way goes on from the values alone.
        search = rebuilt(shapes, content["search"]) if fits(shapes, content["search"]) else None
    totals, saved = _form_totals(reading, hyper), content["form_totals"]
    totals = totals if np.iscomplexobj(saved) else totals.real  # files of version 1 keep real parts
    if totals.shape != saved.shape or not np.allclose(totals, saved, rtol=1e-4):
        raise ValueError("On the saved arguments this model has another density than the one that was run.")
    last = EngineState(values, state, search, content["num_steps"], content["data_digest"])
    diagnostics = diagnostics_from_content(content)
    errors = errors_from_content(content)
    return Fit(last, hyper, content["covariance"], errors, content["log_evidence"], diagnostics)


def state_from_content(
    content: dict[str, Any],
    reading: ModelReading,
    space: UnconstrainedSpace,
    init_state: Callable[[PyTree, dict[str, Array]], PyTree],
) -> tuple[Array, Any]:
    """The unconstrained hyperparameters and the state that :func:`outcome_to_content` took apart.

    :raises ValueError: if they are not those of this model; the parameters are those of :func:`fit_from_content`.
    """
    values = jnp.asarray(content["values"])
    if values.shape != (space.size,):
        raise ValueError(f"The saved run learned {values.size} hyperparameters; this model has {space.size}.")
    shapes = jax.eval_shape(init_state, reading.data, space.unpack(values))
    if not fits(shapes, content["state"]):
        raise ValueError("The saved state does not fit this model: it comes from another model or algorithm.")
    return values, rebuilt(shapes, content["state"])


def _form_totals(reading: ModelReading, hyper: dict[str, Array]) -> np.ndarray:
    """Sums over the arrays of the form: two models that agree in them are taken to be the same."""
    # one program for all operations
    leaves = run_compiled(lambda hyper, data: jax.tree.leaves(reading.form(hyper, data)), hyper, reading.data)
    return np.array([np.sum(as_numbers(leaf)) for leaf in leaves])
