"""Posteriors of single sites out of the vectors of a side, and their similarity."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .cells import Block, draw_block

__all__ = ["SitePlaces", "site_places"]


class SitePlaces(NamedTuple):
    """Places of the elements of a site among the vectors of its side, in C order."""

    block: Block
    vector: np.ndarray
    component: np.ndarray

    def moments(self) -> tuple[Array, Array]:
        """Mean and variance of each element; points have no variance."""
        mean, covariance = self.block.mean[self.vector, self.component], self.block.covariance
        if covariance is None:
            return mean, jnp.zeros_like(mean)
        if covariance.ndim == 2:
            return mean, covariance[self.vector, self.component]
        return mean, covariance[self.vector, self.component, self.component]

    def covariance(self) -> Array:
        """Covariance between all elements; different vectors are independent."""
        covariance, vector, component = self.block.covariance, self.vector, self.component
        if covariance is None or covariance.ndim == 2:
            return jnp.diag(self.moments()[1])
        full = covariance[vector[:, None], component[:, None], component[None, :]]
        return jnp.where(vector[:, None] == vector[None, :], full, 0.0)

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Draws of all elements, shape ``(num_samples, n)``."""
        draws = jax.lax.map(partial(draw_block, self.block), jax.random.split(rng_key, num_samples))
        return draws[:, self.vector, self.component]

    def similar(
        self, rng_key: Array, index: int, *, num_similar: int, num_samples: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The vectors most similar to one of them by cosine, with means and standard deviations of the cosines.

        :raises ValueError: if there is no such vector.
        """
        num, used = self.block.mean.shape[0], np.unique(self.component)
        if not 0 <= index < num:
            raise ValueError(f"index must lie in 0, ..., {num - 1}, got {index}.")

        def cosines(key: Array) -> Array:
            draw = draw_block(self.block, key)[:, used]
            norm = jnp.linalg.norm(draw, axis=1)
            product = norm * norm[index]
            return jnp.where(product > 0.0, draw @ draw[index] / jnp.where(product > 0.0, product, 1.0), 0.0)

        draws = jax.lax.map(cosines, jax.random.split(rng_key, num_samples))
        mean, deviation = np.asarray(draws.mean(0)), np.asarray(draws.std(0))
        order = np.argsort(-mean, kind="stable")
        order = order[order != index][: min(num_similar, num - 1)]
        return order, mean[order], deviation[order]


def site_places(reading: Any, blocks: tuple[Block, Block], name: str) -> SitePlaces:
    """The places of a site in the posterior of its side.

    :param reading: a bilinear reading.
    :param blocks: posteriors of rows and columns.
    :param str name: of a site of one of them.
    :raises ValueError: if the site belongs to neither side.
    """
    sides = [side for side, names in enumerate(reading.sides) if name in names]
    if not sides:
        raise ValueError(f"{name!r} belongs to neither side; there are {reading.sides}.")
    elements = reading.elements[sides[0]]
    start, size = reading.site_start(name), int(np.prod(reading.site_shapes[name]))
    where = np.full(reading.num_columns, -1)
    where[elements.reshape(-1)] = np.arange(elements.size)
    vector, component = np.divmod(where[start : start + size], elements.shape[1])
    return SitePlaces(blocks[sides[0]], vector, component)
