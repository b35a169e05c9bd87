"""What the demo found, engine by engine."""

from __future__ import annotations

from typing import Any, NamedTuple

from .compilation import Stopwatch

__all__ = ["Result"]


class Result(NamedTuple):
    """One engine under one non-linearity."""

    nonlinearity: str
    engine: str
    watch: Stopwatch | None = None
    draws: dict[str, Any] | None = None
    log_evidence: str = ""
    loo: float | None = None
    remark: str = ""
