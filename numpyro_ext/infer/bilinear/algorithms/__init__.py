"""Algorithms on bilinear forms, as functions of arrays."""
