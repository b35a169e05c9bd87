"""Tests of many people at once against the test of one, and against what the rules promise."""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import stats

from numpyro_ext.design import expected_information_gain, maximum_information, random_scores
from numpyro_ext.psychometrics import AdaptiveTest, exposure_rates, simulate_tests

RNG = np.random.default_rng(0)
SLOPE, CUTS = np.exp(0.3 * RNG.normal(size=20)), np.sort(RNG.normal(size=(20, 2)), axis=1)
PRIOR = {"prior": (0.0, 1.0), "num_nodes": 61}


def graded(theta):
    return dist.OrderedLogistic(jnp.asarray(SLOPE) * theta[..., None], jnp.asarray(CUTS))


@pytest.fixture(scope="module")
def answers():
    theta = np.random.default_rng(1).normal(size=60)
    above = stats.logistic.cdf(SLOPE[:, None] * theta[:, None, None] - CUTS)
    values = (np.random.default_rng(2).random((60, 20, 1)) < above).sum(-1).astype(float)
    values[0, 5:] = np.nan  # someone who has answered five items, one of them held out
    return values


def test_paths_are_those_of_one_test_at_a_time(answers):
    rules = [expected_information_gain, maximum_information, random_scores]
    paths = simulate_tests(graded, answers, rules, num_items=6, held_out=[3, 17], show_progress=False, **PRIOR)
    assert list(paths["acquisition"].values) == [rule.__name__ for rule in rules]
    first = AdaptiveTest(graded, maximum_information, **PRIOR)
    for person in (7, 31):
        test, path = first.for_another_person(), paths.sel(acquisition="maximum_information", person=person)
        for step in range(6):
            scores = test.scores()
            scores[[3, 17]] = -np.inf
            item = int(path["item"][step])
            assert scores[item] == pytest.approx(scores.max(), rel=1e-12)
            test.answer(item, answers[person, item])
            np.testing.assert_allclose([path["mean"][step], path["sd"][step]], [test.mean, test.standard_error])
        p = test.category_probabilities()
        score = np.mean([np.log(p[item, int(answers[person, item])]) for item in (3, 17)])
        np.testing.assert_allclose(path["score"][5], score, rtol=1e-10)
    assert not np.isin(paths["item"], [3, 17]).any()
    # Someone has no more than four items, and waits for the others.
    few = paths.isel(acquisition=0, person=0)
    assert sorted(few["item"].values[:4]) == [0, 1, 2, 4] and (few["item"].values[4:] == -1).all()
    assert np.isnan(few["answer"].values[4:]).all() and few["sd"][3] == few["sd"][5]
    sd = paths["sd"].isel(step=-1).mean("person")
    assert sd[0] < 0.97 * sd[2] and sd[1] < 0.97 * sd[2]


def test_a_rule_may_be_any_function_of_the_people(answers):
    areas = np.arange(20) % 4

    def in_turn(source, *, rng_key):
        """A random unused item of each area in turn."""
        area = source.asked.sum(-1) % 4
        draw = np.asarray(random.uniform(rng_key, source.asked.shape))
        return {"response": np.where(areas == area[:, None], draw, -1.0)}

    paths = simulate_tests(graded, answers[1:], {"in turn": in_turn}, num_items=8, show_progress=False, **PRIOR)
    np.testing.assert_array_equal(areas[paths["item"].values[0]], np.tile([0, 1, 2, 3], (59, 2)))


@pytest.mark.thorough
def test_items_are_shown_to_no_more_people_than_allowed():
    options = {"num_items": 5, "acquisition": maximum_information, "num_people": 1000, "num_rounds": 8}
    rates = exposure_rates(graded, 0.5, **options, **PRIOR)
    theta = np.random.default_rng(3).normal(size=1000)
    above = stats.logistic.cdf(SLOPE[:, None] * theta[:, None, None] - CUTS)
    told = (np.random.default_rng(4).random((1000, 20, 1)) < above).sum(-1)
    for exposure, is_kept in (({"sympson_hetter": rates}, True), (None, False)):
        paths = simulate_tests(
            graded, told, [maximum_information], num_items=5, exposure=exposure, show_progress=False, **PRIOR
        )
        shown = np.bincount(paths["item"].values.reshape(-1), minlength=20) / 1000
        assert (shown.max() < 0.5 + 4 * np.sqrt(0.25 / 1000)) == is_kept


def test_answers_that_items_do_not_have_are_refused(answers):
    rule = [expected_information_gain]
    with pytest.raises(ValueError, match="Person 2 answers 3 to item 4"):
        wrong = answers.copy()
        wrong[2, 4] = 3
        simulate_tests(graded, wrong, rule, num_items=3, **PRIOR)
    with pytest.raises(ValueError, match="shape \\(people, 20\\)"):
        simulate_tests(graded, answers[:, :4], rule, num_items=3, **PRIOR)
    with pytest.raises(ValueError, match="19 of the bank"):
        simulate_tests(graded, answers, rule, num_items=20, held_out=[1], **PRIOR)
    with pytest.raises(ValueError, match="names no score"):
        simulate_tests(graded, answers, [], num_items=3, **PRIOR)
    with pytest.raises(ValueError, match="items from 0 to 19"):
        simulate_tests(graded, answers, rule, num_items=3, held_out=[20], **PRIOR)


def test_held_out_scores_of_many_traits_are_those_of_the_test_of_one():
    """A Gaussian, by a rule that makes predictions and by one that makes none."""
    rng = np.random.default_rng(5)
    slopes, cuts = 1.5 * rng.normal(size=(4, 9)), np.sort(rng.normal(size=(9, 2)), axis=1)

    def response(theta):
        return dist.OrderedLogistic(theta @ slopes, jnp.asarray(cuts))

    told, held_out, prior = rng.integers(3, size=(7, 9)), [4, 8], (np.zeros(4), np.eye(4))
    rules = [expected_information_gain, random_scores]
    paths = simulate_tests(response, told, rules, num_items=3, held_out=held_out, prior=prior, show_progress=False)
    one = AdaptiveTest(response, prior=prior)
    for rule in paths["acquisition"].values:
        for person in (0, 6):
            path, test = paths.sel(acquisition=rule, person=person), one.for_another_person()
            for step in range(3):
                item = int(path["item"][step])
                test.answer(item, told[person, item])
                p = test.category_probabilities()
                score = np.mean([np.log(p[item, told[person, item]]) for item in held_out])
                np.testing.assert_allclose(path["score"][step], score, rtol=1e-10)
                np.testing.assert_allclose(path["mean"][step], test.mean, rtol=1e-10)
