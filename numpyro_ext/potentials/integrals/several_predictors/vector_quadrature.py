r"""Gaussian expectations of functions of a few predictors that depend on their differences only.

One dimension is saved by that: the predictors are measured from the last of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ....linalg.cholesky import cholesky, cholesky_solve, inverse_lower

LARGEST_TENSOR_DIMENSION = 3
# Gauss-Hermite nodes on each axis.
_NUM_NODES = {0: 1, 1: 100, 2: 64, 3: 32}
_LOG2_NUM_POINTS = 13
# Nodes that are evaluated at a time.
_CHUNK = 64
_NUM_MODE_STEPS = 30
_NUM_STEP_SIZES = 8


# Deviations of differences up to which so many nodes on each axis leave errors below 1e-11 of functions that are
# analytic within pi of the real line and grow no faster than linearly, by dimension (against rules with many more).
_SHORT_RULES = {1: (), 2: ((0.3, 10), (0.7, 20), (1.0, 28)), 3: ((0.3, 10), (0.7, 20))}


@functools.lru_cache
def gaussian_rule(dimension: int, num_nodes: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Nodes ``(num_nodes, dimension)`` and weights of a rule for the standard normal distribution.

    Up to three dimensions the product of Gauss-Hermite rules (nodes of negligible weight left out), beyond that 8192
    points of a Sobol sequence and their mirror images, scaled so that quadratic functions are integrated exactly.
    """
    if dimension <= LARGEST_TENSOR_DIMENSION:
        line, weights = np.polynomial.hermite_e.hermegauss(num_nodes or _NUM_NODES[dimension])
        grid = np.array(list(itertools.product(line, repeat=dimension))).reshape(-1, dimension)
        weight = np.prod(np.array(list(itertools.product(weights, repeat=dimension))).reshape(-1, dimension), axis=-1)
        weight = weight / weight.sum()
        kept = weight > 1e-18
        return grid[kept], weight[kept] / weight[kept].sum()
    from scipy.special import ndtri
    from scipy.stats import qmc

    uniform = qmc.Sobol(dimension, scramble=False).random_base2(_LOG2_NUM_POINTS)
    half = ndtri(uniform + 0.5 / len(uniform))
    nodes = np.concatenate([half, -half])
    factor = np.linalg.cholesky(nodes.T @ nodes / len(nodes))
    nodes = np.linalg.solve(factor, nodes.T).T
    return nodes, np.full(len(nodes), 1.0 / len(nodes))


def difference_expectation(
    function: Callable[[Array], Any], mean: Array, covariance: Array, *, is_softmax: bool = False
) -> Any:
    r"""Expectation of ``function(eta - eta_last)`` for :math:`\eta \sim N(m, V)`.

    :param Callable function: maps an array ``(num_nodes, ..., K)``, whose last predictor is zero, to a pytree of arrays
        that begin with the axes ``(num_nodes, ...)``.
    :param Array mean: means, shape ``(..., K)``.
    :param Array covariance: covariances, shape ``(..., K, K)``, positive semidefinite.
    :param bool is_softmax: whether the function is made of softmax and its logarithm, for which shorter rules serve
        where all deviations are small.
    :return: the expectations, without the axis of the nodes. Cost: 1e2 to 2e4 evaluations, a few at a time.
    """
    dimension = mean.shape[-1] - 1
    center, root = _differences(mean, covariance)
    short = _SHORT_RULES.get(dimension, ()) if is_softmax else ()
    sums = [functools.partial(_sum_over_rule, function, num_nodes) for num_nodes in (*(n for _, n in short), None)]
    if not short:
        return sums[-1](center, root)
    widest = jnp.sqrt(jnp.max(jnp.sum(lax.stop_gradient(root) ** 2, axis=-1), initial=0.0))
    choice = sum(jnp.where(widest <= deviation, 0, 1) for deviation, _ in short)
    return lax.switch(choice, sums, center, root)


