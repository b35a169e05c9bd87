"""Subspaces that a field is flat along, or orthogonal to: bases, coordinates of the rest, and the support they make."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import Transform

from ...linalg.frozen_pytree import FixedArray


class Directions:
    """Span of the columns of an array of shape ``(size, k)``, and an isometry from the rest of the space.

    The isometry is a product of ``k`` Householder reflections applied to vectors with ``k`` zeros in front, at cost
    ``size * k``. Sources: Golub and Van Loan (2013), *Matrix Computations*, section 5.1.7.
    """

    def __init__(self, columns: np.ndarray) -> None:
        self.size, self.count = columns.shape
        columns = columns / np.linalg.norm(columns, axis=0)
        (raw, tau), _ = scipy.linalg.qr(columns, mode="raw")
        reflectors = np.tril(raw[:, : self.count], -1)
        reflectors[np.arange(self.count), np.arange(self.count)] = 1.0
        middle = np.zeros((self.count, self.count))
        for j in range(self.count):  # I - V T V^T of the reflections in their order
            middle[:j, j] = -tau[j] * middle[:j, :j] @ (reflectors[:, :j].T @ reflectors[:, j])
            middle[j, j] = tau[j]
        self._reflectors, self._middle = reflectors, middle
        top = np.eye(self.size, self.count)
        self.basis: np.ndarray = top - reflectors @ (middle @ (reflectors.T @ top))
        """Orthonormal basis, shape ``(size, k)``."""
        _, triangle, order = scipy.linalg.qr(self.basis.T, mode="economic", pivoting=True)
        self.pivots: np.ndarray = np.sort(order[: self.count])
        """Unknowns at which the basis has independent rows, shape ``(k,)``."""
        self.log_volume = float(np.sum(np.log(np.abs(np.diagonal(triangle)))))
        """Log of the absolute determinant of the basis at :attr:`pivots`."""

    def along(self, x: ArrayLike) -> Array:
        """Coordinates in the basis of vectors on the last axis, shape ``(..., k)``."""
        x = jnp.asarray(x)
        return x @ jnp.asarray(self.basis, x.dtype)

    def without(self, x: ArrayLike) -> Array:
        """Vectors less their part in the span."""
        x = jnp.asarray(x)
        return x - self.along(x) @ jnp.asarray(self.basis.T, x.dtype)

    def embed(self, z: ArrayLike) -> Array:
        """Vectors orthogonal to the span from their ``size - k`` coordinates, an isometry."""
        z = jnp.asarray(z)
        padded = jnp.concatenate([jnp.zeros((*z.shape[:-1], self.count), z.dtype), z], axis=-1)
        return self._reflected(padded, self._middle.T)

    def coordinates(self, x: ArrayLike) -> Array:
        """Coordinates of vectors orthogonal to the span; of others, of their projections."""
        x = jnp.asarray(x)
        return self._reflected(x, self._middle)[..., self.count :]

    def _reflected(self, x: Array, middle: np.ndarray) -> Array:
        """Vectors on the last axis times ``I - V middle V^T`` from the right."""
        reflectors = jnp.asarray(self._reflectors, x.dtype)
        return x - (x @ reflectors) @ jnp.asarray(middle, x.dtype) @ reflectors.T


@functools.lru_cache(maxsize=32)
def directions_of(columns: FixedArray) -> Directions:
    """Directions of an array, kept for arrays of equal content."""
    return Directions(columns.array)


class OrthogonalTo(constraints.Constraint):
    """Vectors orthogonal to all columns of an array: for a column of ones, those that add up to zero."""

    event_dim = 1

    def __init__(self, columns: FixedArray) -> None:
        self.columns = columns
        super().__init__()

    def __call__(self, x: ArrayLike) -> Array:
        x = jnp.asarray(x, jnp.result_type(x, float))
        largest = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1.0)
        tolerance = 10.0 * jnp.finfo(x.dtype).eps * x.shape[-1] * largest
        return jnp.all(jnp.abs(directions_of(self.columns).along(x)) <= tolerance, axis=-1)

    def feasible_like(self, prototype: ArrayLike) -> Array:
        """Zeros."""
        return jnp.zeros_like(prototype)

    def __repr__(self) -> str:
        return f"vectors orthogonal to {self.columns.array.shape[1]} directions (that add up to zero along each)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OrthogonalTo) and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(("OrthogonalTo", self.columns))

    def tree_flatten(self) -> tuple[tuple[()], tuple[tuple[()], dict[str, FixedArray]]]:
        return (), ((), {"columns": self.columns})


class OrthogonalTransform(Transform):
    """Isometry from ``size - k`` real numbers onto the vectors of :class:`OrthogonalTo`; its log Jacobian is zero."""

    domain = constraints.real_vector

    def __init__(self, columns: FixedArray) -> None:
        self.columns = columns

    @property
    def codomain(self) -> OrthogonalTo:
        return OrthogonalTo(self.columns)

    def __call__(self, x: ArrayLike) -> Array:
        return directions_of(self.columns).embed(x)

    def _inverse(self, y: ArrayLike) -> Array:
        return directions_of(self.columns).coordinates(y)

    def log_abs_det_jacobian(self, x: ArrayLike, y: ArrayLike, intermediates: object = None) -> Array:
        return jnp.zeros(jnp.broadcast_shapes(jnp.shape(x)[:-1], jnp.shape(y)[:-1]), jnp.result_type(x))

    def forward_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] + self.columns.array.shape[1])

    def inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] - self.columns.array.shape[1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OrthogonalTransform) and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(("OrthogonalTransform", self.columns))

    def tree_flatten(self) -> tuple[tuple[()], tuple[tuple[()], dict[str, FixedArray]]]:
        return (), ((), {"columns": self.columns})


@biject_to.register(OrthogonalTo)
def _transform_to_orthogonal(constraint: OrthogonalTo) -> OrthogonalTransform:
    return OrthogonalTransform(constraint.columns)
