"""Adaptive tests: the next item for a person, from what the answers so far tell of the trait."""
