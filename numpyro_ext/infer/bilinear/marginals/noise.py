"""Posteriors of noise, cut points and priors of the sides of ratings, as sites."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import gammainccinv, gammaincinv

from ...front.answers.sites import SitePosterior
from ..algorithms.messages import Moments
from ..algorithms.ratings.variances import GammaMessage


class VariancePosterior(SitePosterior):
    """The posterior of variances whose precisions have gamma densities, or of these precisions.

    :param str name: of the site.
    :param shape: of the site.
    :param GammaMessage gamma: densities of the precisions, flat.
    :param bool is_precision: whether the site is the precisions.
    """

    def __init__(self, name: str, shape: tuple[int, ...], gamma: GammaMessage, is_precision: bool) -> None:
        a, b = (np.asarray(x, float) for x in gamma)
        self._gamma, self._is_precision = (a, b), is_precision

        def sample(rng_key: Array, num_samples: int) -> Array:
            drawn = jax.random.gamma(rng_key, jnp.asarray(a), (num_samples, a.size)) / b
            return (drawn if is_precision else 1.0 / drawn).reshape(num_samples, *shape)

        def mean() -> np.ndarray:
            return a / b if is_precision else np.where(a > 1.0, b / np.maximum(a - 1.0, 1e-300), np.inf)

        def variance() -> np.ndarray:
            if is_precision:
                return np.asarray(a / b**2)
            return np.where(a > 2.0, mean() ** 2 / np.maximum(a - 2.0, 1e-300), np.inf)

        super().__init__(name, shape, mean, variance, lambda: jnp.diag(jnp.asarray(variance())), sample)

    def _quantile(self, q: np.ndarray) -> Array:
        a, b = self._gamma
        level = np.asarray(q).reshape(-1, 1)
        found = gammaincinv(a, level) / b if self._is_precision else b / gammainccinv(a, level)
        return jnp.asarray(found).reshape((*np.shape(q), *self.shape))


def independent_gaussians(name: str, shape: tuple[int, ...], found: Moments) -> SitePosterior:
    """The posterior of a site of independent Gaussian elements, given flat."""
    mean, variance = (np.asarray(x) for x in found)

    def sample(rng_key: Array, num_samples: int) -> Array:
        noise_of = jax.random.normal(rng_key, (num_samples, mean.size), mean.dtype)
        drawn: Array = mean + np.sqrt(variance) * noise_of
        return drawn.reshape(num_samples, *shape)

    return SitePosterior(name, shape, lambda: mean, lambda: variance, lambda: jnp.diag(jnp.asarray(variance)), sample)
