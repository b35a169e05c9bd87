"""Layout of the sparse precision of all unknowns, where the prior of one site is a sparse precision."""

from __future__ import annotations

from collections.abc import Sequence

from ...linalg.gaussian.prior import PriorBlock, SparsePrecisionPrior
from ...linalg.gaussian.spaces.sparse_space import block_pattern
from ...linalg.gaussian.sparse_layout import SparseLayout, find_layout
from ..errors import ModelStructureError
from ..model.priors import LARGEST_DENSE_FIELD
from ..program.rows.affine_rows import AffineRows
from ..program.rows.state_rows import StateRows
from .prior_columns import PriorColumns

__all__ = ["sparse_layout"]

_WIDEST_MAP = 8
"""Unknowns that an element of a site may depend on for its variance to come with those of the rows."""


def sparse_layout(
    priors: PriorColumns, rows: AffineRows | StateRows, maps: Sequence[AffineRows | StateRows]
) -> SparseLayout | None:
    """The layout of prior and rows together; none where predictors see much of small flat fields, which are dense.

    :param priors: those of the sites of the field.
    :param rows: predictors.
    :param maps: affine sites.
    :raises ModelStructureError: if predictors see too many unknowns, or a site has a prior that is not sparse.
    """
    blocks = priors.abstract
    sparse = [name for name, block in blocks.items() if isinstance(block, SparsePrecisionPrior)]
    if not isinstance(rows, AffineRows) or rows.indices is None:
        if isinstance(rows, AffineRows) and all(_is_small_and_flat(blocks[name]) for name in sparse):
            return None
        raise ModelStructureError(
            f"site '{sparse[0]}' is a field of a sparse precision, and predictors depend on so many of its "
            "unknowns that nothing sparse is left (sums over the field, matrix products with it, scans). Let each "
            "observation see a few of them (an index, a sparse basis), take a field of up to "
            f"{LARGEST_DENSE_FIELD} unknowns, or use NUTS.",
            site=sparse[0],
        )
    patterns = []
    for name, block in blocks.items():
        try:
            patterns.append(block_pattern(block))
        except ValueError as reason:
            raise ModelStructureError(
                f"site '{name}' cannot be in one model with '{sparse[0]}', a field of a sparse precision: {reason}",
                site=name,
            ) from reason
    patterns_of_maps = [r.pattern for r in maps if isinstance(r, AffineRows) and r.pattern is not None]
    others = [pattern for pattern in patterns_of_maps if pattern.shape[1] <= _WIDEST_MAP]
    sizes = [size for _, size in priors.sites]
    return find_layout(patterns, sizes, rows.indices.columns, rows.indices.is_entry, others)


def _is_small_and_flat(block: PriorBlock) -> bool:
    return isinstance(block, SparsePrecisionPrior) and block.num_flat > 0 and block.size <= LARGEST_DENSE_FIELD
