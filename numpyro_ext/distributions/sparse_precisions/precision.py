"""Sparse symmetric matrices with a static pattern and numbers that may be traced."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax import Array
from jax.experimental import sparse as jax_sparse
from jax.typing import ArrayLike

from ...linalg.frozen_pytree import FixedArray, frozen_pytree
from ...linalg.saved_names import saved_as
from ...linalg.sparse_cholesky import SparsePattern
from .checks import checked_count, checked_indices, checked_numbers, is_concrete
from .triangles import lower_triangle, symmetric


@saved_as("numpyro_ext.SparsePrecision")
@frozen_pytree
class SparsePrecision:
    r"""Sparse precision matrix: a static pattern beside numbers that may be traced.

    ``SparsePrecision(indices, values, size)`` takes each pair of unknowns once, ``(i, j)`` or ``(j, i)``, or each twice
    with equal values, as a full symmetric matrix lists them. :meth:`of` reads ``scipy.sparse`` matrices and arrays,
    ``jax.experimental.sparse.BCOO`` and dense arrays. Entries that are not listed are zero.

    Numbers that are not traced are kept as constants, and :meth:`scale_by` keeps its factor beside them: the log
    determinant of ``c * constants`` is then ``rank * log(c)`` and a constant, and no matrix is factorised in a fit.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_ext.distributions import SparsePrecision
        >>> walk = SparsePrecision([(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)], [1, -1, 2, -1, 1], 3)
        >>> print(np.asarray(walk.scale_by(0.5).to_dense()))
        [[ 0.5 -0.5  0. ]
         [-0.5  1.  -0.5]
         [ 0.  -0.5  0.5]]
        >>> print(walk @ np.ones(3))
        [0. 0. 0.]

    :param indices: pairs of unknowns, shape ``(entries, 2)``, integers that are not traced.
    :param values: numbers at these, shape ``(entries,)`` or ``(*batch, entries)``.
    :param size: number of unknowns.
    :param null_space: what the matrix annihilates, shape ``(size, k)`` or ``(size,)``, if it is known. It is kept as
        :attr:`null_space` and not used until it is given to
        :class:`~numpyro_ext.distributions.GaussianMarkovRandomField`.
    :raises ValueError: if an index is no integer in range, a pair is listed twice with other numbers, a number is not
        finite, or an unknown has entries but none on the diagonal.
    """

    numbers: Array | None
    """Numbers in the place of :attr:`constants`, shape ``(*batch, entries)``, where they may be traced."""
    scale: Array
    """Factor of all numbers, of the shape of a batch."""
    size: int = dataclasses.field(metadata={"static": True})
    rows: FixedArray = dataclasses.field(metadata={"static": True})
    columns: FixedArray = dataclasses.field(metadata={"static": True})
    constants: FixedArray | None = dataclasses.field(metadata={"static": True})
    """Numbers that are not traced, shape ``(entries,)``."""
    directions: FixedArray | None = dataclasses.field(metadata={"static": True})
    """Array behind :attr:`null_space`."""

    def __init__(
        self, indices: ArrayLike, values: ArrayLike, size: int, *, null_space: ArrayLike | None = None
    ) -> None:
        size = checked_count(size, "size", "SparsePrecision")
        pairs = checked_indices(indices, size, "SparsePrecision", "indices")
        if is_concrete(values):
            values = checked_numbers(values, "SparsePrecision", "values", pairs)
        if jnp.ndim(values) == 0 or jnp.shape(values)[-1] != len(pairs):
            raise ValueError(
                f"SparsePrecision: {len(pairs)} pairs of indices need as many values on the last axis; got the shape "
                f"{jnp.shape(values)}."
            )
        rows, columns, values = lower_triangle(pairs, values, size)
        _fill(self, size, rows, columns, values, null_space)

    @classmethod
    def of(cls, matrix: object, *, null_space: ArrayLike | None = None) -> SparsePrecision:
        """Precision of a matrix as people have it.

        :param matrix: a ``scipy.sparse`` matrix or array of any format, a ``BCOO``, a dense array or nested list, or a
            :class:`SparsePrecision`, which is returned as it is. A dense array must not be traced, since its zeros
            are looked for; the numbers of a ``BCOO`` may be.
        :param null_space: see the class.
        :raises ValueError: if the matrix is not square, not symmetric (the message names the first pair of entries that
            differ), not finite, or has a row without its diagonal entry.
        :raises TypeError: if a traced dense array is given.
        """
        if isinstance(matrix, SparsePrecision):
            return matrix if null_space is None else matrix._with(null_space=null_space)
        if isinstance(matrix, jax_sparse.JAXSparse) and not isinstance(matrix, jax_sparse.BCOO):
            matrix = jax_sparse.BCOO.fromdense(matrix.todense())
        if not hasattr(matrix, "shape"):
            matrix = np.asarray(matrix)
        shape = tuple(matrix.shape)
        if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
            raise ValueError(f"SparsePrecision: a precision must be a square matrix; got the shape {shape}.")
        if isinstance(matrix, jax_sparse.BCOO):
            if not is_concrete(matrix.indices):
                raise TypeError(
                    "SparsePrecision: the indices of the BCOO are traced; the pattern of a precision must be known. "
                    "Give the BCOO indices of jnp.asarray called outside of jit, or take "
                    "SparsePrecision(indices, values, size) with NumPy indices."
                )
            if is_concrete(matrix.data):
                indices, data = np.asarray(matrix.indices), np.asarray(matrix.data)
                is_padding = (indices >= shape[0]).any(axis=1)  # BCOO marks places that are not used so
                indices, data = indices[~is_padding], data[~is_padding]
                matrix = scipy.sparse.coo_matrix((data, (indices[:, 0], indices[:, 1])), shape)
            else:
                made = symmetric(np.asarray(matrix.indices), matrix.data, shape[0])
                return cls(*made, shape[0], null_space=null_space)
        if not is_concrete(matrix):
            raise TypeError(
                "SparsePrecision: a dense matrix must not be traced, because its zeros are looked for. Give the "
                "pattern as NumPy indices and the traced numbers beside it: SparsePrecision(indices, values, size)."
            )
        found = scipy.sparse.coo_matrix(scipy.sparse.csr_matrix(matrix, dtype=float))  # adds up what is listed twice
        found.sum_duplicates()
        found.eliminate_zeros()  # blocks and diagonals of SciPy's formats hold some
        indices = np.stack([found.row, found.col], axis=1)
        checked_numbers(found.data, "SparsePrecision", "the matrix", indices)
        return cls(*symmetric(indices, found.data, shape[0]), shape[0], null_space=null_space)

    @property
    def shape(self) -> tuple[int, int]:
        """``(size, size)``."""
        return self.size, self.size

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the axes of :attr:`values` in front of the entries."""
        return jnp.shape(self.values)[:-1]

    @property
    def indices(self) -> np.ndarray:
        """Entries of the lower triangle, shape ``(entries, 2)``, row by row."""
        return np.stack([self.rows.array, self.columns.array], axis=1)

    @property
    def values(self) -> Array:
        """Numbers at :attr:`indices`, shape ``(*batch, entries)``."""
        numbers = self.numbers if self.constants is None else jnp.asarray(self.constants.array)
        assert numbers is not None
        return self.scale[..., None] * numbers

    @property
    def null_space(self) -> np.ndarray | None:
        """Directions that the matrix annihilates, shape ``(size, k)``, where they are known; else ``None``."""
        return None if self.directions is None else self.directions.array

    @property
    def pattern(self) -> SparsePattern:
        """The pattern for :func:`~numpyro_ext.linalg.sparse_cholesky.factorise`, its entries as :attr:`indices`."""
        return pattern_of(self.size, self.rows, self.columns)

    def scale_by(self, factor: ArrayLike) -> SparsePrecision:
        """The matrix times a positive factor, which may be traced and may have a batch shape.

        :raises ValueError: if the factor is known and not positive.
        """
        if is_concrete(factor) and not np.all((np.asarray(factor) > 0) & np.isfinite(np.asarray(factor, float))):
            raise ValueError(
                f"SparsePrecision.scale_by: the factor must be positive and finite; got {np.asarray(factor)}. For a "
                "walk with standard deviation s per step it is 1 / s**2."
            )
        return self._with(scale=self.scale * jnp.asarray(factor, jnp.result_type(float)))

    def __add__(self, other: Any) -> SparsePrecision:
        if not isinstance(other, SparsePrecision):
            if not (scipy.sparse.issparse(other) or isinstance(other, jax_sparse.BCOO) or np.ndim(other) == 2):
                return NotImplemented
            other = SparsePrecision.of(other)
        if other.size != self.size:
            raise ValueError(f"SparsePrecision: matrices of {self.size} and {other.size} unknowns cannot be added.")
        mine, others = (p.rows.array * p.size + p.columns.array for p in (self, other))
        union = np.union1d(mine, others)
        both = [np.searchsorted(union, places) for places in (mine, others)]
        parts: list[Any] = []
        for precision, places in zip((self, other), both, strict=True):
            values: Any = precision._concrete_values()
            if values is None:
                values = precision.values
                zeros = jnp.zeros((*values.shape[:-1], len(union)), values.dtype)
                parts.append(zeros.at[..., places].set(values))
            else:
                parts.append(np.zeros((*values.shape[:-1], len(union))))
                parts[-1][..., places] = values
        null_space = common_directions(self.null_space, other.null_space)
        return from_triangle(self.size, union // self.size, union % self.size, parts[0] + parts[1], null_space)

    def __matmul__(self, other: ArrayLike) -> Array:
        """Product with a vector or with the columns of a matrix; for a batch, with the vectors on the last axis."""
        other = jnp.asarray(other)
        if not self.batch_shape and other.ndim == 2:
            return jnp.swapaxes(self._times(other.T), 0, 1)
        return self._times(other)

    def _times(self, vectors: Array) -> Array:
        """Product with vectors on the last axis."""
        if vectors.ndim == 0 or vectors.shape[-1] != self.size:
            raise ValueError(f"SparsePrecision: {self.size} unknowns; the vector has the shape {vectors.shape}.")
        rows, columns = self.rows.array, self.columns.array
        shape = jnp.broadcast_shapes(self.batch_shape, vectors.shape[:-1])
        lower = self.values * vectors[..., columns]
        product = jnp.zeros((*shape, self.size), lower.dtype).at[..., rows].add(lower)
        is_below = np.flatnonzero(rows != columns)
        upper = self.values[..., is_below] * vectors[..., rows[is_below]]
        return product.at[..., columns[is_below]].add(upper)

    def to_dense(self) -> Array:
        """The matrix as a dense array of shape ``(*batch, size, size)``."""
        rows, columns, values = self.rows.array, self.columns.array, self.values
        zeros = jnp.zeros((*values.shape[:-1], self.size, self.size), values.dtype)
        return zeros.at[..., rows, columns].set(values).at[..., columns, rows].set(values)

    def to_scipy(self) -> scipy.sparse.csc_matrix:
        """The matrix, both triangles, for ``scipy.sparse``.

        :raises TypeError: if numbers are traced.
        :raises ValueError: if it is a batch.
        """
        values = self._concrete_values()
        if values is None:
            raise TypeError("SparsePrecision.to_scipy: the numbers are traced. Use to_dense() or @ under jit.")
        if values.ndim > 1:
            raise ValueError(f"SparsePrecision.to_scipy: a batch {values.shape[:-1]} of matrices is not one matrix.")
        rows, columns = self.rows.array, self.columns.array
        lower = scipy.sparse.csc_matrix((values, (rows, columns)), self.shape)
        return (lower + scipy.sparse.tril(lower, -1).T).tocsc()

    def _concrete_values(self) -> np.ndarray | None:
        """The numbers as a NumPy array, ``None`` where they are traced."""
        if not is_concrete(self.numbers, self.scale):
            return None
        numbers = np.asarray(self.numbers) if self.constants is None else self.constants.array
        return np.asarray(self.scale)[..., None] * numbers

    def _with(self, **changes: object) -> SparsePrecision:
        made = object.__new__(SparsePrecision)
        if "null_space" in changes:
            directions = checked_directions(changes.pop("null_space"), self.size, "SparsePrecision")
            changes["directions"] = FixedArray(directions)
        for field in dataclasses.fields(self):
            object.__setattr__(made, field.name, changes.get(field.name, getattr(self, field.name)))
        return made

    def __repr__(self) -> str:
        null = "" if self.null_space is None else f", null space of dimension {self.null_space.shape[1]}"
        return f"SparsePrecision({self.size} unknowns, {len(self.rows.array)} entries in the lower triangle{null})"


@functools.lru_cache(maxsize=64)
def pattern_of(size: int, rows: FixedArray, columns: FixedArray) -> SparsePattern:
    """Pattern of a lower triangle, kept for the matrices of equal content."""
    return SparsePattern.of(size, rows.array, columns.array)


def checked_directions(null_space: Any, size: int, name: str) -> np.ndarray:
    """Null space as an array of shape ``(size, k)`` of independent columns.

    :raises TypeError: if it is traced.
    :raises ValueError: if it has another shape, numbers that are not finite, or columns that depend on each other.
    """
    if not is_concrete(null_space):
        raise TypeError(f"{name}: null_space is traced; it must be known. Compute it with NumPy, outside of jit.")
    directions = np.asarray(null_space, float)
    directions = directions[:, None] if directions.ndim == 1 else directions
    if directions.ndim != 2 or directions.shape[0] != size or not 0 < directions.shape[1] <= size:
        raise ValueError(
            f"{name}: null_space must hold one column for each direction, shape ({size}, k); got "
            f"{np.shape(null_space)}."
        )
    if not np.all(np.isfinite(directions)):
        row, column = np.argwhere(~np.isfinite(directions))[0]
        raise ValueError(f"{name}: null_space[{row}, {column}] is {directions[row, column]}.")
    norms = np.linalg.norm(directions, axis=0)
    sizes = np.linalg.svd(directions / np.where(norms > 0, norms, 1), compute_uv=False)
    if not sizes[-1] > 1e-10 * sizes[0]:
        raise ValueError(
            f"{name}: the {directions.shape[1]} columns of null_space depend on each other. Give each direction once "
            "(scipy.linalg.orth makes an independent set)."
        )
    return directions


def common_directions(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    """Directions in both of two null spaces: those of the sum of two matrices without negative eigenvalues."""
    if first is None or second is None:
        return None
    one, other = np.linalg.qr(first)[0], np.linalg.qr(second)[0]
    left, cosines, _ = np.linalg.svd(one.T @ other)
    # a direction is in both where the angle between the spaces is zero: 1 - cosine is half its square
    count = int(np.sum(cosines > 1.0 - 1e-12))
    return one @ left[:, :count] if count else None


def from_triangle(
    size: int, rows: np.ndarray, columns: np.ndarray, values: object, null_space: ArrayLike | None = None
) -> SparsePrecision:
    """Precision of the entries of its lower triangle with the whole diagonal, sorted row by row."""
    return _fill(object.__new__(SparsePrecision), size, rows, columns, values, null_space)


def with_values(precision: SparsePrecision, values: object, null_space: ArrayLike | None = None) -> SparsePrecision:
    """Precision of the same pattern with other numbers, shape ``(*batch, entries)``."""
    return from_triangle(precision.size, precision.rows.array, precision.columns.array, values, null_space)


def _fill(
    made: SparsePrecision, size: int, rows: np.ndarray, columns: np.ndarray, values: Any, null: Any
) -> SparsePrecision:
    is_constant = is_concrete(values) and np.ndim(values) == 1
    dtype = jnp.result_type(float)
    directions = None if null is None else FixedArray(checked_directions(null, size, "SparsePrecision"))
    fields = {
        "size": size,
        "rows": FixedArray(np.asarray(rows, np.int64)),
        "columns": FixedArray(np.asarray(columns, np.int64)),
        "constants": FixedArray(np.asarray(values, float)) if is_constant else None,
        "numbers": None if is_constant else jnp.asarray(values, dtype),
        "scale": jnp.ones((), dtype),
        "directions": directions,
    }
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
