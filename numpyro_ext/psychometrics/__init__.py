"""What is asked of a fitted test: curves of items and information, as functions of the trait."""

from .curves import (
    category_probabilities,
    expected_score,
    fisher_information,
    marginal_reliability,
    test_information,
)
from .responses import FittedResponse, response_of

__all__ = [
    "FittedResponse",
    "category_probabilities",
    "expected_score",
    "fisher_information",
    "marginal_reliability",
    "response_of",
    "test_information",
]
