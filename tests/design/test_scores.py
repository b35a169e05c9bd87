"""Scores of engines and of draws: against reference values, closed forms and each other."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_ext import design
from numpyro_ext.design import draws_of, expected_information_gain, select
from numpyro_ext.design.outcomes.sources import outlooks
from numpyro_ext.infer import EP, INLA, LaplaceApproximation
from tests.tiers import thorough

FOLDER = Path(__file__).parents[1] / "reference"
PROBLEMS = json.loads((FOLDER / "active_gpc_inference.json").read_text())
LINEAR = json.loads((FOLDER / "active_bald_core.json").read_text())["linear_gaussian"]
ENGINES = {"EP": EP, "Laplace": LaplaceApproximation}


def classifier(x, lengthscale, signal_variance, y=None, labelled=True):
    distance = jnp.sum(((x[:, None] - x) / lengthscale) ** 2, -1)
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), signal_variance * jnp.exp(-0.5 * distance)))
    with handlers.mask(mask=labelled):
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(f)), obs=y)


def pool_of(problem):
    """Labelled points first, then candidates whose labels are placeholders."""
    x, candidates = np.array(problem["X"]), np.array(problem["X_star"])
    y = np.concatenate([np.array(problem["y"]) > 0, np.zeros(len(candidates), bool)]).astype(int)
    kernel = np.array(problem["lengthscale"]), problem["signal_var"]
    return (np.concatenate([x, candidates]), *kernel, y, np.arange(len(y)) < len(x)), len(x)


@functools.cache
def fitted(problem, name):
    args, number = pool_of(PROBLEMS[problem])
    engine = ENGINES[name](classifier, progress_bar=False)
    engine.run(random.key(0), *args)
    return engine, number


@pytest.mark.thorough
@pytest.mark.parametrize(
    "problem, name", [("tiny", "EP"), *thorough(("tiny", "Laplace"), ("n8_2d", "EP"), ("n8_2d", "Laplace"))]
)
def test_pools_of_the_reference(problem, name):
    engine, number = fitted(problem, name)
    expected = PROBLEMS[problem][name]
    np.testing.assert_allclose(engine.log_evidence, expected["log_evidence"], atol=1e-8)
    f = engine.posterior["f"]
    center = expected["post_mean" if name == "EP" else "mode"]
    np.testing.assert_allclose(f.mean, [*center, *expected["star_mean"]], atol=1e-8)
    np.testing.assert_allclose(f.variance[number:], expected["star_var"], atol=1e-8)
    if name == "EP":
        np.testing.assert_allclose(f.covariance()[:number, :number], expected["post_cov"], atol=1e-8)
    gain = expected_information_gain(engine, units="bits")["y"]
    assert np.all(gain[:number] == -np.inf)
    np.testing.assert_allclose(gain[number:], expected["BALD_exact_bits"], atol=2e-8)
    if name == "EP":
        closed = expected_information_gain(engine, units="bits", method="closed-form")["y"][number:]
        np.testing.assert_allclose(closed, expected["BALD_closed_bits"], atol=1e-8)
        entropy = design.predictive_entropy(engine)["y"][number:] / np.log(2.0)
        np.testing.assert_allclose(entropy, expected["MES_bits"], atol=1e-8)
        votes = design.vote_entropy(engine)["y"][number:] / np.log(2.0)
        np.testing.assert_allclose(votes, expected["QBC_inf_bits"], atol=1e-6)
        share = np.array(expected["p_pos"])
        confidence = 1.0 - design.least_confidence(engine)["y"][number:]
        np.testing.assert_allclose(confidence, np.maximum(share, 1 - share), atol=1e-8)
        np.testing.assert_allclose(design.margin(engine)["y"][number:], -np.abs(2 * share - 1), atol=1e-8)
        np.testing.assert_allclose(design.gini(engine)["y"][number:], 2 * share * (1 - share), atol=1e-8)
        members = design.committee_divergence(engine, num_members=20_000)["y"][number:]
        np.testing.assert_allclose(members / np.log(2.0), gain[number:], atol=0.02)


@pytest.mark.thorough
def test_new_arguments_are_asked_about_like_masked_observations():
    engine, number = fitted("n8_2d", "EP")
    x, lengthscale, variance, *_ = pool_of(PROBLEMS["n8_2d"])[0]
    gain = expected_information_gain(engine)["y"][number:]
    there = expected_information_gain(engine, x[number:], lengthscale, variance)["y"]
    np.testing.assert_allclose(there, gain, atol=1e-9)


@pytest.mark.thorough
def test_draws_tell_what_the_predictors_tell():
    engine, number = fitted("n8_2d", "EP")
    gain = expected_information_gain(engine)["y"][number:]
    sampled = EP(classifier, num_samples=8000, progress_bar=False)
    sampled.run(random.key(1), *pool_of(PROBLEMS["n8_2d"])[0])
    by_draws = expected_information_gain(draws_of(sampled), bias_correction="delta")["y"]
    assert np.all(by_draws[:number] == -np.inf)
    np.testing.assert_allclose(by_draws[number:], gain, atol=0.015)


def regression(x, y=None, seen=True, noise=1.0):
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(x @ slopes, noise), obs=y)


def linear_problem(prior, x, y=None, seen=True, noise=1.0):
    weights = numpyro.sample("weights", dist.MultivariateNormal(jnp.zeros(len(prior)), prior))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(x @ weights, noise), obs=y)


@pytest.fixture(scope="module")
def linear():
    engine = EP(linear_problem, num_samples=4000, progress_bar=False)
    x, y = np.array(LINEAR["X"]), np.array(LINEAR["y"])
    query = np.array(LINEAR["x_query"])
    rows = np.concatenate([x, query[None]])
    seen = np.arange(len(rows)) < len(x)
    noise = np.sqrt(LINEAR["noise_var"])
    engine.run(random.key(0), np.array(LINEAR["prior_cov"]), rows, np.append(y, 0.0), seen, noise)
    return engine


@pytest.mark.thorough
def test_linear_regression_has_a_closed_form(linear):
    gain = expected_information_gain(linear)["y"]
    np.testing.assert_allclose(gain[-1], LINEAR["U_nats"], atol=1e-10)
    focused = expected_information_gain(linear, focus={"weights": LINEAR["focus_idx"]})["y"]
    np.testing.assert_allclose(focused[-1], LINEAR["U_focused_nats"], atol=1e-10)
    np.testing.assert_allclose(expected_information_gain(linear, focus="weights")["y"], gain)
    noise = 0.5 * np.log(2.0 * np.pi * np.e * LINEAR["noise_var"])
    np.testing.assert_allclose(design.predictive_entropy(linear)["y"][-1], LINEAR["U_nats"] + noise, atol=1e-9)
    # as draws say it: real outcomes on a grid
    by_draws = expected_information_gain(draws_of(linear))["y"][-1]
    assert abs(by_draws - LINEAR["U_nats"]) < 0.03


@pytest.mark.thorough
def test_hyperparameters_alone_and_all_together():
    def model(x, y=None, seen=True):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, scale))
        with handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)

    x, y = np.array([1.0, -1.0, 2.0, 0.3]), np.array([2.0, -1.5, 0.0, 0.0])
    engine = INLA(model, progress_bar=False)
    engine.run(random.key(0), x, y, np.array([True, True, False, False]))
    gain = expected_information_gain(engine)["y"]
    hyper = expected_information_gain(engine, focus="scale")["y"]
    assert np.all(hyper[2:] > 0.0) and np.all(hyper[2:] < gain[2:])
    # Against the same quantity on a fine grid of the scale, which is all that the model has beside conjugate algebra.
    log_scale = np.linspace(-5.0, 5.0, 801)
    scales = np.exp(log_scale)[:, None]
    covariance = scales[:, :, None] ** 2 * np.outer(x[:2], x[:2]) + 0.25 * np.eye(2)
    fits = np.einsum("i,kij,j->k", y[:2], np.linalg.inv(covariance), y[:2])
    evidence = -0.5 * (np.linalg.slogdet(covariance)[1] + fits)
    weight = np.exp(evidence - evidence.max() - 0.5 * log_scale**2)
    weight /= weight.sum()
    precision = 1.0 / np.exp(2 * log_scale) + np.sum(x[:2] ** 2) / 0.25
    mean, variance = (x[:2] @ y[:2]) / 0.25 / precision, 1.0 / precision
    for number in (2, 3):
        sd = np.sqrt(x[number] ** 2 * variance + 0.25)
        outcomes = np.linspace(-12.0, 14.0, 8001)
        p = weight @ np.asarray(norm.pdf(outcomes, (x[number] * mean)[:, None], sd[:, None]))
        entropy = -np.sum(p * np.log(np.maximum(p, 1e-300))) * (outcomes[1] - outcomes[0])
        conditional = weight @ (0.5 * np.log(2 * np.pi * np.e * sd**2))
        np.testing.assert_allclose(hyper[number], entropy - conditional, rtol=0.1)
    with pytest.raises(ValueError, match=r"Over \['scale'\] the fit integrates"):
        expected_information_gain(engine, focus="slope")


@pytest.mark.thorough
@pytest.mark.parametrize("likelihood", ["ordered", "counts", "categories"])
def test_other_outcomes_against_draws(likelihood):
    x = np.linspace(-1.0, 1.5, 6)

    def model(x, y=None, seen=True):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        f = slope[0] * x
        site = {
            "ordered": lambda: dist.OrderedLogistic(f, jnp.array([-1.0, 0.5])),
            "counts": lambda: dist.Poisson(jnp.exp(0.5 * f)),
            "categories": lambda: dist.Categorical(logits=jnp.stack([f, slope[1] * x, jnp.zeros_like(x)], -1)),
        }[likelihood]()
        with handlers.mask(mask=seen):
            numpyro.sample("y", site, obs=y)

    y = np.array([1, 0, 2, 0, 0, 0])
    kind = LaplaceApproximation if likelihood == "categories" else EP
    engine = kind(model, num_samples=6000, progress_bar=False)
    engine.run(random.key(0), x, y, np.arange(6) < 3)
    gain = expected_information_gain(engine)["y"]
    assert np.all(gain[:3] == -np.inf)
    by_draws = expected_information_gain(draws_of(engine))["y"]
    np.testing.assert_allclose(by_draws[3:], gain[3:], rtol=0.1, atol=3e-3)


@pytest.mark.slow
def test_samplers_and_guides_are_sources():
    x, y = np.linspace(-2.0, 2.0, 12)[:, None], np.linspace(-1.0, 1.5, 12)
    engine = EP(regression, progress_bar=False)
    engine.run(random.key(0), x, y)
    new = np.array([[0.5], [3.0]])
    expected = expected_information_gain(engine, new)["y"]
    mcmc = MCMC(NUTS(regression), num_warmup=200, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(0), x, y)
    np.testing.assert_allclose(expected_information_gain(mcmc, new)["y"], expected, rtol=0.07)
    guide = AutoMultivariateNormal(regression)
    svi = SVI(regression, guide, numpyro.optim.Adam(0.02), Trace_ELBO(num_particles=4))
    found = svi.run(random.key(1), 1500, x, y, progress_bar=False)
    draws = draws_of(guide, found.params, num_samples=2000, rng_key=random.key(2))
    # of a Gaussian with the variance that the guide has, which is not quite that of the posterior
    wider = np.var(guide.sample_posterior(random.key(3), found.params, sample_shape=(20_000,))["slopes"])
    wider /= engine.posterior["slopes"].variance[0]
    exact = 0.5 * np.log1p(np.expm1(2.0 * expected) * wider)
    np.testing.assert_allclose(expected_information_gain(draws, new)["y"], exact, rtol=0.07)
    assert 0.8 < wider < 1.25
    weighted = draws_of({"slopes": jnp.array([[0.0], [0.5], [0.6]])}, model=regression, weights=[0.0, 1.0, 3.0])
    pair = draws_of({"slopes": jnp.array([[0.5], [0.6]])}, model=regression, weights=[0.25, 0.75])
    both = [expected_information_gain(source, new)["y"] for source in (weighted, pair)]
    np.testing.assert_allclose(*both, rtol=1e-6)


@pytest.mark.thorough
def test_what_cannot_be_asked_is_said(linear):
    engine, _ = fitted("tiny", "EP")
    one, args = draws_of({"f": jnp.zeros((1, 7))}, model=classifier), pool_of(PROBLEMS["tiny"])[0]
    cases = [
        (lambda: expected_information_gain(engine, focus="g"), "focus names 'g', which is no latent site"),
        (lambda: expected_information_gain(engine, focus="y"), "'y', which is an observed site"),
        (lambda: expected_information_gain(engine, focus=[]), "focus names no site"),
        (lambda: expected_information_gain(engine, focus={"f": []}), "focus asks for no element of 'f'"),
        (lambda: expected_information_gain(engine, focus=3), "focus must be names of sites"),
        (lambda: expected_information_gain(draws_of({"f": jnp.full((2, 7), jnp.nan)}, model=classifier), *args), "nan"),
        (lambda: expected_information_gain(engine, focus={"f": 99}), r"'f'\[99\], whose shape is \(7,\)"),
        (lambda: expected_information_gain(engine, units="bans"), "units must be one of"),
        (lambda: design.vote_entropy(linear), "real numbers, of which none has a probability or a vote"),
        (lambda: design.vote_entropy(engine, num_votes=2.5), "num_votes must be a whole number"),
        (lambda: design.random_scores(engine), "random_scores needs a key"),
        (lambda: expected_information_gain(EP(classifier)), "run"),
        (lambda: expected_information_gain(one, *args), "One draw knows nothing"),
        (lambda: draws_of({"f": jnp.zeros((2, 7))}), "Which model are the draws of"),
        (lambda: draws_of({"f": jnp.zeros((2, 7))}, model=classifier, weights=[0.0, 0.0]), "not all zero"),
        (lambda: draws_of({"f": jnp.zeros((2, 7))}, model=classifier, weights=[0.0, 1.0]), "one alone has a weight"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
            call()
    x, *rest = pool_of(PROBLEMS["tiny"])[0]
    everything = EP(classifier, progress_bar=False)
    everything.run(random.key(0), x, *rest[:3], np.ones(7, bool))
    with pytest.raises(ValueError, match="Every observation is in use"):
        expected_information_gain(everything)


def test_draws_that_lack_a_site():
    def model(x, y=None):
        level, slope = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("level", "slope"))
        numpyro.sample("y", dist.Bernoulli(logits=level + slope * x), obs=y)

    draws = draws_of({"level": jnp.array([-1.0, 0.5, 2.0])}, model=model)
    for y in (None, jnp.array([0, 1])):
        with pytest.raises(ValueError, match=r"'y' depends on other sites, .* draws of \['slope'\] as well"):
            expected_information_gain(draws, jnp.array([0.0, 1.0]), y)


@pytest.mark.thorough
def test_errors_of_predictions(linear):
    (outlook,) = outlooks(linear).values()
    places, values = np.array([0, 3]), np.array([0.3, -0.2])
    mean = np.array(LINEAR["X"])[places] @ np.array(LINEAR["post_mean"])
    np.testing.assert_allclose(outlook.error(places, values), np.sqrt(np.mean((mean - values) ** 2)), atol=1e-9)
    engine, number = fitted("tiny", "EP")
    (outlook,) = outlooks(engine).values()
    guess = (np.array(PROBLEMS["tiny"]["EP"]["p_pos"]) > 0.5).astype(int)
    places, wrong = number + np.arange(len(guess)), np.arange(len(guess)) == 1
    assert outlook.error(places, np.where(wrong, 1 - guess, guess)) == 1.0 / len(guess)


@pytest.mark.thorough
def test_a_permutation_of_candidates_permutes_scores():
    engine, number = fitted("n8_2d", "EP")
    args, _ = pool_of(PROBLEMS["n8_2d"])
    order = np.r_[np.arange(number), number + np.random.default_rng(0).permutation(len(args[0]) - number)]
    other = EP(classifier, progress_bar=False)
    other.run(random.key(0), args[0][order], *args[1:3], args[3][order], args[4][order])
    gains = [expected_information_gain(e)["y"] for e in (engine, other)]
    np.testing.assert_allclose(gains[1], gains[0][order], atol=1e-9)


def test_selection():
    scores = {"y": np.array([[0.1, 0.5], [-np.inf, 0.5]]), "z": np.array([0.4])}
    assert select(scores).site == "y" and select(scores).place in [(0, 1), (1, 1)]
    seen = {select(scores, rng_key=key).place for key in random.split(random.key(0), 20)}
    assert seen == {(0, 1), (1, 1)}
    assert [c.site for c in select(scores, 3)] == ["y", "y", "z"]
    assert select(np.array([1.0, 3.0, 2.0]), cost=[1.0, 4.0, 1.0]) == 2
    assert select([1.0, 3.0, 2.0], cost=[1.0, 4.0, 1.0], budget=2.5) == [2, 0]
    assert select([1.0, 3.0, 2.0], exclude=[False, True, False]) == 2
    for kwargs, message in (
        ({"size": 4}, "4 candidates are asked for, and 3 are left"),
        ({"size": 0}, "size must be a whole number"),
        ({"cost": [1.0, 0.0, 1.0]}, "must be positive"),
        ({"budget": 0.5, "cost": 1.0}, "pays for no candidate"),
        ({"exclude": True}, "No candidate is left"),
        ({"exclude": [2]}, "exclude must hold booleans"),
        ({"cost": ["a", "b", "c"]}, "cost must hold numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            select([1.0, 3.0, 2.0], **kwargs)
    for what in ("cost", "exclude"):
        with pytest.raises(ValueError, match=rf"{what} names \['x'\], and there are scores of \['y', 'z'\]"):
            select(scores, **{what: {"x": 1.0}})
    assert select([1.0, np.inf, 2.0], 3) == [1, 2, 0]
    with pytest.raises(ValueError, match="1 scores are nan"):
        select([1.0, np.nan])


@pytest.mark.float32
def test_scores_in_both_precisions():
    engine = EP(regression, progress_bar=False, hyper_values={})
    x = np.linspace(-2.0, 2.0, 5)[:, None].astype(np.float32)
    engine.run(random.key(0), x, np.linspace(-1, 1, 5), np.arange(5) < 3)
    variance = np.asarray(engine.posterior["slopes"].variance)[0]
    expected = 0.5 * np.log1p(variance * x[3:, 0] ** 2)
    np.testing.assert_allclose(expected_information_gain(engine)["y"][3:], expected, rtol=2e-4)
    jax.block_until_ready(engine.get_samples())


@pytest.mark.thorough
def test_vectors_whose_coordinates_depend_on_each_other_are_no_candidates():
    """Their factors are whitened coordinates, which nobody sees."""

    def model(y, mask=True, answer=None):
        mean = numpyro.sample("mean", dist.Normal(0, 2).expand([2]).to_event(1))
        with handlers.mask(mask=mask):
            numpyro.sample("y", dist.MultivariateNormal(mean, jnp.array([[1.0, 0.8], [0.8, 1.0]])).expand([3]), obs=y)
        with handlers.mask(mask=False):
            numpyro.sample("answer", dist.Normal(mean[0], 1.0), obs=0.0)

    y = np.random.default_rng(0).normal(size=(3, 2))
    engine = EP(model, progress_bar=False)
    engine.run(jax.random.key(0), y)
    assert set(expected_information_gain(engine)) == {"answer"}
    engine.run(jax.random.key(0), y, np.array([True, True, False]))
    with pytest.raises(ValueError, match="'y' are vectors"):
        expected_information_gain(engine)
