"""Log-factorials against scipy where it does not cancel, and against sums of logarithms where it does."""

import math
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from numpyro_ext.potentials.integrals.stirling import (
    log_beta,
    log_binomial_coefficient,
    log_gamma_remainder,
    log_rising_coefficient,
    stirling_error,
)


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


@pytest.mark.float32
def test_derivatives_of_the_remainder():
    x = np.geomspace(1e-3, 1e4, 40).astype(jnp.result_type(float))
    rounding = 20 * jnp.finfo(x.dtype).eps
    exact = x.astype(float)
    log_gamma = special.gammaln(exact) - (exact - 0.5) * np.log(exact) + exact - 0.5 * np.log(2 * np.pi)
    # Of each, what is left of a special function when its leading part is subtracted, and the size of that part.
    expected = [
        (log_gamma, 1.0 + np.abs(exact * np.log(exact))),
        (special.digamma(exact) - np.log(exact) + 0.5 / exact, np.abs(np.log(exact)) + 1.0 / exact),
        (special.polygamma(1, exact) - 1 / exact - 0.5 / exact**2, 1 / exact + 1 / exact**2),
        (special.polygamma(2, exact) + 1 / exact**2 + 1 / exact**3, 1 / exact**2 + 1 / exact**3),
    ]
    function = log_gamma_remainder
    for value, size in expected:
        assert np.all(np.abs(jax.vmap(function)(x) - value) <= rounding * size)
        function = jax.grad(function)
    # Beyond, the digits of these differences are lost.
    far = np.array([1e3, 1e6, 1e9], x.dtype)
    series = 1 / (12 * far.astype(float)) - 1 / (360 * far.astype(float) ** 3)
    np.testing.assert_allclose(log_gamma_remainder(jnp.asarray(far)), series, rtol=0, atol=rounding)


def test_logarithm_of_the_beta_function():
    a, b = np.array([0.2, 3.0, 8.0, 40.0, 8.0, 2.0]), np.array([0.7, 8.0, 8.0, 0.01, 500.0, 1e9])
    exact = special.betaln(a, b)
    exact[-1] = -np.log(1e9) - np.log(1e9 + 1)  # of (1, n) is 1 / n, of (2, n) one over n (n + 1)
    tolerance = 1e-13 if jnp.result_type(float) == "float64" else 1e-5
    np.testing.assert_allclose(log_beta(jnp.asarray(a), jnp.asarray(b)), exact, rtol=tolerance, atol=20 * tolerance)
    # symmetric, and B(a + 1, b) = B(a, b) a / (a + b)
    np.testing.assert_allclose(log_beta(jnp.asarray(b), jnp.asarray(a)), exact, rtol=tolerance, atol=20 * tolerance)
    following = log_beta(jnp.asarray(a + 1.0), jnp.asarray(b)) - exact
    np.testing.assert_allclose(following, np.log(a / (a + b)), rtol=10 * tolerance, atol=20 * tolerance)
