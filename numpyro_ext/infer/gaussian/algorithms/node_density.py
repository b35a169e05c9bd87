"""Densities that are known at the nodes of lattices: their moments, quantiles and draws.

Between nodes the logarithm of a density is a cubic through the four nearest ones, which is exact for a Gaussian.
Quantiles and draws invert the distribution function of the density so continued, on a lattice of finer steps.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = ["draw_places", "fine_density", "inverse"]

_FINER = 8
"""Fine steps in a step of a lattice."""
_LEAST = -700.0
"""Log density, over its largest value, below which it is of no interest."""


@functools.cache
def _to_fine(num_nodes: int) -> np.ndarray:
    """Matrix from values at nodes to cubics through the four nearest ones, at fine steps."""
    places = np.arange((num_nodes - 1) * _FINER + 1) / _FINER
    return np.stack([_cubic_weights(place, num_nodes) for place in places])


def _cubic_weights(place: float, num_nodes: int) -> np.ndarray:
    first = int(np.clip(np.floor(place) - 1, 0, num_nodes - 4))
    nodes, out = first + np.arange(4), np.zeros(num_nodes)
    for node in nodes:
        others = nodes[nodes != node]
        out[node] = np.prod((place - others) / (node - others))
    return out


def _weights_at(place: Array, num_nodes: int) -> Array:
    """Weights of the nodes in the cubic at one place, from zero to one along an axis; shape ``(num_nodes,)``."""
    place = place * (num_nodes - 1)
    first = jnp.clip(jnp.floor(place) - 1, 0, num_nodes - 4)
    distance = place - first - jnp.arange(4)
    nodes = np.arange(4)
    parts = [jnp.prod(distance[nodes[nodes != k]]) / float(np.prod(k - nodes[nodes != k])) for k in range(4)]
    return jnp.zeros((num_nodes,), place.dtype).at[first.astype(int) + nodes].set(jnp.stack(parts))


def fine_density(log_density: Array) -> tuple[Array, Array]:
    """A density on fine steps, up to a factor, and its distribution function.

    :param log_density: at the nodes of an axis, shape ``(n,)``, of any constant.
    :return: arrays of shape ``(8 (n - 1) + 1,)``; the last element of the second is one.
    """
    log_density = jnp.maximum(log_density - jnp.max(log_density), _LEAST)
    density = jnp.exp(jnp.asarray(_to_fine(log_density.shape[0]), log_density.dtype) @ log_density)
    mass = jnp.append(0.0, jnp.cumsum(0.5 * (density[1:] + density[:-1])))
    return density, mass / mass[-1]


def inverse(density: Array, mass: Array, probability: Array) -> Array:
    """Places at which a distribution function has given values, from zero to one along the axis.

    :param density: and ``mass``: of :func:`fine_density`.
    :param probability: inside (0, 1), of any shape.
    """
    cell = jnp.clip(jnp.searchsorted(mass, probability) - 1, 0, mass.size - 2)
    left, right = density[cell], density[cell + 1]
    share = (probability - mass[cell]) / jnp.maximum(mass[cell + 1] - mass[cell], jnp.finfo(mass.dtype).tiny)
    # the density is linear inside a cell: of the two forms of the root the one that subtracts nothing
    wanted = share * 0.5 * (left + right)
    inside = (
        2.0
        * wanted
        / jnp.maximum(
            left + jnp.sqrt(jnp.maximum(left**2 + 2.0 * (right - left) * wanted, 0.0)), jnp.finfo(mass.dtype).tiny
        )
    )
    return (cell + jnp.clip(inside, 0.0, 1.0)) / (mass.size - 1)


def draw_places(log_density: Array, uniform: Array) -> Array:
    """Draws from one density on a lattice of one to three axes, by one axis after the other.

    :param log_density: at all nodes, shape ``(n,) * D``.
    :param uniform: uniform random numbers, shape ``(num_samples, D)``.
    :return: places from zero to one along each axis, shape ``(num_samples, D)``.
    """
    if log_density.ndim == 1:
        return inverse(*fine_density(log_density), uniform[:, 0])[:, None]
    num_nodes = log_density.shape[0]
    others = tuple(range(1, log_density.ndim))
    first = inverse(*fine_density(jax.nn.logsumexp(log_density, axis=others)), uniform[:, 0])
    floored = jnp.maximum(log_density - jnp.max(log_density), _LEAST)

    def rest(place: Array, numbers: Array) -> Array:
        given = jnp.tensordot(_weights_at(place, num_nodes), floored, 1)
        return draw_places(given, numbers[None])[0]

    return jnp.concatenate([first[:, None], jax.vmap(rest)(first, uniform[:, 1:])], axis=1)
