r"""Visits to batches of the vectors of one side of a bilinear model, with their cells.

The vectors of the other side are shared by all batches. Each batch is represented by a Gaussian factor for every shared
vector, the second-order expansion of its expected log factors that natural gradients are made of. A visit fits the
batch's own vectors, moves the shared ones by natural-gradient steps on the batch itself and the factors that stand for
all others, and then renews the batch's factor. Where nothing moves any more, the gradient of the whole objective is
zero: the end is an optimum of the whole data, and no step sizes that decrease are needed. With factors that are summed
instead of kept it would be stochastic variational inference (Hoffman, Blei, Wang and Paisley 2013), which ends near it.

A batch may be divided between devices, also of several processes: its own vectors need no communication, and for the
shared ones sums over the cells are added.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from .....linalg.cholesky import cholesky, cholesky_solve
from .....structure.bilinear.form import Bilinear, GaussianSide
from .. import steps
from .. import sweeps as core
from ..cells import Block, over_devices, sum_cells
from ..gauge import SideMoments, side_moments, transformed
from ..selection import SelectionTerms
from .loop import fit_side
from .methods import Prepared

_OWN_STEPS = 10
_SHARED_STEPS = 2
_OWN_TOL = 1e-8


class Factor(NamedTuple):
    """Gaussian factors of some vectors."""

    precision: Array
    """Shape ``(num, size, size)``."""
    shift: Array
    """Precision times mean, shape ``(num, size)``."""

    @classmethod
    def of_prior(cls, prior: GaussianSide) -> Factor:
        return cls(prior.matrices, prior.apply(prior.mean))

    def transformed(self, back: Array) -> Factor:
        """The same functions of vectors whose first components have been multiplied by a matrix."""
        k = len(back)
        matrix = jnp.eye(self.shift.shape[1], dtype=back.dtype).at[:k, :k].set(jnp.linalg.inv(back).T)
        return Factor(matrix @ self.precision @ matrix.T, self.shift @ matrix.T)

    def replaced(self, before: Factor, after: Factor) -> Factor:
        """A product of factors with one of them replaced."""
        return Factor(*(x - y + z for x, y, z in zip(self, before, after, strict=True)))

    def without(self, one: Factor) -> GaussianSide:
        """A product of factors but for one of them."""
        precision, shift = self.precision - one.precision, self.shift - one.shift
        return GaussianSide(cholesky_solve(cholesky(precision), shift), precision)


class SharedSelection(NamedTuple):
    """Shared vectors in the selection of pairs of which some are censored."""

    log_shares: Array
    """Logs of their shares in the censored pairs, shape ``(num,)``."""
    counts: Array
    """Parameters of the Dirichlet distribution of their probabilities."""
    tangent: Array
    """Square of the tangent of the zeros of all pairs that are not listed."""
    listed: Array
    """Total counts of the listed pairs of all batches, shape ``(num,)``."""
    terms: SelectionTerms

    @classmethod
    def first(cls, prior: Array, tangent: ArrayLike = 1.0) -> SharedSelection:
        """Equal shares, before any pair has been read.

        :param prior: concentrations of the Dirichlet prior.
        """
        zero, tangent = jnp.zeros((), prior.dtype), jnp.asarray(tangent, prior.dtype)
        shares = jnp.full_like(prior, -jnp.log(prior.size))
        return cls(shares, prior, tangent, jnp.zeros_like(prior), SelectionTerms(zero, zero, zero))


class SharedVectors(NamedTuple):
    """Vectors and unknowns that all batches share, with the prior times the factors of all batches."""

    block: Block
    step: Array
    """Step sizes, one per vector."""
    total: Factor
    common: Block | None = None
    """The common unknowns, where these have a posterior."""
    common_total: Factor | None = None
    selection: SharedSelection | None = None
    """Shares of the shared vectors in censored pairs, if pairs are censored."""

    def divergence(self, prior: GaussianSide, common_prior: GaussianSide | None) -> Array:
        """Divergence from the priors."""
        value = jnp.sum(steps.divergence(self.block, prior))
        if self.common is None or common_prior is None:
            return value
        return value + jnp.sum(steps.divergence(self.common, common_prior))

    def with_factors(self, before: Visited, after: Visited) -> SharedVectors:
        """The same with the factors of a batch renewed."""
        shared = self._replace(total=self.total.replaced(before.factor, after.factor))
        if shared.common_total is None:
            return shared
        assert before.common_factor is not None and after.common_factor is not None
        return shared._replace(common_total=shared.common_total.replaced(before.common_factor, after.common_factor))


class OwnVectors(NamedTuple):
    """The vectors of a batch."""

    block: Block
    step: Array
    """Step sizes, one per vector."""
    log_shares: Array | None = None
    """Logs of the shares of the vectors in the censored pairs of the batch, where there are any, shape ``(num,)``."""
    counts: Array | None = None
    """Parameters of the Dirichlet distribution of their probabilities."""


class BatchSelection(NamedTuple):
    """A batch in the selection of pairs of which some are censored."""

    log_share: Array
    """Log of its share in the censored pairs."""
    log_total: Array
    """The same but for a constant that all batches share, as of the last visit."""
    seen_share: Array
    """Share that the last visit knew of; zero before the first."""
    values: Array
    """Bounds of the expected log probability that a pair with each shared vector is censored, by the shares of the
    batch's own vectors, shape ``(num_shared,)``."""
    terms: SelectionTerms


