"""Logs of events that users download: who did what, in which order."""

from __future__ import annotations

import gzip
from typing import NamedTuple

import numpy as np

from ..linalg.saved_names import saved_as
from .external import data_path

__all__ = ["EventLog", "load_movielens_events", "load_wikipedia_edits"]


@saved_as("EventLog")
class EventLog(NamedTuple):
    """Columns of a table with one row for each event."""

    users: np.ndarray
    """Label of the user, shape ``(events,)``."""
    items: np.ndarray
    """Label of the item."""
    time: np.ndarray | None
    """Time in seconds; ``None`` where the rows of each user stand in the order of time."""


def load_wikipedia_edits() -> EventLog:
    """Edits of pages of Wikipedia during a month: 157,474 edits of 1,000 pages by 8,227 editors, in order.

    The file ``events.csv.gz`` (user, page) is to be in the folder ``wikipedia-edit-sequences`` below that which the
    environment variable ``NUMPYRO_EXT_DATA`` names.

    **References**

    1. Kumar, S., Zhang, X. and Leskovec, J. (2019), Predicting dynamic embedding trajectory in temporal interaction
       networks, *KDD*.

    :return: the log, without times.
    :raises FileNotFoundError: if the file is not there.
    """
    with gzip.open(data_path("wikipedia-edit-sequences", "events.csv.gz"), "rt", encoding="utf-8") as lines:
        user, page = np.loadtxt(lines, int, delimiter=",", skiprows=1).T
    return EventLog(user, page, None)


def load_movielens_events() -> EventLog:
    """Films that people rated, by the time of the rating: 100,000 ratings of 1,682 films by 943 people.

    The file ``ratings.csv.gz`` (user, item, rating, timestamp) is to be in the folder ``ml-100k`` below that which the
    environment variable ``NUMPYRO_EXT_DATA`` names. Nobody rates a film twice, and many ratings share a second.

    **References**

    1. Harper, F. M. and Konstan, J. A. (2015), The MovieLens datasets: history and context, *ACM TiiS* 5(4).

    :return: the log, with times.
    :raises FileNotFoundError: if the file is not there.
    """
    with gzip.open(data_path("ml-100k", "ratings.csv.gz"), "rt", encoding="utf-8") as lines:
        user, item, time = np.loadtxt(lines, int, delimiter=",", skiprows=1, usecols=(0, 1, 3)).T
    return EventLog(user, item, time)
