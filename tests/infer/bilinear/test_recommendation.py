"""Rankings of bilinear posteriors: against the predictions of single cells, and ranks counted one by one."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext.infer import BilinearVG, ranking_quality, recommend_items
from numpyro_ext.models import binary_factorization

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
R, C = 12, 9
RNG = np.random.default_rng(3)
ONES = RNG.uniform(size=(R, C)) < 0.35
ONES[np.arange(R), np.arange(R) % C] = True
TEST = np.arange(R), np.array([RNG.choice(np.flatnonzero(~row)) for row in ONES])
ROWS, COLS = np.nonzero(ONES)


@pytest.fixture(scope="module")
def engine():
    engine = BilinearVG(
        binary_factorization, bound="jaakkola", unlisted_cells="zero", num_restarts=0, progress_bar=False
    )
    engine.run(random.key(0), ROWS, COLS, np.ones(ROWS.size, int), num_rows=R, num_cols=C, rank=2)
    return engine


@needs_float64
@pytest.mark.thorough
def test_scores_are_probabilities_of_cells(engine):
    """The scores are the exact logistic integrals of all cells to the error of MacKay's approximation, in their order;
    taste knows no biases of columns."""
    rows, cols = np.divmod(np.arange(R * C), C)
    exact = np.asarray(engine.predictive_mean(rows, cols, num_rows=R, num_cols=C, rank=2)["x"]).reshape(R, C)
    found = recommend_items(engine, range(R), k=C, exclude="nothing")
    np.testing.assert_allclose(found.scores, np.take_along_axis(exact, found.items, 1), atol=0.02)
    assert np.all(np.diff(found.scores, axis=1) <= 0.0)
    few = recommend_items(engine, [2], k=3)
    best = [item for item in found.items[2] if not ONES[2, item]][:3]
    np.testing.assert_array_equal(few.items[0], best)
    u, v = (np.asarray(engine.posterior[n].mean) for n in "uv")
    taste = recommend_items(engine, [4], k=C, by="taste", exclude="nothing")
    sizes = (u[4] @ v.T + float(engine.posterior["b"].mean[4]))[taste.items[0]]
    assert np.all((taste.scores[0] > 0.5) == (sizes > 0.0))


@needs_float64
@pytest.mark.thorough
def test_ranks_are_counted(engine):
    found = recommend_items(engine, range(R), k=C)
    expected = []
    for row, col in zip(*TEST, strict=True):
        candidates = [item for item in found.items[row] if item >= 0]
        expected.append((len(candidates) - 1 - candidates.index(col)) / len(candidates))
    quality = ranking_quality(engine, *TEST, k=(1, 3))
    assert ranking_quality(engine, *TEST, k=3).hits == {3: quality.hits[3]}
    np.testing.assert_allclose(quality.ranks, expected)
    np.testing.assert_allclose(quality.mean_rank, np.mean(expected))
    np.testing.assert_allclose(
        quality.hits[3], np.mean([col in found.items[row][:3] for row, col in zip(*TEST, strict=True)])
    )
    assert sum(number for _, _, number, _ in quality.bins) == R
    with pytest.raises(ValueError, match="was listed"):
        ranking_quality(engine, ROWS[:1], COLS[:1])
    with pytest.raises(ValueError, match="users must lie in 0, ..., 11"):
        recommend_items(engine, [R])
    with pytest.raises(ValueError, match="not empty"):
        ranking_quality(engine, [], np.zeros(0, int))


@needs_float64
@pytest.mark.thorough
def test_ties_and_values():
    """Columns of equal cells and a point posterior of biases tie; normal values are ranked by their means."""

    def biases(rows, cols, y):
        with numpyro.plate("rows", 3):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        with numpyro.plate("cols", 4):
            v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        numpyro.sample("y", dist.Normal((u[rows] * v[cols]).sum(-1), 0.3), obs=y)

    engine = BilinearVG(biases, num_restarts=0, progress_bar=False)
    rows, cols = np.array([0, 1, 2]), np.array([0, 1, 0])
    engine.run(random.key(0), rows, cols, np.array([1.0, 2.0, -1.0]))
    # Of the columns without a cell nothing is known, and both of them tie at zero.
    half, none = (ranking_quality(engine, [1], [2], k=(2,), ties=ties) for ties in ("half", "none"))
    u, v = (np.asarray(engine.posterior[n].mean) for n in "uv")
    won = float(u[1, 0] * v[0, 0] < 0.0)
    np.testing.assert_allclose([half.mean_rank, none.mean_rank], [(won + 0.5) / 3.0, won / 3.0], atol=1e-12)
    found = recommend_items(engine, [0], k=1, exclude="nothing")
    np.testing.assert_allclose(found.scores[0, 0], max(0.0, (u[0] @ v.T).max()), rtol=1e-9)
