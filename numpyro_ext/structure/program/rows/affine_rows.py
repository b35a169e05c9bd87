"""Affine values of a program as rows of a design: the sparsity is found once, the numbers at every hyperparameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax import Array
from jax.typing import DTypeLike
from scipy.sparse.csgraph import connected_components

from ....compilation.content import ByContent
from ....linalg.gaussian.design import DenseDesign, Design, OperatorRows, SparseRows
from ....linalg.gaussian.spaces.banded_space import known_bandwidth
from ....linalg.padding import places_within
from ..dependence import dependence
from ..patterns import DenseDependence, Pattern, TooLarge, deduplicate, or_nothing, same_width
from ..program import Program
from ..questions import Questions
from .costs import ROW_COSTS, RowCosts
from .selected import SelectedDependence
from .selected_values import evaluate_by_elements, selected_values, vanishing

Parts = Sequence[tuple[tuple[int, ...], np.ndarray]]
"""Values, of which the elements stand one after another, and the flat indices of those that are taken; or pairs of
these, of which the difference is."""


def atoms_of(parts: Parts) -> list[int]:
    """The values of which rows are taken."""
    return [atom for atoms, _ in parts for atom in atoms]


class RowIndices(NamedTuple):
    """Places of the entries of sparse rows: looked up in the data, and passed to compiled functions beside it."""

    columns: np.ndarray
    """Shape ``(num_rows, k)``; padding stands at a column that the row has anyway, so as not to widen the band."""
    is_entry: np.ndarray
    """Boolean, false at padding, of the same shape."""
    colours: np.ndarray
    """Colour of every column, so that no row holds two of one colour; shape ``(num_columns,)``."""
    entry_colours: np.ndarray
    """Colour of every entry, shape ``(num_rows, k)``."""


class AffineRows(ByContent):
    """Selected elements of affine values, as ``design @ e + offset`` of the flat unknowns ``e``.

    The columns that a row may touch follow from the program; their coefficients are directional derivatives along as
    few directions as columns that never meet in a row allow (one for a gather of random effects, ``p`` for ``X @ b``).

    :param questions: the traced model and its data.
    :param field: input value and size of each field site, in the order of the columns.
    :param parts: values and the flat indices of their elements to take, one for each row; or two for each row, whose
        difference is taken, with ``-1`` for nothing to subtract.
    :param RowCosts costs: by which values are large, and products cheaper than entries.
    """

    def __init__(
        self, questions: Questions, field: Mapping[str, tuple[int, int]], parts: Parts, costs: RowCosts = ROW_COSTS
    ):
        self.program, self.costs = questions.program, costs
        self.inputs = tuple(number for number, _ in field.values())
        self.sizes = tuple(size for _, size in field.values())
        self.parts = tuple((atoms, np.asarray(rows)) for atoms, rows in parts)
        self.num_columns = sum(self.sizes)
        self.num_rows = sum(len(rows) for _, rows in self.parts)
        starts = np.cumsum((0, *self.sizes))[:-1]
        selected = SelectedDependence(questions, dict(zip(self.inputs, starts.tolist(), strict=True)))
        largest = max((selected.largest(atom) for atom in atoms_of(self.parts)), default=0)
        self.is_large = largest > costs.large_value
        """True if patterns and values are found of those elements of the largest value that are asked for, and
        directions taken one after the other."""
        pattern = self._pattern(questions, selected)
        self.pattern: np.ndarray | None = None if pattern is None else pattern.astype(np.int32)
        self.width = self.num_columns if pattern is None else pattern.shape[1]
        self.is_dense = self.pattern is None or (self.width > 1 and 3 * self.width > self.num_columns)
        """True if rows touch so many columns that their entries are not looked up one by one."""
        self.is_operator = self.is_dense and self.num_columns >= costs.smallest_operator and self._has_transform()
        """True if their products are cheaper than their entries."""
        self.indices: RowIndices | None = None
        self._colouring, self.bandwidth, self._has_padding = Colouring(0, False), 0, False
        if self.pattern is not None and not self.is_dense:
            self.indices, self._colouring = find_indices(self.pattern, self.num_columns)
            columns = self.indices.columns
            self._has_padding = not self.indices.is_entry.all()
            self.bandwidth = known_bandwidth(int(np.max(np.ptp(columns, axis=1), initial=0)), self.num_columns)

    def without_data(self) -> AffineRows:
        """These rows without what was looked up in the data."""
        if self.pattern is None and self.indices is None:
            return self
        out = copy.copy(self)
        vars(out).pop("content_key", None)
        out.pattern, out.indices = None, None
        return out

    def _pattern(self, questions: Questions, selected: SelectedDependence) -> np.ndarray | None:
        if self.is_large:
            try:
                return selected_rows(selected, self.program, self.parts)
            except TooLarge:
                pass
        starts = np.concatenate([[0], np.cumsum(self.sizes)])
        seeds = {
            number: (start + np.arange(size, dtype=np.int64)).reshape(*self.program.shape(number), 1)
            for number, start, size in zip(self.inputs, starts[:-1], self.sizes, strict=True)
        }
        found = dependence(questions, seeds, atoms_of(self.parts))
        return rows_of_pattern(self.program, found, self.parts)

    def _has_transform(self) -> bool:
        """True if Fourier transforms stand between unknowns and rows: ``n log n`` operations for ``n^2`` entries."""
        needed = self.program.needed([a for a in atoms_of(self.parts) if isinstance(a, int)], list(self.inputs))
        return any(self.program.equations[index].primitive.name == "fft" for index in needed)

    def evaluate(self, e: Array, env: Mapping[int, Array]) -> Array:
        """The selected elements at the unknowns ``e``, given all other inputs and constants; shape ``(num_rows,)``."""
        evaluate = partial(evaluate_by_elements, costs=self.costs) if self.is_large else None
        return self.select(self.program, self.given(e, env), self.parts, evaluate)

    def _at_zero(self, zero: Array, env: Mapping[int, Array]) -> Array:
        """:meth:`evaluate` where all unknowns are zero, without what that leaves nothing of."""
        evaluate = partial(evaluate_by_elements, zeros=vanishing(self.program, self.inputs), costs=self.costs)
        return self.select(self.program, self.given(zero, env), self.parts, evaluate)

    def evaluate_some(self, numbers: Array, e: Array, env: Mapping[int, Any]) -> Array:
        """Rows of these numbers, as :meth:`evaluate` has them."""
        if self.is_large and len(self.parts) == 1 and len(self.parts[0][0]) == 1 and self.parts[0][1].ndim == 1:
            (((atom,), rows),) = self.parts
            numbers = numbers if _is_range(rows) else jnp.asarray(rows)[numbers]
            return self.elements(atom, numbers, e, env)
        return self.evaluate(e, env)[numbers]

    def elements(self, atom: int, numbers: Array, e: Array, env: Mapping[int, Any]) -> Array:
        """Elements of a value, by their flat numbers, at the unknowns ``e``."""
        return selected_values(self.program, atom, numbers, self.given(e, env), self.costs).astype(e.dtype)

    def given(self, e: Array, env: Mapping[int, Any]) -> dict[int, Any]:
        """All inputs and constants, with the unknowns ``e`` in their places."""
        values, start = dict(env), 0
        for number, size in zip(self.inputs, self.sizes, strict=True):
            values[number] = e[start : start + size].reshape(self.program.shape(number))
            start += size
        return values

    @staticmethod
    def select(
        program: Program,
        values: Mapping[int, object],
        parts: Parts,
        evaluate: Callable[..., list[object]] | None = None,
    ) -> Array:
        """The selected elements, from any values from which they follow.

        :param evaluate: in the place of ``Program.evaluate``.
        """
        computed = (evaluate or Program.evaluate)(program, atoms_of(parts), values)
        found = dict(zip(atoms_of(parts), computed, strict=True))
        taken = [_take([jnp.reshape(found[atom], -1) for atom in atoms], rows) for atoms, rows in parts]
        dtype = jnp.result_type(float)
        return jnp.concatenate(taken).astype(dtype) if taken else jnp.zeros((0,), dtype)

    def describe(self) -> str:
        """The kind of design in words."""
        if self.is_operator:
            return "known by its products"
        return "dense" if self.is_dense else f"{self.width} entries per row"

    def design(self, env: Mapping[int, Any], indices: RowIndices | None) -> tuple[Design | OperatorRows, Array]:
        """Design and offset at the given hyperparameters and data, with the :attr:`indices` that belong to the data."""
        zero = jnp.zeros((self.num_columns,), jnp.result_type(float))
        if self.is_operator:
            weight = jnp.ones((self.num_rows,), zero.dtype)
            return OperatorRows(dict(env), weight, self.evaluate, self.num_columns), self.evaluate(zero, env)
        offset, push = jax.linearize(lambda e: self.evaluate(e, env), zero)
        if self.is_large:
            offset = self._at_zero(zero, env)
        if indices is None:
            return DenseDesign(jax.vmap(push, out_axes=1)(jnp.eye(self.num_columns, dtype=zero.dtype))), offset
        values = entries_by_colour(push, indices, self._colouring, zero.dtype, self.is_large)
        if self._has_padding:
            values = jnp.where(indices.is_entry, values, 0.0)
        return SparseRows(jnp.asarray(indices.columns), values, self.num_columns, self.bandwidth), offset


class Colouring(NamedTuple):
    """Colouring of the columns, which is part of the structure."""

    number: int
    """Number of colours."""
    is_by_slot: bool
    """True if the colour of an entry is its place in its row."""


def find_indices(pattern: np.ndarray, num_columns: int) -> tuple[RowIndices, Colouring]:
    """Find the entries of rows of a pattern, and a colouring of the columns."""
    colours, colouring = _colour_columns(pattern, num_columns)
    is_entry = pattern >= 0
    columns = np.where(is_entry, pattern, np.max(pattern, axis=1, keepdims=True, initial=0))
    colours = colours.astype(np.int32)
    return RowIndices(columns, is_entry, colours, colours[columns]), colouring


def entries_by_colour(
    push: Callable[[Array], Array], indices: RowIndices, colouring: Colouring, dtype: DTypeLike, is_large: bool
) -> Array:
    """The entries of rows, ``(num_rows, k)``, and numbers of no meaning at padding."""
    slopes = _slopes_by_colour(push, indices, colouring.number, dtype, is_large)
    if colouring.is_by_slot:
        return slopes.T
    return slopes[indices.entry_colours, np.arange(slopes.shape[1])[:, None]]


def _slopes_by_colour(
    push: Callable[[Array], Array], indices: RowIndices, num_colours: int, dtype: DTypeLike, is_large: bool
) -> Array:
    """Derivatives of values in the direction of all columns of a colour, ``(num_colours, num_values)``."""
    colours = jnp.asarray(indices.colours)
    if is_large:  # all directions together would take as many copies of the largest value, and so would their reverse

        @jax.checkpoint
        def along(colour: Array) -> Array:
            return push((colours == colour).astype(dtype))

        return jax.lax.map(along, jnp.arange(num_colours, dtype=colours.dtype))
    return jax.vmap(push)((np.arange(num_colours)[:, None] == colours).astype(dtype))


def selected_rows(selected: SelectedDependence, program: Program, parts: Parts) -> np.ndarray:
    """Rows of a pattern, as :func:`rows_of_pattern` has them, from the selected elements backwards.

    :raises TooLarge: if that is too much.
    """

    def look(atoms: tuple[int, ...], rows: np.ndarray) -> np.ndarray:
        ends = np.cumsum([int(np.prod(program.shape(atom))) for atom in atoms])
        which, found = np.searchsorted(ends, rows, side="right"), np.full((len(rows), 1), -1, np.int64)
        for number, atom in enumerate(atoms):
            chosen = which == number
            if chosen.any():
                pattern = selected.at(atom, rows[chosen] - (ends[number - 1] if number else 0))
                found, pattern = same_width([found, pattern])
                found[chosen] = pattern
        return found

    pieces = []
    for atoms, rows in parts:
        if rows.ndim == 1:
            pieces.append(look(atoms, rows))
            continue
        plus, minus = rows.T
        subtracted = np.where(minus[:, None] < 0, -1, look(atoms, np.maximum(minus, 0)))
        pieces.append(deduplicate(np.concatenate([look(atoms, plus), subtracted], axis=1)))
    return np.concatenate(same_width(pieces)) if pieces else np.zeros((0, 1), np.int64)


def rows_of_pattern(program: Program, found: Mapping[int, Pattern], parts: Parts) -> np.ndarray | None:
    """Unknowns on which each of the selected elements depends, ``(rows, k)`` padded with ``-1``; None if that is too
    much.

    :param found: the patterns of their values.
    """
    pieces = []
    for atoms, rows in parts:
        values = []
        for atom in atoms:
            pattern = or_nothing(found.get(atom), program.shape(atom))
            if isinstance(pattern, DenseDependence):
                return None
            values.append(pattern.reshape(-1, pattern.shape[-1]))
        pieces.append(_pattern_of_rows(np.concatenate(same_width(values)) if len(values) > 1 else values[0], rows))
    width = max((p.shape[1] for p in pieces), default=1)
    if sum(len(p) for p in pieces) * width > 2e8:
        return None
    pieces = [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=-1) for p in pieces]
    return np.concatenate(pieces) if pieces else np.zeros((0, 1), np.int64)


def _pattern_of_rows(pattern: np.ndarray, rows: np.ndarray) -> np.ndarray:
    if rows.ndim == 1:
        return pattern[rows]
    plus, minus = rows.T
    return deduplicate(np.concatenate([pattern[plus], np.where(minus[:, None] < 0, -1, pattern[minus])], axis=1))


def _take(pieces: Sequence[Array], rows: np.ndarray) -> Array:
    values = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
    if rows.ndim == 2:
        plus, minus = rows.T
        return values[plus] - jnp.where(minus < 0, 0.0, values[minus])
    if rows.shape == values.shape and _is_range(rows):
        return values
    return values[rows]


def _is_range(rows: np.ndarray) -> bool:
    return np.array_equal(rows, np.arange(rows.size))


def _colour_columns(pattern: np.ndarray, num_columns: int) -> tuple[np.ndarray, Colouring]:
    """Colours for columns such that no row holds two columns of one colour."""
    # in models made of gathers, each column always stands in the same slot of its rows: the slot is a colouring
    colour = np.full(num_columns, -1)
    for slot in range(pattern.shape[1]):
        used = pattern[:, slot][pattern[:, slot] >= 0]
        if np.any((colour[used] >= 0) & (colour[used] != slot)):
            break
        colour[used] = slot
    else:
        return np.maximum(colour, 0), Colouring(pattern.shape[1], True)
    colour, number = _greedy_colours(pattern, num_columns)
    return colour, Colouring(number, False)


def _greedy_colours(pattern: np.ndarray, num_columns: int) -> tuple[np.ndarray, int]:
    rows, slots = np.nonzero(pattern >= 0)
    ones = np.ones(rows.size, np.int32)
    incidence = scipy.sparse.csr_matrix((ones, (rows, pattern[rows, slots])), (pattern.shape[0], num_columns))
    meets = (incidence.T @ incidence).tocsr()
    sizes, colour = np.diff(meets.indptr), np.full(num_columns, -1)
    colour[sizes == 0] = 0
    # The first colour that none before it has, where they meet: of columns that lead to one another one after the
    # other, of those that do not all at once.
    used = np.flatnonzero(sizes)
    turn = places_within(connected_components(meets, directed=False)[1][used], num_columns)
    order, starts, width = used[np.argsort(turn, kind="stable")], meets.indptr, 1
    for columns in np.split(order, np.cumsum(np.bincount(turn))[:-1]):
        if columns.size == 1:
            row, others = np.zeros(1, int), meets.indices[starts[columns[0]] : starts[columns[0] + 1]]
        else:
            row = np.repeat(np.arange(columns.size), sizes[columns])
            before = np.cumsum(sizes[columns]) - sizes[columns]
            others = meets.indices[np.arange(row.size) + (starts[columns] - before)[row]]
        is_taken = np.zeros((columns.size, width + 1), bool)
        is_taken[row, colour[others]] = True  # the last one, of which there is no need, by those without a colour
        found = np.argmin(is_taken, axis=1)
        colour[columns], width = found, max(width, int(found.max()) + 2)
    count = int(colour.max(initial=0)) + 1
    return colour, count if count <= 2 else -(-count // 4) * 4  # other data of equal shapes need as many
