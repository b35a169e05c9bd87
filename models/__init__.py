"""The models of this project as plain NumPyro functions: any engine, NumPyro's or ours, runs them."""

from .categorical import (
    discrete_choice,
    multiclass_gp_classification,
    multinomial_regression,
    ordinal_regression,
    plackett_luce,
)
from .comparisons import (
    bradley_terry,
    collaborative_preferences,
    joint_preference_gp,
    preference_factorization,
    preference_gp,
)
from .count_matrices import low_rank_count_field, poisson_factorization, receptive_field_counts
from .event_sequences import collaborative_rnn
from .factor_models import correlated_topic_model, factor_analysis, latent_gaussian_graphical_model
from .gaussian_process import cox_process, gp_classification
from .images import compressed_sensing, poisson_deblurring, wavelet_denoising, wavelet_inpainting
from .item_response import bifactor_pattern, item_response, item_response_records
from .item_response_extensions import items_between_groups, speed_and_accuracy, students_in_schools
from .matrices import (
    binary_factorization,
    gaussian_factorization,
    heteroscedastic_ratings,
    paired_symbols,
    rating_types,
)
from .quantum_tomography import quantum_state, quantum_tomography
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
    "bifactor_pattern",
    "binary_factorization",
    "bradley_terry",
    "collaborative_preferences",
    "collaborative_rnn",
    "compressed_sensing",
    "correlated_topic_model",
    "cox_process",
    "crossed_random_effects",
    "discrete_choice",
    "factor_analysis",
    "gaussian_factorization",
    "gp_classification",
    "heteroscedastic_ratings",
    "item_response",
    "item_response_records",
    "items_between_groups",
    "joint_preference_gp",
    "latent_gaussian_graphical_model",
    "linear_regression",
    "logistic_regression",
    "low_rank_count_field",
    "multiclass_gp_classification",
    "multinomial_regression",
    "negative_binomial_regression",
    "ordinal_regression",
    "paired_symbols",
    "plackett_luce",
    "poisson_deblurring",
    "poisson_factorization",
    "poisson_regression",
    "preference_factorization",
    "preference_gp",
    "probit_regression",
    "quantum_state",
    "quantum_tomography",
    "random_intercepts",
    "rating_types",
    "receptive_field_counts",
    "robust_regression",
    "speed_and_accuracy",
    "students_in_schools",
    "wavelet_denoising",
    "wavelet_inpainting",
]
