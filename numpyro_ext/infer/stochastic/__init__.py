"""Stochastic variational inference over the rows of a plate, and over chunks of sequences."""
