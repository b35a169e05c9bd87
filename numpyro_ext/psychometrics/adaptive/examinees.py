"""People who take a test: their answers so far, and the outlook on every further answer that scores look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from ...design.outcomes.outlooks import Outlook
from ...infer.front.options import check_at_least
from ...infer.front.running.progress import warn
from .bank import ABSENT, Floats, ItemBank
from .beliefs import At, Beliefs, Ints
from .gaussian import GaussianBeliefs
from .nodes import NodeBeliefs, trait_nodes

SITE = "response"
"""Name under which scores come back."""


def make_beliefs(
    bank: ItemBank, num_items: int | None = None, standard_error: float = 0.0, num_nodes: int | None = None
) -> Beliefs:
    """Choose what holds the density of the traits: nodes for at most three of them, or else a Gaussian.

    A table of the bank on the nodes that would be too large makes it a Gaussian as well.

    :param bank: the items.
    :param int num_items: largest number of items of a test.
    :param float standard_error: at which tests stop.
    :param int num_nodes: nodes along each trait; by default as many as the sharpest posterior needs.
    :raises ValueError: if ``num_nodes`` is given for more than three traits.
    """
    if num_nodes is not None:
        check_at_least(3, num_nodes=num_nodes)
        if bank.num_traits > 3:
            raise ValueError(f"num_nodes= is for at most three traits; these are {bank.num_traits}, as a Gaussian.")
    most = bank.num_items if num_items is None else min(num_items, bank.num_items)
    nodes = trait_nodes(bank, most, standard_error, num_nodes)
    return GaussianBeliefs(bank) if nodes is None else NodeBeliefs(bank, *nodes)


class Examinees:
    """People who take the same test; scores of :mod:`numpyro_ext.design` take it as a source.

    :param beliefs: what is known of traits.
    :param int num_people: number of people.
    """

    takes_focus = True

    def __init__(self, beliefs: Beliefs, num_people: int) -> None:
        self.beliefs = beliefs
        self.answers = np.full((num_people, beliefs.bank.num_items), np.nan)
        """Answers so far, shape ``(people, items)``; nan where none was given."""
        self.is_candidate = np.ones(self.answers.shape, bool)
        """Items that may be asked, shape ``(people, items)``."""
        self._state = beliefs.prior_state(num_people)
        self._update()

    def _update(self) -> None:
        self._posterior = self.beliefs.posterior(self._state)
        self._mean, self._covariance = self.beliefs.moments(self._posterior)
        if not (np.isfinite(self._mean).all() and np.isfinite(self._covariance).all()):
            raise FloatingPointError("The density of some person's traits is not finite: check the items' parameters.")
        trouble = self.beliefs.trouble(self._posterior, self._covariance)
        if trouble is not None:
            warn(trouble)

    @property
    def asked(self) -> NDArray[np.bool_]:
        """Items that have an answer, shape ``(people, items)``."""
        return ~np.isnan(self.answers)

    @property
    def mean(self) -> Floats:
        """Posterior mean of the traits, shape ``(people, D)``."""
        return self._mean

    @property
    def covariance(self) -> Floats:
        """Posterior covariance of the traits, shape ``(people, D, D)``."""
        return self._covariance

    @property
    def standard_deviation(self) -> Floats:
        """Posterior standard deviation of the traits, shape ``(people, D)``."""
        return np.sqrt(np.diagonal(self._covariance, axis1=1, axis2=2))

    def answer(self, items: Ints, values: Ints) -> None:
        """Take in one answer of each person; items below zero stand for none."""
        self._state = self.beliefs.updated(self._state, items, values)
        told = np.flatnonzero(items >= 0)
        self.answers[told, items[told]] = values[told]
        self.is_candidate[told, items[told]] = False
        self._update()

    def restart(self, items: Sequence[int], values: Sequence[int]) -> None:
        """Begin again with the answers of one person, in this order."""
        state = self.beliefs.prior_state(1)
        self.answers[:], self.is_candidate[:] = np.nan, True
        for item, value in zip(items, values, strict=True):
            state = self.beliefs.updated(state, np.array([item]), np.array([value]))
            self.answers[0, item], self.is_candidate[0, item] = value, False
        self._state = state
        self._update()

    def predictive(self, items: Ints | None = None) -> Floats:
        """Probability of each answer to each item, or to these alone, shape ``(people, items, categories)``."""
        return self.beliefs.predictive(self._posterior, items)

    def categories(self) -> NDArray[np.bool_]:
        """Categories that an item has, shape ``(items, categories)``."""
        points = self.beliefs.bank.mean[None]
        return self.beliefs.bank.table(points)[0, 0] > ABSENT

    def outlooks(self, focus: object = None, shape: tuple[int, ...] | None = None) -> dict[str, Outlook]:
        """The outlook on every answer, for scores.

        :param focus: numbers of the traits that matter, alone or by the name of their site; all by default.
        :param shape: of the observations; people by items by default.
        """
        shape = self.answers.shape if shape is None else shape
        traits = _numbers(focus, self.beliefs.bank.num_traits)
        candidates = self.is_candidate.reshape(shape)
        return {
            SITE: TraitOutlook(
                name=SITE,
                shape=shape,
                is_candidate=candidates,
                beliefs=self.beliefs,
                posterior=self._posterior,
                focus=traits,
            )
        }


def _numbers(focus: object, num_traits: int) -> tuple[int, ...] | None:
    """Numbers of the traits in focus.

    :raises ValueError: if there are no such traits.
    """
    if focus is None or isinstance(focus, str):
        return None
    if isinstance(focus, Mapping):
        if len(focus) != 1:
            raise ValueError(f"focus of a test names its traits once, as {{'trait': [0, 1]}}; got {focus!r}.")
        focus = next(iter(focus.values()))
    numbers = np.atleast_1d(np.asarray(focus))
    is_whole = numbers.dtype.kind in "iu" and numbers.ndim == 1 and numbers.size > 0
    if not is_whole or numbers.min() < -num_traits or numbers.max() >= num_traits:
        raise ValueError(f"focus must hold numbers of the {num_traits} traits, got {focus!r}.")
    return tuple(sorted({int(number) % num_traits for number in numbers}))


@dataclass(kw_only=True)
class TraitOutlook(Outlook):
    """Answers to the items of a test, given what is known of people's traits.

    :param beliefs: functions of what is known.
    :param posterior: the distribution of the traits.
    :param focus: numbers of the traits that matter; all if left out.
    """

    beliefs: Beliefs
    posterior: Any
    focus: tuple[int, ...] | None = None

    def _log_mixture(self) -> Array:
        predictive = self.beliefs.predictive(self.posterior)
        with np.errstate(divide="ignore"):
            return jnp.log(jnp.asarray(predictive.reshape(-1, predictive.shape[-1])))

    def information(
        self, method: Literal["quadrature", "closed-form"], bias_correction: Literal["none", "delta", "jackknife"]
    ) -> Array:
        if bias_correction != "none" or method != "quadrature":
            raise ValueError("Scores of a test are sums over the density of the traits: leave out the options.")
        return self.beliefs.expected_information(self.posterior, self.focus).reshape(-1)  # type: ignore[return-value]

    def classical_gain(self, at: At) -> Array:
        covariance = self.beliefs.moments(self.posterior)[1][:, None]
        information = self.beliefs.fisher_information(self.posterior, at)
        return _gain(covariance, information, self.focus).reshape(-1)  # type: ignore[return-value]

    def votes(self, num_votes: float, rng_key: Array) -> Array:
        if not np.isinf(num_votes):
            return super().votes(num_votes, rng_key)
        votes = self.beliefs.votes(self.posterior)
        return jnp.asarray(votes.reshape(-1, votes.shape[-1]))

    def members(self, num_members: int, rng_key: Array) -> tuple[Array, Array | None]:
        raise ValueError(
            "A test has the density of the traits in the place of a committee: take expected_information_gain, or "
            "infinitely many votes."
        )

    def part(self, chosen: np.ndarray) -> Self:
        raise ValueError("The items of an adaptive test are chosen one by one: call propose() after each answer.")


def _gain(covariance: Floats, information: Floats, focus: Sequence[int] | None) -> Floats:
    """Fall of the entropy of Gaussian traits by an item with this Fisher information, in nats."""
    if focus is None or len(focus) == covariance.shape[-1]:
        if covariance.shape[-1] == 1:
            return 0.5 * np.log1p((covariance * information)[..., 0, 0])
        # The determinant of a symmetric matrix, which stays positive where the information has rank one.
        root = np.linalg.cholesky(covariance)
        inner = np.swapaxes(root, -1, -2) @ information @ root
        return 0.5 * np.log1p(np.maximum(np.linalg.eigvalsh(inner), 0.0)).sum(-1)
    identity = np.eye(covariance.shape[-1])
    after = np.linalg.solve(identity + covariance @ information, np.broadcast_to(covariance, information.shape))
    before, after = (part[..., focus, :][..., focus] for part in (covariance, after))
    return 0.5 * (np.linalg.slogdet(before)[1] - np.linalg.slogdet(after)[1])
