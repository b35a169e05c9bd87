"""Mixture of predictors, with weights that depend on how much is known of a person, and on the state of a network."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from .counts import Bigram, KneserNey, OwnBigram, OwnFrequencies, RepeatLast, Unigram
from .events import EventSequences, EventSplit, hold_out
from .gates import Gate
from .predictor import Predictor, SequencePredictor

HISTORY_CLASSES = (10, 30, 100)
"""Lengths of history at which the classes of weights change."""
PRIOR_EVENTS = 10.0
"""Events that the weights of all classes together count for in each class."""


@dataclass(eq=False)
class PersonalMixture(SequencePredictor):
    """Mixture of predictors whose weights depend on the number of events that a person has so far.

    The components learn from the training; the weights are those of the greatest likelihood of the validation, found by
    EM, in four classes of the length of the history (below 10, 30, 100 events, and more). Each class begins with the
    weights of all, as ten events of it, so that rare classes have weights as well. Then the components learn from
    training and validation. Counts of the person herself are causal: they take in each event after it was predicted.

    **Example:**

    >>> import numpy as np
    >>> from numpyro_ext.sequences import EventSequences, PersonalMixture
    >>> log = EventSequences.from_lists([["a", "a", "b", "b"] * 5, ["c", "c", "a", "a"] * 5])
    >>> mixture = PersonalMixture().fit(log)
    >>> print(np.exp(mixture.next_log_probabilities(log[0])).sum())
    1.0

    :param components: predictors that are not fitted; by default the last item again, the person's own frequencies and
        pairs, and the pairs and frequencies of all. One of them must give every item a probability.
    :param network: a fitted predictor, such as a trained network, as a further component. It must have been trained
        without the validation, which is then to be given to :meth:`fit`.
    :param bool gate: multiply the weights by factors that are functions of the state of the network before the event,
        and are learned from the validation as well. The network has ``states(split)``, as a
        :class:`~numpyro_ext.infer.ChunkedFit` does.
    :param bool kneser_ney: smooth the pairs of all by :class:`KneserNey` instead of :class:`Bigram`.
    """

    components: Sequence[SequencePredictor] | None = None
    network: Predictor | None = None
    kneser_ney: bool = False
    gate: bool = False

    def __repr__(self) -> str:
        parts = ["network"] * (self.network is not None) + ["kneser_ney"] * self.kneser_ney + ["gate"] * self.gate
        if self.components is not None:
            parts.insert(0, str(len(self.components)) + " components")
        return f"PersonalMixture({', '.join(parts)})"

    def _fit(self, train: EventSequences, validation: EventSequences | None) -> None:
        if self.components is None:
            pooled = KneserNey(0.01) if self.kneser_ney else Bigram(0.01)
            parts: list[SequencePredictor] = [
                RepeatLast(1.0),
                OwnFrequencies(0.0),
                OwnBigram(0.0),
                pooled,
                Unigram(0.01),
            ]
        else:
            parts = [copy(part) for part in self.components]
        if self.network is not None and validation is None:
            raise ValueError(
                "PersonalMixture: weights beside a network are learned from events that it was not trained on; "
                "give the validation as well, fit(train, validation)."
            )
        if self.gate and not hasattr(self.network, "states"):
            raise ValueError(
                "PersonalMixture: gate=True takes weights from the state of a network; give network= one that has "
                "states(split), such as what ChunkedSVI.run returns."
            )
        split = hold_out(train, validation)
        if split.test.items.size == 0:
            raise ValueError("PersonalMixture: there is nothing to learn weights from: no user has two events.")
        self.parts: list[Predictor] = [part.fit(split.train) for part in parts]
        if self.network is not None:
            self.parts.append(self.network)
        logs = self._component_logs(split)
        if (logs.max(axis=1) == -np.inf).any():
            raise ValueError(
                "PersonalMixture: no component gives a probability to some events of the validation; add one that "
                "gives all items a probability, such as Unigram(0.01)."
            )
        everything = np.ones(logs.shape[1]) / logs.shape[1]
        everything = _weights(logs, everything, 0.0)
        lengths = split.whole.positions[split.is_test]
        classes = _history_class(lengths)
        self.weights = np.stack(
            [_weights(logs[classes == k], everything, PRIOR_EVENTS) for k in range(len(HISTORY_CLASSES) + 1)]
        )
        self.learned_gate = (
            Gate.learned(logs, self._log_weights(lengths), self._states(split), split.test.users) if self.gate else None
        )
        for part in parts:
            part.fit(train, validation)

    def log_predictive(self, split: EventSplit) -> np.ndarray:
        self._check_fitted(split)
        states = self._states(split) if self.gate else None
        return self._mixed(self._component_logs(split), split.whole.positions[split.is_test], states)

    def _component_logs(self, split: EventSplit) -> np.ndarray:
        """Log probability that each component gives each test event, shape ``(test events, components)``."""
        return np.stack([part.log_predictive(split) for part in self.parts], axis=-1)

    def _states(self, split: EventSplit) -> np.ndarray:
        """State of the network before each test event, shape ``(test events, numbers)``."""
        return np.asarray(self.network.states(split))  # type: ignore[union-attr]

    def _log_weights(self, lengths: np.ndarray) -> np.ndarray:
        """Log weights of the components after histories of given lengths; a weight of zero is a very small one."""
        return np.log(np.maximum(self.weights[_history_class(lengths)], 1e-300))

    def _mixed(self, logs: np.ndarray, lengths: np.ndarray, states: np.ndarray | None) -> np.ndarray:
        """Log of the mixture of probabilities of components on the last axis, after histories of given lengths."""
        log_weights = self._log_weights(lengths)
        if self.learned_gate is not None and states is not None:
            return self.learned_gate.mixed(logs, log_weights, states)
        return np.logaddexp.reduce(logs + log_weights, axis=-1)

    def _next(self, history: np.ndarray, user: int | None) -> np.ndarray:
        logs = np.stack([part.next_log_probabilities(history, user) for part in self.parts], axis=-1)
        states = self._states(self._before_next(history, user or 0)) if self.gate else None
        return self._mixed(logs, np.asarray(history.size), states)

    def _before_next(self, history: np.ndarray, user: int) -> EventSplit:
        """Split with the history of one user, whose next event is its test; nobody else has events."""

        def of_user(items: np.ndarray) -> EventSequences:
            lengths = np.where(np.arange(self.num_users) == user, items.size, 0)
            return EventSequences(items, lengths, np.asarray(self._labels.items), np.asarray(self._labels.users))

        nothing = history[:0]
        return EventSplit(of_user(history), of_user(nothing), of_user(np.zeros(1, nothing.dtype)))


def _history_class(lengths: np.ndarray) -> np.ndarray:
    return np.searchsorted(HISTORY_CLASSES, lengths, side="right")


def _weights(logs: np.ndarray, prior: np.ndarray, prior_events: float) -> np.ndarray:
    """Weights of the greatest posterior density by EM, shape ``(components,)``.

    :param logs: log probabilities of events under each component, shape ``(events, components)``.
    :param prior: weights to begin with, and the mean of the prior.
    :param prior_events: number of events that the prior counts for.
    """
    if logs.size == 0:
        return prior
    scaled = np.exp(logs - logs.max(axis=1, keepdims=True))
    weights, last = prior, -np.inf
    for _ in range(10_000):
        mixed = scaled @ weights
        value = np.sum(np.log(mixed)) + prior_events * np.sum(prior * np.log(np.maximum(weights, 1e-300)))
        if value - last < 1e-9 * len(logs):
            break
        last = value
        weights = weights * (scaled.T @ (1.0 / mixed)) + prior_events * prior
        weights = weights / weights.sum()
    return weights
