"""Maximum marginal likelihood of items with one trait each on a fixed grid, for benchmarks of adaptive tests.

It shares no code with the engines, so what adaptive tests make of items does not depend on which engine fitted them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.optimize import minimize

_NODES = np.linspace(-6.0, 6.0, 61)
_LOG_PRIOR = -0.5 * _NODES**2 - np.log(np.exp(-0.5 * _NODES**2).sum())


class GradedItems(NamedTuple):
    """Slopes ``(P,)`` and increasing cutpoints ``(P, K - 1)``."""

    slope: np.ndarray
    cutpoints: np.ndarray


def _graded(flat: Array, num_items: int, num_categories: int) -> tuple[Array, Array]:
    parts = flat.reshape(num_items, num_categories)
    steps = jnp.concatenate([parts[:, 1:2], jnp.exp(parts[:, 2:])], 1)
    return parts[:, 0], jnp.cumsum(steps, 1)


def _log_table(slope: Array, cutpoints: Array) -> Array:
    """Log probabilities of graded answers on the nodes, shape ``(items, categories, nodes)``."""
    upper = slope[:, None, None] * _NODES - cutpoints[..., None]
    full = jnp.full_like(upper[:, :1], jnp.inf)
    upper = jnp.concatenate([full, upper, -full], 1)
    # sigmoid(a) - sigmoid(b) for a > b without loss of digits
    a, b = upper[:, :-1], upper[:, 1:]
    return (
        jax.nn.log_sigmoid(a) + jax.nn.log_sigmoid(-b) + jnp.log(-jnp.expm1(jnp.where(b > -jnp.inf, b - a, -jnp.inf)))
    )


def _log_likelihoods(answers: np.ndarray, table: Array) -> Array:
    """Log likelihood of each person on the nodes; answers below zero are missing."""
    told = jax.nn.one_hot(answers, table.shape[1]).reshape(len(answers), -1)
    return told @ table.reshape(-1, table.shape[2])


def fit_graded(answers: np.ndarray, num_categories: int) -> tuple[GradedItems, np.ndarray]:
    """Fit graded items of one trait; also the log likelihoods of people on the nodes, shape ``(people, nodes)``."""
    number = answers.shape[1]

    @jax.jit
    def objective(flat: Array) -> Array:
        table = _log_table(*_graded(flat, number, num_categories))
        return -jax.nn.logsumexp(_log_likelihoods(answers, table) + _LOG_PRIOR, 1).sum()

    start = np.tile([1.0, -1.5, *[0.0] * (num_categories - 2)], (number, 1))
    found = minimize(jax.jit(jax.value_and_grad(objective)), start.reshape(-1), jac=True, method="L-BFGS-B")
    slope, cutpoints = _graded(jnp.asarray(found.x), number, num_categories)
    likelihoods = _log_likelihoods(answers, _log_table(slope, cutpoints))
    return GradedItems(np.asarray(slope), np.asarray(cutpoints)), np.asarray(likelihoods)


def trait_correlations(likelihoods: list[np.ndarray]) -> np.ndarray:
    """Correlations of traits with items of their own by the likelihood of each pair, shape ``(D, D)``."""
    steps = np.linspace(-0.95, 0.95, 77)
    found = np.eye(len(likelihoods))
    p = [np.exp(part - part.max(1, keepdims=True)) for part in likelihoods]
    x, y = _NODES[:, None], _NODES
    for i in range(len(p)):
        for j in range(i):
            scores = []
            for rho in steps:
                density = np.exp(-0.5 * (x**2 - 2 * rho * x * y + y**2) / (1 - rho**2)) / np.sqrt(1 - rho**2)
                scores.append(np.log(np.einsum("nq,qr,nr->n", p[i], density, p[j], optimize=True)).sum())
            found[i, j] = found[j, i] = steps[int(np.argmax(scores))]
    return found


def fit_two_parameter_logistic(
    answers: np.ndarray, num_draws: int, seed: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Slopes and intercepts at the penalised optimum, and draws of both from the normal approximation there.

    Priors are LogNormal(0, 0.5) for slopes and Normal(0, 3) for intercepts.
    """
    number = answers.shape[1]

    def objective(flat: Array) -> Array:
        log_slope, intercept = flat[:number], flat[number:]
        eta = jnp.exp(log_slope)[:, None] * _NODES + intercept[:, None]
        table = jnp.stack([jax.nn.log_sigmoid(-eta), jax.nn.log_sigmoid(eta)], 1)
        fit = jax.nn.logsumexp(_log_likelihoods(answers, table) + _LOG_PRIOR, 1).sum()
        return -fit + 0.5 * jnp.sum(jnp.square(log_slope / 0.5)) + 0.5 * jnp.sum(jnp.square(intercept / 3.0))

    found = minimize(jax.jit(jax.value_and_grad(objective)), np.zeros(2 * number), jac=True, method="BFGS")
    precision = np.asarray(jax.jit(jax.hessian(objective))(found.x))
    root = np.linalg.inv(np.linalg.cholesky(precision)).T
    draws = found.x + np.random.default_rng(seed).normal(size=(num_draws, 2 * number)) @ root.T
    estimates = np.exp(found.x[:number]), found.x[number:]
    return estimates, (np.exp(draws[:, :number]), draws[:, number:])
