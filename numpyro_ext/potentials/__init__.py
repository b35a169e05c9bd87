"""Factors ``t(eta)`` of a model, scalar or of a few predictors: log densities, moments, expectations; pure JAX.

Shown are the protocols, the likelihoods most asked for, and what is computed of them. Others are at home in
``families`` (one likelihood a file), ``bounds``, ``integrals`` and ``trees``.
"""

import warnings
from importlib import import_module
from typing import Any

from .base import Potential, potential
from .bounds.log_sum_exp import log_sum_exp_bound
from .bounds.logistic import BoundedPotential, logistic_bound
from .elementwise import ElementwisePotential
from .families.binary import LogitPotential, ProbitPotential
from .families.categorical import SoftmaxPotential
from .families.gaussian import GaussianPotential
from .families.laplace import LaplacePotential
from .families.logit_counts import BinomialLogitPotential, NegativeBinomialExpPotential
from .families.ordinal import CumulativeLogitPotential
from .families.poisson import PoissonExpPotential
from .families.rectified_linear_poisson import RectifiedLinearPoissonPotential
from .families.student_t import StudentTPotential
from .integrals.expectation import expected_log_density
from .integrals.tilted.tilted_moments import gaussian_expectation, tilted_moments
from .pairs import PairPotential
from .trees.forest import Forest, sum_product, wavelet_forest
from .vector import VectorPotential

__all__ = [
    "BinomialLogitPotential",
    "BoundedPotential",
    "CumulativeLogitPotential",
    "ElementwisePotential",
    "expected_log_density",
    "Forest",
    "gaussian_expectation",
    "GaussianPotential",
    "LaplacePotential",
    "log_sum_exp_bound",
    "logistic_bound",
    "LogitPotential",
    "NegativeBinomialExpPotential",
    "PairPotential",
    "PoissonExpPotential",
    "Potential",
    "potential",
    "ProbitPotential",
    "RectifiedLinearPoissonPotential",
    "SoftmaxPotential",
    "StudentTPotential",
    "sum_product",
    "tilted_moments",
    "VectorPotential",
    "wavelet_forest",
]

# Names that earlier releases showed here, and the module of each, from which they are imported now.
_MOVED = {
    "ExpectedLogSumExp": "bounds.log_sum_exp",
    "LogSumExpBound": "bounds.log_sum_exp",
    "BohningBound": "bounds.logistic",
    "ExactExpectation": "bounds.logistic",
    "JaakkolaBound": "bounds.logistic",
    "LogisticBound": "bounds.logistic",
    "MinimumBound": "bounds.logistic",
    "PiecewiseBound": "bounds.logistic",
    "PiecewiseCoefficients": "bounds.piecewise",
    "minimax_pieces": "bounds.piecewise",
    "ConvexifiedPenalty": "bounds.super_gaussian",
    "SuperGaussianPotential": "bounds.super_gaussian",
    "TemperedPotential": "elementwise",
    "ComplementaryLogLogPotential": "families.binary",
    "MultinomialLogitPotential": "families.categorical",
    "MultinomialProbitPotential": "families.categorical",
    "HalfLinePotential": "families.half_line",
    "AsymmetricLaplacePotential": "families.location",
    "LogisticPotential": "families.location",
    "SoftLaplacePotential": "families.location",
    "LogNormalPotential": "families.log_normal",
    "NegativeBinomialLogitPotential": "families.logit_counts",
    "AdjacentCategoryPotential": "families.ordinal",
    "ContinuationRatioPotential": "families.ordinal",
    "CumulativeProbitPotential": "families.ordinal",
    "PlackettLucePotential": "families.plackett_luce",
    "ranking_places": "families.plackett_luce",
    "PoissonSoftplusPotential": "families.poisson",
    "GammaExpPotential": "families.positive",
    "WeibullExpPotential": "families.positive",
    "rectified_linear_poisson_moments": "families.rectified_linear_poisson",
    "stick_breaking_labels": "families.stick_breaking",
    "StochasticVolatilityPotential": "families.stochastic_volatility",
    "ZeroInflatedPotential": "families.zero_inflated",
    "ExpectedBilinearLogDensity": "integrals.products.bilinear_expectation",
    "ProductPredictor": "integrals.products.bilinear_expectation",
    "expected_bilinear_log_density": "integrals.products.bilinear_expectation",
    "expected_bilinear_value": "integrals.products.bilinear_expectation",
    "expected_logistic_terms": "integrals.expectation",
    "log_expected_exp_product": "integrals.products.exponential_product",
    "log_expected_exp_product_diagonal": "integrals.products.exponential_product",
    "product_moments": "integrals.products.exponential_product",
    "expected_log_partition": "integrals.logistic_expectation",
    "TruncatedNormal": "integrals.normal",
    "erfcx": "integrals.normal",
    "inverse_mills_ratio": "integrals.normal",
    "log_ndtr": "integrals.normal",
    "truncated_normal": "integrals.normal",
    "NormalInterval": "integrals.normal_interval",
    "normal_interval": "integrals.normal_interval",
    "ExpectedLogDensity": "moments",
    "LogisticTerms": "moments",
    "TiltedMoments": "moments",
    "SumProduct": "trees.forest",
    "log_partition": "trees.forest",
    "VectorExpectedLogDensity": "vector",
    "VectorTiltedMoments": "vector",
}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"{__name__}.{_MOVED[name]}"
    warnings.warn(
        f"Write `from {home} import {name}`: {__name__} shows it for one more minor version.",
        FutureWarning,
        stacklevel=2,
    )
    return getattr(import_module(home), name)
