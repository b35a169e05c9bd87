"""Inference engines: each reads a NumPyro model into a form and runs an algorithm made for it."""

from .cross_validation import CrossValidation, cross_validate
from .engine import Engine
from .ep import EP
from .laplace_approximation import LaplaceApproximation
from .variational_engine import VariationalGaussian

__all__ = ["EP", "CrossValidation", "Engine", "LaplaceApproximation", "VariationalGaussian", "cross_validate"]
