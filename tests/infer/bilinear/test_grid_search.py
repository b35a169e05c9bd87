"""The choice of prior scales and ranks on held-out cells, on counts of known factors and by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext.infer import BilinearVG, grid_search
from tests.infer.bilinear.bilinear_forms import REFERENCE, synthetic_counts

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="compares with float64 results")
TRAIN, TEST = synthetic_counts()
SIZES = {"num_rows": 50, "num_cols": 60}


def model(rows, cols, counts, *, num_rows, num_cols, rank=3):
    variance = numpyro.sample("variance", dist.HalfNormal(1.0))
    with numpyro.plate("rows", num_rows):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
    with numpyro.plate("cols", num_cols):
        z = numpyro.sample("z", dist.Normal(0.0, jnp.sqrt(variance)).expand([rank]).to_event(1))
    numpyro.sample("counts", dist.Poisson(jnp.exp((w[rows] * z[cols]).sum(-1))), obs=counts)


@needs_float64
@pytest.mark.slow
def test_points_need_narrow_priors():
    """On the synthetic counts the test error of points grows with the variance: 1.6 at 0.02, 2.3 at 1."""
    engine = BilinearVG(model, covariance="point", progress_bar=False, tol=1e-5)
    search = grid_search(engine, random.key(0), *TRAIN, param_grid={"variance": [1.0, 0.02]}, num_splits=2, **SIZES)
    assert search.best_params == {"variance": 0.02}
    assert [c.params["variance"] for c in search.results] == [0.02, 1.0]
    assert search.best_score == search.results[0].score == np.mean(search.results[0].scores)
    assert search.results[0].score > search.results[1].score + 0.3
    assert search.results[0].scores.shape == (2,) and search.results[0].converged.all()
    # the refit has seen all training cells, and predicts the test cells as the reference says
    assert search.best_engine._run.reading.index[0].size == len(TRAIN[0])
    assert float(search.best_engine.hyper["variance"].value) == 0.02
    test = float(np.mean(search.best_engine.log_predictive(*TEST, **SIZES)["counts"]))
    reference = json.loads((REFERENCE / "ko-pmf-synth-results.json").read_text())
    (expected,) = (run["MAP"]["nlpd"] for run in reference["runs"] if run["sigma2_v"] == 0.02)
    np.testing.assert_allclose(-test, expected, atol=0.02)


@pytest.mark.slow
def test_a_rank_and_a_score_by_hand():
    """Counts of one component; the score is the mean log predictive probability of the cells that were left out."""
    rng = np.random.default_rng(0)
    rows, cols = np.divmod(np.arange(240), 12)
    counts = rng.poisson(np.exp(np.outer(rng.normal(size=20), rng.normal(size=12)).ravel()))
    engine = BilinearVG(model, covariance="point", progress_bar=False)
    sizes = {"num_rows": 20, "num_cols": 12}
    grid = {"rank": [5, 1], "variance": [1.0]}
    search = grid_search(engine, random.key(3), rows, cols, counts, param_grid=grid, test_size=0.2, **sizes)
    assert search.best_params == {"rank": 1, "variance": 1.0}
    assert search.best_engine.posterior["w"].shape == (20, 1)
    split_key, fit_key = random.split(random.fold_in(random.key(3), 0))
    order = np.asarray(random.permutation(split_key, 240))
    train, test = np.sort(order[48:]), np.sort(order[:48])
    by_hand = BilinearVG(model, covariance="point", progress_bar=False, hyper_values={"variance": 1.0})
    by_hand.run(fit_key, rows[train], cols[train], counts[train], rank=1, **sizes)
    draws = by_hand.posterior
    eta = (draws["w"].mean[rows[test]] * draws["z"].mean[cols[test]]).sum(-1)
    score = float(np.mean(dist.Poisson(jnp.exp(eta)).log_prob(counts[test])))
    np.testing.assert_allclose(search.best_score, score, rtol=1e-5)


def test_bad_input():
    engine = BilinearVG(model, covariance="point", progress_bar=False)
    grid = {"variance": [0.1]}
    for arguments, options, words in (
        ((TRAIN[0], TRAIN[1], 3), {}, "one entry per cell"),
        (TRAIN, {"test_size": 1.5}, "test_size"),
        (TRAIN, {"num_splits": 0}, "num_splits"),
        (TRAIN, {"param_grid": {}}, "at least one value"),
        (TRAIN, {"param_grid": {"variance": []}}, "at least one value"),
        (TRAIN, {"param_grid": {"varience": [1.0]}}, "no latent or param site 'varience'"),
    ):
        with pytest.raises(ValueError, match=words):
            grid_search(engine, random.key(0), *arguments, **{"param_grid": grid, **SIZES, **options})
    zeros = BilinearVG(model, covariance="point", unlisted_cells="zero")
    with pytest.raises(ValueError, match="held out would count as zeros"):
        grid_search(zeros, random.key(0), *TRAIN, param_grid=grid, **SIZES)


@pytest.mark.thorough
def test_fits_that_do_not_converge_are_counted():
    engine = BilinearVG(model, covariance="point", progress_bar=False, num_steps=2)
    with pytest.warns(UserWarning, match="2 of 2 fits"), pytest.warns(UserWarning, match="BilinearVG did not"):
        search = grid_search(engine, random.key(0), *TRAIN, param_grid={"variance": [0.1, 0.2]}, **SIZES)
    assert not any(c.converged.any() for c in search.results)
