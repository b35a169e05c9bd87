"""Quantum states and measurements on arrays, for tomography; knows no engine."""

from .estimators import linear_inversion, maximum_likelihood
from .measurements import (
    axis_measurements,
    born_probabilities,
    checked_measurements,
    imperfect,
    mutually_unbiased_bases,
    pauli_bases,
    separable_bases,
    standard_separable_bases,
    symmetric_informationally_complete,
)
from .states import bloch_vector, checked_state, density_matrix, fidelity, haar_unitary, uniform_bloch_vector

__all__ = [
    "axis_measurements",
    "bloch_vector",
    "born_probabilities",
    "checked_measurements",
    "checked_state",
    "density_matrix",
    "fidelity",
    "haar_unitary",
    "imperfect",
    "linear_inversion",
    "maximum_likelihood",
    "mutually_unbiased_bases",
    "pauli_bases",
    "separable_bases",
    "standard_separable_bases",
    "symmetric_informationally_complete",
    "uniform_bloch_vector",
]
