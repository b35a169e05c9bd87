"""Sequences of events of many people, and predictors of the next event that a network has to beat."""

from .counts import Bigram, KneserNey, OwnBigram, OwnFrequencies, RepeatLast, Uniform, Unigram
from .events import EventSequences, EventSplit
from .factorisation import MatrixFactorisation, matrix_factorisation_objective
from .hidden_markov import HiddenMarkovBaseline, HiddenMarkovFit, fit_hidden_markov
from .mixtures import PersonalMixture
from .numbering import numbered_as
from .plots import plot_error_by_entropy, plot_error_by_history, plot_training
from .predictor import Predictor, SequencePredictor
from .scores import (
    GroupScore,
    SequenceComparison,
    SequenceScores,
    compare_sequences,
    next_item_ranks,
    sequence_scores,
)

__all__ = [
    "Bigram",
    "EventSequences",
    "EventSplit",
    "GroupScore",
    "HiddenMarkovBaseline",
    "HiddenMarkovFit",
    "KneserNey",
    "MatrixFactorisation",
    "OwnBigram",
    "OwnFrequencies",
    "PersonalMixture",
    "Predictor",
    "RepeatLast",
    "SequenceComparison",
    "SequencePredictor",
    "SequenceScores",
    "Uniform",
    "Unigram",
    "compare_sequences",
    "fit_hidden_markov",
    "matrix_factorisation_objective",
    "numbered_as",
    "next_item_ranks",
    "plot_error_by_entropy",
    "plot_error_by_history",
    "plot_training",
    "sequence_scores",
]
