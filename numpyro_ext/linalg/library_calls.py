"""Number of factorisations that may run side by side.

A library call on a batch of matrices splits it among the threads of the CPU, from a certain amount of work on, and
waits for them. In a compiled loop these threads may all be waiting for each other, and nothing moves again: seen with
JAX 0.10 on two cores for gradients with four matrices of size 100 and with sixteen of size 40, not with four of 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_MOST_WORK = 2**17
"""Work of a batch that is done by one thread: four matrices of size 32, or 59 of size 13."""
_IN_LIBRARIES = frozenset(
    "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu lu_factor ormqr qr schur svd symmetric_product"
    " triangular_solve tridiagonal_solve".split()
)


def most_together(function: Callable[..., object], *example: object) -> int | None:
    """Number of calls of a function that :func:`jax.vmap` may join without a library call that waits for threads.

    >>> import jax.numpy as jnp
    >>> most_together(jnp.linalg.cholesky, jnp.eye(128)), most_together(jnp.sin, jnp.eye(128))
    (1, None)

    :param function: traced once, or not again if it was made by ``jax.jit``.
    :param example: arrays of the shapes of one call, or their shapes.
    :return: at least one; ``None`` where there is no bound, as on other devices than CPUs.
    """
    if jax.default_backend() != "cpu":
        return None
    largest = max(map(_work, _equations(jax.make_jaxpr(function)(*example).jaxpr)), default=0)
    return max(1, _MOST_WORK // largest) if largest else None


def of_each(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``jax.vmap`` of a function, whose calls are made one after the other where :func:`most_together` asks for it."""

    def mapped(*rows: _Arguments.args, **none: _Arguments.kwargs) -> _Result:
        number = most_together(function, *jax.eval_shape(lambda *all_: jax.tree.map(lambda x: x[0], all_), *rows))
        if number is None or len(jax.tree.leaves(rows)[0]) <= number:
            return jax.vmap(function)(*rows, **none)
        found: _Result = lax.map(lambda row: function(*row, **none), rows)
        return found

    return mapped


def _work(equation: JaxprEqn) -> int:
    """Elements of the larger argument times the size of the matrix, of a library call; else zero."""
    if equation.primitive.name not in _IN_LIBRARIES:
        return 0
    shapes: list[tuple[int, ...]] = [getattr(var.aval, "shape", ()) for var in equation.invars]
    return max(math.prod(shape) for shape in shapes) * shapes[0][-1]


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a program, those of its loops and calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    yield from _equations(part.jaxpr if isinstance(part, ClosedJaxpr) else part)
