"""Elements of stacked trees in loops of programs, in few operations: trees have many leaves."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax import Array, lax

__all__ = ["element_of", "with_element"]

_Tree = TypeVar("_Tree")


def element_of(stacked: _Tree, k: int | Array) -> _Tree:
    """Element ``k`` of a tree of stacked arrays, or the last one, where ``k`` is beyond."""
    found: _Tree = jax.tree.map(
        lambda leaves: lax.dynamic_index_in_dim(leaves, k, keepdims=False, allow_negative_indices=False), stacked
    )
    return found


def with_element(stacked: _Tree, k: int | Array, element: _Tree) -> _Tree:
    """The stacked tree with another element ``k``."""
    found: _Tree = jax.tree.map(
        lambda leaves, leaf: lax.dynamic_update_index_in_dim(leaves, leaf, k, 0, allow_negative_indices=False),
        stacked,
        element,
    )
    return found
