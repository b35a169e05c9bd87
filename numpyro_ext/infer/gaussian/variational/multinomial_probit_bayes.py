r"""Variational Bayes for Gaussian-process classification with a multinomial probit (Girolami and Rogers 2006).

A baseline: the auxiliary variables of the probit and the processes are taken as independent, which gives closed-form
updates and one factorisation of the kernel for good. The bound pays for it with the information that the two have of
each other, up to :math:`\tfrac{K}{2} \log |C + I|`, so that it is no guide to kernels of large scale.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ....linalg.cholesky import cholesky, half_log_determinant, solve_lower
from ....potentials.families.categorical import MultinomialProbitPotential


class MultinomialProbitFit(NamedTuple):
    """Outcome of :func:`multinomial_probit_bayes`."""

    auxiliary_mean: Array
    """Means of the auxiliary variables, shape ``(n, K)``."""
    mean: Array
    """Means of the processes at the inputs, shape ``(n, K)``."""
    covariance: Array
    """Covariance of each process at the inputs, the same for all, shape ``(n, n)``."""
    bound: Array
    """Lower bound of the log evidence."""
    bound_trace: Array
    """After each step, shape ``(num_steps,)`` as requested, padded with nan."""
    num_steps: Array
    converged: Array


@partial(jax.jit, static_argnames=("num_categories", "num_steps"))
def multinomial_probit_bayes(
    covariance: Array, label: ArrayLike, *, num_categories: int, num_steps: int = 500, tol: float = 1e-8
) -> MultinomialProbitFit:
    r"""Fit independent Gaussians to the processes :math:`f_k \sim N(0, C)` behind categories and to their noise.

    Category :math:`y_i` is the :math:`k` with the largest :math:`u_{ik} = f_{ik} + \epsilon_{ik}`, with standard normal
    :math:`\epsilon`. With :math:`q(u) q(f)` in place of the posterior, :math:`q(f_k) = N(m_k, V)` with

    .. math:: V = C (C + I)^{-1}, \qquad m_k = V E[u_k], \qquad E[u_i] = m_i + \nabla \log p(y_i \mid m_i),

    alternated from zero, each update being a maximum of the bound

    .. math:: \sum_i \log p(y_i \mid m_i) - \tfrac{K}{2} \operatorname{tr} V - \sum_k KL(N(m_k, V) \| N(0, C))

    (Girolami and Rogers 2006, section 4).

    Cost: ``n^3`` once, and ``n^2 K`` for a step.

    :param Array covariance: kernel matrix :math:`C`, shape ``(n, n)``; it may be singular.
    :param ArrayLike label: categories ``0, ..., num_categories - 1``, shape ``(n,)``.
    :param int num_categories: number of categories :math:`K`.
    :param int num_steps: the largest number of steps.
    :param float tol: stop when no mean moves by more than this.
    :return: the fit; see :class:`MultinomialProbitFit`.

    **Example:**

    >>> x = jnp.array([-2.0, -1.5, 0.0, 0.3, 1.6, 2.0])
    >>> kernel = 4.0 * jnp.exp(-0.5 * (x[:, None] - x) ** 2)
    >>> fit = multinomial_probit_bayes(kernel, jnp.array([0, 0, 1, 1, 2, 2]), num_categories=3)
    >>> round(float(fit.bound), 2)
    -12.75
    """
    covariance = jnp.asarray(covariance)
    size = covariance.shape[0]
    identity = jnp.eye(size, dtype=covariance.dtype)
    factor = cholesky(covariance + identity)
    root = solve_lower(factor, covariance)
    # C - C (C + I)^-1 C, the posterior covariance after noise of unit variance.
    spread = covariance - root.T @ root
    whitened = solve_lower(factor, identity)
    inverse = whitened.T @ whitened
    potential = MultinomialProbitPotential(jnp.asarray(label), num_categories)
    # The traces of V and of C^-1 V = (C + I)^-1 sum to n, and log |C| - log |V| is log |C + I|.
    constant = num_categories * half_log_determinant(factor)

    def bound_at(weights: Array, mean: Array, value: Array) -> Array:
        """With means ``C weights``."""
        return jnp.sum(value) - 0.5 * jnp.sum(weights * mean) - constant

    def proceed(state: tuple[Any, ...]) -> Array:
        return (state[3] < num_steps) & ~(state[2] <= tol)

    def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
        mean, trace, _, count = state
        value, slope, _ = potential.derivatives(mean)
        weights = inverse @ (mean + slope)
        moved = covariance @ weights
        trace = trace.at[count].set(bound_at(weights, moved, potential.log_density(moved)))
        return moved, trace, jnp.max(jnp.abs(moved - mean)), count + 1

    start = jnp.zeros((size, num_categories), covariance.dtype)
    trace = jnp.full((num_steps,), jnp.nan, covariance.dtype)
    infinity = jnp.asarray(jnp.inf, covariance.dtype)
    mean, trace, change, count = lax.while_loop(proceed, advance, (start, trace, infinity, jnp.asarray(0)))
    auxiliary = mean + potential.derivatives(mean)[1]
    return MultinomialProbitFit(auxiliary, mean, spread, trace[count - 1], trace, count, change <= tol)


@jax.jit
def predict_probabilities(
    fit: MultinomialProbitFit, covariance: Array, cross_covariance: Array, variance: Array
) -> Array:
    r"""Probabilities of the categories at new inputs.

    With mean :math:`\mu_k` and variance :math:`v` of the processes there, the noise of each category has variance
    :math:`1 + v`, so that the probabilities are those of a multinomial probit at :math:`\mu / \sqrt{1 + v}` (Girolami
    and Rogers 2006, section 4.3).

    :param MultinomialProbitFit fit: of the training labels.
    :param Array covariance: kernel matrix of the training inputs, shape ``(n, n)``.
    :param Array cross_covariance: kernel between new and training inputs, shape ``(m, n)``.
    :param Array variance: prior variances at the new inputs, shape ``(m,)``.
    :return: probabilities, shape ``(m, K)``.
    """
    factor = cholesky(covariance + jnp.eye(len(covariance), dtype=covariance.dtype))
    root = solve_lower(factor, cross_covariance.T)
    mean = root.T @ solve_lower(factor, fit.auxiliary_mean)
    scale = jnp.sqrt(1.0 + variance - jnp.sum(jnp.square(root), axis=0))
    num_categories = mean.shape[1]
    predictor = jnp.broadcast_to((mean / scale[:, None])[:, None], (len(mean), num_categories, num_categories))
    return jnp.exp(MultinomialProbitPotential(jnp.arange(num_categories), num_categories).log_density(predictor))
