"""Search for forms whose blocks differ in their outcomes alone, which quadrature on shared nodes is for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import Array

from .....compilation.transfer import to_device
from .....linalg.gaussian.prior import CovariancePrior, DiagonalPrior
from .....linalg.padding import rounded_up
from .....potentials.elementwise import TemperedPotential
from .....structure.latent_gaussian import BlockKinds, LatentGaussian
from .column_factors import factors_of, has_rows, parameters_of, slopes_of, starts_of_families, weights_of
from .shared_columns import ColumnsOfFamily, SharedColumns, variance_of

_MOST_OUTCOMES = 64
_NODES = (73, 41)
"""Nodes of each axis of blocks of one and of two unknowns."""
_ALIKE = 1e-9
"""Relative difference of numbers that are the same but for rounding."""


def find_shared_columns(forms: list[LatentGaussian], num_nodes: int | None = None) -> SharedColumns | None:
    """The algorithm for forms whose blocks differ in their outcomes alone; ``None`` if they differ in more.

    :param forms: of one reading at several hyperparameters, concrete.
    :param int num_nodes: nodes that the algorithm is to have on each axis; by default 73, and 41 of two unknowns.
    """
    form = forms[0]
    (rows, is_there), columns = _filled_rows(form), np.asarray(form.blocks.columns)
    starts, is_ragged = starts_of_families(form), not is_there.all()
    dimension = columns.shape[1]
    is_regular = dimension <= (1 if is_ragged else len(_NODES)) and form.border is None and len(rows) > 1
    is_regular &= bool(rows.max(initial=0) < starts[-1])  # no column is without any rows
    is_regular &= bool(columns.max(initial=0) < form.num_columns)  # no block has fewer unknowns than others
    if not is_regular or not (_is_diagonal(form) or _is_of_pairs(form)):
        return None
    if not (hasattr(form.design, "values") or hasattr(form.design, "matrix")):
        return None
    owner = np.searchsorted(starts, rows[0], side="right") - 1
    if np.any(np.searchsorted(starts, rows, side="right") - 1 != owner) or np.any(np.diff(owner) < 0):
        return None
    families = []
    for number, potential in enumerate(factors_of(form)):
        outcomes = potential.outcomes()
        places = np.flatnonzero(owner == number)
        if outcomes is None or outcomes.number is None or outcomes.limit is not None or not len(places):
            return None
        if outcomes.number > _MOST_OUTCOMES or not _is_plain(potential):
            return None
        families.append(ColumnsOfFamily(int(places[0]), len(places), int(outcomes.number)))
    has_shift, priors = False, []
    for one in forms:
        slopes, offsets, shift = _lines(one)
        if not (np.isfinite(slopes).all() and np.isfinite(offsets).all() and _alike(slopes, slopes[0])):
            return None
        if _alike(offsets, offsets[0]):
            shift = np.zeros_like(shift)
        elif dimension > 1 or is_ragged or not _alike(offsets - shift[:, None] * slopes[0, :, 0], offsets[0]):
            return None
        else:
            has_shift = True
        for number, (potential, family) in enumerate(zip(factors_of(one), families, strict=True)):
            own = rows[:, family.first : family.first + family.number] - starts[number]
            for value in parameters_of(potential).values():
                if has_rows(potential, value):
                    taken = np.asarray(value)[own]
                    if not _alike(taken, taken[0]):
                        return None
        variance = _variances(one)
        if dimension > 1 and not _alike(variance, variance[0]):
            return None
        priors.append(np.concatenate([shift[:, None], variance], axis=1))
    weights = [_weights(one) for one in forms]
    # the gradient holds them
    if not np.isfinite(weights[0]).all() or any(not np.array_equal(weights[0], other) for other in weights):
        return None
    has_gaps = is_ragged or not all(np.asarray(mask).all() for mask in form.observed)
    # nodes of two unknowns are those of standard normal coordinates
    is_fixed = dimension > 1 or all(_alike(other, priors[0]) for other in priors[1:])
    nodes = num_nodes or _NODES[dimension - 1]
    has_weights = any(isinstance(potential, TemperedPotential) for potential in form.potentials)
    options = {"has_prior_parameters": not is_fixed, "is_ragged": is_ragged, "has_weights": has_weights}
    return SharedColumns(nodes, tuple(families), has_gaps, has_shift, **options)


def find_kinds(forms: list[LatentGaussian], algorithm: SharedColumns, most: float) -> BlockKinds | None:
    """Blocks with equal outcomes, gaps and priors; ``None`` where they are not much fewer than all blocks.

    :param forms: as for :func:`find_shared_columns`.
    :param SharedColumns algorithm: that this has found.
    :param float most: share of the blocks up to which it pays to count equal ones once.
    """
    form, starts, parts = forms[0], starts_of_families(forms[0]), []
    rows, is_there = _filled_rows(form)
    for place, (potential, family) in enumerate(zip(factors_of(form), algorithm.families, strict=True)):
        part = slice(family.first, family.first + family.number)
        own = rows[:, part] - starts[place]
        observed = np.asarray(form.observed[place])
        outcomes = potential.outcomes()
        assert outcomes is not None  # as the families were found by
        values = np.broadcast_to(np.asarray(getattr(potential, outcomes.field)), observed.shape)
        parts.append(np.where(is_there[:, part], np.where(observed, values, -1)[own], -1).astype(np.int64))
    if algorithm.has_weights:
        parts.append(np.where(is_there, _weights(form)[rows], 0.0).astype(float).view(np.int64))
    for one in forms:
        priors = _priors(one, algorithm)
        # what is equal is so but for the last digits, and zero has one sign
        parts.append((np.round(priors / (1.0 + np.abs(priors).max()), 12) + 0.0).view(np.int64))
    keys = np.concatenate(parts, axis=1)
    multipliers = np.random.default_rng(0).integers(1, 2**62, keys.shape[1]) | 1
    _, *found = np.unique(keys @ multipliers, return_index=True, return_inverse=True, return_counts=True)
    first, of_blocks, number = found
    size = rounded_up(len(first), digits=1)  # few sizes, so that other data run the same programs
    if size > most * len(rows) or not np.array_equal(keys[first][of_blocks], keys):
        return None
    padding = (0, size - len(first))
    counts = np.pad(number.astype(form.offset.dtype), padding)
    return BlockKinds(*jax.tree.map(to_device, (np.pad(first, padding), counts, of_blocks)))


def kinds_hold(form: LatentGaussian, algorithm: SharedColumns) -> bool:
    """True if priors of blocks of one kind are the same at other hyperparameters too.

    :param LatentGaussian form: at these, with its kinds, if it has any.
    :param SharedColumns algorithm: as for :func:`find_kinds`.
    """
    if not isinstance(form.kinds, BlockKinds):
        return True
    priors = _priors(form, algorithm)
    return _alike(priors[np.asarray(form.kinds.first)][np.asarray(form.kinds.of_blocks)], priors)


def _priors(form: LatentGaussian, algorithm: SharedColumns) -> np.ndarray:
    """Location and variances of the unknowns of each block, shape ``(B, 1 + D)``, or ``(B, 1 + D^2)``."""
    variances = _variances(form)
    shift = _lines(form)[2] if algorithm.has_shift else np.zeros(len(variances))
    return np.concatenate([shift[:, None], variances], axis=1).astype(float)


def _filled_rows(form: LatentGaussian) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each block, those of another one in the place of padding, and where there is none; both ``(B, P)``."""
    rows = np.asarray(form.blocks.rows)
    is_there = rows < form.num_rows
    return np.where(is_there, rows, rows.min(axis=0)), is_there


