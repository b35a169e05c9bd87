"""Forests of equal trees some trees at a time: memory for these, and sums of sums, which keep their digits.

In single precision a sum over ten million nodes, one after the other, may lose all digits of a gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .forest import Forest, Level


class ForestCosts(NamedTuple):
    """Numbers of nodes by which a forest is taken in parts. They change what answers cost, never the answers."""

    largest_whole: int = 2**16
    """Nodes up to which a forest is taken at once."""
    largest_part: int = 2**15
    """Nodes of a part at most, where trees are not larger."""


FOREST_COSTS = ForestCosts()
"""Numbers of all engines."""

_Result = TypeVar("_Result")


def num_parts(forest: Forest, costs: ForestCosts = FOREST_COSTS) -> int:
    """Number of parts of equal size in which a forest is taken. Trees are drawn for them, so a few are a sample of
    all."""
    return _num_parts(forest, costs) or 1


def sum_over_trees(
    function: Callable[..., _Result],
    forest: Forest,
    shared: Any,
    *arrays: Array,
    limit: Array | None = None,
    costs: ForestCosts = FOREST_COSTS,
) -> _Result:
    """Sum of ``function(trees, shared, *parts)`` over parts of the forest, where it consists of many equal trees.

    :param function: of a forest, of what all nodes share and of arrays over the nodes, a sum over trees. For
        derivatives it is computed anew.
    :param Forest forest: up to ``costs.largest_whole`` nodes, or trees of several shapes, are one part.
    :param shared: arrays such as parameters of groups.
    :param arrays: of shape ``(num_nodes, ...)``.
    :param limit: the sum is over so many of the :func:`num_parts`, at their cost; by default over all.
    :param ForestCosts costs: by which the parts are chosen.
    """
    chunks = _chunks(forest, costs)
    if chunks is None:
        return function(forest, shared, *arrays)
    part, nodes = chunks

    @jax.checkpoint
    def of(groups: Array, *values: Array) -> _Result:
        # The barriers keep the compiler from adding up all nodes in one place, of the sum and of its derivatives.
        found = function(dataclasses.replace(part, groups=groups), lax.optimization_barrier(shared), *values)
        return lax.optimization_barrier(found)

    def gathered(chosen: Array) -> tuple[Array, ...]:
        return (forest.groups[chosen], *(x[chosen] for x in arrays))

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of, *gathered(nodes[0])))

    def add(total: _Result, numbered: tuple[Array, Array]) -> tuple[_Result, None]:
        number, chosen = numbered
        nodes = gathered(chosen)
        found = of(*nodes) if limit is None else lax.cond(number < limit, of, lambda *nodes: start, *nodes)
        return jax.tree.map(jnp.add, total, found), None

    return lax.scan(add, start, (jnp.arange(len(nodes)), nodes))[0]


def map_trees(function: Callable[..., Any], forest: Forest, *arrays: Array, costs: ForestCosts = FOREST_COSTS) -> Any:
    """``function(trees, *parts)`` of parts of the forest, as of :func:`sum_over_trees`, for arrays over the nodes."""
    chunks = _chunks(forest, costs)
    if chunks is None:
        return function(forest, *arrays)
    part, nodes = chunks

    def of(chosen: Array) -> Any:
        return function(dataclasses.replace(part, groups=forest.groups[chosen]), *(x[chosen] for x in arrays))

    found = lax.map(of, nodes)
    return jax.tree.map(lambda x: jnp.zeros((nodes.size, *x.shape[2:]), x.dtype).at[nodes].set(x), found)


def _num_parts(forest: Forest, costs: ForestCosts) -> int | None:
    """``None`` where the forest is taken at once."""
    roots, below = forest.levels[0].size, forest.levels[1:]
    if forest.num_nodes <= costs.largest_whole or any(level.num_children == 0 for level in below):
        return None
    if any(lower.num_parents != upper.size for upper, lower in zip(below[:-1], below[1:], strict=True)):
        return None
    num_trees = _num_trees(forest)
    whole = math.gcd(num_trees, roots - num_trees)
    fewest = -(-forest.num_nodes // costs.largest_part)
    number = next((k for k in range(max(1, fewest), whole + 1) if whole % k == 0), whole)
    return number if number > 1 else None


def _num_trees(forest: Forest) -> int:
    """Number of trees of more than one node."""
    return forest.levels[1].num_parents if len(forest.levels) > 1 else 0


def _chunks(forest: Forest, costs: ForestCosts) -> tuple[Forest, Array] | None:
    """Trees that are a part of the forest, without groups, and the nodes of each part, in the order by depth."""
    number = _num_parts(forest, costs)
    if number is None:
        return None
    roots, below, num_trees = forest.levels[0].size, forest.levels[1:], _num_trees(forest)
    is_known = not isinstance(forest.order, jax.core.Tracer)
    # Of known forests the compiler gets the result, instead of computing it from large constants.
    order: Any = np.asarray(forest.order) if is_known else forest.order
    ends = np.cumsum([num_trees, roots - num_trees, *(level.size for level in below)])
    # The same sample in every run. Of each level a tree has as many nodes, one after the other.
    rng = np.random.default_rng(0)
    drawn, alone = rng.permutation(num_trees), rng.permutation(roots - num_trees)
    pieces = []
    for position, end in enumerate(ends):
        level = order[ends[position - 1] if position else 0 : end]
        trees = alone if position == 1 else drawn
        pieces.append(level.reshape(trees.size, level.size // max(trees.size, 1))[trees].reshape(number, -1))
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
