"""Gaussian unknowns, predictors affine in them, one factor for each: the form and how it is read."""

from .form import AffineMap, BlockKinds, Blocks, LatentGaussian, MoreBlocks
from .joined import joined

__all__ = ["AffineMap", "BlockKinds", "Blocks", "LatentGaussian", "MoreBlocks", "joined"]
