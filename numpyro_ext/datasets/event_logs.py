"""Logs of events that users download: who did what, in which order."""

from __future__ import annotations

import gzip
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..linalg.saved_names import saved_as
from .external import data_path


@saved_as("EventLog")
class EventLog(NamedTuple):
    """Columns of a table with one row for each event."""

    users: np.ndarray
    """Label of the user, shape ``(events,)``."""
    items: np.ndarray
    """Label of the item."""
    time: np.ndarray | None
    """Times, numbers of seconds or dates; ``None`` where the rows of each user stand in the order of time."""
    num_left_out: int = 0
    """Number of rows that have no item or no time, and are left out."""


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


def load_brightkite(path: str | Path) -> EventLog:
    """Check-ins at places from the user's own copy of a file of SNAP, ``loc-brightkite_totalCheckins.txt``.

    Each row has a user, a time, a latitude, a longitude and a place, with tabulators between them. The source keeps
    users and places with ten events or more, and users with an entropy above 2.5 nats: 1,679 users, 23,243 places and
    599,618 check-ins. Its errors there are, in nats: uniform 10.05, 1-gram 9.53, matrix factorisation 9.40, hidden
    Markov 8.81, 2-gram 6.73, collaborative GRU 6.02.

    **References**

    1. Cho, E., Myers, S. A. and Leskovec, J. (2011), Friendship and mobility: user movement in location-based social
       networks, *KDD*.
    2. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL,
       section 3.3.5.

    :param path: of the file, which may be compressed by gzip.
    :return: the log.
    :raises ValueError: for a row with fewer columns.
    """
    return _log_of_rows(Path(path), user=0, time=1, items=(4,))


def load_lastfm_1k(path: str | Path) -> EventLog:
    """Artists in the order of listening, from the user's copy of ``userid-timestamp-artid-artname-traid-traname.tsv``.

    Artists without an identifier go by their name. The source keeps users and artists with ten events or more, users
    with an entropy above 3 nats, and the last 5,120 events of each: 954 users, 48,188 artists and 4,320,170 events. Its
    errors there are, in nats: uniform 10.78, matrix factorisation 8.86, 1-gram 8.60, hidden Markov 7.66, 2-gram 5.87,
    collaborative GRU 4.51.

    **References**

    1. Celma, O. (2010), *Music Recommendation and Discovery in the Long Tail*, Springer.
    2. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL,
       section 3.3.5.

    :param path: of the file, which may be compressed by gzip.
    :return: the log.
    :raises ValueError: for a row with fewer columns.
    """
    return _log_of_rows(Path(path), user=0, time=1, items=(2, 3))


def _log_of_rows(path: Path, *, user: int, time: int, items: tuple[int, ...], block: int = 500_000) -> EventLog:
    """Columns of a file with tabulators, of which ``items`` are tried in turn until one has an entry."""
    labels: tuple[dict[str, int], dict[str, int]] = ({}, {})
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    number = left_out = 0
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        while rows := list(islice(lines, block)):
            codes: tuple[list[int], list[int]] = ([], [])
            times = []
            for row in rows:
                number += 1
                cells = row.rstrip("\r\n").split("\t")
                if len(cells) <= max(user, time, *items):
                    raise ValueError(f"{path.name}: row {number} has {len(cells)} columns.")
                item = next((cells[column] for column in items if cells[column]), "")
                if not (cells[user] and item and cells[time]):
                    left_out += 1
                    continue
                for known, code, label in zip(labels, codes, (cells[user], item), strict=True):
                    code.append(known.setdefault(label, len(known)))
                times.append(cells[time].removesuffix("Z"))  # NumPy knows no time zones, and these are UTC
            parts.append((np.array(codes[0], int), np.array(codes[1], int), np.array(times, "datetime64[s]")))
    if not parts:
        raise ValueError(f"{path.name} is empty.")
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    names = [np.array(list(known)) for known in labels]
    return EventLog(names[0][columns[0]], names[1][columns[1]], columns[2], left_out)
