r"""Gaussian expectations of :math:`\mathrm{lse}(\eta) = \log \sum_k e^{\eta_k}`: upper bounds and approximations.

All of them take the moments of :math:`\eta \sim N(m, V)` and return a value with its slopes. What they cost beside
each other and how near they come depends on :math:`V`: none of the fast ones is best everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from ...linalg.cholesky import cholesky, cholesky_solve
from ...linalg.short_axes import times_vector
from ..integrals.logistic_expectation import expected_log_partition
from ..integrals.several_predictors.vector_quadrature import difference_expectation

_NUM_BARRIER_STEPS = 20
_NUM_TILTED_STEPS = 6
_NUM_HALVINGS = 12
_NUM_SIGMOID_STEPS = 40


class ExpectedLogSumExp(NamedTuple):
    r"""A bound :math:`U(m, V)` of :math:`E\,\mathrm{lse}(\eta)`, or an approximation."""

    value: Array
    """Shape ``(...)``."""
    mean_slope: Array
    """:math:`\\partial U / \\partial m`: positive numbers that sum to one; shape ``(..., K)``."""
    covariance_slope: Array
    """:math:`\\partial U / \\partial V`, symmetric, with :math:`dU = tr(G\\, dV)`; shape ``(..., K, K)``."""


@dataclasses.dataclass(frozen=True)
class LogSumExpBound:
    """One of the ways to bound the Gaussian expectation of log-sum-exp; see :func:`log_sum_exp_bound`."""

    name: str
    function: Callable[[Array, Array], ExpectedLogSumExp]
    is_bound: bool
    """True if the value is never below the expectation."""

    def __call__(self, mean: ArrayLike, covariance: ArrayLike) -> ExpectedLogSumExp:
        """Value and slopes for means of shape ``(..., K)`` and covariances of shape ``(..., K, K)``."""
        dtype = jnp.result_type(mean, covariance, float)
        mean, covariance = jnp.asarray(mean, dtype), jnp.asarray(covariance, dtype)
        shape = jnp.broadcast_shapes(mean.shape, covariance.shape[:-1])
        return self.function(jnp.broadcast_to(mean, shape), jnp.broadcast_to(covariance, (*shape, shape[-1])))


def log_sum_exp_bound(name: str) -> LogSumExpBound:
    r"""The bound of that name of :math:`E\,\mathrm{lse}(\eta)`, :math:`\eta \sim N(m, V)`.

    ``"bohning"``
        Quadratic with the fixed curvature :math:`A = \tfrac12 (I - 11^T / K)`, at the best point (Böhning 1992): the
        curvature does not depend on the moments. Cost :math:`K^2`.
    ``"log"``
        :math:`\mathrm{lse}(m + \tfrac12 \mathrm{diag}\, V)` (Blei and Lafferty 2006). Ignores correlations.
        Cost :math:`K`.
    ``"tilted"``
        :math:`\min_a \tfrac12 a^T V a + \mathrm{lse}(m + \tfrac12 \mathrm{diag}\, V - V a)` (Knowles and Minka 2011,
        with the correlations, without which it is no bound). Never above ``"log"``, which is :math:`a = 0`. Cost
        :math:`30 K^3`.
    ``"product-of-sigmoids"``
        :math:`\min_\beta \beta + \sum_k E \log(1 + e^{\eta_k - \beta})` (Bouchard 2007). Ignores correlations. Cost
        40 times :math:`K` integrals.
    ``"delta"``
        Second-order Taylor expansion at the mean. Not a bound. Cost :math:`K^2`.
    ``"quadrature"``
        The expectation itself. For two categories by one integral; for three and four by products of Gauss-Hermite
        rules in one dimension less: an error of 1e-8 where the predictors have standard deviations up to one, 1e-6 at
        two, 1e-4 at four, 1e-2 at ten. For more by 16384 quasi-random points: 1e-4 at one, 1e-3 at four. Slopes are
        the expectations of the softmax and of half its Hessian. Not a bound: the error has either sign.

    Sources: Khan (2012), *Variational Learning for Latent Gaussian Models of Discrete Data*, section 5.3 ff., and the
    articles named.

    :param str name: one of the names.
    :return: a function of mean ``(..., K)`` and covariance ``(..., K, K)`` that returns an :class:`ExpectedLogSumExp`,
        with attributes ``name`` and ``is_bound``.
    :raises ValueError: for any other name.

    **Example:**

    >>> for name in ("quadrature", "tilted", "log", "bohning"):
    ...     value = log_sum_exp_bound(name)(jnp.array([1.0, -1.0, 0.5]), jnp.eye(3)).value
    ...     print(f"{name}: {value:.4f}")
    quadrature: 1.7987
    tilted: 1.8361
    log: 2.0550
    bohning: 2.0550
    """
    if name not in LOG_SUM_EXP_BOUNDS:
        raise ValueError(
            f"Unknown bound {name!r} of log-sum-exp; choose one of {', '.join(map(repr, LOG_SUM_EXP_BOUNDS))}."
        )
    return LOG_SUM_EXP_BOUNDS[name]


def _diagonal(matrix: Array) -> Array:
    return jnp.diagonal(matrix, axis1=-2, axis2=-1)


def _outer_hessian(probs: Array) -> Array:
    """``diag(p) - p p^T``, the Hessian of log-sum-exp where its gradient is ``p``."""
    return probs[..., None] * (jnp.eye(probs.shape[-1], dtype=probs.dtype) - probs[..., None, :])


def _bohning(mean: Array, covariance: Array) -> ExpectedLogSumExp:
    size = mean.shape[-1]
    curvature = 0.5 * (jnp.eye(size, dtype=mean.dtype) - 1.0 / size)
    value = logsumexp(mean, axis=-1) + 0.5 * jnp.sum(curvature * covariance, axis=(-2, -1))
    return ExpectedLogSumExp(value, jax.nn.softmax(mean), jnp.broadcast_to(0.5 * curvature, covariance.shape))


def _log(mean: Array, covariance: Array) -> ExpectedLogSumExp:
    raised = mean + 0.5 * _diagonal(covariance)
    probs = jax.nn.softmax(raised)
    slope = 0.5 * probs[..., None] * jnp.eye(mean.shape[-1], dtype=mean.dtype)
    return ExpectedLogSumExp(logsumexp(raised, axis=-1), probs, slope)


def _delta(mean: Array, covariance: Array) -> ExpectedLogSumExp:
    probs = jax.nn.softmax(mean)
    hessian = _outer_hessian(probs)
    value = logsumexp(mean, axis=-1) + 0.5 * jnp.sum(hessian * covariance, axis=(-2, -1))
    tilt = _diagonal(covariance) - 2.0 * times_vector(covariance, probs)
    return ExpectedLogSumExp(value, probs + 0.5 * times_vector(hessian, tilt), 0.5 * hessian)


def _tilted(mean: Array, covariance: Array) -> ExpectedLogSumExp:
    r"""Convex in the tilt ``a``; at the best one ``a`` is the softmax of the exponent.

    It maximises :math:`p^T (m + \tfrac12 \mathrm{diag}\, V) - \tfrac12 p^T V p` plus the entropy of ``p``. Under a wide
    Gaussian the entropy is but a barrier, so Newton's method starts with a multiple of it that shrinks to one.
    """

    def exponent(a: Array, mean: Array, covariance: Array) -> Array:
        return mean + 0.5 * _diagonal(covariance) - times_vector(covariance, a)

    def bound(a: Array, mean: Array, covariance: Array, weight: Array | float = 1.0) -> Array:
        quadratic = 0.5 * jnp.sum(a * times_vector(covariance, a), axis=-1)
        weight = jnp.asarray(weight)
        return quadratic + weight * logsumexp(exponent(a, mean, covariance) / weight[..., None], axis=-1)

    def newton(a: Array, mean: Array, covariance: Array, weight: Array | float = 1.0) -> Array:
        weight = jnp.asarray(weight)
        probs = jax.nn.softmax(exponent(a, mean, covariance) / weight[..., None])
        # (I + H V)^-1 by the Cholesky factor of I + G^T V G, where G G^T = H and G = diag(s) - s^2 s^T with s^2 = p.
        root = jnp.sqrt(probs)
        half = root[..., None] * (jnp.eye(mean.shape[-1], dtype=mean.dtype) - root[..., None] * root[..., None, :])
        half = half / jnp.sqrt(weight)[..., None, None]
        matrix = jnp.eye(mean.shape[-1], dtype=mean.dtype) + half.swapaxes(-1, -2) @ covariance @ half
        target = probs - a
        inner = jnp.einsum("...ji,...j->...i", half, times_vector(covariance, target))
        return target - times_vector(half, cholesky_solve(cholesky(matrix), inner))

    fixed = jax.lax.stop_gradient((mean, covariance))
    fractions = jnp.concatenate([jnp.zeros(1), 0.5 ** jnp.arange(_NUM_HALVINGS)]).astype(mean.dtype)
    raised = fixed[0] + 0.5 * _diagonal(fixed[1])
    size = jnp.max(_diagonal(fixed[1]), axis=-1) + jnp.max(raised, axis=-1) - jnp.min(raised, axis=-1)
    log_weight = jnp.log(jnp.maximum(0.25 * size, 1.0))

    def step(count: int, a: Array) -> Array:
        weight = jnp.exp(log_weight * jnp.maximum(1.0 - count / _NUM_BARRIER_STEPS, 0.0))
        direction = newton(a, *fixed, weight)
        values = jax.vmap(lambda fraction: bound(a + fraction * direction, *fixed, weight))(fractions)
        return a + fractions[jnp.argmin(values, axis=0)][..., None] * direction

    start = jax.nn.softmax(fixed[0] / jnp.exp(log_weight)[..., None])
    a = jax.lax.fori_loop(0, _NUM_BARRIER_STEPS + _NUM_TILTED_STEPS, step, start)
    # The last step carries the derivatives of the best tilt; not taken where the search has not come near it.
    last = a + newton(a, mean, covariance)
    height = bound(a, *fixed)
    rounding = 100.0 * jnp.finfo(mean.dtype).eps * (1.0 + jnp.max(jnp.abs(raised), axis=-1))
    is_near = bound(jax.lax.stop_gradient(last), *fixed) <= height + rounding
    a = jnp.where(is_near[..., None], last, a)
    probs = jax.nn.softmax(exponent(a, mean, covariance))
    return ExpectedLogSumExp(bound(a, mean, covariance), probs, 0.5 * _outer_hessian(probs))


def _softplus(mean: Array, variance: Array) -> ExpectedLogSumExp:
    """Expectation of ``log(1 + e^x)`` with its slopes in the mean and in the variance."""
    return ExpectedLogSumExp(*expected_log_partition(mean, variance))


def _product_of_sigmoids(mean: Array, covariance: Array) -> ExpectedLogSumExp:
    """Convex in the shift ``beta``; at the best one the expected sigmoids sum to one."""
    # The root of a variance of zero has no derivative.
    variance = jnp.maximum(_diagonal(covariance), jnp.finfo(mean.dtype).eps)

    def newton(beta: Array, mean: Array, variance: Array) -> tuple[Array, Array]:
        _, slope, half_curvature = _softplus(mean - beta[..., None], variance)
        excess = jnp.sum(slope, axis=-1) - 1.0
        return excess, excess / jnp.maximum(2.0 * jnp.sum(half_curvature, axis=-1), jnp.finfo(mean.dtype).tiny)

    fixed = jax.lax.stop_gradient((mean, variance))
    # At the second largest mean two of the sigmoids are at least one half. At the log bound the expected exponentials,
    # which are larger than the sigmoids, sum to one.
    lower = jnp.sort(fixed[0], axis=-1)[..., -2]
    upper = logsumexp(fixed[0] + 0.5 * fixed[1], axis=-1)

    def step(_: int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        beta, lower, upper = state
        excess, change = newton(beta, *fixed)
        lower, upper = jnp.where(excess > 0.0, beta, lower), jnp.where(excess > 0.0, upper, beta)
        proposal = beta + change
        is_inside = (proposal > lower) & (proposal < upper)
        return jnp.where(is_inside, proposal, 0.5 * (lower + upper)), lower, upper

    beta, _, _ = jax.lax.fori_loop(0, _NUM_SIGMOID_STEPS, step, (0.5 * (lower + upper), lower, upper))
    # The last step carries the derivatives of the best shift.
    beta = beta + newton(beta, mean, variance)[1]
    value, mean_slope, variance_slope = _softplus(mean - beta[..., None], variance)
    diagonal = variance_slope[..., None] * jnp.eye(mean.shape[-1], dtype=mean.dtype)
    return ExpectedLogSumExp(beta + jnp.sum(value, axis=-1), mean_slope, diagonal)


def _quadrature(mean: Array, covariance: Array) -> ExpectedLogSumExp:
    if mean.shape[-1] == 2:
        contrast = jnp.array([1.0, -1.0], mean.dtype)
        variance = jnp.maximum(contrast @ covariance @ contrast, jnp.finfo(mean.dtype).eps)
        value, slope, variance_slope = _softplus(mean @ contrast, variance)
        mean_slope = jnp.stack([slope, 1.0 - slope], axis=-1)
        return ExpectedLogSumExp(
            mean[..., 1] + value, mean_slope, variance_slope[..., None, None] * jnp.outer(contrast, contrast)
        )

    def terms(eta: Array) -> tuple[Array, Array, Array]:
        # one predictor after the other: reductions of a last axis of three are slow
        predictors = [eta[..., k] for k in range(mean.shape[-1])]
        largest = functools.reduce(jnp.maximum, predictors)
        masses = [jnp.exp(predictor - largest) for predictor in predictors]
        mass = sum(masses[1:], start=masses[0])
        probs = jnp.stack([part / mass for part in masses], axis=-1)
        return largest + jnp.log(mass), probs, 0.5 * _outer_hessian(probs)

    value, mean_slope, covariance_slope = difference_expectation(terms, mean, covariance, is_softmax=True)
    return ExpectedLogSumExp(mean[..., -1] + value, mean_slope, covariance_slope)


LOG_SUM_EXP_BOUNDS = {
    bound.name: bound
    for bound in (
        LogSumExpBound("bohning", _bohning, is_bound=True),
        LogSumExpBound("log", _log, is_bound=True),
        LogSumExpBound("tilted", _tilted, is_bound=True),
        LogSumExpBound("product-of-sigmoids", _product_of_sigmoids, is_bound=True),
        LogSumExpBound("delta", _delta, is_bound=False),
        LogSumExpBound("quadrature", _quadrature, is_bound=False),
    )
}
