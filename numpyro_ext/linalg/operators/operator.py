"""Linear operators on flat vectors: the maps from an image or a signal to what is measured of it."""

from __future__ import annotations

import dataclasses
import functools
import operator as python_operators
from collections.abc import Sequence
from typing import ClassVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..frozen_pytree import frozen_pytree
from ..saved_names import saved_as


class LinearOperator:
    """A real matrix known by its products with vectors.

    ``operator @ x`` multiplies ``x`` of shape ``(columns,)`` or ``(columns, k)``, also inside models and compiled
    functions; ``a @ b`` composes, ``a + b`` adds, ``number * a`` scales, ``a.T`` is the adjoint. Images are flattened
    in row-major order. A subclass, a frozen pytree, gives :attr:`shape` and :meth:`matvec`, and :meth:`rmatvec` where
    it knows better than JAX.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg import diagonal, select
    >>> operator = select([2, 0], 3) @ diagonal(jnp.array([1.0, 2.0, 3.0]))
    >>> print(operator @ jnp.ones(3), operator.T @ jnp.ones(2), operator.shape)
    [3. 1.] [1. 0. 3.] (2, 3)
    """

    # NumPy arrays and scalars on the left leave the operation to this class
    __array_ufunc__: ClassVar[None] = None

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        raise NotImplementedError

    def matvec(self, x: Array) -> Array:
        """The product with one vector of shape ``(columns,)``: shape ``(rows,)``."""
        raise NotImplementedError

    def rmatvec(self, y: Array) -> Array:
        """The product of the adjoint with one vector of shape ``(rows,)``: shape ``(columns,)``."""
        x = jax.ShapeDtypeStruct((self.shape[1],), y.dtype)
        dtype = jax.eval_shape(self.matvec, x).dtype
        return jax.linear_transpose(self.matvec, x)(y.astype(dtype))[0]

    @property
    def T(self) -> LinearOperator:
        """The adjoint."""
        return _Adjoint(self)

    @overload
    def __matmul__(self, other: LinearOperator) -> LinearOperator: ...

    @overload
    def __matmul__(self, other: ArrayLike) -> Array: ...

    def __matmul__(self, other: object) -> LinearOperator | Array:
        if isinstance(other, LinearOperator):
            return _compose(self, other)
        x = _as_real(other)
        rows, columns = self.shape
        if x.ndim not in (1, 2) or x.shape[0] != columns:
            raise ValueError(
                f"an operator of {rows} rows and {columns} columns multiplies arrays of shape ({columns},) or "
                f"({columns}, k), not {x.shape}; flatten images with .reshape(-1)."
            )
        return self.matvec(x) if x.ndim == 1 else jax.vmap(self.matvec, 1, 1)(x)

    def __rmatmul__(self, other: ArrayLike) -> Array:
        y = _as_real(other)
        return (self.T @ y.T).T

    def __mul__(self, factor: ArrayLike) -> LinearOperator:
        if jnp.ndim(factor) != 0:
            raise ValueError(
                f"only a number scales an operator, not an array of shape {jnp.shape(factor)}; use diagonal(...) @ "
                "operator to scale its rows."
            )
        return _Scaled(_as_real(factor), self)

    __rmul__ = __mul__

    def __neg__(self) -> LinearOperator:
        return -1.0 * self

    def __add__(self, other: LinearOperator) -> LinearOperator:
        if not isinstance(other, LinearOperator):
            return NotImplemented
        if self.shape != other.shape:
            raise ValueError(f"operators of shapes {self.shape} and {other.shape} cannot be added.")
        return _Sum((*_terms(self), *_terms(other)))

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return self + (-1.0) * other

    def materialise(self) -> Array:
        """The matrix itself, of shape :attr:`shape`; ``columns`` products and all the memory."""
        return self @ jnp.eye(self.shape[1])


