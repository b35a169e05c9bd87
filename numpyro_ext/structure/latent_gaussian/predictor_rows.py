"""Rows of the predictors of a form: those of a state space where there is one, and of any affine values elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import ModelStructureError
from ..program.degrees import Degrees
from ..program.questions import Questions
from ..program.rows.affine_rows import AffineRows, Parts
from ..program.rows.state_rows import NoStateSpace, StateRows, find_time_blocks
from .costs import LayoutCosts

LARGEST_DENSE = 50_000_000
"""Elements of the largest matrix that may stand for a scan without a state space."""


def predictor_rows(
    questions: Questions,
    degrees: Degrees,
    field: Mapping[str, tuple[int, int]],
    parts: Parts,
    together: np.ndarray,
    costs: LayoutCosts,
) -> AffineRows | StateRows:
    """Rows of the predictors.

    :param field: for each site its input of the program, and its size.
    :param parts: affine values, and the elements of them that are predictors.
    :param together: number of the independent block of the prior that each unknown belongs to.
    :raises ModelStructureError: for a scan without a state space, of too many predictors and unknowns for a matrix.
    """
    sizes = {"block_size": costs.time_block, "fewest_blocks": costs.time_blocks}
    try:
        blocks = find_time_blocks(questions, degrees, field, parts, together, **sizes)
    except NoStateSpace as reason:
        num_rows, num_columns = sum(len(rows) for _, rows in parts), sum(size for _, size in field.values())
        if num_rows * num_columns > LARGEST_DENSE:
            raise ModelStructureError(
                f"a scan of many steps needs a state space, and {reason}. This model has {num_rows} predictors of "
                f"{num_columns} unknowns, too many for a matrix: let each observation see one step alone "
                "(hand what it needs of earlier ones on in the carry), or use fewer steps."
            ) from reason
        blocks = None
    if blocks is None:
        return AffineRows(questions, field, parts, costs.rows)
    return StateRows.build(questions, blocks, parts)
