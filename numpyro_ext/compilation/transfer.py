"""From NumPy to JAX without a program."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

_ALIGNMENT = 64
"""Bytes by multiples of which arrays begin that JAX takes on the CPU without a copy."""


def generator_of(rng_key: Array) -> np.random.Generator:
    """NumPy's generator from a random key of either kind, whose numbers compile no program.

    >>> generator_of(jax.random.key(0)).integers(10, size=3).shape
    (3,)
    """
    return np.random.default_rng(np.asarray(jax.random.key_data(rng_key)))


def aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Array of NumPy, not filled in, that :func:`to_device` need not copy on a CPU; it is not to be written to after.

    :param tuple shape: of the array.
    :param dtype: of its numbers.

    >>> aligned((2, 3), float).shape
    (2, 3)
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    whole = np.empty(size + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + size].view(dtype).reshape(shape)


def to_device(values: ArrayLike) -> Array:
    """``jnp.asarray`` that compiles nothing: some versions of JAX run a program for each shape of an array of NumPy.

    :param values: numbers, an array of NumPy or of JAX, outside compiled functions.
    :return: the array, in the precision that JAX has it.

    >>> to_device(np.arange(3.0)).shape
    (3,)
    """
    return jax.device_put(values if isinstance(values, jax.Array) else np.asarray(values))
