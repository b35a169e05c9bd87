"""Bounds in closed form that stand in for a Gaussian expectation."""
