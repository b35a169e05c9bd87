"""Tilted moments of the softmax: against integrals in one dimension, and what their error estimate is worth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.potentials.families.categorical import SoftmaxPotential
from numpyro_ext.potentials.integrals.several_predictors.softmax_nodes import softmax_moments
from tests.tiers import thorough

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="tolerances of double precision")


def _by_one_dimension(mean, deviation):
    r"""Normaliser, means and variances for independent predictors of all categories but the observed one.

    With :math:`1 / (1 + m) = \int_0^\infty e^{-s (1 + m)} ds` and :math:`s = e^u` they are integrals over ``u`` of
    products of integrals over one predictor each.
    """
    u = np.linspace(-45.0, 5.0, 2501)[:, None]
    z = np.linspace(-9.0, 9.0, 601)
    weight = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    total, parts = np.exp(u[:, 0] - np.exp(u[:, 0])), []
    for m, s in zip(mean, deviation, strict=True):
        density = np.exp(-np.exp(u + m + s * z)) * weight
        own = density.sum(axis=1)
        parts.append((own, density @ (m + s * z), density @ (m + s * z) ** 2))
    product = total * np.prod([own for own, _, _ in parts], axis=0)
    log_z = np.log(product.sum() * (u[1, 0] - u[0, 0]))
    first, second = (np.array([np.sum(product * part[k] / part[0]) for part in parts]) / product.sum() for k in (1, 2))
    return log_z, first, second - first**2


@needs_float64
@pytest.mark.parametrize(
    ("size", "deviation", "tolerance"),
    [
        (4, 0.8, 2e-6),
        *thorough((2, 1.0, 1e-7), (2, 5.0, 1e-7), (3, 0.5, 1e-6), (3, 3.0, 1e-5), (4, 2.5, 1e-4), (5, 0.8, 1e-4)),
    ],
)
def test_independent_predictors(size, deviation, tolerance):
    mean = np.linspace(-1.0, 0.7, size)
    spread = deviation * np.linspace(0.6, 1.3, size)
    found = jax.jit(softmax_moments)(mean[None], np.diag(spread**2)[None])
    log_z, means, variances = _by_one_dimension(mean, spread)
    np.testing.assert_allclose(found.log_z[0], log_z, atol=tolerance)
    np.testing.assert_allclose((found.mean[0] - means) / np.sqrt(variances), 0.0, atol=tolerance)
    np.testing.assert_allclose(np.diagonal(found.covariance[0]) / variances, 1.0, atol=tolerance)
    # the site times the cavity has these moments
    precision = np.diag(spread**-2.0) + found.site_precision[0]
    np.testing.assert_allclose(np.linalg.inv(precision), found.covariance[0], atol=1e-9 * spread.max() ** 2)
    shift = mean / spread**2 + found.site_shift[0]
    np.testing.assert_allclose(np.linalg.solve(precision, shift), found.mean[0], atol=1e-9)
    if deviation < 1.0:
        np.testing.assert_array_less(np.abs(found.log_z[0] - log_z), found.error[0])


@needs_float64
@pytest.mark.thorough
def test_moments_do_not_depend_on_where_the_mode_is_looked_for():
    mean, covariance = np.array([[0.3, -0.5, 0.8]]), np.diag([0.5, 1.0, 0.8])[None]
    moments = jax.jit(lambda near: softmax_moments(mean, covariance, near=near))
    near, far = moments(mean - 0.4), moments(mean + 40.0)
    np.testing.assert_allclose(near.log_z, far.log_z, atol=1e-6)
    np.testing.assert_allclose(near.mean, far.mean, atol=1e-5)


@needs_float64
@pytest.mark.thorough
@pytest.mark.parametrize("size", [3, 4])
def test_a_cavity_that_is_too_broad_is_not_answered(size):
    """With many factors, of which this is one; the others are answered."""
    covariance = np.tile(np.eye(size), (40, 1, 1))
    covariance[7] *= 1e4
    found = jax.jit(softmax_moments)(np.zeros((40, size)), covariance)
    assert np.isnan(found.log_z[7]) and np.all(np.isfinite(np.delete(found.log_z, 7)))


@needs_float64
@pytest.mark.thorough
def test_powers_and_their_derivative():
    potential = SoftmaxPotential(jnp.array([0, 3]), 4, pinned=1)
    mean, covariance = np.array([[0.2, -0.3, 0.9], [1.0, 0.0, 0.4]]), 0.7 * np.eye(3)
    log_z = jax.jit(lambda power: potential.tilted_moments(mean, covariance, power).log_z)
    plain = potential.tilted_moments(mean, covariance).log_z
    np.testing.assert_allclose(log_z(1.0), plain, atol=1e-12)
    slope = jax.jvp(log_z, (0.6,), (1.0,))[1]
    np.testing.assert_allclose(slope, (log_z(0.6 + 1e-4) - log_z(0.6 - 1e-4)) / 2e-4, rtol=1e-5)


@needs_float64
@pytest.mark.thorough
def test_a_label_that_is_no_category_is_not_answered():
    found = SoftmaxPotential(jnp.array([0, 4, -1]), 4).tilted_moments(np.zeros((3, 4)), np.eye(4))
    np.testing.assert_array_equal(np.isfinite(found.log_z), [True, False, False])


@pytest.mark.float32
@pytest.mark.thorough
def test_single_precision_of_more_categories():
    single = jnp.float32
    mean, covariance = jnp.asarray([[0.3, -0.5, 0.8, 0.1]], single), jnp.asarray(0.8 * np.eye(4)[None], single)
    found = softmax_moments(mean, covariance)
    assert found.log_z.dtype == single
    log_z, means, _ = _by_one_dimension(np.array(mean[0], float), np.full(4, np.sqrt(0.8)))
    np.testing.assert_allclose(found.log_z[0], log_z, atol=2e-5)
    np.testing.assert_allclose(found.mean[0], means, atol=1e-4)
