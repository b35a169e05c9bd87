"""The engine for bilinear counts: what a user gets, against draws, refits, stationarity and exact predictions."""

import json
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import Predictive, log_likelihood
from scipy import stats

from numpyro_ext.infer import BilinearVG, expected_ranks, ranking_scores
from numpyro_ext.infer.bilinear.algorithms.cells import Block
from numpyro_ext.infer.bilinear.marginals.prediction import log_predictive_counts
from numpyro_ext.infer.front.files.archive import read_archive
from numpyro_ext.infer.front.files.checkpoints import write_checkpoint
from numpyro_ext.models import poisson_factorization
from numpyro_ext.structure import ModelStructureError
from tests.infer.bilinear.bilinear_forms import REFERENCE, factorisation
from tests.monte_carlo import assert_close_covariance, assert_close_means

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
R, C, K = 8, 6, 2
SCALES = {"row_scale": 0.8, "row_bias_scale": 0.5, "col_bias_scale": 0.5}


def make_counts():
    rng = np.random.default_rng(4)
    rows, cols = np.divmod(np.arange(R * C), C)
    kept = (rng.uniform(size=R * C) < 0.8) & (rows < R - 1)
    w, z = rng.normal(size=(R, K)), rng.normal(size=(C, K))
    counts = rng.poisson(np.exp(1.0 + (w[rows] * z[cols]).sum(-1)))
    return rows[kept], cols[kept], counts[kept]


ROWS, COLS, COUNTS = make_counts()
SIZES = {"num_rows": R, "num_cols": C, "rank": K, "log_rate": 1.0}


@pytest.fixture(scope="module")
def fitted():
    """All scales given; the last row has no cells."""
    engine = BilinearVG(
        poisson_factorization, covariance="full", hyper_values=SCALES, num_samples=400, progress_bar=False, tol=1e-9
    )
    engine.run(random.key(0), ROWS, COLS, COUNTS, **SIZES)
    return engine


@pytest.mark.thorough
def test_what_a_run_reports(fitted, capsys):
    assert fitted.diagnostics.converged
    assert fitted.log_evidence.is_lower_bound
    trace = fitted.diagnostics.objective_trace
    assert len(trace) == fitted.diagnostics.num_steps and np.all(np.diff(trace) >= -1e-6)
    assert 0.0 < fitted.distance_to_boundary < 1.0
    assert "2 products of components" in fitted.describe()
    fitted.print_summary()
    assert "Log evidence, at least" in capsys.readouterr().out
    point = fitted.posterior["row_scale"]
    assert point.mean == fitted.hyper["row_scale"].value and point.sd == 0.0 and "a point" in repr(point)


@pytest.mark.thorough
def test_several_starts_by_default():
    """A start that ends five nats below another, converged: by default it is not the only one."""
    scales = {**SCALES, "row_scale": 1.2}
    rates = np.exp(1.0 + 1.5 * np.random.default_rng(55).normal(size=COUNTS.size))
    counts = np.random.default_rng(5).poisson(rates)

    def run(engine=BilinearVG, **options):
        engine = engine(
            poisson_factorization, covariance="full", hyper_values=scales, progress_bar=False, tol=1e-9, **options
        )
        engine.run(random.key(3), ROWS, COLS, counts, **SIZES)
        assert engine.diagnostics.converged
        return engine

    single, several = run(num_restarts=0), run()
    assert several.log_evidence > single.log_evidence + 5.0
    (empty,) = single.diagnostics.messages
    assert empty.startswith("1 row (7) of ['w', 'row_bias'] have no cell")
    ends = [engine.diagnostics.objective_trace[-1] for engine in (single, several)]
    expected = f"4 random starts ended at objectives from {ends[0]:.6g} to {ends[1]:.6g}; the best is kept."
    assert several.diagnostics.messages == (empty, expected)
    beyond = run(type("BilinearVG", (BilinearVG,), {"_most_cells_restarted": COUNTS.size - 1}))
    assert beyond.log_evidence == single.log_evidence
    _, message = beyond.diagnostics.messages
    assert message.startswith("This is the end of a single random start")


