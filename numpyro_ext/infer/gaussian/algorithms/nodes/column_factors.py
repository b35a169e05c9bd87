"""Parameters and weights of the factors of columns, and columns found in rows that are records, one below the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .....linalg.padding import places_within
from .....potentials.elementwise import TemperedPotential
from .....structure.latent_gaussian import LatentGaussian

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
    if any(potential.outcomes() is None for potential in factors_of(form)):
        return None
    every = np.arange(num_rows)
    owner = np.searchsorted(starts, every, side="right") - 1
    parts = [owner[:, None].astype(np.int64)]
    for one in forms:
        slopes = slopes_of(one.design, every[:, None], np.zeros((num_rows, 1), int), np)[:, :, 0]
        parts += [_key(slopes), _key(np.asarray(one.offset)[:, None])]
        for number, potential in enumerate(factors_of(one)):
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


def factors_of(form: LatentGaussian) -> tuple[Any, ...]:
    """Factors of each family, without the weights that ``handlers.scale`` gives them."""
    return tuple(p.base if isinstance(p, TemperedPotential) else p for p in form.potentials)


def weights_of(form: LatentGaussian) -> tuple[Any, ...]:
    """Weights of the rows of each family, an array for each row or a number for all."""
    return tuple(p.weight if isinstance(p, TemperedPotential) else 1.0 for p in form.potentials)


def starts_of_families(form: LatentGaussian) -> np.ndarray:
    """First row of each family of factors, and the number of rows."""
    return np.cumsum([0, *(mask.shape[0] for mask in form.observed)])


def slopes_of(design: Any, rows: Any, columns: Any, xp: Any) -> Any:
    """Derivatives of predictors by the unknowns of their blocks, shape ``(B, P, D)``.

    :param design: of a form, with entries at hand.
    :param rows: of each block, shape ``(B, P)``.
    :param columns: its unknowns, shape ``(B, D)``.
    :param xp: ``jax.numpy``, or ``numpy``, which compiles nothing.
    """
    is_sparse = hasattr(design, "values")
    entries = xp.asarray(design.values if is_sparse else design.matrix)
    if columns.shape[1] == 1:
        return xp.sum(entries[rows], axis=-1)[..., None]
    if not is_sparse:
        return entries[rows[:, :, None], columns[:, None, :]]
    is_own = xp.asarray(design.columns)[rows][..., None] == columns[:, None, None, :]
    return xp.sum(xp.where(is_own, entries[rows][..., None], 0.0), axis=2)


def parameters_of(potential: Any) -> dict[str, Array]:
    """Parameters of factors but for their outcomes, by name."""
    names = [field.name for field in dataclasses.fields(potential) if field.name != potential.outcomes().field]
    return {name: jnp.asarray(getattr(potential, name)) for name in names}


def has_rows(potential: Any, value: Array) -> bool:
    """True if the first axis of a parameter is that of the rows. What has thresholds has them on the last axis."""
    size = np.size(getattr(potential, potential.outcomes().field))
    return value.ndim >= (1 if potential.is_elementwise else 2) and value.shape[0] == size
