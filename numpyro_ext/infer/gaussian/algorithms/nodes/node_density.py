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

_FINER = 8
"""Fine steps in a step of a lattice."""
_LEAST = -700.0
"""Log density, over its largest value, below which it is of no interest."""


def _nearest(values: Array, k: int) -> Array:
    """Values at node ``k`` of the four nodes of each step of a lattice, those around it, shape ``(n - 1,)``; by slices,
    as a gather of many lattices takes longer than all that is made of it."""
    last = len(values) - 4 + k
    return jnp.concatenate([values[k : k + 1], values[k : last + 1], values[last : last + 1]])


@functools.cache
def _cubics(num_nodes: int) -> np.ndarray:
    """Weights of the four nodes of each step of a lattice in the cubic through them, at the beginnings of its fine
    steps, ``(n - 1, 8, 4)``."""
    nodes = np.clip(np.arange(num_nodes - 1) - 1, 0, num_nodes - 4)[:, None] + np.arange(4)
    places = (np.arange(num_nodes - 1)[:, None] + np.arange(_FINER) / _FINER)[:, :, None]
    weights = np.ones((*places.shape[:2], 4))
    for k in range(4):
        for other in {0, 1, 2, 3} - {k}:
            weights[:, :, k] *= ((places - nodes[:, None, [other]]) / (k - other))[:, :, 0]
    return weights


def _weights_at(place: Array, num_nodes: int) -> Array:
    """Weights of the nodes in the cubic at one place, from zero to one along an axis; shape ``(num_nodes,)``."""
    place = place * (num_nodes - 1)
    first = jnp.clip(jnp.floor(place) - 1, 0, num_nodes - 4)
    distance = place - first - jnp.arange(4)
    nodes = np.arange(4)
    parts = [jnp.prod(distance[nodes[nodes != k]]) / float(np.prod(k - nodes[nodes != k])) for k in range(4)]
    return jnp.zeros((num_nodes,), place.dtype).at[first.astype(int) + nodes].set(jnp.stack(parts))


def quantiles(log_density: Array, probability: Array) -> Array:
    """Places at which the distribution function of a density has given values, from zero to one along the axis.

    The step of the lattice is found by the masses of steps, and then the fine step inside it, so that nothing is summed
    up over all fine steps.

    :param log_density: at the nodes of an axis, shape ``(n,)``, of any constant.
    :param probability: inside (0, 1), of any shape.
    :return: places, of the shape of the probabilities.
    """
    num_steps = log_density.shape[0] - 1
    log_density = jnp.maximum(log_density - jnp.max(log_density), _LEAST)
    weights = jnp.asarray(_cubics(num_steps + 1), log_density.dtype)
    nearest = [_nearest(log_density, k) for k in range(4)]
    # not kept, as these are eight times the density: those of the step that is found are made again
    fine_steps = (sum(weights[:, fine, k] * nearest[k] for k in range(4)) for fine in range(_FINER))
    inner, ends = jnp.asarray(sum(map(jnp.exp, fine_steps))), jnp.exp(log_density)
    # a product, as the cumulated sum of many lattices takes thrice the time of all exponentials
    below = jnp.asarray(np.tri(num_steps + 1, num_steps, -1), inner.dtype)
    mass = jnp.matmul(below, inner + 0.5 * (ends[1:] - ends[:-1]), precision="highest")
    wanted = probability * mass[-1]
    step = jnp.clip(jnp.searchsorted(mass, wanted) - 1, 0, num_steps - 1)
    wanted = wanted - mass[step]

    within = sum(weights[step, :, k] * nearest[k][step][..., None] for k in range(4))
    fine = jnp.append(jnp.exp(jnp.asarray(within)), ends[step + 1][..., None], axis=-1)
    masses = jnp.cumsum(0.5 * (fine[..., 1:] + fine[..., :-1]), -1)
    cell = jnp.sum(masses[..., :-1] < wanted[..., None], -1)

    def at(values: Array, index: Array) -> Array:
        return jnp.take_along_axis(values, index[..., None], -1)[..., 0]

    left, right = at(fine, cell), at(fine, cell + 1)
    wanted = wanted - jnp.where(cell == 0, 0.0, at(masses, jnp.maximum(cell - 1, 0)))
    # the density is linear inside a cell: of the two forms of the root the one that subtracts nothing
    root = left + jnp.sqrt(jnp.maximum(left**2 + 2.0 * (right - left) * wanted, 0.0))
    inside = 2.0 * wanted / jnp.maximum(root, jnp.finfo(mass.dtype).tiny)
    return (step * _FINER + cell + jnp.clip(inside, 0.0, 1.0)) / (num_steps * _FINER)


def draw_places(log_density: Array, uniform: Array) -> Array:
    """Draws from one density on a lattice of one to three axes, by one axis after the other.

    :param log_density: at all nodes, shape ``(n,) * D``.
    :param uniform: uniform random numbers, shape ``(num_samples, D)``.
    :return: places from zero to one along each axis, shape ``(num_samples, D)``.
    """
    if log_density.ndim == 1:
        return quantiles(log_density, uniform[:, 0])[:, None]
    num_nodes = log_density.shape[0]
    others = tuple(range(1, log_density.ndim))
    first = quantiles(jax.nn.logsumexp(log_density, axis=others), uniform[:, 0])
    floored = jnp.maximum(log_density - jnp.max(log_density), _LEAST)

    def rest(place: Array, numbers: Array) -> Array:
        given = jnp.tensordot(_weights_at(place, num_nodes), floored, 1)
        return draw_places(given, numbers[None])[0]

    return jnp.concatenate([first[:, None], jax.vmap(rest)(first, uniform[:, 1:])], axis=1)