@pytest.mark.thorough
def test_marginals_and_draws(fitted):
    draws = fitted.get_samples()
    assert set(draws) == {"w", "z", "row_bias", "col_bias", *SCALES}
    for name in ("w", "z", "row_bias"):
        site = fitted.posterior[name]
        assert draws[name].shape == (400, *site.shape)
        assert_close_means(draws[name], site.mean)
        covariance = site.covariance().reshape(site.size, site.size)
        assert_close_covariance(draws[name].reshape(400, -1), covariance)
        np.testing.assert_allclose(jnp.diagonal(covariance), site.variance.reshape(-1), rtol=1e-6)
        assert site.sample(random.key(1), 3).shape == (3, *site.shape)
    # a row without cells keeps its prior
    np.testing.assert_allclose(fitted.posterior["w"].sd[-1], SCALES["row_scale"], rtol=1e-3)
    energy = fitted.get_extra_fields()["potential_energy"]
    values = {k: v[0] for k, v in draws.items()}
    joint, _ = numpyro.infer.util.log_density(poisson_factorization, (ROWS, COLS, COUNTS), SIZES, values)
    np.testing.assert_allclose(energy[0], -joint, rtol=1e-5)


@pytest.mark.thorough
def test_interoperation(fitted):
    draws = fitted.get_samples()
    replicated = Predictive(poisson_factorization, draws)(random.key(1), ROWS, COLS, **SIZES)["counts"]
    assert replicated.shape == (400, len(COUNTS))
    likelihood = log_likelihood(poisson_factorization, draws, ROWS, COLS, COUNTS, **SIZES)["counts"]
    assert np.isfinite(likelihood).all()
    arviz_data = fitted.to_arviz()
    assert arviz_data.posterior["w"].shape == (4, 100, R, K)


@pytest.mark.thorough
@needs_float64
def test_predictions_of_counts_against_quadrature():
    """Log probabilities by nested quadrature; the error of draws of one side is read off eight repetitions."""
    cases = json.loads((REFERENCE / "ko-pmf-bounds.json").read_text())["predictive"]
    zero = np.zeros(1, int)
    for case in cases:
        rank = case["D"]
        form = factorisation(zero, zero, [case["y"]], (1, 1), (1.0, 1.0), rank)
        blocks = [
            Block(jnp.asarray(case[m])[None], jnp.asarray(case[v]).reshape(1, rank, rank)) for m, v in ("aA", "bB")
        ]
        keys = random.split(random.key(0), 8)
        found = [log_predictive_counts(form, *blocks, key, num_samples=500) for key in keys]
        assert_close_means(np.exp(found), np.exp(case["logp"]))


@pytest.mark.thorough
def test_predictive_of_new_cells_and_of_masked_ones(fitted):
    chosen = slice(0, 5)
    found = fitted.log_predictive(ROWS[chosen], COLS[chosen], COUNTS[chosen], num_samples=2000, **SIZES)["counts"]
    draws = fitted.get_samples()
    eta = 1.0 + (draws["w"][:, ROWS[chosen]] * draws["z"][:, COLS[chosen]]).sum(-1)
    eta += draws["row_bias"][:, ROWS[chosen]] + draws["col_bias"][:, COLS[chosen]]
    plain = stats.poisson.pmf(COUNTS[chosen], np.exp(eta))
    # Of 2000 draws of one side with the other integrated out, which vary less than these 400 of both.
    assert_close_means(plain, np.exp(found), other_error=plain.std(0) / np.sqrt(2000))
    assert np.all(np.asarray(fitted.log_predictive()["counts"]) == 0.0)
    with pytest.raises(ValueError, match="fold_in"):
        fitted.log_predictive(ROWS[chosen], COLS[chosen], COUNTS[chosen], **{**SIZES, "num_rows": R + 1})


@pytest.mark.thorough
def test_predictive_mean_exists_in_the_cells_of_the_fit(fitted):
    means = fitted.predictive_mean()["counts"]
    assert np.isfinite(means).all()
    draws = fitted.get_samples()
    eta = 1.0 + (draws["w"][:, ROWS] * draws["z"][:, COLS]).sum(-1)
    eta += draws["row_bias"][:, ROWS] + draws["col_bias"][:, COLS]
    close = np.abs(np.log(np.exp(eta).mean(0)) - np.log(means))
    assert np.median(close) < 0.1


