"""The fit of one sparse linear model by expectation propagation: hyperparameters, state and diagnostics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..front.failures import at_values
from ..front.progress import progress_bar as show_progress
from ..front.results import Diagnostics, HyperDiagnostics
from ..front.state import EngineState, Fit, data_digest
from ..hyper import search as hyper_search
from ..hyper.space import UnconstrainedSpace
from .tree_programs import TreePrograms

__all__ = ["LARGEST_CURVATURE", "fit_tree"]

LARGEST_CURVATURE = 20
_PER_CHUNK = 10


def fit_tree(
    reading: Any,
    space: UnconstrainedSpace,
    programs: TreePrograms,
    projection: Any,
    values: Array,
    state: Any,
    *,
    max_hyper_steps: int,
    progress_bar: bool,
) -> Fit:
    """Learn the hyperparameters from ``values`` on, and describe how the fit ended.

    :param projection: of the data, from :meth:`TreePrograms.project`.
    :param state: of expectation propagation, where it starts.
    :raises ValueError: if the log evidence is not finite.
    """
    data, fixed = reading.data, space.fixed
    learning, covariance, has_curvature = None, None, False
    messages: list[str] = []
    if space.size:
        units = programs.units(data, fixed, projection, state, values)
        if not bool(jnp.all(jnp.isfinite(units))):
            units = jnp.ones_like(values)
        search, trace = _search(
            programs, (data, fixed, projection), values, units, state, messages, max_hyper_steps, progress_bar
        )
        if int(search.num_iterations) == 0:
            raise _not_finite(space.unpack(values, fixed))
        best, values = search.best, values + units * search.values
        learning = HyperDiagnostics(
            converged=bool(search.converged),
            num_iterations=int(search.num_iterations) - 1,
            num_evaluations=int(search.num_evaluations),
            objective_trace=trace,
            max_gradient=float(jnp.max(jnp.abs(best.gradient))),
        )
        if not learning.converged:
            messages.append(
                f"The hyperparameters did not converge in {learning.num_iterations} steps: the largest derivative "
                f"is {learning.max_gradient:.2g} per standard error, the tolerance "
                f"{programs.options.hyper_tol:.2g}. Give more steps (max_hyper_steps)."
            )
        if int(search.num_probes) == 2 * space.size <= 2 * LARGEST_CURVATURE:
            scale = np.asarray(units)
            curvature = hyper_search.hessian(search, tol=programs.options.hyper_tol) / (scale[:, None] * scale)
            covariance, has_curvature = hyper_search.curvature_covariance(curvature)
    else:
        best = programs.evaluate(data, fixed, projection, state, values)
    hyper, info = space.unpack(values), best.info
    if not np.isfinite(float(best.log_evidence)):
        raise _not_finite(hyper)
    converged = bool(info.converged)
    if not converged:
        messages.append(
            f"Expectation propagation did not converge in {int(info.num_steps)} steps: moments disagree by "
            f"{float(info.max_change):.2g}, the tolerance is {programs.options.tol:.2g}. Give more steps "
            "(num_steps) or damping, or use StructuredMeanField."
        )
    diagnostics = Diagnostics(
        converged=converged and not messages,
        num_steps=int(info.num_steps),
        objective_trace=np.asarray(best.log_evidence).reshape(1),
        max_change=float(info.max_change),
        num_skipped=0,
        skipped={},
        hyper=learning,
        messages=tuple(messages),
    )
    last = EngineState(values, best.state, None, int(info.num_steps), data_digest(data, fixed))
    return Fit(last, hyper, covariance, has_curvature, float(best.log_evidence), diagnostics)


def _search(
    programs: TreePrograms,
    known: tuple[Any, dict[str, Array], Any],
    origin: Array,
    units: Array,
    state: Any,
    messages: list[str],
    max_hyper_steps: int,
    progress_bar: bool,
) -> tuple[hyper_search.SearchState, np.ndarray]:
    with_curvature = origin.size <= LARGEST_CURVATURE
    search = programs.init_search(*known, origin, units, state, with_curvature)
    traces = [np.zeros(0)]
    with show_progress(max_hyper_steps, "EP", enabled=progress_bar) as bar:
        try:
            while not bool(hyper_search.is_finished(search)):
                before = int(search.num_iterations)
                search, trace = jax.block_until_ready(
                    programs.search(*known, origin, units, search, max_hyper_steps, num_evaluations=_PER_CHUNK)
                )
                traces.append(np.asarray(trace)[~np.isnan(trace)])
                bar.update(int(search.num_iterations) - before)
        except KeyboardInterrupt:
            if int(search.num_iterations) == 0:
                raise
            messages.append(f"Interrupted after {int(search.num_evaluations)} evaluations.")
        bar.update(max_hyper_steps - bar.n)
    return search, np.concatenate(traces)


def _not_finite(hyper: dict[str, Array]) -> ValueError:
    return ValueError(
        f"The log evidence is not finite{at_values(hyper)}: scales of prior or noise may be zero or not finite. Give "
        "other starting values (init_values), or use float64 (numpyro.enable_x64())."
    )
