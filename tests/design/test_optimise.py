"""Inputs of a continuum, found by the gradient of a score."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.design import (
    expected_information_gain,
    gini,
    optimise,
    optimise_design,
    predictive_entropy,
    vote_entropy,
)
from numpyro_ext.design.objective import Objective
from numpyro_ext.infer import EP
from numpyro_ext.infer.front.answers.joint_arguments import NotJoined

RNG = np.random.default_rng(0)
X = np.array([0.0, 1.0, 3.0])


def kernel(x):
    return jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-6 * jnp.eye(x.shape[0])


def curve(x, y=None):
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, kernel(x)))
    numpyro.sample("y", dist.Normal(f, 0.1 + 0.05 * x), obs=y)  # less noise on the left


def surface(x, y=None, labelled=True):
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
    squares = jnp.sum((x[:, None] - x) ** 2, -1)
    covariance = 4.0 * jnp.exp(-0.5 * squares / length**2) + 1e-5 * jnp.eye(x.shape[0])
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance))
    with handlers.mask(mask=labelled):
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(f)), obs=y)


@pytest.fixture(scope="module")
def curved():
    engine = EP(curve, progress_bar=False)
    engine.run(random.key(0), X, np.array([0.1, 0.8, 0.2]))
    return engine


@pytest.fixture(scope="module")
def classified():
    engine = EP(surface, progress_bar=False)
    x = RNG.uniform(-2.0, 2.0, (6, 2))
    engine.run(random.key(0), x, (x[:, 0] > 0.2).astype(int))
    return engine


def objective(engine, argument, x, score, **options):
    run = engine._finished()
    old = optimise._inputs_of(run, argument)
    return Objective(engine, run, (), {}, argument, old, np.asarray(x, float), score, random.key(1), **options)


@pytest.mark.thorough
def test_the_best_input_is_that_of_a_fine_grid(curved):
    found = optimise_design(curved, argument="x", bounds=[0, 3], num_raw=10, num_starts=2)
    grid = np.linspace(0.0, 3.0, 61) + 1e-3
    # one by one: new inputs do not change what is known of each
    scores = expected_information_gain(curved, grid)["y"]
    assert found.converged and found.x.shape == (1,)
    assert found.score >= scores.max() and abs(found.x[0] - grid[np.argmax(scores)]) < 0.05


@pytest.mark.thorough
@pytest.mark.parametrize("score", [expected_information_gain, predictive_entropy, gini, vote_entropy])
def test_slopes_are_differences_of_the_score_itself(classified, score):
    """By EP and over the points of its hyperparameters; of the score as everybody calls it."""
    x, direction, step = np.array([[0.3, -0.4]]), np.array([[0.8, -0.5]]), 1e-4
    at = objective(classified, "x", x, score)
    value, slope = at.value_and_gradient(x)
    ahead, behind = (score(classified, x + s * direction)["y"][0] for s in (step, -step))
    np.testing.assert_allclose(value, score(classified, x)["y"][0], atol=1e-9)
    np.testing.assert_allclose(np.sum(slope * direction), (ahead - behind) / (2.0 * step), atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["noise", "count"])
def test_slopes_of_real_outcomes_and_of_counts_over_hyperparameters(family):
    def model(x, y=None):
        length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
        f = numpyro.sample("f", dist.MultivariateNormal(0.3, kernel(x / length)))
        numpyro.sample("y", dist.Normal(f, 0.1 + 0.05 * x) if family == "noise" else dist.Poisson(jnp.exp(f)), obs=y)

    engine = EP(model, progress_bar=False)
    engine.run(random.key(0), X, np.array([1, 0, 3]))
    x, step = np.array([1.8]), 1e-4
    value, slope = objective(engine, "x", x, expected_information_gain).value_and_gradient(x)
    ahead, behind = (expected_information_gain(engine, x + s)["y"][0] for s in (step, -step))
    np.testing.assert_allclose(value, expected_information_gain(engine, x)["y"][0], atol=1e-9)
    np.testing.assert_allclose(slope[0], (ahead - behind) / (2.0 * step), atol=1e-6)


@pytest.mark.thorough
def test_two_points_tell_together_what_determinants_say(curved):
    x = np.array([0.7, 2.2])
    value, slope = objective(curved, "x", x, expected_information_gain).value_and_gradient(x)

    def information(x):
        K = np.asarray(kernel(jnp.concatenate([X, x])))
        noise = np.square(0.1 + 0.05 * np.concatenate([X, x]))
        seen = K[:3, :3] + np.diag(noise[:3])
        left = K[3:, 3:] - K[3:, :3] @ np.linalg.solve(seen, K[:3, 3:])
        return 0.5 * np.linalg.slogdet(np.eye(2) + left / np.sqrt(np.outer(noise[3:], noise[3:])))[1]

    np.testing.assert_allclose(value, information(x), atol=1e-8)
    steps = 1e-5 * np.eye(2)
    differences = [(information(x + s) - information(x - s)) / 2e-5 for s in steps]
    np.testing.assert_allclose(slope, differences, atol=1e-6)
    both = optimise_design(curved, argument="x", bounds=(0.0, 3.0), size=2, num_raw=20, num_starts=3)
    assert both.score >= value and np.ptp(both.x) > 0.5  # not the best one twice


@pytest.mark.thorough
def test_labels_far_apart_tell_together_the_sum_of_what_each_tells(classified):
    num_draws = 2**14
    x = np.array([[8.0, 8.0], [-8.0, -8.0]])
    value, _ = objective(classified, "x", x, expected_information_gain, num_draws=num_draws).value_and_gradient(x)
    each = expected_information_gain(classified, x)["y"]
    # What a draw says of two labels is between zero and twice log 2: its deviation is half of that at most.
    assert abs(value - each.sum()) < 4.0 * np.log(2.0) / np.sqrt(num_draws)


@pytest.mark.thorough
def test_bounds_hold_and_options_go_with_the_score(classified):
    pandas = pytest.importorskip("pandas")
    bounds = pandas.DataFrame({"low": [-1, 0], "high": [1, 0]}, index=["first", "second"])
    found = optimise_design(
        classified,
        argument="x",
        bounds=bounds,
        score=partial(expected_information_gain, units="bits"),
        starts=[[[0.5, 0.0]]],
    )
    assert -1.0 <= found.x[0, 0] <= 1.0 and found.x[0, 1] == 0.0
    nats = expected_information_gain(classified, found.x)["y"][0]
    np.testing.assert_allclose(found.score, nats / np.log(2.0), atol=1e-8)


def test_what_is_no_design_is_refused_by_name(curved):
    def ask(error, words, **given):
        with pytest.raises(error, match=words):
            optimise_design(curved, **({"argument": "x", "bounds": (0.0, 3.0)} | given))

    ask(ValueError, "argument='z' is none of the arguments of the model", argument="z")
    ask(ValueError, "lower ones not above", bounds=(3.0, 0.0))
    ask(ValueError, "bounds must be finite", bounds=(0.0, np.nan))
    ask(ValueError, r"A point of 'x' has the shape \(\): bounds must be \(low, high\)", bounds=[[0.0, 1.0]] * 2)
    ask(ValueError, "bounds must be numbers", bounds="narrow")
    ask(ValueError, r"starts\[1\] is outside the bounds: \[4.0\]", starts=[1.0, 4.0])
    ask(ValueError, "starts must have the shape", starts=[[[1.0, 2.0]]])
    ask(ValueError, "Several points are chosen by what they tell together", size=2, score=gini)
    ask(ValueError, "size must be an integer", size=0)
    with pytest.raises(ValueError, match="a object does not have: take EP"):
        optimise_design(object(), argument="x", bounds=(0.0, 3.0))


def test_scores_by_numpy_have_no_slope(curved):
    def spread(source, *args, rng_key=None, **kwargs):
        return {name: np.sqrt(np.asarray(o.variance)[0]) for name, o in source.outlooks().items()}

    with pytest.raises(ValueError, match="spread has no derivative, as it computes with NumPy"):
        optimise_design(curved, argument="x", bounds=(0.0, 3.0), score=spread, starts=[1.5])


def test_an_interrupted_search_returns_the_best_so_far(curved):
    calls = []

    def interrupted(source, *args, rng_key=None, **kwargs):
        calls.append(source)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return predictive_entropy(source, *args, rng_key=rng_key, **kwargs)

    with pytest.warns(UserWarning, match="the best point so far"):
        found = optimise_design(curved, argument="x", bounds=(0.0, 3.0), score=interrupted, num_raw=10)
    assert not found.converged and found.num_evaluations == 4 and 0.0 <= found.x[0] <= 3.0


@pytest.mark.thorough
def test_a_model_that_computes_something_of_all_inputs_is_refused():
    def centred(x, y=None):
        f = numpyro.sample("f", dist.MultivariateNormal(0.0, kernel(x / jnp.max(x))))
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    engine = EP(centred, progress_bar=False)
    engine.run(random.key(0), X, np.array([0.1, 0.8, 0.2]))
    with pytest.raises((NotJoined, RuntimeError), match="is not the one that was fitted|does the model branch"):
        optimise_design(engine, argument="x", bounds=(3.5, 6.0), num_raw=5, num_starts=1)
