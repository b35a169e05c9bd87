"""Scores with reference inputs: against dense algebra, grids over outcomes, and information in focus."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.design import (
    SequentialDesign,
    draws_of,
    expected_information_gain,
    expected_variance_reduction,
    mutual_information,
)
from numpyro_ext.infer import EP
from tests.tiers import thorough

X = np.array([-1.0, 0.0, 0.4, 1.0, 1.0, 3.0])  # two of them are the same
NUM, NUM_SEEN = len(X), 2
SEEN = np.arange(NUM) < NUM_SEEN
LABELS = np.array([1, 0, 0, 0, 0, 0])
PRIOR = 2.0 * np.exp(-0.5 * (X[:, None] - X) ** 2) + 1e-9 * np.eye(NUM)
NOISE = np.array([0.3, 0.5, 0.5, 1.0, 1.0, 0.2])


def field(y=None, seen=True, likelihood="noise"):
    f = numpyro.sample("f", dist.MultivariateNormal(0.3, PRIOR))
    site = {
        "noise": lambda: dist.Normal(f, NOISE),
        "probit": lambda: dist.Bernoulli(probs=norm.cdf(f)),
        "binomial": lambda: dist.Binomial(jnp.array([1, 1, 2, 1, 3, 1]), logits=f),
        "heavy": lambda: dist.StudentT(4.0, f, 1.0),
    }[likelihood]()
    with handlers.mask(mask=seen):
        numpyro.sample("y", site, obs=y)


def fitted(likelihood="noise", seen=SEEN, y=LABELS):
    engine = EP(field, progress_bar=False)
    engine.run(random.key(0), y, seen, likelihood=likelihood)
    return engine


@pytest.fixture(scope="module")
def regression():
    return fitted()


@pytest.fixture(scope="module")
def classifier():
    return fitted("probit")


def covariance_given(seen):
    seen = np.flatnonzero(seen)
    known = PRIOR[np.ix_(seen, seen)] + np.diag(NOISE[seen] ** 2)
    return PRIOR - PRIOR[:, seen] @ np.linalg.solve(known, PRIOR[seen])


@pytest.mark.parametrize("reference", [None, [True, False, False, False, False, True]])
def test_falls_of_variances_are_those_of_refits(regression, reference):
    found = expected_variance_reduction(regression, reference=reference)["y"]
    assert np.all(found[SEEN] == -np.inf)
    at = ~SEEN if reference is None else np.array(reference)
    before = np.diag(covariance_given(SEEN))
    for k in np.flatnonzero(~SEEN):
        after = np.diag(covariance_given(SEEN | (np.arange(NUM) == k)))
        np.testing.assert_allclose(found[k], np.sum((before - after)[at]), atol=1e-8)


@pytest.mark.parametrize("likelihood", [pytest.param("probit", marks=pytest.mark.slow), *thorough("binomial")])
def test_falls_of_variances_by_a_grid_over_the_predictor(likelihood):
    engine = fitted(likelihood)
    found = expected_variance_reduction(engine)["y"]
    mean, covariance = np.asarray(engine.posterior["f"].mean), np.asarray(engine.posterior["f"].covariance())
    z = np.linspace(-9.0, 9.0, 2001)
    weight = np.exp(-0.5 * z**2) / np.sum(np.exp(-0.5 * z**2))
    for k in np.flatnonzero(~SEEN):
        eta = mean[k] + np.sqrt(covariance[k, k]) * z
        trials = [1, 1, 2, 1, 3, 1][k] if likelihood == "binomial" else 1
        p = np.asarray(norm.cdf(eta)) if likelihood == "probit" else 1.0 / (1.0 + np.exp(-eta))
        left = 0.0
        for y in range(trials + 1):
            joint = weight * np.exp(np.asarray(dist.Binomial(trials, p).log_prob(y)))
            share = joint / joint.sum()
            left += joint.sum() * (share @ eta**2 - (share @ eta) ** 2)
        slopes = covariance[k, ~SEEN] / covariance[k, k]
        np.testing.assert_allclose(found[k], np.sum(slopes**2) * (covariance[k, k] - left), rtol=1e-7)


@pytest.mark.thorough
def test_hyperparameters_that_are_integrated_over_take_part():
    x = np.array([1.0, -1.0, 2.0, 0.3])

    def model(y, seen):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        level = numpyro.sample("level", dist.Normal(0.0, scale))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(level + slope * x, 0.5 + 0.2 * scale), obs=y)

    engine = EP(model, integrate="grid", progress_bar=False)
    engine.run(random.key(0), np.array([2.0, -1.5, 0.0, 0.0]), np.arange(4) < 2)
    found = expected_variance_reduction(engine)["y"]
    run = engine._finished()
    points = []
    for weight, inputs in run.weighted_points():
        maps = [np.asarray(v) for v in run.programs.stacked_moments(*inputs, names=("level", "slope"))]
        design = np.stack([np.ones(4), x], 1)
        root = design @ maps[1]
        noise = 0.5 + 0.2 * float(inputs[1]["scale"])
        points.append((weight, design @ maps[0], root @ root.T, noise**2))
    assert len(points) > 3
    y = np.linspace(-400.0, 400.0, 80001)
    for k in (2, 3):
        # the variance of the mixture after each outcome, over all outcomes
        logs = [np.log(w) - 0.5 * ((y - m[k]) ** 2 / (c[k, k] + s) + np.log(c[k, k] + s)) for w, m, c, s in points]
        share = np.exp(logs - np.logaddexp.reduce(logs))
        total = np.exp(np.logaddexp.reduce(logs)) / np.sqrt(2 * np.pi)
        fall = 0.0
        for r in (2, 3):
            means = np.stack([m[r] + c[k, r] / (c[k, k] + s) * (y - m[k]) for _, m, c, s in points])
            variances = np.array([c[r, r] - c[k, r] ** 2 / (c[k, k] + s) for _, _, c, s in points])
            mixed = (share * means).sum(0)
            after = (share * (variances[:, None] + (means - mixed) ** 2)).sum(0)
            first = sum(w * m[r] for w, m, _, _ in points)
            before = sum(w * (c[r, r] + (m[r] - first) ** 2) for w, m, c, _ in points)
            fall += before - np.sum(after * total) * (y[1] - y[0])
        np.testing.assert_allclose(found[k], fall, rtol=1e-5)


@pytest.mark.thorough
def test_information_about_the_rest_is_information_in_focus(regression, classifier):
    for engine in (regression, classifier):
        found = mutual_information(engine)["y"]
        for k in np.flatnonzero(~SEEN):
            rest = [j for j in np.flatnonzero(~SEEN) if j != k]
            focused = expected_information_gain(engine, focus={"f": rest})["y"]
            np.testing.assert_allclose(found[k], focused[k], atol=1e-6)
        full = expected_information_gain(engine)["y"]
        np.testing.assert_allclose(found[3:5], full[3:5], atol=1e-6)  # each is known once the other is
        assert np.all(found[~SEEN] < full[~SEEN] + 1e-9) and found[5] < 0.1 * full[5]
    # of chosen references, the candidates among them or not
    reference = np.array([True, False, True, False, False, False])
    found = mutual_information(classifier, reference=reference)["y"]
    for k, rest in ((2, [0]), (3, [0, 2]), (5, [0, 2])):
        focused = expected_information_gain(classifier, focus={"f": rest})["y"][k]
        np.testing.assert_allclose(found[k], focused, atol=1e-6)


def test_information_about_outcomes_is_a_ratio_of_variances(regression):
    found = mutual_information(regression, about="outcomes")["y"]
    outcomes = covariance_given(SEEN) + np.diag(NOISE**2)
    for k in np.flatnonzero(~SEEN):
        rest = [j for j in np.flatnonzero(~SEEN) if j != k]
        left = outcomes[k, k] - outcomes[k, rest] @ np.linalg.solve(outcomes[np.ix_(rest, rest)], outcomes[rest, k])
        np.testing.assert_allclose(found[k], 0.5 * np.log(outcomes[k, k] / left), atol=1e-9)


@pytest.mark.thorough
def test_pools_and_new_arguments_are_sources(classifier):
    for score in (expected_variance_reduction, mutual_information):
        design = SequentialDesign(classifier, score)
        expected = score(classifier)["y"]
        np.testing.assert_allclose(design.scores()["y"], expected, atol=1e-7)
        again = score(classifier, None, likelihood="probit")["y"]  # all of them, seen or not
        wanted = score(classifier, None, likelihood="probit", reference=~SEEN)["y"]
        assert np.isfinite(again).all()
        np.testing.assert_allclose(wanted[~SEEN], expected[~SEEN], atol=1e-6)


@pytest.mark.thorough
def test_what_has_no_references_is_said(regression, classifier):
    everything, heavy = fitted(seen=np.ones(NUM, bool)), fitted("heavy")
    draws = draws_of({"f": np.zeros((3, NUM))}, model=field)
    for call, message in (
        (lambda: expected_variance_reduction(everything), "Every observation is in use"),
        (lambda: expected_variance_reduction(draws), "a PosteriorDraws does not know"),
        (lambda: mutual_information({"f": np.zeros(2)}), "Which model are the draws of"),
        (lambda: expected_variance_reduction(heavy), "a noise that is not Gaussian"),
        (lambda: mutual_information(heavy), "only Gaussian noise and outcomes that can be counted"),
        (lambda: mutual_information(classifier, about="outcomes"), "about='outcomes' needs Gaussian noise"),
        (lambda: mutual_information(classifier, about="y"), "about must be one of"),
        (lambda: mutual_information(regression, reference=np.zeros(NUM, bool)), "reference marks no observation"),
        (lambda: expected_variance_reduction(regression, reference=[1, 2]), "must hold booleans in the shape"),
        (lambda: expected_variance_reduction(regression, reference={"z": SEEN}), r"reference names \['z'\]"),
    ):
        with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
            call()
