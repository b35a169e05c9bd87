"""Nodes of a quadrature rule for each block of a form: where its density is, found from its mode and curvature.

A block is a group of unknowns that share neither prior nor factor with others: one person, one group of a random
intercept. Its nodes are a lattice of equal steps in coordinates in which its curvature at the mode is the identity. On
both sides of the mode each axis is followed until the density has fallen by :data:`_DROP` nats. On a lattice of equal
steps the sum of a smooth density that has died out at both ends converges faster than any power of the step
(Trefethen and Weideman 2014), so that it needs no weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .....linalg.cholesky import cholesky
from .....structure.latent_gaussian import LatentGaussian

_DROP = 30.0
"""Nats below the mode at the ends of an axis: 7.7 standard deviations of a Gaussian."""
_SHORTEST, _GROWTH, _MOST_EXTENSIONS = 4.0, 1.12, 48
"""First length of an axis in standard deviations, its growth, and how often it may grow: to 920 of them."""
_MODE_STEPS, _MODE_TOL, _MOST_HALVINGS = 100, 1e-3, 30
_RADIUS = 1.05
"""Radius of the ball that nodes which all blocks share lie in, the half length of an axis being one."""
_LOG_2PI = math.log(2.0 * math.pi)


class BlockNodes(NamedTuple):
    """Lattices of nodes, one for each of ``B`` blocks of at most ``D`` unknowns."""

    center: Array
    """Mode of each block, shape ``(B, D)``."""
    scale: Array
    """Lower triangular factor of the inverse curvature there, shape ``(B, D, D)``."""
    lower: Array
    """First node of each axis, in units of the scale, shape ``(B, D)``."""
    upper: Array
    """Last node of each axis, shape ``(B, D)``."""

    def at(self, place: Array) -> Array:
        """Unknowns at one place of all lattices, shape ``(B, D)``.

        :param place: from zero at the first to one at the last node of each axis, shape ``(D,)`` or ``(B, D)``.
        """
        return self.center + jnp.einsum("bij,bj->bi", self.scale, self.lower + (self.upper - self.lower) * place)

    def log_cell(self, num_nodes: int) -> Array:
        """Log volume of a cell of each lattice of ``num_nodes`` nodes an axis, shape ``(B,)``."""
        log_volume = jnp.sum(jnp.log(jnp.diagonal(self.scale, axis1=1, axis2=2)), axis=1)
        return log_volume + jnp.sum(jnp.log((self.upper - self.lower) / (num_nodes - 1)), axis=1)


def lattice(num_nodes: int, dimension: int) -> np.ndarray:
    """Places of all nodes of a lattice, shape ``(num_nodes ** dimension, dimension)``, each from zero to one.

    >>> lattice(3, 1).ravel()
    array([0. , 0.5, 1. ])
    """
    axes = np.meshgrid(*[np.linspace(0.0, 1.0, num_nodes)] * dimension, indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes], axis=-1)


def inner_lattice(num_nodes: int, dimension: int) -> np.ndarray:
    """Places of :func:`lattice` in a ball slightly larger than the one that touches the ends of its axes, the others
    being far from all mass: of pairs a square has a sixth more.

    >>> len(inner_lattice(41, 2)), 41**2
    (1369, 1681)
    """
    places = lattice(num_nodes, dimension)
    return places[np.sum((2.0 * places - 1.0) ** 2, axis=1) < _RADIUS**2]


def scattered(form: LatentGaussian, values: Array) -> Array:
    """Unknowns of all blocks, shape ``(B, D)``, in their places among the unknowns of the form, ``(num_columns,)``."""
    return jnp.zeros((form.num_columns + 1,), values.dtype).at[form.blocks.columns].set(values)[:-1]


def _gathered(of_columns: Array, form: LatentGaussian) -> Array:
    """The inverse of :func:`scattered`, zero at padding."""
    return jnp.append(of_columns, 0.0)[form.blocks.columns]


def _log_prior(form: LatentGaussian, e: Array) -> Array:
    total, start = jnp.zeros((), e.dtype), 0
    for block in form.prior:
        total = total + block.log_density(e[start : start + block.size])
        start += block.size
    return total


def log_constant(form: LatentGaussian) -> Array:
    """Log density of the prior at zero and all terms that do not depend on the unknowns."""
    return form.log_constant + _log_prior(form, jnp.zeros((form.num_columns,), form.offset.dtype))


def block_log_density(form: LatentGaussian, values: Array) -> Array:
    """Log density of the unknowns of each block with its data, but for :func:`log_constant`; shape ``(B,)``.

    Padding of blocks that have fewer unknowns than others has a standard normal density, which integrates to one.

    :param LatentGaussian form: at given hyperparameters.
    :param values: of the unknowns, shape ``(B, D)``.
    """
    e = scattered(form, values)
    factors = jnp.append(form.log_factors(form.predictor(e)), 0.0)[form.blocks.rows]
    # The log density of a Gaussian about zero is half the product of a point with its own gradient.
    slope = jax.grad(lambda x: _log_prior(form, x))(e)
    prior = 0.5 * jnp.sum(values * _gathered(slope, form), axis=1)
    padding = jnp.where(form.blocks.columns >= form.num_columns, -0.5 * (values**2 + _LOG_2PI), 0.0)
    return jnp.sum(factors, axis=1) + prior + jnp.sum(padding, axis=1)


def first_nodes(form: LatentGaussian) -> BlockNodes:
    """Lattices about zero, for :func:`find_nodes` to begin from."""
    shape, dtype = form.blocks.columns.shape, form.offset.dtype
    identity = jnp.broadcast_to(jnp.eye(shape[1], dtype=dtype), (*shape, shape[1]))
    ends = jnp.full(shape, _SHORTEST, dtype)
    return BlockNodes(jnp.zeros(shape, dtype), identity, -ends, ends)


def find_nodes(form: LatentGaussian, start: BlockNodes) -> tuple[BlockNodes, Array, Array]:
    """Lattices that cover the density of each block.

    :param LatentGaussian form: at given hyperparameters.
    :param BlockNodes start: where the search for the modes begins.
    :return: the lattices, whether each block has a mode and ends, shape ``(B,)``, and the number of Newton steps.
    """
    center, has_mode, num_steps = _modes(form, start.center)
    value = block_log_density(form, center)
    scale = _scale(-_hessian(form, center))

    def end(axis: int, side: float) -> Array:
        direction = side * scale[:, :, axis]

        def is_short(length: Array) -> Array:
            drop = value - block_log_density(form, center + length[:, None] * direction)
            return drop < _DROP  # false where the density is zero, or not known

        def grow(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            length, short, count = carry
            length = jnp.where(short, _GROWTH * length, length)
            return length, short & is_short(length), count + 1

        length = jnp.full_like(value, _SHORTEST)
        return lax.while_loop(
            lambda carry: jnp.any(carry[1]) & (carry[2] < _MOST_EXTENSIONS),
            grow,
            (length, is_short(length), jnp.asarray(0)),
        )[0]

    dimension = center.shape[1]
    lower = jnp.stack([-end(axis, -1.0) for axis in range(dimension)], axis=1)
    upper = jnp.stack([end(axis, 1.0) for axis in range(dimension)], axis=1)
    has_ends = jnp.all(jnp.maximum(-lower, upper) < 0.99 * _SHORTEST * _GROWTH**_MOST_EXTENSIONS, axis=1)
    return BlockNodes(center, scale, lower, upper), has_mode & has_ends, num_steps


def _gradient(form: LatentGaussian, values: Array) -> Array:
    return jax.grad(lambda x: jnp.sum(block_log_density(form, x)))(values)


def _hessian(form: LatentGaussian, values: Array) -> Array:
    """Second derivatives within each block, shape ``(B, D, D)``: one product for each unknown of a block."""
    columns = []
    for axis in range(values.shape[1]):
        tangent = jnp.zeros_like(values).at[:, axis].set(1.0)
        columns.append(jax.jvp(lambda x: _gradient(form, x), (values,), (tangent,))[1])
    return jnp.stack(columns, axis=-1)


def _eigen(precision: Array) -> tuple[Array, Array]:
    """Eigenvalues made positive, and eigenvectors, of the precision of each block."""
    finite = jnp.all(jnp.isfinite(precision), axis=(1, 2), keepdims=True)
    identity = jnp.eye(precision.shape[-1], dtype=precision.dtype)
    values, vectors = jnp.linalg.eigh(jnp.where(finite, precision, identity))
    least = jnp.finfo(precision.dtype).eps * jnp.maximum(1.0, jnp.max(jnp.abs(values), axis=1, keepdims=True))
    return jnp.maximum(jnp.abs(values), least), vectors


def _scale(precision: Array) -> Array:
    """Lower triangular factor of the inverse of each precision."""
    if precision.shape[-1] == 1:
        return _eigen(precision)[0][..., None] ** -0.5
    values, vectors = _eigen(precision)
    root = vectors / jnp.sqrt(values)[:, None, :]
    return cholesky(root @ root.swapaxes(-1, -2))


def _modes(form: LatentGaussian, start: Array) -> tuple[Array, Array, Array]:
    """Newton's method in each block, halving its step until the density does not fall."""

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        center, decrement, count = carry
        gradient, precision = _gradient(form, center), -_hessian(form, center)
        values, vectors = _eigen(precision)
        along = jnp.einsum("bij,bi->bj", vectors, gradient)
        direction = jnp.einsum("bij,bj->bi", vectors, along / values)
        promised = jnp.sum(along**2 / values, axis=1)
        decrement = jnp.sqrt(promised)
        current = block_log_density(form, center)
        slack = 10.0 * jnp.finfo(current.dtype).eps * (1.0 + jnp.abs(current))

        def is_worse(length: Array) -> Array:
            return ~(block_log_density(form, center + length[:, None] * direction) >= current - slack)

        def halve(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            length, worse, number = carry
            length = jnp.where(worse, 0.5 * length, length)
            return length, worse & is_worse(length), number + 1

        length = jnp.ones_like(current)
        length, worse, _ = lax.while_loop(
            lambda carry: jnp.any(carry[1]) & (carry[2] < _MOST_HALVINGS),
            halve,
            (length, is_worse(length), jnp.asarray(0)),
        )
        moved = center + jnp.where(worse, 0.0, length)[:, None] * direction
        return jnp.where(jnp.isfinite(moved), moved, center), decrement, count + 1

    infinite = jnp.full(start.shape[:1], jnp.inf, start.dtype)
    center, decrement, count = lax.while_loop(
        lambda carry: jnp.any(~(carry[1] < _MODE_TOL)) & (carry[2] < _MODE_STEPS),
        step,
        (start, infinite, jnp.asarray(0)),
    )
    return center, decrement < _MODE_TOL, count


_REACH, _REACH_OF_PAIRS = 8.0, 7.0
"""Prior standard deviations on both sides at which the nodes end, of one unknown and of each of two."""


class Grid(NamedTuple):
    """Nodes of equal steps that all blocks share."""

    first: Array
    """First node: a number where blocks have one unknown, else one for each axis, shape ``(D,)``."""
    last: Array

    def nodes(self, number: int, *, is_whole: bool = False) -> Array:
        """The nodes, shape ``(number,)``, or ``(Q, D)`` with that many on each axis.

        :param bool is_whole: whether those in the corners of a lattice are among them, where there is no mass.
        """
        if self.first.ndim == 0:
            return self.first + (self.last - self.first) * jnp.linspace(0.0, 1.0, number, dtype=self.first.dtype)
        places = (lattice if is_whole else inner_lattice)(number, self.first.size)
        return self.first + (self.last - self.first) * jnp.asarray(places, self.first.dtype)

    def log_step(self, number: int) -> Array:
        """Log volume of a cell between so many nodes on each axis."""
        return jnp.sum(jnp.log((self.last - self.first) / (number - 1)))


def grid_of(shift: Array, variance: Array) -> Grid:
    """Grid that reaches as far as the priors of all blocks.

    :param shift: locations of the unknowns, shape ``(B,)``, or ``(B, D)``.
    :param variance: their variances, of the same shape.
    """
    number = _REACH if shift.ndim == 1 else _REACH_OF_PAIRS
    shift, reach = lax.stop_gradient((shift, number * jnp.sqrt(variance)))
    return Grid(jnp.min(shift - reach, axis=0), jnp.max(shift + reach, axis=0))
