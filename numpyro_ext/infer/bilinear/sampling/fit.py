"""Fits to minibatches of drawn cells of a matrix of zeros and ones (Houlsby 2014, chapter 5)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....potentials.families.binary import LogitPotential
from ....structure.bilinear.reading import BilinearReading
from ...front.results import Diagnostics
from ...front.running.chunks import run_in_chunks
from ...front.state import NO_ERRORS, EngineState, Fit, check_init_state
from ...hyper.space import UnconstrainedSpace
from ..algorithms.quadratic.draws import Problem, first_step
from ..algorithms.schedules.devices import SeveralDevices
from ..algorithms.sweeps import State
from ..programs import BilinearPrograms, explain
from .cells import CellSampler, Scheme
from .parts import Minibatches, OnOneDevice, OnSeveralDevices

_CHUNK = 4096
_EVERY = 10
_FEWEST = 100
"""Minibatches before a run may have converged: steps of the second half of fewer add up to less than three."""
_NUM_JUDGED = 20_000


class _Info(NamedTuple):
    num_steps: int
    converged: bool
    objective_trace: np.ndarray


def fit_sampled(
    reading: BilinearReading,
    space: UnconstrainedSpace,
    programs: BilinearPrograms,
    rng_key: Array,
    start: EngineState | None,
    *,
    digest: str,
    scheme: Scheme,
    batch_size: int | None,
    num_steps: int,
    tol: float,
    show_bar: bool,
) -> Fit:
    """Posterior from minibatches of drawn cells.

    :param start: to go on from, of a run with the same options; of other data it is a place to start from.
    :param batch_size: draws of a minibatch; ``None`` where their moments choose it.
    :param int num_steps: minibatches at most.
    :param float tol: see :class:`~numpyro_ext.infer.BilinearVG`.
    :raises ValueError: if hyperparameters are to be learned, or the start is of another model.
    """
    if space.names:
        raise ValueError(
            f"{list(space.names)} would have to be learned, which drawn cells cannot: fit with zeros='by_row', and "
            "give BilinearVG(..., hyper_values=...) what it learned."
        )
    data, fixed = reading.data, space.fixed
    if start is not None:
        check_init_state(start, jax.eval_shape(programs.init_state, data, fixed), space.size)
        if start.data_digest != digest:  # its steps are long again
            start = start._replace(state=first_step(start.state), num_steps=0)
    form = programs.form(data, fixed)
    rows, columns = (np.asarray(x) for x in (form.row_index, form.column_index))
    assert isinstance(form.potential, LogitPotential)
    is_one = np.asarray(form.potential.label) > 0
    num_rows, num_columns = form.rows.mean.shape[0], form.columns.mean.shape[0]
    sampler = CellSampler.of(rows[is_one], columns[is_one], num_rows=num_rows, num_cols=num_columns, scheme=scheme)
    nothing = jnp.zeros((0,))
    before = 0 if start is None else start.num_steps
    state = first_step(programs.init_state(data, fixed, rng_key)) if start is None else start.state
    wanted = max(num_rows, num_columns) if batch_size is None else batch_size
    num_chunks = -(-wanted // _CHUNK)
    chunk = -(-wanted // num_chunks)
    # The same cells for all estimates of the bound, so that their differences are known to more digits.
    cells = sampler.draw(jax.random.fold_in(rng_key, 2**31), _NUM_JUDGED)
    given, devices = (Problem.of_form(form), sampler, rng_key, cells, num_chunks, chunk), programs.devices
    minibatches: Minibatches = (
        OnSeveralDevices(*given, devices, measures_draws=batch_size is None)
        if isinstance(devices, SeveralDevices)
        else OnOneDevice(*given)
    )
    kept: list[tuple[int, np.ndarray]] = []
    drawn = 0
    change = error = np.inf

    def advance(state: State, length: int, done: int) -> tuple[State, _Info, float]:
        nonlocal drawn, change, error
        state, number = minibatches.advance(state, done, length)
        drawn, done = drawn + number, done + length
        values = minibatches.values(state)
        earlier = [past for count, past in kept if 2 * count <= done]
        if earlier:
            difference = values - earlier[-1]
            change, error = abs(difference.mean()), difference.std() / np.sqrt(values.size)
        if not kept or done >= 1.1 * kept[-1][0]:
            kept.append((done, values))
        limit = tol * (1.0 + abs(values.mean()))
        converged = done >= _FEWEST and change + 2.0 * error < limit
        return state, _Info(length, bool(converged), np.array([values.mean()])), float(values.mean())

    found = run_in_chunks(
        advance,
        devices.put(nothing, state)[1],
        num_steps=num_steps,
        chunk=_EVERY,
        before=before,
        name="BilinearVG",
        unit="minibatches",
        show_bar=show_bar,
    )
    state, messages, size = found.carry, found.messages, 1.0 + abs(found.objective)
    if not np.isfinite(found.objective):
        raise ValueError(explain(form, fixed, found.objective))
    spread = minibatches.values(state).std() / np.sqrt(_NUM_JUDGED)
    prepared = programs.prepare(data, fixed, space.initial())[0]
    bound = float(jax.jit(devices.bound)(prepared, state))
    _, state = devices.get(nothing, state)
    converged = bool(found.info.converged) and not messages
    if not converged:
        messages.append(
            f"Between one half of {found.num_steps} minibatches and all of them the bound changed by "
            f"{change / size:.2g} of itself, with a standard error of {error / size:.2g}; the change and twice its "
            f"error must be below the tolerance {tol:.2g}. Give more minibatches (num_steps), larger ones "
            "(batch_size), or go on with init_state=engine.last_state."
        )
    first = 2.0**-0.7 * (1.0 - 1e-6)
    for name, step in (("rows", state.row_step), ("columns", state.column_step)):
        number = int(jnp.sum(step >= first))
        if number:
            messages.append(
                f"{number} of {step.size} {name} were in no cell that was drawn: their posterior is the start."
            )
    messages.append(
        f"{drawn} cells were drawn in {found.num_steps - before} minibatches. The trace has estimates of "
        f"the bound after each {_EVERY} of these, with a standard error of {spread:.3g} at the end; log_evidence is "
        "computed."
    )
    state = state._replace(objective=jnp.asarray(bound, state.objective.dtype))
    diagnostics = Diagnostics(
        converged, found.num_steps, found.trace, float(change / size), 0, {}, None, tuple(messages)
    )
    return Fit(EngineState(nothing, state, None, found.num_steps, digest), fixed, None, NO_ERRORS, bound, diagnostics)
