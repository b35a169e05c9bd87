"""Cells of a binary matrix that are drawn with known probabilities, and fits to these."""

from .cells import CellSampler, Scheme
from .fit import fit_sampled

__all__ = ["CellSampler", "Scheme", "fit_sampled"]
