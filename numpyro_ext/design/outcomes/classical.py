"""Fisher information of observations about their predictors."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...potentials import GaussianPotential, Potential
from ...potentials.outcomes import log_probabilities

At = Literal["mean", "draws"]
_NODES = np.linspace(-8.5, 8.5, 86)
"""Places of a standard normal predictor; sums over equal steps are exact but for the tails, also of steep curves."""


def fisher_information(potential: Potential, mean: Array, variance: Array, number: int | None, at: At) -> Array:
    r"""Fisher information :math:`\sum_y p'(y)^2 / p(y)` of each observation about its predictor.

    :param Potential potential: the factors.
    :param mean: of the predictors, shape ``(components, observations)``.
    :param variance: of the predictors.
    :param int number: number of outcomes; ``None`` for Gaussian noise.
    :param str at: ``"mean"``, or ``"draws"`` for the expectation over the predictors.
    :return: shape ``(components, observations)``.
    """
    if number is None:
        assert isinstance(potential, GaussianPotential)
        return jnp.broadcast_to(1.0 / jnp.square(potential.scale), mean.shape)
    if at == "mean":
        return _at(potential, mean, number=number)
    weights = np.exp(-0.5 * np.square(_NODES))
    return _expected(potential, mean, variance, _NODES, weights / weights.sum(), number=number)


@functools.partial(jax.jit, static_argnames="number")
def _at(potential: Potential, eta: Array, number: int) -> Array:
    log_p, slope = jax.jvp(
        lambda point: log_probabilities(potential, point, number), (eta,), (jnp.ones_like(eta),)
    )  # outcomes that cannot be have no slope
    return jnp.sum(jnp.where(jnp.isneginf(log_p), 0.0, jnp.exp(log_p) * jnp.square(slope)), axis=0)


@functools.partial(jax.jit, static_argnames="number")
def _expected(
    potential: Potential, mean: Array, variance: Array, nodes: np.ndarray, weights: np.ndarray, number: int
) -> Array:
    def add(total: Array, node: tuple[Array, Array]) -> tuple[Array, None]:
        z, weight = node
        return total + weight * _at(potential, mean + jnp.sqrt(variance) * z, number=number), None

    rule = jnp.asarray(nodes, mean.dtype), jnp.asarray(weights, mean.dtype)
    total, _ = jax.lax.scan(add, jnp.zeros_like(mean), rule)
    return total
