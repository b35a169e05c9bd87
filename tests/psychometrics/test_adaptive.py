"""Adaptive tests against quadrature, enumeration and formulas of the models of items."""

import copy
import json
import pickle
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import integrate, stats
from scipy.special import entr

from numpyro_ext.design import (
    draws_of,
    expected_information_gain,
    maximum_information,
    predictive_entropy,
    random_scores,
    variation_ratio,
)
from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.psychometrics import AdaptiveTest
from numpyro_ext.psychometrics.adaptive.administration import StepKeys, generator
from tests.compilations import compiled_programs

NUM_ITEMS = 12
RNG = np.random.default_rng(0)
SLOPE, INTERCEPT = np.exp(0.4 * RNG.normal(size=NUM_ITEMS)), RNG.normal(size=NUM_ITEMS)
ANSWERS = {7: 1, 2: 0, 10: 1, 0: 1}


def two_parameter_logistic(theta):
    return dist.Bernoulli(logits=jnp.asarray(SLOPE) * theta[..., None] + jnp.asarray(INTERCEPT))


def probability(theta, items=slice(None)):
    return stats.logistic.cdf(SLOPE[items] * theta + INTERCEPT[items])


def make(acquisition=expected_information_gain, response=two_parameter_logistic, prior=(0.3, 1.44), **options):
    return AdaptiveTest(response, acquisition, prior=prior, **options)


def expectation(function):
    """Posterior mean of a function of the trait after ``ANSWERS``, by adaptive quadrature."""

    def weight(theta):
        p = probability(theta, list(ANSWERS))
        return stats.norm.pdf(theta, 0.3, 1.2) * np.prod(np.where(list(ANSWERS.values()), p, 1.0 - p))

    both = integrate.quad_vec(lambda t: weight(t) * np.append(1.0, function(t)), -12, 12, epsabs=1e-13, epsrel=1e-12)[0]
    return both[1:] / both[0]


@pytest.mark.thorough
def test_density_and_scores_are_those_of_quadrature():
    test = make()
    for item, value in ANSWERS.items():
        test.answer(item, value)
    mean, square = expectation(lambda t: np.array([t, t**2]))
    np.testing.assert_allclose(test.mean, mean, atol=1e-9)
    np.testing.assert_allclose(test.standard_error, np.sqrt(square - mean**2), atol=1e-9)
    p = expectation(probability)
    inside = expectation(lambda t: entr(probability(t)) + entr(1.0 - probability(t)))
    np.testing.assert_allclose(test.category_probabilities()[:, 1], p, atol=1e-9)
    left = np.setdiff1d(np.arange(NUM_ITEMS), list(ANSWERS))
    information = test.scores()
    np.testing.assert_allclose(information[left], (entr(p) + entr(1.0 - p) - inside)[left], atol=1e-9)
    assert np.isneginf(information[list(ANSWERS)]).all() and test.propose() == information.argmax()
    np.testing.assert_allclose(predictive_entropy(test)["response"][left], (entr(p) + entr(1 - p))[left], atol=1e-9)
    # At the mean and on average the Fisher information of the formula.
    fisher = SLOPE**2 * probability(mean) * (1.0 - probability(mean))
    gain = 0.5 * np.log1p(test.standard_error**2 * fisher)
    np.testing.assert_allclose(maximum_information(test)["response"][left], gain[left], rtol=1e-8)
    fisher = expectation(lambda t: SLOPE**2 * probability(t) * (1.0 - probability(t)))
    gain = 0.5 * np.log1p(test.standard_error**2 * fisher)
    # Nodes at distances of one standard deviation.
    np.testing.assert_allclose(maximum_information(test, at="draws")["response"][left], gain[left], atol=3e-8)


def test_order_and_what_was_taken_back_make_no_difference(tmp_path):
    first, second = make(answers=ANSWERS), make()
    for item in reversed(ANSWERS):
        second.answer(item, ANSWERS[item])
    before = second.mean, second.standard_error
    second.scores()
    with compiled_programs() as names:  # nothing after the first item
        second.answer(5, 0)
        second.scores()
    assert not names
    assert abs(second.mean - before[0]) > 1e-3
    second.take_back(5)
    assert (second.mean, second.standard_error) == before and second.answers == ANSWERS
    np.testing.assert_allclose([first.mean, first.standard_error], before, rtol=1e-13)
    second.save(tmp_path / "test")
    kept = AdaptiveTest.load(tmp_path / "test", two_parameter_logistic, prior=(0.3, 1.44))
    assert (kept.mean, kept.propose()) == (second.mean, second.propose())
    with pytest.raises(ValueError, match="other items"):
        AdaptiveTest.load(tmp_path / "test", two_parameter_logistic, prior=(0.3, 2.0))


