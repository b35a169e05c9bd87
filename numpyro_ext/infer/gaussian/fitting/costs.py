"""Sizes at which one way to fit is preferred to another."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FIT_COSTS", "FitCosts"]


class FitCosts(NamedTuple):
    """Thresholds by which engines with a Gaussian field choose how to fit. They change what fits cost."""

    least_probes: int = 50_000
    """Rows times hyperparameters from which curvatures come from factors held at the end of a search."""
    most_lanes: int = 32
    """Data sets that are fitted at once."""
    most_points: int = 20_000
    """Points of a lattice over the hyperparameters, which is cut there, and that is said."""


FIT_COSTS = FitCosts()
"""Thresholds of all engines."""
