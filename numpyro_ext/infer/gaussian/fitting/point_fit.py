"""Fits of the field at given hyperparameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array


class PointFit(NamedTuple):
    """The fit of the field at one point of the hyperparameters."""

    objective: Array
    """Log evidence plus log prior density, as in the search."""
    gradient: Array
    """Gradient of the objective by unconstrained hyperparameters, where it was asked for, shape ``(d,)``."""
    log_evidence: Array
    state: Any
    converged: Array
    hyper: dict[str, Array]
    """All hyperparameters, constrained."""
    marginals: Any
    """Marginals of the posterior there."""