def test_items_that_are_drawn_are_integrated_out_of_density_and_scores():
    """Houlsby 2014, eq. 3.7, and the posterior of traits and items together, by sums over a fine grid."""
    rng = np.random.default_rng(1)
    slope, intercept = np.exp(0.4 * rng.normal(size=(6, 5))), rng.normal(size=(6, 5))

    def response(theta):
        front = (6, *(1,) * theta.ndim, 5)
        return dist.Bernoulli(logits=slope.reshape(front) * theta[..., None] + intercept.reshape(front))

    test = make(response=response, prior=(0.0, 1.0), num_nodes=81)
    test.answer(3, 1)
    test.answer(0, 0)
    theta = np.linspace(-9, 9, 1501)
    p = stats.logistic.cdf(slope[:, None] * theta[:, None] + intercept[:, None])  # draws, nodes, items
    joint = stats.norm.pdf(theta) * p[..., 3] * (1.0 - p[..., 0])
    joint /= joint.sum()
    np.testing.assert_allclose(test.mean, joint.sum(0) @ theta, atol=1e-9)
    marginal = np.einsum("sq,sqp->p", joint, p)
    given = np.einsum("sq,sqp->qp", joint / joint.sum(0), p)
    expected = entr(marginal) + entr(1 - marginal) - joint.sum(0) @ (entr(given) + entr(1 - given))
    np.testing.assert_allclose(test.scores()[[1, 2, 4]], expected[[1, 2, 4]], atol=1e-9)
    votes = np.einsum("sq,sqp->p", joint, p > 0.5)
    found = variation_ratio(test)["response"][[1, 2, 4]]
    np.testing.assert_allclose(found, np.minimum(votes, 1 - votes)[[1, 2, 4]], atol=0.02)
    difficulty = 6.0 * rng.normal(size=(30, 1, 5))
    test = make(response=lambda theta: dist.Bernoulli(logits=theta[..., None] - difficulty), num_nodes=30)
    test.answer(0, 1)
    with pytest.warns(UserWarning, match="effective draws"):
        test.answer(1, 1)
        test.answer(2, 0)


REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "hm_bald_ordinal.json").read_text())


@pytest.mark.thorough
def test_a_new_user_with_three_traits_and_uncertain_items():
    """Ordered probit items whose vectors and cutpoints are Gaussian; the reference is a product rule of Gauss-Hermite.
    It takes the entropy of the outcome from moments, so the entropies given the traits are compared."""
    items = REFERENCE["items"]
    mean, variance, cuts, cut_variance = (
        np.array([item[name] for item in items]) for name in ("v_mean", "v_var", "b_mean", "b_var")
    )
    noise = np.array([item["v_gamma"] for item in items])

    def response(theta):
        spread = jnp.square(theta) @ variance.T + noise
        z = (cuts - (theta @ mean.T)[..., None]) / jnp.sqrt(spread[..., None] + cut_variance)
        below = jnp.maximum(0.0, jnp.stack([jnp.diff(_bounded(z), axis=-1)], 0)[0])
        return dist.Categorical(probs=below)

    prior = np.array(REFERENCE["user_mean"]), np.diag(REFERENCE["user_var"])
    test = AdaptiveTest(response, prior=prior, num_nodes=41)
    entropies = entr(test.category_probabilities()).sum(-1)
    expected = np.array(REFERENCE["predictive_entropy_nats"]) - np.array(REFERENCE["bald_nats_gauss_hermite"])
    np.testing.assert_allclose(entropies - test.scores(), expected, atol=1e-5)


def _bounded(z):
    from jax.scipy.stats import norm

    below = norm.cdf(z)
    return jnp.concatenate([jnp.zeros_like(below[..., :1]), below, jnp.ones_like(below[..., :1])], -1)


LOADINGS = np.array([[1.2, 0.0, 0.3], [0.0, 1.5, 0.0], [0.8, 0.8, 0.0], [1.0, -0.5, 1.0], [0.4, 0.9, -0.8]])
COVARIANCE = np.array([[1.0, 0.5, 0.0], [0.5, 1.5, 0.2], [0.0, 0.2, 0.8]])


