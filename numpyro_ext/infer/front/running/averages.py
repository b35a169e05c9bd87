"""Averages of statistics over minibatches, in the place of sums over all data.

Cappé and Moulines (2009), *Online Expectation-Maximization Algorithm for Latent Data Models*.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike

# Weight of the t-th minibatch: (1 + t)^-0.6. Sums of the weights diverge, those of their squares do not.
_DECAY = 0.6


class Averages(NamedTuple):
    """Averages over what was seen so far."""

    values: Any
    """Tree of arrays, per unit of weight."""
    weight: ArrayLike
    """Weight behind them, as of the users of a minibatch."""
    num_batches: int
    """Minibatches so far."""

    @classmethod
    def after(cls, before: Averages | None, values: Any, weight: ArrayLike) -> Averages:
        """Averages that have moved towards those of a minibatch by a decreasing fraction; one that is light says less.

        :param before: averages before this minibatch, or ``None``.
        """
        if before is None:
            return cls(values, weight, 1)
        rate = (1.0 + before.num_batches) ** -_DECAY
        total = (1.0 - rate) * before.weight + rate * weight
        return cls(_mixed(before.values, values, rate * weight / total), total, before.num_batches + 1)


@jax.jit
def _mixed(old: Any, new: Any, share: ArrayLike) -> Any:
    return jax.tree.map(lambda x, y: x + share * (y - x), old, new)
