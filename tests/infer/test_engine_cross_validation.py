"""Batched folds against one run per fold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer import EP, cross_validate
from numpyro_ext.infer.gaussian.cross_validation import random_folds

FOLDS = np.arange(12) % 3


@pytest.fixture(scope="module")
def scores(counts_case):
    engine = EP(counts_case.model, progress_bar=False)
    return cross_validate(engine, jax.random.key(0), counts_case.t, counts_case.y, num_folds=3, folds=FOLDS)


@pytest.mark.parametrize("fold", [0, 2])
def test_each_fold_is_the_run_with_its_mask(counts_case, scores, fold):
    engine = EP(counts_case.model, progress_bar=False)
    engine.run(jax.random.key(0), counts_case.t, counts_case.y, mask=jnp.asarray(fold != FOLDS))
    held_out = fold == FOLDS
    np.testing.assert_allclose(scores.log_predictive[0][held_out], engine.log_predictive()["y"][held_out], atol=1e-5)
    np.testing.assert_allclose(scores.hyper["scale"][0, fold], engine.hyper["scale"].value, rtol=1e-3)


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


def test_fixed_hyperparameters_and_masked_observations(counts_case):
    engine = EP(counts_case.model, hyper_values={"scale": 0.8}, progress_bar=False)
    found = cross_validate(
        engine, jax.random.key(0), counts_case.t, counts_case.y, num_folds=3, num_draws=2, mask=counts_case.mask
    )
    assert found.log_predictive.shape == (2, 12)
    np.testing.assert_array_equal(found.log_predictive == 0.0, np.broadcast_to(~np.asarray(counts_case.mask), (2, 12)))
    assert not np.array_equal(found.folds[0], found.folds[1])
    np.testing.assert_array_equal(found.hyper["scale"], np.full((2, 3), 0.8))


def test_random_folds_are_even():
    folds = random_folds(jax.random.key(1), (4, 6), 5)
    assert folds.shape == (4, 6)
    assert sorted(np.bincount(folds.reshape(-1)).tolist()) == [4, 5, 5, 5, 5]


def test_folds_that_do_not_fit_are_refused(counts_case):
    engine = EP(counts_case.model, progress_bar=False)
    arguments = (engine, jax.random.key(0), counts_case.t, counts_case.y)
    with pytest.raises(ValueError, match="folds has shape"):
        cross_validate(*arguments, num_folds=3, folds=np.zeros(5, int))
    with pytest.raises(ValueError, match=r"\[2\]"):
        cross_validate(*arguments, num_folds=3, folds=np.arange(12) % 2)
