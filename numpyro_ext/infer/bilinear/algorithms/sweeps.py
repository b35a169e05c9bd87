r"""The variational Gaussian approximation of bilinear models (Ko and Khan 2014; Ko 2017, §3.1): sweeps over both sides.

The posterior is a product of Gaussians, one for each vector of either side, of which each side has a family: ``full``
covariances, ``diagonal`` ones, or ``point`` estimates. Points on both sides are MAP, points on one are EM, Gaussians on
both a lower bound of the log evidence. After a step of the vectors of either side
(:mod:`~numpyro_ext.infer.bilinear.algorithms.steps`) a sweep moves along the directions in which the data is silent,
:math:`u \to X u`, :math:`v \to M^{-1} X^{-\top} M v`: products stay the same, priors and entropies do not, so the best
``X`` can be had in closed form without a look at the data. Alternating between the sides is slow in just these
directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ....linalg.cholesky import cholesky, cholesky_inverse
from ....linalg.short_axes import as_matrices
from ....structure.bilinear.form import Bilinear, CoupledSide, Side
from .cells import Block, View, largest_product, make_view, over_devices, with_best_zeros
from .gauge import gauge_step
from .incidence import CoupledBlock, SideBlock, has_diagonal, start_coupled, step_coupled, step_sizes, touched
from .selection import Selected, first_selected
from .steps import block_objective, divergence, step_side

Family = Literal["full", "diagonal", "component", "point"]

_INITIAL_VARIANCE = 0.1
_INITIAL_SPREAD = 0.3


class Views(NamedTuple):
    """The cells in the order of either side; the same in every sweep."""

    rows: View
    columns: View


class State(NamedTuple):
    """The posterior and the step sizes."""

    rows: SideBlock
    columns: SideBlock
    row_step: Array
    """Step sizes in (0, 1], one per row, or one for all rows that depend on each other."""
    column_step: Array
    objective: Array
    """After the last sweep; minus infinity before the first."""
    num_quiet: Array
    """Sweeps in a row that changed the objective by less than the tolerance."""
    common: Block | None = None
    """Posterior of the common unknowns of the form, as one vector with a full covariance, where there are any."""
    selected: Selected | None = None
    """Posterior of the selection of rows and columns, where pairs are censored."""
    moments: tuple[DrawMoments, DrawMoments] | None = None
    """Moments of the estimates from one drawn cell, of rows and of columns, where these choose how many are drawn."""

    @classmethod
    def beginning_at(cls, rows: SideBlock, columns: SideBlock, objective: ArrayLike) -> State:
        """State at these posteriors, with the first step sizes."""
        return cls(rows, columns, step_sizes(rows), step_sizes(columns), jnp.asarray(objective), jnp.asarray(0))


class DrawMoments(NamedTuple):
    """Running moments of what one drawn cell estimates of each vector of a side."""

    first: Array
    """Shape ``(num, 2 size)``: linear terms, then precisions."""
    second: Array
    """Means of squares."""
    number: Array
    """Draws so far, shape ``(num,)``."""


class Info(NamedTuple):
    """Outcome of one sweep."""

    objective: Array
    """The objective after the sweep, never less than before."""
    change: Array
    """Its increase, or what refused steps would have lost if that is more, relative to one plus its size."""
    loss: Array
    """Loss that the refused steps would have made."""
    num_refused: Array
    """Vectors that stayed where they were, because their own objective would have fallen."""


def make_views(form: Bilinear, rows: SideBlock, columns: SideBlock) -> Views:
    """Order the cells by rows and by columns, in chunks whose length suits the families of the blocks."""
    is_diagonal = form.is_paired and has_diagonal(rows) and has_diagonal(columns)
    sizes = rows.mean.shape[1], columns.mean.shape[1]
    width = 2 * max(sizes) if is_diagonal else 3 * max(sizes) ** 2
    # every pass reads them
    form = form._replace(row_index=form.row_index.astype(jnp.int32), column_index=form.column_index.astype(jnp.int32))
    return Views(make_view(form, "rows", width), make_view(form, "columns", width))


def with_tangents(views: Views, rows: SideBlock, columns: SideBlock) -> Views:
    """The views with the bounds of unlisted zeros, where there are any, at their best for these posteriors."""
    if views.rows.zeros is None or views.columns.zeros is None:
        return views
    assert isinstance(rows, Block) and isinstance(columns, Block)
    return Views(*with_best_zeros(*views, rows, columns))


def without_cells(form: Bilinear) -> Bilinear:
    """Copy of a form without its cells, as :func:`sweep` needs it beside the views of these.

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
        common=form.common and form.common._replace(coefficients=form.common.coefficients[:0]),
        **empty,
    )


