"""Integrals of factors of several predictors: over the plane, over differences, on a lattice around the mode."""
