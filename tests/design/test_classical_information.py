"""Fisher information of observations against the formulas of item-response models."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import integrate, stats

from numpyro_ext.design import draws_of, expected_information_gain, maximum_information
from numpyro_ext.infer import EP

SLOPE = np.array([0.5, 1.0, 1.5, 2.0, 1.2])
INTERCEPT = np.array([0.0, 1.0, -1.0, 0.5, 2.0])


def two_parameter_logistic(slope, intercept, y=None, seen=True):
    trait = numpyro.sample("trait", dist.Normal(0.3, 1.2))
    with numpyro.handlers.mask(mask=seen):
        numpyro.sample("y", dist.Bernoulli(logits=slope * trait + intercept), obs=y)


@pytest.fixture(scope="module")
def engine():
    fitted = EP(two_parameter_logistic)
    seen = np.array([True, False, False, False, False])
    fitted.run(random.key(0), SLOPE, INTERCEPT, np.ones(5, int), seen)
    return fitted


@pytest.mark.parametrize("at", ["mean", "draws"])
def test_items_of_a_2pl_have_the_information_of_the_formula(engine, at):
    mean, variance = float(engine.posterior["trait"].mean), float(engine.posterior["trait"].variance)

    def information(theta):
        p = stats.logistic.cdf(SLOPE * theta + INTERCEPT)
        return SLOPE**2 * p * (1.0 - p)

    expected = information(mean)
    if at == "draws":
        density = stats.norm(mean, np.sqrt(variance)).pdf
        expected = integrate.quad_vec(lambda t: density(t) * information(t), -15, 15, epsabs=1e-12)[0]
    gain = 0.5 * np.log1p(variance * expected)
    found = maximum_information(engine, at=at)["y"]
    assert found[0] == -np.inf
    np.testing.assert_allclose(found[1:], gain[1:], rtol=1e-9)


@pytest.mark.thorough
def test_several_traits_are_scored_by_determinants_and_nuisances_left_out():
    x = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 2.0], [1.0, -1.0]])
    covariance = np.array([[1.0, 0.4], [0.4, 2.0]])

    def model(x, y=None, seen=True):
        trait = numpyro.sample("trait", dist.MultivariateNormal(jnp.zeros(2), covariance))
        with numpyro.handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(x @ trait, 0.7), obs=y)

    fitted = EP(model)
    fitted.run(random.key(0), x, np.ones(4), np.array([True, False, False, False]))
    precision = np.linalg.inv(covariance) + np.outer(x[0], x[0]) / 0.49
    posterior = np.linalg.inv(precision)
    after = np.stack([np.linalg.inv(precision + np.outer(row, row) / 0.49) for row in x[1:]])
    expected = 0.5 * (np.linalg.slogdet(posterior)[1] - np.linalg.slogdet(after)[1])
    np.testing.assert_allclose(maximum_information(fitted)["y"][1:], expected, rtol=1e-7)
    about_first = maximum_information(fitted, focus={"trait": [0]})["y"][1:]
    np.testing.assert_allclose(about_first, 0.5 * np.log(posterior[0, 0] / after[:, 0, 0]), rtol=1e-6)
    # With Gaussian noise it is the information itself.
    np.testing.assert_allclose(maximum_information(fitted)["y"], expected_information_gain(fitted)["y"], rtol=1e-6)


def test_draws_and_unknown_options_are_refused(engine):
    posterior = {"trait": np.array([0.1, 0.4, 1.0])}
    drawn = draws_of(posterior, model=two_parameter_logistic, args=(SLOPE, INTERCEPT))
    with pytest.raises(ValueError, match="take expected_information_gain"):
        maximum_information(drawn, SLOPE, INTERCEPT)
    with pytest.raises(ValueError, match="at"):
        maximum_information(engine, at="mode")