def init(form: Bilinear, rng_key: Array, row_family: Family, column_family: Family) -> State:
    """Random means around the prior, which the signs of the factors need, and small covariances.

    Means of all zeros would be a stationary point.

    :param Bilinear form: the model.
    :param rng_key: random number generator key.
    :param str row_family: ``"full"``, ``"diagonal"`` or ``"point"``; rows that depend on each other have their own.
    :param str column_family: of the other side.
    """
    keys = jax.random.split(rng_key)
    rows = _initial_block(form.rows, keys[0], row_family)
    columns = _initial_block(form.columns, keys[1], column_family)
    common = None
    if form.common is not None:
        prior = form.common.prior
        common = Block(prior.mean, cholesky_inverse(cholesky(prior.precision)))
    unknown = jnp.asarray(-jnp.inf, rows.mean.dtype)
    return State.beginning_at(rows, columns, unknown)._replace(common=common, selected=first_selected(form))


def _initial_block(prior: Side, rng_key: Array, family: Family) -> SideBlock:
    if isinstance(prior, CoupledSide):
        return start_coupled(prior, rng_key, _INITIAL_SPREAD, _INITIAL_VARIANCE)
    spread = jnp.minimum(_INITIAL_SPREAD, 1.0 / jnp.sqrt(prior.diagonal))
    mean = prior.mean + spread * jax.random.normal(rng_key, prior.mean.shape, prior.mean.dtype)
    variance = jnp.minimum(_INITIAL_VARIANCE, 1.0 / prior.diagonal)
    if family == "point":
        return Block(mean, None)
    if family == "diagonal":
        return Block(mean, variance)
    return Block(mean, as_matrices(variance))


def bound(form: Bilinear, rows: SideBlock, columns: SideBlock, views: Views | None = None) -> Array:
    """The objective: with Gaussians on both sides a lower bound of the log evidence (eq. (8) of Ko and Khan, with its
    constants), with points the log joint density at them, expected over the other side.

    :return: a scalar, minus infinity where an expectation of a rate does not exist.
    """
    views = with_tangents(make_views(form, rows, columns) if views is None else views, rows, columns)
    value = jnp.sum(block_objective(views.rows, rows, touched(columns, form.columns), form.rows))
    return form.log_constant + value - jnp.sum(divergence(columns, form.columns))


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
    row_side, column_side = (state.rows, form.rows), (state.columns, form.columns)
    rows, row_step, _, row_loss = _step(take_step, views.rows, row_side, column_side, state.row_step)
    columns, column_step, values, column_loss = _step(
        take_step, views.columns, column_side, (rows, form.rows), state.column_step, axis_name=axis_name
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


def _step(
    take_step: Callable[..., Any],
    view: View,
    own: tuple[SideBlock, Side],
    other: tuple[SideBlock, Side],
    step: Array,
    axis_name: str | None = None,
) -> tuple[Any, Array, Array, Array]:
    """A step of the vectors of one side with its prior, in the way that suits it."""
    block, prior = own
    if isinstance(block, CoupledBlock):
        assert isinstance(prior, CoupledSide)
        return step_coupled(view, block, touched(block, prior), touched(*other), prior, step)
    options = {} if axis_name is None else {"axis_name": axis_name}
    return take_step(view, block, touched(*other), prior, step, **options)


def cost_of(form: Bilinear, state: State, axis_name: str | None = None) -> Array:
    """Divergences of all vectors and common unknowns from their priors.

    :param str axis_name: of the axis of devices between which the rows are divided, if they are.
    """
    rows = over_devices(jnp.sum(divergence(state.rows, form.rows)), axis_name)
    cost = rows + jnp.sum(divergence(state.columns, form.columns))
    if state.common is None:
        return cost
    assert form.common is not None
    return cost + jnp.sum(divergence(state.common, form.common.prior))


def relative_change(objective: Array, before: Array, loss: Array) -> Array:
    """Distance from a maximum that sweeps have shown: :attr:`Info.change`, infinite where that is not known.

    Where full steps are too long, a vector may refuse every second one for ever. That does no harm once what it refuses
    would hardly have changed the objective.
    """
    change = jnp.maximum(jnp.abs(objective - before), loss) / (1.0 + jnp.abs(objective))
    return jnp.where(jnp.isfinite(before) & jnp.isfinite(objective), change, jnp.inf)


def spectral_margin(form: Bilinear, state: State) -> Array:
    r"""Distance from the boundary beyond which expected rates are infinite: one less the largest eigenvalue of
    :math:`\operatorname{Cov}(u) \operatorname{Cov}(M v)` over all cells with data."""
    views = make_views(form, state.rows, state.columns)
    return 1.0 - largest_product(views.rows, touched(state.rows, form.rows), touched(state.columns, form.columns))
