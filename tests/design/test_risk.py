"""Expected risks against reference values with refits, and the one-step update against refits."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from jax import random
from numpyro import handlers

from numpyro_ext.design import SequentialDesign, expected_risk, site_entropy_reduction
from numpyro_ext.infer import EP, LaplaceApproximation
from numpyro_ext.potentials import ProbitPotential
from tests.compilations import compiled_programs
from tests.tiers import thorough

from .test_scores import PROBLEMS, classifier, pool_of

LOSSES = {
    "zero-one": "Zhu03_expected_min_error_sum",
    "labelled": "Emp_JL",
    "labelled-and-gini": "Kap07_JL_plus_JU",
}


def fitted(args, kind=EP, model=classifier):
    engine = kind(model, progress_bar=False)
    engine.run(random.key(0), *args)
    return engine


@pytest.mark.thorough
@pytest.mark.parametrize("problem", ["tiny", *thorough(*(name for name in PROBLEMS if name != "tiny"))])
def test_refits_give_the_reference_values(problem):
    args, number = pool_of(PROBLEMS[problem])
    engine, expected = fitted(args), PROBLEMS[problem]["expected_risk_after_query"]
    for loss, name in LOSSES.items():
        full = expected_risk(engine, loss=loss, refit="full")["y"]
        assert np.all(full[:number] == -np.inf)
        np.testing.assert_allclose(-full[number:], expected[name], atol=1e-6)
        # one matched factor, which is not yet a fixed point
        np.testing.assert_allclose(-expected_risk(engine, loss=loss)["y"][number:], expected[name], rtol=0.02)
    labels = np.r_[np.zeros(number), np.array(PROBLEMS[problem]["IVM"]["y_star"]) > 0]
    fall = site_entropy_reduction(engine, labels)["y"][number:]
    np.testing.assert_allclose(fall, PROBLEMS[problem]["IVM"]["entropy_decrease_nats"], atol=1e-8)


@pytest.mark.parametrize("problem", ["tiny", *thorough(*(name for name in PROBLEMS if name != "tiny"))])
def test_matching_moments_once_for_each_label_is_assumed_density_filtering(problem):
    """What the one-step risk does with a candidate, from the prior on with one label after the other."""
    x, expected = np.array(PROBLEMS[problem]["X"]), PROBLEMS[problem]["ADF"]
    distance = np.sum(((x[:, None] - x) / np.array(PROBLEMS[problem]["lengthscale"])) ** 2, -1)
    mean, covariance = np.zeros(len(x)), PROBLEMS[problem]["signal_var"] * np.exp(-0.5 * distance)
    evidence = 0.0
    for k in expected["order"]:
        label = ProbitPotential(jnp.array(int(PROBLEMS[problem]["y"][k] > 0)))
        moments = label.tilted_moments(mean[k], covariance[k, k])
        slope = covariance[:, k] / covariance[k, k]
        fall = covariance[k, k] - float(moments.variance)
        mean, evidence = mean + slope * (float(moments.mean) - mean[k]), evidence + float(moments.log_z)
        covariance = covariance - fall * np.outer(slope, slope)
    np.testing.assert_allclose(mean, expected["post_mean"], atol=1e-8)
    np.testing.assert_allclose(covariance, expected["post_cov"], atol=1e-8)
    np.testing.assert_allclose(evidence, expected["log_evidence"], atol=1e-8)


@pytest.mark.thorough
def test_risks_by_refits_compile_nothing_for_one_candidate_less():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 2))
    design = SequentialDesign(fitted((x, np.ones(2), 1.0, x[:, 0] > 0, np.arange(20) < 2)), expected_risk, refit="full")
    before = design.scores()["y"]
    design.observe(19, 1)
    with compiled_programs() as names:
        after = design.scores()["y"]
    assert not names
    assert np.isfinite(after[2:19]).all() and np.isneginf(after[[0, 1, 19]]).all() and np.isfinite(before[2:]).all()


@pytest.mark.thorough
def test_refits_are_runs_of_the_engine():
    args, number = pool_of(PROBLEMS["tiny"])
    engine = fitted(args, LaplaceApproximation)
    candidate = number + 1
    x, lengthscale, variance, y, labelled = args
    seen = labelled.copy()
    seen[candidate] = True
    risks = {}
    for outcome in (0, 1):
        after = fitted(
            (x, lengthscale, variance, np.where(np.arange(7) == candidate, outcome, y), seen), LaplaceApproximation
        )
        f = after.posterior["f"]
        p = scipy.stats.norm.cdf(np.asarray(f.mean) / np.sqrt(1.0 + np.asarray(f.variance)))[number:]
        risks[outcome] = np.sum(np.minimum(p, 1.0 - p))
    f = engine.posterior["f"]
    share = scipy.stats.norm.cdf(float(f.mean[candidate]) / np.sqrt(1.0 + float(f.variance[candidate])))
    risk = (1.0 - share) * risks[0] + share * risks[1]
    np.testing.assert_allclose(-expected_risk(engine, refit="full")["y"][candidate], risk, atol=1e-7)


@pytest.mark.thorough
def test_a_risk_is_an_acquisition_and_a_reference_is_chosen():
    args, number = pool_of(PROBLEMS["n8_2d"])
    design = SequentialDesign(fitted(args), expected_risk, refit="full")
    place = design.propose(random.key(0))
    assert place == np.argmax(expected_risk(fitted(args), refit="full")["y"])
    design.observe(place, 1)
    assert not np.isfinite(design.scores()["y"][place])
    reference = np.arange(len(args[3])) == number + 2
    one = expected_risk(fitted(args), refit="full", reference=reference)["y"][number:]
    assert np.all((-one > 0.0) & (-one < 0.5))


@pytest.mark.slow
def test_the_one_step_update_ranks_as_refits_do():
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = rng.uniform(-3.0, 3.0, (60, 2))
        y = (np.sin(x[:, 0]) + x[:, 1] > 0.0).astype(int)
        engine = fitted((x, np.array([1.2, 1.2]), 4.0, y, np.arange(60) < 15))
        scores = [expected_risk(engine, refit=refit)["y"][15:] for refit in ("one-step", "full")]
        found.append(scipy.stats.spearmanr(*scores).statistic)
    assert np.min(found) >= 0.95, np.sort(found)


@pytest.mark.thorough
def test_what_has_no_risk_is_said():
    args, _ = pool_of(PROBLEMS["tiny"])
    engine = fitted(args)

    def regression(x, y=None, seen=True):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    x = jnp.arange(4.0)
    real = fitted((x, x, np.arange(4) < 2), model=regression)
    everything = fitted((*args[:4], np.ones(7, bool)))
    for call, message in (
        (lambda: expected_risk(engine, loss="brier"), "loss must be one of"),
        (lambda: expected_risk(engine, reference=[True]), "reference has the shape"),
        (lambda: expected_risk(real), "real numbers: a risk is one of counted outcomes"),
        (lambda: expected_risk(everything), "Every observation is in use"),
        (lambda: expected_risk({"f": np.zeros((2, 3))}), "after each observation takes an engine .* of class dict"),
        (lambda: site_entropy_reduction(engine, [0, 1]), r"labels have the shape \(2,\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    # of real outcomes the fall of the entropy is that of the variance
    variance = np.asarray(real.posterior["slope"].variance) * np.asarray(x) ** 2
    expected = 0.5 * np.log1p(variance[2:])
    np.testing.assert_allclose(site_entropy_reduction(real, np.zeros(4))["y"][2:], expected, atol=1e-9)


@pytest.mark.thorough
def test_nothing_is_compiled_for_another_risk():
    args, number = pool_of(PROBLEMS["n8_2d"])
    design = SequentialDesign(fitted(args), expected_risk)
    for _ in range(2):
        design.observe(design.propose(), 1)
    with compiled_programs() as compiled:
        design.observe(design.propose(), 1)
    assert compiled == [] and design.num_observed == number + 3
