"""Searches over many hyperparameters go on by quasi-Newton steps about a curvature that something has measured.

L-BFGS begins with a multiple of the identity and learns the curvature from its own steps, one direction each: with a
hundred hyperparameters that takes a hundred of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import Array

from ...compilation.pytree import PyTree

_LEAST_CURVATURE = 1e-2
"""Along an axis, and of any direction in the metric of the diagonal."""
_LEAST_KNOWN = 0.2
"""Share of the curvature of complete data that is left in a metric, at least."""
_NO_THREADS = 100
"""Size up to which a system takes less time than to wake threads for it."""
_STEPS_BEFORE, _STEPS_IN_METRIC = 8, 20
"""Steps after which the curvature is measured, and measured again."""


def is_due(state: PyTree) -> bool:
    """True if a search has been on its way for so long that its curvature is to be measured: first where it is likely
    to have left the start for where the curvature is that of the maximum.

    :param state: a :class:`~.search.SearchState`, made with ``has_metric``.
    """
    return bool(state.is_searching) and int(state.memory.count) >= (
        _STEPS_IN_METRIC if np.any(state.metric) else _STEPS_BEFORE
    )


def with_metric(state: PyTree, second_derivatives: np.ndarray) -> PyTree:
    """Go on from the best point by quasi-Newton steps about a curvature, which may be a rough one.

    What L-BFGS remembers is forgotten. Directions in which the objective curves upwards are taken as if it curved
    downwards as much, and those in which it hardly curves as if it did a little, so that every direction is an ascent.

    :param state: a :class:`~.search.SearchState`, made with ``has_metric``.
    :param second_derivatives: of the objective at ``state.values``, about, shape ``(d, d)``.
    :return: the search, or as it is where they are not finite.
    """
    matrix, gradient = np.asarray(second_derivatives), np.asarray(state.best.gradient)
    if not np.isfinite(matrix).all():
        return state
    units = 1.0 / np.sqrt(np.maximum(np.abs(np.diagonal(matrix)), _LEAST_CURVATURE))
    eigenvalues, vectors = np.linalg.eigh(units[:, None] * matrix * units)
    directions = units * vectors.T
    metric = (directions.T / np.maximum(np.abs(eigenvalues), _LEAST_CURVATURE)) @ directions
    direction = metric @ gradient
    values = state.values
    one = np.ones((), values.dtype)
    memory = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state.memory)
    return state._replace(
        memory=memory._replace(count=memory.count + np.int32(1), params=values, updates=-gradient),
        metric=metric.astype(values.dtype),
        direction=direction.astype(values.dtype),
        step_size=one / max(1.0, float(np.max(np.abs(direction)))),
        lower=0.0 * one,
        upper=np.inf * one,
        num_trials=np.zeros((), np.int32),
    )


def without_leaps(complete: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Second derivatives as a metric, in which no step is longer than five of expectation maximisation.

    Far from a maximum what is lost may exceed what complete data know. In their metric the share that is left is at
    least a fifth in every direction.

    :param complete: second derivatives with the unknowns known, shape ``(d, d)``.
    :param lost: what is added as they are not, of the other sign.
    :return: of shape ``(d, d)``; the plain sum where that of complete data is not negative definite.
    """
    total: np.ndarray = complete + lost
    if not (np.isfinite(complete).all() and np.isfinite(lost).all()):
        return total
    try:
        factor = np.linalg.cholesky(-complete)
    except np.linalg.LinAlgError:
        return total
    inner = _solved(factor, _solved(factor, total).T)
    values, vectors = np.linalg.eigh(0.5 * (inner + inner.T))
    root = factor @ vectors
    return -(root * np.maximum(-values, _LEAST_KNOWN)) @ root.T


def _solved(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solution of a lower triangular system. That of SciPy wakes threads, which take milliseconds whatever its size."""
    if len(factor) <= _NO_THREADS:
        return np.linalg.solve(factor, right)
    found: np.ndarray = scipy.linalg.solve_triangular(factor, right, lower=True)
    return found


def in_metric(gradient: Array, memory: Any, metric: Array) -> Array:
    """The two loops of L-BFGS about a metric (Nocedal and Wright 2006, algorithm 7.4).

    :param gradient: shape ``(d,)``.
    :param memory: of optax's L-BFGS.
    :param metric: what the steps in memory correct, shape ``(d, d)``.
    """

    def older(vector: Array, k: Array) -> tuple[Array, Array]:
        part = memory.weights_memory[k] * jnp.dot(memory.diff_params_memory[k], vector)
        return vector - part * memory.diff_updates_memory[k], part

    def newer(vector: Array, step: tuple[Array, Array]) -> tuple[Array, None]:
        k, part = step
        other = memory.weights_memory[k] * jnp.dot(memory.diff_updates_memory[k], vector)
        return vector + (part - other) * memory.diff_params_memory[k], None

    size = memory.weights_memory.shape[0]
    order = (memory.count - 1 + jnp.arange(size)) % size
    vector, parts = jax.lax.scan(older, gradient, order, reverse=True)
    return jax.lax.scan(newer, metric @ vector, (order, parts))[0]
