"""Blocks of unknowns that share a few others: coefficients in these, couplings, and factors of the whole."""
