r"""Scores of independent blocks: derivatives of the log evidence of each by all hyperparameters.

Their second moments are about minus the second derivatives of the log evidence where the model holds (the information
of Fisher, as Berndt, Hall, Hall and Hausman 1974 estimate it): a metric for a search over many hyperparameters. One
gradient in the numbers of the form gives how the evidence of each block depends on them, and a pass over the form for
each hyperparameter carries that over: no fit and no integral is made again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.pytree import PyTree
from ....linalg.gaussian.prior import CovariancePrior, PrecisionPrior, PriorBlock
from ....potentials.base import Potential
from ....potentials.families.ordinal import (
    AdjacentCategoryPotential,
    ContinuationRatioPotential,
    CumulativeLogitPotential,
    CumulativeProbitPotential,
)
from ....potentials.vector_rows import has_vector_factors
from ....structure.latent_gaussian import LatentGaussian
from ..algorithms.algorithm import Algorithm

_ON_LAST_AXIS = (
    AdjacentCategoryPotential, ContinuationRatioPotential, CumulativeLogitPotential, CumulativeProbitPotential
)  # fmt: skip
"""Families whose arrays of several numbers, which all factors may share, have these on the last axis."""
_MOST_SCORES = 10_000_000
"""Blocks times hyperparameters, whose scores are held at once."""


def has_block_scores(form: LatentGaussian, num_hyper: int) -> bool:
    """True if the blocks of a form have scores of their own, enough of them to say how these vary together.

    :param LatentGaussian form: of shapes alone.
    :param int num_hyper: number of hyperparameters.
    """
    number = form.blocks.rows.shape[0]
    has_own_numbers = form.has_blocks_alone and not has_vector_factors(form.potentials)
    has_own_numbers &= all(map(_may_have_own_numbers, form.potentials, form.observed))
    return has_own_numbers and number >= num_hyper and number * num_hyper <= _MOST_SCORES


def block_scores(
    algorithm: Algorithm, form_fn: Callable[[Array], LatentGaussian], values: Array, state: PyTree
) -> Array:
    """Derivatives of the log evidence of each block by each hyperparameter at a fit, shape ``(num_blocks, d)``.

    :param form_fn: form at unconstrained hyperparameters.
    :param values: these, shape ``(d,)``.
    :param state: of the fit there.
    """

    def numbers_fn(values: Array) -> list[Array]:
        leaves = jax.tree.leaves(_with_own_numbers(form_fn(values)))
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    form = _with_own_numbers(form_fn(values))
    leaves, structure = jax.tree.flatten(form)
    is_number = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def evidence(numbers: list[Array]) -> Array:
        given = iter(numbers)
        filled = [next(given) if moves else leaf for leaf, moves in zip(leaves, is_number, strict=True)]
        return algorithm.log_evidence(jax.tree.unflatten(structure, filled), state)

    slopes = iter(jax.grad(evidence)([leaf for leaf, moves in zip(leaves, is_number, strict=True) if moves]))
    of_leaves = jax.tree.unflatten(structure, [next(slopes) if moves else None for moves in is_number])
    moves_of = jax.linearize(numbers_fn, values)[1]

    def along(axis: Array) -> Array:
        moved = iter(moves_of(axis))
        of_form = jax.tree.unflatten(structure, [next(moved) if moves else None for moves in is_number])
        return _by_block(form, of_leaves, of_form)

    return jax.lax.map(along, jnp.eye(values.size, dtype=values.dtype)).T


def information(scores: np.ndarray) -> np.ndarray:
    """Second moments of scores about their mean, times the number of blocks, shape ``(d, d)``.

    Correlations are shrunk by as much as their errors explain (Schäfer and Strimmer 2005), so that the matrix is
    positive definite where blocks are not many more than hyperparameters.
    """
    number = len(scores)
    centred = scores - np.mean(scores, axis=0)
    deviations = np.sqrt(np.mean(centred**2, axis=0))
    white = centred / np.where(deviations > 0.0, deviations, 1.0)
    correlations = white.T @ white / number
    errors = (np.square(white).T @ np.square(white) / number - correlations**2) / number
    squares = correlations**2
    np.fill_diagonal(errors, 0.0)
    np.fill_diagonal(squares, 0.0)
    kept = 1.0 - min(1.0, float(np.sum(errors)) / max(float(np.sum(squares)), np.finfo(float).tiny))
    shrunk = kept * correlations
    np.fill_diagonal(shrunk, 1.0)
    found: np.ndarray = number * deviations[:, None] * shrunk * deviations
    return found


def _with_own_numbers(form: LatentGaussian) -> LatentGaussian:
    """The form in which no two blocks share a number, so that the derivative by each belongs to one."""
    prior = tuple(map(_apart, form.prior))
    sizes = [mask.shape[0] for mask in form.observed]
    factors = tuple(_of_rows(potential, size) for potential, size in zip(form.potentials, sizes, strict=True))
    return form._replace(prior=prior, potentials=factors)


def _may_have_own_numbers(factors: Potential, observed: Array) -> bool:
    """True if arrays of the factors may have an axis of rows in front: numbers, and thresholds or scores of categories.
    A table that rows look up may not."""
    if factors.has_fixed_shape:
        return False
    shared = [np.shape(leaf) for leaf in jax.tree.leaves(factors) if np.shape(leaf)[:1] != observed.shape]
    return isinstance(factors, _ON_LAST_AXIS) or not any(shared)


def _apart(block: PriorBlock) -> PriorBlock:
    if isinstance(block, CovariancePrior):
        return dataclasses.replace(block, covariance=jnp.tile(block.covariance, (block.count, 1, 1)), count=1)
    if isinstance(block, PrecisionPrior):
        return dataclasses.replace(block, precision=jnp.tile(block.precision, (block.count, 1, 1)), count=1)
    return block


def _of_rows(factors: Potential, num_rows: int) -> Potential:
    def of_rows(leaf: PyTree) -> Array:
        leaf = jnp.asarray(leaf)
        has_rows = leaf.ndim > 0 and leaf.shape[0] == num_rows
        if has_rows or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        return jnp.broadcast_to(leaf, (num_rows, *leaf.shape))

    return jax.tree.map(of_rows, factors)


def _by_block(form: LatentGaussian, slopes: LatentGaussian, moves: LatentGaussian) -> Array:
    """Change of the log evidence of each block, from slopes of the whole and moves of all numbers of the form."""

    def summed(slope: PyTree, move: PyTree, length: int) -> Array:
        """Products, summed for each element of the first axis."""
        parts = zip(jax.tree.leaves(slope), jax.tree.leaves(move), strict=True)
        products = (jnp.reshape(a * b, (length, -1)) for a, b in parts)
        return sum((jnp.sum(part, axis=1) for part in products), jnp.zeros((length,), form.offset.dtype))

    of_rows = summed((slopes.design, slopes.offset), (moves.design, moves.offset), form.num_rows)
    families = [
        summed(slope, move, mask.shape[0])
        for slope, move, mask in zip(slopes.potentials, moves.potentials, form.observed, strict=True)
    ]
    of_rows = of_rows + jnp.concatenate([*families, jnp.zeros((0,), of_rows.dtype)])
    of_columns = []
    for block, slope, move in zip(form.prior, slopes.prior, moves.prior, strict=True):
        leaves = jax.tree.leaves(slope)
        batch = leaves[0].shape[0] if leaves else block.size
        change = summed(slope, move, batch)[:, None]
        # to the first of the columns that belong to it
        of_columns.append(jnp.pad(change, ((0, 0), (0, block.size // max(batch, 1) - 1))).reshape(-1))
    constant = slopes.log_constant * moves.log_constant / form.blocks.rows.shape[0]
    return constant + sum(
        jnp.sum(part.at[places].get(mode="fill", fill_value=0.0), axis=1)
        for part, places in ((of_rows, form.blocks.rows), (jnp.concatenate(of_columns), form.blocks.columns))
    )
