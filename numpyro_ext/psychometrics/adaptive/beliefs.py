"""Knowledge of the traits of people who take a test: the functions that every representation of it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ...compilation.pytree import PyTree
from .bank import Floats, ItemBank

At = Literal["mean", "draws"]
Ints = NDArray[np.int64]


class Beliefs(Protocol):
    """Distribution of the traits of ``N`` people given their answers, and what it says of the items of a bank.

    A *state* holds the answers so far, a *posterior* is what follows from it. Both have one row for each person and are
    opaque to the caller.
    """

    bank: ItemBank

    def prior_state(self, num_people: int) -> Any:
        """State before the first answer."""

    def updated(self, state: Any, items: Ints, values: Ints) -> Any:
        """State after one more answer of each person; items below zero stand for none."""

    def posterior(self, state: Any) -> Any:
        """Distribution of the traits."""

    def moments(self, posterior: PyTree) -> tuple[Floats, Floats]:
        """Mean, shape ``(N, D)``, and covariance, shape ``(N, D, D)``, of the traits."""

    def predictive(self, posterior: PyTree, items: Ints | None = None) -> Floats:
        """Probability of each answer to each item, or to these alone, shape ``(N, P, K)``."""

    def expected_information(self, posterior: PyTree, focus: Sequence[int] | None) -> Floats:
        """Mutual information of each answer and the traits in focus, in nats, shape ``(N, P)``."""

    def fisher_information(self, posterior: PyTree, at: At) -> Floats:
        """Fisher information of each item, at the mean or its posterior mean, shape ``(N, P, D, D)``."""

    def votes(self, posterior: PyTree) -> Floats:
        """Probability that an answer is the likeliest one given the traits, shape ``(N, P, K)``."""

    def trouble(self, posterior: PyTree, covariance: Floats) -> str | None:
        """Reason not to trust the posterior, of this covariance, if there is one."""


def negative_entropy(probabilities: Floats) -> Floats:
    """Sum of ``p log p`` over the last axis; zero where ``p`` is zero. Need not be normalised."""
    terms: Floats = probabilities * np.log(np.maximum(probabilities, np.finfo(float).tiny))
    return terms.sum(-1)
