"""Distributions that NumPyro lacks."""

from .categories import (
    AdjacentCategory,
    ContinuationRatio,
    MultinomialProbit,
    OrderedProbit,
    StickBreakingCategorical,
)
from .hidden_markov_tree import HiddenMarkovTree
from .rectified_poisson import RectifiedLinearPoisson, SoftplusPoisson

__all__ = [
    "AdjacentCategory",
    "ContinuationRatio",
    "HiddenMarkovTree",
    "MultinomialProbit",
    "OrderedProbit",
    "RectifiedLinearPoisson",
    "SoftplusPoisson",
    "StickBreakingCategorical",
]
