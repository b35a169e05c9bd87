"""Bilinear models fitted to batches, against the same model fitted to all data at once."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import BilinearVG, fit_batches
from numpyro_ext.models import poisson_factorization
from numpyro_ext.structure import ModelStructureError
from tests.compilations import compiled_programs
from tests.tiers import thorough

NUM_ROWS, NUM_COLS, RANK = 30, 8, 2
SCALES = {"row_scale": 0.7, "row_bias_scale": 0.3, "col_bias_scale": 0.3}
SIZES = {"num_cols": NUM_COLS, "rank": RANK}
# Of unequal numbers of rows.
EDGES = (0, 12, 30)


def make_cells():
    rng = np.random.default_rng(3)
    w, z = 0.7 * rng.normal(size=(NUM_ROWS, RANK)), rng.normal(size=(NUM_COLS, RANK))
    rows, cols = np.nonzero(rng.random((NUM_ROWS, NUM_COLS)) < 0.7)
    return rows, cols, rng.poisson(np.exp(np.sum(w[rows] * z[cols], -1)))


def make_batch(cells, start, end):
    rows, cols, counts = cells
    mine = (rows >= start) & (rows < end)
    return {"rows": rows[mine] - start, "cols": cols[mine], "counts": counts[mine], "num_rows": end - start}


def make_batches():
    cells = make_cells()
    return [make_batch(cells, *ends) for ends in zip(EDGES[:-1], EDGES[1:], strict=True)]


def make_engine(**options):
    return BilinearVG(poisson_factorization, hyper_values=SCALES, progress_bar=False, **options)


@pytest.mark.parametrize(
    "covariance",
    [pytest.param("full", marks=pytest.mark.slow), *thorough({"w": "full", "z": "point"})],
    ids=["vb", "em"],
)
def test_batches_end_where_all_data_together_end(covariance):
    rows, cols, counts = make_cells()
    engine = make_engine(covariance=covariance, tol=1e-7)
    fitted = fit_batches(engine, jax.random.key(1), iter(make_batches()), over="w", num_epochs=300, **SIZES)
    assert fitted.diagnostics.converged
    together = make_engine(covariance=covariance, tol=1e-8)
    together.run(jax.random.key(0), rows, cols, counts, num_rows=NUM_ROWS, **SIZES)
    np.testing.assert_allclose(float(fitted.log_evidence), float(together.log_evidence), rtol=1e-6)
    # Rates do not change with rotations of the vectors. The last batch is in the engine, others are folded in.
    rates = together.predictive_mean(rows, cols, counts, num_rows=NUM_ROWS, **SIZES)["counts"]
    batches = make_batches()
    last = fitted.predictive_mean(**batches[-1], **SIZES)["counts"]
    np.testing.assert_allclose(last, rates[rows >= EDGES[-2]], rtol=3e-3)
    first = fitted.fold_in(jax.random.key(2), **batches[0], **SIZES).predictive_mean()["counts"]
    np.testing.assert_allclose(first, rates[rows < EDGES[1]], rtol=3e-3)


@pytest.mark.slow
def test_batches_of_columns_and_independent_components():
    rows, cols, counts = make_cells()
    batches = []
    for start in (0, 4):
        mine = (cols >= start) & (cols < start + 4)
        batches.append((rows[mine], cols[mine] - start, counts[mine]))
    engine = make_engine(tol=1e-6)
    options = {"num_rows": NUM_ROWS, "num_cols": 4, "rank": RANK}
    fitted = fit_batches(engine, jax.random.key(1), batches, over="z", num_epochs=300, **options)
    together = make_engine(tol=1e-8, num_steps=3000)
    together.run(jax.random.key(0), rows, cols, counts, num_rows=NUM_ROWS, **SIZES)
    # Rotations are slow where components are independent.
    np.testing.assert_allclose(float(fitted.log_evidence), float(together.log_evidence), rtol=1e-4)
    assert fitted.posterior["w"].mean.shape == (NUM_ROWS, RANK)
    assert fitted.posterior["z"].mean.shape == (4, RANK)


def outcomes(rows, cols, y, num_rows):
    with numpyro.plate("row", num_rows):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with numpyro.plate("col", 4):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=jnp.sum(w[rows] * z[cols], -1)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_other_likelihoods(covariance):
    rows, cols = np.divmod(np.arange(32), 4)
    y = np.random.default_rng(0).integers(2, size=32)
    batches = [(rows[:16], cols[:16], y[:16]), (rows[:16], cols[:16], y[16:])]
    engine = BilinearVG(outcomes, covariance=covariance, tol=1e-8, progress_bar=False)
    fitted = fit_batches(engine, jax.random.key(1), batches, over="w", num_epochs=200, num_rows=4)
    engine.run(jax.random.key(0), rows, cols, y, num_rows=8)
    np.testing.assert_allclose(float(fitted.log_evidence), float(engine.log_evidence), rtol=1e-5)


@pytest.mark.thorough
def test_interruption_leaves_what_was_read():
    batches = make_batches()

    def interrupted():
        yield batches[0]
        raise KeyboardInterrupt

    engine = make_engine(covariance="full")
    with pytest.warns(UserWarning, match="Interrupted after 0 epochs"):
        fitted = fit_batches(engine, jax.random.key(1), interrupted(), over="w", **SIZES)
    assert not fitted.diagnostics.converged
    assert np.isfinite(float(fitted.log_evidence)) and fitted.posterior["w"].mean.shape == (EDGES[1], RANK)


@pytest.mark.thorough
def test_going_on():
    """The second call does not fall behind the first, and its first epoch only finds where that was."""
    batches, engine = make_batches(), make_engine(covariance="full")
    with pytest.warns(UserWarning, match="did not converge"):
        first = fit_batches(engine, jax.random.key(1), batches, over="w", num_epochs=4, **SIZES)
        second = fit_batches(
            engine, jax.random.key(2), batches, over="w", num_epochs=2, init_state=first.last_state, **SIZES
        )
    trace = second.diagnostics.objective_trace
    np.testing.assert_allclose(trace[0], float(first.log_evidence), rtol=1e-6)
    assert float(second.log_evidence) > float(first.log_evidence)
    with pytest.raises(ValueError, match="init_state has shared vectors"):
        fit_batches(make_engine(), jax.random.key(1), batches, over="w", init_state=first.last_state, **SIZES)


@pytest.mark.thorough
def test_a_checkpoint(tmp_path):
    """Two epochs and three more from the file are five; other data are refused."""
    batches, key = make_batches(), jax.random.key(1)
    engine, options = make_engine(covariance="full", tol=1e-300), {"over": "w", **SIZES}
    with pytest.warns(UserWarning, match="did not converge"):
        whole = fit_batches(engine, key, batches, num_epochs=5, **options)
        fit_batches(engine, key, batches, num_epochs=2, checkpoint=tmp_path / "epochs", **options)
        resumed = fit_batches(engine, key, batches, num_epochs=5, checkpoint=tmp_path / "epochs", **options)
    np.testing.assert_array_equal(resumed.diagnostics.objective_trace, whole.diagnostics.objective_trace)
    for site in ("w", "z"):
        np.testing.assert_array_equal(resumed.posterior[site].mean, whole.posterior[site].mean)
    with pytest.raises(ValueError, match="other data"):
        other = [batches[0], {**batches[1], "counts": batches[1]["counts"] + 1}]
        fit_batches(engine, key, other, checkpoint=tmp_path / "epochs", **options)
    with pytest.raises(ValueError, match="another model, or of this one on data of other shapes"):
        fit_batches(engine, key, batches[:1], checkpoint=tmp_path / "epochs", **options)


def test_batches_that_are_none():
    engine, key, batch = make_engine(), jax.random.key(0), make_batches()[0]
    for batches in (batch, "rows", [1.0], [np.zeros((2, 3))]):
        with pytest.raises(TypeError, match="A batch is a tuple of positional or a dictionary"):
            fit_batches(engine, key, batches, over="w", **SIZES)
    with pytest.raises(TypeError, match="batches must be a list or generator"):
        fit_batches(engine, key, 3, over="w", **SIZES)


@pytest.mark.thorough
def test_what_cannot_be_fitted_in_batches():
    batches = make_batches()
    engine, key = make_engine(), jax.random.key(0)
    with pytest.raises(ValueError, match="no batch"):
        fit_batches(engine, key, [], over="w", **SIZES)
    with pytest.raises(ValueError, match="over must be a site of one of the sides"):
        fit_batches(engine, key, batches, over="rows", **SIZES)
    with pytest.raises(ValueError, match="num_epochs"):
        fit_batches(engine, key, batches, over="w", num_epochs=0, **SIZES)
    with pytest.raises(ValueError, match=r"batch 1, counted from zero, are 18 vectors .* must share them"):
        fit_batches(engine, key, batches, over="z", **SIZES)
    broken = {**batches[1], "counts": -batches[1]["counts"] - 1}
    with pytest.raises(ModelStructureError, match="outside the support") as raised:
        fit_batches(engine, key, [batches[0], broken], over="w", **SIZES)
    assert raised.value.__notes__ == ["In batch 1, counted from zero."]
    empty = {name: batches[0][name][:0] for name in ("rows", "cols", "counts")}
    with pytest.raises(ModelStructureError, match="size of plate should be positive"):
        fit_batches(engine, key, [empty], over="w", num_rows=2, **SIZES)
    with pytest.raises(ValueError, match="would have to be learned"):
        fit_batches(BilinearVG(poisson_factorization, progress_bar=False), key, batches, over="w", **SIZES)
    with pytest.raises(ValueError, match="leave solver"):
        fit_batches(make_engine(solver="lbfgs"), key, batches, over="w", **SIZES)


@pytest.mark.thorough
def test_a_batch_of_another_shape_compiles_few_programs():
    """Its form and its start are a program each, not one for each operation."""

    def fit(num_rows):
        batch = make_batch(make_cells(), 0, num_rows)
        return fit_batches(make_engine(), jax.random.key(1), [batch], over="w", num_epochs=300, **SIZES)

    fit(12)
    with compiled_programs() as names:
        assert fit(13).diagnostics.converged
    assert len(names) <= 35, names
