"""Fits of the field and searches for hyperparameters, with the explanations of their ends."""
