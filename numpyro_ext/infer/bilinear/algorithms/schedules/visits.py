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

import jax.numpy as jnp
from jax import Array, lax

from .....linalg.cholesky import cholesky, cholesky_solve
from .....structure.bilinear.form import GaussianSide
from .. import steps
from ..cells import Block, View, over_devices, sum_cells
from .loop import fit_side

_OWN_STEPS = 10
_SHARED_STEPS = 2
_OWN_TOL = 1e-8


class Prepared(NamedTuple):
    """Arrays of a batch for its visits; sizes are rounded up, so that batches of similar sizes share a program."""

    own_view: View
    """Its cells in the order of the batch's own vectors."""
    shared_view: View
    own_prior: GaussianSide
    log_constant: Array


class SharedVectors(NamedTuple):
    """The vectors that all batches share, and the factors of the batches."""

    block: Block
    step: Array
    """Step sizes, one per vector."""
    precision: Array
    """Precision of the prior times the factors of all batches, shape ``(num, size, size)``."""
    shift: Array
    """Precision times mean of the same, shape ``(num, size)``."""


class Visited(NamedTuple):
    """Outcome of a visit to a batch."""

    own: Block
    own_step: Array
    precision: Array
    """Precision of the batch's factor, shape ``(num, size, size)``."""
    shift: Array
    objective: Array
    """The batch's part of the objective before the shared vectors moved, a scalar."""


def start_shared(block: Block, prior: GaussianSide) -> SharedVectors:
    """Before the first visit: factors that say nothing."""
    precision = prior.matrices
    shift = jnp.einsum("nij,nj->ni", precision, prior.mean)
    return SharedVectors(block, jnp.full(block.mean.shape[:1], 0.5, block.mean.dtype), precision, shift)


def start_visited(own: Block, shared: SharedVectors) -> Visited:
    """Before the first visit of a batch.

    :param Block own: its vectors.
    """
    dtype = own.mean.dtype
    nothing = jnp.zeros_like(shared.precision), jnp.zeros_like(shared.shift)
    return Visited(own, jnp.full(own.mean.shape[:-1], 0.5, dtype), *nothing, jnp.full((), -jnp.inf, dtype))


def visit_batch(
    prepared: Prepared, visited: Visited, shared: SharedVectors, moves_shared: Array, *, axis_name: str | None = None
) -> tuple[Visited, SharedVectors]:
    """Fit the batch's own vectors, move the shared ones, renew the batch's factor.

    :param Prepared prepared: the batch, or the part of it that a device has.
    :param Visited visited: what its last visit left.
    :param SharedVectors shared: at present.
    :param moves_shared: false leaves the shared vectors where they are.
    :param str axis_name: of the axis of devices between which the batch's own vectors are divided, if they are.

    Cost: at most some 20 passes over the cells.
    """
    own_view, shared_view, own_prior = prepared.own_view, prepared.shared_view, prepared.own_prior

    def total(x: Array) -> Array:
        return over_devices(jnp.sum(x), axis_name)

    own, values = steps.make_feasible(own_view, visited.own, shared.block, own_prior)
    assert isinstance(own, Block)

    own, own_step, values, _ = fit_side(
        lambda own: own_view,
        own,
        shared.block,
        own_prior,
        visited.own_step,
        values - steps.divergence(own, own_prior),
        num_steps=_OWN_STEPS,
        tol=_OWN_TOL,
        measure=lambda gain, values: total(gain) / (1.0 + jnp.abs(total(values))),
    )

    # What the prior and all other batches say of the shared vectors.
    precision, shift = shared.precision - visited.precision, shared.shift - visited.shift
    others = GaussianSide(cholesky_solve(cholesky(precision), shift), precision)

    def move_shared(_: int, carry: tuple[Block, Array]) -> tuple[Block, Array]:
        return steps.step_side(shared_view, carry[0], own, others, carry[1], axis_name=axis_name)[:2]

    block, step = lax.fori_loop(0, jnp.where(moves_shared, _SHARED_STEPS, 0), move_shared, (shared.block, shared.step))
    sums = over_devices(sum_cells(shared_view, block, own, with_matrix=True), axis_name)
    new_shift = sums.slope + jnp.einsum("nij,nj->ni", sums.precision, block.mean)
    new = Visited(own, own_step, sums.precision, new_shift, total(prepared.log_constant) + total(values))
    return new, SharedVectors(block, step, precision + sums.precision, shift + new_shift)
