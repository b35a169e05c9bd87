"""Elements of stacked trees in loops of programs, in few operations: trees have many leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...compilation.pytree import PyTree

_Tree = TypeVar("_Tree")


def element_of(stacked: _Tree, k: int | Array) -> _Tree:
    """Element ``k`` of a tree of stacked arrays, or the last one, where ``k`` is beyond."""
    return jax.tree.map(
        lambda leaves: lax.dynamic_index_in_dim(leaves, k, keepdims=False, allow_negative_indices=False), stacked
    )


def with_element(stacked: _Tree, k: int | Array, element: _Tree) -> _Tree:
    """The stacked tree with another element ``k``."""
    return jax.tree.map(
        lambda leaves, leaf: lax.dynamic_update_index_in_dim(leaves, leaf, k, 0, allow_negative_indices=False),
        stacked,
        element,
    )


def at_each(function: Callable[[object], object], stacked: object, number: int | Array) -> Any:
    """The function of each of the first ``number`` of stacked arguments, one after the other; zeros at the others."""

    def step(k: Array, found: object) -> PyTree:
        return with_element(found, k, function(element_of(stacked, k)))

    shapes = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], stacked))
    length = len(jax.tree.leaves(stacked)[0])
    nothing = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape), leaf.dtype), shapes)
    return lax.fori_loop(0, number, step, nothing)
