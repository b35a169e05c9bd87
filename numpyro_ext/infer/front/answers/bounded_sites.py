"""Marginals of sites that lie above a bound, under a posterior that is known by its moments."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import ndtri
from jax.typing import ArrayLike

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....potentials.integrals.truncated_by_moments import truncated_by_moments
from .sites import SitePosterior


class BoundedPosterior(SitePosterior):
    """The posterior of a site above a bound: marginals are normals cut there, with the moments of the posterior.

    Obtained as ``engine.posterior[name]``.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        mean: Callable[[], ArrayLike],
        variance: Callable[[], ArrayLike],
        covariance: Callable[[], Array],
        sample: Callable[[Array, int], Array],
        lower: np.ndarray,
    ) -> None:
        super().__init__(name, shape, mean, variance, covariance, sample)
        self.lower = lower
        """Bound of each element, in C order."""

    def part(self, places: np.ndarray) -> BoundedPosterior:
        """Some of the elements as a site of their own; see :meth:`SitePosterior.part`."""
        flat, rest = np.asarray(places).reshape(-1), super().part(places)
        return BoundedPosterior(
            self.name,
            np.shape(places),
            mean=lambda: rest.mean,
            variance=lambda: rest.variance,
            covariance=rest._covariance,
            sample=rest._sample,
            lower=self.lower[flat],
        )

    def _quantile(self, q: np.ndarray) -> Array:
        probability = q.reshape(math.prod(q.shape), 1)
        mean, variance = (np.reshape(x, -1) for x in (self._mean(), self._variance()))
        return shared(_quantiles)(mean, variance, self.lower.astype(mean.dtype), probability)


def _quantile(mean: Array, variance: Array, lower: Array, q: Array) -> Array:
    return truncated_by_moments(mean, variance, lower).from_normal(jnp.asarray(ndtri(q)))


def _quantiles() -> Callable[..., Array]:
    return quick_jit(_quantile, is_small=True)
