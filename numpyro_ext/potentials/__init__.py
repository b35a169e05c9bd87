"""Scalar factors ``t(eta)`` of a model: log densities, tilted moments and derivatives, elementwise and in pure JAX."""

from .base import ExpectedLogDensity, LogisticTerms, Potential, TiltedMoments, potential
from .binary import BinomialLogitPotential, LogitPotential, ProbitPotential
from .elementwise import ElementwisePotential, TemperedPotential
from .expectation import expected_log_density, expected_logistic_terms
from .gaussian import GaussianPotential
from .laplace import LaplacePotential
from .logistic_bounds import (
    BohningBound,
    BoundedPotential,
    ExactExpectation,
    JaakkolaBound,
    LogisticBound,
    MinimumBound,
    PiecewiseBound,
    logistic_bound,
)
from .logistic_expectation import expected_log_partition
from .negative_binomial import NegativeBinomialExpPotential, NegativeBinomialLogitPotential
from .normal import TruncatedNormal, erfcx, inverse_mills_ratio, log_ndtr, truncated_normal
from .piecewise import PiecewiseCoefficients, minimax_pieces
from .poisson import PoissonExpPotential, PoissonSoftplusPotential
from .quadrature import gaussian_expectation, tilted_moments
from .rectified_linear_poisson import RectifiedLinearPoissonPotential, rectified_linear_poisson_moments
from .stochastic_volatility import StochasticVolatilityPotential
from .student_t import StudentTPotential

__all__ = [
    "BinomialLogitPotential",
    "BohningBound",
    "BoundedPotential",
    "ElementwisePotential",
    "ExactExpectation",
    "ExpectedLogDensity",
    "GaussianPotential",
    "JaakkolaBound",
    "LaplacePotential",
    "LogisticBound",
    "LogisticTerms",
    "LogitPotential",
    "MinimumBound",
    "NegativeBinomialExpPotential",
    "NegativeBinomialLogitPotential",
    "PiecewiseBound",
    "PiecewiseCoefficients",
    "PoissonExpPotential",
    "PoissonSoftplusPotential",
    "Potential",
    "ProbitPotential",
    "RectifiedLinearPoissonPotential",
    "StochasticVolatilityPotential",
    "StudentTPotential",
    "TemperedPotential",
    "TiltedMoments",
    "TruncatedNormal",
    "erfcx",
    "expected_log_density",
    "expected_log_partition",
    "expected_logistic_terms",
    "gaussian_expectation",
    "inverse_mills_ratio",
    "log_ndtr",
    "logistic_bound",
    "minimax_pieces",
    "potential",
    "rectified_linear_poisson_moments",
    "tilted_moments",
    "truncated_normal",
]
