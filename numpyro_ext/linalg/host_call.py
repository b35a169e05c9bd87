"""Calls of NumPy from compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback


def host_call(function: Callable[..., object], result: object, *args: Any, fills: bool = False) -> Any:
    """Result of a function of NumPy arrays, which a compiled program calls when it has their values.

    On the CPU the function reads and fills the memory of the program itself: a call costs some ten microseconds, where
    :func:`jax.pure_callback`, by which it is made elsewhere, takes more than a hundred, copies, and needs another
    thread for the copies. Under ``vmap`` calls are made one after the other. There are no derivatives.

    >>> import jax.numpy as jnp
    >>> print(jax.jit(lambda x: host_call(np.cumsum, jax.typeof(x), x))(jnp.array([1, 2, 3])))
    [1 3 6]

    :param function: of a NumPy array for each argument, to a pytree of arrays. It calls no JAX, which may wait for
        itself, keeps no argument, whose memory is used again, and writes into none.
    :param result: pytree of :class:`jax.ShapeDtypeStruct`, of the same structure.
    :param args: pytrees of arrays.
    :param bool fills: whether the function gets the arrays of the result as its first argument and fills them, which
        takes no memory beside that of the program.
    :raises ValueError: from the program, if what comes back has another structure or other shapes.
    """

    def of_arrays(*args: object) -> object:
        return function(*jax.tree.map(np.asarray, args))

    def into_outputs(_: object, outputs: object, *args: object) -> None:
        if fills:
            of_arrays(outputs, *args)
            return
        found = jax.tree.leaves(of_arrays(*args))
        for output, value in zip(jax.tree.leaves(outputs), found, strict=True):
            np.copyto(np.asarray(output), _of_shape(value, output))

    def as_outputs(*args: object) -> object:
        if fills:
            outputs = jax.tree.map(lambda like: np.empty(like.shape, like.dtype), result)
            of_arrays(outputs, *args)
            return outputs
        return jax.tree.map(lambda value, like: np.asarray(value, like.dtype), of_arrays(*args), result)

    if jax.default_backend() == "cpu":
        return buffer_callback(into_outputs, result, vmap_method="sequential")(*args)
    return jax.pure_callback(as_outputs, result, *args, vmap_method="sequential")


def _of_shape(value: Any, like: Any) -> np.ndarray:
    """An array of the shape of another one, which is not broadcast to it."""
    array = np.asarray(value)
    if array.shape != like.shape:
        raise ValueError(f"A function on the host returned an array of shape {array.shape} for {like.shape}.")
    return array
