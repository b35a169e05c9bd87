"""Rows of arrays by numbers that are known to be in range."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax import Array

_Tree = TypeVar("_Tree")

IN_RANGE: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
"""Options of ``x.at[index]`` for indices that somebody has checked."""


def rows_of(tree: _Tree, rows: Array) -> _Tree:
    """The rows of these numbers, none of them negative, of the arrays of a tree.

    Indexing with brackets asks of every number whether it counts from the end, for each array anew: a quarter of a
    sweep over cells, and a good part of what is to be compiled where a few rows are looked at.
    """
    found: _Tree = jax.tree.map(lambda leaf: leaf.at[rows].get(**IN_RANGE), tree)
    return found
