r"""Expectation propagation for the factor of each cell, variational Bayes for the products (Houlsby et al. 2012).

For a :class:`~numpyro_ext.structure.bilinear.form.Bilinear` form. Every predictor, and every component of what cells
see of either side, has a Gaussian of its own. Four groups of factors each send messages to these: the factors of the
cells (moment matching), the equations :math:`\eta = u^\top M v + \alpha^\top u + \beta^\top v` (variational Bayes,
whose moments of the predictor are divided by the message from its factor), and the priors of the vectors of either
side, by the Gaussian algebra of vectors that depend on each other. Messages are damped. What stands for the log
evidence is no bound. With one component and weights that are known to be one this is expectation propagation for a
Gaussian process.

The order of the messages and the estimate of the evidence are those of Houlsby et al. (2012), section 3 and its
supplement, with the moments of the predictor divided by what its own factor has said.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....linalg.cholesky import cholesky, cholesky_solve
from ....potentials.moments import TiltedMoments
from ....structure.bilinear.form import Bilinear, CoupledSide, GaussianSide, Side
from .cells import Block
from .incidence import CoupledBlock, precision_carried_back, shifts_carried_back, touched
from .messages import Message, Moments, as_message, damped, divided, log_integral, mean_of, nothing, times

_VB_TOL = 1e-10
_VB_SWEEPS = 5000
_START_ROUNDS = 20
_START_SPREAD, _START_VARIANCE = 0.5, 0.1


class SideState(NamedTuple):
    """Messages to each component that cells see of one side, shape ``(num_seen, size)``."""

    seen: Moments
    prior: Message
    """Message of the prior of the vectors, given those of the cells to all vectors."""
    cells: Message
    """Message of the cells."""


class HybridState(NamedTuple):
    """All messages."""

    factor: Message
    """From the factors to the predictors, shape ``(num_cells,)``."""
    product: Message
    """From the products to the predictors."""
    rows: SideState
    columns: SideState


class HybridInfo(NamedTuple):
    """Outcome of one iteration."""

    change: Array
    """Largest change of the mean of a predictor, in its standard deviations, had the step not been damped."""
    num_skipped: Array
    """Factors that kept their message, as the new one would have been no Gaussian."""
    is_settled: Array
    """True if the products reached their fixed point."""
    vb_bound: Array
    """Bound of variational Bayes on the integral over both sides, with normalised messages of the priors."""
    log_evidence: Array


def init(form: Bilinear, rows: Moments, columns: Moments) -> HybridState:
    """Before the first iteration.

    :param Bilinear form: whose coupling is one of pairs of components, the same in all cells.
    :param rows: where variational Bayes starts for what cells see of the rows; not at zero, which is a saddle.
    :param columns: of the columns.
    """
    sides = [
        SideState(seen, as_message(prior_moments(prior)), nothing(seen.mean))
        for seen, prior in ((rows, form.rows), (columns, form.columns))
    ]
    mean, variance = predictor_moments(form, *(prior_moments(prior) for prior in (form.rows, form.columns)))
    return HybridState(nothing(mean), as_message(Moments(mean, variance)), *sides)


def spectral_start(form: Bilinear, rng_key: Array) -> HybridState:
    """Before the first iteration, with products along the leading singular vectors of what each cell says alone.

    The matrix of the changes of the predictors from prior to tilted mean, carried to the vectors, is never formed.
    """
    priors = form.rows, form.columns
    index = form.row_index, form.column_index
    mean, variance = predictor_moments(form, *(prior_moments(prior) for prior in priors))
    pull = form.potential.tilted_moments(mean, variance).mean - mean
    k = form.coupling.shape[-1]

    def carried(vectors: Array, side: int) -> Array:
        """From vectors of one side to those of the other."""
        seen, own = priors[side], priors[1 - side]
        center = seen.touched(jnp.zeros_like(seen.mean[:, :1]))
        values = pull[:, None] * (seen.touched(vectors) - center)[index[side]]
        if isinstance(own, GaussianSide):
            return jax.ops.segment_sum(values, index[1 - side], own.mean.shape[0])
        summed = jax.ops.segment_sum(values, index[1 - side], own.places.shape[0])
        return shifts_carried_back(own, summed)

    def refine(_: int, vectors: Array) -> Array:
        return jnp.linalg.qr(carried(carried(vectors, 1), 0))[0]

    num_rows, num_columns = (prior.mean.shape[0] for prior in priors)
    size = min(k, num_rows, num_columns)
    columns = lax.fori_loop(0, _START_ROUNDS, refine, jax.random.normal(rng_key, (num_columns, size), pull.dtype))
    rows = carried(columns, 1)
    blocks = []
    for vectors, prior in ((rows, priors[0]), (columns, priors[1])):
        own = prior_moments(prior)
        seen = prior.touched(vectors)
        # of combinations those count that see something: others fill up
        num = len(seen) if isinstance(prior, GaussianSide) else jnp.maximum(jnp.sum(jnp.any(prior.weight != 0.0, 1)), 1)
        unit = seen / jnp.maximum(jnp.sqrt(jnp.sum(seen**2, 0) / num), jnp.finfo(seen.dtype).tiny)
        start = own.mean.at[:, :size].add(_START_SPREAD * jnp.sqrt(own.variance[:, :size]) * unit)
        blocks.append(Moments(start, _START_VARIANCE * own.variance))
    return init(form, *blocks)


def step(
    form: Bilinear, state: HybridState, damping: Array | float, *, is_weighted: bool = False
) -> tuple[HybridState, HybridInfo]:
    """One iteration: factors, products, priors of columns and of rows.

    :param Bilinear form: as for :func:`init`.
    :param state: before it.
    :param damping: share of new messages, in (0, 1].
    :param bool is_weighted: whether factors have other powers than one.

    Cost: for each of some tens to hundreds of sweeps of variational Bayes a pass over the cells, and the cube of the
    number of coupled vectors for each component.
    """
    moments = _tilted_moments(form, state.product, is_weighted)
    factor = damped(state.factor, Message(moments.site_shift, moments.site_precision), damping)

    rows, columns, vb_bound, is_settled = variational(form, factor, state.rows, state.columns)
    mean, variance = predictor_moments(form, rows.seen, columns.seen)
    product = damped(state.product, divided(as_message(Moments(mean, variance)), factor), damping)
    rows, columns = (from_cells(side, damping) for side in (rows, columns))
    columns = _refined(columns, form.columns, damping)
    rows = _refined(rows, form.rows, damping)
    new = HybridState(factor, product, rows, columns)
    own, before = times(factor, product), times(state.factor, state.product)
    change = jnp.max(jnp.abs(mean_of(own) - mean_of(before)) * jnp.sqrt(own.precision)) / damping
    num_skipped = jnp.sum(~(moments.site_precision > 0.0))
    return new, HybridInfo(change, num_skipped, is_settled, vb_bound, log_evidence(form, new, is_weighted=is_weighted))


def log_evidence(form: Bilinear, state: HybridState, *, is_weighted: bool = False) -> Array:
    """The estimate of the log evidence from all messages, eq. (2.12) of the supplement; it is no bound."""
    product = state.product
    vb_bound = _bound(form, state.factor, state.rows, state.columns)
    moments = _tilted_moments(form, product, is_weighted)
    value = form.log_constant + vb_bound + jnp.sum(moments.log_z + log_integral(product))
    value -= jnp.sum(log_integral(times(state.factor, product)))
    for side, prior in ((state.rows, form.rows), (state.columns, form.columns)):
        value += jnp.sum(log_integral(side.prior)) + _log_evidence_of_side(side.cells, prior)
        value -= jnp.sum(log_integral(times(side.prior, side.cells)))
    return value


def posterior_block(cells: Message, prior: Side) -> Block | CoupledBlock:
    """The posterior of the vectors of a side given what cells say."""
    if isinstance(prior, CoupledSide):
        return _coupled_posterior(cells, prior)[0]
    own = times(cells, as_message(prior_moments(prior)))
    return Block(mean_of(own), 1.0 / own.precision)


def predictive_moments(form: Bilinear, state: HybridState) -> Moments:
    """Mean and variance of the predictor of each cell.

    Of the rows these are the moments of the product of all messages, as for users that are known; of the columns those
    of the vectors given what cells say, as for pairs of items that are new.
    """
    own = times(state.rows.prior, state.rows.cells)
    columns = _seen(posterior_block(state.columns.cells, form.columns), form.columns)
    return Moments(*predictor_moments(form, Moments(mean_of(own), 1.0 / own.precision), columns))


def _tilted_moments(form: Bilinear, cavity: Message, is_weighted: bool) -> TiltedMoments:
    # where all powers are one, closed forms are
    power = form.weight if is_weighted else 1.0
    return form.potential.tilted_moments(mean_of(cavity), 1.0 / cavity.precision, power)


# Products


def predictor_moments(form: Bilinear, rows: Moments, columns: Moments) -> tuple[Array, Array]:
    """Means and variances of the predictors of all cells, of independent components."""
    u, u_var = (x[form.row_index] for x in rows)
    v, v_var = (x[form.column_index] for x in columns)
    k = form.coupling.shape[-1]
    c = form.coupling
    mean = form.offset + jnp.sum(c * u[:, :k] * v[:, :k], -1)
    variance = jnp.sum(
        c**2 * (u[:, :k] ** 2 * v_var[:, :k] + u_var[:, :k] * v[:, :k] ** 2 + u_var[:, :k] * v_var[:, :k]), -1
    )
    for linear, x, var in ((form.row_linear, u, u_var), (form.column_linear, v, v_var)):
        if linear.shape[-1]:
            mean += jnp.sum(linear * x, -1)
            variance += jnp.sum(linear**2 * var, -1)
    return mean, variance


def variational(
    form: Bilinear, factor: Message, rows: SideState, columns: SideState, *, num_sweeps: int = _VB_SWEEPS
) -> tuple[SideState, SideState, Array, Array]:
    """Variational Bayes until its bound changes no more: component after component, rows before columns.

    :param Bilinear form: as for :func:`init`; its factors play no part.
    :param Message factor: to the predictors.
    :param rows: with the messages of the priors, and where to start.
    :param columns: likewise.
    :param int num_sweeps: at most.
    :return: both sides, the bound, and whether it settled.
    """

    def advance(carry: tuple[_Blocks, Array, Array, Array]) -> tuple[_Blocks, Array, Array, Array]:
        blocks, value, _, count = carry
        moved = _sweep(form, factor, (rows, columns), blocks, predictor_moments(form, *blocks)[0])[0]
        new = _bound(form, factor, rows._replace(seen=moved[0]), columns._replace(seen=moved[1]))
        return moved, new, value, count + 1

    def proceed(carry: tuple[_Blocks, Array, Array, Array]) -> Array:
        _, value, before, count = carry
        return (count < num_sweeps) & ~(jnp.abs(value - before) < _VB_TOL * jnp.abs(value))

    blank = jnp.asarray(-jnp.inf, factor.shift.dtype)
    start = (rows.seen, columns.seen), blank, blank, jnp.asarray(0)
    blocks, value, _, count = lax.while_loop(proceed, advance, start)
    return rows._replace(seen=blocks[0]), columns._replace(seen=blocks[1]), value, count < num_sweeps


def swept(
    form: Bilinear, factor: Message, rows: SideState, columns: SideState, *, num_sweeps: Array | int
) -> tuple[SideState, SideState]:
    """Sweeps of :func:`variational`, without a look at their bound."""
    blocks = rows.seen, columns.seen
    blocks, _ = lax.fori_loop(
        0,
        num_sweeps,
        lambda _, found: _sweep(form, factor, (rows, columns), *found),
        (blocks, predictor_moments(form, *blocks)[0]),
    )
    return rows._replace(seen=blocks[0]), columns._replace(seen=blocks[1])


_Blocks = tuple[Moments, Moments]


def _sweep(
    form: Bilinear, factor: Message, sides: tuple[SideState, SideState], blocks: _Blocks, total: Array
) -> tuple[_Blocks, Array]:
    """One sweep of variational Bayes, with the means of the predictors before and after it."""
    index = (form.row_index, form.column_index)
    k = form.coupling.shape[-1]
    linear = (form.row_linear, form.column_linear)

    def update(side: int, d: Array, blocks: _Blocks, total: Array, is_paired: bool) -> tuple[_Blocks, Array]:
        """One component of one side, from its expected coefficient in each cell; and the means of the predictors."""
        own, other = blocks[side], blocks[1 - side]
        mean, spread = jnp.zeros_like(total), jnp.zeros_like(total)
        if is_paired:
            c = form.coupling[:, d]
            partner = index[1 - side]
            mean += c * other.mean[partner, d]
            spread += c**2 * other.variance[partner, d]
        if linear[side].shape[-1]:
            mean += linear[side][:, d]
        rest = total - own.mean[index[side], d] * mean
        num = own.mean.shape[0]
        precision = jax.ops.segment_sum(factor.precision * (mean**2 + spread), index[side], num)
        shift = jax.ops.segment_sum((factor.shift - factor.precision * rest) * mean, index[side], num)
        precision += sides[side].prior.precision[:, d]
        shift += sides[side].prior.shift[:, d]
        new = Moments(own.mean.at[:, d].set(shift / precision), own.variance.at[:, d].set(1.0 / precision))
        return (new, other) if side == 0 else (other, new), rest + new.mean[index[side], d] * mean

    def visit(d: Array, carry: tuple[_Blocks, Array]) -> tuple[_Blocks, Array]:
        for side in range(2):
            carry = update(side, d, *carry, is_paired=True)
        return carry

    moved = lax.fori_loop(0, k, visit, (blocks, total))
    for side, block in enumerate(blocks):

        def alone(d: Array, carry: tuple[_Blocks, Array], side: int = side) -> tuple[_Blocks, Array]:
            return update(side, d, *carry, is_paired=False)

        moved = lax.fori_loop(k, block.mean.shape[1], alone, moved)
    return moved


def _bound(form: Bilinear, factor: Message, rows: SideState, columns: SideState) -> Array:
    """Bound of variational Bayes, with normalised messages of the priors."""
    mean, variance = predictor_moments(form, rows.seen, columns.seen)
    value = jnp.sum(factor.shift * mean - 0.5 * factor.precision * (mean**2 + variance))
    return value - jnp.sum(_divergence(rows.seen, rows.prior)) - jnp.sum(_divergence(columns.seen, columns.prior))


def _divergence(block: Moments, prior: Message) -> Array:
    ratio = block.variance * prior.precision
    return 0.5 * (ratio - 1.0 - jnp.log(ratio) + prior.precision * (block.mean - prior.shift / prior.precision) ** 2)


def from_cells(side: SideState, damping: Array | float) -> SideState:
    """A side with the messages of its cells updated, from the moments of what they see."""
    new = divided(as_message(side.seen), side.prior)
    return side._replace(cells=damped(side.cells, new, damping, may_vanish=True))


# Priors


def prior_moments(prior: Side) -> Moments:
    """Prior moments of each component that cells see."""
    if isinstance(prior, GaussianSide):
        return Moments(prior.mean, 1.0 / prior.precision)
    num, size = prior.mean.shape
    identity = jnp.broadcast_to(jnp.eye(num, dtype=prior.mean.dtype), (size, num, num))
    return _seen(CoupledBlock(jnp.zeros_like(prior.mean), identity), prior)


def _seen(block: Block | CoupledBlock, prior: Side) -> Moments:
    found = touched(block, prior)
    variance = found.covariance
    assert variance is not None
    if isinstance(prior, CoupledSide):
        # A cell that sees an item less itself has a predictor that is known: next to no variance, as messages divide.
        largest = jnp.max(jnp.abs(prior.scale)) * jnp.max(jnp.abs(prior.root))
        variance = jnp.maximum(variance, jnp.finfo(variance.dtype).eps * largest**2)
    return Moments(found.mean, variance)


def _refined(side: SideState, prior: Side, damping: Array | float) -> SideState:
    """Update the message of the prior, given those of the cells; for independent vectors it never changes."""
    if isinstance(prior, GaussianSide):
        return side
    marginal = as_message(_seen(_coupled_posterior(side.cells, prior)[0], prior))
    return side._replace(prior=damped(side.prior, divided(marginal, side.cells), damping))


def _coupled_posterior(cells: Message, prior: CoupledSide) -> tuple[CoupledBlock, Array]:
    """The posterior of the coordinates, and the log integral of prior times what cells say, of each component."""
    center = prior.touched(prior.mean)
    pull = cells.shift - cells.precision * center
    back = shifts_carried_back(prior, pull)

    def of_component(one: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        scale, group, precision, back = one
        root = scale[:, None] * prior.root[group]
        matrix = jnp.eye(root.shape[0], dtype=root.dtype) + root.T @ precision_carried_back(prior, precision) @ root
        factor = cholesky(matrix)
        white = root.T @ back
        mean = cholesky_solve(factor, white)
        return mean, matrix, 0.5 * white @ mean - jnp.sum(jnp.log(jnp.diagonal(factor)))

    mean, precision, value = lax.map(of_component, (prior.scale.T, prior.group, cells.precision.T, back.T))
    value += jnp.sum(cells.shift * center - 0.5 * cells.precision * center**2, 0)
    return CoupledBlock(mean.T, precision), value


def _log_evidence_of_side(cells: Message, prior: Side) -> Array:
    if isinstance(prior, CoupledSide):
        return jnp.sum(_coupled_posterior(cells, prior)[1])
    own = as_message(prior_moments(prior))
    return jnp.sum(log_integral(times(own, cells)) - log_integral(own))
