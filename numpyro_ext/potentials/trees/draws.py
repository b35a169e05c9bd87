"""Draws of coefficients and states of a forest given independent Gaussian observations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import ndtri
from jax.typing import ArrayLike

from ..base import Potential
from ..families.laplace import LaplacePotential
from ..integrals.normal import inverse_mills_ratio, log_ndtr
from .forest import Forest
from .mixture import TreeParameters, components_of_nodes, sample_states, tilted_moments

_NEWTON_STEPS = 5


def tree_draws(
    key: Array, forest: Forest, parameters: TreeParameters, mean: ArrayLike, variance: ArrayLike, num_samples: int
) -> tuple[Array, Array]:
    r"""Independent draws from the density proportional to :math:`t(s) \prod_j N(s_j \mid \mu_j, v_j)`.

    The states are drawn from the roots down, the coefficients independently given their states: exactly for Laplace
    and Gaussian components; for others from the Gaussian with the exact mean and variance given the state.

    :param Array key: random key.
    :param Forest forest: the forest.
    :param TreeParameters parameters: components and probabilities.
    :param ArrayLike mean: means :math:`\mu`, of shape ``(num_nodes,)``.
    :param ArrayLike variance: variances :math:`v`, which broadcast to ``(num_nodes,)``.
    :param int num_samples: how many draws.
    :return: coefficients and states (true for 1), both of shape ``(num_samples, num_nodes)``.
    """
    mean = jnp.asarray(mean)
    variance = jnp.broadcast_to(jnp.asarray(variance, mean.dtype), mean.shape)
    moments = tilted_moments(forest, parameters, mean, variance)
    joint = moments.pair_marginals
    weight = jnp.sum(joint, axis=-1)
    transition = joint[..., 1] / jnp.where(weight > 0.0, weight, 1.0)
    low, high = components_of_nodes(forest, parameters)

    def draw(key: Array) -> tuple[Array, Array]:
        states_key, low_key, high_key = jax.random.split(key, 3)
        states = sample_states(states_key, forest, moments.marginals, transition)
        values = [_draw_tilted(k, c, mean, variance) for k, c in ((low_key, low), (high_key, high))]
        return jnp.where(states, values[1], values[0]), states

    return jax.lax.map(draw, jax.random.split(key, num_samples))


def _draw_tilted(key: Array, component: Potential, mean: Array, variance: Array) -> Array:
    """One draw per node of a component times its Gaussian."""
    if isinstance(component, LaplacePotential):
        return component.location + _draw_tilted_laplace(
            key, jnp.asarray(component.scale), jnp.asarray(mean - component.location), variance
        )
    moments = component.tilted_moments(mean, variance)
    return moments.mean + jnp.sqrt(moments.variance) * jax.random.normal(key, mean.shape, mean.dtype)


def _draw_tilted_laplace(key: Array, scale: Array, mean: Array, variance: Array) -> Array:
    """A choice between two normals, one of them cut to the positive and the other to the negative half line."""
    sign_key, size_key = jax.random.split(key)
    deviation = jnp.sqrt(variance)
    # With u = mean / deviation and a = deviation / scale the halves are N(+-u - a, 1) above zero, in deviations.
    u, a = mean / deviation, deviation / scale
    log_odds = -2.0 * a * u + log_ndtr(u - a) - log_ndtr(-u - a)
    positive = jax.random.logistic(sign_key, mean.shape, mean.dtype) < log_odds
    below = a - jnp.where(positive, u, -u)
    # Neither zero nor one, of which the quantiles are infinite.
    uniform = jax.random.uniform(size_key, mean.shape, mean.dtype) + 0.25 * jnp.finfo(mean.dtype).eps
    size = _truncated_quantile(below, jnp.log(uniform)) - below
    return jnp.where(positive, 1.0, -1.0) * deviation * jnp.maximum(size, 0.0)


def _truncated_quantile(below: Array, log_probability: Array) -> Array:
    """The standard normal variable that is exceeded with the given probability by those larger than ``below``."""
    target = log_probability + log_ndtr(-below)
    # In the tail the density falls as exp(-x^2 / 2); elsewhere the inverse of the distribution function is at hand.
    tail = jnp.sqrt(jnp.square(jnp.maximum(below, 0.0)) - 2.0 * log_probability)
    probability = jnp.exp(jnp.where(below > 3.0, -1.0, target))
    x = jnp.where(below > 3.0, tail, -ndtri(jnp.minimum(probability, 1.0 - jnp.finfo(below.dtype).epsneg)))
    for _ in range(_NEWTON_STEPS):
        step = (log_ndtr(-x) - target) / inverse_mills_ratio(-x)
        x = jnp.where(below > 3.0, x + step, x)
    return x
