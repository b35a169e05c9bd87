"""Common unknowns of a bilinear posterior, in predictions and as marginals."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...linalg.cholesky import cholesky
from ...structure.bilinear.form import Bilinear, GaussianSide
from .algorithms.cells import Block
from .algorithms.incidence import SideBlock

__all__ = ["GaussianMarginal", "absorb_common", "append_common"]


class GaussianMarginal(NamedTuple):
    """A Gaussian of several unknowns."""

    mean: Array
    """Shape ``(n,)``."""
    covariance: Array

    def get_mean(self) -> Array:
        """Mean of each unknown."""
        return self.mean

    def variance(self) -> Array:
        """Variance of each unknown."""
        variance: Array = jnp.diagonal(self.covariance)
        return variance

    def get_covariance(self) -> Array:
        """Covariance between all unknowns."""
        return self.covariance

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Draws, shape ``(num_samples, n)``."""
        white = jax.random.normal(rng_key, (num_samples, self.mean.size), self.mean.dtype)
        return self.mean + white @ cholesky(self.covariance).T


def append_common(rows: SideBlock, common: Block) -> Block:
    """Vectors of the rows with the common unknowns behind them.

    Each row then has a copy of its own. Cells of one row see one of them, so that all that is asked of single cells, or
    of the cells of single rows, is the same.

    :param Block rows: posterior of the rows, which are independent.
    :param Block common: of the common unknowns.
    """
    assert isinstance(rows, Block) and common.covariance is not None
    num, size = rows.mean.shape
    more = common.mean.shape[1]
    mean = jnp.concatenate([rows.mean, jnp.broadcast_to(common.mean, (num, more))], axis=1)
    covariance = jnp.zeros_like(rows.mean) if rows.covariance is None else rows.covariance
    if covariance.ndim == 2 and more == 1:
        return Block(mean, jnp.pad(covariance, [(0, 0), (0, 1)]).at[:, size].set(common.covariance[0, 0, 0]))
    if covariance.ndim == 2:
        covariance = covariance[:, :, None] * jnp.eye(size, dtype=mean.dtype)
    whole = jnp.pad(covariance, [(0, 0), (0, more), (0, more)])
    return Block(mean, whole.at[:, size:, size:].set(common.covariance[0]))


def absorb_common(form: Bilinear) -> Bilinear:
    """The form with the common unknowns as further components of the rows, as :func:`append_common` has them."""
    if form.common is None:
        return form
    assert isinstance(form.rows, GaussianSide)
    prior, coefficients = form.common.prior, form.common.coefficients
    num, size = form.rows.mean.shape
    more = prior.mean.shape[1]
    precision = form.rows.precision
    if precision.ndim == 2:
        precision = precision[:, :, None] * jnp.eye(size, dtype=precision.dtype)
    precision = jnp.pad(precision, [(0, 0), (0, more), (0, more)]).at[:, size:, size:].set(prior.precision[0])
    mean = jnp.concatenate([form.rows.mean, jnp.broadcast_to(prior.mean, (num, more))], axis=1)
    linear = form.row_linear if form.row_linear.shape[-1] else jnp.zeros((1, size), mean.dtype)
    linear = jnp.concatenate([jnp.broadcast_to(linear, (form.num_cells, size)), coefficients], axis=1)
    coupling = form.coupling if form.is_paired else jnp.pad(form.coupling, [(0, 0), (0, more), (0, 0)])
    rows = GaussianSide(mean, precision, form.rows.weight)
    return form._replace(rows=rows, row_linear=linear, coupling=coupling, common=None)
