"""Laplace's method integrated over the hyperparameters."""