def of_traits(number):
    def response(theta):
        return dist.Bernoulli(logits=theta @ LOADINGS[:, :number].T - 0.3)

    return response


def test_several_traits_and_the_one_in_focus():
    test = AdaptiveTest(of_traits(2), prior=(np.zeros(2), COVARIANCE[:2, :2]), answers={0: 1, 2: 0}, num_nodes=33)
    axis = np.linspace(-9, 9, 121)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    p = stats.logistic.cdf(grid @ LOADINGS[:, :2].T - 0.3)
    weight = stats.multivariate_normal(np.zeros(2), COVARIANCE[:2, :2]).pdf(grid) * p[..., 0] * (1 - p[..., 2])
    weight /= weight.sum()
    mean = np.einsum("ij,ijd->d", weight, grid)
    np.testing.assert_allclose(test.mean, mean, atol=1e-6)
    away = grid - mean
    covariance = np.einsum("ij,ijd,ije->de", weight, away, away)
    np.testing.assert_allclose(test.covariance, covariance, atol=1e-6)
    # What an answer says of the second trait: the first is added up.
    marginal = np.einsum("ij,ijp->p", weight, p)
    given = np.einsum("ij,ijp->jp", weight, p) / weight.sum(0)[:, None]
    expected = entr(marginal) + entr(1 - marginal) - weight.sum(0) @ (entr(given) + entr(1 - given))
    found = expected_information_gain(test, focus={"trait": [1]})["response"]
    np.testing.assert_allclose(found[[1, 3, 4]], expected[[1, 3, 4]], atol=1e-6)
    p = stats.logistic.cdf(LOADINGS[:, :2] @ mean - 0.3)
    information = (p * (1 - p))[:, None, None] * LOADINGS[:, :2, None] * LOADINGS[:, None, :2]
    after = np.linalg.inv(np.linalg.inv(covariance) + information)
    for focus, part in ((None, slice(None)), ({"trait": [1]}, slice(1, 2))):
        fall = np.linalg.slogdet(covariance[part, part])[1] - np.linalg.slogdet(after[:, part, part])[1]
        score = maximum_information(test, focus=focus)["response"]
        np.testing.assert_allclose(score[[1, 3, 4]], 0.5 * fall[[1, 3, 4]], rtol=1e-5)


@pytest.mark.thorough
def test_many_traits_are_a_gaussian_at_the_mode():
    from scipy.optimize import minimize

    loadings = np.random.default_rng(2).normal(size=(30, 4))
    covariance = 0.5 * np.eye(4) + 0.5

    def response(theta):
        return dist.Bernoulli(logits=theta @ loadings.T)

    answers = {item: item % 2 for item in range(20)}
    test = AdaptiveTest(response, prior=(np.zeros(4), covariance), answers=answers)

    def minus_log_density(theta):
        p = stats.logistic.cdf(loadings[:20] @ theta)
        logs = np.where(list(answers.values()), np.log(p), np.log1p(-p))
        return 0.5 * theta @ np.linalg.solve(covariance, theta) - logs.sum()

    mode = minimize(minus_log_density, np.zeros(4), tol=1e-12).x
    np.testing.assert_allclose(test.mean, mode, atol=1e-5)
    p = stats.logistic.cdf(loadings[:20] @ test.mean)
    precision = np.linalg.inv(covariance) + (loadings[:20].T * p * (1 - p)) @ loadings[:20]
    np.testing.assert_allclose(test.covariance, np.linalg.inv(precision), rtol=1e-8)
    # Scores at 64 points against many draws.
    draws = np.random.default_rng(3).multivariate_normal(test.mean, test.covariance, 100_000)
    p = stats.logistic.cdf(draws @ loadings.T)
    expected = entr(p.mean(0)) + entr(1 - p.mean(0)) - (entr(p) + entr(1 - p)).mean(0)
    np.testing.assert_allclose(test.scores()[20:], expected[20:], rtol=0.1)
    with pytest.raises(ValueError, match="on nodes"):
        expected_information_gain(test, focus=[0])


def rasch(response=None, covariate=None):
    with numpyro.plate("items", 3):
        d = numpyro.sample("intercept", dist.Normal(0, 3))
    location = 0.5 * covariate if covariate is not None else 0.25
    with numpyro.plate("people", 4):
        trait = numpyro.sample("trait", dist.Normal(location, 2.0))
    numpyro.sample("response", dist.Bernoulli(logits=trait[:, None] + d), obs=response)


