"""Observations one by one: equal to fits from scratch, nothing compiled, and what can go wrong on the way."""

import pickle

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.design import SequentialDesign, expected_information_gain, predictive_entropy, random_scores
from numpyro_ext.design.prequential import RefitRule
from numpyro_ext.infer import EP, INLA, AdaptiveQuadrature, LaplaceApproximation, VariationalGaussian
from numpyro_ext.potentials import ProbitPotential
from numpyro_ext.potentials.information import expected_information
from tests.compilations import compiled_programs

NUM = 40
X = np.sort(np.random.default_rng(0).uniform(-3.0, 3.0, NUM))
LABELS = (np.sin(2.0 * X) > 0).astype(int)
FIRST = np.arange(NUM) % 13 == 0


def classifier(x, y=None, labelled=True):
    kernel = 4.0 * jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-3 * jnp.eye(len(x))
    f = numpyro.sample("f", dist.MultivariateNormal(0.3, kernel))
    with handlers.mask(mask=labelled):
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(f)), obs=y)


def fitted(kind, seen, values=LABELS, model=classifier, **options):
    engine = kind(model, progress_bar=False, **options)
    engine.run(random.key(0), X, np.where(seen, values, 0), seen)
    return engine


@pytest.fixture(scope="module")
def walked():
    design = SequentialDesign(fitted(EP, FIRST))
    for step in range(10):
        place = design.propose(random.key(step))
        design.observe(place, LABELS[place])
    return design


@pytest.mark.thorough
def test_observations_one_by_one_are_a_fit_from_scratch(walked):
    seen = FIRST.copy()
    seen[walked.history["place"].values] = True
    engine = fitted(EP, seen)
    mean, variance = walked.predictors()["y"]
    np.testing.assert_allclose(mean, engine.posterior["f"].mean, atol=1e-8)
    np.testing.assert_allclose(variance, engine.posterior["f"].variance, atol=1e-8)
    np.testing.assert_allclose(walked.log_evidence, engine.log_evidence, atol=1e-7)
    np.testing.assert_allclose(walked.scores()["y"], expected_information_gain(engine)["y"], atol=1e-8)
    np.testing.assert_allclose(walked.log_evidence, walked.history["log_evidence"].values[-1])
    assert walked.num_observed == seen.sum() and "incremental fits" in repr(walked)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EP, LaplaceApproximation, VariationalGaussian])
def test_a_hundred_observations_are_a_fit_from_scratch(kind):
    rng = np.random.default_rng(0)
    x = rng.uniform(-3.0, 3.0, 150)
    labels, seen = (np.sin(2.0 * x) + rng.normal(size=150) > 0).astype(int), np.arange(150) < 10

    def fit(mask, **options):
        engine = kind(classifier, progress_bar=False, **options)
        engine.run(random.key(0), x, np.where(mask, labels, 0), mask)
        return engine

    design = SequentialDesign(fit(seen))
    while seen.sum() < 110:  # one, two or three at once, some of them proposed
        places = rng.permutation(np.flatnonzero(~seen))[: rng.integers(1, 4)].tolist()
        if rng.random() < 0.3:
            places = [design.propose()]
        design.observe(places, labels[places].tolist())
        seen[places] = True
    engine = fit(seen, tol=1e-12)
    mean, variance = design.predictors()["y"]
    np.testing.assert_allclose(mean, engine.posterior["f"].mean, atol=1e-8)
    np.testing.assert_allclose(variance, engine.posterior["f"].variance, atol=1e-8)
    np.testing.assert_allclose(design.log_evidence, engine.log_evidence, atol=1e-7)


@pytest.mark.thorough
def test_the_order_of_observations_does_not_matter(walked):
    other = SequentialDesign(fitted(EP, FIRST), predictive_entropy)
    places = walked.history["place"].values.tolist()
    other.observe(places[5:], LABELS[places[5:]].tolist())
    other.observe(places[:5], LABELS[places[:5]])
    for one, two in zip(other.predictors()["y"], walked.predictors()["y"], strict=True):
        np.testing.assert_allclose(one, two, atol=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [EP, LaplaceApproximation, VariationalGaussian])
