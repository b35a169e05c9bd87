"""Protocol of predictors of the next event, which counts, mixtures, factorisations and networks follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from ..infer.stochastic.labels import Labels, checked_user
from .events import EventSequences, EventSplit, hold_out

Self = TypeVar("Self", bound="SequencePredictor")
Option = TypeVar("Option")


@runtime_checkable
class Predictor(Protocol):
    """Fitted predictor of events: a baseline after ``fit``, or a trained network."""

    def log_predictive(self, split: EventSplit) -> np.ndarray:
        """Log probability of each test event given all events of its user before it, shape ``(test events,)``."""
        ...

    def next_log_probabilities(self, history: ArrayLike, user: int | None = None) -> np.ndarray:
        """Log probabilities of all items to be next after a history, shape ``(items,)``."""
        ...


class SequencePredictor:
    """Base of the baselines: one writes ``_fit``, ``_log_probabilities`` and ``_next``."""

    num_items: int = 0
    """Number of items; zero before ``fit``."""
    num_users: int = 0
    """Number of users of the training."""

    def fit(self: Self, train: EventSequences, validation: EventSequences | None = None) -> Self:
        """Learn from sequences.

        :param train: sequences to learn from.
        :param validation: what follows in each: options that are ``None`` or several are chosen by its log probability,
            and then all is learned from both. Without it the last tenth of each training sequence is held out for this.
        :return: this predictor.
        :raises ValueError: if there are no events to learn from, or the two have different users or items.
        """
        sizes = [(part.num_users, part.num_items) for part in (train, validation) if part is not None]
        if len(set(sizes)) > 1:
            raise ValueError(f"{type(self).__name__}: training and validation are of the same users and items.")
        if train.items.size == 0:
            raise ValueError(f"{type(self).__name__}: there are no training events.")
        self.num_items, self.num_users = train.num_items, train.num_users
        self._labels = Labels.learned(all_events(train, validation))
        self._fit(train, validation)
        return self

    def log_predictive(self, split: EventSplit) -> np.ndarray:
        """Log probability of each test event given all events of its user before it, shape ``(test events,)``.

        :param split: of the users that were fitted, or of others for predictors without a personal part.
        :raises ValueError: before ``fit``, or for other items, or other users where these have a part of their own.
        """
        self._check_fitted(split)
        self._labels.warn_of_seen(type(self).__name__, split)
        return self._log_probabilities(split.whole)[split.is_test]

    def next_log_probabilities(self, history: ArrayLike, user: int | None = None) -> np.ndarray:
        """Log probabilities of all items to be next after a history, shape ``(items,)``.

        :param history: indices of the items so far, in order; may be empty.
        :param user: index of a user of the training, whose personal part is used if there is one.
        :raises ValueError: before ``fit``, or for an index that there is not.
        """
        self._check_fitted()
        return self._next(self._checked(history), user)

    def _fit(self, train: EventSequences, validation: EventSequences | None) -> None:
        raise NotImplementedError

    def _log_probabilities(self, sequences: EventSequences) -> np.ndarray:
        """Log probability of each event given those of its user before it, shape ``(total,)``."""
        raise NotImplementedError

    def _next(self, history: np.ndarray, user: int | None) -> np.ndarray:
        raise NotImplementedError

    def _check_fitted(self, split: EventSplit | None = None) -> None:
        if not self.num_items:
            raise ValueError(f"{type(self).__name__} knows nothing before fit(train).")
        if split is not None:
            self._labels.check(type(self).__name__, split, with_users=False)

    def _check_users(self, sequences: EventSequences) -> None:
        """Refuse other users than those of the training, for predictors that have a part of each."""
        self._labels.check(type(self).__name__, sequences, with_users=True)

    def _checked_user(self, user: int) -> int:
        return checked_user(type(self).__name__, user, self.num_users)

    def _checked(self, history: ArrayLike) -> np.ndarray:
        items = np.asarray(history)
        if items.size == 0:
            return np.zeros(0, np.int64)
        if items.ndim != 1 or not np.issubdtype(items.dtype, np.integer):
            raise ValueError(
                f"{type(self).__name__}: a history is a list of indices of items; numbers of labels are "
                "np.searchsorted(log.item_labels, labels)."
            )
        if not 0 <= items.min() <= items.max() < self.num_items:
            raise ValueError(f"{type(self).__name__}: items are 0 to {self.num_items - 1}.")
        return items.astype(np.int64)


def best_by_validation(
    make: Any, options: Sequence[Option], train: EventSequences, validation: EventSequences | None
) -> Option:
    """Option with the greatest log probability of the validation, as the mean over users of the mean over events.

    :param make: function from an option to a predictor that is not fitted.
    :param options: to choose from.
    :param train: sequences to learn from.
    :param validation: what follows in each; a part of ``train`` if ``None``.
    """
    split = hold_out(train, validation)
    if split.test.items.size == 0:
        raise ValueError("There is nothing to choose by: no user has two events.")
    scores = [split.mean_over_users(make(option).fit(split.train).log_predictive(split)) for option in options]
    return options[int(np.argmax(scores))]


def all_events(train: EventSequences, validation: EventSequences | None) -> EventSequences:
    """Training and validation joined."""
    return train if validation is None else hold_out(train, validation).whole
