"""Lower triangles of symmetric matrices that are listed entry by entry."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .checks import is_concrete


def lower_triangle(pairs: np.ndarray, values: Any, size: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """Rows, columns and values of the lower triangle with its diagonal, sorted row by row."""
    listed = pairs[:, 0] * size + pairs[:, 1]
    _, first, counts = np.unique(listed, return_index=True, return_counts=True)
    if np.any(counts > 1):
        i, j = pairs[first[np.argmax(counts > 1)]]
        raise ValueError(
            f"SparsePrecision: the pair ({i}, {j}) is listed more than once. Add up its values first "
            "(scipy.sparse.coo_matrix does), or use SparsePrecision.of."
        )
    is_below = pairs[:, 0] != pairs[:, 1]
    mirrored = np.isin(pairs[is_below, 1] * size + pairs[is_below, 0], listed[is_below])
    if mirrored.all() and is_below.any():
        pairs, values = symmetric(pairs, values, size)
    elif mirrored.any():
        i, j = pairs[is_below][np.argmin(mirrored)]
        raise ValueError(
            f"SparsePrecision: ({i}, {j}) is listed and ({j}, {i}) is not, while other pairs are listed both ways. "
            "List each pair once, or all of them both ways."
        )
    rows, columns = np.maximum(pairs[:, 0], pairs[:, 1]), np.minimum(pairs[:, 0], pairs[:, 1])
    on_diagonal = np.zeros(size, bool)
    on_diagonal[rows[rows == columns]] = True
    has_entries = np.zeros(size, bool)
    has_entries[rows[rows != columns]] = has_entries[columns[rows != columns]] = True
    if np.any(has_entries & ~on_diagonal):
        i = int(np.argmax(has_entries & ~on_diagonal))
        j = int(np.concatenate([columns[rows == i], rows[columns == i]])[0])
        raise ValueError(
            f"SparsePrecision: the entry ({i}, {j}) is there and the diagonal entry ({i}, {i}) is missing, so the "
            f"matrix is not positive definite. Add the diagonal; of a list of neighbours use graph_precision."
        )
    alone = np.flatnonzero(~on_diagonal)  # unknowns without any entry: a zero on the diagonal
    rows, columns = np.concatenate([rows, alone]), np.concatenate([columns, alone])
    order = np.lexsort((columns, rows))
    xp: Any = np if is_concrete(values) else jnp
    if len(alone):
        values = xp.concatenate([values, xp.zeros((*values.shape[:-1], len(alone)), values.dtype)], axis=-1)
    return rows[order], columns[order], values[..., order]


def symmetric(indices: np.ndarray, values: Any, size: int) -> tuple[np.ndarray, Any]:
    """Lower triangle of a matrix that lists both, checked to be symmetric; traced numbers are ``nan`` if they are not.

    :raises ValueError: if it is not symmetric.
    """
    listed = indices[:, 0] * size + indices[:, 1]
    order = np.argsort(listed)
    places = np.searchsorted(listed[order], indices[:, 1] * size + indices[:, 0])
    found = order[np.minimum(places, len(order) - 1)]
    is_there = listed[found] == indices[:, 1] * size + indices[:, 0]
    if is_concrete(values):
        values = np.asarray(values, float)
        others = np.where(is_there, values[..., found], 0.0)
        largest = np.max(np.abs(values), initial=0.0)
        # a sum in another order, as X.T @ X has it, differs by rounding
        differs = np.any(np.abs(values - others) > 1e-12 * largest, axis=tuple(range(values.ndim - 1)))
        if np.any(differs):
            k = np.flatnonzero(differs)[np.lexsort((indices[differs, 1], indices[differs, 0]))[0]]
            i, j = indices[k]
            a, b = (np.ravel(x[..., k])[0] for x in (values, others))
            raise ValueError(
                f"SparsePrecision: the matrix is not symmetric: entry ({i}, {j}) is {a:.6g} and ({j}, {i}) is "
                f"{b:.6g}. If only one triangle is meant, use SparsePrecision(indices, values, size)."
            )
    elif not is_there.all():
        i, j = indices[np.argmin(is_there)]
        raise ValueError(
            f"SparsePrecision: the matrix is not symmetric: entry ({i}, {j}) is listed and ({j}, {i}) is not. If only "
            "one triangle is meant, use SparsePrecision(indices, values, size)."
        )
    else:
        others = values[..., found]
        tolerance = 1e-5 if values.dtype == jnp.float32 else 1e-12
        is_same = jnp.abs(values - others) <= tolerance * jnp.max(jnp.abs(values), axis=-1, keepdims=True)
        values = jnp.where(is_same, values, jnp.nan)
    is_lower = indices[:, 0] >= indices[:, 1]
    return indices[is_lower], values[..., is_lower]
