"""Factors ``t(eta)`` of a model, scalar or of a few predictors: log densities, moments, expectations; pure JAX.

Shown are the protocols, the likelihoods most asked for, and what is computed of them. Others are at home in
``families`` (one likelihood a file), ``bounds``, ``integrals`` and ``trees``.
"""

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
from .integrals.tilted_moments import gaussian_expectation, tilted_moments
from .pairs import PairPotential
from .trees.forest import Forest, sum_product, wavelet_forest
from .vector import VectorPotential

# At home in their modules, and shown here by earlier releases.
# isort: split
from .bounds.log_sum_exp import ExpectedLogSumExp, LogSumExpBound  # noqa: F401
from .bounds.logistic import (  # noqa: F401
    BohningBound,
    ExactExpectation,
    JaakkolaBound,
    LogisticBound,
    MinimumBound,
    PiecewiseBound,
)
from .bounds.piecewise import PiecewiseCoefficients, minimax_pieces  # noqa: F401
from .bounds.super_gaussian import ConvexifiedPenalty, SuperGaussianPotential  # noqa: F401
from .elementwise import TemperedPotential  # noqa: F401
from .families.binary import ComplementaryLogLogPotential  # noqa: F401
from .families.categorical import MultinomialLogitPotential, MultinomialProbitPotential  # noqa: F401
from .families.half_line import HalfLinePotential  # noqa: F401
from .families.location import AsymmetricLaplacePotential, LogisticPotential, SoftLaplacePotential  # noqa: F401
from .families.log_normal import LogNormalPotential  # noqa: F401
from .families.logit_counts import NegativeBinomialLogitPotential  # noqa: F401
from .families.ordinal import (  # noqa: F401
    AdjacentCategoryPotential,
    ContinuationRatioPotential,
    CumulativeProbitPotential,
)
from .families.plackett_luce import PlackettLucePotential, ranking_places  # noqa: F401
from .families.poisson import PoissonSoftplusPotential  # noqa: F401
from .families.positive import GammaExpPotential, WeibullExpPotential  # noqa: F401
from .families.rectified_linear_poisson import rectified_linear_poisson_moments  # noqa: F401
from .families.stick_breaking import stick_breaking_labels  # noqa: F401
from .families.stochastic_volatility import StochasticVolatilityPotential  # noqa: F401
from .families.zero_inflated import ZeroInflatedPotential  # noqa: F401
from .integrals.bilinear_expectation import (  # noqa: F401
    ExpectedBilinearLogDensity,
    ProductPredictor,
    expected_bilinear_log_density,
    expected_bilinear_value,
)
from .integrals.expectation import expected_logistic_terms  # noqa: F401
from .integrals.exponential_product import (  # noqa: F401
    log_expected_exp_product,
    log_expected_exp_product_diagonal,
    product_moments,
)
from .integrals.logistic_expectation import expected_log_partition  # noqa: F401
from .integrals.normal import TruncatedNormal, erfcx, inverse_mills_ratio, log_ndtr, truncated_normal  # noqa: F401
from .integrals.normal_interval import NormalInterval, normal_interval  # noqa: F401
from .moments import ExpectedLogDensity, LogisticTerms, TiltedMoments  # noqa: F401
from .trees.forest import SumProduct, log_partition  # noqa: F401
from .vector import VectorExpectedLogDensity, VectorTiltedMoments  # noqa: F401

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