def _sum_over_rule(function: Callable[[Array], Any], num_nodes: int | None, center: Array, root: Array) -> Any:
    dtype, dimension = center.dtype, center.shape[-1]
    nodes, weights = gaussian_rule(dimension, num_nodes)
    nodes = np.concatenate([nodes, np.zeros((-len(nodes) % _CHUNK, dimension))]).reshape(-1, _CHUNK, dimension)
    weights = np.concatenate([weights, np.zeros(-len(weights) % _CHUNK)]).reshape(-1, _CHUNK)
    zero = jnp.zeros((_CHUNK, *center.shape[:-1], 1), dtype)

    def add(total: Any, rule: tuple[Array, Array]) -> tuple[Any, None]:
        node, weight = rule
        eta = center + jnp.einsum("...ij,nj->n...i", root, node)
        values = function(jnp.concatenate([eta, zero], axis=-1))
        return jax.tree.map(lambda t, value: t + jnp.tensordot(weight, value, axes=1), total, values), None

    like = jax.ShapeDtypeStruct((_CHUNK, *center.shape[:-1], dimension + 1), dtype)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), jax.eval_shape(function, like))
    return lax.scan(add, zeros, (jnp.asarray(nodes, dtype), jnp.asarray(weights, dtype)))[0]


def log_concave_normaliser(derivatives: Callable[[Array], Any], mean: Array, covariance: Array) -> Array:
    r"""Log expectation of a log-concave factor that may be much narrower than the Gaussian.

    Nodes are laid around the mode of the integrand, in the units of its curvature there, which Newton's method finds.

    :param Callable derivatives: value ``(..., )``, gradient ``(..., K)`` and Hessian ``(..., K, K)`` of the log factor,
        of predictors ``(..., K)`` whose differences alone matter.
    :param Array mean: means, shape ``(..., K)``.
    :param Array covariance: covariances, shape ``(..., K, K)``, positive semidefinite.
    :return: shape ``(...)``.
    """
    center, root = _differences(mean, covariance)
    sizes = jnp.asarray(0.5 ** np.arange(_NUM_STEP_SIZES), center.dtype)

    def value_at(z: Array) -> tuple[Array, Array, Array]:
        eta = center + jnp.einsum("...ij,...j->...i", root, z)
        value, gradient, hessian = derivatives(jnp.concatenate([eta, jnp.zeros_like(eta[..., :1])], axis=-1))
        slope = jnp.einsum("...ij,...i->...j", root, gradient[..., :-1]) - z
        curvature = jnp.eye(z.shape[-1], dtype=z.dtype) - jnp.einsum(
            "...ki,...kl,...lj->...ij", root, hessian[..., :-1, :-1], root
        )
        return value - 0.5 * jnp.sum(z**2, axis=-1), slope, curvature

    def climb(_: int, z: Array) -> Array:
        slope, curvature = value_at(z)[1:]
        step = cholesky_solve(cholesky(curvature), slope)
        trials = z + sizes.reshape(-1, *(1 for _ in z.shape)) * step
        best = jnp.argmax(value_at(trials)[0], axis=0)
        return z + sizes[best][..., None] * step

    mode = jax.lax.stop_gradient(jax.lax.fori_loop(0, _NUM_MODE_STEPS, climb, jnp.zeros_like(center)))
    peak, _, curvature = value_at(mode)
    whitening = inverse_lower(cholesky(curvature))

    def ratio(u: Array) -> Array:
        z = mode + jnp.einsum("...ji,...j->...i", whitening, u[..., :-1])
        return jnp.exp(value_at(z)[0] + 0.5 * jnp.sum(u**2, axis=-1) - peak)

    standard = np.diag([1.0] * center.shape[-1] + [0.0]).astype(mean.dtype)
    total = difference_expectation(ratio, jnp.zeros_like(mean), jnp.broadcast_to(standard, covariance.shape))
    return peak + jnp.log(total) + jnp.sum(jnp.log(jnp.diagonal(whitening, axis1=-2, axis2=-1)), axis=-1)


def _differences(mean: Array, covariance: Array) -> tuple[Array, Array]:
    """Mean, and a factor of the covariance, of the differences from the last predictor."""
    center = mean[..., :-1] - mean[..., -1:]
    half = covariance[..., :-1, :] - covariance[..., -1:, :]
    spread = half[..., :-1] - half[..., -1:]
    # A singular covariance has a factor too, with what is invisible at the precision of the predictors added.
    size = 1.0 + jnp.max(jnp.diagonal(spread, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    identity = jnp.eye(center.shape[-1], dtype=mean.dtype)
    return center, cholesky(spread + 8.0 * jnp.finfo(mean.dtype).eps * size * identity)
