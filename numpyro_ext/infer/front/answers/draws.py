"""Draws from a Gaussian posterior, kept inside the support of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....structure.model.reading import ModelReading
from ..running.progress import warn
from .model_draws import predictive_draws

_MAX_ROUNDS = 20
_SINGULAR = (
    "The usual cause is a covariance close to singular: add a small jitter to its diagonal, or use float64 "
    "(numpyro.enable_x64())."
)


class Draws(NamedTuple):
    """Draws from an approximation, with the leading axis running over them."""

    sites: dict[str, Array]
    log_density: Array
    """Log density of draw and data, by the model; of the draw alone where no factor of the data can be zero and their
    density was not asked for."""
    log_weight: Array | None = None
    """The same over the density that the draws are from, up to a constant, where it was asked for."""


def draw_inside_support(draw: Callable[[Array], Draws], rng_key: Array) -> Draws:
    """Draw, and draw again where the model has density zero.

    A Gaussian reaches points that the exact posterior excludes: predictors below zero at which a rectified-linear rate
    has produced a count. Such a draw would make every expectation of the log likelihood minus infinity, so its place is
    taken by a draw from the Gaussian given that the density is positive. So is that of a draw at which the model cannot
    tell its density, as where hyperparameters were drawn that make a covariance singular to working precision; there a
    warning says how many.

    :param draw: from a random key to draws.
    :param rng_key: random number generator key; the first round uses it as it is.
    :return: the draws.
    :raises FloatingPointError: if most log densities are ``nan``, or some after all rounds.
    """
    found = draw(rng_key)
    unknown = int(np.isnan(np.asarray(found.log_density)).sum())
    where = f"The log density of the model is nan at {unknown} of {found.log_density.size} draws from the posterior"
    if 2 * unknown > found.log_density.size:
        raise FloatingPointError(f"{where}. {_SINGULAR}")
    if unknown:
        warn(f"{where}; others were drawn in their place. {_SINGULAR}")
    for number in range(_MAX_ROUNDS):
        density = np.asarray(found.log_density)
        outside = np.flatnonzero(~(density > -np.inf))
        if outside.size == 0:
            return found
        fresh = draw(jax.random.fold_in(rng_key, number))
        inside = np.flatnonzero(np.asarray(fresh.log_density) > -np.inf)[: outside.size]
        target = outside[: inside.size]
        found = jax.tree.map(
            lambda value, other, target=target, inside=inside: value.at[target].set(other[inside]), found, fresh
        )
    if np.isnan(np.asarray(found.log_density)).any():
        raise FloatingPointError(f"{where}, and at those in their place. {_SINGULAR}")
    remaining = int(np.sum(np.asarray(found.log_density) == -np.inf))
    if remaining:
        warn(
            f"{remaining} of {found.log_density.size} draws lie where the model has density zero, after {_MAX_ROUNDS} "
            "rounds: the Gaussian approximation hardly overlaps the support. Exact moments are in engine.posterior."
        )
    return found


def finite_draws(draws: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
    """Draws of a posterior that lies inside the support of the model, as they are.

    :raises FloatingPointError: if a log density is not finite.
    """
    if not bool(jnp.all(jnp.isfinite(draws[1]))):
        raise FloatingPointError("The log density of the model is not finite at draws from the posterior.")
    return draws


def with_hyper(
    sites: Mapping[str, Array], hyper: Mapping[str, Array], observed: Collection[str], num_samples: int
) -> dict[str, Array]:
    """The draws without the observed sites, and with hyperparameters that were not drawn at their values.

    :param sites: the draws, with the leading axis running over them.
    :param hyper: values of hyperparameters.
    :param observed: names of the observed sites.
    :param int num_samples: how many draws there are.
    """
    held = {n: jnp.broadcast_to(v, (num_samples, *jnp.shape(v))) for n, v in hyper.items() if n not in sites}
    return {name: value for name, value in {**sites, **held}.items() if name not in observed}


def with_predictive(reading: ModelReading, draws: Mapping[str, Array], rng_key: Array) -> dict[str, Array]:
    """The draws, and of each one by the model itself what the fit leaves out: missing values, given all other sites.

    :param ModelReading reading: of the model; says which sites are left out, as nothing depends on them.
    :param draws: of the other sites, with the leading axis running over them.
    :param rng_key: random number generator key of the draws of the other sites.
    :return: draws of all sites. If some of the others were not drawn, what is left out stays so.
    """
    names = reading.behind_predictive
    out = {name: value for name, value in draws.items() if name not in names}
    # Of what no unknown of the reading sees, an engine may have drawn some itself.
    given = (*reading.field, *reading.hyper, *(n for n in reading.predictive if n not in names))
    if not names or not all(name in draws for name in given):
        return out
    latents, key = {name: draws[name] for name in given}, jax.random.fold_in(rng_key, 3)
    return out | predictive_draws(reading.model, latents, key, reading.args, reading.kwargs, list(names))
