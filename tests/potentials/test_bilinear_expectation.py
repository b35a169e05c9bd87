"""Expected log factors of products of Gaussian vectors against nested quadrature, finite differences, known limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from numpyro_ext.potentials import (
    BinomialLogitPotential,
    CumulativeLogitPotential,
    GaussianPotential,
    LogitPotential,
    NegativeBinomialExpPotential,
    ProbitPotential,
)
from numpyro_ext.potentials.base import Potential
from numpyro_ext.potentials.families.ordinal import CumulativeProbitPotential
from numpyro_ext.potentials.families.poisson import PoissonSoftplusPotential
from numpyro_ext.potentials.integrals.products.bilinear_expectation import (
    ProductPredictor,
    expected_bilinear_log_density,
    expected_bilinear_value,
)
from tests.tiers import few

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
expected = jax.jit(expected_bilinear_log_density)
N = 4
THRESHOLDS = jnp.tile(jnp.array([-1.0, 0.5]), (N, 1))
POTENTIALS = {
    "logit": LogitPotential(jnp.array([0, 1, 0, 1])),
    "probit": ProbitPotential(jnp.array([0, 1, 0, 1])),
    "binomial": BinomialLogitPotential(jnp.array([0.0, 2.0, 5.0, 1.0]), jnp.full(N, 5.0)),
    "softplus": PoissonSoftplusPotential(jnp.array([0.0, 1.0, 7.0, 1000.0]), jnp.array([1.0, 0.5, 2.0, 1.0])),
    "negative_binomial": NegativeBinomialExpPotential(jnp.array([0.0, 1.0, 4.0, 30.0]), jnp.full(N, 1.5)),
    "cumulative_logit": CumulativeLogitPotential(jnp.array([0, 1, 2, 1]), THRESHOLDS),
    "cumulative_probit": CumulativeProbitPotential(jnp.array([0, 1, 2, 1]), THRESHOLDS),
}


def make_predictor(seed, size, *, is_diagonal=False, scale=1.0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal((N, *shape))

    if is_diagonal:
        covariance, root = scale * rng.uniform(0.1, 0.7, (N, size)), np.sqrt(scale) * 0.6 * normal(size)
    else:
        factor = 0.6 * np.sqrt(scale / size) * normal(size, size)
        covariance = factor @ factor.swapaxes(-1, -2) + 0.05 * np.eye(size)
        root = 0.6 * np.sqrt(scale / size) * normal(size, size)
    arrays = normal(), normal(size), covariance, normal(size), root, 0.4 * normal(size), rng.uniform(0.0, 0.3, N)
    return ProductPredictor(*map(jnp.asarray, arrays))


derivatives = jax.jit(lambda potential, eta: potential.derivatives(eta))


def nested_quadrature(potential, predictor, num_nodes, num_inner=80):
    """Gauss-Hermite rules over ``q``, and given that over the predictor, which is then normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    constant, a, A, m, R, g, s = (np.asarray(x) for x in predictor)
    if A.ndim == 2:
        A, R = (x[:, :, None] * np.eye(x.shape[1]) for x in (A, R))
    dim = R.shape[-1]
    q = np.stack(np.meshgrid(*[nodes] * dim, indexing="ij"), -1).reshape(-1, dim)
    weight = np.prod(np.stack(np.meshgrid(*[weights / weights.sum()] * dim, indexing="ij"), -1).reshape(-1, dim), -1)
    w = m + np.einsum("nir,qr->qni", R, q)
    mean = constant + np.einsum("qni,ni->qn", w, a) + q @ g.T
    variance = s + np.einsum("qni,nij,qnj->qn", w, A, w)
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_inner)
    eta = mean + np.sqrt(variance) * nodes[:, None, None]
    inner = weights / weights.sum()
    value, first, second = (
        weight[:, None] * np.tensordot(inner, np.asarray(x), 1) for x in derivatives(potential, jnp.asarray(eta))
    )
    return value.sum(0), np.einsum("qn,qni->ni", first, w), -np.einsum("qn,qni,qnj->nij", second, w, w)


@needs_float64
@pytest.mark.parametrize("name", few(POTENTIALS, 4))
def test_against_nested_quadrature(name):
    potential = POTENTIALS[name]
    for predictor in (make_predictor(0, 1), make_predictor(1, 1, is_diagonal=True)):
        value, slope, precision = nested_quadrature(potential, predictor, 100)
        found = expected(potential, predictor)
        size = 1.0 + np.abs(value)
        np.testing.assert_allclose(found.value / size, value / size, atol=1e-11)
        np.testing.assert_allclose(found.slope / size[:, None], slope / size[:, None], atol=1e-11)
        matrix = precision if found.precision.ndim == 3 else np.einsum("nii->ni", precision)
        np.testing.assert_allclose(found.precision, matrix, atol=1e-11 * size.max())


