"""Draws from a Gaussian posterior, kept inside the support of the model."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import Array

from .progress import warn

__all__ = ["draw_inside_support"]

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
