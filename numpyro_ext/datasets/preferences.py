"""Preferences that users download, and simulated ones."""

from __future__ import annotations

import csv
import gzip
from typing import Literal, NamedTuple

import numpy as np

from ..linalg.saved_names import saved_as
from .external import data_path


@saved_as("Rankings")
class Rankings(NamedTuple):
    """Rankings of many people, best first."""

    rankings: np.ndarray
    """Items, best first, shape ``(people, ranked)``."""
    num_items: int
    item_names: tuple[str, ...]
    item_features: np.ndarray
    """Binary features, standardised numbers and indicators of the kind, shape ``(items, 18)``."""


@saved_as("PairsOfItems")
class PairsOfItems(NamedTuple):
    """Comparisons of items by users."""

    pairs: np.ndarray
    """Columns user, winner and loser, integers of shape ``(n, 3)``."""
    num_users: int
    num_items: int
    item_features: np.ndarray
    """Shape ``(items, features)``."""


# The numbers that the items of the first set have in the list of all items.
_ITEMS_OF_A = (0, 1, 2, 3, 4, 6, 7, 8, 26, 29)


def load_sushi(which: Literal["a", "b"] = "a") -> Rankings:
    """Rankings of sushi by 5000 people: all ten of set A, or ten of the hundred of set B.

    The files ``sushi3a.5000.10.order``, ``sushi3b.5000.10.order`` and ``sushi3.idata`` are to be in the folder
    ``sushi`` below that which the environment variable ``NUMPYRO_EXT_DATA`` names. They may not be redistributed.

    **References**

    1. Kamishima, T. (2003), Nantonac collaborative filtering: recommendation based on order responses, *KDD*.

    :param str which: ``"a"`` or ``"b"``.
    :return: the rankings, with names and features of the items.
    :raises ValueError: for another set.
    :raises FileNotFoundError: if the files are not there.
    """
    if which not in ("a", "b"):
        raise ValueError(f"which must be 'a' or 'b'; got {which!r}.")
    rankings = np.loadtxt(data_path("sushi", f"sushi3{which}.5000.10.order"), int, skiprows=1)[:, 2:]
    with data_path("sushi", "sushi3.idata").open(encoding="utf-8") as lines:
        rows = [line.rstrip("\n").split("\t") for line in lines if line.count("\t") > 5]
    chosen = [rows[k] for k in (_ITEMS_OF_A if which == "a" else range(len(rows)))]
    numbers = np.array([row[2:9] for row in chosen], float)
    kinds = np.arange(12) == np.array([int(row[4]) for row in chosen])[:, None]
    real = numbers[:, 3:]
    real = (real - real.mean(0)) / real.std(0)
    return Rankings(
        rankings, len(chosen), tuple(row[1] for row in chosen), np.concatenate([numbers[:, :2], real, kinds], axis=1)
    )


def load_best_worst_pairs() -> PairsOfItems:
    """All pairs of a film of the best and one of the worst rating of a user, from the MovieLens 100K ratings.

    The files ``ratings.csv.gz`` (user, item, rating, timestamp) and ``items.csv.gz`` (id, title, date and 19 genres)
    are to be in the folder ``ml-100k`` below that which ``NUMPYRO_EXT_DATA`` names. Users with one rating for all films
    have no pairs. Features are the genres.

    **References**

    1. Harper, F. M. and Konstan, J. A. (2015), The MovieLens datasets: history and context, *ACM TiiS* 5(4).
    2. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL,
       section 3.2.3.

    :return: the pairs.
    :raises FileNotFoundError: if the files are not there.
    """
    with gzip.open(data_path("ml-100k", "ratings.csv.gz"), "rt", encoding="utf-8") as lines:
        user, item, stars = np.loadtxt(lines, float, delimiter=",", skiprows=1, usecols=(0, 1, 2)).T.astype(int)
    with gzip.open(data_path("ml-100k", "items.csv.gz"), "rt", encoding="utf-8") as lines:
        rows = list(csv.reader(lines))[1:]
    user, item = user - user.min(), item - item.min()
    pairs = []
    for each in np.unique(user):
        mine = user == each
        best = item[mine & (stars == stars[mine].max())]
        worst = item[mine & (stars == stars[mine].min())]
        if stars[mine].max() > stars[mine].min():
            winner, loser = np.repeat(best, worst.size), np.tile(worst, best.size)
            pairs.append(np.stack([np.full(winner.size, each), winner, loser], axis=1))
    features = np.array([row[-19:] for row in rows], float)
    return PairsOfItems(np.concatenate(pairs), int(user.max()) + 1, int(item.max()) + 1, features)


def simulate_preferences(
    num_users: int = 100, num_items: int = 20, pairs_per_user: int = 10, rank: int = 2, seed: int = 0
) -> PairsOfItems:
    """Comparisons drawn from the model of Ko (2017), section 3.2: a twin of real data that may be shipped.

    Utilities are a mean, shared tastes and a Gaussian process on three features of the items, with probit choices.

    **Example:**

    >>> from numpyro_ext.datasets import simulate_preferences
    >>> data = simulate_preferences(num_users=5, num_items=6, pairs_per_user=4)
    >>> print(data.pairs.shape, data.item_features.shape)
    (20, 3) (6, 3)

    :param int num_users: number of users.
    :param int num_items: number of items.
    :param int pairs_per_user: pairs of each user, repeats among them.
    :param int rank: number of shared tastes.
    :param int seed: of the random numbers.
    :return: the pairs.
    """
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num_items, 3))
    kernel = np.exp(-0.5 * np.sum((features[:, None] - features) ** 2, -1)) + 0.1 * np.eye(num_items)
    loadings, mean = rng.normal(size=(num_items, rank)), 0.5 * rng.normal(size=num_items)
    utility = mean + rng.normal(size=(num_users, rank)) @ loadings.T
    utility += rng.normal(size=(num_users, num_items)) @ np.linalg.cholesky(0.5 * kernel).T
    user = np.repeat(np.arange(num_users), pairs_per_user)
    first = rng.integers(num_items, size=user.size)
    second = (first + rng.integers(1, num_items, size=user.size)) % num_items
    won = utility[user, first] - utility[user, second] + rng.normal(size=user.size) > 0
    pairs = np.stack([user, np.where(won, first, second), np.where(won, second, first)], axis=1)
    return PairsOfItems(pairs, num_users, num_items, features)
