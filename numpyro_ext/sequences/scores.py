"""Scores of predictions of the next event, as means over users, and tables of several predictors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..display import Shown, Table, number
from ..infer.front.options import check_kind
from .counts import occurrences_before
from .events import EventSplit
from .predictor import Predictor, SequencePredictor

HISTORIES = (10, 30, 100, 300)
"""Lengths of history at which the groups of a score change."""
KINDS = ("repeats the last", "seen before", "new to the user")


class GroupScore(NamedTuple):
    """Error within a group of test events: the mean over users of each user's mean, in nats per event."""

    error: float
    standard_error: float
    """Standard error over users; NaN for fewer than two."""
    num_users: int
    num_events: int


@dataclass(frozen=True, eq=False, repr=False)
class SequenceScores(Shown):
    """Scores of one predictor, made by :func:`sequence_scores`."""

    user_errors: np.ndarray
    """Mean over the test events of each user of minus the log probability, NaN without events, shape ``(users,)``."""
    all: GroupScore
    """Error of all test events."""
    by_entropy: dict[str, GroupScore]
    """Error of users whose items before the test have a low, middle and high entropy, a third of the users each."""
    by_history: dict[str, GroupScore]
    """Error by the number of events before the predicted one."""
    by_kind: dict[str, GroupScore]
    """Error of events that repeat the last item, that the user had before, and that are new to her."""
    ranks: np.ndarray | None
    """Rank of the item of each test event, one is best, shape ``(test events,)``; ``None`` if it was not asked for."""
    _split: EventSplit

    @property
    def error(self) -> float:
        """Mean over users of the mean of minus the log probability of their test events, in nats."""
        return self.all.error

    @property
    def standard_error(self) -> float:
        """Standard error of ``error`` over users."""
        return self.all.standard_error

    @property
    def perplexity(self) -> float:
        """Exponential of the error: number of equally probable items that is as hard to predict."""
        return float(np.exp(self.error))

    def recall(self, k: int) -> float:
        """Share of test events among the first ``k`` items, as the mean over users.

        :param int k: number of items.
        :raises ValueError: if there are no ranks.
        """
        return self._split.mean_over_users(self._ranks() <= k)

    @property
    def mean_reciprocal_rank(self) -> float:
        """Mean over users of the mean of 1 / rank.

        :raises ValueError: if there are no ranks.
        """
        return self._split.mean_over_users(1.0 / self._ranks())

    def _ranks(self) -> np.ndarray:
        if self.ranks is None:
            raise ValueError("There are no ranks; ask for them, compare_sequences(..., ranks=True).")
        return self.ranks

    def _shown(self) -> list[str | Table]:
        rows = [["all", *_cells(self.all)]]
        for name in ("by_entropy", "by_history", "by_kind"):
            rows += [[group, *_cells(score)] for group, score in getattr(self, name).items()]
        lines: list[str | Table] = [f"SequenceScores: perplexity {number(self.perplexity)}"]
        if self.ranks is not None:
            lines.append(f"recall@10 {self.recall(10):.3f}, mean reciprocal rank {self.mean_reciprocal_rank:.3f}")
        return [*lines, Table(["test events", "error", "s.e.", "users", "events"], rows)]