def test_a_design_may_begin_without_labels(kind):
    """The posterior is the prior then, and it is said so: masks of the wrong sense look the same."""
    with pytest.warns(UserWarning, match="of 'y' is masked, so that the posterior is the prior"):
        engine = fitted(kind, np.zeros(NUM, bool))
    assert engine.diagnostics.converged and abs(engine.log_evidence) < 1e-12
    prior = expected_information(ProbitPotential(jnp.ones(())), jnp.array(0.3), jnp.array(4.001))
    np.testing.assert_allclose(expected_information_gain(engine)["y"], prior, rtol=1e-9)
    design = SequentialDesign(engine)
    for place in (3, 0, 7):
        design.observe(place, LABELS[place])
    again = SequentialDesign(fitted(kind, np.isin(np.arange(NUM), [0, 3, 7])))
    np.testing.assert_allclose(design.predictors()["y"], again.predictors()["y"], atol=1e-8)


def test_nothing_is_compiled_for_another_observation():
    design = SequentialDesign(fitted(EP, FIRST))
    for _ in range(2):
        place = design.propose()
        design.observe(place, LABELS[place])
    with compiled_programs() as compiled:
        for _ in range(4):
            place = design.propose()
            design.observe(place, 1 - LABELS[place])
    assert compiled == []


@pytest.mark.slow
def test_refits_learn_hyperparameters_and_points_are_weighted_anew():
    def model(x, y=None, labelled=True):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        kernel = jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-3 * jnp.eye(len(x))
        f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), scale**2 * kernel))
        with handlers.mask(mask=labelled):
            numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(f)), obs=y)

    design = SequentialDesign(fitted(INLA, FIRST, model=model))
    points = [float(inputs[1]["scale"]) for _, inputs in design.engine._run.weighted_points()]
    weights = np.array([weight for weight, _ in design.engine._run.weighted_points()])
    place = design.propose()
    design.observe(place, LABELS[place])
    seen = FIRST.copy()
    seen[place] = True
    gains = []
    for scale in points[:3]:
        pair = [fitted(LaplaceApproximation, s, model=model, hyper_values={"scale": scale}) for s in (FIRST, seen)]
        gains.append(pair[1].log_evidence - pair[0].log_evidence)
    expected = np.log(weights[:3]) + np.array(gains)
    found = np.log(design.source.weights[:3])
    np.testing.assert_allclose(found - found[0], expected - expected[0], atol=1e-6)
    by_hand = fitted(INLA, seen, model=model)
    np.testing.assert_allclose(design.log_evidence, by_hand.log_evidence, atol=0.02)
    engine = design.refit()
    np.testing.assert_allclose(engine.log_evidence, by_hand.log_evidence, atol=1e-4)
    assert design.num_observed == seen.sum() and not np.isfinite(design.scores()["y"][place])


@pytest.mark.thorough
def test_other_models_run_again():
    def model(x, y=None, labelled=True):
        slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        logits = jnp.stack([slopes[0] * x, slopes[1] * x, jnp.zeros_like(x)], -1)
        with handlers.mask(mask=labelled):
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    engine = LaplaceApproximation(model, num_samples=200, progress_bar=False)
    labels = (X > -1.0).astype(int) + (X > 1.0)
    engine.run(random.key(0), X, np.where(FIRST, labels, 0), FIRST)
    design = SequentialDesign(engine)
    assert "several predictors each" in repr(design)
    place = design.propose(random.key(1))
    design.observe(place, labels[place])
    assert design.history["is_refit"].values.all()
    seen = FIRST.copy()
    seen[place] = True
    by_hand = LaplaceApproximation(model, progress_bar=False)
    by_hand.run(random.key(0), X, np.where(seen, labels, 0), seen)
    np.testing.assert_allclose(design.log_evidence, by_hand.log_evidence, atol=1e-6)
    with pytest.raises(ValueError, match="no predictors, as the observations of"):
        design.predictors()


