"""Search for forms whose blocks differ in their outcomes alone, which quadrature on shared nodes is for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax import Array

from .....linalg.gaussian.prior import DiagonalPrior
from .....structure.latent_gaussian import LatentGaussian
from .shared_columns import (
    ColumnsOfFamily,
    SharedColumns,
    has_rows,
    parameters_of,
    slopes_of,
    starts_of_families,
    variance_of,
)

__all__ = ["find_shared_columns"]

_MOST_OUTCOMES = 64
_NODES = (73, 39)
"""Nodes of each axis of blocks of one and of two unknowns."""
_ALIKE = 1e-9
"""Relative difference of numbers that are the same but for rounding."""


def find_shared_columns(forms: list[LatentGaussian], num_nodes: int | None = None) -> SharedColumns | None:
    """The algorithm for forms whose blocks differ in their outcomes alone; ``None`` if they differ in more.

    :param forms: of one reading at several hyperparameters, concrete.
    :param int num_nodes: nodes that the algorithm is to have on each axis; by default 73, and 39 of two unknowns.
    """
    form = forms[0]
    rows, columns = np.asarray(form.blocks.rows), np.asarray(form.blocks.columns)
    starts = starts_of_families(form)
    dimension = columns.shape[1]
    is_regular = dimension <= len(_NODES) and form.border is None and len(rows) > 1 and rows.max(initial=0) < starts[-1]
    is_regular &= bool(columns.max(initial=0) < form.num_columns)  # no block has fewer unknowns than others
    if not is_regular or not all(isinstance(block, DiagonalPrior) for block in form.prior):
        return None
    if not (hasattr(form.design, "values") or hasattr(form.design, "matrix")):
        return None
    owner = np.searchsorted(starts, rows[0], side="right") - 1
    if np.any(np.searchsorted(starts, rows, side="right") - 1 != owner) or np.any(np.diff(owner) < 0):
        return None
    families = []
    for number, potential in enumerate(form.potentials):
        outcomes = potential.outcomes()
        places = np.flatnonzero(owner == number)
        if outcomes is None or outcomes.number is None or outcomes.limit is not None or not len(places):
            return None
        if outcomes.number > _MOST_OUTCOMES or not _is_plain(potential):
            return None
        families.append(ColumnsOfFamily(int(places[0]), len(places), int(outcomes.number)))
    has_shift, priors = False, []
    for one in forms:
        slopes = slopes_of(one.design, rows, columns, np)
        offsets, shift = np.asarray(one.offset)[rows], np.zeros(len(rows))
        if not (np.isfinite(slopes).all() and np.isfinite(offsets).all() and _alike(slopes, slopes[0])):
            return None
        if not _alike(offsets, offsets[0]):
            if dimension > 1:
                return None
            has_shift, slope = True, slopes[0, :, 0]
            shift = (offsets - offsets[0]) @ slope / (float(np.sum(slope**2)) or 1.0)
            if not _alike(offsets - shift[:, None] * slope, offsets[0]):
                return None
        for number, (potential, family) in enumerate(zip(one.potentials, families, strict=True)):
            own = rows[:, family.first : family.first + family.number] - starts[number]
            for value in parameters_of(potential).values():
                if has_rows(potential, value):
                    taken = np.asarray(value)[own]
                    if not _alike(taken, taken[0]):
                        return None
        variance = np.concatenate([np.asarray(variance_of(block)) for block in one.prior])[columns]
        if dimension > 1 and not _alike(variance, variance[0]):
            return None
        priors.append(np.concatenate([shift[:, None], variance], axis=1))
    has_gaps = not all(np.asarray(mask).all() for mask in form.observed)
    is_fixed = all(_alike(other, priors[0]) for other in priors[1:])
    if dimension > 1 and not is_fixed:
        return None
    nodes = num_nodes or _NODES[dimension - 1]
    return SharedColumns(nodes, tuple(families), has_gaps, has_shift, has_prior_parameters=not is_fixed)


def _is_plain(potential: Any) -> bool:
    """True if the fields of a potential are arrays."""
    names = [field.name for field in dataclasses.fields(potential)]
    return all(isinstance(getattr(potential, name), Array | np.ndarray | float | int) for name in names)


def _alike(values: np.ndarray, others: np.ndarray) -> bool:
    scale = 1.0 + np.max(np.abs(others), initial=0.0)
    tolerance = max(_ALIKE, 100.0 * float(np.finfo(np.result_type(values, np.float32)).eps)) * scale
    with np.errstate(invalid="ignore"):  # of infinite thresholds
        return bool(np.all((np.abs(values - others) <= tolerance) | (values == others)))
