"""Statistics of persons and items against sums written out, enumeration of all answers, and simulation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import integrate, stats

from numpyro_ext.design import draws_of
from numpyro_ext.models import item_response, item_response_records
from numpyro_ext.psychometrics import item_fit, local_dependence, person_fit, test_retest
from numpyro_ext.psychometrics.summed_scores import expected_answers

A, D = np.array([1.0, 1.8, 0.7, 1.3]), np.array([0.5, -0.4, 1.0, 0.0])


def logistic(theta):
    return dist.Bernoulli(logits=jnp.asarray(A) * theta[..., None] + D)


def cdf(theta):
    return stats.logistic.cdf(A * np.asarray(theta)[..., None] + D)


def graded(theta):
    return dist.OrderedLogistic(jnp.asarray(A) * theta[..., None], jnp.array([-1.0, 0.2, 1.0]) + D[:, None])


def test_person_fit_is_the_sums_written_out():
    rng = np.random.default_rng(0)
    theta = np.array([0.3, -1.0, 0.8, 0.1])
    y = rng.integers(0, 2, (4, 4)).astype(float)
    y[1, 2], y[3] = np.nan, np.nan
    found = person_fit(logistic, theta, y)
    for n in range(3):
        known = np.isfinite(y[n])
        p, u, a = cdf(theta[n])[known], y[n][known], A[known]
        w = np.log(p / (1 - p))
        log_likelihood = np.sum(u * np.log(p) + (1 - u) * np.log(1 - p))
        mean = np.sum(p * np.log(p) + (1 - p) * np.log(1 - p))
        np.testing.assert_allclose(found.log_likelihood[n], log_likelihood)
        lz = (log_likelihood - mean) / np.sqrt(np.sum(p * (1 - p) * w**2))
        np.testing.assert_allclose(found.standardised[n], lz)
        # Snijders (2001) for binary items, with r_i = a_i for the logistic model.
        c = np.sum(a * p * (1 - p) * w) / np.sum(a * p * (1 - p) * a)
        rest = w - c * a
        np.testing.assert_allclose(found.corrected[n], np.sum((u - p) * rest) / np.sqrt(np.sum(rest**2 * p * (1 - p))))
        np.testing.assert_allclose(found.outfit[n], np.mean((u - p) ** 2 / (p * (1 - p))))
        np.testing.assert_allclose(found.infit[n], np.sum((u - p) ** 2) / np.sum(p * (1 - p)))
    np.testing.assert_array_equal(found.num_answers, [4, 3, 4, 0])
    assert np.isnan(found.corrected[3]) and np.isnan(found.infit[3])


@pytest.mark.thorough
def test_corrected_person_fit_is_standard_normal_at_estimated_traits():
    rng = np.random.default_rng(1)
    cut, slope = np.sort(rng.normal(size=(60, 3)), -1), np.exp(0.3 * rng.normal(size=60))

    def response(theta):
        return dist.OrderedLogistic(jnp.asarray(slope) * theta[..., None], jnp.asarray(cut))

    truth = rng.normal(size=1500)
    y = np.asarray(response(jnp.asarray(truth)).sample(random.key(0)))
    nodes = jnp.linspace(-5, 5, 201)
    table = jax.nn.log_softmax(jnp.log(response(nodes).probs))
    log_lik = jnp.stack([jnp.sum(table[:, jnp.arange(60), row], -1) for row in y]) - 0.5 * nodes**2
    weights = jax.nn.softmax(log_lik, -1)
    found = person_fit(response, np.asarray(weights @ nodes), y.astype(float))
    z = found.corrected
    assert abs(z.mean()) < 5 / np.sqrt(1500) + 0.05 and abs(z.std() - 1) < 0.08
    assert abs(np.mean(z < -1.645) - 0.05) < 0.025
    assert found.standardised.std() < z.std()  # too narrow


def test_expected_answers_at_a_sum_score_are_those_of_all_patterns():
    sizes, item = [2, 4, 3], 1
    rng = np.random.default_rng(2)
    probabilities = np.zeros((7, 3, 4))
    for k, size in enumerate(sizes):
        probabilities[:, k, :size] = rng.dirichlet(np.ones(size), 7)
    weights = rng.dirichlet(np.ones(7))
    expected = np.zeros((7, 4))
    for pattern in itertools.product(*map(range, sizes)):
        mass = np.prod([probabilities[:, k, y] for k, y in enumerate(pattern)], 0) @ weights
        expected[sum(pattern), pattern[item]] += mass
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(expected_answers(probabilities, weights, item, sizes), expected, rtol=1e-12)


def test_item_fit_is_that_of_the_definition():
    rng = np.random.default_rng(3)
    theta = rng.normal(size=600)
    y = (rng.random((600, 4)) < cdf(theta)).astype(float)
    y[0, 1] = np.nan
    found = item_fit(logistic, theta, y, num_parameters=0)
    p = cdf(theta)
    squared = np.where(np.isfinite(y), (y - p) ** 2, np.nan)
    np.testing.assert_allclose(found.outfit, np.nanmean(squared / (p * (1 - p)), 0))
    spread = np.where(np.isfinite(y), p * (1 - p), np.nan)
    np.testing.assert_allclose(found.infit, np.nansum(squared, 0) / np.nansum(spread, 0))
    # S-X^2 by all patterns of answers and adaptive integrals; no cell is so empty that it is joined.
    complete = y[1:].astype(int)
    masses = {}
    for pattern in itertools.product(range(2), repeat=4):
        both = np.array(pattern)
        masses[pattern] = integrate.quad(
            lambda t, both=both: stats.norm.pdf(t) * np.prod(np.where(both, cdf(t), 1 - cdf(t))), -9, 9, epsabs=1e-12
        )[0]
    for item in range(4):
        total = 0.0
        for score in range(1, 4):
            some = [p for p in masses if sum(p) == score]
            share = sum(masses[p] for p in some if p[item]) / sum(masses[p] for p in some)
            own = complete[complete.sum(1) == score, item]
            total += len(own) * (own.mean() - share) ** 2 / (share * (1 - share))
        np.testing.assert_allclose(found.score_statistic[item], total, rtol=1e-6)
    np.testing.assert_array_equal(found.degrees_of_freedom, 3)
    np.testing.assert_allclose(found.p_value, stats.chi2.sf(found.score_statistic, 3))
    assert found.num_people == 599


@pytest.mark.thorough
def test_item_fit_finds_the_item_that_does_not_fit_and_takes_categories():
    rng = np.random.default_rng(4)
    theta = rng.normal(size=1500)
    y = np.asarray(graded(jnp.asarray(theta)).sample(random.key(0)))
    fits = item_fit(graded, theta, y.astype(float))
    assert fits.p_value.min() > 0.001
    y = np.concatenate([y, rng.integers(0, 4, (1500, 1))], 1)  # an answer without the trait

    def with_noise(theta):
        slopes = jnp.concatenate([jnp.asarray(A), jnp.ones(1)])
        cutpoints = jnp.concatenate([jnp.array([-1.0, 0.2, 1.0]) + D[:, None], jnp.array([[-1.0, 0.0, 1.0]])])
        return dist.OrderedLogistic(slopes * theta[..., None], cutpoints)

    found = item_fit(with_noise, theta, y.astype(float))
    assert found.p_value[4] < 1e-10 and found.outfit[4] > 1.3


def test_local_dependence_is_the_correlation_of_residuals():
    rng = np.random.default_rng(5)
    theta = rng.normal(size=50)
    y = (rng.random((50, 4)) < cdf(theta)).astype(float)
    y[:10, 0] = np.nan
    found = local_dependence(logistic, theta, y)
    rest = y - cdf(theta)
    for i, j in itertools.combinations(range(4), 2):
        known = np.isfinite(rest[:, i] + rest[:, j])
        np.testing.assert_allclose(found[i, j], np.corrcoef(rest[known, i], rest[known, j])[0, 1])
    np.testing.assert_allclose(np.diagonal(found), 1.0)
    np.testing.assert_allclose(found, found.T)


@pytest.mark.thorough
def test_second_sittings_agree_as_often_as_the_model_says():
    rng = np.random.default_rng(6)
    theta = rng.normal(size=400)
    first, second = ((rng.random((400, 4)) < cdf(theta)).astype(float) for _ in range(2))
    second[3, 2] = np.nan
    samples = {"discrimination": np.tile(A, (200, 1)), "intercept": np.tile(D, (200, 1)),
               "trait": np.tile(theta, (200, 1))}  # fmt: skip
    options = {"family": "2pl"}
    source = draws_of(samples, model=item_response, args=(first,), kwargs=options)
    found = test_retest(source, second, num_draws=200)
    both = np.isfinite(second)
    assert found.agreement == np.mean(first[both] == second[both])
    p = np.where(first == 1, cdf(theta), 1 - cdf(theta))
    np.testing.assert_allclose(found.expected_agreement, p[both].mean(), rtol=1e-6)
    error = np.sqrt(np.sum((p * (1 - p))[both])) / both.sum()
    np.testing.assert_allclose(found.replicates.mean(), p[both].mean(), atol=5 * error / np.sqrt(200))
    np.testing.assert_allclose(found.replicates.std(), error, rtol=5 / np.sqrt(400))
    p_value = stats.norm.cdf((found.agreement - p[both].mean()) / error)
    np.testing.assert_allclose(found.p_value, p_value, atol=5 * np.sqrt(0.25 / 200))
    assert test_retest(source, first).p_value == 1.0  # people who remember every answer
    assert test_retest(source, 1 - first).p_value == 0.0
    with pytest.raises(ValueError, match="the same people and items"):
        test_retest(source, second[:3])

    # From the fit itself: the same statistics as from the response, in records as well.
    direct = person_fit(logistic, theta, first)
    person, item = np.divmod(rng.permutation(1600), 4)
    records = draws_of(samples, model=item_response_records, args=(person, item, first[person, item]),
                       kwargs={**options, "num_people": 400, "num_items": 4})  # fmt: skip
    for fitted in (source, records):
        np.testing.assert_allclose(person_fit(fitted).corrected, direct.corrected, rtol=1e-6)
    np.testing.assert_array_equal(item_fit(source).degrees_of_freedom, 1)  # three scores, two parameters


def test_statistics_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="needs the traits of the people and their answers"):
        person_fit(logistic, [0.0])
    with pytest.raises(ValueError, match="Answers must be categories 0 to 1; got 2"):
        person_fit(logistic, [0.0], [[0, 1, 2, 0]])
    with pytest.raises(ValueError, match="The response is to"):
        person_fit(logistic, [0.0], [[0, 1, 1]])
