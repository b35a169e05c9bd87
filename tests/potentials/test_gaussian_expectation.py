"""Gauss-Hermite expectations: exact polynomials, a closed form, derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.potentials import PoissonExpPotential, gaussian_expectation


@pytest.mark.float32
def test_polynomials_are_exact():
    mean, variance = jnp.array([0.5, -1.0]), jnp.array([[2.0], [0.25]])
    value = gaussian_expectation(lambda x: x**5 - 2.0 * x**2, mean, variance, num_nodes=3)
    fifth = mean**5 + 10.0 * mean**3 * variance + 15.0 * mean * variance**2
    np.testing.assert_allclose(value, fifth - 2.0 * (mean**2 + variance), rtol=1e-5)


def test_expected_log_density_of_a_poisson_factor_and_its_gradient():
    count, mean, variance = jnp.array([0.0, 3.0, 12.0]), jnp.array([-1.0, 0.4, 2.5]), jnp.array([0.5, 1.0, 0.1])
    potential = PoissonExpPotential(count)

    def expected(mean, variance):
        return count * mean - jnp.exp(mean + 0.5 * variance) - jax.lax.lgamma(count + 1.0)

    tolerance = 1e-10 if mean.dtype == jnp.float64 else 1e-4
    np.testing.assert_allclose(
        gaussian_expectation(potential.log_density, mean, variance), expected(mean, variance), rtol=tolerance
    )
    gradient = jax.grad(lambda m, v: gaussian_expectation(potential.log_density, m, v).sum(), (0, 1))(mean, variance)
    exact = jax.grad(lambda m, v: expected(m, v).sum(), (0, 1))(mean, variance)
    for value, other in zip(gradient, exact, strict=True):
        np.testing.assert_allclose(value, other, rtol=tolerance)
