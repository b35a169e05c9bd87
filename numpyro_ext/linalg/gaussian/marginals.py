"""Marginals of the predictors that conditioning returns, in whichever space it was done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from .design import Design


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


class GaussianSpace(ABC):
    """A Gaussian prior of unknowns seen through a design, in coordinates of its own, to be conditioned on sites.

    The shape of coordinates is that of each space; ``...`` are axes of several.
    """

    @abstractmethod
    def predictor(self, coordinates: Array) -> Array:
        """Predictors at coordinates, shape ``(num_rows,)``."""

    @abstractmethod
    def unknowns(self, coordinates: Array) -> Array:
        """Unknowns at coordinates, shape ``(..., num_columns)``."""

    @abstractmethod
    def inner(self, a: Array, b: Array) -> Array:
        """The prior's quadratic form between two coordinates; flat unknowns do not enter."""

    @abstractmethod
    def zeros(self) -> Array:
        """The coordinates of the prior mean."""

    @abstractmethod
    def condition(self, site_precision: Array, site_shift: Array) -> ConditionedGaussian:
        r"""Multiply the prior by sites :math:`\exp(-\tau_i h_i^2/2 + \nu_i h_i)`, one per row.

        :param jax.Array site_precision: :math:`\tau`, shape ``(num_rows,)``.
        :param jax.Array site_shift: :math:`\nu`, shape ``(num_rows,)``.
        :return: the posterior; nan where it is improper.
        """


class ConditionedGaussian(ABC):
    """The Gaussian of :meth:`GaussianSpace.condition`."""

    @abstractmethod
    def log_volume(self) -> Array:
        r""":math:`\frac12 \log|P| - \frac12 \log|H|`, the precisions before and after conditioning, where
        :math:`|P|` counts :math:`2 \pi` for a flat unknown: the log ratio of posterior to prior volume."""

    @abstractmethod
    def unknowns(self) -> Array:
        """Posterior mean of the unknowns, shape ``(num_columns,)``."""

    @abstractmethod
    def map_variance(self, design: Design) -> Array:
        """Posterior variance of ``J e`` for a design ``J``, shape ``(rows of J,)``."""

    @abstractmethod
    def map_covariance(self, design: Design) -> Array:
        """Posterior covariance of ``J e`` for a design ``J``, shape ``(rows of J, rows of J)``."""

    @abstractmethod
    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Exact draws of the unknowns, shape ``(num_samples, num_columns)``."""


class WhitenedPosterior(ConditionedGaussian):
    """A Gaussian that is conditioned in coordinates :math:`w` of the unknowns: what it has of its factorisation."""

    space: Any
    """The space that conditioned the prior."""
    site_precision: Array
    """Shape ``(num_rows,)``."""
    white_mean: Array
    """:math:`R^T E[w]` for the Cholesky factor :math:`R` of the precision of :math:`w`."""
    coordinates: Array
    """:math:`E[w]`."""

    @abstractmethod
    def row_variance(self) -> Array:
        """Variances of the predictors, shape ``(num_rows,)``."""

    def half_square_of_mean(self) -> Array:
        """Half the square of the mean by the precision of the posterior."""
        return 0.5 * jnp.sum(self.white_mean**2)

    @jax.jit  # traced once for all that condition
    def marginals(self) -> Marginals:
        """Moments of every predictor and the log partition function."""
        variance = self.row_variance()
        log_partition = self.half_square_of_mean() + self.log_volume()
        ratio = cavity_ratio(self.site_precision, variance)
        return Marginals(self.space.predictor(self.coordinates), variance, ratio, log_partition)

    def unknowns(self) -> Array:
        return self.space.unknowns(self.coordinates)


class NotSequential:
    """A space, or a posterior in it, that cannot update sites one by one."""

    def sequential_row(self, i: int | Array) -> Array:
        """Refused: updates by single rows need the dense covariance of all unknowns.

        :raises ValueError: always.
        """
        raise ValueError(
            "The sequential schedule has no banded form, and none for blocks that share a covariance or unknowns: ask "
            "for space='sparse' or space='coefficient'."
        )

    def sequential_moments(self) -> tuple[Array, Array]:
        """Refused like :meth:`sequential_row`.

        :raises ValueError: always.
        """
        return self.sequential_row(0), self.sequential_row(0)


class _Moments(Protocol):
    @property
    def mean(self) -> Array: ...

    @property
    def variance(self) -> Array: ...


def relative_change(new: _Moments, old: _Moments) -> Array:
    """Change of predictors: means in standard deviations, then variances relative to themselves.

    :param new: moments after the move, anything with a ``mean`` and a ``variance`` of shape ``(num_rows,)``.
    :param old: moments before it.
    :return: signed changes, shape ``(2 num_rows,)``, zero for predictors without variance.
    """
    is_free = new.variance > 0
    variance = jnp.where(is_free, new.variance, 1.0)
    mean_change = jnp.where(is_free, (new.mean - old.mean) / jnp.sqrt(variance), 0.0)
    variance_change = jnp.where(is_free, (new.variance - old.variance) / variance, 0.0)
    return jnp.concatenate([mean_change, variance_change])
