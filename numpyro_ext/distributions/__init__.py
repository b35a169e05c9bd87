"""Distributions that NumPyro lacks."""

from .rectified_poisson import RectifiedLinearPoisson, SoftplusPoisson

__all__ = ["RectifiedLinearPoisson", "SoftplusPoisson"]
