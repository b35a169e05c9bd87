"""End of a fit of the field, in the same words for all algorithms."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array


class FitInfo(NamedTuple):
    """End of one fit of the field, in the same words for all algorithms."""

    converged: Array
    """True if a step changed less than ``tol``, and what is sought exists there."""
    num_steps: Array
    objective_trace: Array
    """Objective at each step, shape ``(num_steps,)`` as requested, ``nan`` beyond the last."""
    max_change: Array
    """Change in the last step, which was compared with ``tol``."""
    skipped: Array
    """Mask of the factors that kept their old value in the last step, shape ``(num_rows,)``."""
    objective: Array | None = None
    """Log evidence at the end, if the algorithm has it at hand; nan if it does not exist or a prior is not positive
    definite."""
    objective_error: Array | None = None
    """Standard error of the objective, where it is an estimate by probes."""
    solver_residual: Array | None = None
    """Largest relative residual of linear systems that were solved by iterations, at the end."""
