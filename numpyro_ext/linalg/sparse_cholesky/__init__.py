"""Sparse Cholesky factorisation on the host, with solves, draws, the selected inverse and derivatives."""

from .analysis import Analysis, analyse
from .pattern import AnyPattern, CarriedPattern, SparsePattern, multiply
from .primitive import SparseFactor, factorise

__all__ = [
    "Analysis",
    "AnyPattern",
    "CarriedPattern",
    "SparseFactor",
    "SparsePattern",
    "analyse",
    "factorise",
    "multiply",
]