@pytest.mark.thorough
def test_what_is_expected_of_cells_needs_no_observations(fitted):
    rows, cols = np.array([0, 3]), np.array([1, 2])
    given = fitted.predictive_mean(rows, cols, np.array([5, 0]), **SIZES)["counts"]
    columns = pd.Series(rows, index=[7, 9]), pd.Series(cols)
    np.testing.assert_allclose(fitted.predictive_mean(*columns, None, **SIZES)["counts"], given, rtol=1e-6)
    ranks = fitted.expected_ranks(random.key(0), rows, cols, None, **SIZES)["counts"]
    np.testing.assert_array_equal(ranks, [1.0, 1.0])
    with pytest.raises(ModelStructureError, match="pass the data"):
        fitted.log_predictive(rows, cols, None, **SIZES)


@pytest.mark.thorough
def test_rankings(fitted):
    rows, cols = np.repeat([0, 3], C), np.tile(np.arange(C), 2)
    ranks = fitted.expected_ranks(random.key(0), rows, cols, np.zeros(2 * C, int), **SIZES)["counts"]
    for row in (0, 3):
        np.testing.assert_allclose(ranks[rows == row].sum(), C * (C + 1) / 2)
    draws = np.random.default_rng(0).normal(size=(3, 7))
    group = np.array([0, 1, 0, 1, 1, 0, 0])
    brute = np.zeros(7)
    for draw in draws:
        for i in range(7):
            brute[i] += 1 + np.sum((draw > draw[i]) & (group == group[i]))
    np.testing.assert_allclose(expected_ranks(draws, group), brute / 3)
    scores = ranking_scores([1, 3, 2, 2, 1], [True, False, False, False, True], [0, 0, 0, 1, 1], k=1)
    assert scores == {"precision": 1.0, "recall": 1.0, "ndcg": 1.0}
    with pytest.raises(ValueError, match="nothing to score"):
        ranking_scores([1], [False], [0])


@pytest.mark.thorough
def test_folding_in_rows_that_were_fitted_gives_them_back(fitted):
    """Given the columns, the optimum of the rows is unique: whatever the start, it is that of the fit."""
    chosen = ROWS < 3
    again = fitted.fold_in(random.key(5), ROWS[chosen], COLS[chosen], COUNTS[chosen], **{**SIZES, "num_rows": 3})
    tol = 1e-4 if jax.config.jax_enable_x64 else 1e-2
    for name in ("w", "row_bias"):
        np.testing.assert_allclose(again.posterior[name].mean, fitted.posterior[name].mean[:3], atol=tol)
        np.testing.assert_allclose(again.posterior[name].sd, fitted.posterior[name].sd[:3], atol=tol)
    np.testing.assert_array_equal(again.posterior["z"].mean, fitted.posterior["z"].mean)
    assert again.diagnostics.converged and again.log_evidence < 0.0
    assert again.get_samples()["w"].shape == (400, 3, K)
    with pytest.raises(ValueError, match="held"):
        fitted.fold_in(random.key(5), *np.array([[0], [0], [1]]), **{**SIZES, "num_rows": 1, "num_cols": 2})


def test_similar_vectors(fitted):
    index, mean, deviation = fitted.similar(random.key(0), "z", 2, num_similar=3)
    assert len(index) == 3 and 2 not in index and np.all(np.diff(mean) <= 0.0) and np.all(deviation > 0.0)
    draws = fitted.get_samples()["z"]
    cosines = (draws * draws[:, 2:3]).sum(-1) / np.linalg.norm(draws, axis=-1) / np.linalg.norm(draws[:, 2:3], axis=-1)
    # Of 500 draws, and of these 400.
    assert_close_means(cosines[:, index], mean, other_error=np.std(cosines[:, index], axis=0) / np.sqrt(500))
    with pytest.raises(ValueError, match="neither side"):
        fitted.similar(random.key(0), "row_scale", 0)


