"""What conditioning returns about the predictors, whichever space it was done in."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

__all__ = ["Marginals"]


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

    def change_from(self, old: Marginals) -> Array:
        """How far the predictors moved: means in standard deviations, then variances relative to themselves.

        :param Marginals old: moments before the move.
        :return: signed changes, shape ``(2 num_rows,)``, zero for predictors without variance.
        """
        is_free = self.variance > 0
        variance = jnp.where(is_free, self.variance, 1.0)
        mean_change = jnp.where(is_free, (self.mean - old.mean) / jnp.sqrt(variance), 0.0)
        variance_change = jnp.where(is_free, (self.variance - old.variance) / variance, 0.0)
        return jnp.concatenate([mean_change, variance_change])