@needs_float64
@pytest.mark.parametrize("is_diagonal", [False, True])
def test_two_components_against_nested_quadrature(is_diagonal):
    potential, predictor = POTENTIALS["softplus"], make_predictor(2, 2, is_diagonal=is_diagonal)
    value, slope, precision = nested_quadrature(potential, predictor, 48)
    found = expected(potential, predictor)
    np.testing.assert_allclose(found.value, value, rtol=1e-10)
    np.testing.assert_allclose(found.slope, slope, rtol=1e-10)
    matrix = np.einsum("nii->ni", precision) if is_diagonal else precision
    np.testing.assert_allclose(found.precision, matrix, atol=1e-10 * np.abs(precision).max())


@pytest.mark.thorough
@needs_float64
def test_quadratic_factors_in_many_dimensions():
    """Of a Gaussian factor mean and variance of the predictor are all that counts, and they are known."""
    y, sd = jnp.array([0.3, -2.0, 1.0, 5.0]), jnp.array([0.5, 1.0, 2.0, 0.7])
    for seed, is_diagonal in ((3, False), (4, True)):
        predictor = make_predictor(seed, 6, is_diagonal=is_diagonal)
        constant, a, A, m, R, g, s = predictor
        if is_diagonal:
            A, R = (x[:, :, None] * jnp.eye(6) for x in (A, R))
        slope = jnp.einsum("nir,ni->nr", R, a) + g
        second = m[:, :, None] * m[:, None, :] + R @ R.swapaxes(-1, -2)
        mean = constant + jnp.sum(a * m, -1)
        variance = s + jnp.sum(slope**2, -1) + jnp.einsum("nij,nij->n", A, second)
        found = expected(GaussianPotential(y, sd), predictor)
        value = jax.scipy.stats.norm.logpdf(y, mean, sd) - 0.5 * variance / sd**2
        np.testing.assert_allclose(found.value, value, rtol=1e-9)
        precision = second / sd[:, None, None] ** 2
        np.testing.assert_allclose(
            found.precision, jnp.einsum("nii->ni", precision) if is_diagonal else precision, rtol=1e-9, atol=1e-9
        )


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize(
    "is_diagonal, absent",
    [
        (False, ()),
        (True, ()),
        pytest.param(False, ("covariance",), marks=pytest.mark.slow),
        pytest.param(False, ("root", "linear", "variance"), marks=pytest.mark.slow),
    ],
)
def test_gradients_against_finite_differences(is_diagonal, absent):
    predictor = make_predictor(5, 3, is_diagonal=is_diagonal)._replace(**dict.fromkeys(absent))
    potential = POTENTIALS["cumulative_logit"]

    def value(thresholds, predictor):
        if predictor.covariance is not None and not is_diagonal:
            symmetric = 0.5 * (predictor.covariance + predictor.covariance.swapaxes(-1, -2))
            predictor = predictor._replace(covariance=symmetric)
        return jnp.sum(expected_bilinear_value(CumulativeLogitPotential(potential.label, thresholds), predictor))

    value = jax.jit(value)
    check_grads(value, (potential.thresholds, predictor), order=1, modes=["rev"], rtol=1e-6, atol=1e-7)
    # the slopes are the gradients in the distribution of u
    found, gradient = expected(potential, predictor), jax.jit(jax.grad(value, 1))(potential.thresholds, predictor)
    np.testing.assert_allclose(gradient.mean, found.slope, rtol=1e-10, atol=1e-14)
    if predictor.covariance is not None:
        np.testing.assert_allclose(gradient.covariance, -0.5 * found.precision, rtol=1e-10, atol=1e-14)
    eigenvalues = found.precision if is_diagonal else np.linalg.eigvalsh(found.precision)
    assert np.all(eigenvalues > -1e-14)