@pytest.mark.thorough
def test_saving_and_going_on(fitted, tmp_path):
    fitted.save(tmp_path / "run.npz")
    loaded = BilinearVG.load(tmp_path / "run.npz", poisson_factorization)
    assert loaded.log_evidence == fitted.log_evidence
    np.testing.assert_array_equal(loaded.posterior["z"].mean, fitted.posterior["z"].mean)
    np.testing.assert_array_equal(loaded.get_samples()["w"], fitted.get_samples()["w"])
    options = {"covariance": "full", "hyper_values": SCALES, "progress_bar": False, "tol": 1e-9, "num_restarts": 0}
    short = BilinearVG(poisson_factorization, num_steps=20, **options)
    with pytest.warns(UserWarning, match="did not converge"):
        short.run(random.key(0), ROWS, COLS, COUNTS, **SIZES)
    short.num_steps = 500
    short.run(random.key(0), ROWS, COLS, COUNTS, init_state=short.last_state, **SIZES)
    assert short.diagnostics.num_steps == fitted.diagnostics.num_steps
    np.testing.assert_allclose(short.posterior["w"].mean, fitted.posterior["w"].mean, atol=1e-5)
    with pytest.raises(ValueError, match="another model"):
        short.run(random.key(0), ROWS, COLS, COUNTS, init_state=short.last_state, **{**SIZES, "rank": 1})


def test_interruption_leaves_a_usable_state(fitted, monkeypatch):
    programs = fitted._run.programs
    original, calls = programs.solve, []

    def interrupting(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    engine = BilinearVG(poisson_factorization, covariance="full", hyper_values=SCALES, progress_bar=False, tol=1e-9)
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="Interrupted after 20 sweeps"):
        patch.setattr(programs, "solve", interrupting)
        engine.run(random.key(0), ROWS, COLS, COUNTS, **SIZES)
    engine.run(random.key(0), ROWS, COLS, COUNTS, init_state=engine.last_state, **SIZES)
    np.testing.assert_allclose(engine.log_evidence, fitted.log_evidence, rtol=1e-6)


@pytest.mark.thorough
def test_a_killed_run_goes_on_from_its_checkpoint(fitted, monkeypatch, tmp_path):
    """Death after the sixth sweep, and in the middle of writing the seventh: the file is that of the sixth."""
    programs, path = fitted._run.programs, tmp_path / "state"
    original, calls = programs.solve, []

    def dying(*args):
        calls.append(1)
        if len(calls) == 8:
            raise MemoryError
        return original(*args)

    options = {"covariance": "full", "hyper_values": SCALES, "progress_bar": False, "tol": 1e-9}
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(programs, "solve", dying)
        BilinearVG(poisson_factorization, **options).run(random.key(0), ROWS, COLS, COUNTS, checkpoint=path, **SIZES)
    before = path.read_bytes()

    def half_written(file, **members):
        file.write(b"PK")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "savez_compressed", half_written)
        write_checkpoint(path, fitted.last_state)
    assert path.read_bytes() == before
    short = BilinearVG(poisson_factorization, num_steps=10, **options)
    for steps in (10, 11):  # those of the killed run count; a run with none left makes one
        with pytest.warns(UserWarning, match=f"in the last of {steps} sweeps"):
            short.run(random.key(0), ROWS, COLS, COUNTS, checkpoint=path, **SIZES)
    path.write_bytes(before)
    engine = BilinearVG(poisson_factorization, **options)
    engine.run(random.key(0), ROWS, COLS, COUNTS, checkpoint=path, **SIZES)
    assert engine.diagnostics.num_steps - len(engine.diagnostics.objective_trace) == 7
    np.testing.assert_allclose(engine.posterior["w"].mean, fitted.posterior["w"].mean, atol=1e-5)
    with pytest.raises(ValueError, match="other data"):
        engine.run(random.key(0), ROWS, COLS, COUNTS + 1, checkpoint=path, **SIZES)


# So many cells that the sweeps do not come to rest while the test runs, however fast the machine.
KILLED = """
import sys, numpy as np, jax
jax.config.update("jax_enable_x64", True)
from numpyro_ext.infer import BilinearVG
from numpyro_ext.models import poisson_factorization
rows, cols = np.divmod(np.arange(50_000), 100)
counts = np.random.default_rng(0).poisson(2.0, 50_000)
scales = {"row_scale": 0.8, "row_bias_scale": 0.5, "col_bias_scale": 0.5}
engine = BilinearVG(poisson_factorization, hyper_values=scales, num_steps=10**6, tol=1e-300, progress_bar=False)
engine.run(jax.random.key(0), rows, cols, counts, num_rows=500, num_cols=100, rank=5, checkpoint=sys.argv[1])
"""


