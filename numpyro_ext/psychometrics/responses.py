"""The answers of people as a function of their traits, from a fitted model: items at estimates, or at draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from ..compilation.pickles import OnDemand
from ..infer.front.engine import BaseEngine
from ..infer.front.running.progress import warn
from .curves import log_category_probabilities, unmasked
from .fitted_model import NUM_POINTS, FittedModel

_ABSENT = -1e30
"""Log probability of categories that an item lacks: finite, so that products with their probability are zero."""


@dataclass(frozen=True, eq=False)
class FittedResponse(OnDemand):
    """Answers of a person to all items, given the traits; made by :func:`response_of`.

    Calling it with traits of shape ``(...,)``, or ``(..., num_traits)``, gives a distribution of batch shape
    ``(..., num_items)``, with the draws of the items in front where there are draws.
    """

    num_items: int
    num_traits: int
    num_draws: int | None
    """Number of draws of the items; ``None`` for items at their estimates."""
    answers: Callable[[Any, Array], Any] = field(repr=False)
    """Function of values of the items and of traits of shape ``(n,)`` or ``(n, num_traits)``."""
    values: Mapping[str, Array] = field(repr=False)
    """Values of the sites of the items, with an axis of draws in front where there are draws."""
    names: tuple[str, ...] = field(default=(), repr=False)
    """Names of the items, where the fit knows them."""

    def __call__(self, theta: object) -> dist.Distribution:
        """Distribution of the answers: ``Categorical``, or ``Normal`` for real answers."""
        theta = jnp.asarray(theta)
        theta = theta.astype(jnp.result_type(theta, float))
        shape = theta.shape if self.num_traits == 1 else theta.shape[:-1]
        if self.num_traits > 1 and theta.shape[-1:] != (self.num_traits,):
            raise ValueError(f"theta must have {self.num_traits} traits on its last axis; got shape {theta.shape}.")
        found = self._program(self.values, theta.reshape(-1, *theta.shape[len(shape) :]))
        front = () if self.num_draws is None else (self.num_draws,)
        found = {name: value.reshape(*front, *shape, *value.shape[1 + len(front) :]) for name, value in found.items()}
        return dist.Normal(found["loc"], found["scale"]) if "loc" in found else dist.Categorical(logits=found["logits"])

    @cached_property
    def _program(self) -> Callable[..., dict[str, Array]]:
        """Compiled function of the values of the items and of traits in one row."""
        return jax.jit(self.answers if self.num_draws is None else jax.vmap(self.answers, (0, None)))


def response_of(
    source: object, draws: int | None = None, rng_key: Array | None = None, *, trait: str = "trait"
) -> FittedResponse:
    """Make the answers to the items of a fitted model a function of the trait.

    The model runs with the items at their estimates (hyperparameters at their values, sites of the field and draws of
    NUTS at their means), or at draws: those of the posterior, or, where the engine has items at a point, draws from the
    normal approximation at the optimum.

    **Example:**

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro_ext.design import draws_of
    >>> from numpyro_ext.psychometrics import category_probabilities, response_of
    >>> def rasch(response=None):
    ...     with numpyro.plate("items", 2):
    ...         d = numpyro.sample("intercept", dist.Normal(0, 3))
    ...     with numpyro.plate("people", 3):
    ...         trait = numpyro.sample("trait", dist.Normal(0, 1))
    ...     numpyro.sample("response", dist.Bernoulli(logits=trait[:, None] + d), obs=response)
    >>> posterior = {"intercept": jnp.array([[0.0, 1.0], [0.0, 3.0]]), "trait": jnp.zeros((2, 3))}
    >>> response = response_of(draws_of(posterior, model=rasch))
    >>> print(category_probabilities(response, -2.0).round(2))
    [[0.88 0.12]
     [0.5  0.5 ]]

    :param source: an engine or ``MCMC`` after its run, or draws (:func:`~numpyro_ext.design.draws_of`).
    :param int draws: number of draws of the items; ``None`` for items at their estimates.
    :param rng_key: for these; a fixed key if left out.
    :param str trait: name of the site of the traits, shape ``(N,)`` or ``(N, D)``.
    :return: the function.
    :raises ValueError: if the model has no such site, its observations are not people by items, or people with the
        same trait answer differently (covariates in the predictor, items that differ between groups): write the
        function yourself then, with a distribution of batch shape ``(..., items)``.
    """
    if isinstance(source, BaseEngine) and not source.diagnostics.converged:
        warn(f"{type(source).__name__} has not converged, and the items are those of the posterior that it has.")
    fitted = FittedModel.of(source)
    shape = fitted.shape(trait)
    if shape is None or len(shape) not in (1, 2):
        raise ValueError(
            f"The model has no site {trait!r} of shape (people,) or (people, traits); its latent sites are "
            f"{sorted(fitted.names)}. Name it in response_of(..., trait=...)."
        )
    values = fitted.estimates(trait) if draws is None else fitted.drawn(draws, rng_key)
    values = {name: value for name, value in values.items() if name != trait}
    num_traits = 1 if len(shape) == 1 else shape[1]
    people = shape if fitted.items is None else (NUM_POINTS, *shape[1:])
    order = None if fitted.items is None else np.argsort(fitted.items.items)
    replay = Replay(fitted.model, fitted.args, fitted.kwargs, trait, people, order)
    one = values if draws is None else {name: value[0] for name, value in values.items()}
    num_items = replay.check(one)
    names = () if fitted.items is None else tuple(map(str, fitted.items.names))
    return FittedResponse(num_items, num_traits, draws, replay, values, names)


@dataclass(frozen=True, eq=False)
class Replay:
    """The distributions of a model's observations, people by items, at traits that take the places of people."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    trait: str
    shape: tuple[int, ...]
    """Shape of the site of the traits in the model."""
    order: np.ndarray | None = None
    """Place of each item where the sites of answers stand side by side; ``None`` if they are in order."""

    def __call__(self, values: Mapping[str, Array], points: Array) -> dict[str, Array]:
        """Log probabilities of categories, or location and scale, at traits of shape ``(n,)`` or ``(n, D)``."""
        number, people = points.shape[0], self.shape[0]
        groups = max(1, -(-number // people))
        padding = [(0, groups * people - number)] + [(0, 0)] * (points.ndim - 1)
        grouped = jnp.pad(points, padding).reshape(groups, people, *points.shape[1:])
        found = jax.vmap(lambda group: self._at(values, group))(grouped)
        return {name: value.reshape(groups * people, *value.shape[2:])[:number] for name, value in found.items()}

    def check(self, values: Mapping[str, Array]) -> int:
        """Number of items.

        :raises ValueError: if people with equal traits have different distributions of answers.
        """
        equal = jnp.full(self.shape, 0.3)
        for name, value in jax.jit(self._at)(values, equal).items():
            every = np.asarray(value)
            if not np.allclose(every, every[:1], rtol=1e-6, atol=1e-6):
                raise ValueError(
                    f"People with the same {self.trait} answer differently ({name} differs between people): the "
                    "predictor has more than items and traits. Write the response as a function of the trait yourself, "
                    "with a distribution of batch shape (..., items)."
                )
        return int(every.shape[1])

    def _at(self, values: Mapping[str, Array], traits: Array) -> dict[str, Array]:
        known = {**values, self.trait: traits}
        replayed = handlers.substitute(handlers.seed(self.model, 0), data=known)
        with handlers.block():
            sites = handlers.trace(replayed).get_trace(*self.args, **self.kwargs)
        seen = {
            name: site["fn"]
            for name, site in sites.items()
            if site["type"] == "sample" and not isinstance(site["fn"], dist.Unit) and name not in known
        }
        found = combined(seen, self.shape[0])
        return found if self.order is None else {name: value[:, self.order] for name, value in found.items()}


def combined(seen: Mapping[str, dist.Distribution], people: int) -> dict[str, Array]:
    """Log probabilities of categories, or location and scale, of the items of several sites, side by side.

    :param seen: distributions of batch shape ``(people, items)`` by site.
    :raises ValueError: if a site is not people by items, or some answers are real and some categories.
    """
    for name, fn in seen.items():
        if len(fn.batch_shape) != 2 or fn.batch_shape[0] != people or fn.event_shape:
            raise ValueError(
                f"Site {name!r} has batch shape {fn.batch_shape} and event shape {fn.event_shape}; answers of "
                f"{people} people to items have batch shape ({people}, items). Write the response as a function of the "
                "trait yourself."
            )
    normal = [isinstance(unmasked(fn), dist.Normal) for fn in seen.values()]
    if not seen or any(normal) != all(normal):
        raise ValueError(
            f"Answers must be all categories or all normal; the sites are {sorted(seen)}. Write the response of one "
            "kind as a function of the trait yourself."
        )
    if all(normal):
        pairs = [(jnp.broadcast_to(getattr(unmasked(fn), name), fn.batch_shape) for fn in seen.values())
                 for name in ("loc", "scale")]  # fmt: skip
        return dict(zip(("loc", "scale"), (jnp.concatenate(list(pair), -1) for pair in pairs), strict=True))
    tables = [log_category_probabilities(fn) for fn in seen.values()]
    width = max(table.shape[-1] for table in tables)
    padded = [jnp.pad(t, ((0, 0), (0, 0), (0, width - t.shape[-1])), constant_values=_ABSENT) for t in tables]
    return {"logits": jnp.maximum(jnp.concatenate(padded, 1), _ABSENT)}
