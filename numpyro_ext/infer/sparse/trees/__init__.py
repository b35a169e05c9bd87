"""Expectation propagation on sparse trees, and averages over bases."""
