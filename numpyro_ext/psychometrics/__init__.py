"""What is asked of a fitted test: curves of items and information, as functions of the trait."""

from .curves import (
    category_probabilities,
    expected_score,
    fisher_information,
    marginal_reliability,
    test_information,
)
from .responses import FittedResponse, response_of
from .statistics import ItemFit, PersonFit, TestRetest, item_fit, local_dependence, person_fit, test_retest

__all__ = [
    "FittedResponse",
    "ItemFit",
    "PersonFit",
    "TestRetest",
    "category_probabilities",
    "expected_score",
    "fisher_information",
    "item_fit",
    "local_dependence",
    "marginal_reliability",
    "person_fit",
    "response_of",
    "test_information",
    "test_retest",
]
