"""Distributions that NumPyro lacks."""

from .categories import (
    AdjacentCategory,
    ContinuationRatio,
    MultinomialProbit,
    OrderedProbit,
    StickBreakingCategorical,
)
from .rectified_poisson import RectifiedLinearPoisson, SoftplusPoisson

__all__ = [
    "AdjacentCategory",
    "ContinuationRatio",
    "MultinomialProbit",
    "OrderedProbit",
    "RectifiedLinearPoisson",
    "SoftplusPoisson",
    "StickBreakingCategorical",
]
