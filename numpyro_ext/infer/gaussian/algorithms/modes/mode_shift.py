r"""Distance of the mean of a posterior from its mode, by third derivatives there.

To first order in the third derivatives of the log factors :math:`\log t(\eta)`, with :math:`\Sigma` the covariance at
the mode and :math:`V` that of the predictors of a factor, the mean of the unknowns is away from the mode by

.. math:: \tfrac12 \Sigma A^T \nabla_\eta \operatorname{tr}\big(V \nabla^2 \log t(\eta)\big),

of factors of one predictor :math:`\tfrac12 \Sigma A^T (v \odot (\log t)''')` (Tierney and Kadane 1986; Rue, Martino and
Chopin 2009, section 3.2.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from .....structure.latent_gaussian.form import AffineMap, LatentGaussian
from ..posterior import GaussianPosterior


def mode_shifts(posterior: GaussianPosterior, maps: Mapping[str, AffineMap]) -> dict[str, Array]:
    """Means less modes of quantities affine in the unknowns, in their posterior standard deviations.

    Cost: one evaluation of third derivatives for each row, and one more solve than the moments take.

    :param GaussianPosterior posterior: at its mode, with the curvature there.
    :param maps: the quantities, by name.
    :return: of shape ``(R,)`` by name; zero for quantities without variance.
    """
    moved, out = shifted(posterior).mean, {}
    for name, (mode, square) in posterior.moments(maps).items():
        mean = maps[name].design.matvec(moved) + maps[name].offset
        is_free = square > 0.0
        out[name] = jnp.where(is_free, (mean - mode) / jnp.sqrt(jnp.where(is_free, square, 1.0)), 0.0)
    return out


def shifted(posterior: GaussianPosterior) -> GaussianPosterior:
    """The Gaussian with its mean where third derivatives say that it is, instead of at the mode.

    :param GaussianPosterior posterior: at its mode, with the curvature there.
    """
    predictor, variance = posterior.predictor_moments()
    pull = jax.grad(lambda eta: 0.5 * jnp.sum(_curvature(posterior.form, eta) * variance))(predictor)
    return dataclasses.replace(posterior, site_shift=posterior.site_shift + pull, held=None)


def _curvature(form: LatentGaussian, predictor: Array) -> Array:
    """Second derivatives of the log factors along their rows. Of factors of several predictors these are the weights of
    the rows, whose sum over variances is the trace that is asked for."""
    observed = jnp.concatenate(form.observed)
    eta = jnp.where(observed, predictor, 0.0)
    parts = [p.derivatives(part)[2] for p, part in zip(form.potentials, form.split_rows(eta), strict=True)]
    return jnp.where(observed, jnp.concatenate(parts), 0.0)
