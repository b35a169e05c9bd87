"""First and second moments of vectors, as the cells of the other side multiply them.

A cell's predictor is the product of ``(u, 1)`` with an affine function of ``v``, whose last entry is what ``v`` adds
to the predictor; and of ``(v, 1)`` with an affine function of ``u``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..cells import Block
from ..terms import Coefficients


class Moments(NamedTuple):
    """Moments of extended vectors of length ``n``."""

    mean: Array
    """Shape ``(num, n)``."""
    variance: Array | None
    """Variances of independent entries, shape ``(num, n)``; ``None`` where ``covariance`` is given."""
    covariance: Array | None
    """Covariances, packed by :func:`pack`, shape ``(num, n (n + 1) / 2)``."""

    @property
    def second(self) -> Array:
        """Packed second moments, shape ``(num, n (n + 1) / 2)``."""
        row, column = np.triu_indices(self.mean.shape[-1])
        products = self.mean[..., row] * self.mean[..., column]
        if self.covariance is not None:
            return products + self.covariance
        assert self.variance is not None
        diagonal = np.flatnonzero(row == column)
        return products.at[..., diagonal].add(self.variance)


def pack(matrix: Array) -> Array:
    """Upper triangles of symmetric matrices, one row after the other."""
    # a gather of the entries would take several times as long
    return jnp.concatenate([matrix[..., row, row:] for row in range(matrix.shape[-1])], axis=-1)


def unpack(packed: Array, size: int) -> Array:
    """Symmetric matrices of their upper triangles."""
    ends = np.cumsum(size - np.arange(size))
    starts, front = ends - (size - np.arange(size)), [(0, 0)] * (packed.ndim - 1)
    rows = [jnp.pad(packed[..., starts[row] : ends[row]], [*front, (row, 0)]) for row in range(size)]
    upper = jnp.stack(rows, axis=-2)
    return jnp.where(np.tri(size, k=-1, dtype=bool), jnp.swapaxes(upper, -1, -2), upper)


def own_moments(block: Block, is_diagonal: bool) -> Moments:
    """Moments of ``(u, 1)``.

    :param Block block: vectors ``u``.
    :param bool is_diagonal: whether entries are independent, on both sides.
    """
    mean = jnp.pad(block.mean, [(0, 0), (0, 1)], constant_values=1.0)
    if is_diagonal:
        return Moments(mean, jnp.pad(block.variance, [(0, 0), (0, 1)]), None)
    return Moments(mean, None, pack(jnp.pad(block.matrices, [(0, 0), (0, 1), (0, 1)])))


def partner_moments(coefficients: Coefficients, size: int, block: Block, is_diagonal: bool) -> Moments:
    """Moments of what multiplies ``(u, 1)``, for each vector of the other side.

    :param Coefficients coefficients: the same for all cells, with leading axes of length one.
    :param int size: of ``u``.
    :param Block block: vectors of the other side.
    :param bool is_diagonal: whether entries are independent; then no component of ``v`` is in a product and in a linear
        term.
    """
    pairs, matrix, own_linear, other_linear = coefficients
    mean = block.mean
    other_size = mean.shape[1]
    if is_diagonal:
        assert pairs is not None
        k = pairs.shape[-1]
        linear = jnp.zeros((1, other_size), mean.dtype) if other_linear is None else other_linear
        first, spread = (
            jnp.concatenate(
                [
                    jnp.pad(x[:, :k] * weights, [(0, 0), (0, size - k)]),
                    jnp.sum(ends * x, -1, keepdims=True),
                ],
                axis=1,
            )
            for x, weights, ends in ((mean, pairs, linear), (block.variance, pairs**2, linear**2))
        )
        shift = 0.0 if own_linear is None else jnp.pad(own_linear, [(0, 0), (0, 1)])
        return Moments(first + shift, spread, None)
    whole = jnp.zeros((size + 1, other_size), mean.dtype)
    if pairs is not None:
        k = pairs.shape[-1]
        whole = whole.at[jnp.arange(k), jnp.arange(k)].set(pairs[0])
    elif matrix is not None:
        whole = whole.at[:size].set(matrix[0])
    if other_linear is not None:
        whole = whole.at[size].set(other_linear[0])
    constant = jnp.zeros((size + 1,), mean.dtype)
    if own_linear is not None:
        constant = constant.at[:size].set(own_linear[0])
    return Moments(mean @ whole.T + constant, None, pack(whole @ block.matrices @ whole.T))
