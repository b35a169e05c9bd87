"""Probabilities of answers and Fisher information against numbers of many digits, formulas and integrals."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import integrate, stats

from numpyro_ext import psychometrics
from numpyro_ext.distributions import AdjacentCategory
from numpyro_ext.psychometrics import marginal_reliability, test_information

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "hm_irt.json").read_text())
# Compiled as a whole: less to compile than one operation after the other.
category_probabilities, expected_score, fisher_information = (
    jax.jit(getattr(psychometrics, name), static_argnums=0)
    for name in ("category_probabilities", "expected_score", "fisher_information")
)
TOLERANCE = 1e-12 if jax.config.jax_enable_x64 else 1e-5


def logistic(slope, difficulty, guessing=0.0):
    """Items with the logit of p = c + (1 - c) s(a (theta - b))."""

    def response(theta):
        eta = slope * (theta[..., None] - difficulty)
        return dist.Bernoulli(logits=jnp.logaddexp(jnp.log(guessing), eta) - jnp.log1p(-guessing))

    return response


def by_item(rows, names):
    """Rows of the reference as traits and as parameters of the items, which come in one order at every trait."""
    traits = sorted({row["theta"] for row in rows})
    items = [row for row in rows if row["theta"] == traits[0]]
    at = [[next(r for r in rows if r["theta"] == theta and all(r[n] == item[n] for n in names)) for item in items]
          for theta in traits]  # fmt: skip
    return np.array(traits, float), items, at


@pytest.mark.float32
def test_binary_items_have_the_probabilities_and_information_of_the_reference():
    theta, items, at = by_item(REFERENCE["binary"], ["a", "b", "c"])
    response = logistic(*(np.array([item[name] for item in items], float) for name in ("a", "b", "c")))
    for found, name in ((category_probabilities(response, theta)[..., 1], "p"),
                        (fisher_information(response, theta), "fisher_info")):  # fmt: skip
        expected = np.array([[row[name] for row in rows] for rows in at], float)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def ordered(row):
    return {
        "graded": lambda theta: dist.OrderedLogistic(row["a"] * theta[..., None], -jnp.array(row["d_graded"])),
        "gpcm": lambda theta: AdjacentCategory(row["a"] * theta[..., None], -jnp.diff(jnp.array(row["d_gpcm"]))),
    }


@pytest.mark.float32
@pytest.mark.parametrize("kind", ["graded", "gpcm"])
def test_ordered_items_have_the_probabilities_and_information_of_the_reference(kind):
    # Some traits stand exactly on a threshold.
    theta, items, at = by_item(REFERENCE["polytomous"], ["a", "d_graded"])
    for place, item in enumerate(items):
        response, rows = ordered(item)[kind], [every[place] for every in at]
        expected = np.array([row[f"p_{kind}"] for row in rows], float)
        probabilities = category_probabilities(response, theta)[:, 0]
        np.testing.assert_allclose(probabilities, expected, rtol=0, atol=TOLERANCE)
        scores = expected @ np.arange(expected.shape[1])
        np.testing.assert_allclose(expected_score(response, theta)[:, 0], scores, rtol=0, atol=5 * TOLERANCE)
        information = np.array([row[f"info_{kind}"] for row in rows], float)
        np.testing.assert_allclose(fisher_information(response, theta)[:, 0], information, rtol=0, atol=TOLERANCE)


@pytest.mark.float32
def test_nothing_is_nan_far_away_and_tails_keep_their_digits():
    responses = [*ordered(REFERENCE["polytomous"][0]).values(), logistic(1.8, 0.4), logistic(0.6, 1.5, 0.2)]
    for response in responses:
        far = np.array([-30.0, 30.0])
        assert np.isfinite(category_probabilities(response, far)).all()
        assert np.isfinite(fisher_information(response, far)).all()
    # The last step of a graded scale from above is a logistic item: its information is a^2 exp(-a theta - d).
    row = REFERENCE["polytomous"][0]
    found = fisher_information(ordered(row)["graded"], 30.0)[0]
    tail = np.exp(-row["a"] * 30.0 - row["d_graded"][-1])
    np.testing.assert_allclose(found, row["a"] ** 2 * tail, rtol=1e-4)


def test_information_is_right_where_a_logit_is_zero():
    np.testing.assert_allclose(fisher_information(logistic(2.0, 0.5), 0.5), [1.0])


def test_information_of_several_traits_is_the_outer_product_of_slopes():
    slopes = np.array([[1.0, 0.5], [0.0, 2.0], [-0.7, 0.2]])
    theta = np.array([[0.3, -0.2], [1.0, 0.4]])

    def response(theta):
        return dist.Bernoulli(logits=theta @ slopes.T)

    p = stats.logistic.cdf(theta @ slopes.T)
    expected = (p * (1 - p))[..., None, None] * slopes[:, :, None] * slopes[:, None, :]
    np.testing.assert_allclose(fisher_information(response, theta), expected, rtol=1e-12)
    np.testing.assert_allclose(test_information(response, theta, items=[0, 2]), expected[:, [0, 2]].sum(1), rtol=1e-12)


def test_information_of_normal_answers_counts_mean_and_scale():
    def response(theta):
        return dist.Normal(2.0 * theta[..., None], jnp.exp(0.3 * theta[..., None]))

    # Of N(m, s^2): (m'/s)^2 + 2 (s'/s)^2.
    np.testing.assert_allclose(fisher_information(response, 0.5)[0], 4 * np.exp(-0.3) + 2 * 0.09, rtol=1e-12)


def test_marginal_reliability_is_the_integral():
    response = logistic(np.array([1.0, 1.8, 0.7]), np.array([0.0, 0.4, -1.0]))

    def variance(theta):
        p = stats.logistic.cdf(np.array([1.0, 1.8, 0.7]) * (theta - np.array([0.0, 0.4, -1.0])))
        return 1 / (np.sum(np.square([1.0, 1.8, 0.7]) * p * (1 - p)) + 1 / 1.44)

    expected = 1 - integrate.quad(lambda t: variance(t) * stats.norm.pdf(t, 0.2, 1.2), -12, 12)[0] / 1.44
    found = jax.jit(lambda: marginal_reliability(response, 0.2, 1.44))()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # Of independent traits each has its own; a trait that no item measures has none.
    covariance = jnp.diag(jnp.array([1.44, 1.0]))
    first = lambda theta: response(theta[..., 0])  # noqa: E731
    both = jax.jit(lambda: marginal_reliability(first, jnp.array([0.2, 0.0]), covariance))()
    np.testing.assert_allclose(both, [expected, 0.0], atol=1e-5)


def test_answers_without_categories_and_misshapen_responses_are_refused():
    with pytest.raises(TypeError, match="Poisson has no finite number of answers"):
        category_probabilities(lambda theta: dist.Poisson(jnp.exp(theta[..., None])), 0.0)
    with pytest.raises(ValueError, match="must be"):
        fisher_information(lambda theta: dist.Bernoulli(logits=jnp.zeros((5, 2))), jnp.zeros(3))
