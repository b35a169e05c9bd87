"""Models of comparisons: their densities by formula, and the reference values of Ko (2017) through the engines."""

import json
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.util import log_density

from numpyro_ext import EP, LaplaceApproximation, VariationalGaussian, models
from tests.tiers import few

FIRST, SECOND = np.array([0, 1, 2, 0, 3, 1]), np.array([1, 2, 3, 2, 0, 3])
WON, USER = np.array([1, 0, 1, 1, 0, 1]), np.array([0, 0, 1, 1, 1, 0])
KERNEL = np.exp(-0.5 * np.subtract.outer(np.arange(4.0), np.arange(4.0)) ** 2) + 0.1 * np.eye(4)
USERS = np.array([[1.0, 0.4], [0.4, 1.0]])
RNG = np.random.default_rng(0)


def _probit(difference, won=WON):
    return scipy.stats.norm.logcdf((2 * won - 1) * difference).sum()


def test_bradley_terry_is_its_formula():
    s, home = np.array([0.3, -0.5, 0.1, 0.8]), np.array([1, 1, 0, -1, 1, 0])
    values = {"scale": 1.5, "strength": s, "home_advantage": 0.4}
    eta = s[FIRST] - s[SECOND] + 0.4 * home
    prior = scipy.stats.halfnorm.logpdf(1.5, scale=2.0) + scipy.stats.norm.logpdf(s, 0.0, 1.5).sum()
    prior += scipy.stats.norm.logpdf(0.4)
    model = partial(models.bradley_terry, num_items=4, home=home)
    expected = prior - np.logaddexp(0.0, -(2 * WON - 1) * eta).sum()
    np.testing.assert_allclose(log_density(model, (FIRST, SECOND, WON), {}, values)[0], expected, rtol=1e-12)
    # with ties, P(lost) = sigmoid(-c - eta) and P(won) = sigmoid(eta - c)
    results = np.array([0, 1, 2, 1, 0, 2])
    lost, won = 1 / (1 + np.exp(0.6 + eta)), 1 / (1 + np.exp(0.6 - eta))
    mass = np.stack([lost, 1 - lost - won, won])[results, np.arange(6)]
    expected = prior + scipy.stats.halfnorm.logpdf(0.6) + np.log(mass).sum()
    values |= {"tie_width": 0.6}
    found = log_density(partial(model, ties=True), (FIRST, SECOND, results), {}, values)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    draws = Predictive(partial(model, ties=True), num_samples=50)(random.key(0), FIRST, SECOND)
    assert set(np.unique(draws["result"])) == {0, 1, 2}


def test_models_of_many_people_are_their_formulas():
    mvn = scipy.stats.multivariate_normal
    taste, own = RNG.normal(size=(2, 2)), RNG.normal(size=(2, 4))
    V, b = RNG.normal(size=(4, 2)), RNG.normal(size=4)
    f = b + taste @ V.T + 0.7 * own
    model = handlers.substitute(models.collaborative_preferences, {"V": V, "b": b, "sigma": 0.7})
    found, trace = log_density(
        model, (USER, FIRST, SECOND, WON), {"num_users": 2, "kernel": KERNEL, "rank": 2}, {"taste": taste, "own": own}
    )
    expected = scipy.stats.norm.logpdf(taste).sum() + mvn.logpdf(own, cov=KERNEL).sum()
    np.testing.assert_allclose(found, expected + _probit(f[USER, FIRST] - f[USER, SECOND]), rtol=1e-12)
    np.testing.assert_allclose(trace["utility"]["value"], f, rtol=1e-12)

    h, mean = RNG.normal(size=(2, 4)), RNG.normal(size=4)
    options = {"num_users": 2, "kernel": KERNEL, "rank": 2}
    prior = mvn.logpdf(h, cov=KERNEL).sum() + mvn.logpdf(mean, cov=KERNEL)
    for kernel, w in ((None, taste), (USERS, taste.T)):
        weights = taste if kernel is None else w.T
        f = mean + weights @ h
        own_prior = scipy.stats.norm.logpdf(w).sum() if kernel is None else mvn.logpdf(w, cov=USERS).sum()
        found = log_density(
            partial(models.preference_factorization, user_kernel=kernel),
            (USER, FIRST, SECOND, WON),
            options,
            {"weights": w, "tastes": h, "mean": mean},
        )[0]
        expected = prior + own_prior + _probit(f[USER, FIRST] - f[USER, SECOND])
        np.testing.assert_allclose(found, expected, rtol=1e-12)

    f = RNG.normal(size=(2, 4))
    found = log_density(
        models.joint_preference_gp,
        (USER, FIRST, SECOND, WON),
        {"kernel": KERNEL, "user_kernel": USERS},
        {"scale": 0.8, "standardised": f},
    )[0]
    expected = scipy.stats.halfnorm.logpdf(0.8, scale=3.0) + mvn.logpdf(f.ravel(), cov=np.kron(USERS, KERNEL))
    expected += _probit(0.8 * (f[USER, FIRST] - f[USER, SECOND]))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def _reference():
    found = json.loads((Path(__file__).parents[1] / "reference" / "ko-preferences.json").read_text())
    user = np.repeat(np.arange(found["U"]), [len(pairs) for pairs in found["pairs"]])
    first, second = np.concatenate(found["pairs"]).T
    X = np.array(found["X"])
    kernel = np.exp(-np.sum((X[:, None] - X) ** 2, -1) / found["psi"]) + found["alpha"] * np.eye(found["I"])
    values = {"V": np.array(found["V"]), "b": np.array(found["b"]), "sigma": found["sigma2"] ** 0.5}
    return found, (user, first, second, np.ones(user.size, int)), {"num_users": 10, "kernel": kernel, "rank": 2}, values


