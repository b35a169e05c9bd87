r"""The variational Gaussian approximation of bilinear Poisson models, in closed form (Ko and Khan 2014; Ko 2017, §3.1).

The posterior is a product of Gaussians, one for each vector of either side, of which each side has a family: ``full``
covariances, ``diagonal`` ones, or ``point`` estimates. Points on both sides are MAP, points on one are EM, Gaussians on
both a lower bound of the log evidence. Given one side, the objective separates into strictly concave functions, one
per vector of the other; each takes a damped natural-gradient step

.. math:: A^{-1} \leftarrow (1 - \rho) A^{-1} + \rho P, \qquad a \leftarrow a + \rho A g,

which is kept only if its own function did not fall, with a step size :math:`\rho` of its own. A point at which an
expectation does not exist has the value minus infinity, so that no step is ever made to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...linalg.cholesky import cholesky, cholesky_solve, solve_lower
from ...structure.bilinear import Bilinear, GaussianSide
from .cells import Block, CellSums, View, find_tangents, largest_product, make_view, sum_cells, sum_values
from .device_sums import over_devices
from .gauge import gauge_step

__all__ = [
    "Family",
    "Info",
    "State",
    "Views",
    "block_objective",
    "bound",
    "init",
    "make_views",
    "spectral_margin",
    "step_side",
    "sweep",
    "with_tangents",
    "without_cells",
]

Family = Literal["full", "diagonal", "point"]

_LOG_2PI = math.log(2.0 * math.pi)
_INITIAL_VARIANCE = 0.1
_INITIAL_SPREAD = 0.3
_MAX_HALVINGS = 60


class Views(NamedTuple):
    """The cells in the order of either side; the same in every sweep."""

    rows: View
    columns: View


class State(NamedTuple):
    """The posterior and the step sizes."""

    rows: Block
    columns: Block
    row_step: Array
    """Step sizes in (0, 1], one per row."""
    column_step: Array
    objective: Array
    """After the last sweep; minus infinity before the first."""
    num_quiet: Array
    """Sweeps in a row that changed the objective by less than the tolerance."""


class Info(NamedTuple):
    """What one sweep found."""

    objective: Array
    """The objective after the sweep, never less than before."""
    change: Array
    """Its increase, or what refused steps would have lost if that is more, relative to one plus its size."""
    loss: Array
    """What the refused steps would have lost."""
    num_refused: Array
    """Vectors that stayed where they were, because their own objective would have fallen."""


def make_views(form: Bilinear, rows: Block, columns: Block) -> Views:
    """Order the cells by rows and by columns, in chunks whose length suits the families of the blocks."""
    is_diagonal = form.is_paired and all(b.covariance is None or b.covariance.ndim == 2 for b in (rows, columns))
    sizes = rows.mean.shape[1], columns.mean.shape[1]
    width = 2 * max(sizes) if is_diagonal else 3 * max(sizes) ** 2
    # every pass reads them
    form = form._replace(row_index=form.row_index.astype(jnp.int32), column_index=form.column_index.astype(jnp.int32))
    return Views(make_view(form, "rows", width), make_view(form, "columns", width))


def with_tangents(views: Views, rows: Block, columns: Block) -> Views:
    """The views with the bounds of unlisted zeros, where there are any, at their best for these posteriors."""
    if views.rows.zeros is None or views.columns.zeros is None:
        return views
    tangent = find_tangents(views.rows, rows, columns)
    return Views(
        views.rows._replace(zeros=views.rows.zeros._replace(own_tangent=tangent)),
        views.columns._replace(zeros=views.columns.zeros._replace(other_tangent=tangent)),
    )


def without_cells(form: Bilinear) -> Bilinear:
    """What :func:`sweep` needs of a form beside the views of its cells: the rest is empty.

    Linear coefficients that differ between cells become their largest sizes, which tell which of them are zero.
    """

    def largest(linear: Array) -> Array:
        return linear if linear.shape[0] <= 1 else jnp.max(jnp.abs(linear), axis=0, keepdims=True)

    empty: dict[str, Any] = {
        name: jax.tree.map(lambda x: x[:0] if x.ndim else x, getattr(form, name))
        for name in ("row_index", "column_index", "offset", "potential", "weight", "row_order", "column_order")
    }
    return form._replace(
        coupling=form.coupling if form.coupling.shape[0] == 1 else form.coupling[:0],
        row_linear=largest(form.row_linear),
        column_linear=largest(form.column_linear),
        **empty,
    )


def init(form: Bilinear, rng_key: Array, row_family: Family, column_family: Family) -> State:
    """Random means around the prior, which the signs of the factors need, and small covariances.

    Means of all zeros would be a stationary point.

    :param Bilinear form: the model.
    :param rng_key: random number generator key.
    :param str row_family: ``"full"``, ``"diagonal"`` or ``"point"``.
    :param str column_family: of the other side.
    """
    keys = jax.random.split(rng_key)
    rows = _initial_block(form.rows, keys[0], row_family)
    columns = _initial_block(form.columns, keys[1], column_family)
    dtype = rows.mean.dtype
    return State(
        rows,
        columns,
        jnp.full(rows.mean.shape[:1], 0.5, dtype),
        jnp.full(columns.mean.shape[:1], 0.5, dtype),
        jnp.asarray(-jnp.inf, dtype),
        jnp.asarray(0),
    )


def _initial_block(prior: GaussianSide, rng_key: Array, family: Family) -> Block:
    has_matrix = prior.precision.ndim == 3
    diagonal = jnp.diagonal(prior.precision, axis1=-2, axis2=-1) if has_matrix else prior.precision
    spread = jnp.minimum(_INITIAL_SPREAD, 1.0 / jnp.sqrt(diagonal))
    mean = prior.mean + spread * jax.random.normal(rng_key, prior.mean.shape, prior.mean.dtype)
    variance = jnp.minimum(_INITIAL_VARIANCE, 1.0 / diagonal)
    if family == "point":
        return Block(mean, None)
    if family == "diagonal":
        return Block(mean, variance)
    return Block(mean, variance[:, :, None] * jnp.eye(mean.shape[1], dtype=mean.dtype))


def make_feasible(view: View, own: Block, other: Block) -> tuple[Block, Array]:
    """Halve covariances, and pull means towards zero if that does not help, until every expectation is finite.

    :return: the block, and its expected log factors of shape ``(num,)``; minus infinity where nothing helped.
    """

    def proceed(carry: tuple[Block, Array, Array]) -> Array:
        _, values, count = carry
        return ~jnp.all(jnp.isfinite(values)) & (count < _MAX_HALVINGS)

    def halve(carry: tuple[Block, Array, Array]) -> tuple[Block, Array, Array]:
        block, values, count = carry
        # In the first round nothing has been evaluated yet.
        factor = jnp.where(jnp.isfinite(values) | (count == 0), 1.0, 0.5)
        covariance = block.covariance
        if covariance is not None:
            covariance = covariance * factor.reshape(-1, *(1,) * (covariance.ndim - 1))
        # By half of the rounds the covariances are negligible.
        pull = jnp.where(count >= _MAX_HALVINGS // 2, factor, 1.0) if covariance is not None else factor
        block = Block(block.mean * pull[:, None], covariance)
        return block, sum_values(view, block, other), count + 1

    start = own, jnp.full(own.mean.shape[:1], -jnp.inf, own.mean.dtype), jnp.asarray(0)
    block, values, _ = lax.while_loop(proceed, halve, start)
    return block, values


def divergence(block: Block, prior: GaussianSide) -> Array:
    """Kullback-Leibler divergence of each vector from its prior, or minus its log prior density if it is a point.

    :return: shape ``(num,)``.
    """
    if block.covariance is None:
        return -prior.log_density(block.mean)
    residual, size = block.mean - prior.mean, block.mean.shape[1]
    if block.covariance.ndim == 3:
        factor = cholesky(block.covariance)
        log_determinant = 2.0 * jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)), -1)
        variance = jnp.diagonal(block.covariance, axis1=-2, axis2=-1)
    else:
        variance = block.covariance
        log_determinant = jnp.sum(jnp.log(variance), -1)
    if prior.precision.ndim == 2:
        trace = jnp.sum(prior.precision * variance, -1)
    elif block.covariance.ndim == 2:
        trace = jnp.sum(jnp.diagonal(prior.precision, axis1=-2, axis2=-1) * variance, -1)
    else:
        trace = jnp.sum(prior.precision * block.covariance, (-2, -1))
    quadratic = trace + prior.quadratic(residual) - size
    return prior.weighted(0.5 * (quadratic - prior.log_determinant() - log_determinant))


def block_objective(view: View, own: Block, other: Block, prior: GaussianSide) -> Array:
    """The part of the objective that belongs to each vector of ``own``, shape ``(num,)``."""
    return sum_values(view, own, other) - divergence(own, prior)


def bound(form: Bilinear, rows: Block, columns: Block, views: Views | None = None) -> Array:
    """The objective: with Gaussians on both sides a lower bound of the log evidence (eq. (8) of Ko and Khan, with its
    constants), with points the log joint density at them, expected over the other side.

    :return: a scalar, minus infinity where an expectation of a rate does not exist.
    """
    views = with_tangents(make_views(form, rows, columns) if views is None else views, rows, columns)
    value = jnp.sum(block_objective(views.rows, rows, columns, form.rows))
    return form.log_constant + value - jnp.sum(divergence(columns, form.columns))


def _natural_step(own: Block, prior: GaussianSide, sums: CellSums, step: Array) -> Block:
    """Every vector one damped step, by its step size."""
    slope = sums.slope - prior.apply(own.mean - prior.mean)
    precision = sums.precision
    if precision.ndim == 2:
        diagonal = prior.precision
        diagonal = diagonal if diagonal.ndim == 2 else jnp.diagonal(diagonal, axis1=-2, axis2=-1)
        precision = precision + diagonal
        if own.covariance is None:
            return Block(own.mean + step[:, None] * slope / precision, None)
        variance = 1.0 / ((1.0 - step[:, None]) / own.covariance + step[:, None] * precision)
        return Block(own.mean + step[:, None] * variance * slope, variance)
    own_prior = prior.precision
    if own_prior.ndim == 2:
        own_prior = own_prior[:, :, None] * jnp.eye(own_prior.shape[-1], dtype=own_prior.dtype)
    precision = precision + own_prior
    if own.covariance is None:
        return Block(own.mean + step[:, None] * cholesky_solve(cholesky(precision), slope), None)
    weight = step[:, None, None]
    mixed = (1.0 - weight) * _inverse(own.covariance) + weight * precision
    covariance = _inverse(mixed)
    return Block(own.mean + step[:, None] * (covariance @ slope[..., None])[..., 0], covariance)


def _inverse(matrix: Array) -> Array:
    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    half = solve_lower(cholesky(matrix), identity)
    return half.swapaxes(-1, -2) @ half


def step_side(
    view: View, own: Block, other: Block, prior: GaussianSide, step: Array, *, axis_name: str | None = None
) -> tuple[Block, Array, Array, Array]:
    """Try a step of every vector of one side, the other being held.

    :param view: the cells in the order of this side.
    :param own: the vectors that move.
    :param other: those that are held.
    :param prior: of the vectors that move.
    :param step: their step sizes, shape ``(num,)``.
    :param str axis_name: of the axis of devices between which the cells of each vector are divided, if they are.
    :return: the new vectors, their new step sizes, their objectives, and what each would have lost by its step: zero
        for those that took it.

    Cost: one pass over the cells with slopes and one for the values.
    """
    sums = over_devices(sum_cells(view, own, other), axis_name)
    before = sums.value - divergence(own, prior)
    trial = _natural_step(own, prior, sums, step)
    after = over_devices(sum_values(view, trial, other), axis_name) - divergence(trial, prior)
    # Near the optimum the gain is below rounding, and the step must still be taken.
    slack = 10 * jnp.finfo(before.dtype).eps * (1.0 + jnp.abs(before) + jnp.abs(sums.value))
    moved = after >= before - slack
    block = Block(
        jnp.where(moved[:, None], trial.mean, own.mean),
        None
        if trial.covariance is None or own.covariance is None
        else jnp.where(moved.reshape(-1, *(1,) * (own.covariance.ndim - 1)), trial.covariance, own.covariance),
    )
    loss = jnp.where(jnp.isfinite(before) & jnp.isfinite(after), before - after, jnp.inf)
    new_step = jnp.where(moved, jnp.minimum(1.0, 2.0 * step), 0.5 * step)
    return block, new_step, jnp.where(moved, after, before), jnp.where(moved, 0.0, loss)


def sweep(
    form: Bilinear,
    views: Views,
    state: State,
    *,
    with_gauge: bool = True,
    axis_name: str | None = None,
    take_step: Callable[..., tuple[Block, Array, Array, Array]] = step_side,
) -> tuple[State, Info]:
    """One step of all rows, one of all columns, and the exact step along the directions in which the data is silent.

    :param Bilinear form: the model; the priors of the two sides may differ from those of the last sweep.
    :param Views views: its cells, from :func:`make_views`.
    :param State state: where to start; its objective must belong to ``form`` or be minus infinity.
    :param bool with_gauge: false leaves the last step out.
    :param str axis_name: of an axis of devices, each of which has the columns and some rows, with their cells.
    :param Callable take_step: how vectors move, with the signature of :func:`step_side`.
    :return: the next state and what the sweep found.
    """
    views = with_tangents(views, state.rows, state.columns)
    rows, row_step, _, row_loss = take_step(views.rows, state.rows, state.columns, form.rows, state.row_step)
    columns, column_step, values, column_loss = take_step(
        views.columns, state.columns, rows, form.columns, state.column_step, axis_name=axis_name
    )
    row_cost = over_devices(jnp.sum(divergence(rows, form.rows)), axis_name)
    if with_gauge:
        new_rows, new_columns = gauge_step(form, rows, columns, axis_name=axis_name)
        new_row_cost = over_devices(jnp.sum(divergence(new_rows, form.rows)), axis_name)
        cost = row_cost + jnp.sum(divergence(columns, form.columns))
        new_cost = new_row_cost + jnp.sum(divergence(new_columns, form.columns))
        is_better = new_cost <= cost
        values_sum = jnp.sum(values) + jnp.sum(divergence(columns, form.columns))
        rows, columns = jax.tree.map(lambda x, y: jnp.where(is_better, x, y), (new_rows, new_columns), (rows, columns))
        objective = values_sum - jnp.where(is_better, new_cost, cost)
    else:
        objective = jnp.sum(values) - row_cost
    objective = objective + form.log_constant
    row_loss = over_devices(jnp.stack([jnp.sum(row_loss), jnp.sum(row_loss > 0.0)]), axis_name)
    num_refused = row_loss[1].astype(int) + jnp.sum(column_loss > 0.0)
    loss = row_loss[0] + jnp.sum(column_loss)
    change = relative_change(objective, state.objective, loss)
    state = State(rows, columns, row_step, column_step, objective, state.num_quiet)
    return state, Info(objective, change, loss, num_refused)


def relative_change(objective: Array, before: Array, loss: Array) -> Array:
    """How far from a maximum a sweep has been seen to be: :attr:`Info.change`, infinite where that is not known.

    Where full steps are too long, a vector may refuse every second one for ever. That does no harm once what it refuses
    would hardly have changed the objective.
    """
    change = jnp.maximum(jnp.abs(objective - before), loss) / (1.0 + jnp.abs(objective))
    return jnp.where(jnp.isfinite(before) & jnp.isfinite(objective), change, jnp.inf)


def spectral_margin(form: Bilinear, state: State) -> Array:
    r"""Distance from the boundary beyond which expected rates are infinite: one less the largest eigenvalue of
    :math:`\operatorname{Cov}(u) \operatorname{Cov}(M v)` over all cells with data."""
    views = make_views(form, state.rows, state.columns)
    return 1.0 - largest_product(views.rows, state.rows, state.columns)
