"""Predictors that count: items, pairs of items, and what one person did so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..infer.stochastic.labels import Labels
from .events import EventSequences
from .predictor import SequencePredictor, all_events, best_by_validation

EPS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Numbers added to counts, from which validation chooses."""


@dataclass(eq=False)
class Uniform(SequencePredictor):
    """Predictor that knows nothing: each of I items has the probability 1 / I."""

    def _fit(self, train: EventSequences, validation: EventSequences | None) -> None:
        self._labels = Labels.of(train)  # of the items alone, as it learns from no event

    def _log_probabilities(self, sequences: EventSequences) -> np.ndarray:
        return np.full(sequences.items.size, -np.log(sequences.num_items))

    def _next(self, history: np.ndarray, user: int | None) -> np.ndarray:
        return np.full(self.num_items, -np.log(self.num_items))


@dataclass(eq=False)
class _Smoothed(SequencePredictor):
    """Counts to which a constant is added."""

    eps: float | None = None
    _added: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.eps is not None and not 0.0 <= self.eps < np.inf:
            raise ValueError(f"{type(self).__name__}: eps is added to counts and is not negative; got {self.eps}.")

    @property
    def added(self) -> float:
        """Constant that is added to each count: ``eps``, or what validation chose."""
        return self._added

    def _fit(self, train: EventSequences, validation: EventSequences | None) -> None:
        if self.eps is not None:
            self._added = float(self.eps)
        else:
            self._added = best_by_validation(lambda eps: replace(self, eps=eps), EPS, train, validation)
        self._count(all_events(train, validation))

    def _count(self, train: EventSequences) -> None:
        raise NotImplementedError


class Unigram(_Smoothed):
    """Frequencies of the items, the same for everyone and at every place: ``(n_i + eps) / sum (n_k + eps)``.

    **Example:**

    >>> from numpyro_ext.sequences import EventSequences, Unigram
    >>> log = EventSequences.from_lists([["a", "b", "a"], ["a"]])
    >>> print(np.exp(Unigram(0.5).fit(log).next_log_probabilities([])))
    [0.7 0.3]

    :param float eps: what is added to each count; chosen by validation from 1e-4 to 1 if ``None``.
    """

    def _count(self, train: EventSequences) -> None:
        counts = np.bincount(train.items, minlength=train.num_items) + self._added
        with np.errstate(divide="ignore"):
            self._log_shares: np.ndarray = np.log(counts) - np.log(counts.sum())

    def _log_probabilities(self, sequences: EventSequences) -> np.ndarray:
        return self._log_shares[sequences.items]

    def _next(self, history: np.ndarray, user: int | None) -> np.ndarray:
        return self._log_shares.copy()


