r"""Closed updates of independent vectors from the quadratic functions that bound their expected log factors.

Of a Gaussian with a full covariance the best is :math:`N(P^{-1} m, P^{-1})`, with the precision :math:`P` and the
linear term :math:`m` of prior and sums together. Of one with independent components the mean is the same, and the
variances are :math:`1 / P_{kk}`: what the objective loses against the full one is a divergence, which these minimise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from .....linalg.cholesky import cholesky, cholesky_inverse, cholesky_solve, positive_solve
from .....structure.bilinear.form import GaussianSide
from ..cells import Block
from .sums import VectorSums

Update = Literal["joint", "bulk", "coordinate"]
Stages = tuple[tuple[tuple[int, int], ...], ...]
"""Ranges of components that move together, in stages; before each of these the tangents are found anew."""
_NUMBERS_AT_A_TIME = 1 << 21
"""Numbers in the matrices that are solved at once."""


def stages_of(update: Update, num_paired: int, size: int, *, refresh: bool = False) -> Stages:
    """Order in which the components of a vector move.

    :param str update: ``"joint"``, all at once; ``"bulk"``, biases and then what is in products; ``"coordinate"``, the
        biases and then one component at a time.
    :param int num_paired: number of components that are in products, which stand first.
    :param int size: of the vector.
    :param bool refresh: whether tangents are found anew before each group of components.
    """
    if update == "joint":
        return (((0, size),),)
    biases = (((num_paired, size),),) if num_paired < size else ()
    products = ((0, num_paired),) if update == "bulk" else tuple((k, k + 1) for k in range(num_paired))
    return (*biases, *((group,) for group in products)) if refresh else (*biases, products)


def closed_update(own: Block, prior: GaussianSide, sums: VectorSums, groups: tuple[tuple[int, int], ...]) -> Block:
    """The best Gaussians in the family of ``own``, one group of components after the other.

    :param Block own: the vectors.
    :param GaussianSide prior: of them.
    :param VectorSums sums: of their cells.
    :param groups: ranges of components; those of a full covariance are all of them.
    """
    size = own.mean.shape[1]
    precision = prior.matrices + sums.matrices
    linear = prior.apply(prior.mean) + sums.linear
    mean = own.mean
    for start, stop in groups:
        if (start, stop) == (0, size):
            if own.is_diagonal:
                mean = positive_solve(precision, linear)
                continue
            factor = cholesky(precision)
            return Block(cholesky_solve(factor, linear), cholesky_inverse(factor))
        here = slice(start, stop)
        block = precision[:, here, here]
        # What the other components leave, which stay where they are.
        left = linear[:, here] - jnp.einsum("nij,nj->ni", precision[:, here], mean)
        left += jnp.einsum("nij,nj->ni", block, mean[:, here])
        mean = mean.at[:, here].set(_solved(block, left))
    if own.covariance is None:
        return Block(mean, None)
    diagonal = jnp.diagonal(precision, axis1=-2, axis2=-1)
    moved = jnp.zeros(size, bool)
    for start, stop in groups:
        moved = moved.at[start:stop].set(True)
    return Block(mean, jnp.where(moved, 1.0 / diagonal, own.covariance))


def update_in_parts(
    own: Block,
    prior: GaussianSide,
    sums_at: Callable[[Array], VectorSums],
    groups: tuple[tuple[int, int], ...],
    length: int,
) -> Block:
    """The same for ``length`` vectors after the other, so that the matrices of all of them are never held at once.

    :param sums_at: sums of the cells of vectors from the first of some on, see :func:`~.sums.sums_of_some`.
    """
    num = len(own.mean)

    def step(number: Array, out: Block) -> Block:
        first = jnp.minimum(number * length, num - length)  # the last parts overlap
        some, theirs = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, length), (own, prior))
        found = closed_update(some, theirs, sums_at(first), groups)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, first, 0), out, found)

    return jax.lax.fori_loop(0, -(-num // length), step, own)


def vectors_at_a_time(own: Block) -> int:
    """Number of vectors whose matrices are held at once."""
    num, size = own.mean.shape
    return min(num, max(1, _NUMBERS_AT_A_TIME // size**2))


def _solved(matrix: Array, right: Array) -> Array:
    if matrix.shape[-1] == 1:
        return right / matrix[..., 0]
    return positive_solve(matrix, right)
