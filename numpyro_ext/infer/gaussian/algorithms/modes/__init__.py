"""Laplace's method: steps to the mode of the field, its derivatives, and its distance from the mean."""
