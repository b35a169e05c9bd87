"""Choosing what to measure: what each possible observation would tell, and loops that learn by asking."""

from .newcomers import cold_start
from .optimise import OptimisedDesign, optimise_design
from .outcomes.committee import committee_information, nested_information
from .outcomes.draws import PosteriorDraws, draws_of
from .plots import plot_information, plot_learning_curves, plot_queries
from .protocols import Phase, compare_acquisitions
from .scores.frequencies import empirical_entropy
from .scores.pointwise import (
    committee_divergence,
    expected_information_gain,
    gini,
    least_confidence,
    margin,
    maximum_information,
    predictive_entropy,
    random_scores,
    variation_ratio,
    vote_entropy,
)
from .scores.preferences import expected_best_utility
from .scores.risk import expected_risk, site_entropy_reduction
from .scores.transductive import expected_variance_reduction, mutual_information
from .selection.batch_selection import select_batch
from .selection.batches import Batch
from .selection.classical import OptimalDesign, design_criterion, design_scores, optimal_design
from .selection.linear import linear_information_gain, select_rows
from .selection.single import Candidate, select
from .sequential import SequentialDesign

__all__ = [
    "Batch",
    "Candidate",
    "OptimalDesign",
    "OptimisedDesign",
    "Phase",
    "PosteriorDraws",
    "SequentialDesign",
    "cold_start",
    "committee_divergence",
    "committee_information",
    "compare_acquisitions",
    "design_criterion",
    "design_scores",
    "draws_of",
    "empirical_entropy",
    "expected_best_utility",
    "expected_information_gain",
    "expected_risk",
    "expected_variance_reduction",
    "gini",
    "least_confidence",
    "linear_information_gain",
    "margin",
    "maximum_information",
    "mutual_information",
    "nested_information",
    "optimal_design",
    "optimise_design",
    "plot_information",
    "plot_learning_curves",
    "plot_queries",
    "predictive_entropy",
    "random_scores",
    "select",
    "select_batch",
    "select_rows",
    "site_entropy_reduction",
    "variation_ratio",
    "vote_entropy",
]
