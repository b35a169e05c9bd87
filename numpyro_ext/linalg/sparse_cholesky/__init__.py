"""Sparse Cholesky factorisation on the host, with solves, draws, the selected inverse and derivatives."""

from .analysis import Analysis, analyse
from .pattern import SparsePattern
from .primitive import SparseFactor, factorise, multiply

__all__ = ["Analysis", "SparseFactor", "SparsePattern", "analyse", "factorise", "multiply"]
