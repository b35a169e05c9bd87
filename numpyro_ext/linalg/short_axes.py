"""Operations along short last axes, as vectors of rank ten have in millions of cells."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

_LONGEST = 32


def reduce_short(operation: Any, x: Array) -> Array:
    """``operation.reduce(x, axis=-1)``, written out where the axis is short: the loops are then over the other axes.

    Loops over a short last axis are not vectorised on CPUs; sweeps over bilinear counts take half as long again.

    :param operation: a ufunc of two arguments, such as ``jnp.add``.
    :param x: of shape ``(..., size)``.
    :return: of shape ``(...)``.

    **Example:**

    >>> import jax.numpy as jnp
    >>> print(reduce_short(jnp.add, jnp.array([[1.0, 2.0], [3.0, 4.0]])))
    [3. 7.]
    """
    size = x.shape[-1]
    if not 0 < size <= _LONGEST:
        return operation.reduce(x, axis=-1)
    return functools.reduce(operation, [x[..., i] for i in range(size)])


def times_vector(matrix: Array, vector: Array) -> Array:
    """Products of matrices ``(..., m, n)`` with vectors ``(..., n)``: shape ``(..., m)``.

    >>> import jax.numpy as jnp
    >>> print(times_vector(2.0 * jnp.ones((3, 2, 2)), jnp.ones((3, 2)))[0])
    [4. 4.]
    """
    return jnp.einsum("...ij,...j->...i", matrix, vector)


def as_matrices(spread: Array) -> Array:
    """Matrices ``(num, n, n)``, of which the diagonals ``(num, n)`` may be given alone.

    >>> import jax.numpy as jnp
    >>> print(as_matrices(jnp.array([[1.0, 2.0]])))
    [[[1. 0.]
      [0. 2.]]]
    """
    return spread if spread.ndim == 3 else spread[:, :, None] * jnp.eye(spread.shape[-1], dtype=spread.dtype)


def diagonals(spread: Array) -> Array:
    """Diagonals ``(num, n)`` of matrices, or of what is given by these alone: the inverse of :func:`as_matrices`."""
    return spread if spread.ndim == 2 else jnp.diagonal(spread, axis1=-2, axis2=-1)
