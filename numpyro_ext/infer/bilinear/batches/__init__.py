"""Bilinear models fitted to batches of rows or columns, for data that do not fit in the memory of one machine."""

from .fit import fit_batches

__all__ = ["fit_batches"]
