"""Factors of small vectors: sums over categories, derivatives, expectations, pinned categories, pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from numpyro_ext.potentials.families.categorical import (
    MultinomialLogitPotential,
    MultinomialProbitPotential,
    SoftmaxPotential,
)
from numpyro_ext.potentials.families.logit_counts import BinomialLogitPotential

BOTH = pytest.mark.parametrize("family", [SoftmaxPotential, MultinomialProbitPotential])
ETA = np.array([[0.3, -1.0, 0.8], [2.0, 2.0, -3.0], [-5.0, 4.0, 1.0]])
LABEL = np.array([0, 2, 1])
COVARIANCE = np.array([[1.0, 0.3, -0.2], [0.3, 0.7, 0.1], [-0.2, 0.1, 0.5]])
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="tolerances of double precision")


@pytest.mark.float32
@BOTH
def test_probabilities_sum_to_one(family):
    eta = jnp.asarray(ETA, float)
    log_density = family(jnp.arange(3)[:, None], 3).log_density(eta)
    assert log_density.shape == (3, 3)
    np.testing.assert_allclose(np.exp(log_density).sum(0), 1.0, rtol=1e-6 if eta.dtype == jnp.float32 else 1e-14)


@needs_float64
def test_multinomial_probit_against_adaptive_quadrature():
    def direct(eta, label):
        others = np.delete(eta, label)

        def integrand(u):
            return scipy.stats.norm.pdf(u) * np.prod(scipy.stats.norm.cdf(u + eta[label] - others))

        return scipy.integrate.quad(integrand, -12.0, 14.0, epsabs=0.0, epsrel=1e-13, limit=300)[0]

    found = MultinomialProbitPotential(LABEL, 3).log_density(ETA)
    expected = np.log([direct(eta, label) for eta, label in zip(ETA, LABEL, strict=True)])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    # Two categories: the difference of two unit normals.
    two = MultinomialProbitPotential(0, 2).log_density(ETA[:, :2])
    np.testing.assert_allclose(two, scipy.stats.norm.logcdf((ETA[:, 0] - ETA[:, 1]) / np.sqrt(2.0)), rtol=1e-12)


@needs_float64
@BOTH
@pytest.mark.parametrize("pinned", [None, 1])
def test_derivatives(family, pinned):
    potential = family(LABEL, 3, pinned)
    eta = ETA if pinned is None else ETA[:, [0, 2]]
    assert potential.dimension == eta.shape[-1]
    value, gradient, hessian = potential.derivatives(eta)

    @jax.jit
    def total(eta):
        return potential.log_density(eta).sum()

    np.testing.assert_allclose(value, potential.log_density(eta), rtol=1e-15)
    np.testing.assert_allclose(gradient, jax.grad(total)(eta), atol=1e-13)
    by_autodiff = jax.jit(jax.hessian(total))(eta)
    np.testing.assert_allclose(hessian, np.einsum("iaib->iab", by_autodiff), atol=1e-13)
    assert np.linalg.eigvalsh(hessian).max() < 1e-13
    for i in range(eta.shape[-1]):
        step = np.zeros(eta.shape[-1])
        step[i] = 1e-5
        difference = potential.log_density(eta + step) - potential.log_density(eta - step)
        np.testing.assert_allclose(gradient[:, i], difference / 2e-5, atol=1e-8)


@needs_float64
@BOTH
@pytest.mark.parametrize("pinned", [0, 2, -1])
def test_a_pinned_category_has_predictor_zero(family, pinned):
    options = {"bound": "quadrature"} if family is SoftmaxPotential else {}
    full, part = family(LABEL, 3, **options), family(LABEL, 3, pinned, **options)
    free = np.delete(np.arange(3), pinned)
    contrast = np.eye(3)[free] - np.eye(3)[pinned]
    np.testing.assert_allclose(part.log_density(ETA @ contrast.T), full.log_density(ETA), rtol=1e-13)
    if pinned == 0:
        expected = full.expected_log_density(ETA, COVARIANCE)
        found = part.expected_log_density(ETA @ contrast.T, contrast @ COVARIANCE @ contrast.T)
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-8)
        np.testing.assert_allclose(found.mean_slope @ contrast, expected.mean_slope, atol=1e-8)
        slope = contrast.T @ found.covariance_slope @ contrast
        np.testing.assert_allclose(slope, expected.covariance_slope, atol=1e-7)


@needs_float64
@BOTH
def test_expectations_against_a_product_rule(family):
    # In all three dimensions, and with another square root of the covariance.
    line, weights = np.polynomial.hermite_e.hermegauss(20)
    nodes = np.stack(np.meshgrid(line, line, line, indexing="ij"), -1).reshape(-1, 3)
    weight = np.prod(np.stack(np.meshgrid(weights, weights, weights, indexing="ij"), -1).reshape(-1, 3), axis=-1)
    values, vectors = np.linalg.eigh(COVARIANCE)
    eta = ETA[0] + nodes @ (vectors * np.sqrt(values)).T
    potential = family(2, 3, bound="quadrature") if family is SoftmaxPotential else family(2, 3)
    direct = [np.tensordot(weight / weight.sum(), part, axes=1) for part in potential.derivatives(eta)]
    found = potential.expected_log_density(ETA[0], COVARIANCE)
    np.testing.assert_allclose(found.value, direct[0], rtol=1e-8)
    np.testing.assert_allclose(found.mean_slope, direct[1], atol=1e-7)
    np.testing.assert_allclose(found.covariance_slope, 0.5 * direct[2], atol=1e-6)
    assert potential.is_lower_bound


@needs_float64
def test_softmax_bounds_are_below_the_expectation_and_say_so():
    exact = SoftmaxPotential(LABEL, 3, bound="quadrature").expected_log_density(ETA, COVARIANCE).value
    for name in ("tilted", "bohning", "log"):
        potential = SoftmaxPotential(LABEL, 3, bound=name)
        assert potential.is_lower_bound
        result = potential.expected_log_density(ETA, COVARIANCE)
        assert np.all(result.value <= exact + 1e-9)
        np.testing.assert_allclose(result.mean_slope.sum(-1), 0.0, atol=1e-13)
        assert np.linalg.eigvalsh(result.covariance_slope).max() < 1e-13
    assert not SoftmaxPotential(LABEL, 3, bound="delta").is_lower_bound
    assert not SoftmaxPotential(LABEL, 5, bound="quadrature").is_lower_bound


COUNTS = np.array([[2, 0, 1], [0, 0, 4], [1, 1, 1]])


@needs_float64
@pytest.mark.parametrize("bound", ["tilted", "bohning", "log", "delta", "quadrature"])
def test_counts_are_sums_of_observations(bound):
    potential = MultinomialLogitPotential(COUNTS.astype(float), bound=bound)
    value, *derivatives = potential.derivatives(ETA)
    expected = potential.expected_log_density(ETA, COVARIANCE)
    constant = scipy.stats.multinomial.logpmf(COUNTS, COUNTS.sum(-1), np.full(3, 1 / 3)) + COUNTS.sum(-1) * np.log(3.0)
    parts = [SoftmaxPotential(np.full(3, k), 3, bound=bound) for k in range(3)]
    sums = [
        sum(COUNTS[:, k].reshape(-1, *[1] * (np.ndim(x[0]) - 1)) * x[k] for k in range(3))
        for x in zip(*([[*p.derivatives(ETA), *p.expected_log_density(ETA, COVARIANCE)] for p in parts]), strict=True)
    ]
    for found, total in zip(
        (value - constant, *derivatives, expected.value - constant, *expected[1:]), sums, strict=True
    ):
        np.testing.assert_allclose(found, total, atol=1e-10)
    assert potential.is_log_concave and potential.is_lower_bound == parts[0].is_lower_bound


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("number", [5, 100, 10_000])
def test_predictive_densities_of_many_counts(number):
    """Two categories are a binomial observation, whose integral in one dimension is another program."""
    success = 3 * number // 10
    potential = MultinomialLogitPotential(np.array([[success, number - success]], float))
    found = potential.log_normaliser(np.array([[0.5, 0.0]]), np.diag([0.3, 0.4])[None])
    single = BinomialLogitPotential(jnp.array([success]), jnp.array([number]))
    np.testing.assert_allclose(found, single.log_normaliser(jnp.array([0.5]), jnp.array([0.7])), atol=1e-8)


@pytest.mark.float32
@BOTH
def test_tails(family):
    eta = jnp.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [0.0, 0.0, 1e4]])
    value, gradient, hessian = family(jnp.zeros(3, int), 3).derivatives(eta)
    assert all(np.all(np.isfinite(part)) for part in (value, gradient, hessian))
    # Each unit of distance costs one, or the square of a half of the distance where the noise is normal.
    expected = [0.0, -2e4, -1e4] if family is SoftmaxPotential else [0.0, -1e8, -0.25e8]
    np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-6)


@BOTH
def test_refusals(family):
    with pytest.raises(ValueError, match="at least two categories; got 1"):
        family(0, 1)
    with pytest.raises(ValueError, match="must be one of the 3 categories or None; got 3"):
        family(0, 3, 3)
    with pytest.raises(ValueError, match=r"takes 2 predictors on the last axis; got shape \(3, 3\)"):
        family(LABEL, 3, 0).log_density(ETA)
    assert np.all(np.isnan(family(np.array([-1, 3]), 3).log_density(jnp.zeros(3))))
    if family is SoftmaxPotential:
        with pytest.raises(ValueError, match="Unknown bound 'none'"):
            family(0, 3, bound="none")
    else:
        with pytest.raises(NotImplementedError, match="up to 4 categories; got 5"):
            family(0, 5).expected_log_density(jnp.zeros(5), jnp.eye(5))


@pytest.mark.float32
@BOTH
def test_potentials_pass_through_transformations(family):
    eta = jnp.asarray(ETA, float)
    potential = family(jnp.asarray(LABEL), 3)
    expected = potential.log_density(eta)
    np.testing.assert_allclose(jax.jit(lambda p, x: p.log_density(x))(potential, eta), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda p, x: p.log_density(x))(potential, eta), expected, rtol=1e-5)
    assert jax.tree.structure(potential) != jax.tree.structure(family(jnp.asarray(LABEL), 4))
    assert len(jax.tree.leaves(potential)) == 1
