"""Sequences of events of many people, and their division into training, validation and test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jax import random
from numpy.typing import ArrayLike

from ..display import Shown
from ..infer.stochastic.chunks import batches_of_events, chunk_of, joined
from ..linalg.saved_names import saved_as
from ..structure.model.running.pandas_arguments import check_rows
from .columns import codes_of_labels, ordered_times


@saved_as("EventSequences")
@dataclass(frozen=True, eq=False, repr=False)
class EventSequences(Shown):
    """Events of many users, each a sequence of items in order.

    Sequences are ragged: user ``u`` has ``items[starts[u] : starts[u] + lengths[u]]``.

    **Example:**

    >>> from numpyro_ext.sequences import EventSequences
    >>> log = EventSequences.from_lists({"ann": ["tea", "tea", "milk"], "bob": ["milk"]})
    >>> log
    EventSequences: 2 users, 2 items, 4 events
    >>> print(log.item_labels, log[0])
    ['milk' 'tea'] [1 1 0]
    """

    items: np.ndarray
    """Items of all events, user by user, integers from zero, shape ``(total,)``."""
    lengths: np.ndarray
    """Number of events of each user, shape ``(users,)``."""
    item_labels: np.ndarray
    """Name of each item, shape ``(items,)``."""
    user_labels: np.ndarray
    """Name of each user, shape ``(users,)``."""
    notes: tuple[str, ...] = ()
    """Findings in the data, and what each rule took away."""

    def __post_init__(self) -> None:
        for name in ("items", "lengths"):
            value = np.asarray(getattr(self, name))
            if value.ndim != 1 or (value.size and not np.issubdtype(value.dtype, np.integer)):
                raise ValueError(
                    f"EventSequences: {name} is a vector of integers; EventSequences.from_events takes labels."
                )
            object.__setattr__(self, name, value.astype(np.int64))
        for name in ("item_labels", "user_labels"):
            object.__setattr__(self, name, np.asarray(getattr(self, name)))
        if len(self.lengths) != self.num_users or self.lengths.sum() != self.items.size or (self.lengths < 0).any():
            raise ValueError(
                f"EventSequences: lengths of {self.num_users} users must add up to {self.items.size} events; got "
                f"{len(self.lengths)} lengths with the sum {self.lengths.sum()}."
            )
        if self.items.size and not 0 <= self.items.min() <= self.items.max() < self.num_items:
            raise ValueError(f"EventSequences: items are 0 to {self.num_items - 1}.")

    @classmethod
    def from_events(cls, users: ArrayLike, items: ArrayLike, time: ArrayLike | None = None) -> EventSequences:
        """Sequences from a table with one row for each event.

        :param users: label of the user of each event: numbers or strings, shape ``(total,)``.
        :param items: label of the item of each event, shape ``(total,)``.
        :param time: numbers or dates to order the events of each user by; without it they stay in the order of the
            rows. Events at the same time keep that order, which ``notes`` tells.
        :return: the sequences, with users and items in the order of their labels.
        :raises ValueError: for missing labels or times, or columns of different lengths or orders of rows.
        """
        check_rows([("users", users), ("items", items), ("time", time)])
        (user_labels, user), (item_labels, item) = codes_of_labels("users", users), codes_of_labels("items", items)
        if user.size != item.size:
            raise ValueError(f"from_events: {user.size} users but {item.size} items; each event has one of both.")
        if user.size == 0:
            raise ValueError("from_events: there are no events.")
        notes: tuple[str, ...] = ()
        order = np.argsort(user, kind="stable")
        if time is not None:
            at = ordered_times(time, user.size)
            given = at[order]
            order = np.lexsort((at, user))  # stable: ties keep the order of the rows
            same_user = user[order][1:] == user[order][:-1]
            late = int(np.sum((given[1:] < given[:-1]) & same_user))
            ties = int(np.sum((at[order][1:] == at[order][:-1]) & same_user))
            if late:
                notes += (f"{late} events came before an earlier one of their user: sorted by time",)
            if ties:
                notes += (f"{ties} events have the time of the one before them: kept in the order of the rows",)
        found = cls(item[order], np.bincount(user, minlength=len(user_labels)), item_labels, user_labels, notes)
        inside = found.previous >= 0
        if time is None and inside.sum() >= 10 and (found.items[inside] >= found.previous[inside]).all():
            note = "the items of each user stand in the order of their labels: are these counts, without an order?"
            found = replace(found, notes=(note,))
        return found

    @classmethod
    def from_lists(cls, sequences: Mapping[object, Iterable[object]] | Iterable[Iterable[object]]) -> EventSequences:
        """Sequences from one list of items for each user; lists may be empty.

        :param sequences: lists of labels in order, or a mapping from users to such lists.
        :return: the sequences, with users in the order given and items in the order of their labels.
        :raises ValueError: for missing labels, or where no list has an event.
        """
        if isinstance(sequences, Mapping):
            names, lists = list(sequences), [list(one) for one in sequences.values()]
        else:
            lists = [list(one) for one in sequences]
            names = list(range(len(lists)))
        if not any(lists):
            raise ValueError("from_lists: there are no events.")
        labels, items = codes_of_labels("items", [label for one in lists for label in one])
        return cls(items, np.array([len(one) for one in lists]), labels, np.array(names))

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.user_labels)

    @property
    def num_items(self) -> int:
        """Number of items, of which some may have no events."""
        return len(self.item_labels)

    @cached_property
    def starts(self) -> np.ndarray:
        """Index of each user's first event in ``items``, shape ``(users,)``."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def users(self) -> np.ndarray:
        """User of each event, shape ``(total,)``."""
        return np.repeat(np.arange(self.num_users), self.lengths)

    @cached_property
    def positions(self) -> np.ndarray:
        """Number of events of the same user before each event, shape ``(total,)``."""
        return np.arange(self.items.size) - self.starts[self.users]

    @cached_property
    def previous(self) -> np.ndarray:
        """Item before each event, -1 at the first event of a user, shape ``(total,)``."""
        return np.where(self.positions > 0, np.roll(self.items, 1), -1)

    def __len__(self) -> int:
        return self.num_users

    def __getitem__(self, user: int) -> np.ndarray:
        """Items of one user, by index."""
        start = self.starts[user]
        return self.items[start : start + self.lengths[user]]

    def batches(
        self, batch_size: int, *, chunk: int, rng_key: Any = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Batches of users of like length, as those of an epoch of ``ChunkedSVI``.

        :param int batch_size: users of a batch; the last may be smaller.
        :param int chunk: sequences are padded to a quarter, a half, or a multiple of this.
        :param rng_key: for the order of batches; without it they stand from short to long.
        :return: users of each batch, their items, zero beyond the end, of shape ``(users, steps)``, and where there are
            events. Users without events are in none.

        **Example:**

        >>> from numpyro_ext.sequences import EventSequences
        >>> log = EventSequences.from_lists([["a", "b", "b"], ["b"], ["a", "a"]])
        >>> for users, items, mask in log.batches(2, chunk=4):
        ...     print(users, items.tolist(), mask.sum())
        [1] [[1]] 1
        [2 0] [[0, 0, 0, 0], [0, 1, 1, 0]] 5
        """
        uniform = (
            np.zeros(2 * self.num_users) if rng_key is None else np.asarray(random.uniform(rng_key, (2 * len(self),)))
        )
        for batch in batches_of_events(self.lengths, batch_size, chunk, uniform):
            start, length = self.starts[batch.users], self.lengths[batch.users]
            items, mask, _ = chunk_of(self, start, length, 0, batch.width * batch.num_chunks)
            yield batch.users, np.asarray(items), np.asarray(mask)

    def entropies(self) -> np.ndarray:
        """Entropy in nats of the items of each user, zero without events, shape ``(users,)``."""
        pairs, counts = np.unique(self.users * self.num_items + self.items, return_counts=True)
        user = pairs // self.num_items
        share = counts / self.lengths[user]
        return np.bincount(user, -share * np.log(share), minlength=self.num_users)

    def filter(
        self,
        *,
        min_item: int = 1,
        min_user: int = 1,
        min_entropy: float | None = None,
        until_stable: bool = False,
    ) -> EventSequences:
        """Sequences without rare items, then without short users, then without users who do always the same.

        :param int min_item: least number of events of an item.
        :param int min_user: least number of events that a user has left.
        :param float min_entropy: users whose items have at most this entropy, in nats, go.
        :param bool until_stable: repeat the rules until nothing goes; by default each is used once.
        :return: the sequences that are left, with items that have events; ``notes`` says which rule took what.
        :raises ValueError: if nothing is left, saying which rule took what.
        """
        found = self
        while True:
            before = found.items.size
            rare = np.bincount(found.items, minlength=found.num_items) < min_item
            found = found.without(rare[found.items], f"{rare.sum()} items with fewer than {min_item} events")
            short = found.lengths < min_user
            found = found._without_users(short, f"{short.sum()} users with fewer than {min_user} events")
            if min_entropy is not None:
                same = found.entropies() <= min_entropy
                found = found._without_users(same, f"{same.sum()} users with an entropy of at most {min_entropy} nats")
            if found.items.size == 0:
                raise ValueError(
                    "filter: no event is left. What went: " + "; ".join(found.notes[len(self.notes) :]) + "."
                )
            if found.items.size == before or not until_stable:
                return found._relabelled(np.bincount(found.items, minlength=found.num_items) > 0)

    def split(self, *, share: float = 0.1, least: int = 3, most: int = 500) -> EventSplit:
        """Division of each sequence: its last events are test, those before them validation, the rest training.

        Test and validation have ``round(share * length)`` events each, at least ``least`` and at most ``most``. Users
        who would have no event left in training go, and so do test events of items that neither training nor validation
        has seen, and users who have no other. The parts have the same users and items.

        :param float share: share of the events of each part.
        :param int least: least number of events of each part.
        :param int most: greatest number of events of each part.
        :return: the parts; ``notes`` says which rule took what.
        :raises ValueError: if a part would be empty, saying which rule took what.
        """
        if not 0.0 < share < 0.5 or not 1 <= least <= most:
            raise ValueError(
                f"split: needs 0 < share < 0.5 and 1 <= least <= most; got share={share}, least={least}, most={most}."
            )

        def size(length: np.ndarray) -> np.ndarray:
            return np.clip(np.round(share * length).astype(int), least, most)

        short = self.lengths <= 2 * size(self.lengths)
        whole = self._without_users(short, f"{short.sum()} users with too few events to divide")
        is_test = whole.positions >= (whole.lengths - size(whole.lengths))[whole.users]
        seen = np.bincount(whole.items[~is_test], minlength=whole.num_items) > 0
        parts = size(whole.lengths)
        unseen = is_test & ~seen[whole.items]
        num_test = np.bincount(whole.users[is_test & ~unseen], minlength=whole.num_users)
        whole = whole.without(unseen, f"{unseen.sum()} test events of items that training has not seen")
        whole = whole._relabelled(seen)
        gone = num_test == 0
        whole = whole._without_users(gone, f"{gone.sum()} users without test events")
        notes = whole.notes[len(self.notes) :]
        if whole.items.size == 0:
            raise ValueError("split: no event is left. What went: " + "; ".join(notes) + ".")
        history, test = _cut(whole, num_test[~gone])
        train, validation = _cut(history, parts[~gone])
        return EventSplit(train, validation, test, notes)

    def _shown(self) -> list[str]:
        counts = f"{self.num_users:,} users, {self.num_items:,} items, {self.items.size:,} events"
        return [f"EventSequences: {counts}", *self.notes]

    def without(self, events: np.ndarray, note: str) -> EventSequences:
        """The sequences without some events, shape ``(total,)``, and a note where there were any."""
        if not events.any():
            return self
        lengths = np.bincount(self.users[~events], minlength=self.num_users)
        notes = (*self.notes, f"{note}: {events.sum()} events")
        return replace(self, items=self.items[~events], lengths=lengths, notes=notes)

    def _without_users(self, users: np.ndarray, note: str) -> EventSequences:
        if not users.any():
            return self
        lost = self.lengths[users].sum()
        return replace(
            self,
            items=self.items[~users[self.users]],
            lengths=self.lengths[~users],
            user_labels=self.user_labels[~users],
            notes=(*self.notes, f"{note}: {lost} events"),
        )

    def _relabelled(self, kept: np.ndarray) -> EventSequences:
        """The sequences with some of the items, which are all that have events."""
        new = np.cumsum(kept) - 1
        return replace(self, items=new[self.items], item_labels=self.item_labels[kept])


@saved_as("EventSplit")
@dataclass(frozen=True, eq=False, repr=False)
class EventSplit(Shown):
    """Training, validation and test of the same users, one after the other in time."""

    train: EventSequences
    validation: EventSequences
    test: EventSequences
    notes: tuple[str, ...] = ()
    """Number of users and events that each rule took away."""

    @cached_property
    def history(self) -> EventSequences:
        """Training and validation of each user joined: all before the test."""
        return _joined(self.train, self.validation)

    @cached_property
    def whole(self) -> EventSequences:
        """All events of each user."""
        return _joined(self.history, self.test)

    @cached_property
    def is_test(self) -> np.ndarray:
        """True for each event of ``whole`` that belongs to the test, shape ``(total,)``."""
        return self.whole.positions >= self.history.lengths[self.whole.users]

    def mean_over_users(self, values: ArrayLike) -> float:
        """Mean over users with test events of the mean of each user's values, one for each test event."""
        tested = self.test.lengths > 0
        sums = np.bincount(self.test.users, np.asarray(values, float), minlength=self.test.num_users)
        return float(np.mean(sums[tested] / self.test.lengths[tested]))

    def _shown(self) -> list[str]:
        counts = ", ".join(f"{getattr(self, name).items.size:,} {name}" for name in ("train", "validation", "test"))
        return [
            f"EventSplit: {self.train.num_users:,} users, {self.train.num_items:,} items",
            f"{counts} events",
            *self.notes,
        ]


def hold_out(train: EventSequences, validation: EventSequences | None = None) -> EventSplit:
    """Split whose test is the validation, for choices that are made by validation.

    :param train: sequences to learn from.
    :param validation: what follows in each; without it a tenth of each sequence, one event or more, is held out.
    """
    if validation is None:
        sizes = np.maximum(np.round(0.1 * train.lengths).astype(int), 1)
        train, validation = _cut(train, np.where(train.lengths > 1, sizes, 0))
    nothing = replace(train, items=train.items[:0], lengths=np.zeros_like(train.lengths), notes=())
    return EventSplit(train, nothing, validation)


def _cut(sequences: EventSequences, sizes: np.ndarray) -> tuple[EventSequences, EventSequences]:
    """The sequences without their last events, and these."""
    is_last = sequences.positions >= (sequences.lengths - sizes)[sequences.users]
    first = replace(sequences, items=sequences.items[~is_last], lengths=sequences.lengths - sizes, notes=())
    return first, replace(sequences, items=sequences.items[is_last], lengths=sizes, notes=())


def _joined(first: EventSequences, second: EventSequences) -> EventSequences:
    whole = joined(first, second)
    return replace(first, items=np.asarray(whole.items), lengths=np.asarray(whole.lengths), notes=())
