"""Objective of all batches together, and sums over the others that one of them needs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....structure.bilinear.form import Bilinear, GaussianSide
from ..algorithms.cells import Block
from ..algorithms.gauge import SideMoments, best_transforms, joined_moments, side_moments, transformed
from ..algorithms.incidence import SideBlock
from ..algorithms.quadratic import Elsewhere
from ..algorithms.schedules.visits import Factor, SharedSelection, SharedVectors, Visited
from ..algorithms.selection import Selected, SelectionTerms


def elsewhere_of(visited: list[Visited], number: int) -> Elsewhere | None:
    """Sums over all other batches for tangents and shares that belong to all; ``None`` if there are none.

    :param visited: all batches.
    :param int number: of one of them.
    """
    one = visited[number]
    if one.left is None:
        return None

    def of_others(parts: list[Array | None]) -> Array:
        """Sum over the others."""
        found = [np.asarray(x) for x in parts if x is not None]
        return jnp.asarray(np.sum([np.zeros_like(found[0]), *found[:number], *found[number + 1 :]], axis=0))

    left = of_others([v.left for v in visited])
    if one.selection is None:
        return Elsewhere(left)
    values = of_others([v.selection and v.selection.values for v in visited])
    share = of_others([v.selection and v.selection.seen_share for v in visited])
    return Elsewhere(left, values, share, jnp.asarray(one.selection.log_share))


def after_silent_step(
    visited: list[Visited], shared: SharedVectors, form: Bilinear
) -> tuple[list[Visited], SharedVectors]:
    """All batches and what they share after the exact step along directions in which data are silent.

    :param visited: all batches; where one has no moments there is no step.
    :param Bilinear form: of one of them, for the prior of the shared vectors.

    Cost: for each batch and shared vector two products of matrices, and none where nothing would be gained.
    """
    moments = [v.moments for v in visited if v.moments is not None]
    if len(moments) < len(visited):
        return visited, shared
    block, total = jax.tree.map(np.asarray, (shared.block, shared.total))
    *transforms, gain = _best_step(joined_moments(moments), block, form)
    if not gain > 0.0:
        return visited, shared
    block, total = jax.tree.map(np.asarray, _move_shared(block, total, transforms[1], form.columns))
    moved = [jax.tree.map(np.asarray, _move(v, *transforms)) for v in visited]
    return moved, shared._replace(block=block, total=total)


@jax.jit
def _best_step(rows: SideMoments, block: Block, form: Bilinear) -> tuple[Array, Array, Array]:
    """The best transforms, and by how much they raise the objective."""
    columns = side_moments(form, block, "columns")
    assert columns is not None
    transform, back = best_transforms(rows, columns)
    return transform, back, -rows.cost_of(transform) - columns.cost_of(back)


def objective_of(visited: list[Visited], shared: SharedVectors, form: Bilinear) -> float:
    """Objective of all batches, each as of its last visit.

    :param Bilinear form: of one of them, for the priors of what is shared.
    """
    value = sum(float(v.objective) for v in visited)
    terms = [v.selection.terms for v in visited if v.selection is not None]
    if shared.selection is not None:
        rows: SelectionTerms = jax.tree.map(lambda *x: jnp.sum(jnp.stack(x)), *terms)
        columns: SelectionTerms = jax.tree.map(np.asarray, shared.selection.terms)
        value += float(rows.bound) + float(columns.bound)
    block, common = jax.tree.map(np.asarray, (shared.block, shared.common))
    assert isinstance(form.columns, GaussianSide)
    common_prior = None if form.common is None else form.common.prior
    return value - float(shared._replace(block=block, common=common).divergence(form.columns, common_prior))


_move = jax.jit(Visited.transformed)


@jax.jit
def _move_shared(block: Block, total: Factor, back: Array, prior: GaussianSide) -> tuple[SideBlock, Factor]:
    """Shared vectors, and the product of their prior and all factors, after a step."""
    of_prior = Factor.of_prior(prior)
    nothing = jax.tree.map(jnp.zeros_like, of_prior)
    factors = total.replaced(of_prior, nothing).transformed(back)
    return transformed(block, back), factors.replaced(nothing, of_prior)


def selected_of(last: Visited, counts: tuple[Array, Array], shared: SharedSelection) -> Selected:
    """The selection of one batch, as rows, and of what is shared.

    :param Visited last: the batch.
    :param counts: logs of its vectors' shares in the censored pairs of the batch, and their counts.
    """
    assert last.selection is not None
    log_shares, own_counts = counts
    found = own_counts, shared.counts, log_shares + last.selection.log_share, shared.log_shares, shared.tangent
    return Selected(*(jnp.asarray(np.asarray(x)) for x in found))


def check_alike(first: Bilinear, form: Bilinear, names: Sequence[str], number: int) -> None:
    """Refuse a batch that does not share with the first one what all batches share.

    :param Bilinear first: form of the first batch, without its cells; own vectors are rows.
    :param Bilinear form: of another batch.
    :param names: sites of the shared vectors.
    :param int number: of this batch.
    :raises ValueError: if something shared differs.
    """
    where = f"batch {number}, counted from zero"
    (expected, *priors), (found, *others) = (
        [side for side in (f.columns, f.common and f.common.prior) if isinstance(side, GaussianSide)]
        for f in (first, form)
    )
    if expected.mean.shape != found.mean.shape:
        raise ValueError(
            f"{list(names)} of {where}, are {found.mean.shape[0]} vectors of {found.mean.shape[1]} components, in the "
            f"first batch {expected.mean.shape[0]} of {expected.mean.shape[1]}: all batches must share them."
        )
    pairs = [(expected, found), *zip(priors, others, strict=True)]
    arrays = [both for one, other in pairs for both in ((one.mean, other.mean), (one.precision, other.precision))]
    if not all(np.allclose(*both, equal_nan=True) for both in arrays):
        raise ValueError(
            f"{list(names)} of {where}, have another prior than in the first batch: all batches must share it."
        )
    if first.background is None or form.background is None or first.background.selection is None:
        return
    assert form.background.selection is not None
    censored, of_batch = float(first.background.exposure), float(form.background.exposure)
    if censored != of_batch:
        raise ValueError(
            f"num_censored is {of_batch:g} in {where}, and {censored:g} in the first: give all batches that of all "
            "pairs together."
        )
    if not np.allclose(first.background.selection.columns, form.background.selection.columns):
        raise ValueError(
            f"The probabilities with which {list(names)} are selected have another prior in {where}, than in the first "
            "batch: all batches must share it."
        )