@pytest.mark.parametrize(
    ("name", "engine", "link"),
    few(
        [
            ("EP", partial(EP, tol=1e-12), "probit"),
            ("VG", partial(VariationalGaussian, tol=1e-12), "probit"),
            ("JK", partial(VariationalGaussian, bound="jaakkola", tol=1e-12), "logit"),
            ("LP", partial(LaplaceApproximation, tol=1e-12), "probit"),
        ],
        2,
    ),
)
def test_engines_reach_the_reference_values(name, engine, link):
    found, arguments, options, values = _reference()
    expected = found["inference"][name]
    run = engine(models.collaborative_preferences, hyper_values=values, progress_bar=False)
    run.run(random.key(0), *arguments, **options, link=link)
    np.testing.assert_allclose(run.log_evidence, expected["objective"], rtol=1e-9)
    if name == "EP":
        user, first, second = np.array(found["queries"]).T
        won = np.ones(user.size, int)
        predicted = run.log_predictive(user, first, second, won, **options, link=link)["won"]
        np.testing.assert_allclose(np.exp(predicted), np.array(expected["predict_m_v_p"])[:, 2], atol=1e-8)


@pytest.mark.thorough
def test_models_without_tastes_and_by_kronecker_agree_with_the_field_written_out():
    values = {"b": np.arange(4) / 4, "sigma": 0.9}
    options = {"num_users": 2, "kernel": KERNEL, "rank": 0}
    few = EP(models.collaborative_preferences, hyper_values=values, progress_bar=False)
    few.run(random.key(0), USER, FIRST, SECOND, WON, **options)
    centred = EP(models.joint_preference_gp, hyper_values={"scale": 0.9}, progress_bar=False)
    centred.run(random.key(0), USER, FIRST, SECOND, WON, kernel=KERNEL, user_kernel=np.eye(2, dtype=int))
    zero = EP(models.collaborative_preferences, hyper_values=values | {"b": np.zeros(4)}, progress_bar=False)
    zero.run(random.key(0), USER, FIRST, SECOND, WON, **options)
    np.testing.assert_allclose(centred.log_evidence, zero.log_evidence, rtol=1e-8)
    assert abs(few.log_evidence - zero.log_evidence) > 0.01


