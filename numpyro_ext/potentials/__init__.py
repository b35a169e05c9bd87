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
from .bounds.super_gaussian import ConvexifiedPenalty, SuperGaussianPotential
from .elementwise import ElementwisePotential, TemperedPotential
from .families.binary import ComplementaryLogLogPotential, LogitPotential, ProbitPotential
from .families.categorical import MultinomialLogitPotential, MultinomialProbitPotential, SoftmaxPotential
from .families.gaussian import GaussianPotential
from .families.half_line import HalfLinePotential
from .families.laplace import LaplacePotential
from .families.location import AsymmetricLaplacePotential, LogisticPotential, SoftLaplacePotential
from .families.log_normal import LogNormalPotential
from .families.logit_counts import (
    BinomialLogitPotential,
    NegativeBinomialExpPotential,
    NegativeBinomialLogitPotential,
)
from .families.ordinal import (
    AdjacentCategoryPotential,
    ContinuationRatioPotential,
    CumulativeLogitPotential,
    CumulativeProbitPotential,
)
from .families.plackett_luce import PlackettLucePotential, ranking_places
from .families.poisson import PoissonExpPotential, PoissonSoftplusPotential
from .families.positive import GammaExpPotential, WeibullExpPotential
from .families.rectified_linear_poisson import RectifiedLinearPoissonPotential
from .families.stick_breaking import stick_breaking_labels
from .families.stochastic_volatility import StochasticVolatilityPotential
from .families.student_t import StudentTPotential
from .families.zero_inflated import ZeroInflatedPotential
from .integrals.bilinear_expectation import (
    ExpectedBilinearLogDensity,
    ProductPredictor,
    expected_bilinear_log_density,
)
from .integrals.expectation import expected_log_density
from .integrals.tilted_moments import gaussian_expectation, tilted_moments
from .moments import ExpectedLogDensity, LogisticTerms, TiltedMoments
from .pairs import PairPotential
from .trees.forest import Forest, SumProduct, log_partition, sum_product, wavelet_forest
from .vector import VectorExpectedLogDensity, VectorPotential, VectorTiltedMoments

# Parts of the numerics, which release 0.1 showed here; they are at home in their modules.
# isort: split
from .bounds.piecewise import PiecewiseCoefficients, minimax_pieces  # noqa: F401
from .families.rectified_linear_poisson import rectified_linear_poisson_moments  # noqa: F401
from .integrals.bilinear_expectation import expected_bilinear_value  # noqa: F401
from .integrals.expectation import expected_logistic_terms  # noqa: F401
from .integrals.exponential_product import (  # noqa: F401
    log_expected_exp_product,
    log_expected_exp_product_diagonal,
    product_moments,
)
from .integrals.logistic_expectation import expected_log_partition  # noqa: F401
from .integrals.normal import TruncatedNormal, erfcx, inverse_mills_ratio, log_ndtr, truncated_normal  # noqa: F401
from .integrals.normal_interval import NormalInterval, normal_interval  # noqa: F401

__all__ = [
    "AdjacentCategoryPotential",
    "AsymmetricLaplacePotential",
    "BinomialLogitPotential",
    "BohningBound",
    "BoundedPotential",
    "ComplementaryLogLogPotential",
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
    "GammaExpPotential",
    "GaussianPotential",
    "JaakkolaBound",
    "HalfLinePotential",
    "LaplacePotential",
    "LogSumExpBound",
    "LogisticBound",
    "LogisticPotential",
    "LogisticTerms",
    "LogNormalPotential",
    "LogitPotential",
    "MinimumBound",
    "MultinomialLogitPotential",
    "MultinomialProbitPotential",
    "NegativeBinomialExpPotential",
    "NegativeBinomialLogitPotential",
    "PairPotential",
    "PiecewiseBound",
    "PlackettLucePotential",
    "PoissonExpPotential",
    "PoissonSoftplusPotential",
    "Potential",
    "ProbitPotential",
    "ProductPredictor",
    "RectifiedLinearPoissonPotential",
    "SoftLaplacePotential",
    "SoftmaxPotential",
    "StochasticVolatilityPotential",
    "StudentTPotential",
    "SumProduct",
    "SuperGaussianPotential",
    "TemperedPotential",
    "TiltedMoments",
    "VectorExpectedLogDensity",
    "VectorPotential",
    "VectorTiltedMoments",
    "WeibullExpPotential",
    "ZeroInflatedPotential",
    "expected_bilinear_log_density",
    "expected_log_density",
    "gaussian_expectation",
    "log_partition",
    "log_sum_exp_bound",
    "logistic_bound",
    "potential",
    "ranking_places",
    "stick_breaking_labels",
    "sum_product",
    "tilted_moments",
    "wavelet_forest",
]
