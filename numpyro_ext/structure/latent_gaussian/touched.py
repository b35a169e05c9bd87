"""Quantities that rows touch of independent blocks, found in the program: buckets of blocks of nearly equal size."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax import Array
from scipy.sparse.csgraph import connected_components

from ...compilation.content import ByContent
from ...linalg.gaussian.design import SparseRows
from ...linalg.gaussian.spaces.touched_space import Touched
from ...linalg.padding import cheapest_levels, places_within, rounded_up
from ..program.degrees import Degree, Degrees
from ..program.patterns import TooLarge, same_width
from ..program.program import Program
from ..program.questions import Questions
from ..program.rows.affine_rows import AffineRows, Colouring, RowIndices, atoms_of, entries_by_colour, find_indices
from ..program.rows.selected import SelectedDependence
from .blocks import units
from .costs import LayoutCosts

_MOST_BUCKETS = 5
_COST_OF_ROW = 64.0
"""Multiplications that scattering a row costs."""
_LITTLE_MORE = 1.1
"""Times the multiplications that are not worth a second kind of quantities."""


class TouchedIndices(NamedTuple):
    """Indices that were looked up in the data."""

    elements: np.ndarray
    """Element of each quantity: one of the values between unknowns and rows, or, behind these, a row."""
    quantities: RowIndices
    """Entries of the quantities among the unknowns."""
    entries: RowIndices
    """Entries of the rows among the elements of the values between."""
    places: np.ndarray
    """The same entries among the quantities, ``(num_rows, k)``."""
    is_itself: np.ndarray
    """True if a row is a quantity of its own, ``(num_rows,)``."""
    columns: tuple[np.ndarray, ...]
    home: np.ndarray


class TouchedRows(ByContent):
    """Rows by way of the quantities that they touch, at every hyperparameter; see :class:`~numpyro_ext.linalg.gaussian
    .touched_space.Touched`.

    :param AffineRows rows: from the unknowns.
    :param AffineRows seen: the same rows, from values between.
    :param between: these values; the unknowns themselves, if there are none through which all rows go.
    :param shapes: of the buckets.
    :param Colouring colouring: of the unknowns, for the entries of quantities.
    :param kinds: whether there are elements of the values between among the quantities, and rows.
    :param TouchedIndices indices: that belong to the data.
    """

    def __init__(
        self,
        rows: AffineRows,
        seen: AffineRows,
        between: tuple[int, ...],
        shapes: tuple[tuple[int, int], ...],
        colouring: Colouring,
        kinds: tuple[bool, bool],
        indices: TouchedIndices,
    ):
        self._rows, self._seen, self._between = rows, seen, between
        self.shapes, self._colouring = shapes, colouring
        self._has_elements, self._has_rows = kinds
        self.num_blocks = int(indices.home.max(initial=-1)) + 1
        self.indices: TouchedIndices | None = indices

    @property
    def cost(self) -> float:
        """Multiplications of a factorisation."""
        return sum(blocks * float(width) ** 3 for blocks, width in self.shapes)

    def without_data(self) -> TouchedRows:
        """The same without what was looked up in the data."""
        if self.indices is None:
            return self
        out = copy.copy(self)
        vars(out).pop("content_key", None)
        out._rows, out._seen, out.indices = self._rows.without_data(), self._seen.without_data(), None
        return out

    def describe(self) -> str:
        """The buckets in words."""
        sizes = ", ".join(f"{blocks} of {width}" for blocks, width in self.shapes)
        return f"touched: {self.num_blocks} blocks of which rows touch a part, padded to {sizes} quantities"

    def build(self, env: Mapping[int, object], indices: TouchedIndices, sign: Array) -> Touched:
        """The form's part, at the given hyperparameters and data.

        :param sign: by which rows are multiplied, shape ``(num_rows,)``.
        """
        rows, dtype = self._rows, jnp.result_type(float)

        def quantities(e: Array) -> Array:
            elements, num_elements = jnp.asarray(indices.elements), self._seen.num_columns
            found: list[Array] = []
            if self._has_elements:
                chosen = jnp.where(elements < num_elements, elements, 0)
                if self._between == rows.inputs:
                    found.append(e[chosen])
                else:
                    found.append(rows.elements(self._between[0], chosen, e, env))
            if self._has_rows:
                found.append(rows.evaluate_some(jnp.maximum(elements - num_elements, 0), e, env))
            return found[0] if len(found) == 1 else jnp.where(elements < num_elements, found[0], found[1])

        _, push = jax.linearize(quantities, jnp.zeros((rows.num_columns,), dtype))
        found = indices.quantities
        values = entries_by_colour(push, found, self._colouring, dtype, rows.is_large)
        values = jnp.where(found.is_entry, values, 0.0)
        seen, _ = self._seen.design(env, indices.entries)
        assert isinstance(seen, SparseRows)  # as find_touched asks
        first = np.arange(seen.values.shape[1]) == 0
        weights = sign[:, None] * jnp.where(indices.is_itself[:, None], first, seen.values)
        return Touched(
            SparseRows(jnp.asarray(indices.places), weights, len(indices.elements)),
            SparseRows(jnp.asarray(found.columns), values, rows.num_columns),
            tuple(map(jnp.asarray, indices.columns)),
            jnp.asarray(indices.home),
            self.shapes,
        )


def find_touched(
    questions: Questions,
    degrees: Degrees,
    rows: AffineRows,
    coupled: Sequence[tuple[int, int, int]],
    costs: LayoutCosts,
) -> TouchedRows | None:
    """Quantities that rows touch, if these are much fewer than the unknowns of independent blocks with correlations.

    :param rows: from the unknowns.
    :param coupled: for each prior block with correlations ``(start, batch, width)``: consecutive runs of columns.
    :param LayoutCosts costs: by which the quantities are much fewer.
    """
    if rows.pattern is None or rows.is_dense or not any(batch > 1 and width > 1 for _, batch, width in coupled):
        return None
    blocks = _Blocks.build(rows.pattern, rows.num_columns, coupled)
    numbers, work = _whole(blocks, rows)
    if numbers < costs.touched:
        return None
    best, program = None, questions.program
    for between in _between(program, degrees, rows):
        shapes = {str(number): (number, math.prod(program.shape(number))) for number in between}
        seen = rows if between == rows.inputs else AffineRows(questions, shapes, rows.parts, rows.costs)
        if seen.pattern is None or seen.is_dense:
            continue
        found = _Quantities.build(blocks, seen.pattern)
        if best is None or found.cost < best[0].cost:
            best = found, seen, between
    if best is None:
        return None
    is_smaller = costs.touched_gain * np.sum(best[0].sizes.astype(float) ** 2) <= np.sum(
        blocks.sizes.astype(float) ** 2
    )
    if not is_smaller and costs.touched_gain * (best[0].cost + _COST_OF_ROW * rows.num_rows) > work:
        return None
    try:
        return _lay_out(questions, rows, blocks, *best, costs.bucket)
    except TooLarge:
        return None


def _whole(blocks: _Blocks, rows: AffineRows) -> tuple[float, float]:
    """Cost of whole blocks, which are padded to the largest, or all of them as one where that is less: numbers of a
    covariance or of rows by unknowns, and multiplications."""
    height = np.bincount(blocks.of_rows[blocks.of_rows >= 0], minlength=1).max()
    found = []
    for number, tall, wide in ((blocks.num_blocks, height, blocks.sizes.max()), (1, rows.num_rows, rows.num_columns)):
        least, most = min(tall, wide), max(tall, wide)
        found.append(float(number) * wide * np.array([most, tall * least]))
    numbers, work = np.min(found, axis=0)
    return float(numbers), float(work)


def _between(program: Program, degrees: Degrees, rows: AffineRows) -> list[tuple[int, ...]]:
    """Single values through which all rows see the unknowns, the last ones first; then the unknowns themselves."""
    wanted, inputs = atoms_of(rows.parts), set(rows.inputs)
    affine = [a for a in program.ancestors(wanted) - set(wanted) if degrees.of(a) == Degree.AFFINE]
    found = [a for a in affine if not (program.ancestors(wanted, {a}) - {a}) & inputs]
    found.sort(key=lambda a: program.defined_by.get(a, -1), reverse=True)
    return [*((a,) for a in found if (a,) != rows.inputs), rows.inputs]


class _Blocks(NamedTuple):
    """Independent groups of unknowns, and of rows."""

    label: np.ndarray
    """Block of each unknown."""
    of_rows: np.ndarray
    """Block of each row, minus one for those that see nothing."""
    sizes: np.ndarray
    """Unknowns of each."""

    @property
    def num_blocks(self) -> int:
        return len(self.sizes)

    @classmethod
    def build(cls, pattern: np.ndarray, num_columns: int, coupled: Sequence[tuple[int, int, int]]) -> _Blocks:
        unit = units(num_columns, coupled)
        last = pattern.max(axis=1, initial=-1)
        rows, slots = np.nonzero((pattern >= 0) & (pattern != last[:, None]))
        edges = unit[last[rows]], unit[pattern[rows, slots]]
        graph = scipy.sparse.coo_matrix((np.ones(rows.size, np.int8), edges), (num_columns, num_columns))
        label = connected_components(graph.tocsr(), directed=False)[1][unit]
        is_used = np.bincount(label, minlength=num_columns) > 0
        label = (np.cumsum(is_used) - 1)[label].astype(np.int32)
        return cls(label, np.where(last >= 0, label[last], -1), np.bincount(label))


class _Quantities(NamedTuple):
    """Quantities that the rows of each block touch, or the rows themselves where these are fewer."""

    elements: np.ndarray
    """Elements that rows touch."""
    blocks: np.ndarray
    """The block of each."""
    of_rows: np.ndarray
    """True if rows are the quantities of a block, ``(num_blocks,)``."""
    sizes: np.ndarray
    """Quantities of each block, ``(num_blocks,)``."""

    @classmethod
    def build(cls, blocks: _Blocks, pattern: np.ndarray) -> _Quantities:
        rows, slots = np.nonzero((pattern >= 0) & (blocks.of_rows >= 0)[:, None])
        elements, first = np.unique(pattern[rows, slots], return_index=True)
        of_elements = blocks.of_rows[rows[first]]
        touched = np.bincount(of_elements, minlength=blocks.num_blocks)
        num_rows = np.bincount(blocks.of_rows[blocks.of_rows >= 0], minlength=blocks.num_blocks)
        # one kind of quantities for all blocks, where that is not much dearer: their entries are then of one kind too
        costs = [
            float(np.sum(sizes.astype(float) ** 3)) for sizes in (touched, num_rows, np.minimum(num_rows, touched))
        ]
        of_rows = num_rows <= touched
        for kind, cost in enumerate(costs[:2]):
            if cost <= _LITTLE_MORE * costs[2]:
                of_rows = np.full(blocks.num_blocks, kind == 1)
                break
        return cls(elements, of_elements, of_rows, np.where(of_rows, num_rows, touched))

    @property
    def cost(self) -> float:
        return float(np.sum(self.sizes.astype(float) ** 3))


def _lay_out(
    questions: Questions,
    rows: AffineRows,
    blocks: _Blocks,
    found: _Quantities,
    seen: AffineRows,
    between: tuple[int, ...],
    cost_of_bucket: float,
) -> TouchedRows:
    """Put the quantities of blocks of nearly equal size side by side."""
    assert rows.pattern is not None and seen.indices is not None  # as find_touched asks
    widths = _bucket_widths(found.sizes[found.sizes > 0], cost_of_bucket)
    bucket = np.searchsorted(widths, found.sizes)
    number, place, shapes = np.full(blocks.num_blocks, -1), np.zeros(blocks.num_blocks, np.int64), []
    num_before = quantities_before = 0
    for which, width in enumerate(widths):
        chosen = np.flatnonzero((bucket == which) & (found.sizes > 0))
        shapes.append((rounded_up(chosen.size), int(width)))
        number[chosen] = num_before + np.arange(chosen.size)
        place[chosen] = quantities_before + width * np.arange(chosen.size)
        num_before += shapes[-1][0]
        quantities_before += math.prod(shapes[-1])

    def places(of_block: np.ndarray) -> np.ndarray:
        return place[of_block] + places_within(of_block, blocks.num_blocks)

    is_itself = (blocks.of_rows >= 0) & found.of_rows[blocks.of_rows]
    themselves, chosen = np.flatnonzero(is_itself), ~found.of_rows[found.blocks]
    of_elements, of_themselves = places(found.blocks[chosen]), places(blocks.of_rows[themselves])
    elements = np.zeros(quantities_before, np.int32)
    elements[of_elements] = found.elements[chosen]
    elements[of_themselves] = seen.num_columns + themselves
    behind = found.elements[chosen][:, None]
    if between != rows.inputs:
        starts = np.cumsum((0, *rows.sizes))[:-1]
        selected = SelectedDependence(questions, dict(zip(rows.inputs, starts.tolist(), strict=True)))
        behind = selected.at(between[0], found.elements[chosen])
    behind, own = same_width([behind, rows.pattern[themselves]])
    pattern = np.full((quantities_before, behind.shape[1]), -1, np.int32)
    pattern[of_elements], pattern[of_themselves] = behind, own
    quantities, colouring = find_indices(pattern, rows.num_columns)

    lookup = np.zeros(seen.num_columns, np.int32)
    lookup[found.elements[chosen]] = of_elements
    at_rows = lookup[seen.indices.columns]
    at_rows[themselves] = of_themselves[:, None]

    of_quantities = np.full(quantities_before, -1)
    of_quantities[of_elements] = number[found.blocks[chosen]]
    of_quantities[of_themselves] = number[blocks.of_rows[themselves]]
    entry, slots = np.nonzero(pattern >= 0)
    pairs = np.unique(of_quantities[entry] * np.int64(rows.num_columns) + pattern[entry, slots])
    block, column = np.divmod(pairs, rows.num_columns)
    counts = np.bincount(block, minlength=num_before)
    position = places_within(block, num_before)
    columns, before = [], 0
    for size, _ in shapes:
        inside = (block >= before) & (block < before + size)
        width = rounded_up(int(counts[before : before + size].max(initial=1)))
        part = np.full((size, width), rows.num_columns, np.int32)
        part[block[inside] - before, position[inside]] = column[inside]
        columns.append(part)
        before += size
    home = number[blocks.label].astype(np.int32)
    indices = TouchedIndices(elements, quantities, seen.indices, at_rows, is_itself, tuple(columns), home)
    kinds = bool(chosen.any()), bool(themselves.size)
    if kinds[1]:  # columns of rows keep to one place in them by chance, if at all
        colouring = colouring._replace(is_by_slot=False)
    return TouchedRows(rows, seen, between, tuple(shapes), colouring, kinds, indices)


def _bucket_widths(sizes: np.ndarray, cost_of_bucket: float) -> np.ndarray:
    """Sizes to which blocks are padded, few of them, so that the cubes have the smallest sum."""
    distinct, counts = np.unique([rounded_up(int(size)) for size in sizes], return_counts=True)
    before = np.append(0, np.cumsum(counts))
    padded = (before[1:] - before[:-1, None]) * distinct.astype(float) ** 3 + cost_of_bucket
    level = cheapest_levels(padded, _MOST_BUCKETS)
    return distinct[np.diff(level, append=level.size) > 0]