@pytest.mark.thorough
def test_one_person_by_expectation_propagation_agrees_with_samples():
    X, options = np.arange(4), {"jitter": 1e-4}
    ep = EP(models.preference_gp, hyper_values={"scale": 1, "length": 1.5}, progress_bar=False)
    ep.run(random.key(0), X, FIRST, SECOND, WON, **options)
    fixed = handlers.condition(models.preference_gp, {"scale": jnp.array(1.0), "length": jnp.array(1.5)})
    mcmc = MCMC(NUTS(fixed), num_warmup=300, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(1), X, FIRST, SECOND, WON, **options)
    draws, posterior = np.asarray(mcmc.get_samples()["utility"]), ep.posterior["utility"]
    np.testing.assert_allclose(posterior.mean, draws.mean(0), atol=0.1)
    np.testing.assert_allclose(np.sqrt(posterior.variance), draws.std(0), rtol=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: models.bradley_terry(FIRST, SECOND, num_items=3),
            r"first must lie in 0, ..., 2; got values from 0 to 3",
        ),
        (lambda: models.preference_gp(np.arange(4), FIRST, SECOND / 1), "second must be a vector of integers"),
        (lambda: models.preference_gp(np.arange(4), FIRST, SECOND, link="log"), "link must be 'logit' or 'probit'"),
        (
            lambda: models.collaborative_preferences(USER, FIRST, SECOND, num_users=2, kernel=KERNEL, rank=4),
            r"rank must be in 0, ..., 3, below the number of items; got 4",
        ),
        (
            lambda: models.preference_factorization(USER, FIRST, SECOND, num_users=2, kernel=KERNEL, rank=0),
            "rank must be one or more; got 0",
        ),
        (
            lambda: models.preference_factorization(
                USER, FIRST, SECOND, num_users=2, kernel=KERNEL, rank=1, user_kernel=KERNEL
            ),
            "user_kernel must have num_users = 2 rows; got 4",
        ),
        (
            lambda: models.joint_preference_gp(USER, FIRST, SECOND, kernel=KERNEL[0], user_kernel=USERS),
            r"kernel must be a square matrix; got shape \(4,\)",
        ),
        (
            lambda: models.collaborative_preferences(USER, FIRST, SECOND, num_users=2, kernel=np.ones((4, 4)), rank=1),
            "kernel must be symmetric and positive definite",
        ),
        (
            lambda: models.collaborative_preferences(USER, FIRST, SECOND, num_users=2, kernel=KERNEL, rank=1.0),
            "rank must be an integer; got 1.0",
        ),
        (
            lambda: models.preference_gp(np.arange(4.0), FIRST, SECOND, [1]),
            r"won must hold one outcome for each of 6 comparisons; got shape \(1,\)",
        ),
        (
            lambda: models.preference_gp(np.arange(4.0), FIRST, SECOND, [1, -1, 1, 1, -1, 1]),
            "won must be 0 or 1; 2 of 6 are not, the first is -1 at index 1",
        ),
        (lambda: models.bradley_terry(FIRST, SECOND, num_items=4, home=[1, 0]), "home must be a number, or one for"),
        (lambda: models.plackett_luce([2], [[1, 1]], num_items=2), "Items that are tied have no order"),
        (lambda: models.plackett_luce([2], [[1, 2]], num_items=2), "Ranking 0 must hold items from 0 to 1"),
        (lambda: models.plackett_luce([2, 1], [[1, 0], [1, np.nan]], num_items=2), "must hold integers; got float64"),
        (lambda: models.plackett_luce([2, 1], [[1, 0], [1]], num_items=2), "rankings has rows of different lengths"),
        (lambda: models.plackett_luce([[1, 0], [1]], num_items=2), "num_ranked says of each how many entries count"),
        (lambda: models.plackett_luce(2, num_items=2), "num_ranked must have one number for each ranking"),
    ],
)
def test_bad_arguments_are_explained(call, message):
    with pytest.raises(ValueError, match=message):
        handlers.seed(call, random.key(0))()


@pytest.mark.parametrize(
    "model, args, kwargs",
    [
        (models.bradley_terry, (), {"num_items": 4}),
        (models.preference_gp, (np.arange(4.0),), {}),
        (models.preference_factorization, (USER,), {"num_users": 2, "kernel": KERNEL, "rank": 1}),
    ],
)
def test_an_item_compared_with_itself_is_counted(model, args, kwargs):
    second = np.where(np.arange(6) == 4, FIRST, SECOND)
    with pytest.warns(UserWarning, match=r"1 of 6 comparisons are of an item with itself \(the first at index 4\)"):
        handlers.seed(model, random.key(0))(*args, FIRST, second, WON, **kwargs)


@pytest.mark.parametrize(
    "first, second, found",
    [
        (FIRST, SECOND, "do not change if the same is added to its elements 0, 1, 2, 3, as where they are only comp"),
        ([0, 0, 2, 2, 2], [1, 1, 3, 3, 3], "do not change if the same is added to its elements 0, 1, as where"),
        (None, None, "say nothing of its element 3. Give a proper prior"),
    ],
)
@pytest.mark.parametrize("engine", [LaplaceApproximation, EP])
def test_flat_utilities_that_are_only_compared_are_named(engine, first, second, found):
    """Under a flat prior, what the observations do not see has no distribution."""

    def model(won):
        utility = numpyro.sample("utility", dist.ImproperUniform(dist.constraints.real, (), (4,)))
        eta = utility[np.arange(5) % 3] if first is None else utility[np.array(first)] - utility[np.array(second)]
        numpyro.sample("won", dist.Bernoulli(logits=eta), obs=won)

    won = np.array([1, 0, 1, 1, 0, 1])[: 6 if first is FIRST else 5]
    with pytest.raises(ValueError, match=f"The prior of site 'utility' is flat, and the observations {found}"):
        engine(model, progress_bar=False).run(random.key(0), won)
