"""Predictive distributions of outcomes that are still to be seen, site by site: by Gaussian predictors, or by draws."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike

from ...potentials import GaussianPotential, Potential
from ...potentials.information import (
    EntropyMethod,
    center_and_scale,
    expected_information,
    predictive_entropy,
    real_nodes,
)
from ...potentials.outcomes import log_predictive_probabilities, log_probabilities, num_outcomes, with_outcome
from . import committee
from .classical import At, fisher_information
from .committee import BiasCorrection

LARGEST_TABLE = 2**28
"""Numbers in a table of draws, observations and outcomes: 2 GB."""


@dataclass(kw_only=True)
class Outlook(ABC):
    """The outcomes of one observed site: what is expected of each of its observations.

    :param str name: of the site.
    :param tuple shape: of its observations.
    :param is_candidate: boolean, in that shape: which could be observed next.
    """

    name: str
    shape: tuple[int, ...]
    is_candidate: np.ndarray

    @abstractmethod
    def part(self, chosen: np.ndarray) -> Self:
        """The observations with these numbers, in the shape of the numbers."""

    def shaped(self, values: object) -> Any:
        """Scores in the shape of the site, and minus infinity where there is no candidate."""
        if isinstance(values, jax.core.Tracer):  # a score is being differentiated
            return jnp.where(self.is_candidate, values.reshape(self.shape), -jnp.inf)
        scores = np.asarray(values, float).reshape(self.shape)
        if np.isnan(scores[self.is_candidate]).any():
            raise FloatingPointError(
                f"The score of {int(np.isnan(scores[self.is_candidate]).sum())} candidates of site {self.name!r} is "
                "nan: is their predictor finite there?"
            )
        return np.where(self.is_candidate, scores, -np.inf)

    @cached_property
    def log_mixture(self) -> Array:
        """Log probabilities of the outcomes of each observation, shape ``(observations, outcomes)``.

        :raises ValueError: if outcomes are real numbers.
        """
        return self._log_mixture()

    @abstractmethod
    def _log_mixture(self) -> Array: ...

    def predictive_entropy(self) -> Array:
        """Entropy of each observation's predictive distribution, in nats."""
        return committee.entropy(self.log_mixture)

    @abstractmethod
    def information(self, method: EntropyMethod, bias_correction: BiasCorrection) -> Array:
        """Expected information gain of each observation, in nats."""

    def classical_gain(self, at: At) -> Array:
        """Fall of the entropy of Gaussian unknowns by the Fisher information of each observation, in nats.

        :param str at: ``"mean"`` for the information at the posterior mean, ``"draws"`` for its posterior mean.
        :raises ValueError: if the information is not known.
        """
        raise ValueError(
            f"The Fisher information of {self.name!r} needs observations with one Gaussian predictor each (EP, "
            "LaplaceApproximation, VariationalGaussian, INLA), or an adaptive test: take expected_information_gain."
        )

    @abstractmethod
    def members(self, num_members: int, rng_key: Array) -> tuple[Array, Array | None]:
        """Log probabilities of outcomes by draws from the posterior, ``(members, observations, outcomes)``; weights."""

    def log_predictive(self, numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Log predictive probability (density) of values of some observations; minus infinity for what they cannot be.

        :param numbers: of the observations, shape ``(n,)``.
        :param values: as many.
        """
        table, values = np.asarray(self.log_mixture), np.asarray(values, float)
        is_one = (values == np.floor(values)) & (values >= 0.0) & (values < table.shape[-1])
        return np.where(is_one, table[numbers, np.where(is_one, values, 0.0).astype(int)], -np.inf)

    def log_power_masses(self, number: int, powers: np.ndarray) -> np.ndarray:
        """Log of the sums over outcomes (integrals) of powers of the predictive probability (density).

        :param int number: of the observation.
        :param powers: shape ``(k,)``, above zero.
        """
        table = np.asarray(self.log_mixture, float)[number]
        return np.logaddexp.reduce(powers[:, None] * table, axis=1)

    def error(self, numbers: np.ndarray, values: np.ndarray) -> float:
        """Distance of predictions of some observations from their values: the share of those that are not the likeliest
        outcome, of real numbers the root mean square of the difference to the predictive mean; nan if it has none.

        :param numbers: of the observations, shape ``(n,)``.
        :param values: as many.
        """
        likeliest = np.argmax(np.asarray(self.log_mixture)[numbers], axis=-1)
        return float(np.mean(likeliest != np.asarray(values)))

    def _no_table(self) -> ValueError:
        return ValueError(
            f"The observations of {self.name!r} are real numbers, of which none has a probability or a vote: take "
            "expected_information_gain or predictive_entropy."
        )

    def votes(self, num_votes: float, rng_key: Array) -> Array:
        """Shares of members that hold each outcome for the likeliest, shape ``(observations, outcomes)``."""
        log_p, weights = self.members(_as_number(num_votes), rng_key)
        return committee.vote_fractions(log_p, weights)


@dataclass(frozen=True)
class JointField:
    """The predictors of all sites of a source together.

    :param covariance: from numbers of predictors to their joint covariance, shape ``(components, n, n)``, with the
        elements of a field that are of interest behind them.
    :param int num_elements: of interest.
    """

    covariance: Callable[[np.ndarray], Any]
    num_elements: int = 0


@dataclass(kw_only=True)
class GaussianOutlook(Outlook):
    """Scalar predictors that are Gaussian, or mixtures of Gaussians over hyperparameters.

    :param Potential potential: the factors, whose leaves have the components on the first axis and observations on the
        second.
    :param mean: of the predictors, shape ``(components, observations)``.
    :param variance: of the predictors.
    :param weights: of the components.
    :param left: variance of the predictors given what is of interest, where that is a part of the field.
    :param bool is_about_hyper: whether the components alone are of interest, and the field is a nuisance.
    :param rows: numbers of the predictors among those of the fit.
    :param JointField joint: how the predictors depend on each other, if it can be known.
    :param float effective_sample_size: of draws that the components are; ``None`` for points of a rule.
    """

    potential: Potential
    mean: Array
    variance: Array
    weights: Array
    left: Array | None = None
    is_about_hyper: bool = False
    rows: np.ndarray
    joint: JointField | None = None
    effective_sample_size: float | None = None

    @property
    def _inputs(self) -> tuple[Potential, Array, Array, Array]:
        return self.potential, self.mean, self.variance, self.weights

    def _log_mixture(self) -> Array:
        number = num_outcomes(*self._inputs)
        if number is None:
            raise self._no_table()
        return jnp.moveaxis(log_predictive_probabilities(*self._inputs, number), 0, -1)

    def predictive_entropy(self) -> Array:
        return predictive_entropy(*self._inputs)

    def log_predictive(self, numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
        numbers, values = np.asarray(numbers), np.asarray(values, float)
        known = self.potential.outcomes()
        assert known is not None  # as of all that are made
        is_one = np.ones(values.shape, bool)
        if known.width is None:
            last: Any = np.inf if known.number is None else known.number - 1.0
            if known.limit is not None:
                limit = np.asarray(known.limit)[0]
                last = limit[numbers] if limit.shape[0] == self.mean.shape[1] else limit
            is_one = (values == np.floor(values)) & (values >= 0.0) & (values <= last)
        found = _log_density_of(*self._inputs, numbers, np.where(is_one, values, 0.0))
        return np.where(is_one, np.asarray(found, float), -np.inf)

    def log_power_masses(self, number: int, powers: np.ndarray) -> np.ndarray:
        known = self.potential.outcomes()
        assert known is not None  # as of all that are made
        if known.width is None:
            return super().log_power_masses(number, powers)
        width = jnp.broadcast_to(jnp.asarray(known.width, self.mean.dtype), self.mean.shape)
        center, scale = center_and_scale(self.mean[:, number], self.variance[:, number], self.weights, width[:, number])
        nodes, weights = real_nodes()
        values = float(center) + float(scale) * np.sinh(nodes)
        log_p = np.asarray(_log_density_of(*self._inputs, np.full(len(nodes), number), values), float)
        return np.logaddexp.reduce(powers[:, None] * log_p + np.log(weights * float(scale) * np.cosh(nodes)), axis=1)

    def error(self, numbers: np.ndarray, values: np.ndarray) -> float:
        known = self.potential.outcomes()
        assert known is not None  # as of all that are made
        if known.width is None:
            return super().error(numbers, values)
        if not isinstance(self.potential, GaussianPotential):
            return float("nan")
        found = np.asarray(self.weights @ self.mean)[numbers]
        return float(np.sqrt(np.mean(np.square(found - np.asarray(values, float)))))

    def information(self, method: EntropyMethod, bias_correction: BiasCorrection) -> Array:
        if self.is_about_hyper:  # components alone: what the field would tell is left over
            each = predictive_entropy(self.potential, self.mean, self.variance)
            plain = self.predictive_entropy() - jnp.tensordot(self.weights, each, 1)
        else:
            plain = expected_information(*self._inputs, left=self.left, method=method)
        if bias_correction == "none" or self.effective_sample_size is None:
            return plain
        # The bias is in the entropy of the mixture; what is told within a component is known in closed form.
        number = num_outcomes(*self._inputs)
        if number is None:
            raise ValueError(f"Corrections of the bias are of outcomes that are counted; {self.name!r} has real ones.")
        if len(self.weights) * self.mean.shape[1] * number > LARGEST_TABLE:
            raise ValueError(
                f"{len(self.weights)} draws, {self.mean.shape[1]} observations of {self.name!r} and {number} outcomes "
                "are too many for a correction of the bias: give fewer draws, or score the candidates in parts."
            )
        log_p = committee.component_tables(self.potential, self.mean, self.variance, number)
        corrected = committee.committee_information(
            log_p, self.weights, bias_correction=bias_correction, effective_sample_size=self.effective_sample_size
        )
        return plain + corrected - committee.committee_information(log_p, self.weights)

    def classical_gain(self, at: At) -> Array:
        if self.is_about_hyper:
            return super().classical_gain(at)
        number = None if isinstance(self.potential, GaussianPotential) else num_outcomes(*self._inputs)
        if number is None and not isinstance(self.potential, GaussianPotential):
            return super().classical_gain(at)
        information = fisher_information(self.potential, self.mean, self.variance, number, at)
        left = jnp.zeros_like(self.variance) if self.left is None else jnp.minimum(self.left, self.variance)
        # What is not of interest is noise to what is.
        gains = 0.5 * (jnp.log1p(self.variance * information) - jnp.log1p(left * information))
        return self.weights @ gains

    def members(self, num_members: int, rng_key: Array) -> tuple[Array, Array | None]:
        number = self.log_mixture.shape[-1]
        key_component, key_noise = random.split(rng_key)
        chosen = random.choice(key_component, len(self.weights), (num_members,), p=self.weights)
        # the same draws for all candidates, so that their scores differ by what they are
        noise = random.normal(key_noise, (num_members, 1), self.mean.dtype)
        return self._at(chosen, noise, number), None

    def votes(self, num_votes: float, rng_key: Array) -> Array:
        if not np.isinf(num_votes):
            return super().votes(num_votes, rng_key)
        number = self.log_mixture.shape[-1]
        shares = jax.lax.map(lambda c: committee.vote_shares(*c, number), (self.potential, self.mean, self.variance))
        return jnp.tensordot(self.weights, shares, 1)

    def part(self, chosen: np.ndarray) -> Self:
        at, size = chosen.reshape(-1), self.mean.shape[1]
        parts = {name: getattr(self, name) for name in ("potential", "mean", "variance", "left")}
        return dataclasses.replace(
            self,
            shape=chosen.shape,
            is_candidate=self.is_candidate.reshape(-1)[chosen],
            rows=self.rows[at],
            **{name: _cut(part, at, size) for name, part in parts.items()},
        )

    def _at(self, chosen: Array, noise: Array, number: int) -> Array:
        eta = self.mean[chosen] + jnp.sqrt(self.variance[chosen]) * noise
        potential = jax.tree.map(lambda leaf: leaf[chosen], self.potential)
        return jnp.moveaxis(log_probabilities(potential, eta, number), 0, -1)


@dataclass(kw_only=True)
class DrawnOutlook(Outlook):
    """Outcomes that can be counted, under draws from the posterior.

    :param log_p: log probabilities, shape ``(draws, observations, outcomes)``.
    :param weights: of the draws, or ``None`` if equal.
    :param float effective_sample_size: of the draws, where they depend on each other.
    """

    log_p: Array
    weights: Array | None = None
    effective_sample_size: float | None = None

    def _log_mixture(self) -> Array:
        return committee.mixture(self.log_p, self.weights)

    def information(self, method: EntropyMethod, bias_correction: BiasCorrection) -> Array:
        return committee.committee_information(
            self.log_p,
            self.weights,
            bias_correction=bias_correction,
            effective_sample_size=self.effective_sample_size,
        )

    def members(self, num_members: int, rng_key: Array) -> tuple[Array, Array | None]:
        chosen = random.choice(rng_key, len(self.log_p), (num_members,), p=self.weights)
        return self.log_p[chosen], None

    def votes(self, num_votes: float, rng_key: Array) -> Array:
        if np.isinf(num_votes):
            return committee.vote_fractions(self.log_p, self.weights)
        return super().votes(num_votes, rng_key)

    def part(self, chosen: np.ndarray) -> Self:
        is_candidate = self.is_candidate.reshape(-1)[chosen]
        log_p = self.log_p[:, chosen.reshape(-1)]
        return dataclasses.replace(self, shape=chosen.shape, is_candidate=is_candidate, log_p=log_p)


@dataclass(kw_only=True)
class RealOutlook(Outlook):
    """Real outcomes of which entropies alone are known: under draws, or by derivatives.

    :param entropy: of the predictive densities, shape ``(observations,)``.
    :param conditional: expected entropies given the latent sites, or what is in focus of them.
    """

    entropy: Array
    conditional: Array

    def _log_mixture(self) -> Array:
        raise self._no_table()

    def predictive_entropy(self) -> Array:
        return self.entropy

    def log_predictive(self, numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.full(np.shape(values), np.nan)  # entropies say nothing of single values

    def information(self, method: EntropyMethod, bias_correction: BiasCorrection) -> Array:
        if bias_correction != "none":
            raise ValueError(f"Corrections of the bias are of outcomes that are counted; {self.name!r} has real ones.")
        return self.entropy - self.conditional

    def members(self, num_members: int, rng_key: Array) -> tuple[Array, Array | None]:
        raise self._no_table()

    def part(self, chosen: np.ndarray) -> Self:
        at = chosen.reshape(-1)
        return dataclasses.replace(
            self,
            shape=chosen.shape,
            is_candidate=self.is_candidate.reshape(-1)[chosen],
            entropy=self.entropy[at],
            conditional=self.conditional[at],
        )


def _cut(tree: object, numbers: ArrayLike, size: int) -> Any:
    """Restrict leaves whose second axis is that of all observations to some of these."""
    return jax.tree.map(lambda leaf: leaf[:, numbers] if leaf.shape[1] == size else leaf, tree)


@jax.jit
def _log_density_of(
    potential: Potential, mean: Array, variance: Array, weights: Array, numbers: ArrayLike, values: ArrayLike
) -> Array:
    potential, mean, variance = _cut((potential, mean, variance), numbers, mean.shape[1])
    values = jnp.asarray(values, mean.dtype)
    least = jnp.finfo(mean.dtype).eps ** 2 * (1.0 + jnp.square(mean))
    parts = with_outcome(potential, values).log_normaliser(mean, jnp.maximum(variance, least))
    return jax.nn.logsumexp(parts + jnp.log(weights)[:, None], axis=0)


def _as_number(num_votes: float) -> int:
    if not (num_votes >= 1 and float(num_votes).is_integer()):
        raise ValueError(f"num_votes must be a whole number of at least one, or infinite; got {num_votes!r}.")
    return int(num_votes)
