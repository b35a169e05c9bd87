r"""The variational Gaussian approximation of bilinear models (Ko and Khan 2014; Ko 2017, §3.1): sweeps over both sides.

The posterior is a product of Gaussians, one for each vector of either side, of which each side has a family: ``full``
covariances, ``diagonal`` ones, or ``point`` estimates. Points on both sides are MAP, points on one are EM, Gaussians on
both a lower bound of the log evidence. After a step of the vectors of either side
(:mod:`~numpyro_ext.infer.bilinear.steps`) a sweep moves along the directions in which the data is silent,
:math:`u \to X u`, :math:`v \to M^{-1} X^{-\top} M v`: products stay the same, priors and entropies do not, so the best
``X`` can be had in closed form without a look at the data. Alternating between the sides is slow in just these
directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...linalg.cholesky import cholesky, inverse_lower
from ...structure.bilinear.form import Bilinear, GaussianSide
from .cells import Block, View, find_tangents, largest_product, make_view, over_devices
from .steps import block_objective, divergence, step_side

__all__ = [
    "Family",
    "Info",
    "State",
    "Views",
    "bound",
    "gauge_residual",
    "gauge_step",
    "init",
    "make_views",
    "relative_change",
    "spectral_margin",
    "sweep",
    "with_tangents",
    "without_cells",
]

Family = Literal["full", "diagonal", "point"]

_INITIAL_VARIANCE = 0.1
_INITIAL_SPREAD = 0.3


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


def bound(form: Bilinear, rows: Block, columns: Block, views: Views | None = None) -> Array:
    """The objective: with Gaussians on both sides a lower bound of the log evidence (eq. (8) of Ko and Khan, with its
    constants), with points the log joint density at them, expected over the other side.

    :return: a scalar, minus infinity where an expectation of a rate does not exist.
    """
    views = with_tangents(make_views(form, rows, columns) if views is None else views, rows, columns)
    value = jnp.sum(block_objective(views.rows, rows, columns, form.rows))
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


def gauge_step(form: Bilinear, rows: Block, columns: Block, *, axis_name: str | None = None) -> tuple[Block, Block]:
    r"""The best ``X``: any matrix if the priors of the paired components are isotropic and independent, and the
    covariances full or points; else a diagonal one.

    With :math:`P = \sum_r E u u^\top / \sigma_u^2`, :math:`Q` likewise and ``n`` the difference in the numbers of
    vectors that have a covariance, it maximises
    :math:`-\tfrac12 \operatorname{tr} X P X^\top - \tfrac12 \operatorname{tr} X^{-\top} Q X^{-1} + n \log |X|`.

    Where the transformation does not apply (no paired components, linear terms or prior means in them, a coupling that
    differs between cells or priors correlated beyond them), it is the identity.

    :param Bilinear form: the model.
    :param Block rows: posterior of the rows.
    :param Block columns: of the columns.
    :param str axis_name: of the axis of devices between which the rows are divided, if they are.
    :return: both, transformed.
    """
    k = _num_paired(form)
    if k == 0:
        return rows, columns
    scale = form.coupling[0]
    row_moment, column_moment = _second_moment(rows, form.rows, k), _second_moment(columns, form.columns, k)
    row_precision, column_precision = _paired_precision(form.rows, k), _paired_precision(form.columns, k)
    num_rows = over_devices(_num_entropies(rows, form.rows), axis_name)
    excess = jnp.asarray(num_rows - _num_entropies(columns, form.columns), rows.mean.dtype)
    # per component, with precisions of their own
    p = over_devices(jnp.einsum("ek,ekk->k", row_precision, row_moment), axis_name)
    q = jnp.einsum("ek,ekk->k", column_precision, column_moment)
    stretch = _positive_root(p, q, excess)
    transform = jnp.diag(jnp.sqrt(stretch))
    if all(b.covariance is None or b.covariance.ndim == 3 for b in (rows, columns)):
        full = _best_transform(
            row_precision[0, 0] * over_devices(jnp.sum(row_moment, 0), axis_name),
            column_precision[0, 0] * jnp.sum(column_moment, 0),
            excess,
        )
        is_isotropic = _is_constant(row_precision, axis_name) & _is_constant(column_precision) & _is_constant(scale)
        transform = jnp.where(is_isotropic & jnp.all(jnp.isfinite(full)), full, transform)
    applies = _applies(form, k, axis_name) & jnp.all(jnp.isfinite(transform))
    transform = jnp.where(applies, transform, jnp.eye(k, dtype=transform.dtype))
    inverse = jnp.linalg.inv(transform).T
    back = inverse * (scale[None, :] / scale[:, None])
    return _transformed(rows, transform), _transformed(columns, jnp.where(applies, back, jnp.eye(k, dtype=back.dtype)))


def gauge_residual(form: Bilinear, rows: Block, columns: Block) -> Array:
    r"""Largest entry of :math:`(P - n_u I) - (Q - n_v I)`, zero at an optimum if the priors are isotropic.

    Of the diagonal only, where covariances are diagonal.
    """
    k = _num_paired(form)
    p = _paired_precision(form.rows, k)[0, 0] * jnp.sum(_second_moment(rows, form.rows, k), 0)
    q = _paired_precision(form.columns, k)[0, 0] * jnp.sum(_second_moment(columns, form.columns, k), 0)
    excess = _num_entropies(rows, form.rows) - _num_entropies(columns, form.columns)
    residual = p - q - excess * jnp.eye(k, dtype=p.dtype)
    is_full = all(b.covariance is None or b.covariance.ndim == 3 for b in (rows, columns))
    return jnp.max(jnp.abs(residual if is_full else jnp.diagonal(residual)))


def _num_paired(form: Bilinear) -> int:
    """Number of components that may be transformed; zero if it is known beforehand that none may."""
    if not form.is_paired or form.coupling.shape[0] != 1:
        return 0
    return form.coupling.shape[-1]


def _num_entropies(block: Block, prior: GaussianSide) -> Array:
    if block.covariance is None:
        return jnp.asarray(0)
    return jnp.asarray(block.mean.shape[0]) if prior.weight is None else jnp.sum(prior.weight)


def _second_moment(block: Block, prior: GaussianSide, k: int) -> Array:
    """Second moments of the first ``k`` components of each vector, ``(num, k, k)``; zero for those not used."""
    mean = block.mean[:, :k]
    moment = mean[:, :, None] * mean[:, None, :]
    if block.covariance is not None and block.covariance.ndim == 2:
        moment += block.covariance[:, :k, None] * jnp.eye(k, dtype=mean.dtype)
    elif block.covariance is not None:
        moment += block.covariance[:, :k, :k]
    weighted: Array = moment if prior.weight is None else prior.weight[:, None, None] * moment
    return weighted


def _paired_precision(prior: GaussianSide, k: int) -> Array:
    if prior.precision.ndim == 2:
        return prior.precision[:, :k]
    diagonal: Array = jnp.diagonal(prior.precision, axis1=-2, axis2=-1)[:, :k]
    return diagonal


def _is_constant(x: Array, axis_name: str | None = None) -> Array:
    """On all devices of the axis."""
    least, most = jnp.min(x), jnp.max(x)
    if axis_name is not None:
        least, most = lax.pmin(least, axis_name), lax.pmax(most, axis_name)
    return most - least <= 8 * jnp.finfo(x.dtype).eps * jnp.maximum(jnp.abs(least), jnp.abs(most))


def _applies(form: Bilinear, k: int, axis_name: str | None) -> Array:
    """Whether nothing but the products and independent priors with mean zero know of the paired components."""
    num_hindrances = [over_devices(_num_hindrances(form.rows, k), axis_name), _num_hindrances(form.columns, k)]
    num_hindrances += [jnp.sum(linear[:, :k] != 0.0) for linear in (form.row_linear, form.column_linear)]
    return jnp.all(form.coupling != 0.0) & (sum(num_hindrances) == 0)


def _num_hindrances(prior: GaussianSide, k: int) -> Array:
    """How many means of the first components are not zero, and how many of their correlations."""
    found = jnp.sum(prior.mean[:, :k] != 0.0)
    if prior.precision.ndim == 3:
        others = prior.precision[:, :k, :] * (1.0 - jnp.eye(k, prior.precision.shape[-1]))
        found += jnp.sum(others != 0.0)
    return found


def _best_transform(p: Array, q: Array, excess: Array) -> Array:
    r"""With :math:`P = R R^\top` and :math:`R^\top Q R = W \operatorname{diag}(e) W^\top` it is, up to
    rotations, :math:`\operatorname{diag}(\sqrt s) W^\top R^{-1}`, where ``s`` solves a quadratic equation.
    """
    root = cholesky(p)
    eigenvalues, vectors = jnp.linalg.eigh(root.T @ q @ root)
    stretch = _positive_root(jnp.ones_like(eigenvalues), jnp.maximum(eigenvalues, 0.0), excess)
    transform = jnp.sqrt(stretch)[:, None] * (vectors.T @ inverse_lower(root))
    # Among those that differ by a rotation the symmetric one, which is the identity at the optimum.
    _, singular_values, right = jnp.linalg.svd(transform)
    return right.T @ (singular_values[:, None] * right)


def _positive_root(p: Array, q: Array, excess: Array) -> Array:
    """The positive ``s`` with ``p s^2 - excess s - q = 0``."""
    root = jnp.sqrt(excess**2 + 4.0 * p * q)
    # of two equal expressions the one that does not subtract
    return jnp.where(excess > 0.0, (excess + root) / (2.0 * p), 2.0 * q / (root - jnp.minimum(excess, 0.0)))


def _transformed(block: Block, transform: Array) -> Block:
    """The first components times a matrix; it is diagonal where the components are independent."""
    k, size = transform.shape[0], block.mean.shape[1]
    mean = block.mean.at[:, :k].set(block.mean[:, :k] @ transform.T)
    if block.covariance is None:
        return Block(mean, None)
    if block.covariance.ndim == 2:
        return Block(mean, block.covariance.at[:, :k].multiply(jnp.diagonal(transform) ** 2))
    whole = jnp.eye(size, dtype=transform.dtype).at[:k, :k].set(transform)
    return Block(mean, whole @ block.covariance @ whole.T)
