"""Inference engines: each reads a NumPyro model into a form and runs an algorithm made for it."""

from .annealed_importance_sampling import annealed_importance_sampling
from .bilinear_batches import fit_batches
from .bilinear_engine import BilinearVG
from .bilinear_prediction import ranking_scores
from .cross_validation import CrossValidation, cross_validate
from .engine import Engine
from .ep import EP
from .gaussian_rows import LatentGaussianRows, predictive_log_density
from .inla import INLA
from .laplace_approximation import LaplaceApproximation
from .parameter_search import GridSearch, grid_search
from .structured_mean_field_engine import StructuredMeanField
from .variational_em import variational_em
from .variational_engine import VariationalGaussian

__all__ = [
    "EP",
    "INLA",
    "BilinearVG",
    "CrossValidation",
    "Engine",
    "GridSearch",
    "LaplaceApproximation",
    "LatentGaussianRows",
    "StructuredMeanField",
    "VariationalGaussian",
    "annealed_importance_sampling",
    "cross_validate",
    "fit_batches",
    "grid_search",
    "predictive_log_density",
    "ranking_scores",
    "variational_em",
]
