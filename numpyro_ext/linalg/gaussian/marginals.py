"""What conditioning returns about the predictors, whichever space it was done in."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

__all__ = ["Marginals", "cavity_ratio", "relative_change"]


class Marginals(NamedTuple):
    """Moments of the predictors ``h`` under a Gaussian with sites."""

    mean: Array
    """Posterior means, shape ``(num_rows,)``."""
    variance: Array
    """Posterior variances, shape ``(num_rows,)``."""
    cavity_ratio: Array
    """Variance over the variance without the row's own site, ``1 - site_precision * variance``, free of cancellation
    where the space allows; not positive where the posterior without that site is improper. Shape ``(num_rows,)``."""
    log_partition: Array
    """Log integral of the prior times all sites: scalar."""


def cavity_ratio(site_precision: Array, variance: Array) -> Array:
    """Variance over the variance without the row's own site, where that is a difference of nearly equal numbers.

    A leverage of one up to rounding counts as one: without its own site the row is not determined.
    """
    ratio = 1.0 - site_precision * variance
    return jnp.where(jnp.abs(ratio) < 64 * jnp.finfo(ratio.dtype).eps, 0.0, ratio)


class _Moments(Protocol):
    @property
    def mean(self) -> Array: ...

    @property
    def variance(self) -> Array: ...


def relative_change(new: _Moments, old: _Moments) -> Array:
    """How far predictors moved: means in standard deviations, then variances relative to themselves.

    :param new: moments after the move, anything with a ``mean`` and a ``variance`` of shape ``(num_rows,)``.
    :param old: moments before it.
    :return: signed changes, shape ``(2 num_rows,)``, zero for predictors without variance.
    """
    is_free = new.variance > 0
    variance = jnp.where(is_free, new.variance, 1.0)
    mean_change = jnp.where(is_free, (new.mean - old.mean) / jnp.sqrt(variance), 0.0)
    variance_change = jnp.where(is_free, (new.variance - old.variance) / variance, 0.0)
    return jnp.concatenate([mean_change, variance_change])