@pytest.mark.thorough
@pytest.mark.float32
def test_points_and_vanishing_covariances():
    """Without spread the expectation is the log factor; equal eigenvalues have gradients."""
    dtype = jnp.result_type(float)
    potential, one = POTENTIALS["softplus"], jnp.ones((N, 2))
    point = ProductPredictor(jnp.zeros(N), 0.3 * one, None, one, None, None)
    tiny = 1e-12 if dtype == jnp.float64 else 1e-10
    narrow = point._replace(covariance=tiny * jnp.tile(jnp.eye(2), (N, 1, 1)), root=jnp.zeros((N, 2, 2)))
    exact = potential.log_density(jnp.full(N, 0.6))
    np.testing.assert_allclose(expected(potential, point).value, exact, rtol=1e-6)
    np.testing.assert_allclose(expected(potential, narrow).value, exact, rtol=1e-9 if dtype == jnp.float64 else 1e-4)
    equal = narrow._replace(covariance=jnp.tile(jnp.eye(2), (N, 1, 1)), root=jnp.tile(jnp.eye(2), (N, 1, 1)))
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(expected_bilinear_value(potential, p))))(equal)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.float32
def test_single_precision():
    potential = POTENTIALS["logit"]
    predictor = make_predictor(6, 1)
    found = expected(potential, jax.tree.map(lambda x: x.astype(jnp.float32), predictor))
    assert found.value.dtype == jnp.float32
    value, slope, precision = nested_quadrature(potential, predictor, 60)
    for got, wanted in zip(found, (value, slope, precision), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@needs_float64
def test_wide_products_lose_digits_slowly():
    """The stated accuracy at singular values of one, two and four, against a trapezoidal rule over ``q``."""
    q = np.linspace(-9.0, 9.0, 2001)
    weight = np.exp(-0.5 * q**2) / np.exp(-0.5 * q**2).sum()
    potential, ones = LogitPotential(jnp.ones(1)), jnp.ones((1, 1))
    for scale, tolerance in ((1.0, 1e-12), (2.0, 3e-8), (4.0, 1e-4)):
        predictor = ProductPredictor(0.3 * ones[0], 0.2 * ones, scale * ones, -0.1 * ones, scale**0.5 * ones, None)
        w = -0.1 + np.sqrt(scale) * q
        inner = potential.expected_log_density(jnp.asarray(0.3 + 0.2 * w), jnp.asarray(scale * w**2 + 1e-300))
        found = expected(potential, predictor)
        np.testing.assert_allclose(found.value[0], weight @ np.asarray(inner.value), atol=tolerance)
        precision = -2.0 * weight @ (np.asarray(inner.variance_slope) * w**2)
        np.testing.assert_allclose(found.precision[0, 0], precision, atol=tolerance)


@pytest.mark.thorough
@needs_float64
def test_many_factors_of_any_width():
    """Factors that need more and fewer nodes, and come back in their order: against a trapezoidal rule over ``q``."""
    q = np.linspace(-9.0, 9.0, 401)
    weight = np.exp(-0.5 * q**2) / np.exp(-0.5 * q**2).sum()
    rng, n = np.random.default_rng(7), 150
    variance, root = 10.0 ** rng.uniform(-8.0, 0.0, (2, n))
    mean, partner = rng.standard_normal((2, n))
    potential = ProbitPotential(jnp.asarray(rng.integers(0, 2, n)))
    arrays = (jnp.asarray(x)[:, None] for x in (mean, variance, partner, root))
    predictor = ProductPredictor(jnp.zeros(n), *arrays, None)
    w = partner + root * q[:, None]
    inner = jax.jit(potential.expected_log_density)(mean * w, variance * w**2 + 1e-300)
    found = expected(potential, predictor)
    np.testing.assert_allclose(found.value, weight @ np.asarray(inner.value), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found.slope[:, 0], weight @ (np.asarray(inner.mean_slope) * w), rtol=1e-9, atol=1e-12)
    precision = -2.0 * weight @ (np.asarray(inner.variance_slope) * w**2)
    np.testing.assert_allclose(found.precision[:, 0], precision, rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(jax.jit(expected_bilinear_value)(potential, predictor), found.value, rtol=1e-12)


@needs_float64
def test_derivatives_of_softplus_counts():
    """In closed form as by differentiation, and finite far out."""
    potential = POTENTIALS["softplus"]
    eta = jnp.array([-800.0, -60.0, -40.1, -39.0, -20.0, -3.0, 0.0, 2.0, 30.0, 800.0])[:, None]
    for found, wanted in zip(potential.derivatives(eta), Potential.derivatives(potential, eta), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough
@needs_float64
def test_directions_without_spread_add_nothing():
    """One component of ``u`` behind five of ``q`` is one behind a single one, whose root is as long. The other four
    directions have the spread of rounding, and in some of many factors next to none."""
    rng, n = np.random.default_rng(0), 4000
    potential = ProbitPotential(jnp.asarray(rng.integers(0, 2, n)))
    constant, mean, partner = (jnp.asarray(rng.standard_normal(s)) for s in (n, (n, 1), (n, 1)))
    covariance = jnp.asarray(rng.uniform(0.01, 0.3, (n, 1, 1)))
    root = jnp.asarray(rng.standard_normal((n, 1, 5)))
    length = jnp.linalg.norm(root, axis=-1, keepdims=True)
    one, other = (
        jax.jit(expected_bilinear_value)(
            potential, ProductPredictor(constant, mean, covariance, partner, R, jnp.zeros((n, R.shape[-1])))
        )
        for R in (root, length)
    )
    np.testing.assert_allclose(one, other, rtol=1e-6)
