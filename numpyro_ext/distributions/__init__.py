"""Distributions that NumPyro lacks."""

from .analysis_prior import AnalysisPrior
from .categories import (
    AdjacentCategory,
    ContinuationRatio,
    MultinomialProbit,
    OrderedProbit,
    StickBreakingCategorical,
)
from .hidden_markov_tree import HiddenMarkovTree
from .plackett_luce import PlackettLuce
from .rectified_poisson import RectifiedLinearPoisson, SoftplusPoisson

__all__ = [
    "AdjacentCategory",
    "AnalysisPrior",
    "ContinuationRatio",
    "HiddenMarkovTree",
    "MultinomialProbit",
    "OrderedProbit",
    "PlackettLuce",
    "RectifiedLinearPoisson",
    "SoftplusPoisson",
    "StickBreakingCategorical",
]
