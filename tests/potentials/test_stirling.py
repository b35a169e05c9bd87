"""Log-factorials against scipy where it does not cancel, and against sums of logarithms where it does."""

import math
from decimal import Decimal

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from numpyro_ext.potentials.integrals.stirling import log_binomial_coefficient, log_rising_coefficient, stirling_error


def _exact_stirling_error(count):
    half_log_2pi = Decimal("0.9189385332046727417803297364056176398614")
    y = Decimal(count)
    return float(Decimal(math.factorial(count)).ln() - (y + Decimal("0.5")) * y.ln() + y - half_log_2pi)


@pytest.mark.float32
@pytest.mark.parametrize("dtype", ["float32", jnp.result_type(float)])
def test_stirling_error(dtype):
    count = list(range(1, 40))
    exact = [_exact_stirling_error(k) for k in count]
    # Table entries are differences of doubles of size up to 40.
    tolerance = 3e-7 if dtype == "float32" else 5e-12
    np.testing.assert_allclose(stirling_error(jnp.asarray(count, dtype)), exact, rtol=tolerance)
    assert jnp.isnan(stirling_error(jnp.array([0.0, -3.0, 2.5, 100.5]))).all()


def test_coefficients():
    total, count = np.array([5.0, 5.0, 5.0, 80.0, 3000.0]), np.array([0.0, 2.0, 5.0, 33.0, 2999.0])
    tolerance = 1e-13 if jnp.result_type(float) == "float64" else 1e-5
    exact = [math.log(math.comb(int(n), int(k))) for n, k in zip(total, count, strict=True)]
    value = log_binomial_coefficient(jnp.asarray(total), jnp.asarray(count))
    np.testing.assert_allclose(value, exact, rtol=tolerance, atol=20 * tolerance)
    count, size = np.array([0.0, 3.0, 20.0, 1e6, 2.0]), np.array([0.3, 2.5, 0.7, 3.0, 1e7])
    exact = special.gammaln(count + size) - special.gammaln(size) - special.gammaln(count + 1.0)
    # gamma(y + 3) / (2 y!) = (y + 2) (y + 1) / 2, and gamma(r + 2) / (2 gamma(r)) = r (r + 1) / 2.
    exact[3], exact[4] = np.log((1e6 + 2) * (1e6 + 1) / 2), np.log(1e7 * (1e7 + 1) / 2)
    value = log_rising_coefficient(jnp.asarray(count), jnp.asarray(size))
    np.testing.assert_allclose(value, exact, rtol=tolerance, atol=20 * tolerance)
