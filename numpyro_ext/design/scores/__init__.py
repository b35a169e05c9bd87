"""Scores of possible observations."""
