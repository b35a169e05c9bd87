"""Choosing what to measure: what each possible observation would tell, and loops that learn by asking."""

from .committee import committee_information, nested_information
from .draws import PosteriorDraws, draws_of
from .scores import (
    committee_divergence,
    expected_information_gain,
    gini,
    least_confidence,
    margin,
    predictive_entropy,
    random_scores,
    variation_ratio,
    vote_entropy,
)
from .selection import Candidate, select
from .sequential import SequentialDesign

__all__ = [
    "Candidate",
    "PosteriorDraws",
    "SequentialDesign",
    "committee_divergence",
    "committee_information",
    "draws_of",
    "expected_information_gain",
    "gini",
    "least_confidence",
    "margin",
    "nested_information",
    "predictive_entropy",
    "random_scores",
    "select",
    "variation_ratio",
    "vote_entropy",
]
