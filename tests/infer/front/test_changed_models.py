"""What a model reads beside its arguments, such as a variable of a notebook, may have changed since it ran last."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.design import draws_of, expected_information_gain
from numpyro_ext.infer import EP, SMC, LaplaceApproximation, VariationalGaussian
from tests.tiers import thorough

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


@pytest.mark.parametrize("engine", [EP, *thorough(LaplaceApproximation, VariationalGaussian)])
def test_engines_fit_the_model_as_it_is_now(engine, settings):
    for values in ((1.0, 1.0), (2.0, 1.0), (2.0, -0.5)):
        mean, variance = settings(*values)
        fitted = engine(model, progress_bar=False)
        fitted.run(jax.random.key(0), jnp.ones(3))
        np.testing.assert_allclose(fitted.posterior["level"].mean, mean, rtol=1e-6)
        np.testing.assert_allclose(fitted.posterior["level"].variance, variance, rtol=1e-6)


@pytest.mark.thorough
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


def counts(group, y=None, prior_scale=1.0):
    scale = numpyro.sample("scale", dist.HalfNormal(prior_scale))
    with numpyro.plate("groups", 4):
        shift = numpyro.sample("shift", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Poisson(jnp.exp(shift[group])), obs=y)


GROUP, Y = np.repeat(np.arange(4), 3), np.array([4, 2, 5, 0, 1, 1, 3, 6, 4, 9, 5, 7])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (partial(EP), partial(EP, power=0.5)),
        (partial(EP, hyper_tol=1e-2), partial(EP, hyper_tol=1e-6)),
        (partial(LaplaceApproximation), partial(LaplaceApproximation)),
    ],
    ids=["another algorithm", "another tolerance", "another number in the model"],
)
def test_a_state_of_another_run_is_a_place_to_start_from(first, then):
    def fit(engine, prior_scale, state=None):
        engine = engine(counts, integrate="none", progress_bar=False)
        engine.run(jax.random.key(0), GROUP, Y, prior_scale=prior_scale, init_state=state)
        return engine

    state = fit(first, 1.0).last_state
    prior_scale = 0.1 if first.func is then.func is LaplaceApproximation else 1.0
    fresh, warm = fit(then, prior_scale), fit(then, prior_scale, state)
    assert warm.diagnostics.converged
    np.testing.assert_allclose(warm.hyper["scale"].value, fresh.hyper["scale"].value, rtol=1e-5)
    np.testing.assert_allclose(warm.posterior["shift"].mean, fresh.posterior["shift"].mean, rtol=1e-4)


@pytest.mark.thorough
def test_keys_of_models_are_those_of_other_processes():
    """Else a state from a file would never be gone on with."""
    code = """
import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
from jax.scipy.special import ndtri
from numpyro_ext.structure import read_latent_gaussian
from numpyro_ext.structure.program.captured import stable_text

def model(x, y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, scale))
    walk = jax.lax.scan(lambda c, z: (0.5 * c + z, c), 0.0, jax.nn.softplus(x) + ndtri(0.3))[1]
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(level + walk), scale), obs=y)

print(stable_text(read_latent_gaussian(model, (np.arange(3.0), np.arange(3))).key))
"""
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert len(texts.pop()) > 1000
