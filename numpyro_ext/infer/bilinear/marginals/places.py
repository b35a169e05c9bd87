"""Places of the elements of a site among the vectors of a bilinear posterior."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....structure.bilinear.form import CoupledSide, Side
from ....structure.bilinear.reading import BilinearReading
from ..algorithms.incidence import CoupledBlock, SideBlock, coupled_moments, draw_side, draws_of_side


class SitePlaces(NamedTuple):
    """Places of the elements of a site among the vectors of its side, in C order."""

    block: SideBlock
    prior: Side
    """Prior of the vectors."""
    vector: np.ndarray
    component: np.ndarray

    def mean(self) -> Array:
        """Mean of each element."""
        mean = self.block.mean
        if isinstance(self.block, CoupledBlock):
            assert isinstance(self.prior, CoupledSide)
            mean = self.prior.colour(mean)
        return mean[self.vector, self.component]

    def variance(self) -> Array:
        """Variance of each element; points have none."""
        if isinstance(self.block, CoupledBlock):
            return self._correlated()[self.component, self.vector, self.vector]
        return self.block.variance[self.vector, self.component]

    def covariance(self) -> Array:
        """Covariance between all elements; different vectors are independent, or different components."""
        vector, component = self.vector, self.component
        if isinstance(self.block, CoupledBlock):
            full = self._correlated()[component[:, None], vector[:, None], vector[None, :]]
            return jnp.where(component[:, None] == component[None, :], full, 0.0)
        if self.block.is_diagonal:
            return jnp.diag(self.variance())
        full = self.block.matrices[vector[:, None], component[:, None], component[None, :]]
        return jnp.where(vector[:, None] == vector[None, :], full, 0.0)

    def _correlated(self) -> Array:
        """Covariances of each component between vectors that depend on each other, ``(size, num, num)``."""
        assert isinstance(self.block, CoupledBlock) and isinstance(self.prior, CoupledSide)
        return coupled_moments(self.block, self.prior)[1]

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Draws of all elements, shape ``(num_samples, n)``."""
        draws: Array = draws_of_side(self.block, self.prior, rng_key, num_samples)
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

        draws = _cosines(self.block, self.prior, used, index, jax.random.split(rng_key, num_samples))
        mean, deviation = np.asarray(draws.mean(0)), np.asarray(draws.std(0))
        order = np.argsort(-mean, kind="stable")
        order = order[order != index][: min(num_similar, num - 1)]
        return order, mean[order], deviation[order]


@jax.jit
def _cosines(block: SideBlock, prior: Side, used: Array, index: Array, keys: Array) -> Array:
    """Cosines between draws of the vectors and one of them, shape ``(num_samples, num)``."""

    def of_draw(key: Array) -> Array:
        draw = draw_side(block, prior, key)[:, used]
        norm = jnp.linalg.norm(draw, axis=1)
        product = norm * norm[index]
        return jnp.where(product > 0.0, draw @ draw[index] / jnp.where(product > 0.0, product, 1.0), 0.0)

    return jax.lax.map(of_draw, keys)


def site_places(
    reading: BilinearReading, blocks: tuple[SideBlock, SideBlock], name: str, priors: tuple[Side, Side]
) -> SitePlaces:
    """The places of a site in the posterior of its side.

    :param BilinearReading reading: of the model.
    :param blocks: posteriors of rows and columns.
    :param str name: of a site of one of them.
    :param priors: of rows and columns.
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
    return SitePlaces(blocks[sides[0]], priors[sides[0]], vector, component)