def _lines(form: LatentGaussian) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slopes ``(B, P, D)`` and offsets ``(B, P)`` of predictors, and the location of the first unknown of each block
    that makes these those of the first block, shape ``(B,)``."""
    rows = _filled_rows(form)[0]
    slopes, offsets = slopes_of(form.design, rows, np.asarray(form.blocks.columns), np), np.asarray(form.offset)[rows]
    slope = slopes[0, :, 0]
    return slopes, offsets, (offsets - offsets[0]) @ slope / (float(np.sum(slope**2)) or 1.0)


def _variances(form: LatentGaussian) -> np.ndarray:
    """Prior variances of the unknowns of each block, shape ``(B, D)``, or covariances, ``(B, D^2)``."""
    columns = np.asarray(form.blocks.columns)
    if isinstance(form.prior[0], CovariancePrior):
        of_batch = np.asarray(form.prior[0].covariance)
        return of_batch.reshape(len(of_batch), -1)[np.arange(len(columns)) % len(of_batch)]
    return np.concatenate([np.asarray(variance_of(block)) for block in form.prior])[columns]


def _weights(form: LatentGaussian) -> np.ndarray:
    """Weights of the factors of all rows, shape ``(num_rows,)``."""
    sizes = np.diff(starts_of_families(form))
    return np.concatenate([np.broadcast_to(np.asarray(w), n) for w, n in zip(weights_of(form), sizes, strict=True)])


def _is_diagonal(form: LatentGaussian) -> bool:
    return all(isinstance(block, DiagonalPrior) for block in form.prior)


def _is_of_pairs(form: LatentGaussian) -> bool:
    """True if the unknowns are pairs with a covariance, and each block is one of them, in their order."""
    columns = np.asarray(form.blocks.columns)
    if len(form.prior) != 1 or not isinstance(form.prior[0], CovariancePrior) or columns.shape[1] < 2:
        return False
    is_whole = form.prior[0].covariance.shape[1] == columns.shape[1]
    return is_whole and np.array_equal(columns, np.arange(columns.size).reshape(columns.shape))


def _is_plain(potential: Any) -> bool:
    """True if the fields of a potential are arrays."""
    names = [field.name for field in dataclasses.fields(potential)]
    return all(isinstance(getattr(potential, name), Array | np.ndarray | float | int) for name in names)


def _alike(values: np.ndarray, others: np.ndarray) -> bool:
    scale = 1.0 + np.max(np.abs(others), initial=0.0)
    tolerance = max(_ALIKE, 100.0 * float(np.finfo(np.result_type(values, np.float32)).eps)) * scale
    with np.errstate(invalid="ignore"):  # of infinite thresholds
        return bool(np.all((np.abs(values - others) <= tolerance) | (values == others)))
