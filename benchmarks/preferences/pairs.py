"""What the tables of preferences share: kernels of features, pairs of people, and how results are written."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..harness import repeats

BITS = np.log(2.0)


def kernel_of(features: np.ndarray, psi: float, alpha: float = 0.1) -> np.ndarray:
    """Covariance of items by their features, with a share of noise."""
    squares = np.sum((features[:, None] - features) ** 2, axis=-1)
    return np.asarray(np.exp(-squares / psi) + alpha * np.eye(len(features)))


def drawn_pairs(rankings: np.ndarray, counts: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """Different pairs of each person's ranking, in so many parts, with columns user, winner and loser.

    Which places are compared is drawn once for all seeds and then shuffled by person, so that as many people have as
    many different items in each draw, and the fits of all draws share their compiled programs.
    """
    num_users, length = rankings.shape
    design, rng = np.random.default_rng(0), np.random.default_rng(seed)
    every = np.array(list(itertools.combinations(range(length), 2)))
    parts: list[list[tuple[int, int, int]]] = [[] for _ in counts]
    for user in range(num_users):
        chosen = every[design.choice(len(every), sum(counts), replace=False)]
        places = np.sort(rng.permutation(length)[chosen], axis=1)
        ends = np.cumsum(counts)
        for part, start, end in zip(parts, ends - counts, ends, strict=True):
            part += [(user, rankings[user, i], rankings[user, j]) for i, j in places[start:end]]
    return [np.array(part) for part in parts]


def held_out(pairs: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """So many random pairs of each user for the test and the others for training; users without others are dropped."""
    shuffled = pairs[np.random.default_rng(seed).permutation(len(pairs))]
    order = np.argsort(shuffled[:, 0], kind="stable")
    user = shuffled[order, 0]
    place = np.arange(len(user)) - np.searchsorted(user, user)
    is_kept = np.bincount(user)[user] > count
    return shuffled[order[is_kept & (place >= count)]], shuffled[order[is_kept & (place < count)]]


def loss(fit: Any, test: np.ndarray) -> float:
    """Mean negative log probability of what was preferred, in bits."""
    return float(-np.mean(fit.log_predictive(*test.T)) / BITS)


def mean_and_error(values: Any) -> str:
    array = np.asarray(list(values), float)
    return repeats.mean_and_error(array, digits=3) if array.size > 1 else f"{array.mean():.3f}"


def asked(what: str, are_met: Any) -> str:
    """What was asked of every draw, and of how many it is true."""
    found = list(are_met)
    return f"{what}: {'met' if all(found) else 'missed'}, true of {sum(found)} of {len(found)} draws."
