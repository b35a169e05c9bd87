"""Forests of discrete states, and mixtures on them."""
