"""Densities of hyperparameters: points at which they are evaluated, their values elsewhere, and draws from them."""
