"""From NumPy to JAX without a program."""

from __future__ import annotations

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

__all__ = ["to_device"]


def to_device(values: ArrayLike) -> Array:
    """``jnp.asarray`` that compiles nothing: some versions of JAX run a program for each shape of an array of NumPy.

    :param values: numbers, an array of NumPy or of JAX, outside compiled functions.
    :return: the array, in the precision that JAX has it.

    >>> to_device(np.arange(3.0)).shape
    (3,)
    """
    return jax.device_put(values if isinstance(values, jax.Array) else np.asarray(values))
