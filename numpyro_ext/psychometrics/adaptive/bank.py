"""Items that may be asked, as tables of log probabilities, and the prior of a person's traits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpy.typing import ArrayLike, NDArray

from ...compilation.pickles import OnDemand
from ...infer.front.engine import BaseEngine
from ...infer.front.options import check_at_least, check_one_of
from ...infer.monte_carlo.smc import SMC
from ...structure.model.running.execution import bound_arguments
from ..curves import Response, fisher_information, log_category_probabilities
from ..population import traits_of_people
from ..responses import FittedResponse, response_of

Items = Literal["posterior", "point"]
Floats = NDArray[np.float64]
ABSENT = -1e29
"""Log probability below which a category is none of an item's."""


@dataclass(frozen=True, eq=False)
class ItemBank(OnDemand):
    """Items of a test and the prior of the traits.

    :param response: a function from traits to the distribution of the answers, with draws of the items on its first
        axis if ``has_draws``.
    :param mean: prior mean of the traits, shape ``(D,)``.
    :param covariance: prior covariance, shape ``(D, D)``.
    :param bool is_scalar: true if ``response`` takes traits of shape ``(...,)``, false for ``(..., D)``.
    :param bool has_draws: true if the items are drawn.
    """

    response: Response
    mean: Floats
    covariance: Floats
    is_scalar: bool
    has_draws: bool

    @property
    def num_traits(self) -> int:
        """Number of traits."""
        return len(self.mean)

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        return jax.eval_shape(self.log_probabilities, jnp.zeros((2, self.num_traits))).shape

    @property
    def num_draws(self) -> int:
        """Number of draws of the items; one for items at their estimates."""
        return self._shape[0]

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self._shape[2]

    @property
    def num_categories(self) -> int:
        """Largest number of categories of an item."""
        return self._shape[3]

    def log_probabilities(self, theta: Array) -> Array:
        """Log probability of each answer, in JAX.

        :param theta: traits, shape ``(n, D)``.
        :return: shape ``(draws, n, items, categories)``.
        """
        table = log_category_probabilities(self.response(theta[:, 0] if self.is_scalar else theta))
        return table if self.has_draws else table[None]

    def table(self, points: ArrayLike) -> Floats:
        """Log probability of each answer as an array of NumPy; arguments as for :meth:`log_probabilities`."""
        found = np.asarray(self._table(jnp.asarray(points)), float)
        _check_numbers(np.isnan(found).any((0, 1, 3)), "log probabilities")
        return found

    def information(self, points: ArrayLike) -> Floats:
        """Fisher information of each item about the traits, of drawn items that of their average.

        :param points: traits, shape ``(n, D)``.
        :return: shape ``(n, items, D, D)``.
        """
        found = np.asarray(self._information(jnp.asarray(points)), float)
        found = found[..., None, None] if self.is_scalar else found
        _check_numbers(np.isnan(found).any((0, 2, 3)), "Fisher information")
        return found

    @cached_property
    def _table(self) -> Any:
        return jax.jit(self.log_probabilities)

    @cached_property
    def _information(self) -> Any:
        averaged = _Averaged(self)

        def of(points: Array) -> Array:
            return fisher_information(averaged, points[:, 0] if self.is_scalar else points)

        return jax.jit(of)


def _check_numbers(is_nan: np.ndarray, what: str) -> None:
    if is_nan.any():
        raise FloatingPointError(
            f"The {what} are nan for items {np.flatnonzero(is_nan)[:5].tolist()}: are their parameters finite, and "
            "their probabilities given as logits?"
        )


@dataclass(frozen=True)
class _Averaged:
    """Response of a bank with the draws of its items averaged."""

    bank: ItemBank

    @property
    def num_traits(self) -> int:
        return self.bank.num_traits if not self.bank.is_scalar else 1

    def __call__(self, theta: Array) -> dist.Distribution:
        if not self.bank.has_draws:
            return self.bank.response(theta)
        table = self.bank.log_probabilities(theta[:, None] if self.bank.is_scalar else theta)
        return dist.Categorical(logits=jax.nn.logsumexp(table, axis=0) - np.log(table.shape[0]))


@dataclass(frozen=True)
class _OnAxis:
    """Response to one trait without an axis, of a function that takes it on one."""

    response: Response

    def __call__(self, theta: Array) -> dist.Distribution:
        return self.response(theta[..., None])


