"""Answers in tables of pandas, in another order or with other labels than in the fit, and the prior of its people."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from jax import random

from numpyro_ext.design import draws_of, expected_information_gain
from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.models import item_response, item_response_records
from numpyro_ext.psychometrics import (
    AdaptiveTest,
    item_fit,
    local_dependence,
    marginal_reliability,
    person_fit,
    response_of,
    simulate_tests,
    test_information,
    test_retest,
)

RNG = np.random.default_rng(0)
ITEMS = list("abcd")
TRAIT = RNG.normal(size=200)
ANSWERS = (RNG.random((200, 4)) < 1 / (1 + np.exp(-1.3 * TRAIT[:, None] + [-1.5, -0.5, 0.5, 1.5]))).astype(int)
TABLE = pd.DataFrame(ANSWERS, columns=ITEMS, index=RNG.permutation(200) + 1000)
RULES = {"information": expected_information_gain}


@pytest.fixture(scope="module")
def engine():
    engine = AdaptiveQuadrature(item_response, progress_bar=False)
    engine.run(random.key(0), TABLE, family="2pl")
    return engine


def as_labels(table, labels=("no", "yes")):
    return table.apply(lambda column: pd.Categorical(np.take(labels, column), categories=labels, ordered=True))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "turned",
    [
        TABLE[["d", "b", "a", "c"]],
        TABLE.sort_index(),
        TABLE.astype("Int64")[["b", "a", "d", "c"]],
        as_labels(TABLE)[["d", "b", "a", "c"]].sort_index(),
    ],
)
def test_statistics_take_items_and_people_by_their_names(engine, turned):
    np.testing.assert_allclose(person_fit(engine, answers=turned).corrected, person_fit(engine).corrected)
    np.testing.assert_allclose(item_fit(engine, answers=turned).p_value, item_fit(engine).p_value)
    np.testing.assert_allclose(local_dependence(engine, answers=turned), local_dependence(engine))
    assert test_retest(engine, turned).agreement == 1.0 == test_retest(engine, turned, first=TABLE).agreement


def test_draws_of_nuts_know_the_names_of_items_too():
    draws = {"trait": TRAIT[None], "discrimination": np.ones((1, 4)), "intercept": np.zeros((1, 4))}
    source = draws_of(draws, model=item_response, args=(TABLE,), kwargs={"family": "2pl", "priors": True})
    assert test_retest(source, TABLE[ITEMS[::-1]]).agreement == 1.0


@pytest.mark.thorough
def test_simulated_tests_take_people_in_the_order_in_which_they_are_given(engine):
    paths = [
        simulate_tests(engine, table, RULES, num_items=2, items="point", show_progress=False)["mean"].values
        for table in (TABLE.sort_index(), as_labels(TABLE.sort_index()[ITEMS[::-1]]))
    ]
    np.testing.assert_allclose(paths[0], paths[1])
    order = np.argsort(TABLE.index)
    straight = simulate_tests(engine, ANSWERS[order], RULES, num_items=2, items="point", show_progress=False)
    np.testing.assert_allclose(paths[0], straight["mean"].values)


@pytest.mark.thorough
def test_a_response_of_a_fit_knows_the_names_of_its_items(engine):
    response, traits = response_of(engine), engine.posterior["trait"].mean
    expected = item_fit(response, traits, ANSWERS).infit
    np.testing.assert_allclose(item_fit(response, traits, TABLE[ITEMS[::-1]]).infit, expected)
    by_name = test_information(response, [0.3], items=["d", "b"])
    np.testing.assert_allclose(by_name, test_information(response, [0.3], items=[3, 1]))
    np.testing.assert_allclose(test_information(response, 0.3, items="d"), test_information(response, 0.3, items=3))
    with pytest.raises(ValueError, match=r"The answers lack the items \['d'\] of the fit"):
        item_fit(response, traits, TABLE.rename(columns={"d": "e"}))
    with pytest.raises(ValueError, match="by its number, or by its name in the fit; got 'e'; names are a, b, c, d"):
        test_information(response, 0.3, items=["e"])
    with pytest.raises(ValueError, match="There is no item 4: items are 0 to 3"):
        test_information(response, 0.3, items=[4])
    with pytest.raises(ValueError, match=r"got (np\.)?True_?"):
        marginal_reliability(response, items=np.array([True, False, True, True]))
    test = AdaptiveTest(engine, items="point", answers=pd.Series({"d": 1, "a": 0}))
    assert test.answers == {3: 1, 0: 0} == test.for_another_person(answers={3: 1, "a": 0}).answers


def test_other_items_and_other_people_are_refused(engine):
    with pytest.raises(ValueError, match=r"table 'response' has the columns .*\['d'\] are missing"):
        person_fit(engine, answers=TABLE.rename(columns={"d": "e"}))
    with pytest.raises(ValueError, match=r"labels of people, of which 1 are not in the fit, such as \[7\]"):
        test_retest(engine, TABLE.rename(index={1000: 7}))
    assert test_retest(engine, TABLE.reset_index(drop=True)).agreement == 1.0  # no label of the fit: by their places


def test_repeated_answers_are_refused_where_a_table_is_needed_and_nowhere_else():
    person, item = np.divmod(np.arange(800), 4)
    twice = [np.append(values, values[0]) for values in (person, item, ANSWERS.reshape(-1))]
    engine = AdaptiveQuadrature(item_response_records, progress_bar=False)
    engine.run(random.key(0), *twice, num_people=200, num_items=4, family="2pl")
    test = AdaptiveTest(engine, items="point", answers=dict(enumerate(ANSWERS[5])))
    np.testing.assert_allclose(test.mean, engine.posterior["trait"].mean[5], atol=1e-4)
    with pytest.raises(ValueError, match="Person 0 answers item 0 twice"):
        person_fit(engine)


def scaled(response=None, *, num_people=600):
    """Traits whose mean and standard deviation are learned, and the first item has neither intercept nor slope."""
    mean, scale = numpyro.param("mean", 0.0), numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    slope = jnp.append(1.0, numpyro.param("slope", jnp.ones(5), constraint=dist.constraints.positive))
    intercept = jnp.append(0.0, numpyro.param("intercept", jnp.zeros(5)))
    with numpyro.plate("people", num_people):
        trait = numpyro.sample("trait", dist.Normal(mean, scale))
    numpyro.sample("response", dist.Bernoulli(logits=slope * trait[:, None] + intercept), obs=response)


@pytest.mark.thorough
def test_item_fit_is_that_of_the_population_of_the_model():
    trait = 1.0 + 2.0 * RNG.normal(size=(600, 1))
    answers = (RNG.random((600, 6)) < 1 / (1 + np.exp(-np.linspace(0.5, 2.0, 6) * trait))).astype(int)
    engine = AdaptiveQuadrature(scaled, progress_bar=False)
    engine.run(random.key(0), answers)
    mean, scale = (float(engine.hyper[name].value) for name in ("mean", "scale"))
    found, given = item_fit(engine), item_fit(engine, population=(mean, scale**2))
    np.testing.assert_allclose(found.score_statistic, given.score_statistic)
    assert np.abs(found.score_statistic - item_fit(engine, population=(0.0, 1.0)).score_statistic).max() > 1.0


@pytest.mark.thorough
def test_adaptive_tests_have_the_correlations_and_covariates_of_the_fit():
    pattern = np.repeat(np.eye(2, dtype=int), 4, axis=0)
    traits = RNG.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], 400)
    answers = (RNG.random((400, 8)) < 1 / (1 + np.exp(-1.5 * traits @ pattern.T))).astype(int)
    engine = AdaptiveQuadrature(item_response, progress_bar=False)
    engine.run(random.key(0), answers, family="2pl", pattern=pattern, correlated=True)
    test = AdaptiveTest(engine, items="point", answers=dict(enumerate(answers[0])))
    np.testing.assert_allclose(test.mean, engine.posterior["trait"].mean[0], atol=1e-4)

    column = RNG.normal(size=200)
    given = (RNG.random((200, 4)) < 1 / (1 + np.exp(-1.5 * (TRAIT + column)[:, None]))).astype(int)
    engine = AdaptiveQuadrature(item_response, progress_bar=False)
    engine.run(random.key(0), given, family="2pl", covariates=column[:, None])
    with pytest.raises(ValueError, match="People have different priors of 'trait'"):
        AdaptiveTest(engine, items="point")
    test = AdaptiveTest(engine, items="point", covariates=column[:1], answers=dict(enumerate(given[0])))
    np.testing.assert_allclose(test.mean, engine.posterior["trait"].mean[0], atol=1e-4)
