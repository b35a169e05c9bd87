"""A function as a program and its data, and a run of it that all runs of the same operations on other data share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.recent import Recent
from .equations import Constant
from .program import Program, make_program

__all__ = ["TracedFunction", "as_function", "run_compiled", "run_traced", "traced"]

_COMPILED = Recent(64)


def run_compiled(function: Callable[..., object], *args: object) -> Any:
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
    return run_traced(traced(function, *args), *args)


def run_traced(found: TracedFunction, *args: object) -> Any:
    """The function of :func:`traced` at these arguments, compiled as in :func:`run_compiled`."""
    is_small = holds_little((found.data, args, found.results))
    compiled = _COMPILED.get(found.key, lambda: quick_jit(found.leaves, is_small=is_small))
    return jax.tree.unflatten(found.structure, compiled(found.data, *args))


class TracedFunction(NamedTuple):
    """A function without the arrays that it closes over."""

    leaves: Callable[..., list[Any]]
    """``leaves(data, *args)``: the leaves of its result."""
    structure: Any
    """The tree that they make."""
    data: tuple[Any, ...]
    """The arrays that it closes over."""
    key: Hashable
    """Equal where ``leaves`` are the same function."""
    results: list[Any]
    """Shapes of those leaves that are computed."""


def traced(function: Callable[..., object], *args: object) -> TracedFunction:
    """Trace ``function(*args)``; see :func:`run_compiled`.

    :param function: of trees of arrays, to a tree of arrays.
    :param args: its arguments, or their shapes.
    """
    return as_function(*make_program(function, *args))


def as_function(program: Program, output: object) -> TracedFunction:
    """A program, whose data it lets go of, with its output as a function."""
    leaves, structure = jax.tree.flatten(output, is_leaf=lambda leaf: isinstance(leaf, Constant))
    data = program.data
    program.release()

    def evaluate(data: Sequence[object], *args: object) -> list[Any]:
        inputs = (*jax.tree.leaves(args), *data)
        return program.evaluate(leaves, dict(zip((*program.inputs, *program.constants), inputs, strict=True)))

    results = [program.avals[leaf] for leaf in leaves if isinstance(leaf, int)]
    return TracedFunction(evaluate, structure, data, program.fingerprint(), results)
