"""The response of a fitted model against the formula of its items."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import jit, random
from scipy import stats

from numpyro_ext.design import draws_of
from numpyro_ext.infer import EP, AdaptiveQuadrature
from numpyro_ext.models import item_response, item_response_records
from numpyro_ext.psychometrics import AdaptiveTest, category_probabilities, response_of
from numpyro_ext.psychometrics import fisher_information as eager_information

fisher_information = jit(eager_information, static_argnums=0)


def two_parameter_logistic(response=None, *, num_people, num_items):
    with numpyro.plate("items", num_items):
        a = numpyro.sample("discrimination", dist.LogNormal(0, 0.5))
        d = numpyro.sample("intercept", dist.Normal(0, 3))
    with numpyro.plate("people", num_people):
        trait = numpyro.sample("trait", dist.Normal(0, 1))
    numpyro.deterministic("difficulty", -d / a)
    numpyro.sample("response", dist.Bernoulli(logits=a * trait[:, None] + d), obs=response)


@pytest.mark.thorough
def test_any_model_of_people_by_items_is_a_response_at_means_and_at_draws():
    rng = np.random.default_rng(0)
    a, d = np.exp(rng.normal(size=(4, 3)) / 3), rng.normal(size=(4, 3))
    samples = {"discrimination": a, "intercept": d, "trait": np.zeros((4, 5)), "difficulty": np.full((4, 3), np.nan)}
    shape = {"num_people": 5, "num_items": 3}
    source = draws_of(samples, model=two_parameter_logistic, args=(np.zeros((5, 3), int),), kwargs=shape)
    response = response_of(source)
    theta = rng.normal(size=(4, 3))  # more points than people, and in two axes
    p = stats.logistic.cdf(a.mean(0) * theta[..., None] + d.mean(0))
    np.testing.assert_allclose(category_probabilities(response, theta)[..., 1], p, rtol=1e-12)
    np.testing.assert_allclose(fisher_information(response, theta), a.mean(0) ** 2 * p * (1 - p), rtol=1e-12)
    assert response(0.0).batch_shape == (3,) and response.num_items == 3

    drawn = response_of(source, draws=4, rng_key=random.key(1))
    assert drawn(theta).batch_shape == (4, 4, 3, 3)
    found = category_probabilities(drawn, theta)[..., 1]
    expected = stats.logistic.cdf(a[:, None, None] * theta[..., None] + d[:, None, None])
    order = [np.flatnonzero(np.isclose(expected, row).all((1, 2, 3)))[0] for row in np.asarray(found)]
    assert sorted(order) == [0, 1, 2, 3]
    np.testing.assert_allclose(fisher_information(drawn, theta), (a**2)[:, None, None][order] * found * (1 - found))


@pytest.mark.thorough
def test_items_of_several_families_stand_in_their_order_and_records_are_a_table():
    rng = np.random.default_rng(2)
    family, sizes = ["graded", "2pl", "graded", "3pl"], [3, 2, 2, 2]
    samples = {"discrimination_graded": [[1.3, 0.7]], "cutpoints_graded_3": [[[-1.0, 0.5]]],
               "cutpoints_graded_2": [[[0.2]]], "discrimination_2pl": [[0.8]], "intercept_2pl": [[0.4]],
               "discrimination_3pl": [[1.5]], "intercept_3pl": [[-0.3]], "guessing_3pl": [[0.25]],
               "trait": np.zeros((1, 2))}  # fmt: skip
    samples = {name: np.asarray(value) for name, value in samples.items()}
    s, theta = stats.logistic.cdf, np.linspace(-2, 3, 40)  # more than the model has people at once
    above = s(1.3 * theta[:, None] - np.array([-1.0, 0.5]))
    expected = np.zeros((40, 4, 3))
    expected[:, 0] = -np.diff(np.concatenate([np.ones((40, 1)), above, np.zeros((40, 1))], -1), axis=-1)
    for k, p in ((1, s(0.8 * theta + 0.4)), (2, s(0.7 * theta - 0.2)), (3, 0.25 + 0.75 * s(1.5 * theta - 0.3))):
        expected[:, k, :2] = np.stack([1 - p, p], -1)
    table = np.stack([rng.integers(0, size, 2) for size in sizes], -1)
    options = {"family": family, "num_categories": sizes}
    person, item = np.repeat([0, 1], 4), np.tile(np.arange(4), 2)
    calls = [
        (item_response, (table,), options),
        (item_response_records, (person, item, table.ravel()), {**options, "num_people": 2, "num_items": 4}),
    ]
    for model, args, kwargs in calls:
        response = response_of(draws_of(samples, model=model, args=args, kwargs=kwargs))
        np.testing.assert_allclose(category_probabilities(response, theta), expected, atol=1e-12)
    draws = response_of(draws_of(samples, model=partial(item_response, **options), args=(table,)), draws=2)
    assert draws(theta).batch_shape == (2, 40, 4) and draws.num_items == 4


def test_answers_that_depend_on_more_than_the_trait_are_refused():
    def with_covariate(response, x):
        trait = numpyro.sample("trait", dist.Normal(0, 1).expand([4]))
        numpyro.sample("response", dist.Bernoulli(logits=(trait + x)[:, None] * jnp.ones(2)), obs=response)

    source = draws_of({"trait": np.zeros((2, 4))}, model=with_covariate, args=(np.zeros((4, 2), int), np.arange(4.0)))
    with pytest.raises(ValueError, match="same trait answer differently"):
        response_of(source)
    with pytest.raises(ValueError, match="no site 'ability'"):
        response_of(source, trait="ability")


@pytest.mark.thorough
def test_items_of_an_engine_are_drawn_with_their_standard_errors():
    rng = np.random.default_rng(0)
    y = (rng.random((60, 3)) < stats.logistic.cdf(rng.normal(size=60)[:, None])).astype(int)

    def rasch(response):
        d = numpyro.param("intercept", jnp.zeros(3))
        trait = numpyro.sample("trait", dist.Normal(0, 1).expand([60]))
        numpyro.sample("response", dist.Bernoulli(logits=trait[:, None] + d), obs=response)

    engine = EP(rasch)
    engine.run(random.key(0), y)
    logits = response_of(engine, draws=4000)(0.0).logits
    d = np.asarray(logits[..., 1] - logits[..., 0])
    estimate = engine.hyper["intercept"]
    np.testing.assert_allclose(d.mean(0), estimate.value, atol=4 * np.max(estimate.standard_error) / np.sqrt(4000))
    np.testing.assert_allclose(d.std(0), estimate.standard_error, rtol=4 / np.sqrt(8000))


@pytest.mark.thorough
def test_scores_by_a_fit_that_did_not_converge_say_so():
    rng = np.random.default_rng(0)
    y = (rng.random((200, 4)) < stats.logistic.cdf(2.0 * rng.normal(size=200)[:, None])).astype(int)
    engine = AdaptiveQuadrature(item_response, max_hyper_steps=2, progress_bar=False)
    with pytest.warns(UserWarning, match="did not converge in 2 steps"):
        engine.run(random.key(0), y, family="2pl")
    with pytest.warns(UserWarning, match="has not converged, and the items are those"):
        test = AdaptiveTest(engine, items="point")
    assert test.propose() in range(4)
    with pytest.warns(UserWarning, match="has not converged, and new groups are scored"):
        new = engine.fold_in(random.key(1), y[:3], family="2pl")
    assert not new.diagnostics.converged
    assert "has not converged" in new.diagnostics.messages[-1]
