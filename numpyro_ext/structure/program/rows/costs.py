"""Sizes at which one way to find rows is preferred to another."""

from __future__ import annotations

from typing import NamedTuple


class RowCosts(NamedTuple):
    """Thresholds by which rows of a program are found. They change what rows cost, never their values."""

    large_value: int = 1_000_000
    """Elements of a value of which only those are computed that are asked for."""
    least_gain: float = 2.0
    """Times as many elements has a value, of which it is worth while to compute some."""
    smallest_operator: int = 512
    """Unknowns below which a matrix is as fast as its products."""


ROW_COSTS = RowCosts()
"""Thresholds of all engines."""
