"""Densities on a half line: tilted moments against brute force, cut normals of given moments against scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_ext.infer.gaussian.integration.mixture_marginals import CutNormal, MarginalMixture
from numpyro_ext.potentials.families.half_line import HalfLinePotential
from numpyro_ext.potentials.integrals.truncated_by_moments import truncated_by_moments
from tests.tiers import thorough

from .direct_integral import direct_moments, largest_errors

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
# Frozen distributions of scipy, and their parameters: bound, center, precision, rate, log constant.
DENSITIES = [
    (stats.halfnorm(scale=0.5), (0.0, 0.0, 4.0, 0.0, np.log(4.0 / np.sqrt(2.0 * np.pi)))),
    (stats.expon(scale=1 / 3.0), (0.0, 0.0, 0.0, 3.0, np.log(3.0))),
    (
        stats.truncnorm(0.75, np.inf, 0.5, 2.0),
        (2.0, 0.5, 0.25, 0.0, -np.log(2.0 * np.sqrt(2.0 * np.pi)) - stats.norm.logsf(0.75)),
    ),
]


@needs_float64
@pytest.mark.parametrize("power", [1.0, *thorough(0.4)])
def test_tilted_moments_against_direct_integral(power):
    # Not so far below the bound that the integrand of the reference loses its digits.
    mean, variance, row = (
        x.ravel() for x in np.meshgrid([-12.0, 0.7, 12.0], [0.01, 1.0, 25.0, 1e8], range(len(DENSITIES)), indexing="ij")
    )
    potential = HalfLinePotential(*np.array([parameters for _, parameters in DENSITIES])[row].T)
    moments = jax.jit(lambda m, v: potential.tilted_moments(m, v, power))(mean, variance)
    expected = [
        direct_moments(DENSITIES[i][0].logpdf, m, v, power, [DENSITIES[i][1][0]])
        for i, m, v in zip(row, mean, variance, strict=True)
    ]
    errors = largest_errors(moments, expected, mean, variance)
    assert errors.max() < 5e-8, errors


@pytest.mark.float32
def test_far_from_the_bound_nothing_is_lost():
    """Half-normal of deviation one under cavities that put all mass below zero, or say next to nothing."""
    potential = HalfLinePotential(0.0, 0.0, 1.0, 0.0, 0.5 * np.log(2.0 / np.pi))
    mean, variance = jnp.array([-1e4, -50.0, 0.0, 50.0]), jnp.array([1.0, 1e-2, 1e12, 1e12])
    slopes = jax.grad(lambda m: jnp.sum(potential.tilted_moments(m, variance).log_z))(mean)
    found = potential.tilted_moments(mean, variance)
    for part in (*found, slopes):
        assert np.all(np.isfinite(part)), found
    assert np.all(found.mean > 0.0) and np.all(found.variance > 0.0) and np.all(found.site_precision >= 0.0)
    # Near the bound an exponential density; without a cavity the half-normal itself.
    np.testing.assert_allclose(found.mean[:2], [1e-4, 2e-4], rtol=1e-3)
    np.testing.assert_allclose(found.mean[2:], np.sqrt(2.0 / np.pi), rtol=1e-5)
    np.testing.assert_allclose(found.variance[2:], 1.0 - 2.0 / np.pi, rtol=1e-5)


@needs_float64
def test_cut_normals_of_given_moments_against_scipy():
    location = np.array([30.0, 5.0, 0.5, 0.0, -1.0, -4.9, -5.1, -20.0])
    exact = stats.truncnorm(-location, np.inf)  # of a standard normal, so the excess is that over the bound
    z = np.array([-6.0, -1.0, 0.3, 2.0, 5.0])[:, None] * np.ones(len(location))

    def look(mean, variance):
        found = truncated_by_moments(mean, variance, 7.0)
        x = found.from_normal(z)
        return found, x, found.log_density(x), found.cdf(x)

    found, x, log_density, below = jax.jit(look)(7.0 + 3.0 * (exact.mean() + location), 9.0 * exact.var())
    np.testing.assert_allclose(found.location, location, atol=2e-5)
    np.testing.assert_allclose(found.scale, 3.0, rtol=2e-6)
    # Quantiles by the probability on the side where it is small, and then as distances from the bound.
    quantiles = np.where(z < 0.0, exact.ppf(stats.norm.cdf(z)), exact.isf(stats.norm.sf(z))) + location
    is_known = (location > -10.0) | (z > -2.0)  # where scipy's own have digits
    np.testing.assert_allclose(((x - 7.0) / 3.0)[is_known], quantiles[is_known], rtol=1e-5)
    np.testing.assert_allclose(below, stats.norm.cdf(z), rtol=5e-5)  # what x, beside its bound, has of digits
    np.testing.assert_allclose(log_density + np.log(3.0), exact.logpdf((x - 7.0) / 3.0 - location), atol=1e-4)
    cut = CutNormal(*(np.asarray(part) for part in found))
    np.testing.assert_allclose(cut.cdf(np.asarray(x)), below, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.log(cut.density(np.asarray(x))), log_density, atol=1e-9)


def test_mixtures_of_cut_normals_have_quantiles_inside():
    means, variances = np.array([[0.8], [0.1]]), np.array([[0.3633802], [0.0099]])
    mixture = MarginalMixture(np.array([0.7, 0.3]), means, variances, np.zeros((2, 1)), np.zeros(1))
    q = np.array([1e-4, 0.3, 0.9, 0.9999])
    found = mixture.quantile(q)
    assert np.all(found > 0.0)
    np.testing.assert_allclose(mixture.cdf(found)[:, 0], q, rtol=1e-6)