@pytest.mark.slow
def test_checkpoints_survive_being_killed(tmp_path):
    """Three processes, each killed at a moment of its own, get further one after the other."""
    steps = []
    for number in range(3):
        with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "state")]) as process:
            while not (tmp_path / "state").exists() or (
                steps and read_archive(tmp_path / "state")["num_steps"] < steps[-1] + 5
            ):
                assert process.poll() is None
                time.sleep(0.5)
            time.sleep(0.1 * number)
            process.kill()
        steps.append(read_archive(tmp_path / "state")["num_steps"])
    assert steps[0] < steps[1] < steps[2]


def learning_model(rows, cols, counts, mask=True):
    """A scale in the prior, and a scale and an intercept in the predictor."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    stretch = numpyro.sample("stretch", dist.LogNormal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", R):
        w = numpyro.sample("w", dist.Normal(0.0, scale).expand([1]).to_event(1))
    with numpyro.plate("cols", C):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with handlers.mask(mask=mask):
        eta = level + stretch * (w[rows] * z[cols]).sum(-1)
        numpyro.sample("counts", dist.Poisson(jnp.exp(eta)), obs=counts)


@pytest.mark.thorough
@needs_float64
def test_learned_hyperparameters_are_stationary():
    """Where the posterior is held, derivatives by hand of bound plus log prior vanish; masked cells are predicted."""
    mask = np.arange(len(ROWS)) % 7 != 0
    engine = BilinearVG(learning_model, covariance="diagonal", progress_bar=False, tol=1e-10, num_steps=3000)
    engine.run(random.key(2), ROWS, COLS, COUNTS, mask)
    assert np.all(np.diff(engine.diagnostics.objective_trace) >= -1e-8)
    scale = float(engine.hyper["scale"].value)
    w, z = engine.posterior["w"], engine.posterior["z"]
    second = float(jnp.sum(w.mean**2 + w.variance))
    np.testing.assert_allclose(second / scale**3 - R / scale - scale, 0.0, atol=1e-2 * R / scale)
    stretch, level = (float(engine.hyper[n].value) for n in ("stretch", "level"))
    a, A, b, B = (np.asarray(x)[:, 0] for x in (w.mean, w.variance, z.mean, z.variance))
    r, s, y = ROWS[mask], COLS[mask], COUNTS[mask]
    gap = 1.0 - stretch**2 * A[r] * B[s]
    assert np.all(gap > 0.0)
    exponent = level + (stretch * a[r] * b[s] + 0.5 * stretch**2 * (A[r] * b[s] ** 2 + B[s] * a[r] ** 2)) / gap
    rates = np.exp(exponent) / np.sqrt(gap)
    np.testing.assert_allclose(np.sum(y - rates) - level / 4.0, 0.0, atol=1e-2 * y.sum() ** 0.5)
    held_out = np.asarray(engine.log_predictive()["counts"])
    assert np.all(held_out[~mask] < 0.0) and np.all(held_out[mask] == 0.0)


@pytest.mark.thorough
def test_missing_counts_are_not_scored():
    """Whatever stands in their place, the scores of the other held-out cells are the same."""
    held_out = np.arange(len(ROWS)) % 7 == 0
    missing = np.arange(len(ROWS)) == 7
    engine = BilinearVG(learning_model, covariance="diagonal", progress_bar=False, num_steps=5)
    scores = []
    for counts in (COUNTS, np.where(missing, -1, COUNTS)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # five steps are not enough
            engine.run(random.key(2), ROWS, COLS, counts, ~held_out)
        scores.append(np.asarray(engine.log_predictive()["counts"]))
    assert scores[0][7] < 0.0
    np.testing.assert_array_equal(scores[1], np.where(missing, 0.0, scores[0]))


@pytest.mark.thorough
@needs_float64
def test_vectors_that_refuse_every_second_step_do_not_hold_up_a_run():
    """Full steps of columns without counts are too long for ever; the run ends all the same, at a maximum."""
    rng = np.random.default_rng(2)
    rows, cols = np.divmod(np.arange(320), 8)
    factors = rng.normal(size=(40, 2)) @ rng.normal(size=(2, 8))
    counts = np.where(cols < 4, 0, rng.poisson(5.0 * np.exp(factors)).ravel())
    engine = BilinearVG(
        poisson_factorization, covariance="full", hyper_values={**SCALES, "col_bias_scale": 4.0}, progress_bar=False
    )
    sizes = {"num_rows": 40, "num_cols": 8, "rank": 2, "log_rate": 1.5}
    engine.run(random.key(0), rows, cols, counts, **sizes)
    assert engine.diagnostics.converged and engine.diagnostics.num_skipped > 0
    before = engine.log_evidence
    engine.run(random.key(0), rows, cols, counts, init_state=engine.last_state, **sizes)
    np.testing.assert_allclose(engine.log_evidence, before, rtol=1e-5)


def test_options_and_families(fitted):
    with pytest.raises(ValueError, match="covariance must be"):
        BilinearVG(poisson_factorization, covariance="banded")
    with pytest.raises(ValueError, match="neither side"):
        BilinearVG(poisson_factorization, covariance={"x": "full"}).run(random.key(0), ROWS, COLS, COUNTS, **SIZES)
    with pytest.raises(ValueError, match="of one side"):
        BilinearVG(poisson_factorization, covariance={"w": "full", "row_bias": "point"}).run(
            random.key(0), ROWS, COLS, COUNTS, **SIZES
        )
    with pytest.raises(ValueError, match="cannot be learned"):
        BilinearVG(poisson_factorization, covariance="point").run(random.key(0), ROWS, COLS, COUNTS, **SIZES)
    with pytest.raises(RuntimeError, match="run"):
        BilinearVG(poisson_factorization).log_evidence  # noqa: B018
    with pytest.raises(ModelStructureError, match="support"):
        BilinearVG(poisson_factorization).run(random.key(0), ROWS, COLS, -1 - COUNTS, **SIZES)
    with pytest.raises(ValueError, match="must lie in"):
        BilinearVG(poisson_factorization).run(random.key(0), ROWS + 2, COLS, COUNTS, **SIZES)


@needs_float64
@pytest.mark.slow
def test_points_are_maxima_of_the_log_joint():
    """MAP against the gradient of NumPyro's log density; a side of points beside Gaussians has no lower bound."""
    engine = BilinearVG(
        poisson_factorization, covariance="point", hyper_values=SCALES, progress_bar=False, tol=1e-13, num_steps=3000
    )
    engine.run(random.key(0), ROWS, COLS, COUNTS, **SIZES)
    assert not engine.log_evidence.is_lower_bound
    values = {name: engine.posterior[name].mean for name in ("w", "z", "row_bias", "col_bias")}

    def joint(values):
        return numpyro.infer.util.log_density(poisson_factorization, (ROWS, COLS, COUNTS), SIZES, {**values, **SCALES})[
            0
        ]

    value, slopes = jax.value_and_grad(joint)(values)
    assert all(np.all(np.abs(s) < 1e-4) for s in slopes.values())
    prior = sum(float(dist.HalfNormal(1.0).log_prob(v)) for v in SCALES.values())
    np.testing.assert_allclose(engine.log_evidence, value - prior, rtol=1e-9)


