r"""The lower bound on the log evidence that a Gaussian gives on a latent-Gaussian form, and its slopes.

For :math:`q(e) = N(m, V)` the bound is :math:`\sum_i f_i - KL(q \| p)`, where :math:`f_i` is the expectation of the
log factor under the marginal of its predictor, or something smaller with a closed form (Opper and Archambeau 2009;
Khan 2012, §3.1).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ....linalg.gaussian.conditioning import LinearGaussian, kl_divergence
from ....linalg.gaussian.mean_field_space import MeanFieldSpace
from ....potentials.moments import ExpectedLogDensity
from ....structure.latent_gaussian.form import LatentGaussian


class Point(NamedTuple):
    """A Gaussian as the factors see it; arrays of shape ``(num_rows,)`` but for the bound."""

    bound: Array
    """nan or infinite where the Gaussian is improper or an expectation does not exist."""
    mean: Array
    """Means of the predictors, offset included."""
    variance: Array
    mean_slope: Array
    """Derivative of the expected log factor in the mean; zero without factor."""
    variance_slope: Array


def unknown_point(form: LatentGaussian) -> Point:
    """Stands for a Gaussian that has not been evaluated: its bound is minus infinity."""
    zero = jnp.zeros_like(form.offset)
    return Point(jnp.full((), -jnp.inf, zero.dtype), zero, zero, zero, zero)


def is_finite(point: Point) -> Array:
    """True if the bound and all slopes are numbers, as a scalar boolean."""
    # What is not finite makes the sum so too, and one test covers all rows.
    return jnp.isfinite(sum(jnp.sum(part) for part in point))


def expected_log_factors(form: LatentGaussian, mean: Array, variance: Array) -> ExpectedLogDensity:
    """Expectations of all log factors and their slopes, zero where masked; shape ``(num_rows,)`` each.

    :param LatentGaussian form: the model.
    :param Array mean: means of the predictors, shape ``(num_rows,)``.
    :param Array variance: variances of the predictors, shape ``(num_rows,)``; zero pins a predictor.
    """
    observed = jnp.concatenate(form.observed) if form.observed else jnp.zeros(mean.shape, bool)
    mean = jnp.where(observed, mean, 0.0)
    variance = jnp.where(observed, variance, 1.0)
    smallest = jnp.finfo(variance.dtype).tiny
    # A pinned predictor has the log factor itself as expectation, which a tiny variance gives to rounding.
    variance = jnp.where(variance <= 0.0, smallest, variance)
    parts = [
        potential.expected_log_density(m, v)
        for potential, m, v in zip(form.potentials, form.split_rows(mean), form.split_rows(variance), strict=True)
    ]
    if not parts:
        return ExpectedLogDensity(*[jnp.zeros_like(mean)] * 3)
    shapes = [mask.shape for mask in form.observed]

    def join(terms: tuple[Array, ...]) -> Array:
        whole = [jnp.broadcast_to(term, shape) for term, shape in zip(terms, shapes, strict=True)]
        return jnp.where(observed, jnp.concatenate(whole), 0.0)

    return ExpectedLogDensity(*map(join, zip(*parts, strict=True)))


def evaluate(form: LatentGaussian, prior: LinearGaussian | MeanFieldSpace, precision: Array, shift: Array) -> Point:
    r"""The bound and its slopes at the Gaussian that is the prior times sites.

    The sites are :math:`\exp(-\lambda_i \eta_i^2/2 + \nu_i \eta_i)`. Costs one factorisation, one triangular solve, and
    one expectation of every factor.

    :param LatentGaussian form: the model.
    :param prior: its prior, prepared for conditioning; a
        :class:`~numpyro_ext.linalg.gaussian.mean_field_space.MeanFieldSpace` for the Gaussian with these means
        and independent unknowns.
    :param Array precision: site precisions :math:`\lambda`, shape ``(num_rows,)``.
    :param Array shift: site shifts :math:`\nu`, shape ``(num_rows,)``.
    """
    centered = shift - precision * form.offset
    mean, variance, divergence = _moments_and_divergence(prior, precision, centered)
    mean = mean + form.offset
    expected = expected_log_factors(form, mean, variance)
    bound = form.log_constant + jnp.sum(expected.value) - divergence
    return Point(bound, mean, variance, expected.mean_slope, expected.variance_slope)


def _moments_and_divergence(
    prior: LinearGaussian | MeanFieldSpace, precision: Array, shift: Array
) -> tuple[Array, Array, Array]:
    if isinstance(prior, MeanFieldSpace):
        independent = prior.condition(precision, shift)
        return *independent.marginals(), independent.divergence()
    posterior = prior.condition(precision, shift)
    marginals = posterior.marginals()
    return marginals.mean, marginals.variance, kl_divergence(prior, posterior, marginals.variance)


def optimal_sites(form: LatentGaussian, point: Point) -> tuple[Array, Array]:
    r"""Sites at which the bound would be stationary if its slopes stayed.

    They are :math:`\lambda = -2 f_v,\; \nu = f_m + \lambda m`. At the optimum they are the sites of the Gaussian
    itself (Opper and Archambeau 2009).

    :return: precisions and shifts, shape ``(num_rows,)``.
    """
    precision = jnp.maximum(-2.0 * point.variance_slope, site_floor(form, point.mean.dtype))
    return precision, point.mean_slope + precision * point.mean


def site_floor(form: LatentGaussian, dtype: jnp.dtype) -> Array:
    """The smallest precision that a site may have: zero, up to rounding, where the factor is log-concave."""
    parts = [
        jnp.full(mask.shape, 0.0 if potential.is_log_concave else -jnp.inf, dtype)
        for potential, mask in zip(form.potentials, form.observed, strict=True)
    ]
    return jnp.concatenate(parts) if parts else jnp.zeros((form.num_rows,), dtype)


def linearised_sum(form: LatentGaussian, mean: Array, variance: Array) -> Array:
    """Sum of the expected log factors whose derivatives in means and variances are the slopes that come with them.

    Quadrature is then never differentiated, and the derivative is that of which the optimum is a zero.
    """
    expected = expected_log_factors(form, lax.stop_gradient(mean), lax.stop_gradient(variance))
    mean_slope, variance_slope = lax.stop_gradient((expected.mean_slope, expected.variance_slope))
    moves = mean_slope * (mean - lax.stop_gradient(mean)) + variance_slope * (variance - lax.stop_gradient(variance))
    return jnp.sum(expected.value) + jnp.sum(moves)
