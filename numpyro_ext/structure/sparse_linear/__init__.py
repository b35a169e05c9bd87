"""Sparse coefficients seen through a linear operator: the form and how it is read."""

from .form import SparseLinear

__all__ = ["SparseLinear"]
