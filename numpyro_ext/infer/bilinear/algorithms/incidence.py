r"""Sides whose vectors depend on each other: one Gaussian over all vectors for each component.

Vectors are :math:`\mu_j + s_j \odot R_j z_j` in component ``j`` of a
:class:`~numpyro_ext.structure.bilinear.form.CoupledSide`, with independent standard normal ``z_j`` under the prior, and
the posterior is one of ``z``: no prior covariance is ever inverted, so that it may be nearly singular. Cells see
combinations of vectors, whose components are independent with means and variances that follow; to all sums over cells
these are vectors of a diagonal family. What sums say of them is carried back,

.. math:: \Lambda_j = I + R_j^\top s_j C^\top \operatorname{diag}(p_j)\, C s_j R_j,

with the precisions ``p`` of the cells and the matrix ``C`` of the weights. All components step at once, with one step
size, as each cell sees all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....linalg.cholesky import cholesky, cholesky_solve, inverse_lower, solve_lower, solve_upper
from ....structure.bilinear.form import CoupledSide, Side
from .cells import Block, View, draw_block, sum_cells, sum_values


class CoupledBlock(NamedTuple):
    """Gaussian vectors that depend on each other, by component, in the coordinates in which the prior is standard."""

    mean: Array
    """Shape ``(num, size)``."""
    precision: Array
    """Shape ``(size, num, num)``."""


SideBlock = Block | CoupledBlock


def has_diagonal(block: SideBlock) -> bool:
    """True if cells see independent components."""
    return isinstance(block, CoupledBlock) or block.is_diagonal


def step_sizes(block: SideBlock) -> Array:
    """The first step sizes: one per vector, or one for all that depend on each other."""
    num = 1 if isinstance(block, CoupledBlock) else block.mean.shape[0]
    return jnp.full((num,), 0.5, block.mean.dtype)


def start_coupled(prior: CoupledSide, rng_key: Array, spread: float, variance: float) -> CoupledBlock:
    """Random means around the prior, and small covariances.

    :param spread: standard deviation of the means, at most that of the prior.
    :param variance: of the posterior, at most that of the prior.
    """
    num, size = prior.mean.shape
    square = jnp.mean(prior.scale**2 * jnp.sum(prior.root**2, -1)[prior.group].T, axis=0)
    narrow = jnp.minimum(1.0, spread / jnp.sqrt(square))
    mean = narrow * jax.random.normal(rng_key, prior.mean.shape, prior.mean.dtype)
    precision = 1.0 / jnp.minimum(1.0, variance / square)
    return CoupledBlock(mean, precision[:, None, None] * jnp.eye(num, dtype=mean.dtype))


def touched(block: SideBlock, prior: Side) -> Block:
    """Quantities that cells see of a side: its vectors, or combinations of those that depend on each other.

    Cost: for each component of coupled vectors about three times the cube of their number.
    """
    if not isinstance(block, CoupledBlock):
        return block
    assert isinstance(prior, CoupledSide)
    mean = prior.touched(prior.colour(block.mean))
    variance = _by_component(lambda *one: _variances(prior, _covariance(*one)), block, prior)
    return Block(mean, variance.T)


@jax.jit  # asked for outside of programs too, where loops would be compiled at each call
def coupled_moments(block: CoupledBlock, prior: CoupledSide) -> tuple[Array, Array]:
    """Means of the vectors, shape ``(num, size)``, and covariances of each component, ``(size, num, num)``."""
    return prior.colour(block.mean), _by_component(_covariance, block, prior)


def coupled_divergence(block: CoupledBlock) -> Array:
    """Kullback-Leibler divergence of each component from its prior, shape ``(size,)``."""

    def of_component(precision: Array) -> Array:
        factor = cholesky(precision)
        half_log_determinant = jnp.sum(jnp.log(jnp.diagonal(factor)))
        return 0.5 * jnp.sum(inverse_lower(factor) ** 2) + half_log_determinant

    spread: Array = lax.map(of_component, block.precision)
    return spread + 0.5 * (jnp.sum(block.mean**2, 0) - block.mean.shape[0])


def white_size(block: CoupledBlock) -> Array:
    """Sum of the expected squares of the coordinates of each component, shape ``(size,)``."""
    variance: Array = lax.map(lambda precision: jnp.sum(inverse_lower(cholesky(precision)) ** 2), block.precision)
    return variance + jnp.sum(block.mean**2, 0)


@partial(jax.jit, static_argnames="num_samples")
def draws_of_side(block: SideBlock, prior: Side, rng_key: Array, num_samples: int) -> Array:
    """Draws of all vectors of a side, shape ``(num_samples, num, size)``."""
    return lax.map(lambda key: draw_side(block, prior, key), jax.random.split(rng_key, num_samples))


def draw_side(block: SideBlock, prior: Side, rng_key: Array) -> Array:
    """One draw of all vectors of a side, shape ``(num, size)``."""
    if not isinstance(block, CoupledBlock):
        return draw_block(block, rng_key)
    assert isinstance(prior, CoupledSide)
    white = jax.random.normal(rng_key, block.precision.shape[:2], block.mean.dtype)
    spread = lax.map(lambda one: solve_upper(cholesky(one[0]), one[1][:, None])[:, 0], (block.precision, white))
    return prior.colour(block.mean + spread.T)


def make_coupled_feasible(
    view: View, own: CoupledBlock, other: Block, prior: CoupledSide, num_rounds: int
) -> tuple[CoupledBlock, Array]:
    """Narrow all vectors, and then pull their means towards zero, until every expectation is finite.

    :return: the block, and the expected log factors of what cells see.
    """

    def proceed(carry: tuple[CoupledBlock, Array, Array]) -> Array:
        return ~jnp.all(jnp.isfinite(carry[1])) & (carry[2] < num_rounds)

    def narrow(carry: tuple[CoupledBlock, Array, Array]) -> tuple[CoupledBlock, Array, Array]:
        block, _, count = carry
        # in the first round nothing has been evaluated yet
        factor = jnp.where(count == 0, 1.0, 0.5)
        pull = jnp.where(count >= num_rounds // 2, factor, 1.0)
        block = CoupledBlock(block.mean * pull, block.precision / factor)
        return block, sum_values(view, touched(block, prior), other), count + 1

    start = own, jnp.full(prior.places.shape[:1], -jnp.inf, own.mean.dtype), jnp.asarray(0)
    block, values, _ = lax.while_loop(proceed, narrow, start)
    return block, values


def step_coupled(
    view: View, own: CoupledBlock, seen: Block, other: Block, prior: CoupledSide, step: Array
) -> tuple[CoupledBlock, Array, Array, Array]:
    """Try a damped natural-gradient step of all vectors of a side that depend on each other.

    :param view: the cells in the order of this side.
    :param own: the vectors that move.
    :param seen: what cells see of them, from :func:`touched`.
    :param other: what they see of the other side.
    :param prior: of the vectors that move.
    :param step: size of the step, shape ``(1,)``.
    :return: as of :func:`~.steps.step_side`, each with one entry for all vectors together.

    Cost: one pass over the cells with slopes and one for the values, and for each component some ten times the cube of
    the number of vectors.
    """
    sums = sum_cells(view, seen, other)
    before = jnp.sum(sums.value) - jnp.sum(coupled_divergence(own))
    slope = shifts_carried_back(prior, sums.slope)

    def move(one: tuple[Array, ...]) -> tuple[Array, Array]:
        mean, precision, scale, group, slope, cells = one
        root = scale[:, None] * prior.root[group]
        white = root.T @ precision_carried_back(prior, cells) @ root
        mixed = (1.0 - step) * precision + step * (jnp.eye(len(mean), dtype=mean.dtype) + white)
        gain = cholesky_solve(cholesky(mixed), root.T @ slope - mean)
        return mean + step * gain, mixed

    inputs = own.mean.T, own.precision, prior.scale.T, prior.group, slope.T, sums.precision.T
    mean, precision = lax.map(move, inputs)
    trial = CoupledBlock(mean.T, precision)
    after = jnp.sum(sum_values(view, touched(trial, prior), other)) - jnp.sum(coupled_divergence(trial))
    slack = 10 * jnp.finfo(before.dtype).eps * (1.0 + jnp.abs(before) + jnp.abs(jnp.sum(sums.value)))
    moved = after >= before - slack
    block = jax.tree.map(lambda new, old: jnp.where(moved, new, old), trial, own)
    loss = jnp.where(jnp.isfinite(before) & jnp.isfinite(after), before - after, jnp.inf)
    new_step = jnp.where(moved, jnp.minimum(1.0, 2.0 * step), 0.5 * step)
    return block, new_step, jnp.where(moved, after, before)[None], jnp.where(moved, 0.0, loss)[None]


def _by_component(function: Callable[[Array, Array], Array], block: CoupledBlock, prior: CoupledSide) -> Array:
    """A function of precision and root of each component, one after the other: memory is that of one."""

    def of_component(one: tuple[Array, Array, Array]) -> Array:
        precision, scale, group = one
        return function(precision, scale[:, None] * prior.root[group])

    return lax.map(of_component, (block.precision, prior.scale.T, prior.group))


def _covariance(precision: Array, root: Array) -> Array:
    """Covariance of the vectors in one component."""
    spread = solve_lower(cholesky(precision), root.T)
    return spread.T @ spread


def _is_sparse(prior: CoupledSide) -> bool:
    """True if pairs of vectors that meet in a combination are few."""
    return prior.places.shape[1] ** 2 <= prior.mean.shape[0]


def _combinations(prior: CoupledSide) -> Array:
    """The weights as a matrix, shape ``(num_combinations, num)``."""
    num_combinations, num = prior.places.shape[0], prior.mean.shape[0]
    rows = jnp.arange(num_combinations)[:, None]
    return jnp.zeros((num_combinations, num), prior.weight.dtype).at[rows, prior.places].add(prior.weight)


def _variances(prior: CoupledSide, covariance: Array) -> Array:
    """Variances of all combinations in one component, shape ``(num_combinations,)``."""
    if _is_sparse(prior):
        entries = covariance[prior.places[:, :, None], prior.places[:, None, :]]
        return jnp.einsum("ek,ekl,el->e", prior.weight, entries, prior.weight)
    matrix = _combinations(prior)
    return jnp.sum((matrix @ covariance) * matrix, -1)


def precision_carried_back(prior: CoupledSide, precision: Array) -> Array:
    """Precision of the vectors in one component from those of all combinations, shape ``(num, num)``."""
    if not _is_sparse(prior):
        matrix = _combinations(prior)
        return matrix.T @ (precision[:, None] * matrix)
    num = prior.mean.shape[0]
    entries = precision[:, None, None] * prior.weight[:, :, None] * prior.weight[:, None, :]
    zeros = jnp.zeros((num, num), entries.dtype)
    return zeros.at[prior.places[:, :, None], prior.places[:, None, :]].add(entries)


def shifts_carried_back(prior: CoupledSide, shifts: Array) -> Array:
    """Shifts, or slopes, of the vectors from those of all combinations, shape ``(num, size)``.

    :param shifts: shape ``(num_combinations, size)``.
    """
    total = jnp.zeros((prior.mean.shape[0], shifts.shape[1]), shifts.dtype)
    for slot in range(prior.places.shape[1]):
        total = total.at[prior.places[:, slot]].add(prior.weight[:, slot, None] * shifts)
    return total
