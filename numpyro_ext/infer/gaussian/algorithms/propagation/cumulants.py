r"""Corrections of EP's log evidence and means, to second order (Opper, Paquet and Winther 2013).

At a fixed point, the exact integral over that of EP is :math:`R = E_q \prod_i q_i(\eta_i) / q(\eta_i)`, with the
Gaussian ``q`` and the tilted densities :math:`q_i`, whose first two moments are those of ``q``. In Hermite polynomials
of the standardised predictors a ratio of densities is one plus the sum over :math:`l \ge 3` of :math:`c_{il}
H_l(z_i) / l!`, where :math:`c_{il}` are the standardised cumulants of :math:`q_i` up to :math:`l = 5`. As
:math:`E\, H_l(z_i) H_k(z_j) = \delta_{lk}\, l!\, \rho_{ij}^l` for the correlations of ``q``, single factors contribute
nothing and pairs

.. math:: \log R \approx \sum_{i<j} \sum_{l \ge 3} \frac{c_{il} c_{jl}}{l!} \rho_{ij}^l .

By partial integration the mean of any unknown moves as if the shift of each site were larger by the mean slope of its
ratio of densities among the others. Of the third order in the skewness (:math:`c_l` is of order :math:`l - 2`) that is

.. math:: \frac{1}{\sigma_i} \Bigl( \frac{c_{i4}}{3!} \sum_{j \ne i} c_{j3} \rho_{ij}^3
    + \frac{c_{i3}}{4} \sum_{j \ne k} c_{j3} c_{k3} \rho_{ij} \rho_{ik} \rho_{jk}^2 \Bigr) .

The variance of an unknown, over that of ``q``, grows of second order by the pairs that it joins,

.. math:: \tfrac12 \sum_{i \ne j} c_{i3} c_{j3} \rho_{xi} \rho_{xj} \rho_{ij}^2 ,

with its correlations :math:`\rho_{xi}` with the predictors, as :math:`E\, H_2(x) H_3(z_i) H_3(z_j)` is
:math:`36 \rho_{xi} \rho_{xj} \rho_{ij}^2`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from math import factorial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .....linalg.gaussian.marginals import Marginals
from .....potentials.base import Potential
from .....structure.latent_gaussian.form import AffineMap
from ..posterior import GaussianPosterior
from .tilting import cavities, with_broad_cavities

LARGEST_ROWS = 5000
"""Predictors whose correlations are held at once: 200 MB in double precision."""


class Correction(NamedTuple):
    """Terms to be added."""

    log_evidence: Array
    """A scalar."""
    mean: dict[str, Array]
    """By site that is affine in the unknowns: its corrected means."""


def tilted_cumulants(potential: Potential, mean: Array, variance: Array) -> tuple[Array, Array]:
    r"""Third and fourth cumulants of :math:`t(\eta) N(\eta \mid \mu, v)`, elementwise.

    They are :math:`v` and :math:`v^2` times the first and second derivative of the tilted variance in the cavity's
    mean, which are exact where the moments are (rectified-linear counts) and those of the quadrature elsewhere.
    """

    third, slope = jax.jvp(lambda mean: _third_cumulant(potential, mean, variance), (mean,), (jnp.ones_like(mean),))
    return third, variance * slope


def _third_cumulant(potential: Potential, mean: Array, variance: Array) -> Array:
    def tilted_variance(mean: Array) -> Array:
        return potential.tilted_moments(mean, variance).variance

    return variance * jax.jvp(tilted_variance, (mean,), (jnp.ones_like(mean),))[1]


def correction(posterior: GaussianPosterior, maps: Mapping[str, AffineMap]) -> Correction:
    """The correction at a fixed point of EP, of factors of one predictor each.

    Cost: the correlations of all pairs of ``M`` predictors, ``M^3`` of algebra, two derivatives of tilted moments.

    :param GaussianPosterior posterior: prior and sites.
    :param maps: of the sites whose means are asked for.
    """
    form = posterior.form
    scale, (third, fourth) = _standardised(posterior, tilted_cumulants, (3, 4))
    covariance = posterior.covariance(AffineMap(form.design, form.offset))
    correlation = jnp.clip(covariance / (scale[:, None] * scale), -1.0, 1.0)
    correlation = jnp.where(jnp.eye(len(scale), dtype=bool), 0.0, correlation)
    cubes = correlation**3 @ third / factorial(3)
    log_ratio = 0.5 * (third @ cubes + fourth @ (correlation**4 @ fourth) / factorial(4))
    triples = jnp.sum((correlation @ (correlation**2 * third[:, None] * third)) * correlation, axis=1)
    shift = posterior.site_shift + (fourth * cubes + 0.25 * third * triples) / scale
    moved = dataclasses.replace(posterior, site_shift=shift, held=None).mean
    return Correction(log_ratio, {name: map_.design.matvec(moved) + map_.offset for name, map_ in maps.items()})


def skewness_of_variances(posterior: GaussianPosterior, maps: Mapping[str, AffineMap]) -> dict[str, Array]:
    """Growth of the variances by the skewness of the factors, over those of the Gaussian.

    Cost: as of :func:`correction`, with one derivative of tilted moments, and a root of the covariance of the unknowns.

    :param GaussianPosterior posterior: at a fixed point, or at the optimum of a lower bound.
    :param maps: the quantities, by name.
    :return: of shape ``(R,)`` by name; zero for quantities without variance.
    """
    scale, (third,) = _standardised(posterior, lambda *part: (_third_cumulant(*part),), (3,))
    root = posterior.scale_tril().T
    rows = posterior.form.design.matvec(root).T / scale[:, None]
    correlation = jnp.where(jnp.eye(len(scale), dtype=bool), 0.0, jnp.clip(rows @ rows.T, -1.0, 1.0))
    pairs = correlation**2 * third[:, None] * third
    out = {}
    for name, map_ in maps.items():
        quantities = map_.design.matvec(root).T
        deviation = jnp.linalg.norm(quantities, axis=1)
        joint = quantities @ rows.T / jnp.where(deviation > 0.0, deviation, 1.0)[:, None]
        out[name] = 0.5 * jnp.sum((joint @ pairs) * joint, axis=1)
    return out


def _standardised(
    posterior: GaussianPosterior, cumulants: Callable[..., tuple[Array, ...]], orders: tuple[int, ...]
) -> tuple[Array, list[Array]]:
    """Standard deviations of the predictors, and cumulants of the tilted densities over powers of these; zero for rows
    without a factor or a cavity."""
    form = posterior.form
    conditioned = posterior.condition().marginals()
    assert isinstance(conditioned, Marginals)  # of a joint Gaussian
    marginals = with_broad_cavities(form, conditioned)
    means, variances = cavities(form, marginals, posterior.site_precision, posterior.site_shift, 1.0)
    has_part = jnp.concatenate(form.observed) & (marginals.variance > 0.0) & (marginals.cavity_ratio > 0.0)
    parts = zip(form.potentials, form.split_rows(means), form.split_rows(variances), strict=True)
    found = zip(*(cumulants(*part) for part in parts), strict=True)
    scale = jnp.sqrt(jnp.where(has_part, marginals.variance, 1.0))
    return scale, [
        jnp.where(has_part, jnp.concatenate(own) / scale**order, 0.0) for order, own in zip(orders, found, strict=True)
    ]