class PairCounts:
    """Numbers of pairs of items that follow one another, kept for pairs that occur.

    :param previous: first item of each pair, shape ``(pairs,)``.
    :param items: second item.
    :param int num_items: number of items.
    """

    def __init__(self, previous: np.ndarray, items: np.ndarray, num_items: int) -> None:
        self.num_items = num_items
        self.pairs, counts = np.unique(previous * num_items + items, return_counts=True)
        self.counts = counts.astype(float)
        self.first, self.second = self.pairs // num_items, self.pairs % num_items
        self.totals = np.bincount(self.first, self.counts, minlength=num_items)

    def of(self, previous: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Counts of given pairs, of their shape; zero for pairs that did not occur."""
        wanted = previous * self.num_items + items
        if self.pairs.size == 0:
            return np.zeros(wanted.shape)
        at = np.minimum(np.searchsorted(self.pairs, wanted), self.pairs.size - 1)
        return np.where(self.pairs[at] == wanted, self.counts[at], 0.0)

    def after(self, previous: int) -> tuple[np.ndarray, np.ndarray]:
        """Items that followed one item, and how often."""
        start, stop = np.searchsorted(self.first, [previous, previous + 1])
        return self.second[start:stop], self.counts[start:stop]


class _Pooled(_Smoothed):
    """Probabilities given the item before, the same for everyone; those of the items alone at the first event."""

    def _count(self, train: EventSequences) -> None:
        inner = train.previous >= 0
        self._pairs = PairCounts(train.previous[inner], train.items[inner], train.num_items)
        self._alone = Unigram(self._added).fit(train)

    def _of(self, previous: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Probability of each item after another one."""
        raise NotImplementedError

    def probabilities(self, previous: ArrayLike) -> np.ndarray:
        """Probabilities of all items after given ones, shape ``previous.shape + (items,)``.

        :param previous: indices of items.
        :raises ValueError: before ``fit``, or for an index that there is not.
        """
        self._check_fitted()
        given = np.asarray(previous)
        self._checked(given.ravel())
        return self._of(given[..., None].astype(np.int64), np.arange(self.num_items))

    def _log_probabilities(self, sequences: EventSequences) -> np.ndarray:
        found = self._alone._log_probabilities(sequences)
        inner = sequences.previous >= 0
        with np.errstate(divide="ignore"):
            found[inner] = np.log(self._of(sequences.previous[inner], sequences.items[inner]))
        return found

    def _next(self, history: np.ndarray, user: int | None) -> np.ndarray:
        if history.size == 0:
            return self._alone._next(history, user)
        with np.errstate(divide="ignore"):
            logs: np.ndarray = np.log(self.probabilities(history[-1]))
        return logs


class Bigram(_Pooled):
    """Frequencies of the items after the last one, pooled over users: ``(n_ij + eps) / sum_k (n_ik + eps)``.

    Pairs that occur are kept, and no other. The first event of a user has the frequencies of :class:`Unigram`.

    **Example:**

    >>> from numpyro_ext.sequences import Bigram, EventSequences
    >>> log = EventSequences.from_lists([["a", "b", "a", "b", "b"]])
    >>> print(Bigram(0.5).fit(log).probabilities([0, 1]))
    [[0.167 0.833]
     [0.5   0.5  ]]

    :param float eps: what is added to each count; chosen by validation from 1e-4 to 1 if ``None``.
    """

    def _of(self, previous: np.ndarray, items: np.ndarray) -> np.ndarray:
        total = self._pairs.totals[previous] + self.num_items * self._added
        with np.errstate(invalid="ignore"):
            found = (self._pairs.of(previous, items) + self._added) / total
        # an item that nothing followed, where nothing is added
        return np.where(total > 0, found, np.exp(self._alone._log_shares)[items])


class KneserNey(_Pooled):
    """Pairs of items with interpolated Kneser-Ney smoothing, pooled over users.

    From each count a constant is taken, ``d = n_1 / (n_1 + 2 n_2)`` with the numbers of pairs that occur once and
    twice. What is taken goes to the items by the number of different items that they follow.

    **References**

    1. Chen, S. F. and Goodman, J. (1999), An empirical study of smoothing techniques for language modeling, *Computer
       Speech and Language* 13, section 2.7.

    :param float eps: what is added to the number of items that each item follows, so that every item has a
        probability; chosen by validation from 1e-4 to 1 if ``None``.
    """

    def _count(self, train: EventSequences) -> None:
        super()._count(train)
        once, twice = (float(np.sum(self._pairs.counts == n)) for n in (1, 2))
        self._discount = once / (once + 2.0 * twice) if once else 0.0
        different = np.bincount(self._pairs.second, minlength=train.num_items) + self._added
        total = different.sum()
        self._continued: np.ndarray = (
            different / total if total > 0 else np.full(train.num_items, 1.0 / train.num_items)
        )
        self._followers = np.bincount(self._pairs.first, minlength=train.num_items)

    def _of(self, previous: np.ndarray, items: np.ndarray) -> np.ndarray:
        total = self._pairs.totals[previous]
        kept = np.maximum(self._pairs.of(previous, items) - self._discount, 0.0)
        given = self._discount * self._followers[previous]
        with np.errstate(invalid="ignore", divide="ignore"):
            found = (kept + given * self._continued[items]) / total
        return np.where(total > 0, found, self._continued[items])


@dataclass(eq=False)
class RepeatLast(SequencePredictor):
    """Predictor of the last item once more; other items have the rest, in proportion to their frequencies.

    :param float probability: of a repetition; the share of repetitions in training (one more of both is counted) if
        ``None``. With 1 nothing else is possible, which serves as a part of :class:`PersonalMixture`.
    """

    probability: float | None = None

    def _fit(self, train: EventSequences, validation: EventSequences | None) -> None:
        if self.probability is not None and not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"RepeatLast: a probability is between 0 and 1; got {self.probability}.")
        train = all_events(train, validation)
        inner = train.previous >= 0
        repeats = np.sum(train.items[inner] == train.previous[inner])
        self._repeat = (repeats + 1.0) / (inner.sum() + 2.0) if self.probability is None else self.probability
        self._shares: np.ndarray = np.exp(Unigram(0.01).fit(train)._log_shares)
        if train.num_items == 1:
            self._repeat = 1.0

    def _of(self, previous: Any, items: np.ndarray) -> np.ndarray:
        others = self._shares[items] / (1.0 - self._shares[previous]) if self._repeat < 1.0 else 0.0
        return np.where(items == previous, self._repeat, (1.0 - self._repeat) * others)

    def _log_probabilities(self, sequences: EventSequences) -> np.ndarray:
        found = self._shares[sequences.items]
        inner = sequences.previous >= 0
        found[inner] = self._of(sequences.previous[inner], sequences.items[inner])
        with np.errstate(divide="ignore"):
            logs: np.ndarray = np.log(found)
        return logs

    def _next(self, history: np.ndarray, user: int | None) -> np.ndarray:
        items = np.arange(self.num_items)
        with np.errstate(divide="ignore"):
            logs: np.ndarray = np.log(self._of(history[-1], items) if history.size else self._shares)
        return logs


