r"""Stochastic inference for matrices of zeros and ones whose cells are drawn (Houlsby 2014, chapter 5).

A minibatch of drawn cells estimates the best natural parameters of each vector, all others being held:

.. math:: \hat h^* = h_0 + \frac{\bar v\,(\kappa - c\,(\mu - \bar u \bar v))}{p(j \mid i)}, \qquad
    \hat p^* = p_0 + \frac{c\,(\bar v^2 + \tilde v)}{p(j \mid i)},

with the parabola :math:`\kappa a - c a^2 / 2` of a cell at its best tangent and the mean :math:`\mu` of its predictor.
Vectors that were drawn move by a share :math:`(1 + t)^{-0.7}` towards the mean of their estimates, where ``t`` counts
their moves. Estimates are unbiased on cells that know nothing of the state. As in the source, the common unknowns, the
columns and then the rows move on the same cells, so that the later moves have a bias, which goes to zero with the
steps: with draws of its own for each move the bound of a matrix of 2000 x 1000 after as many draws was a third lower.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from .....linalg.cholesky import cholesky, cholesky_inverse, cholesky_solve
from .....potentials.families.binary import LogitPotential
from .....structure.bilinear.form import Bilinear, GaussianSide
from ..background import AllPairs, even_zero
from ..cells import Block, Side, oriented, over_devices
from ..incidence import SideBlock
from ..steps import divergence
from ..sweeps import DrawMoments, State
from .moments import own_moments, partner_moments
from .rules import Parabola, parabola, with_rule

_DECAY = 0.7
_ACCURACY = 2.0
"""Square of the relative error of an estimate, times the probability of more."""
_FEWEST = 5
MOST_DRAWS = 20
"""Draws of the first and smallest minibatch and of the largest, per vector of the longer side. The source has one in
the smallest: moments of few draws ask for too little, and a vector then moves by more than half of itself to what a
single cell says, which lowered the bound of a matrix of 2000 x 1000 from the second minibatch to the fifth."""


class Cells(NamedTuple):
    """Drawn cells, arrays of shape ``(size,)``."""

    rows: Array
    columns: Array
    value: Array
    """Zeros and ones."""
    p: Array
    """Probability with which the cell was drawn."""
    p_row: Array
    """Probability of its row."""
    p_column: Array


class Draws(NamedTuple):
    """Cells of a minibatch."""

    cells: Cells
    """With a leading axis of chunks."""
    number: Array | int
    """Cells that are used, the first ones: a minibatch whose size is found by its run has room for the largest."""


class Part(NamedTuple):
    """Device that draws the cells of its own rows, among others that draw those of theirs."""

    axis_name: str
    """Name of the axis of devices."""
    chunk: int
    """Cells that a device draws at once."""
    room: int
    """Chunks that a device has room for."""


class Drawer(Protocol):
    """Distribution over the cells of a matrix."""

    p_row: Array
    p_column: Array

    def draw(self, key: Array, size: int) -> Cells:
        """Independent draws."""
        ...


class Problem(NamedTuple):
    """A form whose cells are all pairs of a row and a column."""

    rows: GaussianSide
    columns: GaussianSide
    common: GaussianSide | None
    pairs: AllPairs
    """Coefficients and offset, which all cells share."""
    log_constant: Array

    @classmethod
    def of_form(cls, form: Bilinear) -> Problem:
        """The problem of a form with independent vectors."""
        assert isinstance(form.rows, GaussianSide) and isinstance(form.columns, GaussianSide)
        bound = even_zero(jnp.ones((), form.rows.mean.dtype))
        pairs = AllPairs.of_form(form, oriented(form, "rows")[2], bound, 1.0)
        return cls(form.rows, form.columns, form.common and form.common.prior, pairs, form.log_constant)


def first_step(state: State) -> State:
    """The state with all steps at their first size."""
    return state._replace(
        row_step=jnp.full_like(state.row_step, 2.0**-_DECAY), column_step=jnp.full_like(state.column_step, 2.0**-_DECAY)
    )


def first_moments(block: SideBlock) -> DrawMoments:
    """Moments before the first draw."""
    num, size = block.mean.shape
    nothing = jnp.zeros((num, 2 * size), block.mean.dtype)
    return DrawMoments(nothing, nothing, jnp.zeros((num,), block.mean.dtype))


class _Seen(NamedTuple):
    """Drawn cells as one side sees them."""

    own: Array
    u: tuple[Array, Array]
    """Means and variances of the own vectors and of a one, shape ``(size, k + 1)``."""
    partner: tuple[Array, Array]
    """The same of what multiplies these."""
    mean: Array
    """Means of the predictors."""
    parabola: Parabola
    p_own: Array


def _see(problem: Problem, state: State, side: Side, cells: Cells) -> _Seen:
    is_rows = side == "rows"
    pairs = problem.pairs if is_rows else problem.pairs.seen_from_columns()
    own, other = (state.rows, state.columns) if is_rows else (state.columns, state.rows)
    assert isinstance(own, Block) and isinstance(other, Block)
    here, there = own_moments(own, True), partner_moments(pairs.coefficients, own.mean.shape[1], other, True)
    assert here.variance is not None and there.variance is not None
    i, j = (cells.rows, cells.columns) if is_rows else (cells.columns, cells.rows)
    u, s, m, t = here.mean[i], here.variance[i], there.mean[j], there.variance[j]
    mean = jnp.sum(u * m, -1) + pairs.offset
    variance = jnp.sum(u**2 * t + s * (m**2 + t), -1)
    if state.common is not None and pairs.common is not None:
        assert state.common.covariance is not None
        mean += pairs.common @ state.common.mean[0]
        variance += pairs.common @ state.common.covariance[0] @ pairs.common
    found = parabola(with_rule(LogitPotential(cells.value), "jaakkola"), mean, variance)
    return _Seen(i, (u, s), (m, t), mean, found, cells.p_row if is_rows else cells.p_column)


def drawn(drawer: Drawer, key: Array, number: Array | int, most: int, size: int) -> Draws:
    """Draw a minibatch.

    :param number: of cells.
    :param int most: chunks that there is room for.
    :param int size: cells of a chunk.
    """

    def fill(chunk: Array, room: Cells) -> Cells:
        cells = drawer.draw(jax.random.fold_in(key, chunk), size)
        return jax.tree.map(lambda kept, new: kept.at[chunk].set(new), room, cells)

    shapes = jax.eval_shape(lambda: drawer.draw(key, size))
    room: Cells = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), shapes)
    return Draws(lax.fori_loop(0, -(-number // size), fill, room), number)


def drawn_by_part(drawer: Drawer, masses: Array, key: Array, number: Array | int, part: Part) -> Draws:
    """Draw the cells of a minibatch that are of the rows of this device: as many as of all draws fall to these.

    :param drawer: of cells of these rows.
    :param masses: probabilities of the rows of each device, shape ``(num_devices,)``.
    :param key: the same on all devices.
    :param number: of cells of all devices.
    """
    share_key, key = jax.random.split(key)
    place = lax.axis_index(part.axis_name)
    numbers = jax.random.multinomial(share_key, jnp.asarray(number, masses.dtype), masses)
    own = jnp.minimum(numbers[place].astype(int), part.room * part.chunk)
    return drawn(drawer, jax.random.fold_in(key, place), own, part.room, part.chunk)


def _over_chunks(draws: Draws, visit: Any, start: Any, axis_name: str | None) -> Any:
    """Sums of ``visit(sums, cells, is_used)`` over chunks of draws, and over devices."""
    size = draws.cells.rows.shape[1]

    def visit_chunk(chunk: Array, sums: Any) -> Any:
        is_used = chunk * size + jnp.arange(size) < draws.number
        return visit(sums, jax.tree.map(lambda x: x[chunk], draws.cells), is_used)

    return over_devices(lax.fori_loop(0, -(-draws.number // size), visit_chunk, start), axis_name)


def best_common(problem: Problem, state: State, draws: Draws, axis_name: str | None = None) -> Block:
    """The best common unknowns, as the draws estimate them."""
    common, prior, pairs = state.common, problem.common, problem.pairs
    assert common is not None and prior is not None and pairs.common is not None
    shift = pairs.common @ common.mean[0]

    def visit(sums: tuple[Array, Array], cells: Cells, is_used: Array) -> tuple[Array, Array]:
        seen = _see(problem, state, "rows", cells)
        weight = is_used / cells.p
        curvature = weight * seen.parabola.curvature
        linear = weight * seen.parabola.slope - curvature * (seen.mean - shift)
        return sums[0] + jnp.sum(curvature), sums[1] + jnp.sum(linear)

    zero = jnp.zeros((), shift.dtype)
    curvature, linear = _over_chunks(draws, visit, (zero, zero), axis_name)
    number = over_devices(draws.number, axis_name)
    precision = prior.matrices + curvature / number * jnp.outer(pairs.common, pairs.common)
    mean = prior.apply(prior.mean) + linear / number * pairs.common
    factor = cholesky(precision)
    return Block(cholesky_solve(factor, mean), cholesky_inverse(factor))


class BestVectors(NamedTuple):
    """Best natural parameters of the vectors of a side, as the draws of a minibatch estimate them."""

    estimate: Array
    """Means over the draws of a vector, linear terms and then precisions, shape ``(num, 2 size)``."""
    square: Array | None
    """Means of their squares, where they are asked for."""
    number: Array
    """Draws of each vector, shape ``(num,)``."""


def best_vectors(
    problem: Problem,
    state: State,
    side: Side,
    draws: Draws,
    *,
    with_squares: bool = False,
    axis_name: str | None = None,
) -> BestVectors:
    """Best vectors of one side, all else being held: unbiased for those that were drawn, on draws that
    the state does not depend on."""
    own: Block = getattr(state, side)
    prior: GaussianSide = getattr(problem, side)
    num, size = own.mean.shape
    matrix = prior.matrices
    diagonal = jnp.broadcast_to(jnp.diagonal(matrix, axis1=-2, axis2=-1), own.mean.shape)
    # What the prior says of a component, the others being held.
    linear = prior.apply(prior.mean - own.mean) + diagonal * own.mean
    base = jnp.concatenate([linear, diagonal], axis=1)

    def visit(sums: Array, cells: Cells, is_used: Array) -> Array:
        seen = _see(problem, state, side, cells)
        u, m, t = seen.u[0][:, :size], seen.partner[0][:, :size], seen.partner[1][:, :size]
        weight = seen.p_own / cells.p
        curvature = weight * seen.parabola.curvature
        rest = weight * seen.parabola.slope - curvature * seen.mean
        found = jnp.concatenate([m * (rest[:, None] + curvature[:, None] * u * m), curvature[:, None] * (m**2 + t)], 1)
        parts = [found, jnp.ones_like(weight)[:, None]]
        if with_squares:
            parts.append((base[seen.own] + found) ** 2)
        return sums.at[seen.own].add(jnp.where(is_used[:, None], jnp.concatenate(parts, axis=1), 0.0))

    width = 2 * size * (2 if with_squares else 1) + 1
    sums = _over_chunks(draws, visit, jnp.zeros((num, width), own.mean.dtype), axis_name if side == "columns" else None)
    number = sums[:, 2 * size]
    mean = sums / jnp.maximum(number, 1.0)[:, None]
    return BestVectors(base + mean[:, : 2 * size], mean[:, 2 * size + 1 :] if with_squares else None, number)


def move_vectors(block: SideBlock, step: Array, best: BestVectors) -> tuple[Block, Array]:
    """Vectors and next steps after a step of those that were drawn."""
    assert isinstance(block, Block) and block.covariance is not None
    size = block.mean.shape[1]
    share = jnp.where(best.number > 0.0, step, 0.0)[:, None]
    precision = (1.0 - share) / block.covariance + share * best.estimate[:, size:]
    linear = (1.0 - share) * block.mean / block.covariance + share * best.estimate[:, :size]
    return Block(linear / precision, 1.0 / precision), jnp.where(best.number > 0.0, _next_step(step), step)


def _next_step(step: Array) -> Array:
    return (step ** (-1.0 / _DECAY) + 1.0) ** -_DECAY


def updated_moments(moments: DrawMoments, best: BestVectors) -> DrawMoments:
    """Running moments with the draws of a minibatch, which weigh as if they came one after the other."""
    assert best.square is not None
    weight = (1.0 - (1.0 - (1.0 + moments.number) ** -_DECAY) ** best.number)[:, None]
    first = moments.first + weight * (best.estimate - moments.first)
    second = moments.second + weight * (best.square - moments.second)
    return DrawMoments(first, second, moments.number + best.number)


def wanted_size(moments: tuple[DrawMoments, DrawMoments], drawer: Drawer, axis_name: str | None = None) -> Array:
    """Draws of a minibatch that estimate the vectors of both sides to the accuracy asked for, in the mean of all
    components of those that were ever drawn."""
    total, number = jnp.zeros(()), jnp.zeros(())
    for found, p, axis in zip(moments, (drawer.p_row, drawer.p_column), (axis_name, None), strict=True):
        variance = jnp.maximum(found.second - found.first**2, 0.0).reshape(len(p), 2, -1).sum(1)
        size = jnp.maximum((found.first**2).reshape(len(p), 2, -1).sum(1), jnp.finfo(variance.dtype).tiny)
        is_seen = (found.number > 0.0)[:, None]
        total += over_devices(jnp.sum(jnp.where(is_seen, variance / (_ACCURACY * p[:, None] * size), 0.0)), axis)
        number += over_devices(jnp.sum(is_seen), axis) * size.shape[1]
    return total / jnp.maximum(number, 1.0)


def draw_minibatches(
    problem: Problem,
    state: State,
    drawer: Drawer,
    key: Array,
    done: Array,
    number: Array,
    masses: Array | None = None,
    *,
    num_chunks: int,
    chunk: int,
    part: Part | None = None,
) -> tuple[State, Array]:
    """Some minibatches of a run.

    :param Problem problem: the model.
    :param State state: where to start; with moments the size of minibatches is found from these.
    :param drawer: of the cells.
    :param key: of the run: each minibatch has its own by its number.
    :param done: minibatches before these.
    :param number: of minibatches.
    :param masses: see :func:`drawn_by_part`.
    :param int num_chunks: of each minibatch; with moments for one draw per vector of the longer side.
    :param int chunk: cells that are drawn at once.
    :param Part part: of a device, where the rows are divided between several.
    :return: the state, and the number of cells drawn.

    Cost: per drawn cell linear in the rank. Memory: the cells of the largest minibatch.
    """
    axis = None if part is None else part.axis_name
    measures = state.moments is not None
    num_rows = over_devices(jnp.sum(problem.rows.weighted(jnp.ones_like(state.row_step))), axis)
    least = jnp.maximum(num_rows, state.columns.mean.shape[0])

    def advance(count: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        state, total = carry
        size: Array | int = num_chunks * chunk
        if state.moments is not None:
            wanted = wanted_size(state.moments, drawer, axis) / least
            size = jnp.ceil(num_chunks * jnp.clip(wanted, _FEWEST, MOST_DRAWS)).astype(int) * chunk
        batch_key = jax.random.fold_in(key, count)
        if part is None:
            draws = drawn(drawer, batch_key, size, num_chunks * (MOST_DRAWS if measures else 1), chunk)
        else:
            assert masses is not None
            draws = drawn_by_part(drawer, masses, batch_key, size, part)
        if state.common is not None:
            best = best_common(problem, state, draws, axis)
            state = state._replace(common=_mixed(state.common, best, (2.0 + count) ** -_DECAY))
        of_columns = best_vectors(problem, state, "columns", draws, with_squares=measures, axis_name=axis)
        columns, column_step = move_vectors(state.columns, state.column_step, of_columns)
        state = state._replace(columns=columns, column_step=column_step)
        of_rows = best_vectors(problem, state, "rows", draws, with_squares=measures)
        rows, row_step = move_vectors(state.rows, state.row_step, of_rows)
        state = state._replace(rows=rows, row_step=row_step)
        if state.moments is not None:
            one, other = state.moments
            state = state._replace(moments=(updated_moments(one, of_rows), updated_moments(other, of_columns)))
        return state, total + over_devices(draws.number, axis)

    return lax.fori_loop(done, done + number, advance, (state, jnp.zeros((), int)))


def _mixed(block: Block, best: Block, share: Array) -> Block:
    """A step in natural parameters."""
    assert block.covariance is not None and best.covariance is not None
    before, after = (cholesky_inverse(cholesky(covariance)) for covariance in (block.covariance, best.covariance))
    linear = [(x @ mean[..., None])[..., 0] for x, mean in ((before, block.mean), (after, best.mean))]
    factor = cholesky((1.0 - share) * before + share * after)
    mean = cholesky_solve(factor, (1.0 - share) * linear[0] + share * linear[1])
    return Block(mean, cholesky_inverse(factor))


def bound_values(problem: Problem, state: State, cells: Cells, axis_name: str | None = None) -> Array:
    """Estimates of the bound, one from each of these drawn cells: their mean is unbiased."""
    cost = over_devices(jnp.sum(divergence(state.rows, problem.rows)), axis_name)
    cost += jnp.sum(divergence(state.columns, problem.columns))
    if state.common is not None and problem.common is not None:
        cost += jnp.sum(divergence(state.common, problem.common))
    return _see(problem, state, "rows", cells).parabola.value / cells.p + problem.log_constant - cost
