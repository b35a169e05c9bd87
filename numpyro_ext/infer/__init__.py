"""Inference engines: each reads a NumPyro model into a form and runs an algorithm made for it."""

from .cross_validation import CrossValidation, cross_validate
from .engine import Engine
from .ep import EP
from .laplace_approximation import LaplaceApproximation

__all__ = ["EP", "CrossValidation", "Engine", "LaplaceApproximation", "cross_validate"]