@dataclass(eq=False)
class OwnFrequencies(SequencePredictor):
    """Frequencies of the items that the person herself had: ``(n_ui + eps) / sum_k (n_uk + eps)``.

    :param float eps: what is added to each count. With zero, a person without events has all items alike.
    :param bool causal: count all events before the predicted one, also those of the test. If ``False``, those of the
        training alone, and of someone who was not in it the history.
    """

    eps: float = 0.01
    causal: bool = True

    def _fit(self, train: EventSequences, validation: EventSequences | None) -> None:
        if self.causal:
            self._labels = Labels.of(train)
        train = all_events(train, validation)
        self._trained = PairCounts(train.users, train.items, train.num_items)
        self._lengths: np.ndarray = train.lengths

    def _log_probabilities(self, sequences: EventSequences) -> np.ndarray:
        items, users = sequences.items, sequences.users
        if self.causal:
            counts, total = occurrences_before(users * sequences.num_items + items), sequences.positions
        else:
            self._check_users(sequences)
            counts, total = self._trained.of(users, items), self._lengths[users]
        return _log_share(counts, total, self.eps, sequences.num_items)

    def _next(self, history: np.ndarray, user: int | None) -> np.ndarray:
        if self.causal or user is None:
            return _log_share(np.bincount(history, minlength=self.num_items), history.size, self.eps, self.num_items)
        counts = self._trained.of(np.asarray(self._checked_user(user)), np.arange(self.num_items))
        return _log_share(counts, self._lengths[user], self.eps, self.num_items)


@dataclass(eq=False)
class OwnBigram(SequencePredictor):
    """Frequencies of the items that followed the last one in the person's own history.

    :param float eps: what is added to each count. With zero, an item that nothing followed so far has the person's own
        frequencies.
    """

    eps: float = 0.01

    def _fit(self, train: EventSequences, validation: EventSequences | None) -> None:
        self._labels = Labels.of(train)

    def _log_probabilities(self, sequences: EventSequences) -> np.ndarray:
        number, previous = sequences.num_items, sequences.previous
        inner = previous >= 0
        found = OwnFrequencies(self.eps)._log_probabilities(sequences)
        first = sequences.users[inner] * number + previous[inner]
        counts, total = occurrences_before(first * number + sequences.items[inner]), occurrences_before(first)
        log_shares = _log_share(counts, total, self.eps, number)
        found[inner] = log_shares if self.eps > 0 else np.where(total > 0, log_shares, found[inner])
        return found

    def _next(self, history: np.ndarray, user: int | None) -> np.ndarray:
        if history.size:
            followed = history[1:][history[:-1] == history[-1]]
            if followed.size or self.eps > 0:
                counts = np.bincount(followed, minlength=self.num_items)
                return _log_share(counts, followed.size, self.eps, self.num_items)
        return _log_share(np.bincount(history, minlength=self.num_items), history.size, self.eps, self.num_items)


def occurrences_before(keys: np.ndarray) -> np.ndarray:
    """Number of equal keys before each place, shape ``(n,)``."""
    order = np.argsort(keys, kind="stable")
    is_first = np.ones(keys.size, bool)
    is_first[1:] = keys[order][1:] != keys[order][:-1]
    places = np.arange(keys.size)
    found = np.empty(keys.size, np.int64)
    found[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return found


def _log_share(counts: np.ndarray, total: object, eps: float, num_items: int) -> np.ndarray:
    """Logarithm of smoothed shares, uniform where nothing is counted and nothing added."""
    denominator = np.asarray(total) + num_items * eps
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, np.log(counts + eps) - np.log(denominator), -np.log(num_items))
