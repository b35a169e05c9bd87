"""Questions to a fitted test: curves of items and information, as functions of the trait."""

from .adaptive.one_test import AdaptiveTest
from .adaptive.simulation import exposure_rates, simulate_tests
from .curves import (
    category_probabilities,
    expected_score,
    fisher_information,
    marginal_reliability,
    test_information,
)
from .dimension import (
    ChanceLevels,
    bic,
    chance_levels,
    exponentiated_log_likelihood,
    fraction_correct,
    smallest_sufficient_dimension,
)
from .plots import plot_curves, plot_information, plot_person_item_map
from .responses import FittedResponse, response_of
from .rotation import CanonicalCorrelations, Rotation, canonical_correlations, rotate
from .statistics import ItemFit, PersonFit, TestRetest, item_fit, local_dependence, person_fit, test_retest

__all__ = [
    "AdaptiveTest",
    "CanonicalCorrelations",
    "ChanceLevels",
    "FittedResponse",
    "ItemFit",
    "PersonFit",
    "Rotation",
    "TestRetest",
    "bic",
    "canonical_correlations",
    "category_probabilities",
    "chance_levels",
    "expected_score",
    "exponentiated_log_likelihood",
    "exposure_rates",
    "fisher_information",
    "fraction_correct",
    "item_fit",
    "local_dependence",
    "marginal_reliability",
    "person_fit",
    "plot_curves",
    "plot_information",
    "plot_person_item_map",
    "response_of",
    "rotate",
    "simulate_tests",
    "smallest_sufficient_dimension",
    "test_information",
    "test_retest",
]
