"""Vectors of the two sides: which unknowns make them, and which of them each cell touches."""
