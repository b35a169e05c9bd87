"""Cells of a matrix of zeros and ones, drawn with known probabilities, and fits to these (Houlsby 2014, chapter 5)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ...linalg.frozen_pytree import frozen_pytree
from ...potentials.families.binary import LogitPotential
from ...structure.bilinear.reading import BilinearReading
from ..front.options import check_at_least, check_one_of
from ..front.results import Diagnostics
from ..front.running.chunks import run_in_chunks
from ..front.state import EngineState, Fit, check_init_state
from ..hyper.space import UnconstrainedSpace
from .algorithms.quadratic.draws import Cells, Problem, bound_values, first_step, minibatches
from .algorithms.sweeps import State
from .programs import BilinearPrograms, explain

Scheme = Literal["uniform", "balanced", "biased"]

_CHUNK = 4096
_EVERY = 10
_FEWEST = 100
"""Minibatches before a run may have converged: steps of the second half of fewer add up to less than three."""
_NUM_JUDGED = 20_000


class _Table(NamedTuple):
    """Alias table (Walker 1977): draws from given probabilities at a cost that does not depend on their number."""

    threshold: Array
    alias: Array

    @classmethod
    def of(cls, weight: np.ndarray) -> _Table:
        """Table of probabilities proportional to a weight."""
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
        return cls(jnp.asarray(share), jnp.asarray(alias, jnp.int32))

    def draw(self, key: Array, size: int) -> Array:
        """Independent draws of places."""
        place_key, key = jax.random.split(key)
        place = jax.random.randint(place_key, (size,), 0, self.alias.size, jnp.int32)
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
    tables: tuple[_Table, _Table, _Table]
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
        tables = _Table.of(weight), _Table.of(of_zero[0]), _Table.of(of_zero[1])
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
        i, j = self._draw_zeros(zero_key, size)
        i, j = jnp.where(value, self.rows[place], i), jnp.where(value, self.columns[place], j)
        kind = value.astype(int)
        p = self.row_weights[kind, i] * self.column_weights[kind, j]
        return Cells(i, j, kind, p, self.p_row[i], self.p_column[j])

    def _draw_zeros(self, key: Array, size: int) -> tuple[Array, Array]:
        number = size + size // 8 + 8

        def proceed(carry: Any) -> Array:
            return carry[2] < size

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
        return i, j

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


class _Info(NamedTuple):
    num_steps: int
    converged: bool
    objective_trace: np.ndarray


def fit_sampled(
    reading: BilinearReading,
    space: UnconstrainedSpace,
    programs: BilinearPrograms,
    rng_key: Array,
    start: EngineState | None,
    *,
    digest: str,
    scheme: Scheme,
    batch_size: int | None,
    num_steps: int,
    tol: float,
    show_bar: bool,
) -> Fit:
    """Posterior from minibatches of drawn cells.

    :param start: to go on from, of a run with the same options; of other data it is a place to start from.
    :param batch_size: draws of a minibatch; ``None`` where their moments choose it.
    :param int num_steps: minibatches at most.
    :param float tol: see :class:`~numpyro_ext.infer.BilinearVG`.
    :raises ValueError: if hyperparameters are to be learned, or the start is of another model.
    """
    if space.names:
        raise ValueError(
            f"{list(space.names)} would have to be learned, which drawn cells cannot: fit with zeros='by_row', and "
            "give BilinearVG(..., hyper_values=...) what it learned."
        )
    data, fixed = reading.data, space.fixed
    if start is not None:
        check_init_state(start, jax.eval_shape(programs.init_state, data, fixed), space.size)
        if start.data_digest != digest:  # its steps are long again
            start = start._replace(state=first_step(start.state), num_steps=0)
    form = programs.form(data, fixed)
    rows, columns = (np.asarray(x) for x in (form.row_index, form.column_index))
    assert isinstance(form.potential, LogitPotential)
    is_one = np.asarray(form.potential.label) > 0
    num_rows, num_columns = form.rows.mean.shape[0], form.columns.mean.shape[0]
    sampler = CellSampler.of(rows[is_one], columns[is_one], num_rows=num_rows, num_cols=num_columns, scheme=scheme)
    problem = Problem.of_form(form)
    before = 0 if start is None else start.num_steps
    state = first_step(programs.init_state(data, fixed, rng_key)) if start is None else start.state
    wanted = max(num_rows, num_columns) if batch_size is None else batch_size
    num_chunks = -(-wanted // _CHUNK)
    chunk = -(-wanted // num_chunks)
    # The same cells for all estimates of the bound, so that their differences are known to more digits.
    cells = sampler.draw(jax.random.fold_in(rng_key, 2**31), _NUM_JUDGED)
    kept: list[tuple[int, np.ndarray]] = []
    drawn = 0
    change = error = np.inf

    def advance(state: State, length: int, done: int) -> tuple[State, _Info, float]:
        nonlocal drawn, change, error
        state, number = minibatches(
            problem, state, sampler, rng_key, jnp.asarray(done), jnp.asarray(length),
            num_chunks=num_chunks, chunk=chunk,
        )  # fmt: skip
        drawn, done = drawn + int(number), done + length
        values = np.asarray(bound_values(problem, state, cells), float)
        earlier = [past for count, past in kept if 2 * count <= done]
        if earlier:
            difference = values - earlier[-1]
            change, error = abs(difference.mean()), difference.std() / np.sqrt(values.size)
        if not kept or done >= 1.1 * kept[-1][0]:
            kept.append((done, values))
        limit = tol * (1.0 + abs(values.mean()))
        converged = done >= _FEWEST and change + 2.0 * error < limit
        return state, _Info(length, bool(converged), np.array([values.mean()])), float(values.mean())

    found = run_in_chunks(
        advance, state, num_steps=num_steps, chunk=_EVERY, before=before, name="BilinearVG", unit="minibatches",
        show_bar=show_bar,
    )  # fmt: skip
    state, messages, size = found.carry, found.messages, 1.0 + abs(found.objective)
    if not np.isfinite(found.objective):
        raise ValueError(explain(form, fixed, found.objective))
    spread = np.asarray(bound_values(problem, state, cells), float).std() / np.sqrt(_NUM_JUDGED)
    converged = bool(found.info.converged) and not messages
    if not converged:
        messages.append(
            f"Between one half of {found.num_steps} minibatches and all of them the bound changed by "
            f"{change / size:.2g} of itself, with a standard error of {error / size:.2g}; the change and twice its "
            f"error must be below the tolerance {tol:.2g}. Give more minibatches (num_steps), larger ones "
            "(batch_size), or go on with init_state=engine.last_state."
        )
    first = 2.0**-0.7 * (1.0 - 1e-6)
    for name, step in (("rows", state.row_step), ("columns", state.column_step)):
        number = int(jnp.sum(step >= first))
        if number:
            messages.append(
                f"{number} of {step.size} {name} were in no cell that was drawn: their posterior is the start."
            )
    messages.append(
        f"{drawn} cells were drawn in {found.num_steps - before} minibatches. The trace has estimates of "
        f"the bound after each {_EVERY} of these, with a standard error of {spread:.3g} at the end; log_evidence is "
        "computed."
    )
    prepared = programs.prepare(data, fixed, space.initial())[0]
    bound = float(jax.jit(programs.devices.bound)(prepared, state))
    state = state._replace(objective=jnp.asarray(bound, state.objective.dtype))
    diagnostics = Diagnostics(
        converged, found.num_steps, found.trace, float(change / size), 0, {}, None, tuple(messages)
    )
    return Fit(
        EngineState(jnp.zeros((0,)), state, None, found.num_steps, digest), fixed, None, False, bound, diagnostics
    )
