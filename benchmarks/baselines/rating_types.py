"""People of a few types, each with chances of its own for the levels of every item: a mixture of multinomials."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RatingTypes(NamedTuple):
    """Chances at the mode, by expectation maximisation.

    Priors are Dirichlet with one observation more in each place than a flat one.
    """

    log_prior: np.ndarray
    """Log shares of the types, shape ``(num_types,)``."""
    chance: np.ndarray
    """Log probability of each level of each item, by type, shape ``(num_items, num_levels, num_types)``."""

    @classmethod
    def fitted(
        cls,
        person: np.ndarray,
        item: np.ndarray,
        level: np.ndarray,
        *,
        num_items: int,
        num_levels: int,
        num_types: int,
        seed: int,
        num_steps: int = 200,
    ) -> RatingTypes:
        """Types of the people of these ratings, from one random start.

        :param person: of each rating, integers from 0.
        :param item: of each rating, likewise.
        :param level: of each rating, likewise.
        """
        num_people = int(person.max()) + 1
        share = np.random.default_rng(seed).dirichlet(np.ones(num_types), num_people)
        for _ in range(num_steps):
            chance = np.ones((num_items, num_levels, num_types))
            np.add.at(chance, (item, level), share[person])
            chance /= chance.sum(1, keepdims=True)
            found = cls(np.log((share.sum(0) + 1.0) / (num_people + num_types)), chance)
            share = found.shares(person, item, level, num_people)
        return found

    def shares(self, person: np.ndarray, item: np.ndarray, level: np.ndarray, num_people: int) -> np.ndarray:
        """Probabilities of the types of people, given their ratings, shape ``(num_people, num_types)``."""
        log_share = np.tile(self.log_prior, (num_people, 1))
        np.add.at(log_share, person, np.log(self.chance[item, level]))
        share = np.exp(log_share - log_share.max(1, keepdims=True))
        return np.asarray(share / share.sum(1, keepdims=True))

    def levels(self, share: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Probabilities of all levels of cells, shape ``(n, num_levels)``.

        :param share: of the person of each cell, shape ``(n, num_types)``.
        :param item: of each cell.
        """
        return np.asarray(np.einsum("cj,clj->cl", share, self.chance[item]))

    def information(self, share: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Mutual information of the rating of each cell and the type of its person."""
        each = entropy(np.moveaxis(self.chance[item], 1, 2))
        return entropy(self.levels(share, item)) - np.sum(share * each, -1)


def entropy(probability: np.ndarray) -> np.ndarray:
    """Entropies over the last axis."""
    return np.asarray(-np.sum(probability * np.log(np.maximum(probability, 1e-300)), -1))