@pytest.mark.thorough
def test_the_prior_of_a_fitted_model_is_read_and_follows_from_covariates():
    posterior = {"intercept": jnp.array([[0.0, 1.0, -1.0], [0.5, 1.0, -2.0]]), "trait": jnp.zeros((2, 4))}
    source = draws_of(posterior, model=rasch, args=(np.zeros((4, 3), int),))
    test = AdaptiveTest(source, items="point")
    np.testing.assert_allclose([test.mean, test.standard_error], [0.25, 2.0], atol=1e-9)
    drawn = AdaptiveTest(source, num_draws=2)
    p = stats.logistic.cdf(0.25 + np.array(posterior["intercept"]))
    np.testing.assert_allclose(drawn._bank.table(np.array([[0.25]]))[:, 0, :, 1].sum(0), np.log(p).sum(0), atol=1e-9)
    source = draws_of(posterior, model=rasch, args=(np.zeros((4, 3), int), np.array([0.0, 1.0, 2.0, 3.0])))
    with pytest.raises(ValueError, match="different priors"):
        AdaptiveTest(source, items="point")
    assert abs(AdaptiveTest(source, items="point", covariate=2).mean - 1.0) < 1e-9
    assert abs(AdaptiveTest(source, items="point", prior=(-1, 1)).mean + 1.0) < 1e-9
    with pytest.raises(TypeError, match="no arguments \\['age'\\]"):
        AdaptiveTest(source, age=3)


@pytest.mark.float32
def test_bad_input_is_refused_with_what_to_do():
    test = make(stop={"num_items": 2})
    for value in (2, -1, 0.5, np.nan, "1", None, [1, 0]):
        with pytest.raises(ValueError, match="its categories are \\[0, 1\\]"):
            test.answer(0, value)
    for item in (NUM_ITEMS, -1, 0.5, "a", None):
        with pytest.raises(ValueError, match="item"):
            test.answer(item, 1)
    test.answer(np.int32(4), np.bool_(True))
    with pytest.raises(ValueError, match="answered already"):
        test.answer(4, 1)
    with pytest.raises(ValueError, match="no answer to take back"):
        test.take_back(5)
    test.answer(5.0, np.float32(0.0))
    assert test.is_over and "2 answers" in repr(test)
    with pytest.raises(ValueError, match="is over, because it has 2 answers"):
        test.propose()
    with pytest.raises(ValueError, match="over before its first item"):
        make(stop={"standard_error": 1.3})
    with pytest.raises(ValueError, match="more than the 12"):
        make(stop={"num_items": 13})
    with pytest.raises(ValueError, match="'precision'"):
        make(stop={"precision": 1})
    with pytest.raises(ValueError, match="has no prior"):
        AdaptiveTest(two_parameter_logistic)
    with pytest.raises(ValueError, match="positive definite"):
        make(prior=(0.0, -1.0))
    with pytest.raises(ValueError, match="bank is empty"):
        make(response=lambda theta: dist.Bernoulli(logits=jnp.zeros((*theta.shape, 0))))
    with pytest.raises(TypeError, match="no finite number of answers"):
        make(response=lambda theta: dist.Normal(theta[..., None] * jnp.ones(3), 1.0))
    with pytest.raises(FloatingPointError, match="nan for items \\[0, 1\\]"):
        make(response=lambda theta: dist.Bernoulli(logits=theta[..., None] * jnp.array([np.nan, np.nan])))
    with pytest.warns(UserWarning, match="num_nodes"):
        make(num_nodes=5)


def test_exposure_and_content_are_kept():
    areas = np.array(["a", "b"])[np.arange(NUM_ITEMS) % 2]
    fixed = {"num_nodes": 33}
    test = make(content=(areas, {"a": 0.75, "b": 0.25}), stop={"num_items": 8}, **fixed)
    while not test.is_over:
        test.answer(test.propose(), 1)
    assert sorted(areas[list(test.answers)]) == ["a"] * 6 + ["b"] * 2
    best = np.argsort(-make(**fixed).scores())[:3]
    test = make(exposure={"randomesque": 3}, **fixed)
    found = {test.propose(random.key(seed)) for seed in range(20)}
    assert found == set(best.tolist())
    rates = np.ones(NUM_ITEMS)
    rates[best[0]] = 0.0
    test = make(exposure={"sympson_hetter": rates}, **fixed)
    assert test.propose() == best[1]
    test.answer(3, 1)
    other = test.for_another_person(rng_key=random.key(5))
    assert other.propose() == best[1] and not other.answers and test.answers
    assert make(exposure={"sympson_hetter": 0.0 * rates}, **fixed).propose() == best[0]  # rather than no test
    with pytest.raises(ValueError, match="areas \\['b'\\] have no share"):
        make(content=(areas, {"a": 1.0}))
    assert 0 <= make(random_scores, **fixed).propose(random.key(3)) < NUM_ITEMS


