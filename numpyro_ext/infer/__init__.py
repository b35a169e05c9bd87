"""Inference engines: each reads a NumPyro model into a form and runs an algorithm made for it."""

from .bilinear.algorithms.analytic import AnalyticFactors, analytic_matrix_factorization
from .bilinear.batches import fit_batches
from .bilinear.engines.engine import BilinearVG
from .bilinear.engines.hybrid_engine import BilinearEP
from .bilinear.grid_search import GridSearch, grid_search
from .bilinear.recommendation import RankingQuality, Recommendations, ranking_quality, recommend_items
from .bilinear.sampling import CellSampler
from .calibration import Calibration, calibrate
from .collaborative.em import collaborative_em
from .collaborative.fit import CollaborativeFit
from .comparison.compare import compare_engines
from .comparison.recommend import recommend
from .ep import EP
from .exact.kernel import IndependenceMetropolis
from .exact.reparam import PosteriorReparam
from .front.answers.pit import PitHistogram, pit_histogram, predictive_pit
from .front.answers.ranking import RankSummary, expected_ranks, rank_summary, ranking_scores, shortlist
from .gaussian.algorithms.algorithm import Algorithm
from .gaussian.algorithms.fit_info import FitInfo
from .gaussian.algorithms.nodes.quadrature import Quadrature
from .gaussian.algorithms.posterior import GaussianPosterior
from .gaussian.algorithms.values import ExpectationPropagation, Laplace
from .gaussian.cross_validation import CrossValidation, cross_validate
from .gaussian.engine import Engine
from .gaussian.engines.adaptive_quadrature import AdaptiveQuadrature
from .gaussian.engines.inla import INLA
from .gaussian.engines.laplace_approximation import LaplaceApproximation
from .gaussian.predictive_moments import PredictiveMoments, predictive_moments
from .gaussian.variational.engine import VariationalGaussian
from .gaussian.variational.multinomial_probit_bayes import multinomial_probit_bayes
from .gaussian.variational.values import NaturalGradient
from .marginal import marginalize
from .monte_carlo.annealed_importance_sampling import annealed_importance_sampling
from .monte_carlo.smc import SMC
from .rows.expectation_maximisation import variational_em
from .rows.posteriors import LatentGaussianRows, predictive_log_density
from .rows.table import table_rows
from .sparse.mean_field_engine import StructuredMeanField
from .stochastic.engine import ChunkedSVI
from .stochastic.fit import ChunkedFit

__all__ = [
    "EP",
    "INLA",
    "SMC",
    "AdaptiveQuadrature",
    "Algorithm",
    "AnalyticFactors",
    "BilinearEP",
    "BilinearVG",
    "Calibration",
    "CellSampler",
    "ChunkedFit",
    "ChunkedSVI",
    "CollaborativeFit",
    "CrossValidation",
    "Engine",
    "ExpectationPropagation",
    "FitInfo",
    "GaussianPosterior",
    "GridSearch",
    "IndependenceMetropolis",
    "Laplace",
    "LaplaceApproximation",
    "LatentGaussianRows",
    "NaturalGradient",
    "PitHistogram",
    "PosteriorReparam",
    "PredictiveMoments",
    "Quadrature",
    "RankSummary",
    "RankingQuality",
    "Recommendations",
    "StructuredMeanField",
    "VariationalGaussian",
    "analytic_matrix_factorization",
    "annealed_importance_sampling",
    "calibrate",
    "collaborative_em",
    "compare_engines",
    "cross_validate",
    "expected_ranks",
    "fit_batches",
    "grid_search",
    "marginalize",
    "multinomial_probit_bayes",
    "pit_histogram",
    "predictive_log_density",
    "predictive_moments",
    "predictive_pit",
    "rank_summary",
    "ranking_quality",
    "ranking_scores",
    "recommend",
    "recommend_items",
    "shortlist",
    "table_rows",
    "variational_em",
]
