"""A function as a program and its data, and a run of it that all runs of the same operations on other data share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ...compilation.content import Structure
from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.store import shared
from .equations import Atom, Constant
from .program import Program, make_program

_MOST_READ = 100_000
"""Numbers that arguments may hold for a program that is compiled for few calls."""


def run_compiled(function: Callable[..., object], *args: object, most_read: int = _MOST_READ) -> Any:
    """``function(*args)``, compiled as a whole unless the same operations have been before.

    The arrays that the function closes over, such as the data of a model, are arguments of the program: other ones of
    the same shapes compile nothing. The function itself is traced at every call.

    :param function: of trees of arrays, to a tree of arrays.
    :param args: its arguments.
    :param int most_read: numbers that these may hold where what is computed is little and compilation takes longer;
        more than by default where they are hardly more than read.
    :return: what it returns.
    :raises Exception: what the function raises, or JAX, where it needs the values of ``args``.

    >>> import jax.numpy as jnp
    >>> total = lambda data: run_compiled(lambda x: jnp.sum(data * x), jnp.ones(3)).item()
    >>> total(jnp.ones(3)), total(jnp.arange(4.0)[1:])
    (3.0, 6.0)
    """
    return run_traced(traced(function, *args), *args, most_read=most_read)


def run_traced(found: TracedFunction, *args: object, most_read: int = _MOST_READ) -> Any:
    """The function of :func:`traced` at these arguments, compiled as in :func:`run_compiled`."""
    is_small = holds_little((found.data, found.results)) and holds_little(args, most_read)
    return jax.tree.unflatten(found.tree, shared(_compiled, found, is_small)(found.data, *args))


def _compiled(function: TracedFunction, is_small: bool) -> Callable[..., list[Any]]:
    return quick_jit(function.leaves, is_small=is_small)


class TracedFunction(NamedTuple):
    """A function without the arrays that it closes over."""

    program: Program
    outputs: tuple[Atom, ...]
    """The leaves of the result among the values of the program."""
    tree: Any
    """The tree that they make."""
    data: tuple[Any, ...]
    """The arrays that the function closes over."""

    @property
    def structure(self) -> Structure[TracedFunction]:
        """The function without the arrays that it closes over."""
        return Structure(self._replace(data=()))

    @property
    def results(self) -> list[Any]:
        """Shapes of those leaves that are computed."""
        return [self.program.avals[leaf] for leaf in self.outputs if isinstance(leaf, int)]

    def leaves(self, data: Sequence[object], *args: object) -> list[Any]:
        """The leaves of its result."""
        inputs = (*jax.tree.leaves(args), *data)
        env = dict(zip((*self.program.inputs, *self.program.constants), inputs, strict=True))
        return self.program.evaluate(self.outputs, env)


def traced(function: Callable[..., object], *args: object) -> TracedFunction:
    """Trace ``function(*args)``; see :func:`run_compiled`.

    :param function: of trees of arrays, to a tree of arrays.
    :param args: its arguments, or their shapes.
    """
    return as_function(*make_program(function, *args))


def as_function(program: Program, output: object) -> TracedFunction:
    """A program with its output as a function."""
    leaves, tree = jax.tree.flatten(output, is_leaf=lambda leaf: isinstance(leaf, Constant))
    return TracedFunction(program.with_data(()), tuple(leaves), tree, program.data)
