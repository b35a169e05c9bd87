"""Precisions of walks by differences, and of surfaces and interactions as Kronecker products and sums."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from .checks import checked_count
from .precision import SparsePrecision, from_triangle

_LARGEST_NULL_SPACE = 20_000_000
"""Numbers of a null space up to which one is written out."""


def difference_precision(n: int, order: int = 1, *, cyclic: bool = False) -> SparsePrecision:
    """Precision of a random walk: ``x^T Q x`` is the sum of squared differences of the given order.

    Singular, with the polynomials of degree below ``order`` as null space; of a cyclic one, the constants.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_ext.distributions import difference_precision
        >>> walk = difference_precision(5, order=2)
        >>> print(np.asarray(walk.to_dense()))
        [[ 1. -2.  1.  0.  0.]
         [-2.  5. -4.  1.  0.]
         [ 1. -4.  6. -4.  1.]
         [ 0.  1. -4.  5. -2.]
         [ 0.  0.  1. -2.  1.]]
        >>> print(walk.null_space.shape)
        (5, 2)

    Source: Rue and Held (2005), *Gaussian Markov Random Fields*, sections 3.3 and 3.4.

    :param n: number of points, more than ``order``.
    :param order: of the differences, 1 or more.
    :param cyclic: whether the last point is a neighbour of the first.
    :raises ValueError: if ``n`` or ``order`` is no whole number, or there are too few points.
    """
    name = "difference_precision"
    n, order = checked_count(n, "n", name), checked_count(order, "order", name)
    if n <= order:
        raise ValueError(f"{name}: differences of order {order} need more than {order} points; got {n}.")
    if cyclic:
        difference = scipy.sparse.identity(n, format="csr")
        step = difference[np.roll(np.arange(n), -1)] - difference
        for _ in range(order):
            difference = step @ difference
        null_space = np.ones((n, 1))
    else:
        difference = scipy.sparse.identity(n, format="csr")
        for _ in range(order):
            difference = difference[1:] - difference[:-1]
        # orthogonal polynomials: powers of the place lose their digits
        null_space = np.linalg.qr(np.polynomial.legendre.legvander(np.linspace(-1.0, 1.0, n), order - 1))[0]
    lower = scipy.sparse.tril(difference.T @ difference).tocoo()
    order_of_entries = np.lexsort((lower.col, lower.row))
    rows, columns, values = (part[order_of_entries] for part in (lower.row, lower.col, lower.data))
    return from_triangle(n, rows, columns, values, null_space)


def kronecker(first: object, second: object) -> SparsePrecision:
    """Precision of an interaction, the Kronecker product: unknown ``i * m + j`` of a field of ``n * m`` unknowns.

    Reshaped to ``(n, m)`` the field has ``first`` along its rows' axis and ``second`` along the other. Numbers and
    factors of both may be traced. The null space is known where both are, and is large: with null spaces of ``k`` and
    ``l`` directions it has ``k * m + l * n - k * l``.

    .. doctest::

        >>> from numpyro_ext.distributions import difference_precision, graph_precision, kronecker
        >>> space = graph_precision([(0, 1), (1, 2)], num_nodes=3)
        >>> print(kronecker(space.precision, difference_precision(4, order=1)).null_space.shape)
        (12, 6)

    Source: Knorr-Held, L. (2000), *Bayesian modelling of inseparable space-time variation in disease risk*.

    :param first: a :class:`SparsePrecision` or what :meth:`SparsePrecision.of` takes; of a singular matrix give one
        that knows its ``null_space``, since ``None`` is read as positive definite.
    :param second: the same.
    :raises ValueError: if either is a batch, or the null space has more than 20 million numbers.
    """
    first, second = _both(first, second, "kronecker")
    n, m = first.size, second.size
    made = _product(first, second, _null_space_of_product(first, second))
    assert made.size == n * m
    return made


def kronecker_sum(first: object, second: object) -> SparsePrecision:
    """Precision of a surface, ``first ⊗ I + I ⊗ second``: penalties along both axes of a grid.

    Unknown ``i * m + j`` is at row ``i`` and column ``j``. The null space is the product of both.

    .. doctest::

        >>> from numpyro_ext.distributions import difference_precision, kronecker_sum
        >>> surface = kronecker_sum(difference_precision(6, order=2), difference_precision(5, order=2))
        >>> surface
        SparsePrecision(30 unknowns, 117 entries in the lower triangle, null space of dimension 4)

    Source: Eilers, P. and Marx, B. (2003), *Multivariate calibration with temperature interaction using two-dimensional
    penalized signal regression*, Technometrics 45.

    :param first: as in :func:`kronecker`; scaled by :meth:`SparsePrecision.scale_by` for different smoothness.
    :param second: the same.
    :raises ValueError: if either is a batch.
    """
    first, second = _both(first, second, "kronecker_sum")
    total = _product(first, _identity(second.size), None) + _product(_identity(first.size), second, None)
    if first.null_space is None or second.null_space is None:
        return total
    return total._with(null_space=np.kron(first.null_space, second.null_space))


def _both(first: object, second: object, name: str) -> tuple[SparsePrecision, SparsePrecision]:
    found = SparsePrecision.of(first), SparsePrecision.of(second)
    for precision in found:
        if precision.batch_shape:
            raise ValueError(f"{name}: one matrix each; got a batch of shape {precision.batch_shape}. Use jax.vmap.")
    return found


def _identity(size: int) -> SparsePrecision:
    return from_triangle(size, np.arange(size), np.arange(size), np.ones(size))


def _product(first: SparsePrecision, second: SparsePrecision, null_space: np.ndarray | None) -> SparsePrecision:
    """Kronecker product; numbers that are known stay constants beside the product of the factors."""
    (rows, columns, which), (other_rows, other_columns, other_which) = (_both_triangles(p) for p in (first, second))
    m, size = second.size, first.size * second.size
    joint_rows = (rows[:, None] * m + other_rows).reshape(-1)
    joint_columns = (columns[:, None] * m + other_columns).reshape(-1)
    lower = np.flatnonzero(joint_rows >= joint_columns)
    lower = lower[np.lexsort((joint_columns[lower], joint_rows[lower]))]
    left, right = (which[lower // len(other_which)], other_which[lower % len(other_which)])
    is_known = first.constants is not None and second.constants is not None
    numbers, others = (p.constants.array if is_known and p.constants is not None else p.values for p in (first, second))
    made = from_triangle(size, joint_rows[lower], joint_columns[lower], numbers[left] * others[right], null_space)
    return made._with(scale=first.scale * second.scale) if is_known else made


def _both_triangles(precision: SparsePrecision) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows and columns of all entries, and which of the lower triangle each is."""
    rows, columns = precision.rows.array, precision.columns.array
    below = np.flatnonzero(rows != columns)
    which = np.concatenate([np.arange(len(rows)), below])
    return np.concatenate([rows, columns[below]]), np.concatenate([columns, rows[below]]), which


def _null_space_of_product(first: SparsePrecision, second: SparsePrecision) -> np.ndarray | None:
    """Orthonormal basis of what either factor annihilates."""
    n, m = first.size, second.size
    parts, full = [], []
    k, other = (0 if p.null_space is None else p.null_space.shape[1] for p in (first, second))
    count = k * m + other * n - k * other
    if count == 0:
        return None
    if count * n * m > _LARGEST_NULL_SPACE:
        raise ValueError(
            f"kronecker: the null space has {count} directions of {n * m} numbers each. Add a small number to the "
            "diagonal of one factor, so that it is positive definite, or take fewer unknowns."
        )
    for precision in (first, second):
        null_space = precision.null_space
        basis = np.zeros((precision.size, 0)) if null_space is None else np.linalg.qr(null_space)[0]
        parts.append(basis)
        full.append(np.linalg.svd(basis)[0][:, basis.shape[1] :] if basis.shape[1] else np.eye(precision.size))
    return np.concatenate([np.kron(parts[0], np.eye(m)), np.kron(full[0], parts[1])], axis=1)
