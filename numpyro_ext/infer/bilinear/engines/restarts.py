"""Random starts of a bilinear model, whose objective has several maxima, and the best of what they end at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax import Array

from ...front.running.iterations import Iterations, StepInfo, fit_in_chunks
from ...front.state import Fit
from ..algorithms import sweeps as core

NUM_RESTARTS = 3
"""Other starts that are made by default."""
MOST_CELLS_RESTARTED = 20_000
ONE_START = (
    "This is the end of a single random start, and the objective has several maxima: other starts are made by default "
    f"up to {MOST_CELLS_RESTARTED} cells and without a checkpoint, and elsewhere where num_restarts says so."
)
"""Note of a run that makes no other starts."""


def best_of_starts(
    problem: Iterations,
    starts: Sequence[tuple[Array, core.State, int]],
    keep: Callable[[Array, core.State, int], None] | None,
    *,
    goes_on: bool,
) -> tuple[Fit, StepInfo]:
    """Fit from each start, and take the end with the largest objective.

    :param starts: hyperparameters, state and number of iterations made before.
    :param keep: writes the state after each iteration; ``None`` writes nothing.
    :param bool goes_on: whether iterations made before count among those that are allowed.
    """
    fits = []
    for values, state, before in starts:
        found, info = fit_in_chunks(
            problem,
            values,
            state,
            before=before,
            num_steps=max(1, problem.num_steps - before) if goes_on else problem.num_steps,
            chunk=problem.chunk if keep is None else 1,
            # Scales learned from the first random means would shrink to these.
            warm_up=min(problem.chunk, problem.num_steps - 1),
            **({} if keep is None else {"keep": keep}),
        )
        diagnostics = found.diagnostics._replace(num_skipped=int(info.solved.num_refused))
        fits.append((found._replace(diagnostics=diagnostics), info))
        if any(message.startswith("Interrupted") for message in diagnostics.messages):
            break
    return _best(fits, problem.tol)


def _best(fits: list[tuple[Fit, StepInfo]], tol: float) -> tuple[Fit, StepInfo]:
    """The fit with the largest objective, which says between which objectives all of them ended.

    The first one among equals, which differ in the signs and the order of their components.
    """
    ends = [float(found.diagnostics.objective_trace[-1]) for found, _ in fits]
    best, info = fits[int(np.argmax(np.array(ends) >= max(ends) - tol * (1.0 + abs(max(ends)))))]
    if len(fits) == 1:
        return best, info
    spread = f"{len(ends)} random starts ended at objectives from {min(ends):.6g} to {max(ends):.6g}; the best is kept."
    messages = (*best.diagnostics.messages, spread)
    return best._replace(diagnostics=best.diagnostics._replace(messages=messages)), info
