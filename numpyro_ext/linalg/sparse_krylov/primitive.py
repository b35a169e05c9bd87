"""Sparse precisions by Krylov spaces inside JAX programs: calls of the host, and the rules of their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from ..frozen_pytree import frozen_pytree
from ..host_call import host_call
from ..sparse_cholesky import multiply
from ..sparse_cholesky.primitive import one_without_derivative
from .carried import CarriedElimination
from .elimination import Elimination
from .schur import Schur


class Estimate(NamedTuple):
    """Log determinant by fixed probes, and how far it may be trusted."""

    log_determinant: Array
    """A smooth function of the entries; differentiable once in these."""
    standard_error: Array
    """Standard error of the log determinant, by its spread over the probes."""
    residual: Array
    """Largest relative residual of the solutions from the Krylov spaces."""


@frozen_pytree
class KrylovFactor:
    """Symmetric positive definite matrix in the place of its :class:`~..sparse_cholesky.SparseFactor`.

    Solutions are exact to rounding, and draws to eight digits, where their iterations converge. The log determinant is
    an estimate by fixed probes, and the selected inverse its derivative. All are nan where the matrix is found not to
    be positive definite. Computed in double precision on the host, one after the other under ``vmap``.

    >>> from numpyro_ext.linalg.sparse_cholesky import SparsePattern
    >>> pattern = SparsePattern.of(2, [1], [0])
    >>> exact = Elimination(pattern, np.zeros((0, 1)), np.zeros(0), num_probes=None)
    >>> factor = KrylovFactor(jnp.array([2.0, 1.0, 3.0]), exact)
    >>> round(float(jnp.exp(factor.log_determinant)), 4)
    5.0
    >>> factor.solve(jnp.array([3.0, 4.0])).round(4).tolist()
    [1.0, 1.0]
    """

    values: Array
    """Entries of the matrix, shape ``(nnz,)``."""
    elimination: Elimination | CarriedElimination

    @property
    def log_determinant(self) -> Array:
        """Estimate of the log determinant of the matrix, a scalar."""
        return self.estimate().log_determinant

    def estimate(self) -> Estimate:
        """Estimate of the log determinant, with its standard error."""
        return Estimate(*_estimate(self.elimination, self.values))

    def solve(self, b: Array) -> Array:
        """Solution of ``H x = b``, differentiable in the values and in ``b`` to any order.

        :param b: right-hand sides, shape (n,) or (n, k).
        :return: of the shape of ``b``.
        """
        return lax.custom_linear_solve(
            self.multiply,
            b,
            lambda _, b: _call(self.elimination, _solution, b, self.values, b),
            symmetric=True,
        )

    def solve_near(self, b: Array, near: Array) -> Array:
        """:meth:`solve` of one right-hand side, with more digits of how far the solution is from a point near it.

        :param b: shape (n,).
        :param near: shape (n,).
        """
        near = lax.stop_gradient(near)
        return near + self.solve(b - self.multiply(near))

    def multiply(self, x: Array) -> Array:
        """Product with vectors, shape (n,) or (n, k)."""
        return multiply(self.elimination.pattern, self.values, x)

    def half_solve(self, z: Array) -> Array:
        """Draws whose covariance is the inverse of the matrix, made of white noise; derivatives in the values are
        refused.

        :param z: shape (n,) or (n, k).
        :return: of the shape of ``z``.
        """
        values = self.values * one_without_derivative("KrylovFactor.half_solve", self.values)
        return _call(self.elimination, _draw, z, lax.stop_gradient(values), z)

    def selected_inverse(self) -> Array:
        """Estimate of the inverse at the entries of the pattern, shape (nnz,): the derivative of that of the log
        determinant. A derivative of it is refused."""
        values = self.values * one_without_derivative("KrylovFactor.selected_inverse", self.values)
        return _estimate_and_inverse(self.elimination, lax.stop_gradient(values))[1]


# ---- calls of the host ----


def _callback(
    elimination: Elimination | CarriedElimination, function: Callable[..., object], result: object, *args: Array
) -> Any:
    # one that is static has no arrays
    arrays, structure = jax.tree.flatten(elimination)

    def on_host(arrays: Any, *args: object) -> object:
        found = jax.tree.unflatten(structure, arrays)
        order = found.known() if isinstance(found, CarriedElimination) else found
        number = order.pattern.num_entries
        values, *rest = (np.asarray(a, np.float64) for a in args)
        try:
            with np.errstate(all="ignore"):
                outputs = function(Schur(order, values[:number]), *rest)
            return jax.tree.map(_filled_up, outputs, result)
        except np.linalg.LinAlgError:
            return jax.tree.map(lambda like: np.full(like.shape, np.nan, like.dtype), result)

    return host_call(on_host, result, arrays, *args)


def _filled_up(out: object, like: Any) -> NDArray[Any]:
    """An output as it is expected, with zeros at padded entries."""
    array = np.asarray(out, like.dtype)
    if array.shape == like.shape:
        return array
    return np.pad(array, [(0, wanted - size) for wanted, size in zip(like.shape, array.shape, strict=True)])


def _call(
    elimination: Elimination | CarriedElimination, function: Callable[..., object], like: Array, *args: Array
) -> Array:
    return _callback(elimination, function, jax.ShapeDtypeStruct(like.shape, like.dtype), *args)


def _solution(schur: Schur, b: NDArray[np.float64]) -> NDArray[np.float64]:
    return schur.solve(b.reshape(len(b), -1))[0].reshape(b.shape)


def _draw(schur: Schur, z: NDArray[np.float64]) -> NDArray[np.float64]:
    return schur.draw(z.reshape(len(z), -1)).reshape(z.shape)


def _value(schur: Schur) -> tuple[object, ...]:
    found = schur.determinant(with_gradient=False)
    return found.value, found.standard_error, found.residual


def _value_and_inverse(schur: Schur) -> tuple[object, object]:
    found = schur.determinant(with_gradient=True)
    return (found.value, found.standard_error, found.residual), found.gradient


# ---- derivatives ----


@jax.custom_jvp
def _estimate(elimination: Elimination | CarriedElimination, values: Array) -> tuple[Array, Array, Array]:
    number = jax.ShapeDtypeStruct((), values.dtype)
    found: tuple[Array, Array, Array] = _callback(elimination, _value, (number, number, number), values)
    return found


def _estimate_and_inverse(
    elimination: Elimination | CarriedElimination, values: Array
) -> tuple[tuple[Array, Array, Array], Array]:
    number, entries = (jax.ShapeDtypeStruct(shape, values.dtype) for shape in ((), values.shape))
    found: Any = _callback(elimination, _value_and_inverse, ((number, number, number), entries), values)
    return found


@_estimate.defjvp
def _estimate_jvp(primals: Any, tangents: Any) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    elimination, values = primals
    found, inverse = _estimate_and_inverse(elimination, lax.stop_gradient(values))
    pattern = elimination.pattern
    times = jnp.where(pattern.rows == pattern.columns, 1, 2)
    zero = jnp.zeros_like(found[0])
    return found, (jnp.sum(times * inverse * tangents[1]), zero, zero)
