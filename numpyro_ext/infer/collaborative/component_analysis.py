"""M-steps for the prior that users share: probabilistic principal components in whitened items, or any covariance;
also from averages over minibatches of users."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...linalg.cholesky import cholesky, solve_lower
from ...linalg.solvers.posterior_precision import tridiagonalise
from ..front.running.averages import Averages
from .pairs import UserBatch
from .user_inference import SharedPrior

_LARGEST_DENSE = 2000
"""Items up to which all eigenvalues are computed."""


@partial(jax.jit, static_argnames=("old_mean", "dense"))
def factor_step(
    prior: SharedPrior, shift: Array, curvature: Array, *, old_mean: bool = False, dense: bool | None = None
) -> SharedPrior:
    r"""The mean, loadings and variance that maximise the expected log prior (Ko 2017, section 3.2.2, corrected).

    With :math:`K = L L^T` and :math:`\bar\Sigma = L^{-1} \Sigma L^{-T}` these are the principal components of
    :math:`\bar C = \bar\Sigma - \bar\Sigma L^T S L \bar\Sigma`, and the variance is the mean of the other eigenvalues.

    :param SharedPrior prior: the prior under which the users were inferred.
    :param Array shift: mean over users of ``w``, see :class:`~.user_inference.UserStatistics`.
    :param Array curvature: mean over users of ``G - w w^T``.
    :param bool old_mean: whether the covariance is that about the old mean: slower, and as sure to ascend.
    :param bool dense: whether to compute all eigenvalues; by default for up to 2000 items. Else the first ones come
        from a Krylov space, by products with the factors of :math:`\bar C`.
    :return: the next prior.

    Cost: the cube of the number of items, or its square times the rank (after the factor of the kernel).
    """
    if dense is None:
        dense = prior.mean.shape[0] <= _LARGEST_DENSE
    size, rank = prior.loadings.shape
    # with the outer product, the covariance is that about the new mean
    second = curvature if old_mean else curvature + jnp.outer(shift, shift)
    factor = cholesky(prior.kernel)
    white = solve_lower(factor, prior.loadings)
    mean = prior.mean + prior.loadings @ (prior.loadings.T @ shift) + prior.variance * (prior.kernel @ shift)

    def times_prior(x: Array) -> Array:
        return white @ (white.T @ x) + prior.variance * x

    def matvec(x: Array) -> Array:
        y = times_prior(x)
        return y - times_prior(factor.T @ (second @ (factor @ y)))

    if dense:
        return _principal(prior, mean, factor, matvec(jnp.eye(size, dtype=white.dtype)))
    return _with_components(prior, mean, factor, *_leading(matvec, white, rank), _trace(prior, white, second))


def _principal(prior: SharedPrior, mean: Array, factor: Array, matrix: Array) -> SharedPrior:
    """The prior whose components are the first of a covariance of whitened items."""
    values, vectors = jnp.linalg.eigh(0.5 * (matrix + matrix.T))
    others = values.size - prior.loadings.shape[1]
    return _with_components(prior, mean, factor, values[others:], vectors[:, others:], jnp.sum(values))


def _with_components(
    prior: SharedPrior, mean: Array, factor: Array, values: Array, vectors: Array, total: Array
) -> SharedPrior:
    """From leading eigenvalues, increasing, with their vectors, and the sum of all."""
    variance = (total - jnp.sum(values)) / (factor.shape[0] - values.size)
    loadings = factor @ (vectors * jnp.sqrt(jnp.maximum(values - variance, 0.0)))
    return SharedPrior(mean, loadings[:, ::-1], variance, prior.kernel)


def _leading(matvec: Callable[[Array], Array], white: Array, rank: int) -> tuple[Array, Array]:
    """The largest eigenvalues, increasing, and their vectors."""
    size = white.shape[0]
    start = jnp.asarray(np.random.default_rng(0).standard_normal(size), white.dtype)
    start = start + jnp.sqrt(jnp.asarray(size, white.dtype)) * jnp.sum(white, axis=1)
    basis, small = tridiagonalise(matvec, start, min(size, 4 * rank + 40))
    values, inner = jnp.linalg.eigh(small)
    chosen = values.size - rank
    return values[chosen:], basis.T @ inner[:, chosen:]


def _trace(prior: SharedPrior, white: Array, second: Array) -> Array:
    r"""The trace of :math:`\bar C` without it."""
    inner = prior.loadings.T @ second @ prior.loadings
    lost = jnp.sum(inner * (white.T @ white)) + 2.0 * prior.variance * jnp.trace(inner)
    lost += prior.variance**2 * jnp.sum(second * prior.kernel)
    return jnp.sum(white**2) + prior.variance * white.shape[0] - lost


@partial(jax.jit, static_argnames="old_mean")
def free_step(prior: SharedPrior, shift: Array, curvature: Array, *, old_mean: bool = False) -> SharedPrior:
    r"""The mean and the covariance without structure that maximise the expected log prior (Yu et al. 2009, corrected).

    :param SharedPrior prior: without loadings; its kernel is the covariance.
    :param Array shift: as for :func:`factor_step`.
    :param Array curvature: as for :func:`factor_step`.
    :param bool old_mean: as for :func:`factor_step`.
    :return: the next prior.
    """
    covariance = prior.covariance()
    second = curvature if old_mean else curvature + jnp.outer(shift, shift)
    found = covariance - covariance @ second @ covariance
    one = jnp.ones_like(prior.variance)
    return SharedPrior(prior.mean + covariance @ shift, prior.loadings, one, 0.5 * (found + found.T))


class UtilityMoments(NamedTuple):
    """Averages over users of the moments of their utilities under their posteriors."""

    mean: Array
    """Shape ``(items,)``."""
    second: Array
    """About zero, shape ``(items, items)``."""


@jax.jit
def moments_of_utilities(prior: SharedPrior, shift: Array, curvature: Array) -> UtilityMoments:
    """From the same statistics as :func:`factor_step`, which are to the prior of the inference: these are to none."""
    covariance = prior.covariance()
    mean = prior.mean + covariance @ shift
    cross = jnp.outer(prior.mean, mean)
    second = covariance - covariance @ curvature @ covariance + cross + cross.T - jnp.outer(prior.mean, prior.mean)
    return UtilityMoments(mean, 0.5 * (second + second.T))


@partial(jax.jit, static_argnames=("free", "learn_mean"))
def step_to_moments(prior: SharedPrior, moments: UtilityMoments, *, free: bool, learn_mean: bool = True) -> SharedPrior:
    """The prior that fits moments of utilities best: :func:`factor_step`, or :func:`free_step`, for these.

    :param SharedPrior prior: for its kernel and rank, and for its mean where that is not learned.
    :param bool free: whether the covariance has no structure.
    :param bool learn_mean: whether the mean is that of the utilities.

    Cost: the cube of the number of items.
    """
    mean = moments.mean if learn_mean else prior.mean
    cross = jnp.outer(mean, moments.mean)
    covariance = moments.second - cross - cross.T + jnp.outer(mean, mean)
    if free:
        return SharedPrior(mean, prior.loadings, jnp.ones_like(prior.variance), covariance)
    factor = cholesky(prior.kernel)
    half = solve_lower(factor, covariance)
    return _principal(prior, mean, factor, solve_lower(factor, half.T))


def aligned_loadings(loadings: Array, to: Array) -> Array:
    """The rotation of loadings that is nearest to others: they mean the same, and iterations can be compared."""
    left, _, right = jnp.linalg.svd(loadings.T @ to, full_matrices=False)
    return loadings @ (left @ right)


def prior_gradient(prior: SharedPrior, shift: Array, curvature: Array) -> tuple[Array, Array, Array]:
    """Gradient of the log evidence in mean, loadings and variance, from sums over users (not means).

    Exact where the evidence is stationary in the sites: not for Laplace's method, whose mode moves.
    """
    of_covariance = -0.5 * curvature
    return shift, 2.0 * of_covariance @ prior.loadings, jnp.sum(of_covariance * prior.kernel)


def parts_of_batches(
    batches: list[UserBatch], num_parts: int, num_items: int, rng: np.random.Generator
) -> Iterator[list[UserBatch]]:
    """Minibatches with equally many users of each batch, in a random order; their shapes are the same in each pass."""
    split = []
    for batch in batches:
        users = rng.permutation(np.flatnonzero(np.asarray(batch.users) >= 0))
        # who is left over goes to other minibatches than that of another batch
        shares = np.array_split(users, num_parts)
        split.append([shares[k] for k in rng.permutation(num_parts)])
    for part in range(num_parts):
        chosen = []
        for batch, shares in zip(batches, split, strict=True):
            length = max(map(len, shares))
            places = np.pad(shares[part], (0, length - len(shares[part])), constant_values=-1)
            if len(shares[part]):
                chosen.append(batch.take(places, num_items))
        yield chosen


def prior_after_pass(
    infer: Callable[[list[UserBatch], SharedPrior], Any],
    parts: Iterator[list[UserBatch]],
    prior: SharedPrior,
    averages: Averages | None,
    *,
    num_absent: float,
    free: bool,
    learn_mean: bool = True,
) -> tuple[SharedPrior, Averages | None, float]:
    """One M-step after each minibatch, to averages that move towards its moments by a decreasing fraction.

    :param infer: the E-step of some users under a prior.
    :param parts: the minibatches.
    :param averages: moments of utilities from the pass before.
    :param num_absent: users without pairs for each minibatch: they have the moments of the prior.
    :param bool free: whether the covariance has no structure.
    :param bool learn_mean: whether the mean of utilities is learned.
    :return: prior, averages, and the sum of the objectives, each under the prior of its turn.
    """
    total = 0.0
    for batches in parts:
        if not batches:
            continue
        expected = infer(batches, prior)
        if not np.isfinite(expected.objective):
            return prior, averages, np.nan
        weight = sum(int(np.sum(np.asarray(batch.users) >= 0)) for batch in batches) + num_absent
        new = moments_of_utilities(prior, expected.shift / weight, expected.curvature / weight)
        averages = Averages.after(averages, new, weight)
        prior = step_to_moments(prior, averages.values, free=free, learn_mean=learn_mean)
        total += expected.objective
    return prior, averages, total
