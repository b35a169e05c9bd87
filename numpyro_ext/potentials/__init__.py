"""Factors ``t(eta)`` of a model, scalar or of a few predictors: log densities, moments, expectations; pure JAX."""

from .base import Potential, potential
from .bounds.log_sum_exp import ExpectedLogSumExp, LogSumExpBound, log_sum_exp_bound
from .bounds.logistic import (
    BohningBound,
    BoundedPotential,
    ExactExpectation,
    JaakkolaBound,
    LogisticBound,
    MinimumBound,
    PiecewiseBound,
    logistic_bound,
)
from .bounds.piecewise import PiecewiseCoefficients, minimax_pieces
from .bounds.super_gaussian import ConvexifiedPenalty, SuperGaussianPotential
from .elementwise import ElementwisePotential, TemperedPotential
from .families.binary import BinomialLogitPotential, LogitPotential, ProbitPotential
from .families.categorical import MultinomialProbitPotential, SoftmaxPotential
from .families.gaussian import GaussianPotential
from .families.laplace import LaplacePotential
from .families.negative_binomial import NegativeBinomialExpPotential, NegativeBinomialLogitPotential
from .families.ordinal import (
    AdjacentCategoryPotential,
    ContinuationRatioPotential,
    CumulativeLogitPotential,
    CumulativeProbitPotential,
)
from .families.poisson import PoissonExpPotential, PoissonSoftplusPotential
from .families.rectified_linear_poisson import RectifiedLinearPoissonPotential, rectified_linear_poisson_moments
from .families.stick_breaking import stick_breaking_labels
from .families.stochastic_volatility import StochasticVolatilityPotential
from .families.student_t import StudentTPotential
from .integrals.bilinear_expectation import (
    ExpectedBilinearLogDensity,
    ProductPredictor,
    expected_bilinear_log_density,
    expected_bilinear_value,
)
from .integrals.expectation import expected_log_density, expected_logistic_terms
from .integrals.exponential_product import log_expected_exp_product, log_expected_exp_product_diagonal, product_moments
from .integrals.logistic_expectation import expected_log_partition
from .integrals.normal import TruncatedNormal, erfcx, inverse_mills_ratio, log_ndtr, truncated_normal
from .integrals.normal_interval import NormalInterval, normal_interval
from .integrals.tilted_moments import gaussian_expectation, tilted_moments
from .moments import ExpectedLogDensity, LogisticTerms, TiltedMoments
from .trees.forest import Forest, SumProduct, log_partition, sum_product, wavelet_forest
from .vector import VectorExpectedLogDensity, VectorPotential

__all__ = [
    "AdjacentCategoryPotential",
    "BinomialLogitPotential",
    "BohningBound",
    "BoundedPotential",
    "ContinuationRatioPotential",
    "ConvexifiedPenalty",
    "CumulativeLogitPotential",
    "CumulativeProbitPotential",
    "ElementwisePotential",
    "ExactExpectation",
    "ExpectedBilinearLogDensity",
    "ExpectedLogDensity",
    "ExpectedLogSumExp",
    "Forest",
    "GaussianPotential",
    "JaakkolaBound",
    "LaplacePotential",
    "LogSumExpBound",
    "LogisticBound",
    "LogisticTerms",
    "LogitPotential",
    "MinimumBound",
    "MultinomialProbitPotential",
    "NegativeBinomialExpPotential",
    "NegativeBinomialLogitPotential",
    "NormalInterval",
    "PiecewiseBound",
    "PiecewiseCoefficients",
    "PoissonExpPotential",
    "PoissonSoftplusPotential",
    "Potential",
    "ProbitPotential",
    "ProductPredictor",
    "RectifiedLinearPoissonPotential",
    "SoftmaxPotential",
    "StochasticVolatilityPotential",
    "StudentTPotential",
    "SumProduct",
    "SuperGaussianPotential",
    "TemperedPotential",
    "TiltedMoments",
    "TruncatedNormal",
    "VectorExpectedLogDensity",
    "VectorPotential",
    "erfcx",
    "expected_bilinear_log_density",
    "expected_bilinear_value",
    "expected_log_density",
    "expected_log_partition",
    "expected_logistic_terms",
    "gaussian_expectation",
    "inverse_mills_ratio",
    "log_expected_exp_product",
    "log_expected_exp_product_diagonal",
    "log_ndtr",
    "log_partition",
    "log_sum_exp_bound",
    "logistic_bound",
    "minimax_pieces",
    "normal_interval",
    "potential",
    "product_moments",
    "rectified_linear_poisson_moments",
    "stick_breaking_labels",
    "sum_product",
    "tilted_moments",
    "truncated_normal",
    "wavelet_forest",
]
