"""Posteriors of sites and of hyperparameters as mixtures over a design of hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from scipy.special import ndtr

from ....compilation.transfer import to_device
from ...front.answers.sites import Marginal, SitePosterior, probabilities
from ...front.results import is_joint
from .mixture_marginals import MarginalMixture

_LEAST_POINTS, _MANY_POINTS = 5, 1000
"""Points of which masses have a shape, and so many that it is that of the density."""
_NUM_GRID = 500
_LARGEST_DIFFERENCE = 0.15
"""Between the distribution functions of the masses on a lattice, spread over their cells, and of a skew normal, in
widths of a cell over those of the posterior. The first is wrong by half of that at most; the second is where the
skewness is near its limit of one."""


_RANGES = {type(constraints.simplex): (0.0, 1.0), type(constraints.corr_cholesky): (-1.0, 1.0)}
"""Ranges of the elements of supports that are joint."""


@dataclass(eq=False, repr=False)
class HyperPosterior(Marginal):
    """The posterior of one hyperparameter; moments are integrals over the design, in the shape of the site.

    Obtained as ``engine.hyper[name]``.
    """

    name: str
    values: np.ndarray
    """Constrained values at the points of the design, shape ``(K,) + shape``."""
    unconstrained: np.ndarray
    """The values before the transform of the site, shape ``(K,) + shape``."""
    weights: np.ndarray
    """Their posterior masses, shape ``(K,)``."""
    mode: Array
    """The value at the mode of the unconstrained density."""
    transform: Any
    """From unconstrained values."""
    is_fixed: bool
    cell: np.ndarray | None = None
    """Standard deviations of the unconstrained values within a cell, where the points are a lattice, so that their
    masses say how these are distributed; the shape of the unconstrained site."""
    draw: Callable[[Array, int], Array] | None = None
    """Maps a random key and a number to draws, as :meth:`~numpyro_ext.infer.EP.get_samples` has them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the site."""
        return self.values.shape[1:]

    @property
    def mean(self) -> Array:
        """Posterior mean."""
        # A value that was given is that, and not a sum of shares of it.
        return jnp.asarray(self.values[0] if self.is_fixed else np.tensordot(self.weights, self.values, 1))

    @property
    def sd(self) -> Array:
        """Posterior standard deviation."""
        return jnp.asarray(np.sqrt(np.tensordot(self.weights, (self.values - np.asarray(self.mean)) ** 2, 1)))

    @property
    def variance(self) -> Array:
        """Posterior variance of each element."""
        return jnp.square(self.sd)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def covariance(self) -> Array:
        """Covariance between all elements, of shape ``shape + shape``."""
        centred = (self.values - np.asarray(self.mean)).reshape(len(self.weights), -1)
        return jnp.asarray(((centred.T * self.weights) @ centred).reshape(self.shape + self.shape))

    def interval(self, prob: float = 0.9) -> tuple[Array, Array]:
        """The central interval of each element; both ends are the value, where that was given.

        :param float prob: its probability mass.
        :return: lower and upper ends, each in the shape of the site.
        """
        if self.is_fixed:
            return self.mean, self.mean
        return super().interval(prob)

    def _sample(self, rng_key: Array, num_samples: int) -> Array:
        assert self.draw is not None  # as of all that a run makes
        return self.draw(rng_key, num_samples)

    @property
    def value(self) -> Array:
        """The posterior mean: what other engines report under this name is the optimum."""
        return self.mean

    @property
    def standard_error(self) -> Array | None:
        """The posterior standard deviation, ``None`` for a value that was given."""
        return None if self.is_fixed else self.sd

    @property
    def unconstrained_value(self) -> Array:
        """The posterior mean of the unconstrained value."""
        return jnp.asarray(np.tensordot(self.weights, self.unconstrained, 1))

    @property
    def unconstrained_standard_error(self) -> Array | None:
        """The posterior standard deviation of the unconstrained value, ``None`` for one that was given."""
        squares = (self.unconstrained - np.asarray(self.unconstrained_value)) ** 2
        return None if self.is_fixed else jnp.asarray(np.sqrt(np.tensordot(self.weights, squares, 1)))

    def quantile(self, q: ArrayLike) -> Array:
        """Quantiles of each element, from the skew normal with three moments of the unconstrained values; where the
        masses on a lattice have another shape, as where it follows two scales of which the data know one sum, or one
        scale that may be zero, from these masses, spread over the cells of the lattice. Where elements are functions of
        several unconstrained ones (simplices, Cholesky factors), from the skew normal with three moments of their own,
        within the range that all such have.

        :param q: probability, or array of probabilities, inside (0, 1).
        :return: of shape ``q.shape + shape``.
        :raises ValueError: if a probability is outside (0, 1), or the value was given.
        """
        q = probabilities(q, self.values.dtype)
        if self.is_fixed:
            raise ValueError(f"Hyperparameter {self.name!r} was given: it has no distribution.")
        if is_joint(self.transform):
            return self._quantile_of_values(q)
        free = self.unconstrained.reshape(len(self.weights), -1)
        mean = self.weights @ free
        variance = self.weights @ (free - mean) ** 2
        skewness = self.weights @ (free - mean) ** 3 / variance**1.5
        mixture = MarginalMixture(np.ones(1), mean[None], variance[None], skewness[None])
        ends = [self.transform((mean + shift * np.sqrt(variance)).reshape(self.values.shape[1:])) for shift in (-1, 1)]
        is_increasing = np.asarray(ends[1] >= ends[0])
        low, high = (
            self._by_masses(p, mixture.quantile(p), mixture, free).reshape(q.shape + is_increasing.shape)
            for p in (q, 1.0 - q)
        )
        return self.transform(jnp.asarray(np.where(is_increasing, low, high)))

    def _quantile_of_values(self, q: np.ndarray) -> Array:
        """Quantiles of shape ``q.shape + shape`` by the moments of the constrained values."""
        values = self.values.reshape(len(self.weights), -1)
        mean = self.weights @ values
        variance = self.weights @ (values - mean) ** 2
        third = self.weights @ (values - mean) ** 3
        skewness = np.where(variance > 0.0, third / np.where(variance > 0.0, variance, 1.0) ** 1.5, 0.0)
        found = MarginalMixture(np.ones(1), mean[None], variance[None], skewness[None]).quantile(q)
        low, high = _RANGES.get(type(self.transform.codomain), (-np.inf, np.inf))
        return jnp.asarray(np.clip(found, low, high).reshape(q.shape + self.shape))

    def _by_masses(self, q: np.ndarray, found: np.ndarray, mixture: MarginalMixture, free: np.ndarray) -> np.ndarray:
        """Quantiles of shape ``(..., R)``, with those of the masses on the lattice where these have another shape."""
        if len(free) >= _MANY_POINTS:
            for place, column in enumerate(free.T):
                order = np.argsort(column)
                below = np.cumsum(self.weights[order]) - 0.5 * self.weights[order]
                found[..., place] = np.interp(q, below, column[order])
            return found
        if self.cell is None or len(free) < _LEAST_POINTS:
            return found
        mean = self.weights @ free
        variance, width = self.weights @ (free - mean) ** 2, self.cell.reshape(-1)
        is_fine = (width > 0.0) & (width**2 < variance)
        width = np.where(is_fine, width, 1.0)
        # Each mass is spread over its cell, and all are drawn together by what that adds to the variance.
        shrunk = np.where(is_fine, 1.0 - width**2 / np.where(is_fine, variance, 1.0), 1.0)
        centers = mean + np.sqrt(shrunk) * (free - mean)
        grid = np.linspace(np.min(centers, axis=0) - 4.0 * width, np.max(centers, axis=0) + 4.0 * width, _NUM_GRID)
        below = np.stack(
            [ndtr((grid[:, r, None] - centers[:, r]) / width[r]) @ self.weights for r in range(len(width))], axis=1
        )
        difference = np.max(np.abs(mixture.cdf(grid) - below), axis=0)
        is_other = is_fine & (difference > _LARGEST_DIFFERENCE * np.sqrt(1.0 - shrunk))
        for number in np.flatnonzero(is_other):
            found[..., number] = np.interp(q, below[:, number], grid[:, number])
        return found


class MixturePosterior(SitePosterior):
    """The posterior of one site that is affine in the field, as a mixture over the hyperparameters.

    Obtained as ``engine.posterior[name]``. Moments and quantiles are those of the mixture of marginals. The covariances
    and the draws have Gaussian components, the draws with the means of the marginals; draws of sites on a half line lie
    on it.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        mixture: MarginalMixture,
        covariance: Callable[[], Array],
        sample: Callable[[Array, int], Array],
    ) -> None:
        mean, variance = map(to_device, mixture.mean_and_variance())
        super().__init__(name, shape, lambda: mean, lambda: variance, covariance, sample)
        self.mixture = mixture

    def part(self, places: np.ndarray) -> MixturePosterior:
        """Some of the elements as a site of their own; see :meth:`SitePosterior.part`."""
        flat, rest = np.asarray(places).reshape(-1), super().part(places)
        mixture = self.mixture._replace(
            **{name: getattr(self.mixture, name)[:, flat] for name in ("means", "variances", "skewnesses")},
            lower=None if self.mixture.lower is None else self.mixture.lower[flat],
        )
        return MixturePosterior(self.name, np.shape(places), mixture, rest.covariance, rest.sample)

    def cdf(self, x: ArrayLike) -> Array:
        """Posterior probability of each element being below ``x``.

        :param x: in the shape of the site, or with further axes in front.
        :return: in the shape of ``x``.
        """
        x = np.asarray(x, self.mixture.means.dtype)
        flat = x.reshape(*x.shape[: x.ndim - len(self.shape)], self.size)
        return jnp.asarray(self.mixture.cdf(flat)).reshape(x.shape)

    def _quantile(self, q: np.ndarray) -> Array:
        return jnp.asarray(self.mixture.quantile(q))
