"""Linear measurements of a site: gains against dense algebra and reference values, and greedy choices among them."""

import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext.design import linear_information_gain, select_rows
from numpyro_ext.infer import EP
from numpyro_ext.linalg import from_matrix

CORE = json.loads((Path(__file__).parents[1] / "reference" / "active_bald_core.json").read_text())
LINEAR = CORE["linear_gaussian"]


def regression(prior, x, y, noise):
    weights = numpyro.sample("weights", dist.MultivariateNormal(jnp.zeros(len(prior)), prior))
    numpyro.sample("y", dist.Normal(x @ weights, noise), obs=y)


@pytest.fixture(scope="module")
def engine():
    found = EP(regression, progress_bar=False)
    arrays = [np.array(LINEAR[name]) for name in ("prior_cov", "X", "y")]
    found.run(random.key(0), *arrays, np.sqrt(LINEAR["noise_var"]))
    return found


def dense_gain(covariance, rows, noise, focus=None):
    """By determinants of the covariance of what is of interest, before and after."""
    after = np.linalg.inv(np.linalg.inv(covariance) + rows.T @ (rows / np.broadcast_to(noise, len(rows))[:, None]))
    at = np.arange(len(covariance)) if focus is None else np.asarray(focus)
    logdet = [np.linalg.slogdet(matrix[np.ix_(at, at)])[1] for matrix in (covariance, after)]
    return 0.5 * (logdet[0] - logdet[1])


def test_reference_values(engine):
    row = [LINEAR["x_query"]]
    np.testing.assert_allclose(linear_information_gain(engine, row), LINEAR["U_nats"], atol=1e-10)
    focus = {"weights": LINEAR["focus_idx"]}
    np.testing.assert_allclose(linear_information_gain(engine, row, focus=focus), LINEAR["U_focused_nats"], atol=1e-10)
    variance = engine.posterior["weights"].row_variance(row)
    np.testing.assert_allclose(variance, np.array(row) @ np.array(LINEAR["post_cov"]) @ row[0], atol=1e-10)


def test_rows_together_and_in_focus(engine):
    rng = np.random.default_rng(0)
    rows, noise = rng.normal(size=(4, 10)), np.array([0.1, 1.0, 0.5, 3.0])
    covariance = np.array(LINEAR["post_cov"])
    together = linear_information_gain(engine, rows, noise, joint=True)
    np.testing.assert_allclose(together, dense_gain(covariance, rows, noise), atol=1e-10)
    for focus in ([0, 3], [9], slice(2, 7)):
        at = np.arange(10)[focus]
        gains = linear_information_gain(engine, rows, noise, focus={"weights": focus})
        single = [dense_gain(covariance, rows[k : k + 1], noise[k], at) for k in range(4)]
        np.testing.assert_allclose(gains, single, atol=1e-10)
        joint = linear_information_gain(engine, from_matrix(rows), noise, focus={"weights": focus}, joint=True)
        np.testing.assert_allclose(joint, dense_gain(covariance, rows, noise, at), atol=1e-10)
    # all of it is no focus; the same row again is a repetition
    np.testing.assert_allclose(
        linear_information_gain(engine, rows, focus="weights"), linear_information_gain(engine, rows)
    )
    twice = linear_information_gain(engine, rows[[0, 0]], 1.0, joint=True)
    np.testing.assert_allclose(twice, linear_information_gain(engine, rows[:1], 0.5)[0], atol=1e-12)


def test_a_greedy_choice_is_that_of_refits(engine):
    rng = np.random.default_rng(1)
    rows, covariance = rng.normal(size=(12, 10)), np.array(LINEAR["post_cov"])
    rows[1] = rows[0] = 3.0 * rows[0]
    for focus, cost in ((None, None), ([0, 1, 2], None), (None, np.linspace(1.0, 2.0, 12))):
        batch = select_rows(engine, rows, 5, 0.5, focus=None if focus is None else {"weights": focus}, cost=cost)
        chosen, total = [], 0.0
        for gain in batch.gains:
            left = [k for k in range(12) if k not in chosen]
            after = [dense_gain(covariance, rows[[*chosen, k]], 0.5, focus) for k in left]
            rate = (np.array(after) - total) / (1.0 if cost is None else cost[left])
            best = int(np.argmax(rate))
            np.testing.assert_allclose(gain, after[best] - total, atol=1e-10)
            total = after[best]
            chosen.append(left[best])
        # of the two equal rows either may be first
        assert [0 if k == 1 and 0 not in batch else k for k in batch] == chosen
        np.testing.assert_allclose(batch.information, total, atol=1e-9)
        assert batch.guarantee.startswith("at least 1 - 1/e" if focus is None and cost is None else "none")
    # and of all choices of three it is no worse than the bound
    three = select_rows(engine, rows, 3, 0.5)
    best = max(dense_gain(covariance, rows[list(some)], 0.5) for some in itertools.combinations(range(12), 3))
    assert (1 - np.exp(-1)) * best <= three.information <= best + 1e-12