class Moves(NamedTuple):
    """Parts of a posterior that a visit moves besides the batch's own vectors."""

    shared: ArrayLike
    """True if the shared vectors move, with all that batches share."""
    shares: ArrayLike
    """True if the shares of own vectors in the censored pairs of the batch move."""


class Visited(NamedTuple):
    """Outcome of a visit to a batch."""

    own: OwnVectors
    factor: Factor
    """The batch's factor of the shared vectors."""
    objective: Array
    """The batch's part of the objective before the shared vectors moved, a scalar."""
    common_factor: Factor | None = None
    left: Array | None = None
    """Number, sum of predictors and sum of expected squares of the batch's unlisted zeros, where those of all batches
    share a tangent; shape ``(3,)``."""
    selection: BatchSelection | None = None
    """Shares of own vectors in censored pairs, if pairs are censored."""
    moments: SideMoments | None = None
    """Moments that the batch's own vectors had at its last visit, for steps along directions in which data are silent;
    ``None`` where there are no such steps."""

    def with_share(self, log_share: Array) -> Visited:
        """The same where the batch has another share in the censored pairs."""
        selection = self.selection
        assert selection is not None and self.left is not None
        ratio = jnp.exp(log_share - selection.log_share)
        seen, values = selection.seen_share * ratio, selection.values * ratio
        selection = selection._replace(log_share=log_share, seen_share=seen, values=values)
        return self._replace(left=self.left * ratio, selection=selection)

    def transformed(self, transform: Array, back: Array) -> Visited:
        """The same after a step along directions in which data are silent; own vectors have a leading axis."""
        assert self.moments is not None
        block = jax.vmap(lambda block: transformed(block, transform))(self.own.block)
        assert isinstance(block, Block)
        objective = self.objective - self.moments.cost_of(transform)
        return self._replace(
            own=self.own._replace(block=block), factor=self.factor.transformed(back), objective=objective
        )


def own_moments(form: Bilinear, own: Block, axis_name: str | None = None) -> SideMoments | None:
    """Moments of the vectors of a batch; ``None`` where pairs are censored, as sweeps take no such steps there.

    :param Bilinear form: of the batch, whose own vectors are the rows.
    """
    if form.background is not None and form.background.selection is not None:
        return None
    return side_moments(form, own, "rows", axis_name)


def start_shared(
    block: Block, prior: GaussianSide, common: Block | None = None, common_prior: GaussianSide | None = None
) -> SharedVectors:
    """Before the first visit: factors that say nothing."""
    step = jnp.full(block.mean.shape[:1], 0.5, block.mean.dtype)
    common_total = None if common_prior is None else Factor.of_prior(common_prior)
    return SharedVectors(block, step, Factor.of_prior(prior), common, common_total)


