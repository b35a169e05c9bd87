"""Calibration: exact posteriors have uniform ranks, and one that is too narrow is caught."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

from benchmarks.evidence.calibration import logistic_regression, poisson_intercepts, preferences
from numpyro_ext.infer import EP
from numpyro_ext.infer.calibration import Calibration, calibrate

NUM_ROWS, NUM_SIMULATIONS = 4, 150
X = np.linspace(-1, 1, NUM_ROWS)


def line(x, y=None, believed=1.0):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    # A model that is told of data has less noise than the one that makes them, where asked for.
    noise = 1.0 if y is None else believed
    numpyro.sample("y", dist.Normal(slope[0] + slope[1] * x, noise), obs=y)


def coverage(**options):
    found = calibrate(EP(line, num_samples=200), jax.random.key(1), X, num_simulations=NUM_SIMULATIONS, **options)
    return found, found.coverage()["slope"]


@pytest.mark.thorough
def test_ranks_of_an_exact_posterior_are_uniform():
    found, held = coverage()
    assert found.ranks["slope"].shape == (NUM_SIMULATIONS, 2)
    assert found.converged.all() and not found.errors
    for prob, (share, error) in held.items():
        assert abs(share - prob) < 3.5 * error, prob
    assert abs(found.ranks["slope"].mean() / 200 - 0.5) < 3.5 / np.sqrt(12 * NUM_SIMULATIONS)


@pytest.mark.thorough
def test_a_posterior_that_is_too_narrow_is_caught():
    _, held = coverage(believed=0.3)
    assert held[0.8][0] < 0.8 - 5 * held[0.8][1]


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (lambda: numpyro.param("b", 0.0), "'b' is a param"),
        (lambda: numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ())), "'b' has an improper"),
        (lambda: numpyro.factor("b", jnp.zeros(())) or 0.0, "'b' has data, or is a numpyro.factor"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(prior, message):
    def model(y=None):
        shift = prior()
        level = numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(level + shift, 1.0), obs=y)

    with pytest.raises(ValueError, match=message):
        calibrate(EP(model), jax.random.key(0))


def test_observations_have_to_be_found():
    with pytest.raises(ValueError, match="given as None"):
        calibrate(EP(line), jax.random.key(0), X, jnp.zeros(NUM_ROWS))


def test_columns_of_pandas_are_arguments_as_of_a_run():
    def groups(group, y=None):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(effect[group], 1), obs=y)

    column = pd.Series([0, 1, 1, 0], index=[3, 5, 7, 9])
    found = calibrate(EP(groups, progress_bar=False), jax.random.key(0), column, num_simulations=2)
    assert found.ranks["effect"].shape == (2, 2) and not found.errors


def test_ranks_for_arviz_and_as_a_picture():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    generator = np.random.default_rng(0)
    ranks = {"a": generator.integers(0, 101, 400), "b": np.minimum(generator.integers(0, 101, (400, 2)), 60)}
    found = Calibration(ranks, 100, np.ones(400, bool), {})
    group = found.to_arviz()["prior_sbc"]
    assert group["b"].shape == (1, 400, 2)
    np.testing.assert_allclose(group["a"][0], (ranks["a"] + 0.5) / 101)
    even, odd = found.plot()
    (band,) = [patch for patch in even.patches if patch.get_width() == 1.0]
    for axis, is_even in ((even, True), (odd, False)):
        heights = [patch.get_height() for patch in axis.patches if patch.get_width() < 0.5]
        assert len(heights) == 10
        low, high = axis.patches[-1].get_y(), axis.patches[-1].get_y() + axis.patches[-1].get_height()
        assert all(low <= height <= high for height in heights) == is_even
    assert band is even.patches[-1] and even.get_title() == "a"
    matplotlib.pyplot.close("all")


@pytest.mark.slow
@pytest.mark.parametrize("model", [logistic_regression, poisson_intercepts])
def test_intervals_of_ep_hold_what_they_say(model):
    found = calibrate(EP(model, num_samples=400), jax.random.key(0), num_simulations=200)
    assert found.converged.all() and not found.errors
    places = np.concatenate([values.reshape(200, -1) for values in found.places.values()], axis=1)
    assert 0.77 < np.mean(np.abs(places - 0.5) <= 0.4) < 0.83


@pytest.mark.slow
def test_intervals_of_held_out_win_probabilities_hold_what_they_say():
    """Of 20 people who compare eight items, with two shared tastes."""
    engine = EP(preferences, num_samples=400, progress_bar=False)
    found = calibrate(engine, jax.random.key(0), num_simulations=200, quantities="unseen")
    assert found.converged.all() and not found.errors
    assert 0.77 < found.coverage((0.8,))["unseen"][0.8][0] < 0.83
