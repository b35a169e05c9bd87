"""Common unknowns of a bilinear posterior, in predictions and as marginals."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....linalg.cholesky import cholesky
from ....structure.bilinear.form import Bilinear, GaussianSide
from ..algorithms.cells import Block, Side
from ..algorithms.incidence import SideBlock


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
        return jnp.diagonal(self.covariance)

    def get_covariance(self) -> Array:
        """Covariance between all unknowns."""
        return self.covariance

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Draws, shape ``(num_samples, n)``."""
        white = jax.random.normal(rng_key, (num_samples, self.mean.size), self.mean.dtype)
        return self.mean + white @ cholesky(self.covariance).T


def append_common(vectors: SideBlock, common: Block | None) -> SideBlock:
    """Vectors of a side with the common unknowns behind them.

    Each vector then has a copy of its own. All cells of a vector see the same one, so that what is asked of single
    cells, or of the cells of single vectors, is the same.

    :param Block vectors: posterior of the side, whose vectors are independent.
    :param Block common: of the common unknowns; ``None`` where there are none.
    """
    if common is None:
        return vectors
    assert isinstance(vectors, Block) and common.covariance is not None
    num, size = vectors.mean.shape
    more = common.mean.shape[1]
    mean = jnp.concatenate([vectors.mean, jnp.broadcast_to(common.mean, (num, more))], axis=1)
    if vectors.is_diagonal and more == 1:
        return Block(mean, jnp.pad(vectors.variance, [(0, 0), (0, 1)]).at[:, size].set(common.covariance[0, 0, 0]))
    whole = jnp.pad(vectors.matrices, [(0, 0), (0, more), (0, more)])
    return Block(mean, whole.at[:, size:, size:].set(common.covariance[0]))


def absorb_common(form: Bilinear, side: Side = "rows") -> Bilinear:
    """The form with the common unknowns as further components of a side, as :func:`append_common` has them.

    :param Bilinear form: the model.
    :param str side: ``"rows"`` or ``"columns"``.
    """
    if form.common is None:
        return form
    is_rows = side == "rows"
    own: GaussianSide = getattr(form, side)
    prior, coefficients = form.common.prior, form.common.coefficients
    num, size = own.mean.shape
    more = prior.mean.shape[1]
    precision = jnp.pad(own.matrices, [(0, 0), (0, more), (0, more)]).at[:, size:, size:].set(prior.precision[0])
    mean = jnp.concatenate([own.mean, jnp.broadcast_to(prior.mean, (num, more))], axis=1)
    linear = form.row_linear if is_rows else form.column_linear
    linear = linear if linear.shape[-1] else jnp.zeros((1, size), mean.dtype)
    linear = jnp.concatenate([jnp.broadcast_to(linear, (form.num_cells, size)), coefficients], axis=1)
    whole = GaussianSide(mean, precision, own.weight)
    coupling = form.coupling
    if not form.is_paired:
        coupling = jnp.pad(coupling, [(0, 0), (0, more), (0, 0)] if is_rows else [(0, 0), (0, 0), (0, more)])
    form = form._replace(coupling=coupling, common=None)
    if is_rows:
        return form._replace(rows=whole, row_linear=linear)
    return form._replace(columns=whole, column_linear=linear)
