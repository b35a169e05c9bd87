"""Indices that are looked up in the data when a model is read as latent Gaussian, and stand beside it in a form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...linalg.gaussian.sparse_layout import SparseLayout
from ..program.rows.affine_rows import RowIndices
from .border import BorderIndices
from .form import BlockKinds, MoreBlocks
from .touched import TouchedIndices


class LookedUp(NamedTuple):
    """Indices that were looked up in the data: arrays beside it, so that other indices run the same programs."""

    rows: RowIndices | None
    maps: dict[str, RowIndices | None]
    blocks: tuple[np.ndarray, np.ndarray]
    border: BorderIndices | None
    touched: TouchedIndices | None
    layout: SparseLayout | None
    kinds: BlockKinds | MoreBlocks | None = None
    rows_by_column: np.ndarray | None = None
    """Rows of each block in the places of their columns, ``(num_blocks, columns)``, where an engine has found these."""

    @property
    def placed_blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of each block, the rows in the places of their columns where these are known."""
        return self.blocks if self.rows_by_column is None else (self.rows_by_column, self.blocks[1])
