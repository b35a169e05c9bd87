"""Sparse precisions that fill up: the Schur complement of their leaves by its products, on the host."""

from .carried import CarriedElimination, CarriedPattern
from .elimination import Elimination, find_elimination
from .primitive import Estimate, KrylovFactor

__all__ = ["CarriedElimination", "CarriedPattern", "Elimination", "Estimate", "KrylovFactor", "find_elimination"]
