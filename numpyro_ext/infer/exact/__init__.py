"""Exact draws in the coordinates of an approximation, and how far this was from them."""