def sequence_scores(log_probabilities: ArrayLike, split: EventSplit, ranks: ArrayLike | None = None) -> SequenceScores:
    """Scores of given log probabilities of the test events.

    :param log_probabilities: one for each test event, in the order of ``split.test``, shape ``(test events,)``.
    :param split: the division with these test events.
    :param ranks: rank of each test event's item (:func:`next_item_ranks`), for recall and reciprocal ranks.
    :return: the scores. The error is infinite where an event had no probability.
    :raises ValueError: for another number of values, or values that are no log probabilities.

    **Example:**

    >>> import numpy as np
    >>> from numpyro_ext.sequences import EventSequences, sequence_scores
    >>> split = EventSequences.from_lists([list("abcabcabcabc"), list("aabaabaabaab")]).split()
    >>> scores = sequence_scores(np.full(6, np.log(1 / 3)), split)
    >>> print(scores.error, scores.perplexity)
    1.099 3.0
    """
    logs = np.asarray(log_probabilities, float)
    if logs.shape != (split.test.items.size,):
        raise ValueError(
            f"sequence_scores: {split.test.items.size} test events, but log probabilities of shape {logs.shape}."
        )
    if np.isnan(logs).any() or (logs > 1e-4).any():  # rounding of single precision
        raise ValueError(
            f"sequence_scores: {np.isnan(logs).sum()} log probabilities are NaN and {(logs > 1e-4).sum()} are positive."
        )
    if ranks is not None and np.shape(ranks) != logs.shape:
        raise ValueError(f"sequence_scores: ranks have the shape {np.shape(ranks)}, log probabilities {logs.shape}.")
    whole, users = split.whole, split.test.users
    positions = whole.positions[split.is_test]
    is_repeat = (whole.items == whole.previous)[split.is_test]
    is_new = occurrences_before(whole.users * whole.num_items + whole.items)[split.is_test] == 0
    kinds = np.where(is_repeat, 0, np.where(is_new, 2, 1))
    entropies = split.history.entropies()
    order = np.argsort(np.argsort(entropies, kind="stable"))
    thirds = (3 * order // max(len(order), 1))[users]
    edges = (0, *HISTORIES)
    histories = [f"after {low}-{high - 1} events" for low, high in zip(edges, edges[1:], strict=False)]
    histories.append(f"after {edges[-1]} events or more")

    def groups(names: Sequence[str], group: np.ndarray) -> dict[str, GroupScore]:
        found = {name: _group(-logs, users, group == k) for k, name in enumerate(names)}
        return {name: score for name, score in found.items() if score.num_events}

    with np.errstate(invalid="ignore"):
        sums = np.bincount(users, -logs, minlength=split.test.num_users) / split.test.lengths
    return SequenceScores(
        sums,
        _group(-logs, users, np.ones(len(logs), bool)),
        groups([f"{name} entropy" for name in ("low", "middle", "high")], thirds),
        groups(histories, np.searchsorted(HISTORIES, positions, side="right")),
        groups(KINDS, kinds),
        None if ranks is None else np.asarray(ranks, float),
        split,
    )


def next_item_ranks(predictor: Predictor, split: EventSplit) -> np.ndarray:
    """Rank of the item of each test event among all items, one is best and ties have their mean, ``(test events,)``.

    All items are asked for once for each test event, which takes far longer than the log probabilities alone.

    :param predictor: what predicts, fitted.
    :param split: of events.
    """
    ranks = []
    for user, start in enumerate(split.history.lengths):
        events = split.whole[user]
        for place in range(start, len(events)):
            logs = np.asarray(predictor.next_log_probabilities(events[:place], user))
            own = logs[events[place]]
            ranks.append(np.sum(logs > own) + 0.5 * (np.sum(logs == own) + 1.0))
    return np.array(ranks, float)


@dataclass(frozen=True, eq=False, repr=False)
class SequenceComparison(Shown):
    """Scores of several predictors on the same test events, made by :func:`compare_sequences`."""

    scores: dict[str, SequenceScores]
    """Scores of each predictor, by its name."""
    predictors: dict[str, Any]
    """The predictors, fitted."""

    def __getitem__(self, name: str) -> SequenceScores:
        return self.scores[name]

    def difference(self, first: str, second: str) -> tuple[float, float]:
        """Error of one predictor less that of another, with its standard error, paired over users.

        :param str first: name of a predictor.
        :param str second: name of the other.
        """
        differences = self.scores[first].user_errors - self.scores[second].user_errors
        differences = differences[~np.isnan(differences)]
        return float(np.mean(differences)), float(np.std(differences, ddof=1) / np.sqrt(len(differences)))

    def _shown(self) -> list[str | Table]:
        with_ranks = all(scores.ranks is not None for scores in self.scores.values())
        header = ["predictor", "error", "s.e.", "perplexity", *KINDS]
        rows = []
        for name, scores in self.scores.items():
            kinds = [f"{scores.by_kind[kind].error:.3f}" if kind in scores.by_kind else "" for kind in KINDS]
            rows.append([name, *_cells(scores.all)[:2], number(scores.perplexity), *kinds])
            if with_ranks:
                rows[-1] += [f"{scores.recall(10):.3f}", f"{scores.mean_reciprocal_rank:.3f}"]
        return [
            "SequenceComparison: nats per event, mean over users",
            Table([*header, "recall@10", "MRR"] if with_ranks else header, rows),
        ]


def compare_sequences(
    predictors: Mapping[str, object] | Sequence[object], split: EventSplit, *, ranks: bool = False
) -> SequenceComparison:
    """Scores of several predictors on the test events of one division.

    Baselines that are not fitted are, ``fit(split.train, split.validation)``; all others predict as they are.

    :param predictors: baselines and trained networks, or a mapping from names to these.
    :param split: of events.
    :param bool ranks: compute recall and reciprocal ranks as well, which takes far longer.
    :return: the table.
    :raises TypeError: for something that does not predict, or no split.

    **Example:**

    >>> from numpyro_ext.sequences import Bigram, EventSequences, Uniform, compare_sequences
    >>> split = EventSequences.from_lists([list("abcabcabcabc"), list("aabaabaabaab")]).split()
    >>> table = compare_sequences([Uniform(), Bigram(0.1)], split)
    >>> print(table["Uniform()"].error)
    1.099
    >>> table["Bigram(eps=0.1)"].error < table["Uniform()"].error
    True
    """
    check_kind("compare_sequences", split, EventSplit, "a split of events, log.split()")
    if isinstance(predictors, SequencePredictor | str) or not isinstance(predictors, Iterable):
        raise TypeError("compare_sequences takes a list of predictors, or a mapping from names to these.")
    if not isinstance(predictors, Mapping):
        named: dict[str, Any] = {}
        for predictor in predictors:
            name = repr(predictor) if isinstance(predictor, SequencePredictor) else type(predictor).__name__
            while name in named:
                name += " again"
            named[name] = predictor
        predictors = named
    scores = {}
    for name, predictor in predictors.items():
        if not isinstance(predictor, Predictor) or isinstance(predictor, type):
            raise TypeError(
                f"compare_sequences: {name} does not predict; what predicts has log_predictive(split) and "
                "next_log_probabilities(history, user)."
            )
        if isinstance(predictor, SequencePredictor) and not predictor.num_items:
            predictor.fit(split.train, split.validation)
        found = next_item_ranks(predictor, split) if ranks else None
        scores[name] = sequence_scores(predictor.log_predictive(split), split, found)
    return SequenceComparison(scores, dict(predictors))


def _group(errors: np.ndarray, users: np.ndarray, chosen: np.ndarray) -> GroupScore:
    _, user, counts = np.unique(users[chosen], return_inverse=True, return_counts=True)
    means = np.bincount(user, errors[chosen]) / counts if counts.size else np.zeros(0)
    number = len(means)
    with np.errstate(invalid="ignore"):  # the spread of infinite errors
        spread = float(np.std(means, ddof=1) / np.sqrt(number)) if number > 1 else np.nan
    return GroupScore(float(np.mean(means)) if number else np.nan, spread, number, int(chosen.sum()))


def _cells(score: GroupScore) -> list[str]:
    return [f"{score.error:.3f}", number(score.standard_error), f"{score.num_users:,}", f"{score.num_events:,}"]
