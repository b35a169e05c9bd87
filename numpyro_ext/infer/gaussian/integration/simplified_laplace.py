r"""Marginals of a latent Gaussian form corrected for skewness: the simplified Laplace approximation.

The Laplace approximation of the marginal of a quantity ``q`` compares the joint density at the conditional mean of the
unknowns given ``q`` with the Gaussian there. With :math:`x = (q - m_q) / s_q`, :math:`\eta_j` moves along that path by
:math:`\sigma_j a_j x`, where :math:`a_j` is the correlation of the two, and to third order (after Rue, Martino and
Chopin 2009, §3.2.3, for any ``q`` affine in the unknowns)

.. math:: \log p(x) = -\tfrac12 x^2 + \gamma_1 x + \tfrac16 \gamma_3 x^3, \quad
    \gamma_1 = \tfrac12 \sum_j d_j \sigma_j^3 a_j (1 - a_j^2), \quad \gamma_3 = \sum_j d_j \sigma_j^3 a_j^3,

with :math:`d_j` the third derivative of the log factor at the mode. To first order in :math:`d` this density has mean
:math:`\gamma_1 + \gamma_3 / 2`, variance one and skewness :math:`\gamma_3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....linalg.gaussian.design import AnyDesign, DenseDesign, Design, SparseRows
from ....linalg.gaussian.spaces.sparse_space import SparsePosterior
from ....structure.latent_gaussian.form import AffineMap, LatentGaussian
from ..algorithms.posterior import GaussianPosterior

LARGEST_CORRECTED_FIELD = 2_500
"""Unknowns of a sparse field up to which marginals are corrected, at the cost of a solve for each quantity."""


class MarginalMoments(NamedTuple):
    """Moments of ``R`` quantities, shapes ``(R,)``."""

    mean: Array
    variance: Array
    skewness: Array


def gaussian_marginals(posterior: GaussianPosterior, maps: Mapping[str, AffineMap]) -> dict[str, MarginalMoments]:
    """The marginals of the Gaussian itself.

    :param GaussianPosterior posterior: at its mode.
    :param maps: the quantities, by name.
    """
    moments = posterior.moments(maps)
    return {name: MarginalMoments(*pair, jnp.zeros_like(pair[1])) for name, pair in moments.items()}


def simplified_laplace_marginals(
    posterior: GaussianPosterior, maps: Mapping[str, AffineMap]
) -> dict[str, MarginalMoments]:
    """Marginals with mean and skewness correct to first order, by the covariance of each quantity with each predictor:
    memory for ``num_rows`` numbers per quantity, and time for ``num_columns`` times as many operations; with a sparse
    precision memory for those of 64 quantities at a time, and one solve for each.

    :param GaussianPosterior posterior: at its mode, where the third derivatives are taken; factors are elementwise.
    :param maps: the quantities, by name.
    """
    form, sparse = posterior.form, posterior.condition()
    predictor, predictor_variance = posterior.predictor_moments()
    third = _third_derivatives(form, predictor)

    def corrected(covariance: Array, mean: Array, variance: Array) -> MarginalMoments:
        is_free = variance > 0.0
        deviation = jnp.sqrt(jnp.where(is_free, variance, 1.0))
        slope = jnp.where(is_free[:, None], covariance / deviation[:, None], 0.0)
        # In the notation above: slope is sigma a, and the remainder sigma^2 (1 - a^2).
        remainder = jnp.maximum(predictor_variance - slope**2, 0.0)
        linear = 0.5 * (slope * remainder) @ third
        cubic = slope**3 @ third
        return MarginalMoments(mean + deviation * (linear + 0.5 * cubic), variance, cubic)

    moments = posterior.moments(maps)
    if isinstance(sparse, SparsePosterior):
        return {n: sparse.over_rows(_written_out(maps[n].design), corrected, *pair) for n, pair in moments.items()}
    root = posterior.scale_tril().T
    predictor_root = form.design.matvec(root)
    return {n: corrected(maps[n].design.matvec(root).T @ predictor_root, *pair) for n, pair in moments.items()}


def _written_out(design: AnyDesign) -> Design:
    return design if isinstance(design, DenseDesign | SparseRows) else DenseDesign(design.to_dense())


def _third_derivatives(form: LatentGaussian, predictor: Array) -> Array:
    observed = jnp.concatenate(form.observed)
    eta = jnp.where(observed, predictor, 0.0)
    parts = []
    for potential, part in zip(form.potentials, form.split_rows(eta), strict=True):
        _, third = jax.jvp(lambda x, potential=potential: potential.derivatives(x)[2], (part,), (jnp.ones_like(part),))
        parts.append(third)
    return jnp.where(observed, jnp.concatenate(parts), 0.0)
