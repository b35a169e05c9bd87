"""The outcome of a run as plain containers, to be written to a file, and back."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..hyper.space import UnconstrainedSpace
from .results import Diagnostics, HyperDiagnostics
from .state import EngineState, Fit, as_numbers

__all__ = ["diagnostics_from_content", "fit_from_content", "fit_to_content", "outcome_to_content"]


def outcome_to_content(fit: Fit) -> dict[str, Any]:
    """What any fit has, whatever the algorithm, as dictionaries, lists, numbers and arrays.

    :param Fit fit: the outcome of a run.
    """
    last, diagnostics = fit.last_state, fit.diagnostics
    learning = diagnostics.hyper
    return {
        "values": last.values,
        "state": jax.tree.leaves(last.state),
        "covariance": fit.covariance,
        "has_curvature": fit.has_curvature,
        "log_evidence": fit.log_evidence,
        "diagnostics": diagnostics._replace(hyper=None)._asdict(),
        "hyper_diagnostics": None if learning is None else learning._asdict(),
    }


def diagnostics_from_content(content: dict[str, Any]) -> Diagnostics:
    """The diagnostics that :func:`outcome_to_content` took apart."""
    learning = content["hyper_diagnostics"]
    hyper = None if learning is None else HyperDiagnostics(**learning)
    return Diagnostics(**content["diagnostics"])._replace(hyper=hyper)


def fit_to_content(fit: Fit, reading: Any) -> dict[str, Any]:
    """Take a fit apart into dictionaries, lists, numbers and arrays.

    :param Fit fit: the outcome of a run.
    :param reading: of the model that was run.
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


class Restorable(Protocol):
    """What tells the shapes of the states that a file holds."""

    def init_state(self, data: Any, hyper: dict[str, Array], /) -> Any:
        """State of the algorithm before its first step."""

    def init_search(self, data: Any, fixed: dict[str, Array], values: Array, state: Any, /) -> Any:
        """State of the search for hyperparameters before its first step."""


def fit_from_content(content: dict[str, Any], reading: Any, programs: Restorable, space: UnconstrainedSpace) -> Fit:
    """Put a fit together again.

    :param dict content: from :func:`fit_to_content`.
    :param reading: of the model on the saved arguments.
    :param Restorable programs: for its structure.
    :param UnconstrainedSpace space: of its hyperparameters.
    :return: the fit.
    :raises ValueError: if model or algorithm are not those of the run.
    """
    values = jnp.asarray(content["values"])
    if values.shape != (space.size,):
        raise ValueError(
            f"The saved run learned {values.size} unconstrained hyperparameters; this model has {space.size}."
        )
    hyper = space.unpack(values)
    shapes = jax.eval_shape(programs.init_state, reading.data, hyper)
    state = _rebuild(shapes, content["state"])
    search = None
    if content["search"] is not None:
        shapes = jax.eval_shape(programs.init_search, reading.data, space.fixed, values, state)
        # A release that searches in another way goes on from the values alone.
        search = _rebuild(shapes, content["search"]) if _fits(shapes, content["search"]) else None
    totals, saved = _form_totals(reading, hyper), content["form_totals"]
    totals = totals if np.iscomplexobj(saved) else totals.real  # files of version 1 keep real parts
    if totals.shape != saved.shape or not np.allclose(totals, saved, rtol=1e-4):
        raise ValueError("On the saved arguments this model has another density than the one that was run.")
    last = EngineState(values, state, search, content["num_steps"], content["data_digest"])
    diagnostics = diagnostics_from_content(content)
    return Fit(last, hyper, content["covariance"], content["has_curvature"], content["log_evidence"], diagnostics)


def _form_totals(reading: Any, hyper: dict[str, Array]) -> np.ndarray:
    """Sums over the arrays of the form: two models that agree in them are taken to be the same."""
    leaves = jax.tree.leaves(reading.form(hyper, reading.data))
    return np.array([np.sum(as_numbers(leaf)) for leaf in leaves])


def _fits(shapes: Any, leaves: list[Array]) -> bool:
    return [x.shape for x in jax.tree.leaves(shapes)] == [jnp.shape(x) for x in leaves]


def _rebuild(shapes: Any, leaves: list[Array]) -> Any:
    expected, treedef = jax.tree.flatten(shapes)
    if not _fits(shapes, leaves):
        raise ValueError("The saved state does not fit this model: it comes from another model or algorithm.")
    return jax.tree.unflatten(treedef, [jnp.asarray(leaf, x.dtype) for x, leaf in zip(expected, leaves, strict=True)])
