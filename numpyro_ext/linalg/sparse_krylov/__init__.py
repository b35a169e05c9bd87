"""Sparse precisions that fill up: the Schur complement of their leaves by its products, on the host."""

from .carried import CarriedElimination
from .elimination import Elimination, find_elimination
from .primitive import Estimate, KrylovFactor

__all__ = ["CarriedElimination", "Elimination", "Estimate", "KrylovFactor", "find_elimination"]