def on_axis(theta):
    return two_parameter_logistic(theta[..., 0])


def with_draws(theta):
    shifts = jnp.linspace(-0.4, 0.4, 5).reshape(5, *(1,) * (theta.ndim + 1))
    return dist.Bernoulli(logits=jnp.asarray(SLOPE) * theta[..., None] + jnp.asarray(INTERCEPT) + shifts)


FOUR_SLOPES = 1.5 * np.random.default_rng(3).normal(size=(NUM_ITEMS, 4))


def four_traits(theta):
    return dist.Bernoulli(logits=theta @ FOUR_SLOPES.T)


@pytest.mark.parametrize(
    ("response", "prior"),
    [
        (two_parameter_logistic, (0.3, 1.44)),
        (on_axis, ([0.3], [[1.44]])),
        (with_draws, (0.3, 1.44)),
        pytest.param(four_traits, (np.zeros(4), np.eye(4)), marks=pytest.mark.thorough),
    ],
)
def test_a_pickled_or_copied_test_goes_on_with_the_same_items(response, prior):
    test = make(maximum_information, response, prior)
    for value in (1, 0):
        test.answer(test.propose(), value)
    for other in (pickle.loads(pickle.dumps(test)), copy.deepcopy(test)):
        own = test.for_another_person(answers=test.answers)
        assert other.answers == own.answers and repr(other) == repr(own)
        for value in (0, 1):
            item = own.propose()
            assert other.propose() == item
            other.answer(item, value), own.answer(item, value)
            np.testing.assert_array_equal(other.mean, own.mean)
            np.testing.assert_array_equal(other.covariance, own.covariance)
            np.testing.assert_array_equal(other.scores(), own.scores())
        assert len(test.answers) == 2  # nothing is shared


@pytest.mark.thorough
def test_answers_one_by_one_are_those_folded_in(tmp_path):
    """The trait after some answers, in any order, after one is taken back and across files, beside the fit's own
    posterior of a new person with these answers."""

    def model(response=None, *, num_people):
        slope = numpyro.param("slope", jnp.ones(NUM_ITEMS), constraint=dist.constraints.positive)
        intercept = numpyro.param("intercept", jnp.zeros(NUM_ITEMS))
        with numpyro.plate("people", num_people):
            trait = numpyro.sample("trait", dist.Normal(0.0, 1.0))
        is_known, logits = ~jnp.isnan(response), slope * trait[:, None] + intercept
        numpyro.sample("response", dist.Bernoulli(logits=logits).mask(is_known), obs=jnp.nan_to_num(response))

    rng = np.random.default_rng(1)
    answers = (rng.random((200, NUM_ITEMS)) < probability(rng.normal(size=200)[:, None])).astype(float)
    engine = AdaptiveQuadrature(model, progress_bar=False)
    engine.run(random.key(0), answers, num_people=200)
    assert engine.diagnostics.converged
    row = np.full((1, NUM_ITEMS), np.nan)
    row[0, list(ANSWERS)] = list(ANSWERS.values())
    expected = engine.fold_in(random.key(1), row, num_people=1).posterior["trait"]
    test = AdaptiveTest(engine, items="point")
    other = test.for_another_person(answers=ANSWERS)
    test.answer(5, 0)
    for item, value in reversed(ANSWERS.items()):
        test.answer(item, value)
    assert abs(test.mean - expected.mean[0]) > 1e-3
    test.take_back(5)
    test.save(tmp_path / "test")
    for found in (other, test, AdaptiveTest.load(tmp_path / "test", engine, items="point")):
        np.testing.assert_allclose(found.mean, expected.mean[0], atol=1e-8)
        np.testing.assert_allclose(found.standard_error, expected.sd[0], atol=1e-8)


def test_keys_of_steps_are_those_that_follow_from_the_key_of_the_test():
    steps, rng_key = StepKeys(random.key(7)), random.key(7)
    for step in (40, 0, 31, 32):
        key, rng = steps.at(step)
        expected = random.fold_in(rng_key, step)
        np.testing.assert_array_equal(random.key_data(key), random.key_data(expected))
        assert rng.random() == generator(expected).random()
