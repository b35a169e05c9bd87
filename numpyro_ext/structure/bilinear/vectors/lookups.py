"""Arrays that are looked up in the data when a model is read as bilinear; a form is given them with the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....linalg.padding import rounded_up
from ..form import Background


class Combinations(NamedTuple):
    """The combinations of vectors of a side that cells see."""

    places: Any
    """Vectors in each, shape ``(num_combinations, k)``."""
    weight: Any
    """Their weights, zero for padding, of the same shape."""


class Lookups(NamedTuple):
    """Cells, and the vectors that they touch.

    Compiled programs know nothing of it but shapes, so that other cells compile nothing.
    """

    rows: tuple[Any, ...]
    """For each observed site the flat indices of the predictors of its cells."""
    cells: tuple[Any, ...]
    """For each observed site the flat indices of the observations in use."""
    of_cells: tuple[Any, Any]
    """The vector that each cell touches, for rows and columns, or the combination of vectors."""
    orders: tuple[Any, Any]
    """Cells in the order of their rows, and of their columns."""
    combinations: tuple[Combinations | None, Combinations | None]
    """For rows and columns, where cells may touch several vectors."""
    reference: tuple[Any, Any, Any]
    """The cell from which shared coefficients are read, and its vectors."""
    background: Background | None = None
    """Censored pairs, where there are any."""

    @classmethod
    def of(
        cls,
        rows: Sequence[np.ndarray],
        cells: Sequence[np.ndarray],
        of_cells: Sequence[np.ndarray],
        combinations: tuple[Combinations | None, Combinations | None],
        reference: tuple[int, int, int],
        background: Background | None = None,
    ) -> Lookups:
        """Arrays on the device; all but the orders are as above."""
        orders = tuple(np.argsort(index, kind="stable") for index in of_cells)
        found = cls(
            tuple(rows),
            tuple(cells),
            (of_cells[0], of_cells[1]),
            (orders[0], orders[1]),
            combinations,
            reference,
            background,
        )
        return jax.tree.map(jnp.asarray, found)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes of the arrays, which compiled programs know."""
        leaves, structure = jax.tree.flatten(self)
        return structure, tuple(leaf.shape for leaf in leaves)


def filled_up(found: Combinations, most: int) -> Combinations:
    """Combinations behind which stand some that no cell sees, of weight zero, so that there are a power of two of them.

    Readings of as many cells then mostly have as many combinations.

    :param int most: how many there can be.
    """
    num = len(found.places)
    more = min(rounded_up(num, 1), max(most, num)) - num
    return Combinations(*(np.pad(np.asarray(array), ((0, more), (0, 0))) for array in found))
