"""A dearer rule for the few rows that need it, some at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....linalg.in_range import rows_of
from ....linalg.padding import chunked

_Result = TypeVar("_Result")


def for_few_rows(rule: Callable[[Array], _Result], is_needed: Array, found: _Result, size: int) -> _Result:
    """Results by a rule for the rows that need it, and what was found of the others. Differentiable.

    Cost: one call of the rule for every ``size`` rows that need it.

    :param rule: maps the numbers of ``size`` rows, in order if they are all, to a tree of arrays with an entry for
        each.
    :param Array is_needed: mask of the rows, shape ``(n,)``.
    :param found: the same tree, with entries for all rows.
    :param int size: at most ``n``.

    >>> found = for_few_rows(lambda rows: 10.0 * rows, jnp.array([False, True, True]), jnp.zeros(3), 2)
    >>> print(found)
    [ 0. 10. 20.]
    """
    number = is_needed.shape[0]
    num_batches = -(-number // size)

    def chosen(new: _Result, old: _Result, needs: Array) -> _Result:
        return jax.tree.map(lambda new, old: jnp.where(like(needs, new), new, old), new, old)

    def in_batches() -> _Result:
        if num_batches == 1:
            return chosen(rule(jnp.arange(number)), found, is_needed)
        order = jnp.argsort(~is_needed)  # those that need it first
        # the last batch is filled up with its last row
        batches = chunked(order, num_batches, size, mode="edge")

        def of_batch(rows: Array) -> _Result:
            held, needs = rows_of((found, is_needed), rows)
            return lax.cond(jnp.any(needs), lambda: chosen(rule(rows), held, needs), lambda: held)

        place = jnp.zeros_like(order).at[order].set(jnp.arange(number), unique_indices=True, mode="promise_in_bounds")
        parts = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), lax.map(of_batch, batches))
        return rows_of(parts, place)

    return lax.cond(jnp.any(is_needed), in_batches, lambda: found)


def like(mask: Array, array: Array) -> Array:
    """A mask of rows, in the dimensions of an array that begins with these."""
    return mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim))