@pytest.mark.thorough
def test_quadrature_over_blocks_runs_again():
    def model(x, y=None, labelled=True):
        with numpyro.plate("blocks", 4):
            effects = numpyro.sample("effects", dist.Normal(0.0, 1.0))
        with handlers.mask(mask=labelled):
            numpyro.sample("y", dist.Bernoulli(logits=effects[jnp.arange(NUM) % 4] + 0.3 * x), obs=y)

    design = SequentialDesign(fitted(AdaptiveQuadrature, FIRST, model=model))
    assert "its algorithm integrates over whole blocks" in repr(design)
    seen = FIRST.copy()
    for step in range(2):
        place = design.propose(random.key(step))
        design.observe(place, LABELS[place])
        seen[place] = True
    by_hand = fitted(AdaptiveQuadrature, seen, model=model)
    np.testing.assert_allclose(design.log_evidence, by_hand.log_evidence, atol=1e-8)
    mean = design.engine.posterior["effects"].mean
    np.testing.assert_allclose(mean, by_hand.posterior["effects"].mean, atol=1e-8)


def test_a_test_score_and_a_refit_every_so_often():
    def brier(source):
        return float(np.mean(predictive_entropy(source)["y"][np.isfinite(predictive_entropy(source)["y"])]))

    design = SequentialDesign(fitted(EP, FIRST), refit_every=2, test=brier)
    for place in (1, 2, 3):
        design.observe(place, LABELS[place])
    history = design.history
    assert history.sizes == {"step": 3} and np.all(np.isfinite(history["test"].values))
    assert history["is_refit"].values.tolist() == [False, True, False]
    assert np.all(np.isnan(history["score"].values))  # nobody proposed them
    engine = fitted(EP, FIRST | (np.arange(NUM) <= 3))
    np.testing.assert_allclose(design.log_evidence, engine.log_evidence, atol=1e-7)
    design.observe([4, 5, 6], LABELS[4:7])  # more than two at once
    design.observe(7, LABELS[7])
    assert design.history["is_refit"].values.tolist() == [False, True, False, True, True, True, False]


def test_scores_that_know_nothing_of_what_is_seen():
    def turned(source, rng_key=None):
        return {name: -scores for name, scores in predictive_entropy(source).items()}  # infinite where there is none

    design = SequentialDesign(fitted(EP, FIRST), turned)
    assert np.all(np.isneginf(design.scores()["y"]) == FIRST) and not FIRST[design.propose()]


@pytest.mark.parametrize("refit_every", [None, 1, "evidence"])
def test_an_interrupted_observation_is_as_if_it_had_not_been_told(refit_every, monkeypatch):
    """Its value was in use and in no history, and telling it again was refused."""
    design = SequentialDesign(fitted(EP, FIRST), refit_every=refit_every)
    before = design.log_evidence
    what = (EP, "run") if refit_every == 1 else (type(design.source), "_update")
    with monkeypatch.context() as patch:
        patch.setattr(*what, interrupt)
        with pytest.raises(KeyboardInterrupt):
            design.observe(1, 1 - LABELS[1])
    assert design.num_observed == FIRST.sum() and design.log_evidence == before and design.history.sizes["step"] == 0
    assert design._rule == RefitRule(refit_every)
    design.observe(1, LABELS[1])
    expected = fitted(EP, FIRST | (np.arange(NUM) == 1))
    np.testing.assert_allclose(design.log_evidence, expected.log_evidence, atol=1e-7)


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.thorough
def test_placeholders_that_are_no_values_do_not_hide_the_observations():
    engine = EP(classifier, progress_bar=False)
    engine.run(random.key(0), X, np.where(FIRST, LABELS, np.nan), FIRST)
    design = SequentialDesign(engine, refit_every=1)
    design.observe(1, LABELS[1])
    expected = fitted(EP, FIRST | (np.arange(NUM) == 1))
    np.testing.assert_allclose(design.log_evidence, expected.log_evidence, atol=1e-7)


