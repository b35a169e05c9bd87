"""Scalar factors ``t(eta)`` of a model: log densities, tilted moments and derivatives, elementwise and in pure JAX."""

from .base import ExpectedLogDensity, LogisticTerms, Potential, TiltedMoments, potential
from .binary import BinomialLogitPotential, LogitPotential, ProbitPotential
from .elementwise import ElementwisePotential, TemperedPotential
from .expectation import expected_log_density
from .gaussian import GaussianPotential
from .laplace import LaplacePotential
from .negative_binomial import NegativeBinomialExpPotential, NegativeBinomialLogitPotential
from .normal import TruncatedNormal, erfcx, inverse_mills_ratio, log_ndtr, truncated_normal
from .poisson import PoissonExpPotential, PoissonSoftplusPotential
from .quadrature import gaussian_expectation, tilted_moments
from .rectified_linear_poisson import RectifiedLinearPoissonPotential, rectified_linear_poisson_moments
from .student_t import StudentTPotential

__all__ = [
    "BinomialLogitPotential",
    "ElementwisePotential",
    "ExpectedLogDensity",
    "GaussianPotential",
    "LaplacePotential",
    "LogisticTerms",
    "LogitPotential",
    "NegativeBinomialExpPotential",
    "NegativeBinomialLogitPotential",
    "PoissonExpPotential",
    "PoissonSoftplusPotential",
    "Potential",
    "ProbitPotential",
    "RectifiedLinearPoissonPotential",
    "StudentTPotential",
    "TemperedPotential",
    "TiltedMoments",
    "TruncatedNormal",
    "erfcx",
    "expected_log_density",
    "gaussian_expectation",
    "inverse_mills_ratio",
    "log_ndtr",
    "potential",
    "rectified_linear_poisson_moments",
    "tilted_moments",
    "truncated_normal",
]
