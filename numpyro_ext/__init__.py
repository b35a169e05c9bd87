"""Inference engines for NumPyro models that read the structure of the model."""

# ruff: noqa: F403, F405 (the names of the engines are those of infer)
from typing import TYPE_CHECKING, Any

from ._checkout import find_models_of_checkout
from .compilation.versions import warn_of_wrong_sums

if TYPE_CHECKING:
    from .compilation.disk_cache import keep_compiled_programs
    from .infer import *

__version__ = "0.2.0"

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
    "keep_compiled_programs",
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

find_models_of_checkout()
warn_of_wrong_sums()
del find_models_of_checkout, warn_of_wrong_sums


def __getattr__(name: str) -> Any:
    # Engines are imported when they are asked for, so that distributions and potentials stay light.
    if name == "keep_compiled_programs":
        from .compilation.disk_cache import keep_compiled_programs

        return keep_compiled_programs
    if name in __all__:
        from . import infer

        return getattr(infer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