def test_a_design_goes_on_from_a_file_and_from_a_pickle(tmp_path):
    design = SequentialDesign(fitted(EP, FIRST), refit_every=3)
    for step in range(4):  # with a refit after the third
        place = design.propose(random.key(step))
        design.observe(place, LABELS[place])
    proposed = design.propose(random.key(9))
    design.save(tmp_path / "design.npz")
    engine = EP.load(tmp_path / "design.npz", classifier)
    engine.progress_bar = False
    others = SequentialDesign.load(tmp_path / "design.npz", engine, refit_every=3), pickle.loads(pickle.dumps(design))
    for other in others:
        assert repr(other) == repr(design)
        np.testing.assert_allclose(other.log_evidence, design.log_evidence, atol=1e-8)
        np.testing.assert_allclose(other.scores()["y"], design.scores()["y"], atol=1e-7)
    for each in (design, *others):
        each.observe(proposed, LABELS[proposed])
        each.observe(each.propose(random.key(10)), 1)  # after which it is refitted
    for other in others:
        for name in ("place", "score", "log_evidence", "is_refit"):
            np.testing.assert_allclose(other.history[name], design.history[name], atol=1e-7)
    design.engine.save(tmp_path / "engine.npz")
    with pytest.raises(ValueError, match="holds no SequentialDesign"):
        SequentialDesign.load(tmp_path / "engine.npz", engine)
    with pytest.raises(ValueError, match="not among those of the saved design"):
        SequentialDesign.load(tmp_path / "design.npz", design.engine)


@pytest.mark.thorough
def test_what_cannot_be_observed_is_said(walked):
    engine = fitted(EP, FIRST)
    design = SequentialDesign(engine, random_scores)
    cases = [
        (lambda: design.observe(0, 1), "has a value already"),
        (lambda: design.observe(NUM, 1), "is no place in site 'y' of shape"),
        (lambda: design.observe(1.5, 1), "is no place"),
        (lambda: design.observe(1, np.nan), "must be one finite number"),
        (lambda: design.observe(1, 2), "2 is no value that observation 1 of site 'y' could have"),
        (lambda: design.observe(1, 0.5), "0.5 is no value"),
        (lambda: design.observe([1, 1], [0, 0]), "told twice at once"),
        (lambda: design.observe(1, "yes"), "must be one finite number, got 'yes'"),
        (lambda: design.observe([1, 2], [0]), "2 places are told, and 1 values"),
        (lambda: design.propose(exclude=np.ones(NUM, bool)), "No candidate is left"),
        (lambda: design.propose(exclude=[True] * 2), r"exclude has the shape \(2,\), and the scores of 'y'"),
        (lambda: design.propose(cost=[1.0] * 2), r"cost has the shape \(2,\), and the scores of 'y'"),
        (lambda: SequentialDesign(engine, refit_every=0), "refit_every must be an integer"),
        (lambda: SequentialDesign(engine, refit_every="often"), "refit_every must be one of 'evidence'"),
        (lambda: SequentialDesign(engine, refit_every=1, mask="seen"), "mask='seen': the arguments of the model are"),
        (lambda: SequentialDesign(fitted(EP, np.ones(NUM, bool))), "Every observation is in use"),
    ]
    before = design.log_evidence
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert design.log_evidence == before and design.num_observed == FIRST.sum()
    with pytest.raises(RuntimeError, match="run"):
        SequentialDesign(EP(classifier))
    with pytest.raises(TypeError, match="takes an engine"):
        SequentialDesign(classifier)
    with pytest.raises(TypeError, match=r"as in propose\(jax.random.key\(0\)\); got 3"):
        design.propose(3)
    with pytest.raises(TypeError, match=r"dictionary of arrays by observed site .* returned a ndarray"):
        SequentialDesign(engine, lambda source, rng_key=None: np.ones(NUM)).propose()


def test_arguments_that_cannot_be_told_are_asked_for():
    def model(x, y, again, labelled):
        classifier(x, y + 0 * again, labelled)

    engine = EP(model, progress_bar=False)
    engine.run(random.key(0), X, np.where(FIRST, LABELS, 0), np.where(FIRST, LABELS, 0), FIRST)
    with pytest.raises(ValueError, match=r"\['y', 'again'\] do. Name it"):
        SequentialDesign(engine, refit_every=1)
    design = SequentialDesign(engine, refit_every=1, observations="y", mask="labelled")
    design.observe(1, 1)
    assert design.num_observed == FIRST.sum() + 1


@pytest.mark.float32
def test_both_precisions_and_the_literals_of_users():
    design = SequentialDesign(fitted(EP, FIRST))
    place = design.propose()
    design.observe(np.int64(place), True)
    design.observe(design.propose(size=2), [1, np.float32(0.0)])
    assert np.all(np.isfinite(design.predictors()["y"][1])) and design.num_observed == FIRST.sum() + 3
