"""Run a function once by a compiled program that all runs of the same operations on other data share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.recent import Recent
from .program import Constant, make_program

__all__ = ["run_compiled"]

_COMPILED = Recent(64)


def run_compiled(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, compiled as a whole unless the same operations have been before.

    The arrays that the function closes over, such as the data of a model, are arguments of the program: other ones of
    the same shapes compile nothing. The function itself is traced at every call.

    :param function: of trees of arrays, to a tree of arrays.
    :param args: its arguments.
    :return: what it returns.
    :raises Exception: what the function raises, or JAX, where it needs the values of ``args``.

    >>> import jax.numpy as jnp
    >>> total = lambda data: run_compiled(lambda x: jnp.sum(data * x), jnp.ones(3)).item()
    >>> total(jnp.ones(3)), total(jnp.arange(4.0)[1:])
    (3.0, 6.0)
    """
    program, output = make_program(function, *args)
    leaves, structure = jax.tree.flatten(output, is_leaf=lambda leaf: isinstance(leaf, Constant))
    data = program.data
    program.release()

    def evaluate(inputs: Sequence[Any], data: Sequence[Any]) -> list[Any]:
        env = dict(zip((*program.inputs, *program.constants), (*inputs, *data), strict=True))
        return program.evaluate(leaves, env)

    found = [program.avals[leaf] for leaf in leaves if isinstance(leaf, int)]
    compiled = _COMPILED.get(
        program.fingerprint(), lambda: quick_jit(evaluate, is_small=holds_little((data, args, found)))
    )
    return jax.tree.unflatten(structure, compiled(jax.tree.leaves(args), data))