def test_with_a_nuisance_the_second_observation_may_tell_more():
    expected = CORE["submodularity"]
    joint = np.array([[2.0, 1.0, 1.0], [1.0, 2.0, 0.0], [1.0, 0.0, 2.0]])
    noise = 0.5
    prior = joint - np.diag([noise, noise, 0.0])  # observations have the covariance of the example

    def model(y):
        u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(3), prior))
        numpyro.sample("y", dist.Normal(u[0] + 0.0 * y, 1e6), obs=y)

    engine = EP(model, progress_bar=False)
    engine.run(random.key(0), jnp.zeros(1))
    rows, focus = np.eye(3)[:2], {"u": 2}
    gains = linear_information_gain(engine, rows, noise, focus=focus)
    np.testing.assert_allclose(gains, [expected["IG_y1"], expected["IG_y2"]], atol=1e-10)
    joint_gain = linear_information_gain(engine, rows, noise, focus=focus, joint=True)
    np.testing.assert_allclose(joint_gain, expected["IG_y1y2"], atol=1e-10)
    batch = select_rows(engine, rows, 2, noise, focus=focus)
    assert list(batch) == [0, 1] and "nuisance" in batch.guarantee
    np.testing.assert_allclose(batch.gains[1], expected["increment_after_y1"], atol=1e-10)


def test_what_cannot_be_asked_is_said(engine):
    rows = np.eye(10)[:3]

    def counts(y):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        v = numpyro.sample("v", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(u[0] + v)), obs=y)

    two = EP(counts, progress_bar=False)
    two.run(random.key(0), jnp.array([1, 3]))
    nan = np.where(np.eye(10)[:1] > 0, np.nan, 0.0)
    for call, message in (
        (lambda: linear_information_gain(engine, np.eye(9)), r"shape \(9, 9\); it must be \(r, 10\)"),
        (lambda: linear_information_gain(engine, np.ones(10)), r"must be \(r, 10\)"),
        (lambda: linear_information_gain(engine, nan), "must be finite"),
        (lambda: linear_information_gain(engine, rows, [1, 0, 1]), "noise_variance must be positive"),
        (lambda: linear_information_gain(engine, rows, [1, 1]), r"noise_variance has the shape \(2,\)"),
        (lambda: linear_information_gain(engine, rows, focus={"weights": 10}), "whose shape is"),
        (lambda: linear_information_gain(engine, rows, focus=[]), "focus names no site"),
        (lambda: linear_information_gain(engine, rows, focus={"weights": []}), "no element of 'weights'"),
        (lambda: linear_information_gain(engine, rows, site="slopes"), "No exact posterior for 'slopes'"),
        (lambda: linear_information_gain(two, [[1, 0]], 1), "give site, one of 'u', 'v'"),
        (lambda: linear_information_gain(two, [[1, 0]], site="u"), "Give the noise_variance"),
        (lambda: linear_information_gain(two, [[1, 0]], 1, "u", focus="v"), "both have to be in one site"),
        (lambda: linear_information_gain({}, rows), "an engine of this package"),
        (lambda: select_rows(engine, rows, 4), "4 candidates are asked for, and there are 3"),
        (lambda: select_rows(engine, rows, 0), "size must be a whole number"),
        (lambda: select_rows(engine, rows, 1, cost=[1, 0, 1]), "Costs must be positive"),
    ):
        with pytest.raises((ValueError, KeyError, TypeError), match=message):
            call()
    lists = linear_information_gain(engine, rows.astype(int).tolist(), 1)
    np.testing.assert_allclose(lists, linear_information_gain(engine, rows.astype(np.float32), np.float32(1)))
