"""What a model reads beside its arguments, such as a variable of a notebook, may have changed since it ran last."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.design import draws_of, expected_information_gain
from numpyro_ext.infer import EP, SMC, LaplaceApproximation, VariationalGaussian

SETTINGS = {"slope": 1.0, "x": jnp.ones(3)}


def model(y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(SETTINGS["slope"] * SETTINGS["x"] * level, 1.0), obs=y)


@pytest.fixture
def settings(monkeypatch):
    def change(slope, x):
        monkeypatch.setitem(SETTINGS, "slope", slope)
        monkeypatch.setitem(SETTINGS, "x", jnp.full(3, x))
        weight = 3.0 * (slope * x) ** 2
        return slope * x * 3.0 / (1.0 + weight), 1.0 / (1.0 + weight)

    return change


@pytest.mark.parametrize("engine", [EP, LaplaceApproximation, VariationalGaussian])
def test_engines_fit_the_model_as_it_is_now(engine, settings):
    for values in ((1.0, 1.0), (2.0, 1.0), (2.0, -0.5)):
        mean, variance = settings(*values)
        fitted = engine(model, progress_bar=False)
        fitted.run(jax.random.key(0), jnp.ones(3))
        np.testing.assert_allclose(fitted.posterior["level"].mean, mean, rtol=1e-6)
        np.testing.assert_allclose(fitted.posterior["level"].variance, variance, rtol=1e-6)


def test_particles_are_of_the_model_as_it_is_now(settings):
    for values in ((1.0, 1.0), (2.0, 1.0), (2.0, -0.5)):
        mean, variance = settings(*values)
        smc = SMC(model, num_particles=2000, progress_bar=False)
        smc.run(jax.random.key(0), jnp.ones(3))
        np.testing.assert_allclose(jnp.mean(smc.get_samples()["level"]), mean, atol=4.0 * np.sqrt(variance / 2000))


def test_scores_of_draws_are_of_the_model_as_it_is_now():
    scale = 1.0

    def answers(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Bernoulli(logits=scale * slope * x), obs=y)

    draws = {"slope": jax.random.normal(jax.random.key(0), (200,))}

    def score():
        return expected_information_gain(draws_of(draws, model=answers), jnp.array([1.0, 2.0]))["y"]

    first = score()
    scale = 2.0
    # twice the scale at one input is the scale at twice the input
    np.testing.assert_allclose(score()[0], first[1], rtol=1e-12)
    scale = 0.0
    np.testing.assert_allclose(score(), 0.0, atol=1e-12)
