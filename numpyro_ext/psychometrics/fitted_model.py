"""Knowledge that a fitted model has of its sites: estimates, draws and the answers of people to items."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from ..design.outcomes.draws import PosteriorDraws, draws_of
from ..infer.front.columns import columns_of, in_columns, is_table
from ..infer.front.engine import BaseEngine
from ..models.item_answers import answers_in_table
from ..models.item_response import ItemCall, item_call, item_response

NUM_POINTS = 32
"""Traits at which a model of items runs at once."""


@dataclass(frozen=True, eq=False)
class FittedModel:
    """A model with the arguments of its fit and what is known of its latent and ``param`` sites."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    source: Any
    names: tuple[str, ...]
    """Names of the latent and ``param`` sites."""
    call: tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
    """The model and the arguments of the fit as they are."""
    items: ItemCall | None
    """The call of a model of items of this project; ``model`` is then that of other people, without answers. ``None``
    for other models."""

    @classmethod
    def of(cls, source: object) -> FittedModel:
        if isinstance(source, BaseEngine):
            source.diagnostics  # noqa: B018 - says what is wrong if there is no run
            call = source.model, source._args, source._kwargs
        else:
            source = source if isinstance(source, PosteriorDraws) else draws_of(source)
            call = source.model, source.args, source.kwargs
        fitted, known = call, item_call(*call)
        if known is not None:
            call = item_response, (), {**known.arguments, "shape": (NUM_POINTS, len(known.items))}
            if "covariates" in known.arguments:
                rows = known.arguments["covariates"]
                call[2]["covariates"] = rows[np.arange(NUM_POINTS) % len(rows)]
        model, args, kwargs = call
        names: list[str] = []

        def run(key: Array) -> None:
            for name, site in handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs).items():
                if site["type"] == "param" or (site["type"] == "sample" and not site["is_observed"]):
                    names.append(name)

        with handlers.block(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a model has to say was said when it was fitted
            jax.eval_shape(run, jax.random.key(0))
        return cls(*call, source, tuple(names), fitted, known)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a site, latent or deterministic; ``None`` if there is none of this name."""
        if isinstance(self.source, BaseEngine):
            if name in self._hyper:
                return np.shape(self._hyper[name])
            posterior = self.source.posterior
            return tuple(posterior[name].shape) if name in posterior else None
        found = self.source.samples.get(name)
        return None if found is None else tuple(found.shape[1:])

    @property
    def _hyper(self) -> Mapping[str, Array]:
        """Hyperparameters of an engine, without their standard errors, which have to be computed."""
        return self.source._finished().fit.hyper

    def estimates(self, without: str) -> dict[str, Array]:
        """One value of each site but one: of hyperparameters the optimum, of others the posterior mean."""
        if not isinstance(self.source, BaseEngine):
            weights = self.source.weights
            known = [name for name in self.names if name in self.source.samples and name != without]
            return {name: jnp.asarray(np.average(self.source.samples[name], 0, weights)) for name in known}
        hyper, posterior = self._hyper, self.source.posterior
        values = {name: hyper[name] for name in self.names if name in hyper}
        others = [name for name in self.names if name not in hyper and name != without and name in posterior]
        return values | {name: posterior[name].mean for name in others}

    def means(self, name: str) -> np.ndarray:
        """Posterior mean of a site, latent or deterministic."""
        if isinstance(self.source, BaseEngine):
            return np.asarray(self._hyper[name] if name in self._hyper else self.source.posterior[name].mean)
        return np.asarray(np.average(self.source.samples[name], 0, self.source.weights))

    def observed_answers(self) -> np.ndarray:
        """Answers of people to items, shape ``(people, items)``, ``nan`` where there is none.

        :raises ValueError: if the observed sites are not people by items.
        """
        if self.items is not None:
            answers = self.items.table()
            if answers is None:
                raise ValueError("The model was fitted without answers: give answers=, shape (people, items).")
            return answers
        with handlers.block(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sites = handlers.trace(handlers.seed(self.model, 0)).get_trace(*self.args, **self.kwargs)
        tables = []
        for name, site in sites.items():
            if site["type"] != "sample" or not site["is_observed"] or isinstance(site["fn"], dist.Unit):
                continue
            values = np.array(site["value"], float)
            if values.ndim != 2:
                raise ValueError(f"Site {name!r} has shape {values.shape}, not people by items: give answers=.")
            mask = getattr(site["fn"], "_mask", True)
            tables.append(np.where(np.broadcast_to(np.asarray(mask, bool), values.shape), values, np.nan))
        if not tables:
            raise ValueError("The model has no observed site of people by items: give answers=.")
        return np.concatenate(tables, 1)

    def answers_of(self, given: Any, *, same_people: bool = False) -> np.ndarray:
        """Answers as numbers, shape ``(people, items)``, ``nan`` for none.

        Items of a table of pandas are taken by their names in the fit, and labels by its numbers.

        :param given: as the model takes them.
        :param bool same_people: true where rows are the people of the fit; they are then taken by their labels, if
            these are those of the fit in another order.
        :raises ValueError: for a table of other items, or of some people of the fit and some others.
        """
        if not is_table(given):
            return as_answers(given)
        model, args, kwargs = self.call
        tables = self.source._finished().columns if isinstance(self.source, BaseEngine) else columns_of(*self.call)
        names = {str(name) for name in given.columns}
        argument = "response" if self.items is not None else _most_alike(names, tables)
        if argument is None:
            return as_answers(given)
        given = in_columns(tables, (args, kwargs), model, (), {argument: given})[1][argument]
        fitted = _arguments(model, args, kwargs).get(argument)
        return as_answers(_in_rows(fitted, given) if same_people and is_table(fitted) else given)

    def drawn(self, number: int, rng_key: Array | None) -> dict[str, Array]:
        """Draws of each site, on the first axis."""
        key = jax.random.key(0) if rng_key is None else rng_key
        choice, seed, normal = jax.random.split(key, 3)
        if not isinstance(self.source, BaseEngine):
            weights, total = self.source.weights, self.source.num_draws
            places = jax.random.choice(
                choice, total, (number,), replace=number > total or weights is not None, p=weights
            )
            return {name: self.source.samples[name][places] for name in self.names if name in self.source.samples}
        seed_number = int(jax.random.randint(seed, (), 0, np.iinfo(np.int32).max))
        samples = self.source.get_samples(seed=seed_number, num_samples=number)
        values = {name: samples[name] for name in self.names if name in samples}
        run = self.source._finished()
        points = [name for name in self._hyper if np.ptp(np.asarray(values[name]), 0).max(initial=0.0) == 0.0]
        if points and not all(name in run.space.fixed for name in points):
            values |= {name: value for name, value in _near_optimum(run, number, normal).items() if name in points}
        return values


def as_answers(given: Any) -> np.ndarray:
    """Answers of people to items as numbers, ``nan`` for none, whatever holds them."""
    return np.array(answers_in_table(given, np.shape(given)[-1] if np.ndim(given) else 0).values, float)


def _most_alike(names: set[str], tables: Mapping[str, Sequence[object]]) -> str | None:
    """Argument of the fit with most of these columns."""
    shared = {argument: len(names & {str(name) for name in columns}) for argument, columns in tables.items()}
    best = max(shared, key=lambda argument: shared[argument], default=None)
    return best if best is not None and shared[best] else None


def _arguments(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    return inspect.signature(model).bind_partial(*args, **kwargs).arguments


def _in_rows(fitted: Any, given: Any) -> Any:
    """A table with its rows in the order of those of another one, where both have the same labels."""
    here, there = given.index, fitted.index
    if len(here) != len(there) or here.equals(there) or not (here.is_unique and there.is_unique):
        return given
    strange = here.difference(there, sort=False)
    if not len(strange):
        return given.loc[there]
    if len(strange) < len(here):
        raise ValueError(
            f"Rows of the answers go by the labels of people, of which {len(strange)} are not in the fit, such as "
            f"{strange[:3].tolist()}: give the people of the fit, or .to_numpy() where rows are in its order."
        )
    return given


def _near_optimum(run: Any, number: int, key: Array) -> dict[str, Array]:
    """Draws of the hyperparameters from the normal approximation at their optimum, in the unconstrained space."""
    covariance = run.fit.covariance
    if covariance is None or not run.fit.has_curvature:
        raise ValueError(
            "The fit has no standard errors of some items from which to draw: see diagnostics.messages. Without draws, "
            "response_of(engine) takes the items at their estimates."
        )
    values, vectors = np.linalg.eigh(np.asarray(covariance))
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    noise = jax.random.normal(key, (number, len(root)))
    optimum = jnp.asarray(run.fit.last_state.values)
    return jax.vmap(run.space.unpack)(optimum + noise @ jnp.asarray(root).T)
