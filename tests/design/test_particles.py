"""Weighted particles as a source of scores and in sequential designs, beside an engine that knows the algebra."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.design import SequentialDesign, draws_of, expected_information_gain
from numpyro_ext.infer import EP, SMC
from tests.compilations import compiled_programs

X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 2)))
Y = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1])
SEEN = np.arange(12) < 2


def probit(x, y=None, seen=True):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(x @ slopes)), obs=y)


@pytest.fixture(scope="module")
def sampler():
    smc = SMC(probit, num_particles=4000, progress_bar=False)
    smc.run(random.key(0), X, Y, SEEN)
    return smc


@pytest.mark.thorough
def test_scores_of_weighted_particles(sampler):
    engine = EP(probit, progress_bar=False)
    engine.run(random.key(0), X, Y, SEEN)
    exact, found = expected_information_gain(engine)["y"], expected_information_gain(sampler)["y"]
    np.testing.assert_array_equal(np.isneginf(found), SEEN)
    np.testing.assert_allclose(found[~SEEN], exact[~SEEN], atol=0.02)
    source = draws_of(sampler)
    np.testing.assert_allclose(source.weights, sampler.weights, rtol=1e-12)


def counts(x, y=None, exposure=1):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("y", dist.Poisson(exposure * jnp.exp(0.3 * (x @ slopes))), obs=y)


def real(x, y=None, exposure=1):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ slopes, exposure), obs=y)


def by_values(x, y=None):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    number = int(np.sum(np.asarray(x) > 0.0))  # a model that needs the values of its arguments
    numpyro.sample("y", dist.Bernoulli(logits=(x @ slopes)[:number]), obs=y)


@pytest.mark.parametrize("model", [counts, real])
def test_scores_of_other_draws_and_candidates_compile_nothing(model):
    """And they are those of programs that are made anew."""
    draws = [np.random.default_rng(seed).normal(size=(50, 2)) for seed in range(2)]

    def gain(number, model):
        return expected_information_gain(draws_of({"slopes": draws[number]}, model=model), X[number : number + 5])["y"]

    gain(0, model)
    with compiled_programs() as compiled:
        found = gain(1, model)
    assert not compiled
    np.testing.assert_allclose(found, gain(1, lambda x, y=None: model(x, y)), rtol=1e-12)


def test_arguments_whose_values_a_model_needs():
    draws = np.random.default_rng(0).normal(size=(50, 2))
    for x in (X, X[::-1], X + 0.5):  # of one shape
        number = int(np.sum(np.asarray(x) > 0.0))
        found = expected_information_gain(draws_of({"slopes": draws}, model=by_values), x)["y"]
        p = 1.0 / (1.0 + np.exp(-draws @ np.asarray(x)[:number].T))

        def entropy(p):
            return -p * np.log(p) - (1.0 - p) * np.log1p(-p)

        np.testing.assert_allclose(found, entropy(p.mean(0)) - entropy(p).mean(0), rtol=1e-8)


@pytest.mark.parametrize("scale", [1, 2.0])
def test_numbers_among_the_arguments_are_not_mixed_up(scale):
    draws = np.random.default_rng(0).normal(size=(50, 2))
    found = expected_information_gain(draws_of({"slopes": draws}, model=real), X[:3], exposure=scale)["y"]
    alone = expected_information_gain(draws_of({"slopes": draws}, model=lambda x, y=None: real(x, y, scale)), X[:3])
    np.testing.assert_allclose(found, alone["y"], rtol=1e-12)


@pytest.mark.thorough
def test_a_design_updates_the_particles(sampler):
    smc = SMC(probit, num_particles=4000, progress_bar=False)
    smc.run(random.key(0), X, Y, SEEN)
    design = SequentialDesign(smc, refit_every="evidence")
    assert "runs of SMC" in repr(design)
    for _ in range(3):
        place = design.propose()
        design.observe(place, Y[place])
    assert design.num_observed == 5
    assert int(smc.history["stage"][-1]) == 3  # updates, no runs
    assert not design.history["is_refit"].values.any()
    engine = EP(probit, progress_bar=False)
    engine.run(random.key(0), X, Y, design._places.seen["y"])
    assert abs(design.log_evidence - engine.log_evidence) < 0.01 + 3.0 * smc.log_evidence.standard_error
    with pytest.raises(ValueError, match="has a value already"):
        design.observe(place, 1)


def rates(counts=None, shots=None):
    """Several coins, thrown again and again."""
    bias = numpyro.sample("bias", dist.Beta(1, 1).expand([3]).to_event(1))
    if counts is None:
        numpyro.sample("shot", dist.Bernoulli(probs=bias))
    else:
        numpyro.sample("counts", dist.Binomial(shots, probs=bias), obs=counts)


def thrown(arguments, place, value):
    arguments["counts"] = arguments["counts"].at[place].add(value)
    arguments["shots"] = arguments["shots"].at[place].add(1)
    return arguments


@pytest.mark.thorough
def test_experiments_that_are_made_again():
    smc = SMC(rates, num_particles=4000, progress_bar=False)
    smc.run(random.key(0), jnp.array([8, 1, 0]), jnp.array([16, 2, 0]))
    design = SequentialDesign(smc, candidates=(None,), enter=thrown)
    # information of a throw falls with the number of throws
    scores = design.scores()["shot"]
    assert scores[2] > scores[1] > scores[0] > 0
    place = design.propose()
    assert place == 2
    design.observe(place, 1)
    exact = np.log(0.5)  # of the first throw of a coin with a flat prior
    assert abs(float(design.history["log_predictive"][0]) - exact) < 0.1
    np.testing.assert_array_equal(smc._args[1], [16, 2, 1])
    assert abs(smc.weights @ smc.particles["bias"][:, 2] - 2 / 3) < 0.03
    assert float(design.history["score"][0]) == pytest.approx(float(scores[2]))
    with pytest.raises(TypeError, match="go together"):
        SequentialDesign(smc, candidates=(None,))
