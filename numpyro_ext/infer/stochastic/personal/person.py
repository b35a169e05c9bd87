"""Posterior of one person: her latent numbers, what she does next, and evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import gammaln

from ....display import Shown
from ...front.answers.resampling import LARGEST_SHAPE, pareto_smoothed
from ...front.running.progress import warn
from ..scoring import checked_draws

_DEGREES = 10.0
"""Degrees of freedom of the t-distribution that weighted draws are from: its tails must not be the lighter ones."""
_SHARE_OF_PRIOR = 0.25
"""Share of draws from the prior, by which weights are bounded: few events may say little away from the mode."""
_MOST_ROUNDS = 3
_DRAWS_OF_MOMENTS = 1024


class _Weighted(NamedTuple):
    """Draws of latent numbers, their weights, and log probabilities of the next item at each."""

    draws: np.ndarray
    weights: np.ndarray
    log_probabilities: np.ndarray

    @property
    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of the latent numbers."""
        mean = self.weights @ self.draws
        return mean, (self.weights[:, None] * (self.draws - mean)).T @ (self.draws - mean)


@dataclass(frozen=True, eq=False, repr=False)
class Person(Shown):
    """Someone new: the posterior of her latent numbers, and what she does next.

    Means are over draws from a t-distribution at the mode and, a quarter of them, from the prior, with the importance
    weights of the density of her events and numbers, the largest of which are smoothed (Vehtari et al. 2024). Where
    Pareto k-hat says that the weights cannot hold, a warning says so. Another mode of the posterior that no draw
    reaches stays unseen.
    """

    mode: np.ndarray
    """Mode of the latent numbers, shape ``(K,)``."""
    covariance_at_mode: np.ndarray
    """Inverse of the Gauss-Newton curvature there, shape ``(K, K)``."""
    log_evidence: float
    """Laplace's approximation of the log probability of the history."""
    converged: bool
    """True if the search for the mode ended at a zero of the gradient."""
    num_dropped: int
    """Events that were left out because the fit has not seen their items."""
    look: Callable[[Array], tuple[Array, Array]]
    """Function from values of the latent numbers, shape ``(draws, K)``, to the log probabilities of the next item and
    the log densities of events and numbers."""

    def predict(self, numbers: Array) -> Array:
        """Log probabilities of the next item at values of the latent numbers.

        :param numbers: shape ``(draws, K)``.
        :return: shape ``(draws, items)``.
        """
        return self.look(jnp.asarray(numbers))[0]

    def next_probabilities(self, num_draws: int = 64, rng_key: Array | None = None) -> np.ndarray:
        """Probabilities of all items to be next, averaged over the posterior of the latent numbers.

        :param int num_draws: number of weighted draws, two at least; fewer than 25 are too few for Pareto k-hat.
        :param rng_key: for these.
        :return: shape ``(items,)``.
        :raises ValueError: for another number.

        **Cost:** a forward pass for each draw, and up to seven where the posterior is far from a Gaussian.
        """
        key = jax.random.key(0) if rng_key is None else rng_key
        found = self._weighted(checked_draws("Person", num_draws, 2), key)
        return found.weights @ np.exp(found.log_probabilities)

    @cached_property
    def mean(self) -> np.ndarray:
        """Posterior mean of the latent numbers, of 1024 weighted draws or more, shape ``(K,)``."""
        return self._moments[0]

    @cached_property
    def covariance(self) -> np.ndarray:
        """Posterior covariance of the latent numbers, of the same draws, shape ``(K, K)``."""
        return self._moments[1]

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        return self._weighted(_DRAWS_OF_MOMENTS, jax.random.key(1)).moments

    def _weighted(self, num_draws: int, key: Array) -> _Weighted:
        """Weighted draws; where the weights cannot hold, twice as many from what the first ones tell, twice at most."""
        proposal = _Proposal(self.mode, self.covariance_at_mode)
        for number in range(_MOST_ROUNDS):
            draws = proposal.draw(jax.random.fold_in(key, number), num_draws * 2**number)
            logs, log_density = (np.asarray(part, float) for part in self.look(jnp.asarray(draws, self.mode.dtype)))
            log_weights, shape = pareto_smoothed(log_density - proposal.log_density(draws))
            found = _Weighted(draws, np.exp(log_weights) / np.exp(log_weights).sum(), logs)
            if shape <= LARGEST_SHAPE:
                return found
            mean, covariance = found.moments
            proposal = _Proposal(mean, (proposal.covariance + covariance) / 2)
        warn(
            "The posterior of this person is far from the Gaussian at its mode, and from what weighted draws tell of "
            f"it: Pareto k-hat of the weights is {shape:.2f}, so that means over it may be off. Take more draws, or "
            "NUTS for the latent numbers."
        )
        return found

    def _shown(self) -> list[str]:
        lines = [f"Person: {len(self.mode)} latent numbers, log evidence {self.log_evidence:.3f}"]
        lines += [] if self.converged else ["the search for the mode has not converged"]
        return lines + ([f"{self.num_dropped} events of unknown items left out"] if self.num_dropped else [])


class _Proposal(NamedTuple):
    """Mixture of a t-distribution at the mode and the standard normal prior (Hesterberg 1995)."""

    mode: np.ndarray
    covariance: np.ndarray

    def draw(self, key: Array, num_draws: int) -> np.ndarray:
        """Draws, with as many of the prior as its share, shape ``(num_draws, K)``."""
        key_normal, key_scale = jax.random.split(key)
        normal = np.asarray(jax.random.normal(key_normal, (num_draws, len(self.mode))), float)
        scale = np.asarray(jax.random.chisquare(key_scale, _DEGREES, (num_draws, 1)), float) / _DEGREES
        at_mode = self.mode + normal / np.sqrt(scale) @ np.linalg.cholesky(self.covariance).T
        is_prior = np.arange(num_draws) < int(_SHARE_OF_PRIOR * num_draws)
        return np.where(is_prior[:, None], normal, at_mode)

    def log_density(self, draws: np.ndarray) -> np.ndarray:
        """Log density of the mixture, up to a constant, shape ``(num_draws,)``."""
        size, root = len(self.mode), np.linalg.cholesky(self.covariance)
        square = (np.linalg.solve(root, (draws - self.mode).T) ** 2).sum(0)
        constant = gammaln((_DEGREES + size) / 2) - gammaln(_DEGREES / 2) - size / 2 * np.log(_DEGREES / 2)
        of_mode = constant - np.log(np.diag(root)).sum() - (_DEGREES + size) / 2 * np.log1p(square / _DEGREES)
        of_prior = -0.5 * (draws**2).sum(1)
        return np.logaddexp(np.log1p(-_SHARE_OF_PRIOR) + of_mode, np.log(_SHARE_OF_PRIOR) + of_prior)


def inverse_curvature(precision: np.ndarray) -> np.ndarray:
    """Inverse of a curvature, which is no less than that of the prior, whatever rounding has made of it."""
    if not np.isfinite(precision).all():
        raise FloatingPointError(
            "The curvature at the mode of a person is not finite: the network overflows for her events. Train it with "
            "smaller steps, or use float64 (numpyro.enable_x64())."
        )
    values, vectors = np.linalg.eigh(np.asarray(precision + precision.T, float) / 2)
    return (vectors / np.maximum(values, 1.0)) @ vectors.T
