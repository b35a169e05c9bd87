"""Nodes of equal steps that all blocks share."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .block_nodes import lattice

_REACH, _REACH_OF_PAIRS = 8.0, 6.5
"""Prior standard deviations on both sides at which the nodes end, of one unknown and of each of two."""


class Grid(NamedTuple):
    """Nodes of equal steps that all blocks share."""

    first: Array
    """First node: a number where blocks have one unknown, else one for each axis, shape ``(D,)``."""
    last: Array

    def nodes(self, number: int) -> Array:
        """The nodes, shape ``(number,)``, or ``(number ** D, D)`` with that many on each axis."""
        if self.first.ndim == 0:
            return self.first + (self.last - self.first) * jnp.linspace(0.0, 1.0, number, dtype=self.first.dtype)
        return self.first + (self.last - self.first) * jnp.asarray(lattice(number, self.first.size), self.first.dtype)

    def log_step(self, number: int) -> Array:
        """Log volume of a cell between so many nodes on each axis."""
        return jnp.sum(jnp.log((self.last - self.first) / (number - 1)))


def grid_of(shift: Array, variance: Array) -> Grid:
    """Grid that reaches as far as the priors of all blocks.

    :param shift: locations of the unknowns, shape ``(B,)``, or ``(B, D)``.
    :param variance: their variances, of the same shape.
    """
    number = _REACH if shift.ndim == 1 else _REACH_OF_PAIRS
    shift, reach = lax.stop_gradient((shift, number * jnp.sqrt(variance)))
    return Grid(jnp.min(shift - reach, axis=0), jnp.max(shift + reach, axis=0))