def _as_real(x: object) -> Array:
    values = jnp.asarray(x)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        raise ValueError("operators are real; stack the real and imaginary parts.")
    return values if jnp.issubdtype(values.dtype, jnp.floating) else values.astype(float)


@saved_as("Adjoint")
@frozen_pytree
class _Adjoint(LinearOperator):
    operator: LinearOperator

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.operator.shape
        return columns, rows

    def matvec(self, x: Array) -> Array:
        return self.operator.rmatvec(x)

    def rmatvec(self, y: Array) -> Array:
        return self.operator.matvec(y)

    @property
    def T(self) -> LinearOperator:
        return self.operator


@saved_as("Composition")
@frozen_pytree
class _Composition(LinearOperator):
    """The product of several operators, the last applied first."""

    operators: tuple[LinearOperator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.operators[0].shape[0], self.operators[-1].shape[1]

    def matvec(self, x: Array) -> Array:
        return functools.reduce(lambda value, each: each.matvec(value), reversed(self.operators), x)

    def rmatvec(self, y: Array) -> Array:
        return functools.reduce(lambda value, each: each.rmatvec(value), self.operators, y)


def _compose(left: LinearOperator, right: LinearOperator) -> LinearOperator:
    if left.shape[1] != right.shape[0]:
        raise ValueError(
            f"cannot compose operators of shapes {left.shape} and {right.shape}: the first takes {left.shape[1]} "
            f"numbers, the second gives {right.shape[0]}."
        )
    parts = [p.operators if isinstance(p, _Composition) else (p,) for p in (left, right)]
    return _Composition((*parts[0], *parts[1]))


@saved_as("Scaled")
@frozen_pytree
class _Scaled(LinearOperator):
    factor: Array
    operator: LinearOperator

    @property
    def shape(self) -> tuple[int, int]:
        return self.operator.shape

    def matvec(self, x: Array) -> Array:
        return self.factor * self.operator.matvec(x)

    def rmatvec(self, y: Array) -> Array:
        return self.factor * self.operator.rmatvec(y)


@saved_as("Sum")
@frozen_pytree
class _Sum(LinearOperator):
    operators: tuple[LinearOperator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.operators[0].shape

    def matvec(self, x: Array) -> Array:
        return functools.reduce(python_operators.add, (each.matvec(x) for each in self.operators))

    def rmatvec(self, y: Array) -> Array:
        return functools.reduce(python_operators.add, (each.rmatvec(y) for each in self.operators))


def _terms(operator: LinearOperator) -> tuple[LinearOperator, ...]:
    return operator.operators if isinstance(operator, _Sum) else (operator,)


@saved_as("Identity")
@frozen_pytree
class _Identity(LinearOperator):
    size: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.size

    def matvec(self, x: Array) -> Array:
        return x

    def rmatvec(self, y: Array) -> Array:
        return y


@saved_as("Diagonal")
@frozen_pytree
class _Diagonal(LinearOperator):
    entries: Array

    @property
    def shape(self) -> tuple[int, int]:
        return self.entries.shape[0], self.entries.shape[0]

    def matvec(self, x: Array) -> Array:
        return self.entries * x


@saved_as("Matrix")
@frozen_pytree
class _Matrix(LinearOperator):
    matrix: Array

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.matrix.shape
        return rows, columns

    def matvec(self, x: Array) -> Array:
        return self.matrix @ x


@saved_as("Selection")
@frozen_pytree
class _Selection(LinearOperator):
    indices: Array
    num_columns: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.indices.shape[0], self.num_columns

    def matvec(self, x: Array) -> Array:
        return x[self.indices]


@saved_as("Stack")
@frozen_pytree
class _Stack(LinearOperator):
    operators: tuple[LinearOperator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(each.shape[0] for each in self.operators), self.operators[0].shape[1]

    def matvec(self, x: Array) -> Array:
        return jnp.concatenate([each.matvec(x) for each in self.operators])

    def rmatvec(self, y: Array) -> Array:
        ends = np.cumsum([each.shape[0] for each in self.operators])[:-1]
        parts = jnp.split(y, ends)
        return functools.reduce(
            python_operators.add, (each.rmatvec(part) for each, part in zip(self.operators, parts, strict=True))
        )


def identity(size: int) -> LinearOperator:
    """The identity of ``size`` rows and columns."""
    return _Identity(positive_size(size, "size"))


def diagonal(entries: ArrayLike) -> LinearOperator:
    """The diagonal matrix with ``entries`` of shape ``(n,)``, which multiply elementwise."""
    entries = _as_real(entries)
    if entries.ndim != 1:
        raise ValueError(f"diagonal: the entries must have shape (n,), not {entries.shape}.")
    return _Diagonal(entries)


def from_matrix(matrix: ArrayLike) -> LinearOperator:
    """A dense matrix of shape ``(rows, columns)`` as an operator, to compose it with others."""
    matrix = _as_real(matrix)
    if matrix.ndim != 2:
        raise ValueError(f"from_matrix: a matrix has two axes, not the shape {matrix.shape}.")
    return _Matrix(matrix)


def select(indices_or_mask: object, columns: int | None = None) -> LinearOperator:
    """The rows of the identity that are kept: ``select(mask) @ x`` are the elements of ``x`` where the mask is true.

    :param indices_or_mask: a boolean mask of any shape (an image of observed pixels), read in row-major order; or
        indices of shape ``(rows,)``, which may repeat. Known values, not traced ones.
    :param int columns: length of the vectors to select from; required with indices.
    :raises ValueError: for masks that keep nothing and indices outside the range.

    Cost: linear in rows and columns.
    """
    if isinstance(indices_or_mask, jax.core.Tracer):
        raise ValueError("select: the mask must be known when the model is compiled; pass it as a NumPy array.")
    given = np.asarray(indices_or_mask)
    if given.dtype == bool:
        if columns is not None and columns != given.size:
            raise ValueError(f"select: the mask has {given.size} elements, columns={columns}.")
        indices, columns = np.nonzero(given.reshape(-1))[0], given.size
        if indices.size == 0:
            raise ValueError("select: the mask keeps nothing; True marks what is observed.")
        return _Selection(jnp.asarray(indices, jnp.int32), columns)
    if columns is None:
        raise ValueError("select: with indices, say how many columns there are: select(indices, columns).")
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer) or given.size == 0:
        raise ValueError(
            f"select: indices must be integers of shape (rows,), not {given.dtype} of shape {given.shape}; a mask must "
            "be boolean."
        )
    if given.min() < 0 or given.max() >= columns:
        raise ValueError(f"select: indices from {given.min()} to {given.max()} are outside 0 .. {columns - 1}.")
    return _Selection(jnp.asarray(given, jnp.int32), columns)


def stack(operators: Sequence[LinearOperator]) -> LinearOperator:
    """Operators of the same number of columns with their rows under one another.

    >>> from numpyro_ext.linalg import identity, stack
    >>> stack([identity(3), 2.0 * identity(3)]).shape
    (6, 3)
    """
    operators = tuple(operators)
    if not operators:
        raise ValueError("stack: at least one operator is needed.")
    columns = [each.shape[1] for each in operators]
    if len(set(columns)) > 1:
        raise ValueError(f"stack: all operators must have the same number of columns, not {columns}.")
    return _Stack(operators)


def positive_size(size: object, name: str) -> int:
    """``size`` as an integer, refused with its ``name`` unless it is a positive whole number."""
    if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name} must be made of positive whole numbers, not {size!r}.")
    return int(size)


def image_shape(shape: object) -> tuple[int, ...]:
    """The sides of an image (or one number, the length of a signal) as a tuple of positive integers."""
    sides = tuple(positive_size(n, "shape") for n in np.atleast_1d(np.asarray(shape, object)))
    if not sides:
        raise ValueError("shape: an image has at least one side.")
    return sides