@pytest.mark.slow
def test_duplicate_cells_wide_priors_and_more_components_than_rows():
    """Two counts of one cell are two observations; means under the prior may be infinite, and are then said to be."""
    rows, cols, counts = np.array([0, 0, 1, 1, 0]), np.array([0, 1, 0, 1, 0]), np.array([3, 0, 2, 4, 3])
    sizes = {"num_rows": 3, "num_cols": 3, "rank": 4}
    wide = {**SCALES, "row_scale": 1.5}
    engine = BilinearVG(poisson_factorization, hyper_values=wide, progress_bar=False)
    engine.run(random.key(0), rows, cols, counts, **sizes)
    assert engine.diagnostics.converged
    form = engine._run.programs.form(engine._run.reading.data, engine._run.fit.hyper)
    assert form.num_cells == 5
    # in a row and a column without cells the posterior is the prior, whose variances multiply to more than one
    new = np.array([0, 1, 2, 0, 2]), np.array([0, 1, 2, 2, 1])
    with pytest.warns(UserWarning, match="does not exist in 1 of 5"):
        means = engine.predictive_mean(*new, counts, **sizes)["counts"]
    np.testing.assert_array_equal(np.isinf(means), [False, False, True, False, False])
    assert np.isfinite(engine.log_predictive(*new, counts, **sizes)["counts"]).all()
