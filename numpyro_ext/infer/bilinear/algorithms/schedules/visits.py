r"""Visits to batches of the vectors of one side of a bilinear model, with their cells.

The vectors of the other side are shared by all batches. Each batch is represented by a Gaussian factor for every shared
vector, the second-order expansion of its expected log factors that natural gradients are made of. A visit fits the
batch's own vectors, moves the shared ones by natural-gradient steps on the batch itself and the factors that stand for
all others, and then renews the batch's factor. Where nothing moves any more, the gradient of the whole objective is
zero: the end is an optimum of the whole data, and no step sizes that decrease are needed. With factors that are summed
instead of kept it would be stochastic variational inference (Hoffman, Blei, Wang and Paisley 2013), which ends near it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .....linalg.cholesky import cholesky, cholesky_solve
from .....linalg.padding import rounded_up
from .....structure.bilinear.form import Bilinear, GaussianSide
from .. import steps
from .. import sweeps as core
from ..cells import Block, Side, View, sum_cells
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


class BatchStore:
    """Prepared batches in files of a folder.

    :param folder: an empty one.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._structures: list[Any] = []

    def __len__(self) -> int:
        return len(self._structures)

    def append(self, prepared: Prepared) -> None:
        """Write one more."""
        leaves, structure = jax.tree.flatten(prepared)
        np.savez(self._path(len(self)), *map(np.asarray, leaves))
        self._structures.append(structure)

    def __getitem__(self, number: int) -> Prepared:
        with np.load(self._path(number)) as content:
            leaves = [content[f"arr_{i}"] for i in range(len(content.files))]
        return jax.tree.unflatten(self._structures[number], leaves)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.npz"


def prepare_batch(form: Bilinear, own: Side, own_block: Block, shared: Block) -> Prepared:
    """Order and pad the cells of a batch.

    :param Bilinear form: of the batch.
    :param str own: which side is the batch's own.
    :param Block own_block: of these vectors; only its shapes count.
    :param Block shared: the other side; only its shapes count.
    """
    form = _fill_up(form, own)
    num = (form.rows if own == "rows" else form.columns).mean.shape[0]
    own_block = jax.tree.map(lambda x: jnp.zeros((num, *x.shape[1:]), x.dtype), own_block)
    views = jax.jit(core.make_views)(form, *((own_block, shared) if own == "rows" else (shared, own_block)))
    assert isinstance(form.rows, GaussianSide) and isinstance(form.columns, GaussianSide)  # by fit_batches
    if own == "rows":
        return Prepared(views.rows, views.columns, form.rows, form.log_constant)
    return Prepared(views.columns, views.rows, form.columns, form.log_constant)


def start_shared(block: Block, prior: GaussianSide) -> SharedVectors:
    """Before the first visit: factors that say nothing."""
    precision = prior.matrices
    shift = jnp.einsum("nij,nj->ni", precision, prior.mean)
    return SharedVectors(block, jnp.full(block.mean.shape[:1], 0.5, block.mean.dtype), precision, shift)


def start_visited(prepared: Prepared, own: Block, shared: SharedVectors) -> Visited:
    """Before the first visit of a batch.

    :param Block own: its vectors, without those that only fill up.
    """
    num = prepared.own_prior.mean.shape[0]
    own = jax.tree.map(lambda x: jnp.pad(x, [(0, num - x.shape[0])] + [(0, 0)] * (x.ndim - 1), mode="edge"), own)
    dtype = own.mean.dtype
    nothing = jnp.zeros_like(shared.precision), jnp.zeros_like(shared.shift)
    return Visited(own, jnp.full((num,), 0.5, dtype), *nothing, jnp.full((), -jnp.inf, dtype))


@jax.jit
def visit_batch(
    prepared: Prepared, visited: Visited, shared: SharedVectors, moves_shared: Array
) -> tuple[Visited, SharedVectors]:
    """Fit the batch's own vectors, move the shared ones, renew the batch's factor.

    :param Prepared prepared: the batch.
    :param Visited visited: what its last visit left.
    :param SharedVectors shared: at present.
    :param moves_shared: false leaves the shared vectors where they are.

    Cost: at most some 20 passes over the cells.
    """
    own_view, shared_view, own_prior = prepared.own_view, prepared.shared_view, prepared.own_prior
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
        measure=lambda gain, values: jnp.sum(gain) / (1.0 + jnp.abs(jnp.sum(values))),
    )

    # What the prior and all other batches say of the shared vectors.
    precision, shift = shared.precision - visited.precision, shared.shift - visited.shift
    others = GaussianSide(cholesky_solve(cholesky(precision), shift), precision)

    def move_shared(_: int, carry: tuple[Block, Array]) -> tuple[Block, Array]:
        return steps.step_side(shared_view, carry[0], own, others, carry[1])[:2]

    block, step = lax.fori_loop(0, jnp.where(moves_shared, _SHARED_STEPS, 0), move_shared, (shared.block, shared.step))
    sums = sum_cells(shared_view, block, own, with_matrix=True)
    new_shift = sums.slope + jnp.einsum("nij,nj->ni", sums.precision, block.mean)
    new = Visited(own, own_step, sums.precision, new_shift, prepared.log_constant + jnp.sum(values))
    return new, SharedVectors(block, step, precision + sums.precision, shift + new_shift)


def _fill_up(form: Bilinear, own: Side) -> Bilinear:
    """The form with cells and vectors of no weight, to rounded numbers of both."""
    num_cells = form.num_cells
    more = rounded_up(num_cells) - num_cells

    def fill(x: Array) -> Array:
        if x.shape[:1] != (num_cells,):
            return x
        return jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1), mode="edge")

    of_cells = ("row_index", "column_index", "coupling", "row_linear", "column_linear", "offset", "potential")
    filled: dict[str, Any] = {name: jax.tree.map(fill, getattr(form, name)) for name in of_cells}
    filled["weight"] = jnp.pad(form.weight, (0, more))
    for name in ("row", "column"):
        filled[f"{name}_order"] = jnp.asarray(np.argsort(np.asarray(filled[f"{name}_index"]), kind="stable"))
    side = getattr(form, own)
    num = side.mean.shape[0]
    extra = rounded_up(num) - num
    mean, precision = (
        jnp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1), mode="edge") for x in (side.mean, side.precision)
    )
    filled[own] = GaussianSide(mean, precision, jnp.pad(jnp.ones(num, mean.dtype), (0, extra)))
    return form._replace(**filled)
