"""Events of one log with the numbers that another log gives to items and users."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import numpy as np

from .events import EventSequences, EventSplit


@overload
def numbered_as(data: EventSequences, other: EventSequences, *, users: bool = False) -> EventSequences: ...
@overload
def numbered_as(data: EventSplit, other: EventSequences, *, users: bool = False) -> EventSplit: ...
def numbered_as(
    data: EventSequences | EventSplit, other: EventSequences, *, users: bool = False
) -> EventSequences | EventSplit:
    """Number the items of a log as those of another, so that what was fitted to that one can score it.

    Labels decide. Events of items that the other log does not have are left out, which ``notes`` tells.

    **Example:**

    >>> from numpyro_ext.sequences import EventSequences, numbered_as
    >>> old = EventSequences.from_lists({"ann": ["tea", "milk"], "bob": ["milk"]})
    >>> new = EventSequences.from_lists({"bob": ["tea", "cake", "tea"]})
    >>> print(new.items, numbered_as(new, old, users=True))
    [1 0 1] EventSequences: 2 users, 2 items, 2 events
    items that the other log does not have: 1 events

    :param data: sequences, or a split of them.
    :param other: log of a fit, such as ``split.train``.
    :param bool users: number the users as those of the other log as well, which predictors with a part of each person
        need: users who are not there are left out, and those who have no events here have none.
    :return: the same kind of data.
    :raises ValueError: if the two have no item in common, or with ``users`` no user.
    """
    found: EventSequences | EventSplit
    if isinstance(data, EventSplit):
        train, validation, test = (_numbered(part, other, users) for part in (data.train, data.validation, data.test))
        found, source = EventSplit(train, validation, test, data.notes), data.train
        whole = found.whole
    else:
        found, source = _numbered(data, other, users), data
        whole = found
    if whole.items.size == 0:
        names = [("items", "item_labels"), ("users", "user_labels")][: 1 + users]
        pairs = ((kind, getattr(source, name)[:3].tolist(), getattr(other, name)[:3].tolist()) for kind, name in names)
        begin = ", and ".join(f"{kind} begin with {own} and {others}" for kind, own, others in pairs)
        raise ValueError(f"numbered_as: no event is left, as the two logs have nothing in common: {begin}.")
    return found


def _numbered(log: EventSequences, other: EventSequences, users: bool) -> EventSequences:
    """:func:`numbered_as` of sequences, of which nothing may be left."""
    number = _numbers(log.item_labels, other.item_labels)
    found = log.without(number[log.items] < 0, "items that the other log does not have")
    found = replace(found, items=number[found.items], item_labels=other.item_labels)
    if not users:
        return found
    place = _numbers(found.user_labels, other.user_labels)
    found = found.without(place[found.users] < 0, "users that the other log does not have")
    lengths = np.zeros(other.num_users, np.int64)
    lengths[place[place >= 0]] = found.lengths[place >= 0]
    order = np.argsort(place[found.users], kind="stable")
    return replace(found, items=found.items[order], lengths=lengths, user_labels=other.user_labels)


def _numbers(labels: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Number of each label among others, -1 where it is not there."""
    place = {label: number for number, label in enumerate(others.tolist())}
    return np.array([place.get(label, -1) for label in labels.tolist()], np.int64)
