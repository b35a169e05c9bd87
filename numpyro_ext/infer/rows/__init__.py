"""Expectation maximisation for tables of rows, on arrays."""
