"""Forests of equal trees some trees at a time: memory for these, and sums of sums, which keep their digits.

In single precision a sum over ten million nodes, one after the other, may lose all digits of a gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .forest import Forest, Level

__all__ = ["LARGEST_CHUNK", "LARGEST_WHOLE", "map_trees", "sum_over_trees"]

LARGEST_WHOLE = 2**16
"""Nodes up to which a forest is taken at once."""
LARGEST_CHUNK = 2**15
"""Nodes of a part at most, where trees are not larger."""

_Result = TypeVar("_Result")


def sum_over_trees(function: Callable[..., _Result], forest: Forest, shared: Any, *arrays: Array) -> _Result:
    """Sum of ``function(trees, shared, *parts)`` over parts of the forest, where it consists of many equal trees.

    :param function: of a forest, of what all nodes share and of arrays over the nodes, a sum over trees. For
        derivatives it is computed anew.
    :param Forest forest: up to ``LARGEST_WHOLE`` nodes, or trees of several shapes, are one part.
    :param shared: arrays such as parameters of groups.
    :param arrays: of shape ``(num_nodes, ...)``.
    """
    chunks = _chunks(forest)
    if chunks is None:
        return function(forest, shared, *arrays)
    part, nodes = chunks

    @jax.checkpoint
    def of(chosen: Array) -> _Result:
        trees = dataclasses.replace(part, groups=forest.groups[chosen])
        # The barriers keep the compiler from adding up all nodes in one place, of the sum and of its derivatives.
        found = function(trees, lax.optimization_barrier(shared), *(x[chosen] for x in arrays))
        result: _Result = lax.optimization_barrier(found)
        return result

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of, nodes[0]))
    total: _Result = lax.scan(lambda total, chosen: (jax.tree.map(jnp.add, total, of(chosen)), None), start, nodes)[0]
    return total


def map_trees(function: Callable[..., Any], forest: Forest, *arrays: Array) -> Any:
    """``function(trees, *parts)`` of parts of the forest, as of :func:`sum_over_trees`, for arrays over the nodes."""
    chunks = _chunks(forest)
    if chunks is None:
        return function(forest, *arrays)
    part, nodes = chunks

    def of(chosen: Array) -> Any:
        return function(dataclasses.replace(part, groups=forest.groups[chosen]), *(x[chosen] for x in arrays))

    found = lax.map(of, nodes)
    return jax.tree.map(lambda x: jnp.zeros((nodes.size, *x.shape[2:]), x.dtype).at[nodes].set(x), found)


def _chunks(forest: Forest) -> tuple[Forest, Array] | None:
    """Trees that are a part of the forest, without groups, and the nodes of each part, in the order by depth."""
    roots, below = forest.levels[0].size, forest.levels[1:]
    if forest.num_nodes <= LARGEST_WHOLE or any(level.num_children == 0 for level in below):
        return None
    num_trees = below[0].num_parents if below else 0
    if any(lower.num_parents != upper.size for upper, lower in zip(below[:-1], below[1:], strict=True)):
        return None
    whole = math.gcd(num_trees, roots - num_trees)
    number = next((k for k in range(1, whole + 1) if whole % k == 0 and forest.num_nodes <= k * LARGEST_CHUNK), whole)
    if number == 1:
        return None
    is_known = not isinstance(forest.order, jax.core.Tracer)
    # Of known forests the compiler gets the result, instead of computing it from large constants.
    order: Any = np.asarray(forest.order) if is_known else forest.order
    ends = np.cumsum([num_trees, roots - num_trees, *(level.size for level in below)])
    pieces = [
        order[end - size : end].reshape(number, -1) for end, size in zip(ends, np.diff(ends, prepend=0), strict=True)
    ]
    nodes = np.concatenate(pieces, axis=1) if is_known else jnp.concatenate(pieces, axis=1)
    levels = [Level(roots // number, 0, 0)]
    above = [np.full(roots // number, -1)]
    for level in below:
        levels.append(Level(level.size // number, level.num_parents // number, level.num_children))
        above.append(np.arange(levels[-1].size) // level.num_children)
    starts = np.cumsum([0, *(level.size for level in levels)])[:-2]
    parents = [above[0], *(start + places for start, places in zip(starts, above[1:], strict=True))]
    places = jnp.arange(nodes.shape[1], dtype=jnp.int32)
    part = Forest(
        parents=jnp.asarray(np.concatenate(parents), jnp.int32),
        groups=jnp.zeros_like(places),
        order=places,
        positions=places,
        parents_in_order=jnp.asarray(np.concatenate(above), jnp.int32),
        num_groups=forest.num_groups,
        levels=tuple(levels),
    )
    return part, jnp.asarray(nodes)
