"""Observations chosen together: against determinants, sums over all outcomes, and integrals."""

import itertools
import json
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers
from scipy.special import entr

from numpyro_ext.design import SequentialDesign, draws_of, expected_information_gain, select, select_batch
from numpyro_ext.infer import EP

CORE = json.loads((Path(__file__).parents[1] / "reference" / "active_bald_core.json").read_text())
X = np.array([-1.0, 0.0, 0.4, 1.0, 1.0, 3.0])  # two of them are the same
NUM, NOISE = len(X), 0.05
SEEN = np.arange(NUM) < 2
LABELS = np.array([1, 0, 0, 0, 0, 0])
PRIOR = 2.0 * np.exp(-0.5 * (X[:, None] - X) ** 2) + 1e-9 * np.eye(NUM)


def field(y=None, seen=True, likelihood="noise", prior=PRIOR, noise=NOISE**0.5):
    f = numpyro.sample("f", dist.MultivariateNormal(0.3, prior))
    site = {
        "noise": lambda: dist.Normal(f, noise),
        "probit": lambda: dist.Bernoulli(probs=norm.cdf(f)),
        "heavy": lambda: dist.StudentT(4.0, f, 1.0),
    }[likelihood]()
    with handlers.mask(mask=seen):
        numpyro.sample("y", site, obs=y)


def fitted(likelihood="noise", seen=SEEN, y=LABELS, **kwargs):
    engine = EP(field, progress_bar=False)
    engine.run(random.key(0), y, seen, likelihood=likelihood, **kwargs)
    return engine


@pytest.fixture(scope="module")
def regression():
    return fitted()


@pytest.fixture(scope="module")
def classifier():
    return fitted("probit")


def joint_gain(engine, places):
    covariance = np.asarray(engine.posterior["f"].covariance())[np.ix_(places, places)]
    return 0.5 * np.linalg.slogdet(np.eye(len(places)) + covariance / NOISE)[1]


@pytest.mark.thorough
def test_gaussian_noise_by_determinants(regression):
    batch = select_batch(regression, 3)
    places = [candidate.place for candidate in batch]
    for number in range(3):
        left = [k for k in range(2, NUM) if k not in places[:number]]
        gains = [joint_gain(regression, [*places[:number], k]) for k in left]
        # of the two that are the same either may be taken
        np.testing.assert_allclose(sum(batch.gains[: number + 1]), max(gains), atol=1e-7)
        assert gains[left.index(places[number])] > max(gains) - 1e-7
    assert not {3, 4} <= set(places) and {3, 4} <= {c.place for c in select(expected_information_gain(regression), 3)}
    best = max(joint_gain(regression, list(some)) for some in itertools.combinations(range(2, NUM), 3))
    assert (1 - np.exp(-1)) * best <= batch.information <= best + 1e-7
    assert batch.method == "log-determinants" and batch.guarantee.startswith("at least 1 - 1/e")
    by_cost = select_batch(regression, 2, cost=[1, 1, 1, 9, 9, 9], exclude=X == 0.4)
    assert {c.place for c in by_cost} <= {3, 4, 5} and by_cost.guarantee.startswith("none: by gain per cost")


def test_the_counter_example_of_submodularity():
    joint = np.array([[2.0, 1.0, 1.0], [1.0, 2.0, 0.0], [1.0, 0.0, 2.0]])
    prior = joint - np.diag([0.5, 0.5, 0.0])  # observations have the covariance of the example
    noise = np.sqrt([0.5, 0.5, 1e14])  # what is seen says nothing
    engine = fitted(y=np.zeros(3), seen=np.array([False, False, True]), prior=prior, noise=noise)
    batch = select_batch(engine, 2, focus={"f": [2]})
    expected = CORE["submodularity"]
    np.testing.assert_allclose(batch.gains, [expected["IG_y1"], expected["increment_after_y1"]], atol=1e-10)
    np.testing.assert_allclose(batch.information, expected["IG_y1y2"], atol=1e-10)
    assert [c.place for c in batch] == [0, 1] and "nuisance" in batch.guarantee


def information_of(p, weights, places):
    """Of all configurations of the outcomes, one by one."""
    joint = np.ones((len(p), 1))
    for k in places:
        joint = (joint[:, :, None] * p[:, k, None, :]).reshape(len(p), -1)
    return entr(weights @ joint).sum() - weights @ entr(joint).sum(-1)


def choice(logits_shape, y=None, seen=True):
    logits = numpyro.sample("logits", dist.Normal(0, 1).expand(logits_shape).to_event(len(logits_shape)))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_outcomes_of_draws_are_counted(is_weighted):
    rng = np.random.default_rng(0)
    logits = 2.0 * rng.normal(size=(6, 7, 3))
    logits[:, 1] = logits[:, 0] = 3.0 * logits[:, 0]  # tells the most, twice
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    weights = rng.dirichlet(np.ones(6)) if is_weighted else np.full(6, 1 / 6)
    draws = draws_of({"logits": logits}, model=choice, weights=weights if is_weighted else None)
    with pytest.warns(UserWarning, match="under draws that are worth"):
        batch = select_batch(draws, 4, (7, 3))
    places = [c.place for c in batch]
    for number in range(4):
        left = [k for k in range(7) if k not in places[:number]]
        gains = [information_of(p, weights, [*places[:number], k]) for k in left]
        np.testing.assert_allclose(sum(batch.gains[: number + 1]), max(gains), atol=1e-10)
    assert places[0] in (0, 1) and places[1] not in (0, 1)
    # with fewer configurations than there are, some are drawn
    with pytest.warns(UserWarning, match="under draws that are worth"):
        sampled = select_batch(draws, 4, (7, 3), num_configurations=20)
    exact = [information_of(p, weights, [c.place for c in sampled][: k + 1]) for k in range(4)]
    np.testing.assert_allclose(np.cumsum(sampled.gains), exact, atol=0.05)
    assert sampled.method.startswith("20 draws of the outcomes")


