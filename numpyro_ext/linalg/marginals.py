"""What conditioning returns about the predictors, whichever space it was done in."""

from __future__ import annotations

from typing import NamedTuple

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
