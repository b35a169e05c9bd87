"""Solutions of many positive definite systems of middling size, with the batch on the last axis.

All systems of a chunk go through the same loop, each in a lane of its own, so that a processor's vector units work on
several at once. Calls of a library for one system after the other take three times as long at size twenty.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

_LANES = 16
"""Systems of a chunk: two vectors of double precision where these are longest, and a chunk fits in the cache."""
_SMALLEST, _LARGEST, _FEWEST = 9, 32, 16
_BLOCK = 7
"""Columns that are factorised by one loop, once all that stand before them are taken off in one pass."""


def suits_lanes(matrix: Array) -> bool:
    """True if systems with these matrices are solved faster in lanes than otherwise."""
    size = matrix.shape[-1]
    return _SMALLEST <= size <= _LARGEST and matrix.size >= _FEWEST * size**2


def positive_solve_in_lanes(matrix: Array, x: Array) -> Array:
    """``A^-1 x`` for symmetric ``A`` of shape ``(..., n, n)`` and ``x`` of shape ``(..., n)``; nan where ``A`` is not
    positive definite.

    >>> import jax.numpy as jnp
    >>> print(positive_solve_in_lanes(2.0 * jnp.ones((9, 1, 1)), jnp.ones((9, 1)))[0])
    [0.5]
    """

    def product(y: Array) -> Array:
        return (matrix @ y[..., None])[..., 0]

    return lax.custom_linear_solve(product, x, lambda _, y: _in_chunks(matrix, y), symmetric=True)


def _in_chunks(matrix: Array, x: Array) -> Array:
    size, leading = x.shape[-1], x.shape[:-1]
    # the right-hand side as one more row: its factor is what forward substitution gives
    rows = jnp.concatenate([matrix, x[..., None, :]], axis=-2).reshape(-1, size + 1, size)
    num = rows.shape[0]
    num_chunks = -(-num // _LANES)
    # what fills up is solved, too
    fill = jnp.broadcast_to(rows[:1], (num_chunks * _LANES - num, *rows.shape[1:]))
    chunks = jnp.concatenate([rows, fill]).reshape(num_chunks, _LANES, size + 1, size)
    solved: Array = lax.map(lambda chunk: _solved(chunk.transpose(1, 2, 0)).T, chunks)
    return solved.reshape(-1, size)[:num].reshape(*leading, size)


def _at(x: Array, place: Array, axis: int) -> Array:
    return lax.dynamic_index_in_dim(x, place, axis, keepdims=False)


def _solved(rows: Array) -> Array:
    """Solutions, of shape ``(n, lanes)``, from matrices and right-hand sides, ``(n + 1, n, lanes)``."""
    size, num_lanes = rows.shape[1:]
    # columns on the first axis, over which sums go; what stands above a diagonal is zero
    factor = jnp.zeros((0, size + 1, num_lanes), rows.dtype)
    for start in range(0, size, _BLOCK):
        stop = min(size, start + _BLOCK)
        block = rows[start:, start:stop]
        for before in factor[:, start:]:
            block = block - before[:, None] * before[: stop - start]

        def add(place: Array, found: Array, block: Array = block) -> Array:
            column = _at(block, place, 1) - jnp.sum(found * _at(found, place, 1)[:, None], 0)
            column = column / jnp.sqrt(_at(column, place, 0))
            column = jnp.where(jnp.arange(column.shape[0])[:, None] >= place, column, 0.0)
            return lax.dynamic_update_index_in_dim(found, column, place, 0)

        columns = jnp.zeros((stop - start, size + 1 - start, num_lanes), rows.dtype)
        columns = lax.fori_loop(0, stop - start, add, columns)
        factor = jnp.concatenate([factor, jnp.pad(columns, [(0, 0), (start, 0), (0, 0)])])

    def substitute(step: Array, found: Array) -> Array:
        place = size - 1 - step
        column = _at(factor, place, 0)
        new = (column[size] - jnp.sum(column[:size] * found, 0)) / _at(column, place, 0)
        return lax.dynamic_update_index_in_dim(found, new, place, 0)

    return lax.fori_loop(0, size, substitute, jnp.zeros((size, num_lanes), rows.dtype))
