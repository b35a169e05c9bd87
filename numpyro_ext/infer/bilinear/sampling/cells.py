"""Cells of a matrix of zeros and ones, drawn with known probabilities (Houlsby 2014, chapter 5)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ....linalg.frozen_pytree import frozen_pytree
from ...front.options import check_at_least, check_one_of
from ..algorithms.quadratic.draws import Cells

Scheme = Literal["uniform", "balanced", "biased"]


class Table(NamedTuple):
    """Alias table (Walker 1977): draws from given probabilities at a cost that does not depend on their number."""

    threshold: Array
    alias: Array
    number: Array
    """Places that are drawn, the first ones: others fill up the arrays."""

    @classmethod
    def of(cls, weight: np.ndarray, length: int | None = None) -> Table:
        """Table of probabilities proportional to a weight.

        :param weight: positive.
        :param int length: of the arrays, by default that of the weight.
        """
        number = weight.size
        share = weight * (weight.size / weight.sum())
        alias = np.arange(weight.size)
        small, large = list(np.flatnonzero(share < 1.0)), list(np.flatnonzero(share >= 1.0))
        while small and large:
            low, high = small.pop(), large[-1]
            alias[low] = high
            share[high] -= 1.0 - share[low]
            if share[high] < 1.0:
                small.append(large.pop())
        share[small] = share[large] = 1.0  # what is left differs from one by rounding
        room = 0 if length is None else length - number
        return cls(
            jnp.asarray(np.pad(share, (0, room))),
            jnp.asarray(np.pad(alias, (0, room)), jnp.int32),
            jnp.asarray(number, jnp.int32),
        )

    def draw(self, key: Array, size: int) -> Array:
        """Independent draws of places."""
        place_key, key = jax.random.split(key)
        place = jax.random.randint(place_key, (size,), 0, self.number, jnp.int32)
        stays = jax.random.uniform(key, (size,), self.threshold.dtype) < self.threshold[place]
        return jnp.where(stays, place, self.alias[place])


@frozen_pytree
class CellSampler:
    r"""Distribution over all cells of a matrix of zeros and ones, of which the ones are listed.

    ``"uniform"``: every cell alike. ``"balanced"``: a one or a zero with probability one half, and any of these alike.
    ``"biased"``: a one in proportion to the zeros of its row times those of its column, a zero in proportion to the
    ones of its row times those of its column, each number at least one (Houlsby 2014, section 5.4.2). Nothing of the
    size of the matrix is made: ones are drawn from their list, zeros from rows times columns until they are no ones.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> from numpyro_ext.infer import CellSampler
        >>> sampler = CellSampler.of([0, 0, 2], [0, 3, 1], num_rows=3, num_cols=4, scheme="balanced")
        >>> cells = sampler.draw(jax.random.key(0), 1000)
        >>> print(cells.value.mean().round(1), cells.p[cells.value == 0][0].round(4), sampler.p_row.tolist())
        0.5 0.0556 [0.444, 0.222, 0.333]
    """

    rows: Array
    """Row of each one, in order, shape ``(n,)``."""
    columns: Array
    start: Array
    """Place of the first one of each row, and their number, shape ``(num_rows + 1,)``."""
    share: Array
    """Probability of a one."""
    tables: tuple[Table, Table, Table]
    """Tables of the ones, and of the rows and columns of zeros."""
    row_weights: Array
    """Factors of rows in the probability of a zero and of a one, shape ``(2, num_rows)``."""
    column_weights: Array
    p_row: Array
    """Probability of each row, shape ``(num_rows,)``."""
    p_column: Array

    @classmethod
    def of(
        cls, rows: ArrayLike, cols: ArrayLike, *, num_rows: int, num_cols: int, scheme: Scheme = "balanced"
    ) -> CellSampler:
        """Sampler for a matrix with these ones.

        :param rows: row of each one, integers from 0, shape ``(n,)``.
        :param cols: column of each one.
        :param int num_rows: number of rows.
        :param int num_cols: number of columns.
        :param str scheme: ``"uniform"``, ``"balanced"`` or ``"biased"``.
        :return: the sampler.
        :raises ValueError: if an index is out of range, a cell is listed twice, or all cells are zeros or ones.

        Cost: of the order of the ones.
        """
        check_one_of(Scheme, scheme=scheme)
        check_at_least(1, num_rows=num_rows, num_cols=num_cols)
        i, j = (np.asarray(x) for x in (rows, cols))
        if i.ndim != 1 or i.shape != j.shape or any(x.size and x.dtype.kind not in "iu" for x in (i, j)):
            raise ValueError(
                f"rows and cols must be integers of one shape (n,); got {i.dtype} {i.shape} and {j.dtype} {j.shape}."
            )
        for name, index, number in (("rows", i, num_rows), ("cols", j, num_cols)):
            if index.size and not 0 <= index.min() <= index.max() < number:
                raise ValueError(f"{name} must be from 0 to {number - 1}; got {index.min()} to {index.max()}.")
        order = np.lexsort((j, i))
        i, j = i[order].astype(np.int32), j[order].astype(np.int32)
        twice = np.flatnonzero((np.diff(i) == 0) & (np.diff(j) == 0))
        if twice.size:
            place = f"row {i[twice[0]]} and column {j[twice[0]]}"
            raise ValueError(f"The cell of {place} is listed twice: list each one once.")
        num_ones, num_zeros = i.size, num_rows * num_cols - i.size
        if not num_ones or not num_zeros:
            raise ValueError(
                f"{num_ones} of {num_rows} x {num_cols} cells are ones: draws need ones and zeros. Fit all cells as "
                "listed ones, without unlisted_cells."
            )
        degrees = np.bincount(i, minlength=num_rows), np.bincount(j, minlength=num_cols)
        of_zero = [np.ones(num_rows), np.ones(num_cols)]
        of_one = [np.ones(num_rows), np.ones(num_cols)]
        if scheme == "biased":
            of_zero = [np.maximum(d, 1.0) for d in degrees]
            of_one = [np.maximum(n - d, 1.0) for d, n in zip(degrees, (num_cols, num_rows), strict=True)]
        share = num_ones / (num_rows * num_cols) if scheme == "uniform" else 0.5
        weight = of_one[0][i] * of_one[1][j]
        taken = of_zero[0][i] * of_zero[1][j]
        total = of_zero[0].sum() * of_zero[1].sum() - taken.sum()
        of_one[0] *= share / weight.sum()
        p_side = []
        for side, index, number in ((0, i, num_rows), (1, j, num_cols)):
            ones = np.bincount(index, weight, number) * (share / weight.sum())
            zeros = of_zero[side] * of_zero[1 - side].sum() - np.bincount(index, taken, number)
            p_side.append(ones + zeros * ((1.0 - share) / total))
        tables = Table.of(weight), Table.of(of_zero[0]), Table.of(of_zero[1])
        of_zero[0] *= (1.0 - share) / total
        start = np.concatenate([[0], np.cumsum(degrees[0])]).astype(np.int32)
        weights = [jnp.asarray(np.stack([x, y])) for x, y in zip(of_zero, of_one, strict=True)]
        return cls(
            jnp.asarray(i),
            jnp.asarray(j),
            jnp.asarray(start),
            jnp.asarray(share),
            tables,
            *weights,
            *(jnp.asarray(p) for p in p_side),
        )

    def draw(self, key: Array, size: int) -> Cells:
        """Independent draws of cells, also inside of ``jit``.

        :param key: random number generator key.
        :param int size: number of draws.
        :return: rows, columns and values of the cells, and the probabilities of each, of its row and of its column.

        Cost: per draw that of a binary search among the ones of a row, times the share of zeros that are ones.
        """
        coin_key, one_key, zero_key = jax.random.split(key, 3)
        value = jax.random.bernoulli(coin_key, self.share, (size,))
        place = self.tables[0].draw(one_key, size)
        i, j = self._draw_zeros(zero_key, ~value)
        i, j = jnp.where(value, self.rows[place], i), jnp.where(value, self.columns[place], j)
        kind = value.astype(int)
        p = self.row_weights[kind, i] * self.column_weights[kind, j]
        return Cells(i, j, kind, p, self.p_row[i], self.p_column[j])

    def _draw_zeros(self, key: Array, is_wanted: Array) -> tuple[Array, Array]:
        """Zeros where they are wanted. Where rows are nearly full few are, and most candidates are ones."""
        size, wanted = is_wanted.size, jnp.sum(is_wanted)
        number = size + size // 8 + 8

        def proceed(carry: Any) -> Array:
            return carry[2] < wanted

        def fill(carry: Any) -> Any:
            i, j, filled, key = carry
            key, *keys = jax.random.split(key, 3)
            rows, columns = (table.draw(k, number) for table, k in zip(self.tables[1:], keys, strict=True))
            is_zero = ~self._is_one(rows, columns)
            place = jnp.where(is_zero, filled + jnp.cumsum(is_zero) - 1, size)
            i, j = i.at[place].set(rows, mode="drop"), j.at[place].set(columns, mode="drop")
            return i, j, filled + jnp.sum(is_zero), key

        nothing = jnp.zeros((size,), jnp.int32)
        i, j, _, _ = lax.while_loop(proceed, fill, (nothing, nothing, jnp.asarray(0), key))
        order = jnp.cumsum(is_wanted) - 1
        return i[order], j[order]

    def _is_one(self, rows: Array, columns: Array) -> Array:
        """True for cells that are listed, by a binary search in their rows."""
        end = self.start[rows + 1]

        def halve(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = carry
            middle = (low + high) // 2
            is_open = low < high
            is_below = is_open & (self.columns[jnp.minimum(middle, self.columns.size - 1)] < columns)
            return jnp.where(is_below, middle + 1, low), jnp.where(is_open & ~is_below, middle, high)

        low, _ = lax.while_loop(lambda carry: jnp.any(carry[0] < carry[1]), halve, (self.start[rows], end))
        return (low < end) & (self.columns[jnp.minimum(low, self.columns.size - 1)] == columns)
