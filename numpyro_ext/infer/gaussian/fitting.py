"""One run: compiled chunks in a Python loop, with progress, interruption, and a judgement of how it ended."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...linalg.gaussian.prior import FlatPrior
from ..front.chunks import run_in_chunks
from ..front.failures import not_finite_error
from ..front.progress import progress_bar, warn
from ..front.results import Diagnostics, HyperDiagnostics
from ..front.state import EngineState, Fit, check_init_state, data_digest
from ..hyper import search as hyper_search
from ..hyper.search import SearchState
from ..hyper.space import UnconstrainedSpace
from .programs import Programs
from .pseudo_observations import explain_powers

__all__ = ["RunOptions", "fit", "judge"]

_LARGEST_CHUNK = 50
_EVALUATIONS_PER_CHUNK = 10
_LARGEST_SKIPPED_FRACTION = 0.01


class RunOptions(NamedTuple):
    """How long, how often and how visibly to run."""

    num_steps: int
    tol: float
    hyper_tol: float
    num_restarts: int
    max_hyper_steps: int
    progress_bar: bool
    name: str


def _chunk(num_steps: int) -> int:
    """The largest divisor of ``num_steps`` that still lets the bar move: one program serves every chunk."""
    divisors = [k for k in range(1, min(num_steps, _LARGEST_CHUNK) + 1) if num_steps % k == 0]
    return divisors[-1] if divisors[-1] >= _LARGEST_CHUNK // 5 or num_steps <= _LARGEST_CHUNK else num_steps


def fit(
    reading: Any,
    programs: Programs,
    space: UnconstrainedSpace,
    rng_key: Array,
    options: RunOptions,
    *,
    init_values: Array,
    init_state: EngineState | None = None,
) -> Fit:
    """Learn the hyperparameters, if any, and fit the field.

    :param reading: of the model.
    :param Programs programs: compiled for the reading's structure.
    :param UnconstrainedSpace space: of the hyperparameters to learn.
    :param rng_key: for the restarts.
    :param RunOptions options: see there.
    :param init_values: unconstrained hyperparameters to start from.
    :param EngineState init_state: of an earlier run, to go on from.
    :raises ValueError: if the density of the model cannot be evaluated, or ``init_state`` is of another model.
    :raises RuntimeError: if the result is not finite, or too many factors were refused in the last step.
    """
    digest = data_digest(reading.data, space.fixed)
    if init_state is not None:
        shapes = jax.eval_shape(programs.init_state, reading.data, space.unpack(init_values))
        check_init_state(init_state, shapes, space.size)
        if init_state.data_digest != digest:
            init_state = init_state._replace(search=None, num_steps=0, data_digest=digest)
        init_values = init_state.values
    if space.size:
        result = _learn(reading, programs, space, rng_key, options, init_values, init_state, digest)
    else:
        result = _fit_field(reading, programs, space, options, init_state, digest)
    return result


def _fit_field(
    reading: Any,
    programs: Programs,
    space: UnconstrainedSpace,
    options: RunOptions,
    init_state: EngineState | None,
    digest: str,
) -> Fit:
    hyper, data = space.unpack(jnp.zeros((0,))), reading.data
    state = programs.init_state(data, hyper) if init_state is None else init_state.state
    before = 0 if init_state is None else init_state.num_steps

    def advance(state: Any, length: int, done: int) -> tuple[Any, Any, Array]:
        return programs.solve(data, hyper, state, num_steps=length)

    result = run_in_chunks(
        advance,
        state,
        num_steps=options.num_steps,
        chunk=_chunk(options.num_steps),
        before=before,
        name=options.name,
        unit="steps",
        show_bar=options.progress_bar,
    )
    if not np.isfinite(result.objective):
        raise not_finite_error(reading, hyper)
    last = EngineState(jnp.zeros((0,)), result.carry, None, result.num_steps, digest)
    converged = bool(result.info.converged) and not result.messages
    diagnostics = _diagnose(
        reading, result.info, result.trace, result.num_steps, None, result.messages, converged, options
    )
    return Fit(last, hyper, None, False, result.objective, diagnostics)


def _learn(
    reading: Any,
    programs: Programs,
    space: UnconstrainedSpace,
    rng_key: Array,
    options: RunOptions,
    init_values: Array,
    init_state: EngineState | None,
    digest: str,
) -> Fit:
    data, fixed = reading.data, space.fixed
    messages = explain_powers(reading, space)
    for message in messages:
        warn(message)
    starts = [init_values]
    resumed = None if init_state is None else init_state.search
    if resumed is None:
        noise = jax.random.normal(rng_key, (options.num_restarts, space.size), init_values.dtype)
        starts += [init_values + shift for shift in noise]

    best: SearchState | None = None
    traces: list[np.ndarray] = []
    with progress_bar(options.max_hyper_steps * len(starts), options.name, enabled=options.progress_bar) as bar:
        for number, start in enumerate(starts):
            if resumed is not None:
                current = _reopen(resumed)
            else:
                state = None if init_state is None else init_state.state
                current = programs.init_search(data, fixed, start, state)
            limit = int(current.num_iterations) + options.max_hyper_steps
            try:
                current, trace = _search_to_end(programs, data, fixed, current, limit, bar)
            except _Interrupted as interruption:
                current, trace = interruption.state, interruption.trace
                messages.append(f"Interrupted after {int(current.num_evaluations)} evaluations.")
            if int(current.num_iterations) == 0:
                if number == 0 and len(starts) == 1:
                    raise not_finite_error(reading, space.unpack(start, fixed))
                messages.append(f"Restart {number} began where the log evidence is not finite and was left out.")
            elif best is None or float(current.best.objective) > float(best.best.objective):
                best = current
            traces.append(trace)
            bar.update((number + 1) * options.max_hyper_steps - bar.n)
            if messages and messages[-1].startswith("Interrupted"):
                break
    if best is None:
        raise not_finite_error(reading, space.unpack(init_values, fixed))
    return _conclude(reading, space, options, best, np.concatenate(traces), messages, digest)


def _reopen(search: SearchState) -> SearchState:
    """A search that stopped for want of steps goes on; its curvature is then of no more use."""
    unfinished = ~search.converged
    return search._replace(is_searching=unfinished, num_probes=jnp.where(unfinished, 0, search.num_probes))


class _Interrupted(Exception):
    def __init__(self, state: SearchState, trace: np.ndarray) -> None:
        super().__init__()
        self.state, self.trace = state, trace


def _search_to_end(
    programs: Programs, data: Any, fixed: dict[str, Array], state: SearchState, limit: int, bar: Any
) -> tuple[SearchState, np.ndarray]:
    traces: list[np.ndarray] = []
    try:
        while not bool(hyper_search.is_finished(state)):
            before = int(state.num_iterations)
            state, trace = jax.block_until_ready(
                programs.search(data, fixed, state, limit, num_evaluations=_EVALUATIONS_PER_CHUNK)
            )
            trace = np.asarray(trace)
            traces.append(trace[~np.isnan(trace)])
            bar.update(int(state.num_iterations) - before)
    except KeyboardInterrupt:
        if int(state.num_iterations) == 0:
            raise
        raise _Interrupted(state, np.concatenate([np.zeros(0), *traces])) from None
    return state, np.concatenate([np.zeros(0), *traces])


def _conclude(
    reading: Any,
    space: UnconstrainedSpace,
    options: RunOptions,
    search: SearchState,
    trace: np.ndarray,
    messages: list[str],
    digest: str,
) -> Fit:
    hyper = space.unpack(search.values)
    covariance, has_curvature = None, False
    if int(search.num_probes) == 2 * space.size and bool(np.all(np.isfinite(search.probes))):
        curvature = hyper_search.hessian(search, tol=options.hyper_tol)
        covariance, has_curvature = hyper_search.curvature_covariance(curvature)
        if not has_curvature:
            messages.append("The log evidence does not curve downwards in every direction: no standard errors.")
    info = search.best.info
    learning = HyperDiagnostics(
        converged=bool(search.converged),
        num_iterations=int(search.num_iterations) - 1,  # the first evaluation is no step
        num_evaluations=int(search.num_evaluations),
        objective_trace=trace,
        max_gradient=float(np.max(np.abs(search.best.gradient))),
    )
    steps = int(info.num_steps)
    interrupted = any(message.startswith("Interrupted") for message in messages)
    converged = bool(info.converged) and learning.converged and not interrupted
    diagnostics = _diagnose(
        reading, info, np.asarray(info.objective_trace)[:steps], steps, learning, messages, converged, options
    )
    last = EngineState(search.values, search.best.state, search, 0, digest)
    return Fit(last, hyper, covariance, has_curvature, float(search.best.log_evidence), diagnostics)


def _diagnose(
    reading: Any,
    info: Any,
    trace: np.ndarray,
    num_steps: int,
    learning: HyperDiagnostics | None,
    messages: list[str],
    converged: bool,
    options: RunOptions,
) -> Diagnostics:
    skipped = _skipped_by_site(reading, info)
    max_change = float(info.max_change)
    num_skipped = int(np.asarray(info.skipped).sum())
    if num_skipped:
        where = ", ".join(f"{len(rows)} of {name!r}" for name, rows in skipped.items())
        messages.append(f"The last step kept the old value of {num_skipped} factors: {where}.")
    if not bool(info.converged):
        messages.append(
            f"The field did not converge in {num_steps} steps: the largest change of the last one is {max_change:.2g}, "
            f"the tolerance {options.tol:.2g}. Give more steps (num_steps) or go on with init_state=engine.last_state."
        )
        flat = _flat_sites(reading)
        if flat:
            messages.append(
                f"The prior of {', '.join(map(repr, flat))} is flat: where the likelihood has no maximum, as with "
                "classes that can be separated, estimates run away. A proper prior holds them."
            )
    if learning is not None and not learning.converged:
        messages.append(
            f"The hyperparameters did not converge in {learning.num_iterations} steps: the largest derivative is "
            f"{learning.max_gradient:.2g}, the tolerance {options.hyper_tol:.2g}."
        )
    return Diagnostics(converged, num_steps, trace, max_change, num_skipped, skipped, learning, tuple(messages))


def _flat_sites(reading: Any) -> list[str]:
    prior = reading.abstract_form.prior
    return [name for name, block in zip(reading.field, prior, strict=True) if isinstance(block, FlatPrior)]


def _skipped_by_site(reading: Any, info: Any) -> dict[str, np.ndarray]:
    flags, start, out = np.asarray(info.skipped), 0, {}
    families = zip(reading.factor_names, reading.factor_shapes, reading.rows_per_observation, strict=True)
    for name, shape, num_rows in families:
        size = int(np.prod(shape)) * num_rows
        rows = np.unique(np.flatnonzero(flags[start : start + size]) // num_rows)
        start += size
        if rows.size:
            out[name] = rows
    return out


def judge(fit: Fit, reading: Any, name: str) -> None:
    """Warn once if the run did not converge, and refuse a result in which too many factors were left behind.

    :param Fit fit: the outcome.
    :param reading: of the model.
    :param str name: of the engine, for the message.
    :raises RuntimeError: if more than one factor in a hundred was refused in the last step (Ko, 2017).
    """
    diagnostics = fit.diagnostics
    num_rows = sum(int(np.prod(shape)) for shape in reading.factor_shapes)
    if diagnostics.num_skipped > _LARGEST_SKIPPED_FRACTION * num_rows:
        raise RuntimeError(
            f"{name}: {diagnostics.num_skipped} of {num_rows} factors had no proper update in the last step "
            f"(sites {', '.join(repr(site) for site in diagnostics.skipped)}), so the result is not to be trusted. "
            "Damping, a power below one, or the sequential schedule often cure this."
        )
    if not diagnostics.converged:
        warn(f"{name} did not converge. " + " ".join(diagnostics.messages))
