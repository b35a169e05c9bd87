"""Batched folds against one run per fold."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_ext.distributions import StickBreakingCategorical
from numpyro_ext.infer import EP, VariationalGaussian, cross_validate
from numpyro_ext.infer.gaussian.cross_validation import random_folds
from tests.tiers import few

FOLDS = np.arange(12) % 3


@pytest.fixture(scope="module")
def scores(counts_case):
    engine = EP(counts_case.model, progress_bar=False)
    return cross_validate(engine, jax.random.key(0), counts_case.t, counts_case.y, num_folds=3, folds=FOLDS)


@pytest.mark.thorough
@pytest.mark.parametrize("fold", few([0, 2], 1))
def test_each_fold_is_the_run_with_its_mask(counts_case, scores, fold):
    engine = EP(counts_case.model, integrate="none", progress_bar=False)
    engine.run(jax.random.key(0), counts_case.t, counts_case.y, mask=jnp.asarray(fold != FOLDS))
    held_out = fold == FOLDS
    np.testing.assert_allclose(scores.log_predictive[0][held_out], engine.log_predictive()["y"][held_out], atol=1e-5)
    np.testing.assert_allclose(scores.hyper["scale"][0, fold], engine.hyper["scale"].value, rtol=1e-3)


@pytest.mark.thorough
def test_shapes_and_convergence(scores):
    assert scores.log_predictive.shape == (1, 12)
    assert scores.hyper["scale"].shape == (1, 3)
    assert scores.converged.all()
    np.testing.assert_array_equal(scores.folds, FOLDS[None])


@pytest.mark.slow
def test_folds_side_by_side_give_the_same(counts_case, scores):
    found = cross_validate(
        EP(counts_case.model, progress_bar=False),
        jax.random.key(0),
        counts_case.t,
        counts_case.y,
        num_folds=3,
        folds=FOLDS,
        batch_size=3,
    )
    np.testing.assert_allclose(found.log_predictive, scores.log_predictive, atol=1e-6)


@pytest.mark.thorough
def test_fixed_hyperparameters_and_masked_observations(counts_case):
    engine = EP(counts_case.model, hyper_values={"scale": 0.8}, progress_bar=False)
    found = cross_validate(
        engine,
        jax.random.key(0),
        counts_case.t,
        counts_case.y,
        num_folds=3,
        num_draws=2,
        mask=counts_case.mask.tolist(),
    )
    assert found.log_predictive.shape == (2, 12)
    is_masked = np.broadcast_to(~np.asarray(counts_case.mask), (2, 12))
    np.testing.assert_array_equal(found.log_predictive == 0.0, is_masked)
    np.testing.assert_array_equal(found.folds == -1, is_masked)
    sizes = [np.bincount(folds[folds >= 0]) for folds in found.folds]
    assert np.ptp(sizes) <= 1 and np.sum(sizes) == np.sum(~is_masked)
    assert f"of {np.sum(~is_masked) // 2} observations" in repr(found)
    assert not np.array_equal(found.folds[0], found.folds[1])
    np.testing.assert_array_equal(found.hyper["scale"], np.full((2, 3), 0.8))


def test_what_a_run_says_of_its_model_does_not_change_with_other_readings():
    def model(name, y, mask=True):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample(name, dist.Normal(level, 1.0), obs=y)

    engine = VariationalGaussian(model, progress_bar=False)
    engine.run(jax.random.key(0), "first", jnp.arange(4.0))
    described = engine.describe()
    assert "expectation: first" in described
    cross_validate(engine, jax.random.key(0), "second", jnp.arange(4.0), num_folds=2)
    assert engine.describe() == described


def test_random_folds_are_even():
    folds = random_folds(jax.random.key(1), (4, 6), 5)
    assert folds.shape == (4, 6)
    assert sorted(np.bincount(folds.reshape(-1)).tolist()) == [4, 5, 5, 5, 5]


@pytest.mark.thorough
def test_folds_may_be_labels(counts_case, scores):
    labels = np.array(["north", "south", "west"])[np.asarray(FOLDS)]
    engine = EP(counts_case.model, progress_bar=False)
    found = cross_validate(engine, jax.random.key(0), counts_case.t, counts_case.y, folds=list(labels))
    np.testing.assert_array_equal(found.log_predictive, scores.log_predictive)


def test_folds_that_do_not_fit_are_refused(counts_case):
    engine = EP(counts_case.model, progress_bar=False)
    arguments = (engine, jax.random.key(0), counts_case.t, counts_case.y)
    with pytest.raises(ValueError, match="folds has shape"):
        cross_validate(*arguments, num_folds=3, folds=np.zeros(5, int))
    with pytest.raises(ValueError, match=r"\[2\]"):
        cross_validate(*arguments, num_folds=3, folds=np.arange(12) % 2)


def sticks(label, mask=True, unused=True):
    eta = numpyro.sample("eta", dist.Normal(jnp.array([0.5, -0.3]), 1.5).to_event(1))
    with numpyro.plate("observations", len(label)), handlers.mask(mask=mask):
        numpyro.sample("y", StickBreakingCategorical(jnp.broadcast_to(eta, (len(label), 2))), obs=label)


def test_a_mask_that_does_not_reach_the_observations_is_refused():
    label = jnp.array([0, 1, 2, 2, 1, 0])
    with pytest.raises(ValueError, match=r"2 observations that unused= leaves out are still in use.*handlers\.mask"):
        cross_validate(EP(sticks), jax.random.key(0), label, mask_argument="unused", num_folds=3)

    def half_masked(label, mask=True):
        sticks(label, mask if mask is True else mask & (jnp.arange(6) > 1) & (jnp.arange(6) < 5))

    with pytest.raises(ValueError, match="observations that mask= keeps are masked"):
        cross_validate(EP(half_masked), jax.random.key(0), label, num_folds=3, folds=np.arange(6) % 3)


@pytest.mark.thorough
def test_categories_of_several_rows_are_scored_by_the_fold_that_did_not_see_them():
    label, folds = jnp.array([0, 1, 2, 2, 1, 0]), np.arange(6) % 3
    engine = EP(sticks, progress_bar=False)
    found = cross_validate(engine, jax.random.key(0), label, num_folds=3, folds=folds)
    assert found.log_predictive.shape == (1, 6)
    engine.run(jax.random.key(0), label, mask=jnp.asarray(folds != 1))
    np.testing.assert_allclose(found.log_predictive[0][folds == 1], engine.log_predictive()["y"][folds == 1], rtol=1e-6)


@pytest.mark.thorough
def test_missing_values_are_not_scored(counts_case):
    """A count coded -1 that the model masks by itself: the other scores are those of a mask that is given."""

    def model(t, y, mask=True):
        counts_case.model(t, y, mask=mask & (y >= 0))

    engine = EP(model, hyper_values={"scale": 0.8}, progress_bar=False)
    coded = counts_case.y.at[jnp.array([2, 7])].set(-1)
    arguments = {"num_folds": 3, "folds": FOLDS}
    found = cross_validate(engine, jax.random.key(0), counts_case.t, coded, **arguments).log_predictive
    engine = EP(counts_case.model, hyper_values={"scale": 0.8}, progress_bar=False)
    expected = cross_validate(
        engine, jax.random.key(0), counts_case.t, counts_case.y, mask=coded >= 0, **arguments
    ).log_predictive
    assert np.all(expected[:, [2, 7]] == 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.thorough
def test_a_model_without_a_mask_is_masked_at_its_observations(counts_case, scores):
    def model(t, y=None):
        counts_case.model(t, y)

    found = cross_validate(EP(model, progress_bar=False), jax.random.key(0), counts_case.t, counts_case.y, folds=FOLDS)
    assert found.hyper["scale"].shape == (1, 3)
    np.testing.assert_allclose(found.log_predictive, scores.log_predictive, atol=1e-6)


@pytest.mark.thorough
def test_the_model_is_read_once_whatever_the_number_of_folds():
    y, calls = jnp.array([0.4, -1.0, 2.0, 0.1, 1.3, 0.9]), []

    def model(y, mask=True):
        calls.append(mask)
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(level, 1.0), obs=y)

    def looks_at_its_mask(y, mask=True):
        model(y, jnp.asarray(np.asarray(mask)))

    found, counts = {}, {}
    for num_folds in (2, 6):
        for function in (model, looks_at_its_mask):
            calls.clear()
            folds = np.arange(6) % num_folds
            key = num_folds, function is model
            found[key] = cross_validate(EP(function, progress_bar=False), jax.random.key(0), y, folds=folds)
            counts[key] = len(calls)
    for num_folds in (2, 6):
        one, each = (found[num_folds, is_plain].log_predictive for is_plain in (True, False))
        np.testing.assert_allclose(one, each, rtol=1e-6)
    assert counts[6, True] <= counts[2, True]
    assert counts[6, False] > counts[2, False]