def start_visited(
    own: Block, shared: SharedVectors, *, has_shared_tangent: bool = False, form: Bilinear | None = None
) -> Visited:
    """Before the first visit of a batch.

    :param Block own: its vectors, with a leading axis.
    :param bool has_shared_tangent: whether all batches share the tangent of unlisted zeros.
    :param Bilinear form: of the batch, without its cells and with such an axis, where updates are closed.
    """
    dtype = own.mean.dtype
    factor, common = jax.tree.map(jnp.zeros_like, (shared.total, shared.common_total))
    step = jnp.full(own.mean.shape[:-1], 0.5, dtype)
    moments = None
    if form is not None:
        shapes = jax.eval_shape(own_moments, *jax.tree.map(lambda x: x[0], (form, own)))
        moments = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    left = jnp.zeros(3, dtype) if has_shared_tangent else None
    return Visited(OwnVectors(own, step), factor, jnp.full((), -jnp.inf, dtype), common, left, moments=moments)


def with_equal_shares(start: Visited, selection: SharedSelection, num_own: ArrayLike) -> Visited:
    """The start of a batch of pairs of which some are censored.

    :param num_own: number of its vectors, without those that only fill up.
    """
    step, nothing = start.own.step, jnp.zeros_like(selection.log_shares)
    share, zero = jnp.log(jnp.asarray(num_own, step.dtype)), jnp.zeros((), step.dtype)
    own = start.own._replace(log_shares=jnp.full_like(step, -share), counts=jnp.zeros_like(step))
    terms = SelectionTerms(zero, zero, zero)
    return start._replace(own=own, selection=BatchSelection(share, share, zero, nothing, terms))


def with_shares_by_totals(visited: list[Visited]) -> list[Visited]:
    """Batches with the shares in the censored pairs that are best, given the shares of vectors within each."""
    totals = jnp.stack([jnp.asarray(v.selection.log_total) for v in visited if v.selection is not None])
    return [v.with_share(share) for v, share in zip(visited, jax.nn.log_softmax(totals), strict=True)]


def visit_batch(
    prepared: Prepared,
    visited: Visited,
    shared: SharedVectors,
    moves: Moves,
    elsewhere: None = None,
    *,
    axis_name: str | None = None,
) -> tuple[Visited, SharedVectors]:
    """Fit the batch's own vectors, move the shared ones, renew the batch's factor.

    :param Prepared prepared: the batch, or the part of it that a device has; its own vectors are the rows.
    :param Visited visited: what its last visit left.
    :param SharedVectors shared: at present.
    :param Moves moves: what moves besides the batch's own vectors.
    :param elsewhere: steps need to know no more of other batches than their factors.
    :param str axis_name: of the axis of devices between which the batch's own vectors are divided, if they are.

    Cost: at most some 20 passes over the cells.
    """
    form, views = prepared

    def total(x: Array) -> Array:
        return over_devices(jnp.sum(x), axis_name)

    def best(own: Block) -> core.Views:
        return core.with_tangents(views, own, shared.block)

    start = visited.own.block
    own, values = steps.make_feasible(best(start).rows, start, shared.block, form.rows)
    assert isinstance(own, Block) and isinstance(form.rows, GaussianSide)
    own, own_step, values, _ = fit_side(
        lambda own: best(own).rows,
        own,
        shared.block,
        form.rows,
        visited.own.step,
        values - steps.divergence(own, form.rows),
        num_steps=_OWN_STEPS,
        tol=_OWN_TOL,
        measure=lambda gain, values: total(gain) / (1.0 + jnp.abs(total(values))),
    )
    others, view = shared.total.without(visited.factor), best(own).columns

    def move_shared(_: int, carry: tuple[Block, Array]) -> tuple[Block, Array]:
        return steps.step_side(view, carry[0], own, others, carry[1], axis_name=axis_name)[:2]

    block, step = lax.fori_loop(0, jnp.where(moves.shared, _SHARED_STEPS, 0), move_shared, (shared.block, shared.step))
    sums = over_devices(sum_cells(view, block, own, with_matrix=True), axis_name)
    factor = Factor(sums.precision, sums.slope + jnp.einsum("nij,nj->ni", sums.precision, block.mean))
    found = Visited(OwnVectors(own, own_step), factor, total(form.log_constant) + total(values))
    return found, shared._replace(block=block, step=step).with_factors(visited, found)
