"""Linear operators of a user's own, and the test that an adjoint is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..frozen_pytree import frozen_pytree
from .operator import LinearOperator, positive_size


@frozen_pytree
class _FromFunctions(LinearOperator):
    forward: Callable[[Array], Array] = dataclasses.field(metadata={"static": True})
    adjoint: Callable[[Array], Array] | None = dataclasses.field(metadata={"static": True})
    size: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    def matvec(self, x: Array) -> Array:
        return self.forward(x)

    def rmatvec(self, y: Array) -> Array:
        return LinearOperator.rmatvec(self, y) if self.adjoint is None else self.adjoint(y)


def from_functions(
    matvec: Callable[[Array], Array], rmatvec: Callable[[Array], Array] | None, shape: tuple[int, int]
) -> LinearOperator:
    """An operator of your own, from functions written with ``jax.numpy``.

    :param matvec: the product with a vector of shape ``(columns,)``, giving shape ``(rows,)``.
    :param rmatvec: the product of the adjoint with a vector of shape ``(rows,)``; None derives it from ``matvec``.
    :param tuple shape: ``(rows, columns)``.
    :raises ValueError: if ``matvec`` is not linear, the shapes do not fit, or ``rmatvec`` is not its adjoint, which is
        tested on random vectors.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg import from_functions
    >>> reverse = from_functions(lambda x: x[::-1], lambda y: y[::-1], (4, 4))
    >>> print(reverse @ jnp.arange(4.0))
    [3. 2. 1. 0.]
    >>> from_functions(jnp.cumsum, jnp.cumsum, (4, 4))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: from_functions: rmatvec is not the adjoint of matvec...
    """
    rows, columns = (positive_size(n, "shape") for n in shape)
    out = _FromFunctions(matvec, rmatvec, (rows, columns))
    for name, function, size, result in (("matvec", matvec, columns, rows), ("rmatvec", rmatvec, rows, columns)):
        if function is None:
            continue
        found = jax.eval_shape(function, jax.ShapeDtypeStruct((size,), jnp.result_type(float))).shape
        if found != (result,):
            raise ValueError(
                f"from_functions: {name} of a vector of shape ({size},) must give shape ({result},), not {found}."
            )
    with jax.ensure_compile_time_eval():
        # Functions of traced arrays cannot be tested here; whatever reads a model tests them once more.
        gap = _linearity_error(matvec, columns)
        if not isinstance(gap, jax.core.Tracer) and not gap < _tolerance():
            raise ValueError("from_functions: matvec is not linear; put constants outside the operator.")
        error = adjoint_error(out)
        if not isinstance(error, jax.core.Tracer) and not error < _tolerance():
            raise ValueError(
                f"from_functions: rmatvec is not the adjoint of matvec: <A x, y> and <x, A^T y> differ by {error:.2g} "
                "of their size at random x and y. Pass None to have it derived."
            )
    return out


def adjoint_error(operator: LinearOperator, seed: int = 0) -> Array:
    """Relative difference of ``<A x, y>`` and ``<x, A^T y>`` at random vectors: rounding, if the adjoint is right."""
    rng = np.random.default_rng(seed)
    x, y = (jnp.asarray(rng.standard_normal(n), jnp.result_type(float)) for n in reversed(operator.shape))
    forward, backward = operator.matvec(x), operator.rmatvec(y)
    size = jnp.linalg.norm(forward) * jnp.linalg.norm(y) + jnp.linalg.norm(backward) * jnp.linalg.norm(x)
    return jnp.abs(forward @ y - x @ backward) / jnp.maximum(size, jnp.finfo(size.dtype).tiny)


def _linearity_error(function: Callable[[Array], Array], size: int) -> Array:
    rng = np.random.default_rng(1)
    x, z = (jnp.asarray(rng.standard_normal(size), jnp.result_type(float)) for _ in range(2))
    first, second = function(x), function(z)
    gap: Array = jnp.linalg.norm(function(2.0 * x - 3.0 * z) - (2.0 * first - 3.0 * second))
    return gap / jnp.maximum(jnp.linalg.norm(first) + jnp.linalg.norm(second), jnp.finfo(first.dtype).tiny)


def _tolerance() -> float:
    return float(jnp.finfo(jnp.result_type(float)).eps ** 0.75)
