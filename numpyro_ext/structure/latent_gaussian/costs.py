"""Sizes and operations at which one layout of a form is preferred to another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..program.rows.costs import ROW_COSTS, RowCosts


@dataclass(frozen=True)
class LayoutCosts:
    """Thresholds by which a reading chooses the layout of its form. They change what answers cost, never the answers.

    :param float border: operations below which a border gains nothing.
    :param float held_border: the same where sites are held and gradients are taken, of ten times as many operations.
    :param float touched: numbers of whole blocks below which it gains nothing to keep what rows touch of them.
    :param float touched_gain: factor by which what rows touch must be cheaper than whole blocks.
    :param float bucket: multiplications for which one more size of blocks is not worth its time to compile.
    :param int large_site: elements of a site from which its posterior is computed for those that are asked for, in
        blocks touched in part.
    :param int time_block: unknowns of a block of a state space: with fewer, the steps of the loops over blocks cost
        more than the arithmetic in them.
    :param int time_blocks: blocks below which a series is no state space.
    :param float largest_rest: unknowns that are left together, once those in small blocks are eliminated, from which on
        they are no dense matrix but known by products; zero asks for it, and infinity never does. Log determinants
        and variances are then estimates, of which few algorithms know.
    :param float large_rest: unknowns that are left together in a dense matrix, from which on it is told beforehand what
        that takes.
    :param RowCosts rows: by which the rows of the design are found.
    """

    border: float = 1e6
    held_border: float = 3e3
    touched: float = 1e6
    touched_gain: float = 4.0
    bucket: float = 1e6
    large_site: int = 100_000
    time_block: int = 32
    time_blocks: int = 8
    largest_rest: float = math.inf
    large_rest: float = 6000.0
    rows: RowCosts = ROW_COSTS


COSTS = LayoutCosts()
"""Thresholds of all engines."""
