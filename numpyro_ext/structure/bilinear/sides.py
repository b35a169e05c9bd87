"""The prior of the vectors of a side, put together from those of its sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...linalg.cholesky import cholesky, cholesky_inverse
from ...linalg.gaussian.prior import DiagonalPrior, PrecisionPrior
from .form import CoupledSide, GaussianSide
from .vectors.incidence import Roots
from .vectors.lookups import Combinations


def gaussian_side(mean: Array, elements: np.ndarray, priors: Sequence[tuple[int, Any]]) -> GaussianSide:
    """The prior of the vectors of one side.

    :param mean: prior means, shape ``(num, size)``.
    :param elements: which unknowns make which vector, of the same shape.
    :param priors: for each site of the side the first of its unknowns, and its prior.
    :return: with a diagonal precision if all sites have one.
    """
    is_diagonal = all(isinstance(prior, DiagonalPrior) for _, prior in priors)
    precision = jnp.zeros(elements.shape if is_diagonal else (*elements.shape, elements.shape[1]), mean.dtype)
    for start, prior in priors:
        local = elements - start
        local = np.where((local >= 0) & (local < prior.size), local, -1)
        found = _diagonal_precision(prior, local) if is_diagonal else _dense_precision(prior, local)
        precision += found.astype(mean.dtype)
    return GaussianSide(mean, precision)


def coupled_side(
    mean: Array, elements: np.ndarray, priors: Mapping[str, tuple[int, Any]], roots: Roots, seen: Combinations
) -> CoupledSide:
    """The prior of a side whose vectors depend on each other.

    :param mean: prior means, shape ``(num, size)``.
    :param elements: which unknowns make which vector, of the same shape.
    :param priors: for each site of the side the first of its unknowns, and its prior.
    :param roots: which covariances there are.
    :param seen: which combinations of vectors cells see.
    """
    precision = jnp.zeros(elements.shape, mean.dtype)
    for start, prior in priors.values():
        if isinstance(prior, DiagonalPrior):
            local = elements - start
            precision += _diagonal_precision(prior, np.where((local >= 0) & (local < prior.size), local, -1))
    scale = jnp.where(precision > 0.0, 1.0 / jnp.sqrt(jnp.where(precision > 0.0, precision, 1.0)), 1.0)

    def root(source: tuple[str, int] | None) -> Array:
        if source is None:
            return jnp.eye(len(elements), dtype=mean.dtype)
        prior = priors[source[0]][1]
        block: Array = prior.precision if isinstance(prior, PrecisionPrior) else prior.covariance
        block = block[source[1]].astype(mean.dtype)
        return cholesky(cholesky_inverse(cholesky(block)) if isinstance(prior, PrecisionPrior) else block)

    return CoupledSide(
        mean,
        scale,
        jnp.stack([root(source) for source in roots.sources]),
        jnp.asarray(roots.group),
        jnp.asarray(seen.places),
        jnp.asarray(seen.weight, mean.dtype),
    )


def _diagonal_precision(prior: DiagonalPrior, local: np.ndarray) -> Array:
    """Precisions of these elements of the site, zero for others (-1)."""
    return jnp.where(local >= 0, 1.0 / prior.variance[np.maximum(local, 0)], 0.0)


def _dense_precision(prior: Any, local: np.ndarray) -> Array:
    """Precision matrices of the vectors with these elements of the site, zero in rows and columns of others (-1)."""
    if isinstance(prior, DiagonalPrior):
        values = _diagonal_precision(prior, local)
        return values[:, :, None] * jnp.eye(local.shape[1], dtype=values.dtype)
    if isinstance(prior, PrecisionPrior):
        blocks = prior.precision
    else:
        blocks = cholesky_inverse(cholesky(prior.covariance))
    batch, place = np.divmod(np.maximum(local, 0), blocks.shape[-1])
    same = (batch[:, :, None] == batch[:, None, :]) & (local >= 0)[:, :, None] & (local >= 0)[:, None, :]
    batch = batch % len(blocks)
    return jnp.where(same, blocks[batch[:, :, None], place[:, :, None], place[:, None, :]], 0.0)
