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
from scipy.special import gammaincinv, gammaln, logsumexp, ndtri

from ....display import Shown
from ...front.answers.resampling import LARGEST_SHAPE, pareto_smoothed
from ...front.running.progress import warn
from ..scoring import checked_number
from .peaks import Peaks
from .spread import even_draws

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

    Means are over draws from t-distributions at the modes and, a quarter of them, from the prior, with the importance
    weights of the density of her events and numbers, the largest of which are smoothed (Vehtari et al. 2024). Draws
    are spread evenly, by which 64 of them do for some 300 independent ones. Where Pareto k-hat says that the
    weights cannot hold, a warning says so. Another mode of the posterior that no draw reaches stays unseen;
    ``fold_in(..., num_starts=)`` looks for more.
    """

    mode: np.ndarray
    """Mode of the latent numbers, shape ``(K,)``; of several, that of the greatest evidence."""
    covariance_at_mode: np.ndarray
    """Inverse of the Gauss-Newton curvature there, shape ``(K, K)``."""
    log_evidence: float
    """Laplace's approximation of the log probability of the history; of several modes, the sum."""
    converged: bool
    """True if the search for the mode ended at a zero of the gradient."""
    num_dropped: int
    """Events that were left out because the fit has not seen their items."""
    look: Callable[[Array], tuple[Array, Array]]
    """Function from values of the latent numbers, shape ``(draws, K)``, to the log probabilities of the next item and
    the log densities of events and numbers."""
    modes: Peaks
    """All modes that were found."""

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
        found = self._weighted(checked_number("Person", "num_draws", num_draws, 2), key)
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
        proposal = _Proposal(*self.modes)
        for number in range(_MOST_ROUNDS):
            draws = proposal.draw(jax.random.fold_in(key, number), num_draws * 2**number)
            logs, log_density = (np.asarray(part, float) for part in self.look(jnp.asarray(draws, self.mode.dtype)))
            log_weights, shape = pareto_smoothed(log_density - proposal.log_density(draws))
            found = _Weighted(draws, np.exp(log_weights) / np.exp(log_weights).sum(), logs)
            if shape <= LARGEST_SHAPE:
                return found
            proposal = proposal.adapted(found)
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
    """Mixture of t-distributions at the modes and the standard normal prior (Hesterberg 1995)."""

    means: np.ndarray
    covariances: np.ndarray
    shares: np.ndarray

    def draw(self, key: Array, num_draws: int) -> np.ndarray:
        """Draws, with as many of the prior and of each mode as its share, shape ``(num_draws, K)``."""
        size = self.means.shape[1]
        rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,))))
        uniform = even_draws(rng, num_draws, size + 1)
        normal, scale = ndtri(uniform[:, :size]), gammaincinv(_DEGREES / 2, uniform[:, size:]) / (_DEGREES / 2)
        num_prior = int(_SHARE_OF_PRIOR * num_draws)
        places = (np.arange(num_draws - num_prior) + 0.5) / (num_draws - num_prior)
        which = np.searchsorted(np.cumsum(self.shares)[:-1], places)
        tilted = (np.linalg.cholesky(self.covariances)[which] @ (normal / np.sqrt(scale))[num_prior:, :, None])[..., 0]
        return np.concatenate([normal[:num_prior], self.means[which] + tilted])

    def _of_modes(self, draws: np.ndarray) -> np.ndarray:
        """Log density of each t-distribution with its share, up to a constant, shape ``(modes, draws)``."""
        size, roots = self.means.shape[1], np.linalg.cholesky(self.covariances)
        square = (np.linalg.solve(roots, np.swapaxes(draws - self.means[:, None], 1, 2)) ** 2).sum(1)
        constant = gammaln((_DEGREES + size) / 2) - gammaln(_DEGREES / 2) - size / 2 * np.log(_DEGREES / 2)
        volumes = np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(1) - np.log(self.shares)
        return constant - volumes[:, None] - (_DEGREES + size) / 2 * np.log1p(square / _DEGREES)

    def log_density(self, draws: np.ndarray) -> np.ndarray:
        """Log density of the mixture, up to a constant, shape ``(num_draws,)``."""
        of_prior = -0.5 * (draws**2).sum(1)
        of_modes = logsumexp(self._of_modes(draws), axis=0)
        return np.logaddexp(np.log1p(-_SHARE_OF_PRIOR) + of_modes, np.log(_SHARE_OF_PRIOR) + of_prior)

    def adapted(self, found: _Weighted) -> _Proposal:
        """Mixture that weighted draws tell of: each mode has those that it explains best."""
        logs = self._of_modes(found.draws)
        weights = np.exp(logs - logsumexp(logs, axis=0)) * found.weights
        shares = weights.sum(1)
        weights = weights / np.maximum(shares, np.finfo(float).tiny)[:, None]
        means, covariances = self.means.copy(), self.covariances.copy()
        for k in np.flatnonzero(shares > 0):
            means[k] = weights[k] @ found.draws
            apart = found.draws - means[k]
            covariances[k] = (covariances[k] + (weights[k][:, None] * apart).T @ apart) / 2
        return _Proposal(means, covariances, (self.shares + shares) / 2)
