"""Variational Bayes of Girolami and Rogers: bound from its definition, optimum, and the truth by quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_ext.infer.gaussian.variational.multinomial_probit_bayes import (
    multinomial_probit_bayes,
    predict_probabilities,
)
from numpyro_ext.potentials.families.categorical import MultinomialProbitPotential

X = np.array([-1.5, -0.2, 0.9])
LABELS = np.array([0, 1, 2])
KERNEL = jnp.asarray(2.0 * np.exp(-0.5 * (X[:, None] - X) ** 2) + 1e-6 * np.eye(3))


def fit(**options):
    return multinomial_probit_bayes(KERNEL, LABELS, num_categories=3, **options)


def bound(mean, covariance):
    """By the definition: expected log density of auxiliary variables, in closed form, less the divergence."""
    value = jnp.sum(MultinomialProbitPotential(jnp.asarray(LABELS), 3).log_density(mean))
    precision = jnp.linalg.inv(KERNEL)
    divergence = 0.0
    for k in range(3):
        trace = jnp.trace(precision @ covariance) + mean[:, k] @ precision @ mean[:, k] - 3.0
        divergence += 0.5 * (trace + jnp.linalg.slogdet(KERNEL)[1] - jnp.linalg.slogdet(covariance)[1])
    return value - 1.5 * jnp.trace(covariance) - divergence


@pytest.mark.slow
def test_bound_rises_to_a_maximum_of_its_definition():
    found = fit(tol=1e-12)
    assert found.converged
    trace = np.asarray(found.bound_trace)[: found.num_steps]
    assert np.all(np.diff(trace) > -1e-12)
    np.testing.assert_allclose(found.bound, bound(found.mean, found.covariance), rtol=1e-8)
    assert float(jnp.max(jnp.abs(jax.grad(bound)(found.mean, found.covariance)))) < 1e-8
    slope = jax.grad(bound, argnums=1)(found.mean, found.covariance)
    np.testing.assert_allclose(slope, 0.0, atol=1e-5)


@pytest.mark.slow
def test_against_integration_over_the_prior():
    """Two hundred thousand quasi-random processes give evidence and means to about three digits."""
    normal = stats.norm.ppf(stats.qmc.Sobol(9, seed=0).random_base2(17)).reshape(-1, 3, 3)
    f = np.einsum("ij,njk->nik", np.linalg.cholesky(KERNEL), normal)
    weight = np.exp(np.sum(MultinomialProbitPotential(jnp.asarray(LABELS), 3).log_density(f), axis=1))
    evidence, mean = np.log(weight.mean()), np.einsum("n,nik->ik", weight, f) / weight.sum()
    found = fit()
    assert float(found.bound) < evidence
    # Independence of noise and processes leaves the direction and takes from the size.
    np.testing.assert_allclose(np.corrcoef(found.mean.ravel(), mean.ravel())[0, 1], 1.0, atol=0.01)
    assert 0.7 < np.linalg.norm(found.mean) / np.linalg.norm(mean) < 1.05


def test_bound_is_that_of_draws_from_the_approximation():
    """Expected log joint density of processes and auxiliary variables plus entropies, the latter truncated normals."""
    found, rng = fit(), np.random.default_rng(0)
    mean, covariance = np.asarray(found.mean), np.asarray(found.covariance)
    f = mean + np.einsum("ij,njk->nik", np.linalg.cholesky(covariance), rng.normal(size=(100_000, 3, 3)))
    value = -sum(
        stats.multivariate_normal(mean[:, k], covariance).entropy() * -1.0
        - stats.multivariate_normal(np.zeros(3), KERNEL, allow_singular=True).logpdf(f[..., k]).mean()
        for k in range(3)
    )
    for i, label in enumerate(LABELS):
        proposed = mean[i] + rng.normal(size=(400_000, 3))
        kept = proposed[proposed.argmax(axis=1) == label]
        u, share = kept[:100_000], len(kept) / len(proposed)
        log_q = stats.norm.logpdf(u, mean[i]).sum(axis=1) - np.log(share)
        value += np.mean(stats.norm.logpdf(u, f[: len(u), i]).sum(axis=1) - log_q)
    np.testing.assert_allclose(found.bound, value, atol=0.03)


def test_predictions():
    found = fit()
    far = predict_probabilities(found, KERNEL, jnp.zeros((1, 3)), jnp.full(1, 2.0))
    np.testing.assert_allclose(far, 1.0 / 3.0, rtol=1e-9)
    # At the inputs: the posterior there, integrated by hand over a million draws.
    here = predict_probabilities(found, KERNEL, KERNEL, jnp.diagonal(KERNEL))
    np.testing.assert_allclose(here.sum(axis=1), 1.0, rtol=1e-9)
    rng = np.random.default_rng(0)
    scale = np.sqrt(np.diagonal(found.covariance) + 1.0)
    noisy = np.asarray(found.mean)[:, None] + scale[:, None, None] * rng.normal(size=(3, 400_000, 3))
    share = np.stack([np.bincount(row.argmax(axis=1), minlength=3) for row in noisy]) / 400_000
    np.testing.assert_allclose(here, share, atol=0.004)


def test_a_singular_kernel_and_a_wrong_label():
    twice = KERNEL[jnp.array([0, 0, 2])][:, jnp.array([0, 0, 2])]
    found = multinomial_probit_bayes(twice, jnp.array([0, 1, 2]), num_categories=3)
    assert found.converged and bool(jnp.isfinite(found.bound))
    np.testing.assert_allclose(found.mean[0], found.mean[1], atol=1e-6)
    assert jnp.isnan(multinomial_probit_bayes(KERNEL, jnp.array([0, 1, 3]), num_categories=3).bound)


@pytest.mark.float32
def test_single_precision():
    found = multinomial_probit_bayes(KERNEL.astype(jnp.float32), LABELS, num_categories=3, tol=1e-5)
    assert found.mean.dtype == jnp.float32 and found.converged
    np.testing.assert_allclose(found.bound, fit().bound, rtol=1e-4)
