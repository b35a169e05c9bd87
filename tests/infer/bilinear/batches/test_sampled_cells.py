"""Cells that are drawn with known probabilities: tables by enumeration, draws by chi-square, fits against sweeps."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from numpyro_ext.infer import BilinearVG, CellSampler
from numpyro_ext.infer.bilinear.algorithms import sweeps as core
from numpyro_ext.infer.bilinear.algorithms.cells import Block
from numpyro_ext.infer.bilinear.algorithms.quadratic.draws import (
    Cells,
    Draws,
    Part,
    Problem,
    best_common,
    best_vectors,
    bound_values,
    drawn_by_part,
)
from numpyro_ext.infer.bilinear.algorithms.schedules.devices import place_rows
from numpyro_ext.infer.bilinear.sampling.parts import divided
from numpyro_ext.models import binary_factorization
from numpyro_ext.potentials import LogitPotential
from numpyro_ext.structure import ModelStructureError
from numpyro_ext.structure.bilinear.form import Background, Bilinear, Common, GaussianSide, order_cells
from tests.infer.bilinear.batches import bilinear_sampled_devices
from tests.infer.bilinear.bilinear_forms import REFERENCE
from tests.processes import module_command, run_in_two_processes, run_on_devices

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
KNOWN = json.loads((REFERENCE / "hm_sibm_small.json").read_text())
X = np.array(KNOWN["X"])
L, M = X.shape
SCHEMES = ["uniform", "balanced", "biased"]


def sampler_of(scheme, x=X):
    return CellSampler.of(*np.nonzero(x), num_rows=x.shape[0], num_cols=x.shape[1], scheme=scheme)


def probabilities(sampler, x=X):
    i, j = np.indices(x.shape)
    return np.asarray(sampler.row_weights[x, i] * sampler.column_weights[x, j])


@needs_float64
@pytest.mark.parametrize("scheme", SCHEMES)
def test_probabilities_of_the_reference(scheme):
    sampler, known = sampler_of(scheme), KNOWN["sampling"][scheme]
    np.testing.assert_allclose(probabilities(sampler), known["p"], atol=1e-12)
    np.testing.assert_allclose(sampler.p_row, known["p_row"], atol=1e-12)
    np.testing.assert_allclose(sampler.p_column, known["p_col"], atol=1e-12)


@pytest.mark.thorough
@pytest.mark.float32
@pytest.mark.parametrize("scheme", SCHEMES)
def test_draws_have_their_probabilities(scheme):
    """A million draws by chi-square, and what is said of each."""
    number, sampler = 1_000_000, sampler_of(scheme)
    cells = jax.jit(CellSampler.draw, static_argnums=2)(sampler, random.key(0), number)
    p = probabilities(sampler).astype(float)
    counts = np.bincount(np.asarray(cells.rows) * M + np.asarray(cells.columns), minlength=L * M)
    assert stats.chisquare(counts, number * (p / p.sum()).ravel()).pvalue > 1e-3
    few = Cells(*(np.asarray(x)[:1000] for x in cells))
    np.testing.assert_array_equal(few.value, X[few.rows, few.columns])
    rtol = 1e-12 if jax.config.jax_enable_x64 else 1e-5
    np.testing.assert_allclose(few.p, p[few.rows, few.columns], rtol=rtol)
    np.testing.assert_allclose(few.p_row, p.sum(1)[few.rows], rtol=rtol)
    np.testing.assert_allclose(few.p_column, p.sum(0)[few.columns], rtol=rtol)


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("x", [bilinear_sampled_devices.matrix(), bilinear_sampled_devices.FEW], ids=["many", "few"])
def test_parts_draw_what_one_device_draws(scheme, x):
    """A minibatch of four devices by chi-square: rows without a one, full rows, and fewer rows than devices."""
    sampler, number = sampler_of(scheme, x.astype(int)), 200_000
    places = place_rows(*np.nonzero(x), x.shape[0], 4)
    parts, masses = divided(sampler, places, 4)
    np.testing.assert_allclose(masses.sum(), 1.0, rtol=1e-5)
    part = Part("rows", 1000, number // 1000)
    draw = partial(drawn_by_part, masses=jnp.asarray(masses), key=random.key(1), number=number, part=part)
    draws = jax.jit(jax.vmap(draw, axis_name="rows"))(parts)
    assert int(draws.number.sum()) == number
    cells = [np.asarray(a).reshape(4, -1) for a in draws.cells]
    is_used = np.arange(number) < np.asarray(draws.number)[:, None]
    rows = np.take_along_axis(places.source.reshape(4, -1), cells[0], 1)[is_used]
    _, columns, value, p, p_row, p_column = (a[is_used] for a in cells)
    np.testing.assert_array_equal(value, x[rows, columns])
    expected = probabilities(sampler, x.astype(int)).astype(float)
    counts = np.bincount(rows * x.shape[1] + columns, minlength=x.size)
    assert stats.chisquare(counts, number * (expected / expected.sum()).ravel()).pvalue > 1e-3
    for found, known in (
        (p, expected[rows, columns]),
        (p_row, expected.sum(1)[rows]),
        (p_column, expected.sum(0)[columns]),
    ):
        np.testing.assert_allclose(found, known, rtol=1e-5)


def small_problem():
    """The form and the start of the reference."""
    rows, cols = np.nonzero(X)
    rank, n, start = KNOWN["D"], len(rows), KNOWN["init"]
    sides = [GaussianSide(jnp.zeros((k, rank)), jnp.ones((k, rank))) for k in (L, M)]
    none, places = jnp.zeros((1, 0)), jnp.zeros(n, int)
    form = Bilinear(
        *sides, jnp.asarray(rows), jnp.asarray(cols), jnp.ones((1, rank)), none, none, jnp.zeros(n),
        LogitPotential(jnp.ones(n, int)), jnp.ones(n), jnp.zeros(()), places, places, Background(jnp.ones(())),
        Common(GaussianSide(jnp.zeros((1, 1)), jnp.ones((1, 1, 1))), jnp.ones((n, 1))),
    )  # fmt: skip
    state = core.State(
        *(Block(jnp.asarray(start[k]), jnp.asarray(start[f"{k}_var"])) for k in ("u", "v")),
        *(jnp.full(k, 0.6) for k in (L, M)),
        jnp.asarray(-jnp.inf),
        jnp.asarray(0),
        Block(jnp.full((1, 1), start["z"]), jnp.full((1, 1, 1), start["z_var"])),
    )
    return Problem.of_form(order_cells(form)), state


@pytest.mark.thorough
@needs_float64
def test_estimates_by_enumeration():
    """The estimate of each cell, weighted by its probability given its row or column, is the exact update, and has the
    variance of the reference; so has the bound."""
    problem, state = small_problem()
    i, j = (x.ravel() for x in np.indices(X.shape))

    @jax.jit
    @jax.vmap
    def estimates(cell):
        draws = Draws(jax.tree.map(lambda x: x[None, None], cell), 1)
        rows, columns = (best_vectors(problem, state, s, draws).estimate for s in ("rows", "columns"))
        common = best_common(problem, state, draws)
        precision = 1.0 / common.covariance[0, 0, 0]
        z = jnp.stack([common.mean[0, 0] * precision, precision])
        return (
            rows[cell.rows],
            columns[cell.columns],
            z,
            bound_values(problem, state, jax.tree.map(lambda x: x[None], cell)),
        )

    star = KNOWN["star_at_init"]
    for scheme in SCHEMES:
        sampler, known = sampler_of(scheme), KNOWN["sampling"][scheme]
        p, of_row, of_column = probabilities(sampler).ravel(), sampler.p_row[i], sampler.p_column[j]
        rows, columns, z, bound = (np.asarray(x) for x in estimates(Cells(i, j, X.ravel(), p, of_row, of_column)))
        given_row = (p / of_row).reshape(L, M)
        mean = np.einsum("ij,ijk->ik", given_row, rows.reshape(L, M, -1))
        np.testing.assert_allclose(mean[:, [0, 2]].T, star["u0"], atol=1e-9)
        variance = np.einsum("ij,ijk->ik", given_row, (rows.reshape(L, M, -1) - mean[:, None]) ** 2)
        np.testing.assert_allclose(variance[:, 0], known["u_star_prec_mean_d0_var"], rtol=1e-9)
        mean = np.einsum("ij,ijk->jk", (p / of_column).reshape(L, M), columns.reshape(L, M, -1))
        np.testing.assert_allclose(mean[:, [0, 2]].T, star["v0"], atol=1e-9)
        np.testing.assert_allclose(p @ z, star["z"], atol=1e-9)
        np.testing.assert_allclose(p @ bound[:, 0], KNOWN["L_init"], rtol=1e-9)


# The engine


def matrix(num_rows=40, num_cols=25, seed=0):
    rng = np.random.default_rng(seed)
    u, v = rng.normal(size=(num_rows, 2)), 1.5 * rng.normal(size=(num_cols, 2))
    return (rng.uniform(size=(num_rows, num_cols)) < 1.0 / (1.0 + np.exp(2.0 - u @ v.T))).astype(int)


X_LARGE = matrix()
ROWS, COLS = np.nonzero(X_LARGE)
SIZES = {"num_rows": 40, "num_cols": 25, "rank": 2}
OPTIONS = {"bound": "jaakkola", "unlisted_cells": "zero", "progress_bar": False, "num_samples": 10}


def fit(key=0, init_state=None, **options):
    engine = BilinearVG(binary_factorization, zeros="sampled", **{**OPTIONS, **options})
    return engine, lambda: engine.run(
        random.key(key), ROWS, COLS, np.ones(ROWS.size, int), init_state=init_state, **SIZES
    )


@pytest.fixture(scope="module")
def fitted():
    engine, run = fit(num_steps=3000, tol=5e-3)
    run()
    return engine


@pytest.mark.thorough
def test_the_end_is_near_that_of_sweeps(fitted):
    """The bound with a tangent for each zero, near that of sweeps over all cells; never above it."""
    sweeps = BilinearVG(binary_factorization, zeros="exact", **OPTIONS)
    sweeps.run(random.key(0), ROWS, COLS, np.ones(ROWS.size, int), **SIZES)
    best, found = float(sweeps.log_evidence), float(fitted.log_evidence)
    assert fitted.diagnostics.converged and fitted.log_evidence.is_lower_bound
    assert best - 0.01 * abs(best) < found < best + 1e-4 * abs(best)
    one, other = (
        engine.predictive_mean(*np.indices(X_LARGE.shape).reshape(2, -1), None, **SIZES)["x"]
        for engine in (fitted, sweeps)
    )
    assert np.corrcoef(one, other)[0, 1] > 0.97
    text = " ".join(fitted.diagnostics.messages)
    error = float(text.split("standard error of ")[-1].split(" at the end")[0])
    assert abs(fitted.diagnostics.objective_trace[-1] - found) < 4.0 * error
    assert fitted.diagnostics.num_steps >= 100


@pytest.mark.thorough
def test_going_on_and_coming_back(fitted, tmp_path):
    """Two halves are the whole, to the last digit; a file holds all of it."""
    ends = []
    for steps in ((60,), (20, 40)):
        state = None
        for number in steps:
            engine, run = fit(num_steps=number, init_state=state)
            with pytest.warns(UserWarning, match="minibatches"):
                run()
            state = engine.last_state
        ends.append(engine)
    np.testing.assert_array_equal(ends[0].posterior["u"].mean, ends[1].posterior["u"].mean)
    assert ends[0].log_evidence == ends[1].log_evidence
    fitted.save(tmp_path / "run.npz")
    loaded = BilinearVG.load(tmp_path / "run.npz", binary_factorization)
    assert loaded.log_evidence == fitted.log_evidence
    np.testing.assert_array_equal(loaded.last_state.state.moments[0].second, fitted.last_state.state.moments[0].second)
    new = fitted.fold_in(random.key(1), ROWS[:3] * 0, COLS[:3], np.ones(3, int), **{**SIZES, "num_rows": 1})
    assert new.posterior["u"].mean.shape == (1, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"sampler": "biased"}, {"sampler": "uniform", "batch_size": 5000}])
def test_schemes_and_sizes(options):
    """Lists in the place of arrays, and minibatches of several chunks."""
    engine = BilinearVG(binary_factorization, zeros="sampled", **{**OPTIONS, "num_steps": 300, "tol": 0.02, **options})
    engine.run(random.key(2), list(map(int, ROWS)), list(map(int, COLS)), np.ones(ROWS.size), **SIZES)
    assert engine.diagnostics.converged
    drawn = int(engine.diagnostics.messages[-1].split()[0])
    if "batch_size" in options:
        assert drawn == engine.diagnostics.num_steps * 5000
    # Listed zeros are zeros as others are.
    everything = BilinearVG(
        binary_factorization, zeros="sampled", **{**OPTIONS, "num_steps": 300, "tol": 0.02, **options}
    )
    i, j = np.indices(X_LARGE.shape).reshape(2, -1)
    everything.run(random.key(2), i, j, X_LARGE.ravel(), **SIZES)
    np.testing.assert_allclose(
        everything.log_evidence, engine.log_evidence, rtol=1e-6 if jax.config.jax_enable_x64 else 1e-3
    )


DEVICES = "tests.infer.bilinear.batches.bilinear_sampled_devices"


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    """Files of runs on four devices, and with the same division on one."""
    folder = tmp_path_factory.mktemp("four")
    run_on_devices(DEVICES, folder)
    return folder


def compare(path, expected):
    with np.load(path) as found:
        assert set(found) == set(expected)
        for name in found:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-10, atol=1e-10, err_msg=name)


@needs_float64
@pytest.mark.slow
def test_four_devices(on_four):
    """The numbers of one device that draws the same parts; near those of one that draws all cells from one table."""
    with np.load(on_four / "alone.npz") as alone:
        compare(on_four / "0.npz", alone)
        whole = bilinear_sampled_devices.fits(None)
        for name in ("balanced", "biased", "few"):
            np.testing.assert_allclose(alone[f"{name} bound"], whole[f"{name} bound"], rtol=0.01)
            assert not np.array_equal(alone[f"{name} u"], whole[f"{name} u"])
        assert alone["biased drawn"] == whole["biased drawn"] == 60 * 6000


@needs_float64
@pytest.mark.slow
def test_two_processes(on_four, tmp_path):
    """Processes of two devices each."""
    run_in_two_processes(partial(module_command, DEVICES, tmp_path))
    with np.load(on_four / "alone.npz") as alone:
        for number in range(2):
            compare(tmp_path / f"{number}.npz", alone)


@pytest.mark.thorough
def test_what_is_refused():
    for options, words in (
        ({"unlisted_cells": "missing"}, "unlisted_cells='zero'"),
        ({"update": "bulk"}, "update"),
        ({"num_restarts": 2}, "num_restarts"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"sampler": "other"}, "sampler"),
    ):
        with pytest.raises(ValueError, match=words):
            fit(**options)
    _, run = fit(covariance="full")
    with pytest.raises(ValueError, match="independent components"):
        run()
    engine = BilinearVG(binary_factorization, zeros="sampled", **OPTIONS)
    with pytest.raises(ModelStructureError, match="listed twice"):
        engine.run(random.key(0), [0, 0], [1, 1], np.ones(2, int), num_rows=2, num_cols=2, rank=1)
    for rows, cols, words in (
        ([0, 0], [1, 1], "row 0 and column 1 is listed twice"),
        ([0, 3], [1, 1], "rows must be from 0 to 2"),
        ([0.0], [1.0], "integers"),
        ([], [], "are ones"),
        ([0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1], "6 of 3 x 2"),
    ):
        with pytest.raises(ValueError, match=words):
            CellSampler.of(rows, cols, num_rows=3, num_cols=2)
