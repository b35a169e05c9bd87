"""Results of the demo, engine by engine."""

from __future__ import annotations

from typing import Any, NamedTuple


class Result(NamedTuple):
    """One engine under one non-linearity."""

    nonlinearity: str
    engine: str
    first_seconds: float = 0.0
    """Seconds of a run in a process that has compiled nothing for this engine and model."""
    next_seconds: float = 0.0
    """Seconds of a run on other data of the same shape."""
    draws: dict[str, Any] | None = None
    log_evidence: str = ""
    loo: float = 0.0
    mean_gap: float = 0.0
    """Largest difference of the means of the field to those of NUTS, in standard deviations of NUTS."""
    sd_gap: float = 0.0
    """Largest difference of a standard deviation of the field to that of NUTS, as a share of it."""
    remark: str = ""
