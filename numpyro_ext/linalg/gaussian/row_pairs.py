"""Sums over all pairs of entries within sparse rows, with memory for the pairs of some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..cholesky import from_lower
from .design import LEAST_ENTRIES, SparseRows

FEW_ENTRIES = 4
"""Entries of a row of which all pairs are looked up at once."""
_PAIRS_AT_A_TIME = 300_000
"""Pairs that are made at once: they stay in the cache of a processor until they are added."""
_MOST_ENTRIES_IN_LOOP = 100_000

_Carry = TypeVar("_Carry")


def add_pairs(
    columns: Array, values: Array, weight: Array, add: Callable[[_Carry, Array, Array, Array], _Carry], start: _Carry
) -> _Carry:
    r"""Accumulate the lower triangle of :math:`\sum_r w_r a_r a_r^T` from the entries of the rows :math:`a_r`.

    Rows that have few entries beside padding, as differences have among those of a blur, cost what these do.

    :param columns: shape ``(num_rows, k)``.
    :param values: of the same shape, zero at padding.
    :param weight: shape ``(num_rows,)``.
    :param add: ``(sum, i, j, terms) -> sum``, which adds terms to elements ``i >= j``.
    :param start: the sum of no terms.

    Cost: ``k (k + 1) / 2`` terms a row.
    """

    if is_summed_by_pair(columns):

        def add_pair(total: _Carry, first: Any, second: Any) -> _Carry:
            i, j, terms = _products(columns, values, first, second)
            return add(total, i, j, weight * terms)

        return add_in_turn(add_pair, start, np.triu_indices(columns.shape[1]), columns.size)

    def chunk(total: _Carry, part: tuple[Array, Array, Array]) -> tuple[_Carry, None]:
        def of(width: int) -> Callable[[_Carry], _Carry]:
            i, j, terms = _pairs(part[0][:, :width], part[1][:, :width])
            return lambda total: add(total, i, j, part[2][:, None] * terms)

        return _by_width(part[1], of, total), None

    return lax.scan(jax.checkpoint(chunk), start, _chunks(columns, values, weight))[0]


def gram_of_rows(design: SparseRows, weight: Array) -> Array:
    """``A^T diag(weight) A`` of shape ``(num_columns, num_columns)`` from the pairs of entries of every row."""
    return from_lower(gram_lower(design, weight))


def gram_lower(design: SparseRows, weight: Array) -> Array:
    """Lower triangle of :func:`gram_of_rows`, with zeros above it."""

    def add(total: Array, i: Array, j: Array, terms: Array) -> Array:
        return total.at[j, i].add(terms)

    start = jnp.zeros((design.num_columns, design.num_columns), design.values.dtype)
    # transposed, as LAPACK has columns where rows are here
    return add_pairs(design.columns, design.values, weight, add, start).T


def sum_pairs(columns: Array, values: Array, entries: Callable[[Array, Array], Array]) -> Array:
    r"""The quadratic forms :math:`a_r^T S a_r` of sparse rows, shape ``(num_rows,)``, as :func:`add_pairs`.

    :param entries: elements of the symmetric matrix at ``i >= j``.
    """

    def looked_up(i: Array, j: Array, terms: Array) -> Array:
        # A pair below the diagonal stands for the one above it as well.
        return jnp.where(i > j, 2.0, 1.0).astype(terms.dtype) * terms * entries(i, j)

    if is_summed_by_pair(columns):
        first, *others = (looked_up(*pair) for pair in _each_pair(columns, values))
        return sum(others, first)

    def chunk(_: None, part: tuple[Array, Array]) -> tuple[None, Array]:
        def of(width: int) -> Callable[[Any], Array]:
            pairs = _pairs(part[0][:, :width], part[1][:, :width])
            return lambda _: jnp.sum(looked_up(*pairs), axis=1)

        return None, _by_width(part[1], of, None)

    found: Array = lax.scan(jax.checkpoint(chunk), None, _chunks(columns, values))[1]
    return found.reshape(-1)[: columns.shape[0]]


def add_in_turn(add: Callable[..., _Carry], start: _Carry, parts: tuple[Any, ...], num_entries: int) -> _Carry:
    """Sum of parts that are added one after the other.

    :param add: ``(sum, *part) -> sum``.
    :param start: the sum of no parts.
    :param parts: arrays whose first axis is that of the parts.
    :param int num_entries: entries of the rows. Up to some, a loop adds them: a program that holds the sum once takes
        less time to compile, and a tenth more to run.
    """
    if num_entries <= _MOST_ENTRIES_IN_LOOP:
        return lax.scan(lambda total, part: (add(total, *part), None), start, parts)[0]
    for k in range(len(parts[0])):
        start = add(start, *(part[k] for part in parts))
    return start


def is_summed_by_pair(columns: Array) -> bool:
    """True if sums over many rows of few entries take a pair of entries of all rows after the other: what is looked up
    is then added at once, which is two to six times as fast.

    :param columns: shape ``(num_rows, k)``.
    """
    return columns.shape[1] <= FEW_ENTRIES and columns.size >= LEAST_ENTRIES


def _pairs(columns: Array, values: Array) -> tuple[Array, Array, Array]:
    """Elements of the lower triangle, one for each pair of entries, and what the pair adds to them."""
    return _products(columns, values, *np.triu_indices(columns.shape[1]))


def _each_pair(columns: Array, values: Array) -> Iterator[tuple[Array, Array, Array]]:
    """The same pair after pair, of all rows."""
    for first, second in zip(*np.triu_indices(columns.shape[1]), strict=True):
        yield _products(columns, values, first, second)


def _products(columns: Array, values: Array, first: Any, second: Any) -> tuple[Array, Array, Array]:
    a, b = columns[:, first], columns[:, second]
    # Of two entries at one column, the pair and its mirror image fall on the same element.
    times = jnp.where((a == b) & (first != second), 2.0, 1.0).astype(values.dtype)
    return jnp.maximum(a, b), jnp.minimum(a, b), times * values[:, first] * values[:, second]


def _chunks(*arrays: Array) -> tuple[Array, ...]:
    """The arrays in chunks of about as many rows each, of ``_PAIRS_AT_A_TIME`` at most, filled up with rows of
    zeros."""
    num_rows, width = arrays[0].shape
    most = max(1, _PAIRS_AT_A_TIME // (width * (width + 1) // 2))
    number = max(1, -(-num_rows // most))
    size = -(-num_rows // number)
    padded = [jnp.pad(x, ((0, number * size - num_rows), *((0, 0),) * (x.ndim - 1))) for x in arrays]
    return tuple(x.reshape(number, size, *x.shape[1:]) for x in padded)


def _by_width(values: Array, of: Callable[[int], Callable[[Any], Any]], operand: Any) -> Any:
    width = values.shape[1]
    if width <= FEW_ENTRIES:
        return of(width)(operand)
    is_wide = jnp.any(values[:, FEW_ENTRIES:] != 0.0)
    return lax.cond(is_wide, of(width), of(FEW_ENTRIES), operand)
