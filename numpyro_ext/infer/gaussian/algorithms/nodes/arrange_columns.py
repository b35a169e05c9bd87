"""Columns of rows that stand one below the other, as records of answers: found from what their factors are made of."""

from __future__ import annotations

import numpy as np

from .....linalg.padding import places_within
from .....structure.latent_gaussian import LatentGaussian
from .shared_columns import has_rows, parameters_of, slopes_of, starts_of_families

_MOST_PADDING = 8.0
"""Places of a table for each row up to which its products take less time than to look at all rows at all nodes."""


def rows_by_column(forms: list[LatentGaussian]) -> np.ndarray | None:
    """Rows of each block in the places of their columns: rows of one column have the same factor but for its outcome.

    Several rows of a block that are alike are in columns of their own.

    :param forms: of one reading at several hyperparameters that no model knows of, concrete.
    :return: shape ``(num_blocks, columns)``, padded one past the end; nothing where blocks have more than one unknown,
        or where more than seven places of eight would be empty.
    """
    form = forms[0]
    starts, rows = starts_of_families(form), np.asarray(form.blocks.rows)
    num_rows, is_there = starts[-1], rows < starts[-1]
    if form.border is not None or form.blocks.columns.shape[1] > 1 or len(rows) < 2 or not num_rows:
        return None
    if not (hasattr(form.design, "values") or hasattr(form.design, "matrix")):
        return None
    if any(potential.outcomes() is None for potential in form.potentials):
        return None
    every = np.arange(num_rows)
    owner = np.searchsorted(starts, every, side="right") - 1
    parts = [owner[:, None].astype(np.int64)]
    for one in forms:
        slopes = slopes_of(one.design, every[:, None], np.zeros((num_rows, 1), int), np)[:, :, 0]
        parts += [_key(slopes), _key(np.asarray(one.offset)[:, None])]
        for number, potential in enumerate(one.potentials):
            for value in parameters_of(potential).values():
                if has_rows(potential, value):
                    part = np.zeros((num_rows, int(np.prod(value.shape[1:]))), np.int64)
                    part[owner == number] = _key(np.asarray(value).reshape(len(value), -1))
                    parts.append(part)
    keys = np.concatenate(parts, axis=1)
    multipliers = np.random.default_rng(0).integers(1, 2**62, keys.shape[1]) | 1
    _, first, kind = np.unique(keys @ multipliers, return_index=True, return_inverse=True)
    if not np.array_equal(keys[first][kind], keys):
        return None
    block = np.zeros(num_rows, int)
    block[rows[is_there]] = np.nonzero(is_there)[0]
    pairs, pair = np.unique(block * len(first) + kind, return_inverse=True)
    again = places_within(pair, len(pairs))
    # families follow each other, and columns within them are as they come first
    order = np.lexsort((first, owner[first]))
    rank = np.empty(len(first), int)
    rank[order] = np.arange(len(first))
    _, column = np.unique(rank[kind] * (again.max() + 1) + again, return_inverse=True)
    number = int(column.max()) + 1
    if len(rows) * number > _MOST_PADDING * num_rows:
        return None
    out = np.full((len(rows), number), num_rows, rows.dtype)
    out[block, column] = every
    return out


def _key(values: np.ndarray) -> np.ndarray:
    """Integers that are equal where values are so but for the last digits; zero has one sign."""
    finite = np.where(np.isfinite(values), values, 0.0)
    rounded = np.round(values / (1.0 + np.abs(finite).max(initial=0.0)), 12) + 0.0
    return np.ascontiguousarray(rounded, dtype=float).view(np.int64)
