"""Pairs of people's rankings, and fits of what people share, of all studies of preferences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from numpyro_ext.datasets import load_sushi
from numpyro_ext.infer import collaborative_em

from ..harness import tables

BITS = np.log(2.0)
mean_and_error = partial(tables.mean_and_error, digits=3)
em = partial(collaborative_em, progress_bar=False)


def kernel_of(features: np.ndarray, psi: float, alpha: float = 0.1) -> np.ndarray:
    """Covariance of items by their features, with a share of noise."""
    squares = np.sum((features[:, None] - features) ** 2, axis=-1)
    return np.asarray(np.exp(-squares / psi) + alpha * np.eye(len(features)))


def sushi_users(seed: int, number: int = 200) -> np.ndarray:
    """Random people among the five thousand who ranked sushi."""
    return np.random.default_rng(seed).permutation(5000)[:number]


def sushi_pairs(seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Sushi A: of 200 people three pairs for training, one held out and one for validation; and the kernel."""
    data = load_sushi("a")
    parts = drawn_pairs(data.rankings[sushi_users(1000 + seed)], (3, 1, 1), seed)
    return parts, kernel_of(data.item_features, 10.0)


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


def ordered(pairs: np.ndarray) -> tuple[np.ndarray, ...]:
    """User, the item with the smaller number, the other, and whether the first won."""
    user, winner, loser = pairs.T
    return user, np.minimum(winner, loser), np.maximum(winner, loser), (winner < loser).astype(int)


def loss(fit: Any, test: np.ndarray) -> float:
    """Mean negative log probability of what was preferred, in bits."""
    return float(-np.mean(fit.log_predictive(*test.T)) / BITS)


def run_engine(engine: Any, train: np.ndarray, test: np.ndarray, seed: int = 0, **given: Any) -> dict[str, float]:
    """Loss, log evidence and convergence of an engine that is run on winners and losers."""
    engine.run(jax.random.key(seed), *train.T, np.ones(len(train), int), **given)
    log_probability = engine.log_predictive(*test.T, np.ones(len(test), int), **given)["won"]
    return {
        "loss": float(-np.mean(log_probability) / BITS),
        "evidence": float(engine.log_evidence),
        "converged": float(engine.diagnostics.converged),
    }


def along_em(
    parts: Sequence[np.ndarray], kernel: np.ndarray, V: np.ndarray, steps: Sequence[int], **options: Any
) -> list[tuple[float, float, int, int]]:
    """Losses on validation and on test pairs, rank and number of iterations, after so many iterations of EM more.

    :param parts: pairs for training, for the test and for validation.
    :param V: loadings to start from.
    """
    train, test, validation = parts
    values: Any = {"V": V}
    path, done = [], 0
    for count in steps:
        fit = em(train, kernel, V.shape[1], accelerator="none", num_steps=count, tol=0.0, init_values=values, **options)
        values, done = fit.parameters, done + count
        path.append((loss(fit, validation), loss(fit, test), V.shape[1], done))
    return path