def make_bank(
    source: Any,
    *,
    items: Items,
    num_draws: int,
    rng_key: Array | None,
    prior: tuple[ArrayLike, ArrayLike] | None,
    trait: str,
    person: Mapping[str, Any],
) -> ItemBank:
    """Make the bank of a fitted model, or of a response function and a prior.

    :param source: an engine or sampler after its run, draws, or a function from traits to a distribution of batch shape
        ``(..., items)``, or ``(draws, ..., items)``.
    :param str items: ``"posterior"`` for draws of the items, ``"point"`` for their estimates; of a response function
        it makes no difference.
    :param int num_draws: number of draws.
    :param rng_key: for the draws.
    :param prior: mean and covariance of the traits.
    :param str trait: name of the site of the traits.
    :param person: arguments of the model for this person, one row each.
    :raises ValueError: if the prior is missing or not proper, or the source has no items.
    """
    check_one_of(Items, items=items)
    check_at_least(1, num_draws=num_draws)
    is_function = callable(source) and not isinstance(source, BaseEngine | SMC) and not hasattr(source, "get_samples")
    if not is_function or isinstance(source, FittedResponse):
        return _fitted_bank(source, items, num_draws, rng_key, prior, trait, person)
    if person:
        raise ValueError(f"A response function has no arguments {sorted(person)}: give the person's prior=.")
    if prior is None:
        raise ValueError("A response function has no prior: give prior=(mean, covariance) of the traits.")
    mean, covariance, is_scalar = _checked_prior(prior)
    if not is_scalar and len(mean) == 1:  # one trait on an axis of its own
        source, is_scalar = _OnAxis(source), True
    at = jnp.zeros((2,)) if is_scalar else jnp.zeros((2, len(mean)))
    shape = jax.eval_shape(lambda theta: log_category_probabilities(source(theta)), at).shape[:-1]
    if len(shape) not in (2, 3) or shape[-2] != 2:
        raise ValueError(
            f"The response to traits of shape {at.shape} has batch shape {shape}; it must be (2, items), or "
            "(draws, 2, items)."
        )
    return _not_empty(ItemBank(source, mean, covariance, is_scalar, len(shape) == 3))


def _fitted_bank(
    source: object,
    items: Items,
    num_draws: int,
    rng_key: Array | None,
    prior: tuple[ArrayLike, ArrayLike] | None,
    trait: str,
    person: Mapping[str, object],
) -> ItemBank:
    if isinstance(source, FittedResponse):
        at_point = response = source
    else:
        at_point = response_of(source, trait=trait)
        response = at_point if items == "point" else response_of(source, num_draws, rng_key, trait=trait)
    has_draws = response.num_draws is not None
    if prior is None:
        if at_point.num_draws is not None:
            raise ValueError("A response with drawn items has no one prior: give prior=(mean, covariance).")
        prior = _prior_in_model(at_point, person)
    elif person:
        raise ValueError(f"Give either prior= or the arguments {sorted(person)} of the model, of which it follows.")
    mean, covariance, is_scalar = _checked_prior(prior)
    if len(mean) != response.num_traits:
        raise ValueError(f"The prior is of {len(mean)} traits, and the model has {response.num_traits}.")
    return _not_empty(ItemBank(response, mean, covariance, response.num_traits == 1, has_draws))


def _not_empty(bank: ItemBank) -> ItemBank:
    if bank.num_items == 0:
        raise ValueError("The bank is empty: there is no item to ask.")
    return bank


def _checked_prior(prior: tuple[ArrayLike, ArrayLike]) -> tuple[Floats, Floats, bool]:
    """Mean and covariance as arrays, and whether the trait is a number of its own."""
    try:
        mean, covariance = (np.asarray(part, float) for part in prior)
    except (TypeError, ValueError) as error:
        raise ValueError(f"prior must be a pair of mean and covariance, got {prior!r}.") from error
    is_scalar = covariance.ndim == 0
    covariance = np.atleast_2d(covariance)
    if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1]:
        raise ValueError(f"The prior covariance must be a number or a square matrix, got shape {covariance.shape}.")
    if mean.shape not in ((), covariance.shape[:1]):
        raise ValueError(f"The prior mean has shape {mean.shape}, and the covariance {covariance.shape}.")
    mean = np.broadcast_to(mean, covariance.shape[:1]).copy()
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()) or np.linalg.eigvalsh(covariance)[0] <= 0.0:
        raise ValueError("The prior of the traits must be finite, with a positive definite covariance.")
    return mean, covariance, is_scalar


def _prior_in_model(response: FittedResponse, person: Mapping[str, object]) -> tuple[Floats, Floats]:
    """Mean and covariance of a person's traits as the model has them, items at their estimates."""
    replay: Any = response.answers
    arguments, call = bound_arguments(replay.model, replay.args, replay.kwargs)
    arguments = dict(arguments)
    unknown = sorted(set(person) - set(arguments))
    if unknown:
        raise TypeError(f"The model has no arguments {unknown}; it has {sorted(arguments)}.")
    for name, value in person.items():
        old = np.shape(arguments[name])
        row = np.asarray(value)
        if old[:1] != replay.shape[:1] or row.shape not in (old[1:], (1, *old[1:])):
            raise ValueError(f"{name} must be the row of one person, shape {old[1:]}; got shape {row.shape}.")
        arguments[name] = np.broadcast_to(row, old)
    args, kwargs = call(arguments)
    found = traits_of_people(replay, response.values, args, kwargs)
    if found is None:
        raise ValueError(
            f"{replay.trait!r} is no normal site, so that its prior cannot be read off the model: give "
            "prior=(mean, covariance)."
        )
    means, covariances = found
    if not (np.allclose(means, means[:1]) and np.allclose(covariances, covariances[:1])):
        raise ValueError(
            f"People have different priors of {replay.trait!r}: give the arguments of the model that differ, one row "
            f"for this person (of {sorted(arguments)}), or prior=(mean, covariance)."
        )
    mean, covariance = means[0], covariances[0]
    return (mean[0], covariance[0, 0]) if len(replay.shape) == 1 else (mean, covariance)
