"""Hyperparameters as one vector, and searches over it."""
