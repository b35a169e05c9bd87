"""The fit of one sparse linear model by expectation propagation: hyperparameters, state and diagnostics."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...structure import SparseLinearReading
from ..front.failures import at_values
from ..front.learning import Climb, Learned, learn
from ..front.progress import progress_bar as show_progress
from ..front.results import Diagnostics
from ..front.state import EngineState, Fit, data_digest
from ..hyper.space import UnconstrainedSpace
from .tree_programs import TreePrograms

__all__ = ["LARGEST_CURVATURE", "fit_tree"]

LARGEST_CURVATURE = 20


def fit_tree(
    reading: SparseLinearReading,
    space: UnconstrainedSpace,
    programs: TreePrograms,
    projection: Any,
    values: Array,
    state: Any,
    rng_key: Array,
    *,
    max_hyper_steps: int,
    progress_bar: bool,
) -> Fit:
    """Learn the hyperparameters from ``values`` on, and describe how the fit ended.

    :param projection: of the data, from :meth:`TreePrograms.project`.
    :param state: of expectation propagation, where it starts.
    :param rng_key: for the directions in which saddles are left.
    :raises ValueError: if the log evidence is not finite.
    """
    data, fixed = reading.data, space.fixed
    learning, covariance, has_curvature = None, None, False
    messages: list[str] = []
    found: Learned | None = None
    edges: tuple[str, ...] = ()
    if space.size:
        units = programs.units(data, fixed, projection, state, values)
        if not bool(jnp.all(jnp.isfinite(units))):
            units = jnp.ones_like(values)
        origin, is_small = values, space.size <= LARGEST_CURVATURE
        climb = Climb(
            begin=lambda x, start: programs.init_search(
                data, fixed, projection, origin, x, state if start is None else start, is_small
            ),
            advance=partial(programs.search, data, fixed, projection, origin, units),
            space=space,
            origin=origin,
            units=units,
            tol=programs.options.hyper_tol,
            max_steps=max_hyper_steps,
            with_curvature=is_small,
        )
        with show_progress(max_hyper_steps, "EP", enabled=progress_bar) as bar:
            found = learn(climb, [jnp.zeros_like(values)], rng_key, bar=bar)
        if found is None:
            raise _not_finite(space.unpack(values, fixed))
        best, values, learning = found.search.best, origin + units * found.search.values, found.diagnostics
        messages += found.messages
        edges = found.edges
        if not learning.converged and learning.max_gradient > climb.tol:
            messages.append(
                f"The hyperparameters did not converge in {learning.num_iterations} steps: the largest derivative "
                f"is {learning.max_gradient:.2g} per standard error, the tolerance {climb.tol:.2g}. Give more steps "
                "(max_hyper_steps)."
            )
        if found.curvature is not None:
            scale = np.asarray(units)
            covariance, has_curvature = scale[:, None] * found.curvature.covariance * scale, found.curvature.is_peak
    else:
        best = programs.evaluate(data, fixed, projection, state, values)
    hyper, info = space.unpack(values), best.info
    converged = bool(info.converged) and (found is None or (found.diagnostics.converged and not found.is_interrupted))
    if not np.isfinite(float(best.log_evidence)):
        raise _not_finite(hyper)
    if not bool(info.converged):
        messages.append(
            f"Expectation propagation did not converge in {int(info.num_steps)} steps: moments disagree by "
            f"{float(info.max_change):.2g}, the tolerance is {programs.options.tol:.2g}. Give more steps "
            "(num_steps) or damping, or use StructuredMeanField."
        )
    diagnostics = Diagnostics(
        converged=converged,
        num_steps=int(info.num_steps),
        objective_trace=np.asarray(best.log_evidence).reshape(1),
        max_change=float(info.max_change),
        num_skipped=0,
        skipped={},
        hyper=learning,
        messages=tuple(messages),
        edges=edges,
    )
    last = EngineState(values, best.state, None, int(info.num_steps), data_digest(data, fixed))
    return Fit(last, hyper, covariance, has_curvature, float(best.log_evidence), diagnostics)


def _not_finite(hyper: dict[str, Array]) -> ValueError:
    return ValueError(
        f"The log evidence is not finite{at_values(hyper)}: scales of prior or noise may be zero or not finite. Give "
        "other starting values (init_values), or use float64 (numpyro.enable_x64())."
    )
