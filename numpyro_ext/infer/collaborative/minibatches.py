"""EM over minibatches of users: averages of posterior moments in the place of sums over all users."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..front.running.averages import Averages
from .component_analysis import moments_of_utilities, step_to_moments
from .pairs import UserBatch
from .user_inference import SharedPrior


def parts_of_batches(
    batches: list[UserBatch], num_parts: int, num_items: int, rng: np.random.Generator
) -> Iterator[list[UserBatch]]:
    """Minibatches with equally many users of each batch, in a random order; their shapes are the same in each pass."""
    split = []
    for batch in batches:
        users = rng.permutation(np.flatnonzero(np.asarray(batch.users) >= 0))
        # who is left over goes to other minibatches than that of another batch
        shares = np.array_split(users, num_parts)
        split.append([shares[k] for k in rng.permutation(num_parts)])
    for part in range(num_parts):
        chosen = []
        for batch, shares in zip(batches, split, strict=True):
            length = max(map(len, shares))
            places = np.pad(shares[part], (0, length - len(shares[part])), constant_values=-1)
            if len(shares[part]):
                chosen.append(batch.take(places, num_items))
        yield chosen


def prior_after_pass(
    infer: Callable[[list[UserBatch], SharedPrior], Any],
    parts: Iterator[list[UserBatch]],
    prior: SharedPrior,
    averages: Averages | None,
    *,
    num_absent: float,
    free: bool,
    learn_mean: bool = True,
) -> tuple[SharedPrior, Averages | None, float]:
    """One M-step after each minibatch, to averages that move towards its moments by a decreasing fraction.

    :param infer: the E-step of some users under a prior.
    :param parts: the minibatches.
    :param averages: moments of utilities from the pass before.
    :param num_absent: users without pairs for each minibatch: they have the moments of the prior.
    :param bool free: whether the covariance has no structure.
    :param bool learn_mean: whether the mean of utilities is learned.
    :return: prior, averages, and the sum of the objectives, each under the prior of its turn.
    """
    total = 0.0
    for batches in parts:
        if not batches:
            continue
        expected = infer(batches, prior)
        if not np.isfinite(expected.objective):
            return prior, averages, np.nan
        weight = sum(int(np.sum(np.asarray(batch.users) >= 0)) for batch in batches) + num_absent
        new = moments_of_utilities(prior, expected.shift / weight, expected.curvature / weight)
        averages = Averages.after(averages, new, weight)
        prior = step_to_moments(prior, averages.values, free=free, learn_mean=learn_mean)
        total += expected.objective
    return prior, averages, total
