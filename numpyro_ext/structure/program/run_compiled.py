"""A function as a program and its data, and a run of it that all runs of the same operations on other data share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax import Array

from ...compilation.content import Structure
from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.store import shared
from .equations import Atom, Constant
from .program import Program, make_program

_Result = TypeVar("_Result")
_MOST_READ = 100_000
"""Numbers that arguments may hold for a program that is compiled for few calls."""
_MOST_KEPT = 10_000_000
"""Numbers that may be computed ahead; where there would be more a function stays as it is."""


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


def computed_ahead(
    function: Callable[[Array], _Result], example: Array, most_numbers: int = _MOST_KEPT
) -> Callable[[Array], _Result]:
    """The same function, for many calls in one compiled loop: sums over data that the argument does not enter are
    numbers of its program. XLA computes most of them in each call, as sums by index are loops to it.

    Derivatives are those of the function, also where it has rules of its own. Cost: one trace, and one call of what is
    computed ahead, compiled.

    >>> import jax.numpy as jnp
    >>> group = jnp.array([0, 1, 1])
    >>> function = lambda x: x * jnp.zeros(2).at[group].add(1.0)
    >>> faster = computed_ahead(function, jnp.ones(2))
    >>> print(faster(jnp.array([1.0, 3.0])), "scatter" in str(jax.make_jaxpr(faster)(jnp.ones(2))))
    [1. 6.] False

    :param function: of one array, to a tree of arrays; traced once.
    :param example: an array of the shape of its argument.
    :param int most_numbers: that may be kept.
    :return: a function of arrays of this shape and dtype.
    """
    program, output = make_program(function, example, keep_literals=True)
    leaves, tree = jax.tree.flatten(output)
    kept = program.frontier(leaves, program.inputs)
    if sum(math.prod(program.avals[number].shape) for number in kept) > most_numbers:
        return function
    ahead = program.replace(inputs=())
    with jax.ensure_compile_time_eval():  # also where something else is being traced
        values = run_traced(TracedFunction(ahead.with_data(()), kept, jax.tree.structure(list(kept)), program.data))
    known = dict(zip(kept, values, strict=True))

    def with_known(argument: Array) -> _Result:
        found: _Result = jax.tree.unflatten(tree, program.evaluate(leaves, known | {program.inputs[0]: argument}))
        return found

    return with_known
