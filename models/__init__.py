"""The models of this project as plain NumPyro functions: any engine, NumPyro's or ours, runs them."""

from .gaussian_process import cox_process, gp_classification
from .random_effects import crossed_random_effects, random_intercepts
from .regression import (
    linear_regression,
    logistic_regression,
    negative_binomial_regression,
    poisson_regression,
    probit_regression,
    robust_regression,
)

__all__ = [
    "cox_process",
    "crossed_random_effects",
    "gp_classification",
    "linear_regression",
    "logistic_regression",
    "negative_binomial_regression",
    "poisson_regression",
    "probit_regression",
    "random_intercepts",
    "robust_regression",
]
