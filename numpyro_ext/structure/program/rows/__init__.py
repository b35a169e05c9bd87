"""Affine values of a program as rows of a design, or as an operator."""
