"""Distributions that NumPyro lacks."""

from .analysis_prior import AnalysisPrior
from .categories import (
    AdjacentCategory,
    ContinuationRatio,
    MultinomialProbit,
    OrderedProbit,
    StickBreakingCategorical,
)
from .categories_by_type import CategoriesByType
from .censored_pairs import CensoredPairs
from .gaussian_markov_random_field import GaussianMarkovRandomField
from .hidden_markov import HiddenMarkov
from .hidden_markov_tree import HiddenMarkovTree
from .linear_categorical import LinearCategorical
from .plackett_luce import PlackettLuce
from .rectified_poisson import RectifiedLinearPoisson, SoftplusPoisson
from .sparse_precisions import (
    GraphPrecision,
    SparsePrecision,
    bspline_basis,
    car,
    difference_precision,
    graph_precision,
    kronecker,
    kronecker_sum,
    leroux,
    matern_precision,
    pedigree_precision,
    phylogeny_precision,
    sparse_matmul,
)

__all__ = [
    "AdjacentCategory",
    "AnalysisPrior",
    "CategoriesByType",
    "CensoredPairs",
    "ContinuationRatio",
    "GaussianMarkovRandomField",
    "GraphPrecision",
    "HiddenMarkov",
    "HiddenMarkovTree",
    "LinearCategorical",
    "MultinomialProbit",
    "OrderedProbit",
    "PlackettLuce",
    "RectifiedLinearPoisson",
    "SoftplusPoisson",
    "SparsePrecision",
    "StickBreakingCategorical",
    "bspline_basis",
    "car",
    "difference_precision",
    "graph_precision",
    "kronecker",
    "kronecker_sum",
    "leroux",
    "matern_precision",
    "pedigree_precision",
    "phylogeny_precision",
    "sparse_matmul",
]
