"""One run: compiled chunks in a Python loop, with progress, interruption, and a judgement of how it ended."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....linalg.gaussian.prior import is_flat
from ....structure import LatentGaussianReading, ModelReading
from ...front.results import Diagnostics, HyperDiagnostics
from ...front.running.chunks import run_in_chunks
from ...front.running.climbs import Climb
from ...front.running.learning import learn
from ...front.running.progress import progress_bar, warn
from ...front.state import NO_ERRORS, EngineState, Fit, check_init_state, data_digest
from ...hyper.search import EVALUATIONS_PER_CHUNK
from ...hyper.space import UnconstrainedSpace
from ..algorithms.modes.iterated_modes import largest_residual
from ..algorithms.pseudo_observations import explain_powers
from .failures import not_finite_error
from .fitting_programs import MOST_CURVED, FittingPrograms
from .flat_directions import check_flat_priors
from .lost_digits import with_lost_digits
from .many import NOTHING_BEGUN, Begun

_LARGEST_CHUNK = 50
_LARGEST_SKIPPED_FRACTION = 0.01


class RunOptions(NamedTuple):
    """Options of a run: how long, how often and how visibly."""

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
    reading: LatentGaussianReading,
    programs: FittingPrograms,
    space: UnconstrainedSpace,
    rng_key: Array,
    options: RunOptions,
    *,
    init_values: Array,
    init_state: EngineState | None = None,
    begun: Begun = NOTHING_BEGUN,
) -> Fit:
    """Learn the hyperparameters, if any, and fit the field.

    :param LatentGaussianReading reading: of the model.
    :param FittingPrograms programs: compiled for the reading's structure.
    :param UnconstrainedSpace space: of the hyperparameters to learn.
    :param rng_key: for the restarts.
    :param RunOptions options: see there.
    :param init_values: unconstrained hyperparameters to start from.
    :param EngineState init_state: of an earlier run, to go on from.
    :param Begun begun: what has been computed already, together with other data sets.
    :raises ValueError: if the density of the model cannot be evaluated, or ``init_state`` is of another model.
    :raises RuntimeError: if the result is not finite, or too many factors were refused in the last step.
    """
    digest = data_digest(reading.written_data, space.fixed, reading.key, programs.key)
    if init_state is not None:
        shapes = jax.eval_shape(programs.init_state, reading.data, space.unpack(init_values))
        check_init_state(init_state, shapes, space.size)
        if init_state.data_digest != digest:
            init_state = init_state._replace(search=None, num_steps=0, data_digest=digest)
        init_values = init_state.values
    if space.size:
        result = _learn(reading, programs, space, rng_key, options, init_values, init_state, digest, begun)
    else:
        result = _fit_field(reading, programs, space, options, init_state, digest, begun)
    check_flat_priors(reading, result.hyper)
    return with_lost_digits(reading, programs, result)


def _fit_field(
    reading: LatentGaussianReading,
    programs: FittingPrograms,
    space: UnconstrainedSpace,
    options: RunOptions,
    init_state: EngineState | None,
    digest: str,
    begun: Begun,
) -> Fit:
    hyper, data = space.unpack(jnp.zeros((0,))), reading.data
    state = programs.init_state(data, hyper) if init_state is None else init_state.state
    before = 0 if init_state is None else init_state.num_steps

    def advance(state: object, length: int, done: int) -> tuple[Any, Any, Array]:
        return programs.solve(data, hyper, state, num_steps=length)

    result = begun.solved or run_in_chunks(
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
        raise not_finite_error(reading, hyper, programs.algorithm)
    last = EngineState(jnp.zeros((0,)), result.carry, None, result.num_steps, digest)
    converged = bool(result.info.converged) and not result.messages
    diagnostics = _diagnose(
        reading, result.info, result.trace, result.num_steps, None, result.messages, converged, options
    )
    return Fit(last, hyper, None, NO_ERRORS, result.objective, diagnostics)


def _learn(
    reading: LatentGaussianReading,
    programs: FittingPrograms,
    space: UnconstrainedSpace,
    rng_key: Array,
    options: RunOptions,
    init_values: Array,
    init_state: EngineState | None,
    digest: str,
    begun: Begun,
) -> Fit:
    data, fixed = reading.data, space.fixed
    messages = explain_powers(reading, space)
    for message in messages:
        warn(message)
    if not programs.has_curvature:
        messages.append(
            f"The param sites have more than {MOST_CURVED} numbers: no standard errors, as the curvature of their "
            "evidence would take two fits for each."
        )
    climb = Climb(
        begin=partial(programs.init_search, data, fixed),
        advance=partial(programs.search, data, fixed),
        space=space,
        origin=np.zeros(init_values.shape, init_values.dtype),
        units=np.ones(init_values.shape, init_values.dtype),
        tol=options.hyper_tol,
        max_steps=options.max_hyper_steps,
        probe_locally=partial(programs.probe_locally, data, fixed) if programs.probes_locally else None,
        second_derivatives=(
            partial(programs.second_derivatives, data, fixed) if programs.has_second_derivatives else None
        ),
        information=partial(programs.information, data, fixed) if programs.has_block_scores else None,
        differences=partial(programs.differences, data, fixed) if programs.measures_metric else None,
        num_first=EVALUATIONS_PER_CHUNK if programs.is_small and not programs.has_second_derivatives else 1,
    )
    starts = [init_values]
    if options.num_restarts:
        noise = jax.random.normal(rng_key, (options.num_restarts, space.size), init_values.dtype)
        starts += [init_values + shift for shift in noise]
    with progress_bar(None, options.name, unit="steps", enabled=options.progress_bar) as bar:
        found = learn(
            climb,
            starts,
            rng_key,
            state=None if init_state is None else init_state.state,
            resumed=None if init_state is None else init_state.search,
            searched=begun.search,
            bar=bar,
        )
    if found is None:
        raise not_finite_error(reading, space.unpack(init_values, fixed), programs.algorithm)
    best, info, learning = found.search.best, found.search.best.info, found.diagnostics
    steps, messages = int(info.num_steps), messages + list(found.messages)
    converged = bool(info.converged) and learning.converged and not found.is_interrupted
    diagnostics = _diagnose(
        reading, info, np.asarray(info.objective_trace)[:steps], steps, learning, messages, converged, options
    )
    last = EngineState(found.search.values, best.state, found.search, 0, digest)
    covariance, has_error = None, NO_ERRORS
    if found.curvature is not None:
        covariance, has_error = found.curvature.covariance, found.curvature.has_error
    diagnostics = diagnostics._replace(edges=found.edges)
    return Fit(last, space.unpack(last.values), covariance, has_error, float(best.log_evidence), diagnostics)


def _diagnose(
    reading: LatentGaussianReading,
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
    residual, error = (None if x is None else float(x) for x in (info.solver_residual, info.objective_error))
    if residual is not None and not residual < (largest := largest_residual(info.solver_residual.dtype)):
        messages.append(
            f"The conjugate gradients and Krylov spaces of the field ended with a relative residual of {residual:.2g}, "
            f"where {largest:.0e} is needed: modes and log evidence are not to be trusted. Levels that few "
            "rows tell apart cause it: factorise (space='direct') if memory allows, or give tighter priors."
        )
    if error:
        messages.append(
            f"The field was solved by conjugate gradients: its log evidence is an estimate by fixed random probes, "
            f"with a standard error of {error:.2g} that is nearly the same at all hyperparameters, and variances are "
            "of the same probes."
        )
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
    if learning is not None and not learning.converged and learning.max_gradient > options.hyper_tol:
        messages.append(
            f"The hyperparameters did not converge in {learning.num_iterations} steps: the largest derivative is "
            f"{learning.max_gradient:.2g}, the tolerance {options.hyper_tol:.2g}."
        )
    ending = (converged, num_steps, trace, max_change, num_skipped, skipped, learning, tuple(messages))
    return Diagnostics(*ending, evidence_error=error)


def _flat_sites(reading: LatentGaussianReading) -> list[str]:
    blocks = zip(reading.field, reading.abstract_form.prior, strict=True)
    return [n for n, block in blocks if is_flat(block) and n not in reading.factor_names]


def _skipped_by_site(reading: LatentGaussianReading, info: Any) -> dict[str, np.ndarray]:
    flags, start, out = np.asarray(info.skipped), 0, {}
    families = zip(reading.factor_names, reading.factor_shapes, reading.rows_per_observation, strict=True)
    for name, shape, num_rows in families:
        size = int(np.prod(shape)) * num_rows
        rows = np.unique(np.flatnonzero(flags[start : start + size]) // num_rows)
        start += size
        if rows.size:
            out[name] = rows
    return out


def check_skipped(fit: Fit, reading: ModelReading, name: str) -> None:
    """Refuse a result in which too many factors were left behind.

    :param Fit fit: the outcome.
    :param ModelReading reading: of the model.
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
