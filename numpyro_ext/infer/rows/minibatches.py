"""Variational EM for rows in minibatches: averaged statistics in place of sums over all rows."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from ..front.running.averages import Averages
from ..front.running.progress import progress_bar
from .expectation import expectation_step, initial_posteriors
from .maximisation import (
    ColumnStatistics,
    Parameter,
    column_statistics,
    newton_moves,
    residual_sums,
    with_loading_prior,
    with_moved_columns,
    with_noise,
)
from .posteriors import LatentGaussianRows


class _Statistics(NamedTuple):
    """Statistics per unit of weight."""

    mean: Array
    second: Array
    """Second moment of the latent variables, shape ``(L, L)``."""
    columns: list[ColumnStatistics]
    """Right-hand side of the least-squares problem, in place of the gradient: it does not depend on the loadings of
    now, if the precisions do not."""
    noise: list[tuple[Array, Array]]


def fit_in_batches(
    rows: LatentGaussianRows,
    *,
    rng_key: Array,
    learn: tuple[Parameter, ...],
    num_passes: int,
    batch_size: int,
    num_expectation_steps: int,
    loading_scale: float | None,
    show_progress: bool,
) -> LatentGaussianRows:
    """The rows with parameters after some passes over the data in a new random order each.

    For every batch the Gaussians of its rows are fitted from scratch, averages of their statistics are moved towards
    those of the batch by a decreasing fraction, and the parameters are those that the averages ask for.

    Cost of a pass: that of an E-step on all rows; memory beyond the data that of a batch.

    :param LatentGaussianRows rows: data and the parameters to start from.
    :param Array rng_key: random key for the orders.
    :param tuple learn: parameters to learn.
    :param int num_passes: passes over the data.
    :param int batch_size: rows of a batch; those left over at the end of a pass wait for another.
    :param int num_expectation_steps: steps for the Gaussians of a batch.
    :param float loading_scale: prior standard deviation of the loadings, or ``None``.
    :param bool show_progress: whether to show a bar.
    """
    num_batches = rows.num_rows // batch_size
    total = jnp.sum(rows.weights)
    averages: Averages | None = None
    with progress_bar(num_passes * num_batches, "variational_em", enabled=show_progress) as bar:
        for key in random.split(rng_key, num_passes):
            order = np.asarray(random.permutation(key, rows.num_rows))[: num_batches * batch_size]
            for chosen in order.reshape(num_batches, batch_size):
                found = _statistics(rows.take(jnp.asarray(chosen)), num_expectation_steps)
                averages = Averages.after(averages, *found)
                rows = _maximise(rows, averages.values, total, learn, loading_scale)
                bar.update()
    return rows


@partial(jax.jit, static_argnames="num_steps")
def _statistics(batch: LatentGaussianRows, num_steps: int) -> tuple[_Statistics, Array]:
    """Statistics of a batch, and its weight."""
    posteriors = expectation_step(batch, initial_posteriors(batch), num_steps=num_steps)
    weight = jnp.sum(batch.weights)
    share = batch.weights / weight
    second = jnp.tensordot(share, posteriors.covariance, axes=1)
    second = second + (share[:, None] * posteriors.mean).T @ posteriors.mean
    columns = []
    for part, family in zip(column_statistics(batch, posteriors), batch.families(), strict=True):
        now = jnp.concatenate([family.loadings, family.intercept[..., None]], axis=-1)
        wanted = part.gradient + jnp.einsum("ckjlm,cjm->ckl", part.gram, now)
        columns.append(ColumnStatistics(part.gram / weight, wanted / weight, part.value / weight))
    noise = jax.tree.map(lambda x: x / weight, residual_sums(batch, posteriors))
    return _Statistics(share @ posteriors.mean, second, columns, noise), weight


@partial(jax.jit, static_argnames=("learn", "loading_scale"))
def _maximise(
    rows: LatentGaussianRows,
    averages: _Statistics,
    total: Array,
    learn: tuple[Parameter, ...],
    loading_scale: float | None,
) -> LatentGaussianRows:
    mean, covariance, potentials = rows.mean, rows.covariance, rows.potentials
    if "mean" in learn:
        mean = averages.mean
    if "covariance" in learn:
        cross = jnp.outer(mean, averages.mean)
        covariance = averages.second - cross - cross.T + jnp.outer(mean, mean)
        covariance = 0.5 * (covariance + covariance.T)
    if "noise" in learn:
        potentials = tuple(map(with_noise, potentials, averages.noise))
    if "loadings" in learn or "intercept" in learn:
        problems = []
        for part, family in zip(averages.columns, rows.families(), strict=True):
            now = jnp.concatenate([family.loadings, family.intercept[..., None]], axis=-1)
            gradient = part.gradient - jnp.einsum("ckjlm,cjm->ckl", part.gram, now)
            problem = ColumnStatistics(part.gram, gradient, part.value)
            problems.append(with_loading_prior(problem, family, loading_scale, 1.0 / total))
        rows = with_moved_columns(rows, newton_moves(problems, learn))
    return rows._replace(mean=mean, covariance=covariance, potentials=potentials)