@pytest.mark.thorough
def test_probit_batches_by_quadrature(classifier):
    batch = select_batch(classifier, 2, num_draws=8000, rng_key=random.key(1))
    places = [c.place for c in batch]
    assert len({0.0 if p in (3, 4) else p for p in places}) == 2  # not the same twice
    mean = np.asarray(classifier.posterior["f"].mean)[places]
    root = np.linalg.cholesky(np.asarray(classifier.posterior["f"].covariance())[np.ix_(places, places)])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    z = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
    mass = np.outer(weights, weights).reshape(-1) / weights.sum() ** 2
    p = np.asarray(norm.cdf(mean + z @ root.T))
    table = np.stack([1.0 - p, p], -1)
    # three standard errors of 8000 draws, and the outcomes of the estimator over twice the draws
    for number, places in ((1, [0]), (2, [0, 1])):
        np.testing.assert_allclose(sum(batch.gains[:number]), information_of(table, mass, places), atol=0.02)
    single = expected_information_gain(classifier)["y"]
    np.testing.assert_allclose(batch.gains[0], single.max(), atol=0.02)
    design = SequentialDesign(classifier)
    design.observe(select_batch(design.source, 2), [1, 0])
    assert design.num_observed == 4


@pytest.mark.slow
def test_hyperparameters_are_told_of_by_several_outcomes():
    x = np.array([1.0, -1.0, 2.0, 0.3, 2.0])

    def model(y, seen):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
        slope = numpyro.sample("slope", dist.Normal(0.0, scale))
        with handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(slope * x, 0.5 * scale), obs=y)

    engine = EP(model, integrate="grid", progress_bar=False)
    engine.run(random.key(0), np.array([2.0, -1.5, 0.0, 0.0, 0.0]), np.arange(5) < 2)
    batch = select_batch(engine, 2, num_draws=4000)
    places = [c.place for c in batch]
    single = expected_information_gain(engine)["y"]
    np.testing.assert_allclose(batch.gains[0], single.max(), atol=2e-3)
    run = engine._finished()
    y = np.stack(np.meshgrid(*[np.linspace(-40.0, 40.0, 801)] * 2), -1)
    density, conditional, hyper = 0.0, 0.0, 0.0
    for weight, inputs in run.weighted_points():
        mean, root = (np.asarray(v) for v in run.programs.stacked_moments(*inputs, names=("slope",)))
        at, noise = x[places], 0.25 * float(inputs[1]["scale"]) ** 2
        covariance = np.outer(at, at) * (root @ root.T)[0, 0] + noise * np.eye(2)
        away = y - at * mean[0]
        quadratic = np.einsum("...i,ij,...j", away, np.linalg.inv(covariance), away)
        part = np.exp(-0.5 * quadratic) / (2 * np.pi * np.sqrt(np.linalg.det(covariance)))
        density = density + weight * part
        conditional += weight * np.log(2 * np.pi * np.e * noise)
        hyper += weight * 0.5 * np.linalg.slogdet(2 * np.pi * np.e * covariance)[1]
    entropy = np.sum(entr(density)) * 0.1**2
    np.testing.assert_allclose(np.sum(density) * 0.1**2, 1.0, atol=1e-3)
    np.testing.assert_allclose(batch.information, entropy - conditional, atol=0.01)
    focused = select_batch(engine, 2, focus="scale", num_draws=4000)
    assert "nuisance" in focused.guarantee
    np.testing.assert_allclose(focused.gains[0], expected_information_gain(engine, focus="scale")["y"].max(), atol=2e-3)
    if {c.place for c in focused} == set(places):
        np.testing.assert_allclose(focused.information, entropy - hyper, atol=0.01)


@pytest.mark.thorough
def test_what_is_no_batch_is_said(regression, classifier):
    everything, heavy = fitted(seen=np.ones(NUM, bool)), fitted("heavy")
    draws = draws_of(regression)
    for call, message in (
        (lambda: select_batch(regression, 5), "5 candidates are asked for, and there are 4"),
        (lambda: select_batch(regression, 0), "size must be a whole number"),
        (lambda: select_batch(regression, 2.0), "size must be a whole number"),
        (lambda: select_batch(everything, 1), "Every observation is in use"),
        (lambda: select_batch(regression, 1, cost=[1, 1, 0, 1, 1, 1]), "Costs must be positive"),
        (lambda: select_batch(regression, 1, cost=[1, 1]), "cost must hold numbers in the shape"),
        (lambda: select_batch(regression, 1, exclude=[1, 1]), "exclude must hold booleans in the shape"),
        (lambda: select_batch(regression, 1, exclude=True), "1 candidates are asked for, and there are 0"),
        (lambda: select_batch(regression, 1, focus="g"), "focus names 'g'"),
        (lambda: select_batch(classifier, 1, focus={"f": [0]}), "has no rule here: leave focus out"),
        (lambda: select_batch(heavy, 1), "a noise that is not Gaussian"),
        (lambda: select_batch(draws, 1), "draws in the place of predictors"),
        (lambda: select_batch(regression, 1, num_draws=1), "num_draws must be an integer of at least 2"),
        (lambda: select_batch({"f": 1}, 1), "no draws|Which model"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
