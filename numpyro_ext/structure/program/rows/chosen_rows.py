"""Chosen elements of a large affine value as rows of a design: which ones is data, so that others run the same code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.content import ByContent
from ....linalg.gaussian.design import SparseRows
from ..questions import Questions
from .affine_rows import AffineRows, Colouring, RowIndices, entries_by_colour, find_indices
from .selected import SelectedDependence


class ChosenIndices(NamedTuple):
    """Indices that were looked up in the data."""

    elements: np.ndarray
    """Flat numbers of the elements, shape ``(num_chosen,)``."""
    rows: RowIndices
    used: np.ndarray
    """The unknowns that they depend on, shape ``(m,)``."""
    places: np.ndarray
    """The entries of the rows among these."""


class ChosenRows(ByContent):
    """Elements of a value that is affine in the unknowns; equal ones make the same function of numbers and indices.

    :param AffineRows rows: other rows of the same unknowns.
    :param int atom: the value.
    :param Colouring colouring: of the unknowns.
    """

    def __init__(self, rows: AffineRows, atom: int, colouring: Colouring):
        self._rows, self._atom, self._colouring = rows.without_data(), atom, colouring

    @classmethod
    def build(
        cls, questions: Questions, rows: AffineRows, atom: int, elements: np.ndarray
    ) -> tuple[ChosenRows, ChosenIndices]:
        """Follow the elements to the unknowns.

        :raises TooLarge: if that is too much.
        """
        starts = np.cumsum((0, *rows.sizes))[:-1]
        selected = SelectedDependence(questions, dict(zip(rows.inputs, starts.tolist(), strict=True)))
        pattern = selected.at(atom, elements).astype(np.int32)
        indices, colouring = find_indices(pattern, rows.num_columns)
        used = np.unique(pattern[pattern >= 0]) if indices.is_entry.any() else np.zeros(1, np.int32)
        places = np.minimum(np.searchsorted(used, indices.columns), len(used) - 1).astype(np.int32)
        return cls(rows, atom, colouring), ChosenIndices(elements.astype(np.int32), indices, used, places)

    def design(self, env: Mapping[int, object], indices: ChosenIndices) -> tuple[SparseRows, Array]:
        """Design and offset at the given hyperparameters and data."""
        rows = self._rows

        def chosen(e: Array) -> Array:
            return rows.elements(self._atom, jnp.asarray(indices.elements), e, env)

        zero = jnp.zeros((rows.num_columns,), jnp.result_type(float))
        offset, push = jax.linearize(chosen, zero)
        values = entries_by_colour(push, indices.rows, self._colouring, zero.dtype, is_large=True)
        values = jnp.where(indices.rows.is_entry, values, 0.0)
        return SparseRows(jnp.asarray(indices.rows.columns), values, rows.num_columns), offset
