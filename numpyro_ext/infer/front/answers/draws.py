"""Draws from a Gaussian posterior, kept inside the support of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import Predictive

from ....structure.model.reading import ModelReading
from ..running.progress import warn

__all__ = ["draw_inside_support", "finite_draws", "with_hyper", "with_predictive"]

_MAX_ROUNDS = 20


def draw_inside_support(
    draw: Callable[[Array], tuple[dict[str, Array], Array]], rng_key: Array
) -> tuple[dict[str, Array], Array]:
    """Draw, and draw again where the model has density zero.

    A Gaussian reaches points that the exact posterior excludes: predictors below zero at which a rectified-linear rate
    has produced a count. Such a draw would make every expectation of the log likelihood minus infinity, so its place is
    taken by a draw from the Gaussian given that the density is positive.

    :param draw: from a random key to draws, with the leading axis running over them, and the log density of each.
    :param rng_key: random number generator key; the first round uses it as it is.
    :return: draws and their log densities.
    :raises FloatingPointError: if a log density is ``nan``.
    """
    sites, log_density = draw(rng_key)
    for number in range(_MAX_ROUNDS):
        density = np.asarray(log_density)
        if np.isnan(density).any():
            raise FloatingPointError("The log density of the model is nan at draws from the posterior.")
        outside = np.flatnonzero(density == -np.inf)
        if outside.size == 0:
            return sites, log_density
        fresh, fresh_density = draw(jax.random.fold_in(rng_key, number))
        inside = np.flatnonzero(np.asarray(fresh_density) > -np.inf)[: outside.size]
        target = outside[: inside.size]
        sites = {name: value.at[target].set(fresh[name][inside]) for name, value in sites.items()}
        log_density = log_density.at[target].set(fresh_density[inside])
    remaining = int(np.sum(np.asarray(log_density) == -np.inf))
    if remaining:
        warn(
            f"{remaining} of {log_density.size} draws lie where the model has density zero, after {_MAX_ROUNDS} "
            "rounds: the Gaussian approximation hardly overlaps the support. Exact moments are in engine.posterior."
        )
    return sites, log_density


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
    given = (*reading.field, *reading.hyper)
    if not names or not all(name in draws for name in given):
        return out
    predictive = Predictive(reading.model, {name: draws[name] for name in given}, return_sites=list(names))
    out |= predictive(jax.random.fold_in(rng_key, 3), *reading.args, **reading.kwargs)
    return out
