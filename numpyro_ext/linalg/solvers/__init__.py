"""Moments of a Gaussian whose precision is an operator."""
