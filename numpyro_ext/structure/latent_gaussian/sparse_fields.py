"""Layout of the sparse precision of all unknowns: of fields of a sparse precision, and of crossed effects that are left
to iterations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...linalg.gaussian.prior import (
    CovariancePrior,
    DiagonalPrior,
    FlatPrior,
    PrecisionPrior,
    PriorBlock,
    SparsePrecisionPrior,
)
from ...linalg.gaussian.sparse_layout import SparseLayout, block_pattern, find_layout
from ...linalg.sparse_cholesky import SparsePattern
from ...linalg.sparse_krylov import find_elimination
from ..errors import ModelStructureError
from ..model.priors import LARGEST_DENSE_FIELD
from ..program.rows.affine_rows import AffineRows
from ..program.rows.state_rows import StateRows
from .prior_columns import PriorColumns

_WIDEST_MAP = 8
"""Unknowns that an element of a site may depend on for its variance to come with those of the rows."""
_WIDEST_BLOCK = 8
"""Correlated unknowns of a prior at most where the rest is left to iterations."""


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
    for name, block in priors.with_patterns().items():
        try:
            patterns.append(block_pattern(block))
        except ValueError as reason:
            raise ModelStructureError(
                f"site '{name}' cannot be in one model with '{sparse[0]}', a field of a sparse precision: {reason}",
                site=name,
            ) from reason
    return _layout(patterns, priors, rows, maps).carried()


def large_rest(
    priors: PriorColumns,
    rows: AffineRows | StateRows,
    blocks: tuple[np.ndarray, np.ndarray],
    num_shared: int | None,
    largest: float,
) -> int:
    """Unknowns of crossed effects that are left together, where these are so many that a dense matrix of them is dear,
    and zero elsewhere.

    :param priors: those of the sites of the field.
    :param rows: predictors.
    :param blocks: independent rows and columns.
    :param num_shared: unknowns of a border, if there is one.
    :param largest: unknowns that may be left; zero if the user asks for products.
    :raises ModelStructureError: if the user asks for products, and the model is not of this kind.
    """
    is_sparse = isinstance(rows, AffineRows) and rows.indices is not None and not rows.is_dense
    wide = [name for name, block in priors.abstract.items() if not _is_narrow(block)]
    if largest <= 0 and (wide or not is_sparse):
        if wide:
            found = f"the prior of site '{wide[0]}' correlates more than {_WIDEST_BLOCK} unknowns"
        else:
            found = "predictors of this model depend on many unknowns each"
        raise ModelStructureError(
            f"space='iterative' is for crossed effects, with independent unknowns or small blocks of them that rows "
            f"pick, and {found}. Leave space out.",
            site=wide[0] if wide else None,
        )
    if wide or not isinstance(rows, AffineRows) or not is_sparse:
        return 0
    left = min(part.shape[1] for part in blocks) if num_shared is None else num_shared
    by_band = rows.num_columns * float(rows.bandwidth + 1) ** 2
    return left if left > largest and (largest <= 0 or by_band > float(largest) ** 3) else 0


def iterative_layout(priors: PriorColumns, rows: AffineRows, maps: Sequence[AffineRows | StateRows]) -> SparseLayout:
    """The layout of prior and rows, with the order in which unknowns are eliminated.

    :param priors: those of the sites of the field.
    :param rows: predictors.
    :param maps: affine sites.
    """
    found = _layout([block_pattern(block) for block in priors.abstract.values()], priors, rows, maps)
    assert isinstance(found.pattern, SparsePattern)  # as it is found
    return found.carried(find_elimination(found.pattern, priors.sites))


def _layout(
    patterns: Sequence[SparsePattern | None],
    priors: PriorColumns,
    rows: AffineRows,
    maps: Sequence[AffineRows | StateRows],
) -> SparseLayout:
    assert rows.indices is not None  # as of sparse rows
    patterns_of_maps = [r.pattern for r in maps if isinstance(r, AffineRows) and r.pattern is not None]
    others = [pattern for pattern in patterns_of_maps if pattern.shape[1] <= _WIDEST_MAP]
    sizes = [size for _, size in priors.sites]
    return find_layout(patterns, sizes, rows.indices.columns, rows.indices.is_entry, others)


def _is_narrow(block: PriorBlock) -> bool:
    if isinstance(block, CovariancePrior):
        return block.covariance.shape[1] <= _WIDEST_BLOCK
    if isinstance(block, PrecisionPrior):
        return block.precision.shape[1] <= _WIDEST_BLOCK
    return isinstance(block, DiagonalPrior | FlatPrior)


def _is_small_and_flat(block: PriorBlock) -> bool:
    return isinstance(block, SparsePrecisionPrior) and block.num_flat > 0 and block.size <= LARGEST_DENSE_FIELD


def describe_layout(layout: SparseLayout) -> list[str]:
    """The sparse precision in words, one line each."""
    pattern, elimination = layout.pattern, layout.elimination
    number = pattern.num_entries if isinstance(pattern, SparsePattern) else int(pattern.pointer[-1])
    lines = [f"sparse precision: {pattern.size} unknowns, {number} entries of a triangle"]
    return lines if elimination is None else [*lines, elimination.describe()]
