"""Rows of splines, and products of sparse matrices with traced vectors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax import Array
from jax.experimental import sparse as jax_sparse
from jax.typing import ArrayLike

from .checks import checked_count, checked_numbers, is_concrete


def bspline_basis(
    coords: ArrayLike,
    knots: int | Sequence[int],
    *,
    degree: int = 3,
    domain: Sequence[object] | None = None,
) -> scipy.sparse.csr_matrix:
    """Values of B-splines on equidistant knots, or of their products on a grid, at given places.

    Each row adds up to one and has ``(degree + 1) ** d`` entries. Column ``i * knots[1] + j`` is the product of the
    ``i``-th spline along the first axis and the ``j``-th along the second, as
    :func:`~numpyro_ext.distributions.kronecker_sum` orders its unknowns.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_ext.distributions import bspline_basis
        >>> rows = bspline_basis([[0.0, 0.0], [0.5, 0.25], [1.0, 1.0]], knots=(8, 6))
        >>> print(rows.shape, rows[1].nnz, rows.sum(axis=1).ravel().round(12))
        (3, 48) 16 [[1. 1. 1.]]
        >>> later = bspline_basis([[0.3, 0.3]], knots=(8, 6), domain=[(0, 1), (0, 1)])  # of the same surface

    Source: Eilers, P. and Marx, B. (1996), *Flexible smoothing with B-splines and penalties*, Statistical Science 11.

    :param coords: places, shape ``(rows,)`` or ``(rows, d)``.
    :param knots: number of splines along each axis, more than ``degree``: one number, or one for each axis.
    :param degree: of the polynomials.
    :param domain: lowest and highest place of each axis, ``(low, high)`` for one axis, else a pair for each; the range
        of ``coords`` by default. Give it where the same surface is evaluated at other places later.
    :return: matrix of shape ``(rows, prod(knots))``.
    :raises ValueError: if a place is not finite or outside of the domain, there are too few splines, or an axis has no
        width.
    """
    name = "bspline_basis"
    if not is_concrete(coords):
        raise ValueError(f"{name}: coords are traced; they must be known. Make the basis with NumPy, outside of jit.")
    places = checked_numbers(coords, name, "coords")
    places = places[:, None] if places.ndim == 1 else places
    if places.ndim != 2 or 0 in places.shape:
        raise ValueError(f"{name}: coords must have the shape (rows,) or (rows, d); got {places.shape}.")
    degree = checked_count(degree, "degree", name, 0)
    given: Sequence[object] = (
        list(knots) if isinstance(knots, Iterable) and np.ndim(knots) else [knots] * places.shape[1]
    )
    counts = [checked_count(count, "knots", name, degree + 1) for count in given]
    if len(counts) != places.shape[1]:
        raise ValueError(f"{name}: coords have {places.shape[1]} axes; got {len(counts)} numbers of knots.")
    reached = np.stack([places.min(axis=0), places.max(axis=0)], axis=1)
    limits = checked_numbers(reached if domain is None else domain, name, "domain").reshape(-1, 2)
    if limits.shape != (places.shape[1], 2) or np.any(limits[:, 0] >= limits[:, 1]):
        raise ValueError(
            f"{name}: domain must be (low, high) with low < high for each of {places.shape[1]} axes; got "
            f"{limits.tolist()}."
        )
    outside = (places < limits[:, 0]) | (places > limits[:, 1])
    if np.any(outside):
        row, axis = np.argwhere(outside)[0]
        raise ValueError(
            f"{name}: coords[{row}, {axis}] is {places[row, axis]:g}, outside of the domain {limits[axis].tolist()}. "
            "Give a wider domain= in the first call too, so that both bases are of one surface."
        )
    columns, values = np.zeros((len(places), 1), np.int64), np.ones((len(places), 1))
    for place, (low, high), count in zip(places.T, limits, counts, strict=True):
        first, own = _splines((place - low) / (high - low) * (count - degree), count, degree)
        joint = columns[:, :, None] * count + (first[:, None] + np.arange(degree + 1))[:, None, :]
        columns, values = (
            joint.reshape(len(places), -1),
            (values[:, :, None] * own[:, None, :]).reshape(len(places), -1),
        )
    starts = np.arange(len(places) + 1) * columns.shape[1]
    shape = (len(places), math.prod(counts))
    return scipy.sparse.csr_matrix((values.reshape(-1), columns.reshape(-1), starts), shape)


def _splines(place: np.ndarray, count: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """First spline that is not zero at places in units of knots, and the values of ``degree + 1`` from there on."""
    cell = np.minimum(np.floor(place).astype(np.int64), count - degree - 1)
    within = place - cell
    values = np.ones((len(place), 1))
    for d in range(1, degree + 1):  # the recursion of de Boor on equidistant knots
        new = np.zeros((len(place), d + 1))
        for k in range(d):
            new[:, k] += (k + 1 - within) / d * values[:, k]
            new[:, k + 1] += (within + d - 1 - k) / d * values[:, k]
        values = new
    return cell, values


def sparse_matmul(matrix: Any, vector: ArrayLike) -> Array:
    """Product of a sparse matrix that is known with a vector that may be traced.

    Rows are padded to the longest where that costs little, so that the product is a gather and a sum, with a scatter
    as derivative; engines read it as rows of few unknowns.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> import scipy.sparse
        >>> from numpyro_ext.distributions import sparse_matmul
        >>> matrix = scipy.sparse.csr_matrix([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])
        >>> print(sparse_matmul(matrix, jnp.array([1.0, 1.0, 1.0])))
        [3. 3.]

    :param matrix: a ``scipy.sparse`` matrix of any format, a ``BCOO`` or a dense array, shape ``(rows, n)``.
    :param vector: shape ``(n,)``, or ``(..., n)`` with the unknowns on the last axis.
    :return: shape ``(rows,)`` or ``(..., rows)``.
    :raises ValueError: if the shapes do not agree, or the matrix is not finite.
    """
    vector = jnp.asarray(vector)
    shape = tuple(matrix.shape) if hasattr(matrix, "shape") else np.shape(matrix)
    if len(shape) != 2 or vector.ndim == 0 or vector.shape[-1] != shape[1]:
        raise ValueError(
            f"sparse_matmul: a matrix (rows, n) times a vector (..., n); got the shapes {shape} and {vector.shape}."
        )
    if not is_concrete(matrix):
        if isinstance(matrix, jax_sparse.BCOO):
            return jnp.asarray(vector @ matrix.T)
        return vector @ jnp.asarray(matrix).T
    columns, values, rows = _padded(matrix, shape)
    found = vector[..., columns] * jnp.asarray(values, jnp.result_type(vector, float))
    if rows is None:
        return jnp.sum(found, axis=-1)
    return jnp.zeros((*vector.shape[:-1], shape[0]), found.dtype).at[..., rows].add(found)


def _padded(matrix: object, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Columns and values of shape ``(rows, longest)`` and ``None``, or of all entries with their rows."""
    if isinstance(matrix, jax_sparse.BCOO):
        indices, data = np.asarray(matrix.indices), np.asarray(matrix.data)
        is_there = np.all(indices < np.asarray(shape), axis=1)  # BCOO marks places that are not used so
        matrix = scipy.sparse.coo_matrix((data[is_there], tuple(indices[is_there].T)), shape)
    found = scipy.sparse.csr_matrix(matrix, dtype=float)
    if not np.all(np.isfinite(found.data)):
        k = int(np.argmin(np.isfinite(found.data)))
        row = int(np.searchsorted(found.indptr, k, side="right")) - 1
        raise ValueError(
            f"sparse_matmul: the matrix must be finite; entry ({row}, {found.indices[k]}) is {found.data[k]}."
        )
    lengths = np.diff(found.indptr)
    rows = np.repeat(np.arange(shape[0]), lengths)
    longest = int(lengths.max(initial=0))
    if longest * shape[0] > 4 * max(found.nnz, shape[0]):
        return found.indices.astype(np.int64), found.data, rows
    columns, values = np.zeros((shape[0], longest), np.int64), np.zeros((shape[0], longest))
    slots = np.arange(found.nnz) - np.repeat(found.indptr[:-1], lengths)
    columns[rows, slots], values[rows, slots] = found.indices, found.data
    return columns, values, None
