"""Annealed importance sampling against exact evidences and an independent importance sampler."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import multivariate_normal, norm, poisson

from numpyro_ext.infer import annealed_importance_sampling
from numpyro_ext.infer.monte_carlo.annealed_importance_sampling import power_temperatures

REFERENCE = json.loads((Path(__file__).parents[2] / "reference" / "khan_gpc_elbo.json").read_text())
KEY = jax.random.key(0)


def check(result, expected, largest_error, other_error=0.0):
    """Inside three standard errors, which must be small enough for that to say something."""
    assert result.standard_error < largest_error
    assert abs(result.log_evidence - expected) < 3 * np.hypot(result.standard_error, other_error)


def classification(x, y, log_length, log_scale):
    covariance = jnp.exp(2 * log_scale - 0.5 * jnp.exp(-2 * log_length) * (x[:, None] - x) ** 2)
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance + REFERENCE["jitter"] * jnp.eye(x.size)))
    numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_gaussian_process_classification(number):
    case = REFERENCE["results"][number]
    x, y = jnp.ravel(jnp.asarray(REFERENCE["X"])), jnp.asarray(REFERENCE["y"])
    result = annealed_importance_sampling(
        classification, KEY, x, y, case["log_l"], case["log_sigma"], num_chains=1000, num_temperatures=200
    )
    check(result, case["is_logZ"], 0.035, case["is_se"])
    assert case["bounds"]["exact"]["elbo"] < result.log_evidence
    assert 400 < result.effective_sample_size <= 1000


def all_priors(x, y):
    """Scalars, a covariance and a precision; the noise is Gaussian, so the evidence is known."""
    level = numpyro.sample("level", dist.Normal(0.3, 2.0))
    slopes = numpyro.sample("slopes", dist.MultivariateNormal(0.0, jnp.array([[1.0, 0.4], [0.4, 0.5]])))
    other = numpyro.sample("other", dist.MultivariateNormal(0.0, precision_matrix=jnp.array([[2.0, 0.5], [0.5, 1.0]])))
    numpyro.sample("y", dist.Normal(level + x[:, :2] @ slopes + x[:, 2:] @ other, 0.7), obs=y)


@pytest.mark.thorough
def test_gaussian_likelihood():
    generator = np.random.default_rng(3)
    x, y = generator.normal(size=(6, 4)), generator.normal(size=6)
    covariance = 4.0 + 0.49 * np.eye(6) + x[:, :2] @ np.array([[1.0, 0.4], [0.4, 0.5]]) @ x[:, :2].T
    covariance += x[:, 2:] @ np.linalg.inv(np.array([[2.0, 0.5], [0.5, 1.0]])) @ x[:, 2:].T
    expected = multivariate_normal.logpdf(y, np.full(6, 0.3), covariance)
    result = annealed_importance_sampling(all_priors, KEY, jnp.asarray(x), jnp.asarray(y), num_chains=1000)
    check(result, expected, 0.04)
    # The evidence is in hand: the adapted schedule beats the power schedule of as many steps.
    plain = annealed_importance_sampling(
        all_priors, KEY, jnp.asarray(x), jnp.asarray(y), num_chains=1000, temperatures=power_temperatures(100)
    )
    check(plain, expected, 0.06)
    assert result.standard_error < plain.standard_error


def one_level(y, scale):
    level = numpyro.sample("level", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Bernoulli(logits=level), obs=y)


@pytest.mark.slow
def test_half_of_the_logistic_function_and_plain_importance_sampling():
    result = annealed_importance_sampling(one_level, KEY, jnp.array(1), 2.0, num_chains=4000, num_temperatures=20)
    check(result, np.log(0.5), 0.005)
    single = annealed_importance_sampling(one_level, KEY, jnp.array(1), 2.0, num_chains=4000, num_temperatures=1)
    check(single, np.log(0.5), 0.02)
    np.testing.assert_array_equal(single.temperatures, [0.0, 1.0])
    levels = expit(2.0 * norm.ppf((np.arange(4000) + 0.5) / 4000))
    np.testing.assert_allclose(np.std(np.exp(single.log_weights)), np.std(levels), rtol=0.03)


def rectified(y):
    level = numpyro.sample("level", dist.Normal(0.0, 1.5))
    with numpyro.plate("observations", y.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.maximum(level, 0.0)), obs=y)


@pytest.mark.thorough
def test_chains_that_begin_where_the_likelihood_is_zero():
    y = np.array([2, 1, 4])
    integral = quad(lambda f: np.prod(poisson.pmf(y, f)) * norm.pdf(f, scale=1.5), 0, 20)[0]
    result = annealed_importance_sampling(rectified, KEY, jnp.asarray(y), num_chains=4000, num_temperatures=20)
    check(result, np.log(integral), 0.03)
    assert 0.4 < np.mean(np.isneginf(result.log_weights)) < 0.6


def scaled(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Bernoulli(logits=level), obs=y)


def flat(y):
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.sample("y", dist.Bernoulli(logits=level), obs=y)


@pytest.mark.thorough
def test_refusals():
    y = jnp.array(1)
    with pytest.raises(ValueError, match="give a value for 'scale'"):
        annealed_importance_sampling(scaled, KEY, y)
    with pytest.raises(ValueError, match="flat prior"):
        annealed_importance_sampling(flat, KEY, y)
    with pytest.raises(ValueError, match="increase strictly"):
        annealed_importance_sampling(scaled, KEY, y, temperatures=[0.0, 0.5, 0.5, 1.0])
    with pytest.raises(ValueError, match="begins with 0"):
        annealed_importance_sampling(scaled, KEY, y, temperatures=[0.1, 1.0])
    with pytest.raises(ValueError, match="num_chains"):
        annealed_importance_sampling(scaled, KEY, y, num_chains=1)
    given = annealed_importance_sampling(
        scaled, KEY, y, hyper_values={"scale": 2.0}, num_chains=4000, num_temperatures=20
    )
    check(given, np.log(0.5), 0.005)
