"""Inference engines for NumPyro models that read the structure of the model."""

from ._checkout import find_models_of_checkout

find_models_of_checkout()
del find_models_of_checkout
