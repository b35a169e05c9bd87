"""Closed updates of bilinear posteriors: traces, bounds written out pair by pair, other algorithms, and the engine."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer.util import log_density
from scipy.special import expit, log_expit

from numpyro_ext.design import expected_information_gain
from numpyro_ext.infer import BilinearVG, analytic_matrix_factorization
from numpyro_ext.infer.bilinear.algorithms import quadratic
from numpyro_ext.infer.bilinear.algorithms import sweeps as core
from numpyro_ext.infer.bilinear.algorithms.cells import Block
from numpyro_ext.infer.bilinear.algorithms.quadratic import Options
from numpyro_ext.infer.bilinear.algorithms.quadratic.sums import sums_of_some, vector_sums
from numpyro_ext.infer.bilinear.algorithms.quadratic.updates import closed_update, update_in_parts
from numpyro_ext.models import binary_factorization
from numpyro_ext.potentials import LogitPotential
from numpyro_ext.structure import ModelStructureError
from numpyro_ext.structure.bilinear.form import Background, Bilinear, Common, GaussianSide, order_cells
from tests.infer.bilinear.bilinear_forms import REFERENCE
from tests.tiers import few

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
thorough, slow = pytest.mark.thorough, pytest.mark.slow


def form_of(rows, cols, x, sides, coupling, linear, *, has_zeros=False, common_scale=1.0):
    n = len(rows)
    form = Bilinear(
        *sides,
        jnp.asarray(rows),
        jnp.asarray(cols),
        jnp.asarray(coupling),
        *(jnp.asarray(terms) for terms in linear),
        jnp.full(n, -0.2 if has_zeros else 0.0),
        LogitPotential(jnp.asarray(x)),
        jnp.ones(n),
        jnp.zeros(()),
        jnp.zeros(n, int),
        jnp.zeros(n, int),
        Background(jnp.ones(())) if has_zeros else None,
        Common(GaussianSide(jnp.zeros((1, 1)), jnp.full((1, 1, 1), common_scale**-2.0)), jnp.ones((n, 1))),
    )
    return order_cells(form)


@needs_float64
@pytest.mark.parametrize("kind", ["grid", "tiles"])
@pytest.mark.parametrize("is_diagonal", few([True, False], 1))
def test_some_rows_at_a_time_move_as_all_at_once(kind, is_diagonal):
    """Parts that overlap, rows without a cell, zeros that nobody listed, and a few cells in the last tile."""
    rng = np.random.default_rng(5)
    rows, cols = np.nonzero(rng.random((70, 60)) < np.where(np.arange(70) % 9, 0.5, 0.0)[:, None])
    precision = np.ones((2,)) if is_diagonal else np.eye(2) + 0.3
    sides = [GaussianSide(jnp.zeros((n, 2)), jnp.broadcast_to(precision, (n, *precision.shape))) for n in (70, 60)]
    none = np.zeros((1, 0))
    x = rng.integers(0, 2, len(rows))
    form = form_of(rows, cols, x, sides, np.ones((1, 2)), (none, none), has_zeros=True)
    options = Options("jaakkola", kind, is_diagonal, "joint" if is_diagonal else "bulk")
    family = "diagonal" if is_diagonal else "full"
    state = jax.jit(core.init, static_argnums=(2, 3))(form, random.key(0), family, family)
    groups = ((0, 2),)

    @jax.jit
    def both(form, state):
        views = quadratic.with_tangents(quadratic.make_views(form, options), state, options)
        own, other = state.rows, state.columns
        given = views.problem("rows", options), views.at_cells(state, "rows", options).products, own, other, None
        parts = update_in_parts(own, form.rows, sums_of_some(*given, 16), groups, 16)
        return closed_update(own, form.rows, vector_sums(*given), groups), parts

    for one, other in zip(*map(jax.tree.leaves, both(form._replace(common=None), state)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


# A trace that is known


@needs_float64
@pytest.mark.parametrize(
    "layout", ["grid", pytest.param("tiles", marks=thorough), pytest.param("zeros", marks=thorough)]
)
def test_a_known_trace(layout):
    """The intercept, then each component of the columns and of the rows: the bound after each of 25 blocks, and the
    limit, as in coordinate-wise variational inference written with NumPy."""
    known = json.loads((REFERENCE / "hm_sibm_small.json").read_text())
    x = np.array(known["X"])
    num, rank = x.shape, known["D"]
    cells = np.nonzero(x) if layout == "zeros" else np.divmod(np.arange(x.size), num[1])
    sides = [GaussianSide(jnp.zeros((n, rank)), jnp.ones((n, rank))) for n in num]
    none = np.zeros((1, 0))
    form = form_of(*cells, x[cells], sides, np.ones((1, rank)), (none, none), has_zeros=layout == "zeros")
    form = form._replace(offset=jnp.zeros_like(form.offset))
    options = Options("jaakkola", "tiles" if layout == "tiles" else "grid", True, "coordinate", "exact")
    start = known["init"]
    state = core.State(
        *(Block(jnp.asarray(start[n]), jnp.asarray(start[f"{n}_var"])) for n in ("u", "v")),
        *(jnp.ones(n) for n in num),
        jnp.asarray(-jnp.inf),
        jnp.asarray(0),
        Block(jnp.full((1, 1), start["z"]), jnp.full((1, 1, 1), start["z_var"])),
    )
    views = quadratic.make_views(form, options)
    bound = jax.jit(lambda state: quadratic.bound_of(form, state, views, options))
    np.testing.assert_allclose(bound(state), known["L_init"], rtol=1e-9)
    move = {
        (side, k): jax.jit(
            lambda s, side=side, k=k: quadratic.update_side(form, s, views, side, options, stages=(((k, k + 1),),))[0]
        )
        for side in ("columns", "rows")
        for k in range(rank)
    }
    update_common = jax.jit(lambda state: quadratic.update_common(form, state, views, options)[0])
    trace, moved = [], state
    for _ in range(5):
        for step in (update_common, *move.values()):
            moved = step(moved)
            trace.append(float(bound(moved)))
    np.testing.assert_allclose(trace, known["L_trace"], rtol=1e-9)

    @jax.jit
    def sweeps(state, number):
        def once(_, state):
            return quadratic.sweep(form, state, options, views=views, first="columns", refresh=True)[0]

        return jax.lax.fori_loop(0, number, once, state)

    np.testing.assert_allclose(sweeps(state, 5).objective, known["L_trace"][-1], rtol=1e-9)
    np.testing.assert_allclose(sweeps(state, 4005).objective, known["L_after_4005_sweeps"], atol=1e-6)


# Random problems, against the bound written out

R, C, K = 7, 5, 2


def random_problem(seed, *, is_mixed, has_zeros, precision_ndim):
    """Products of two components, a bias for each side; ``is_mixed`` has linear terms in the products' components."""
    rng = np.random.default_rng(seed)
    listed = rng.uniform(size=(R, C)) < 0.6
    listed[2], listed[:, 1] = False, False
    rows, cols = np.nonzero(listed)
    x = rng.integers(0, 2, len(rows))
    sides = []
    for n in (R, C):
        precision = rng.uniform(0.5, 2.0, (n, K + 1))
        if precision_ndim == 3:
            precision = precision[:, :, None] * np.eye(K + 1) + 0.2
        sides.append(GaussianSide(jnp.asarray(0.3 * rng.normal(size=(n, K + 1))), jnp.asarray(precision)))
    linear = [np.array([[0.4, -0.3, 1.0]]) if is_mixed else np.array([[0.0, 0.0, 1.0]]) for _ in range(2)]
    return form_of(rows, cols, x, sides, rng.uniform(0.5, 1.5, (1, K)), linear, has_zeros=has_zeros, common_scale=0.8)


def written_out(form, arrays, zeros):
    """The bound from dense arrays, with a loop over all pairs."""
    (u, su), (v, sv), (z, sz) = ((np.asarray(a, float) for a in pair) for pair in arrays)
    full = [s if s.ndim == 3 else np.stack([np.diag(d) for d in s]) for s in (su, sv)]
    coupling = np.zeros((K + 1, K + 1))
    coupling[np.arange(K), np.arange(K)] = np.asarray(form.coupling)[0]
    a, b = np.asarray(form.row_linear)[0], np.asarray(form.column_linear)[0]
    offset = float(form.offset[0])
    mean = u @ coupling @ v.T + (u @ a)[:, None] + (v @ b)[None, :] + offset + z
    variance = np.zeros((R, C))
    for i in range(R):
        for j in range(C):
            left, right = coupling @ v[j] + a, coupling.T @ u[i] + b
            spread = coupling.T @ full[0][i] @ coupling
            variance[i, j] = left @ full[0][i] @ left + right @ full[1][j] @ right + np.sum(spread * full[1][j]) + sz
    square = mean**2 + variance
    listed, x = np.zeros((R, C), bool), np.zeros((R, C))
    listed[np.asarray(form.row_index), np.asarray(form.column_index)] = True
    x[np.asarray(form.row_index), np.asarray(form.column_index)] = np.asarray(form.potential.label)
    tangent = square.copy()
    if zeros == "by_row":
        found = np.where(listed, 0.0, square).sum(1) / np.maximum((~listed).sum(1), 1)
        tangent = np.where(listed, square, found[:, None])
    if zeros == "shared":
        tangent = np.where(listed, square, square[~listed].mean())
    xi = np.sqrt(tangent)
    curvature = (expit(xi) - 0.5) / (2.0 * xi)
    value = (x - 0.5) * mean + log_expit(xi) - xi / 2.0 - curvature * (square - tangent)
    total = value[listed].sum() + (value[~listed].sum() if zeros else 0.0)
    priors = [(form.rows, u, full[0]), (form.columns, v, full[1])]
    for side, m, s in priors:
        p = np.asarray(side.precision)
        p = p if p.ndim == 3 else np.stack([np.diag(d) for d in p])
        for i, d in enumerate(m - np.asarray(side.mean)):
            trace = np.trace(p[i] @ s[i]) + d @ p[i] @ d - len(d)
            total -= 0.5 * (trace - np.linalg.slogdet(p[i] @ s[i])[1])
    ratio = sz / 0.8**2
    return total - 0.5 * (ratio + z**2 / 0.8**2 - 1.0 - np.log(ratio))


CASES = [
    ("tiles", "diagonal", "joint", None, False, 2),
    ("grid", "full", "joint", None, True, 3),
    ("tiles", "diagonal", "bulk", "by_row", False, 2),
    ("tiles", "full", "joint", "shared", True, 2),
    ("grid", "diagonal", "coordinate", "exact", False, 2),
]


@needs_float64
@thorough
@pytest.mark.parametrize("kind, family, update, zeros, is_mixed, precision_ndim", CASES)
def test_updates_climb_the_bound_to_where_it_is_stationary(kind, family, update, zeros, is_mixed, precision_ndim):
    """No part of a sweep lowers the bound; at the end no direction raises it, as the bound says that is written out."""
    form = random_problem(3, is_mixed=is_mixed, has_zeros=zeros is not None, precision_ndim=precision_ndim)
    options = Options("jaakkola", kind, not is_mixed and family != "full", update, zeros or "by_row")
    views = quadratic.make_views(form, options)
    state = core.init(form, random.key(1), family, family)

    @jax.jit
    def parts(state):
        """The states after each part of a sweep, and the bounds there."""
        common, _ = quadratic.update_common(form, state, quadratic.with_tangents(views, state, options), options)
        out = [state, common]
        for side in ("rows", "columns"):
            best = quadratic.with_tangents(views, out[-1], options)
            out.append(quadratic.update_side(form, out[-1], best, side, options)[0])
        out.append(quadratic.sweep(form, state, options, views=views, with_gauge=True)[0])
        return out[-1], jnp.stack([quadratic.bound_of(form, s, views, options) for s in out])

    for _ in range(3):
        state, bounds = parts(state)
        assert np.all(np.diff(bounds[:4]) >= -1e-10) and bounds[4] >= bounds[3] - 1e-10
    arrays = (state.rows, state.columns, (state.common.mean[0, 0], state.common.covariance[0, 0, 0]))
    np.testing.assert_allclose(bounds[-1], written_out(form, arrays, zeros), rtol=1e-10)
    many = jax.jit(
        lambda s: jax.lax.fori_loop(0, 600, lambda _, s: quadratic.sweep(form, s, options, views=views)[0], s)
    )
    state = many(state)
    arrays = (state.rows, state.columns, (state.common.mean[0, 0], state.common.covariance[0, 0, 0]))
    rng, step = np.random.default_rng(0), 1e-4
    for part in range(3):
        for place in range(2):
            direction = rng.normal(size=np.shape(arrays[part][place])) * (0.1 if place else 1.0)
            if np.ndim(direction) == 3:
                direction = direction + direction.swapaxes(1, 2)
            ends = []
            for h in (-step, step):
                moved = [list(pair) for pair in arrays]
                moved[part][place] = np.asarray(moved[part][place]) + h * direction
                ends.append(written_out(form, moved, zeros))
            np.testing.assert_allclose((ends[1] - ends[0]) / (2.0 * step), 0.0, atol=2e-4)


@needs_float64
@thorough
@pytest.mark.parametrize("kind, zeros", [("tiles", "by_row"), ("grid", "shared")])
def test_a_sweep_is_its_parts(kind, zeros):
    """Moments of cells that several parts share, in the order of one side, are those that each part makes itself."""
    form = random_problem(3, is_mixed=False, has_zeros=True, precision_ndim=2)
    options = Options("jaakkola", kind, True, "joint", zeros)
    views = quadratic.make_views(form, options)
    start = core.init(form, random.key(1), "diagonal", "diagonal")

    @jax.jit
    def both(state):
        found = quadratic.sweep(form, state, options, views=views, first="columns")[0]
        state, _ = quadratic.update_common(form, state, quadratic.with_tangents(views, state, options), options)
        for side in ("columns", "rows"):
            best = quadratic.with_tangents(views, state, options)
            state, _ = quadratic.update_side(form, state, best, side, options)
        return found._replace(objective=quadratic.bound_of(form, found, views, options)), state._replace(
            objective=quadratic.bound_of(form, state, views, options)
        )

    for one, other in zip(*(jax.tree.leaves(state) for state in both(start)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


# Normal values


def normal_model(y, rank, noise, row_scale, col_scale):
    rows, cols = np.divmod(np.arange(y.size), y.shape[1])
    with numpyro.plate("rows", y.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.0, row_scale).expand([rank]).to_event(1))
    with numpyro.plate("cols", y.shape[1]):
        v = numpyro.sample("v", dist.Normal(0.0, col_scale).expand([rank]).to_event(1))
    numpyro.sample("y", dist.Normal((u[rows] * v[cols]).sum(-1), noise), obs=y.ravel())


@needs_float64
def test_the_analytic_posterior_of_a_matrix():
    """Singular values shrink as in a table that coordinate-wise variational inference made."""
    with (REFERENCE / "hm_vbmf_analytic.csv").open() as file:
        for line in csv.DictReader(file):
            gamma, noise, scales = float(line["gamma"]), float(line["sigma2"]), (line["ca2"], line["cb2"])
            x = np.zeros((int(line["L"]), int(line["M"])))
            x[0, 0] = gamma
            found = analytic_matrix_factorization(x, noise**0.5, tuple(float(s) ** 0.5 for s in scales))
            np.testing.assert_allclose(found.mean[0, 0], float(line["gamma_vb"]), rtol=1e-9)
    small = analytic_matrix_factorization(np.diag([0.1, 0.2]), 1.0, (1.0, 1.0))
    assert small.singular_values.size == 0 and np.all(small.mean == 0.0)
    with pytest.raises(ValueError, match="finite"):
        analytic_matrix_factorization([[1.0, np.nan]], 1.0, (1.0, 1.0))


@needs_float64
@thorough
def test_normal_values_end_at_the_analytic_posterior():
    """Full covariances of a complete matrix: the product of the means is that of the global optimum."""
    rng = np.random.default_rng(2)
    y = rng.normal(size=(9, 3)) @ rng.normal(size=(3, 7)) + 0.5 * rng.normal(size=(9, 7))
    engine = BilinearVG(normal_model, covariance="full", tol=1e-11, progress_bar=False, num_samples=5)
    engine.run(random.key(0), y, 4, 0.5, 0.9, 1.2)
    product = engine.posterior["u"].mean @ engine.posterior["v"].mean.T
    best = analytic_matrix_factorization(y, 0.5, (0.9, 1.2), rank=4)
    assert engine.diagnostics.converged and np.all(np.diff(engine.diagnostics.objective_trace) >= -1e-8)
    np.testing.assert_allclose(product, best.mean, atol=2e-4)


@needs_float64
@thorough
def test_points_are_alternating_least_squares():
    """Points on both sides and Normal values: a run is ridge regression of one side on the other, in turn."""
    rng = np.random.default_rng(4)
    y = rng.normal(size=(8, 2)) @ rng.normal(size=(2, 6))
    engine = BilinearVG(normal_model, covariance="point", tol=1e-12, num_restarts=0, progress_bar=False, num_samples=5)
    engine.run(random.key(0), y, 2, 0.5, 1.0, 1.0)
    v = np.asarray(engine.posterior["v"].mean)
    for _ in range(200):
        u = np.linalg.solve(v.T @ v + 0.25 * np.eye(2), v.T @ y.T).T
        v = np.linalg.solve(u.T @ u + 0.25 * np.eye(2), u.T @ y).T
    np.testing.assert_allclose(engine.posterior["u"].mean @ engine.posterior["v"].mean.T, u @ v.T, atol=1e-4)


# The engine

X = np.random.default_rng(7).uniform(size=(R, C)) < 0.35
SIZES = {"num_rows": R, "num_cols": C, "rank": K}
LISTED = np.nonzero(X)
ALL = np.divmod(np.arange(X.size), C)


def run(*cells, num_samples=40, **options):
    options |= {"bound": "jaakkola", "progress_bar": False, "num_samples": num_samples}
    engine = BilinearVG(binary_factorization, **options)
    engine.run(random.key(0), *cells, X[cells].astype(int), **SIZES)
    return engine


@pytest.fixture(scope="module")
def dense():
    return run(*ALL, tol=1e-9, num_restarts=0, num_samples=1000)


@needs_float64
@thorough
def test_the_engine_and_its_answers(dense, tmp_path):
    """The intercept has a posterior; draws have the density of NumPyro; rows folded in are those of the fit."""
    assert dense.diagnostics.converged and dense.log_evidence.is_lower_bound and dense.hyper == {}
    assert "common to all cells: z" in dense.describe() and "hyperparameters" not in repr(dense)
    draws = dense.get_samples()
    assert draws["z"].shape == (1000,) and 0.0 < float(dense.posterior["z"].variance) < 1.0
    joint, _ = log_density(binary_factorization, (*ALL, X[ALL].astype(int)), SIZES, {n: d[3] for n, d in draws.items()})
    np.testing.assert_allclose(dense.get_extra_fields()["potential_energy"][3], -joint, rtol=1e-9)
    chosen = ALL[0] < 2
    few = tuple(index[chosen] for index in ALL)
    folded = dense.fold_in(random.key(1), *few, X[few].astype(int), **{**SIZES, "num_rows": 2})
    np.testing.assert_allclose(folded.posterior["u"].mean, dense.posterior["u"].mean[:2], atol=1e-3)
    np.testing.assert_allclose(folded.posterior["b"].variance, dense.posterior["b"].variance[:2], rtol=1e-3)
    mean = dense.predictive_mean(*ALL, **SIZES)["x"]
    log_one = dense.log_predictive(*ALL, np.ones(X.size, int), num_samples=3000, **SIZES)["x"]
    np.testing.assert_allclose(np.exp(log_one), mean, atol=0.01)
    dense.save(tmp_path / "fit")
    again = BilinearVG.load(tmp_path / "fit", binary_factorization)
    np.testing.assert_allclose(again.posterior["z"].mean, dense.posterior["z"].mean)


@needs_float64
@thorough
def test_zeros_that_nobody_listed(dense):
    """With tangents of their own they are listed zeros; by row and shared the bound is lower, in this order."""
    exact, by_row, shared = (
        run(*LISTED, unlisted_cells="zero", zeros=zeros, tol=1e-9, num_restarts=0)
        for zeros in ("exact", "by_row", "shared")
    )
    np.testing.assert_allclose(float(exact.log_evidence), float(dense.log_evidence), rtol=1e-7)
    np.testing.assert_allclose(exact.posterior["z"].mean, dense.posterior["z"].mean, atol=1e-4)
    assert float(shared.log_evidence) <= float(by_row.log_evidence) < float(exact.log_evidence)
    assert f"{X.size - X.sum()} zeros" in by_row.describe()


def test_options():
    with pytest.raises(ValueError, match="leave solver"):
        BilinearVG(binary_factorization, bound="jaakkola", solver="lbfgs")
    with pytest.raises(ValueError, match="bound must be one of"):
        BilinearVG(binary_factorization, bound="jensen")
    with pytest.raises(ValueError, match="zeros must be one of"):
        BilinearVG(binary_factorization, zeros="some")
    with pytest.raises(ValueError, match="for bound='jaakkola'"):
        BilinearVG(binary_factorization, bound="bohning", unlisted_cells="zero")


@thorough
def test_what_bounds_and_zeros_cannot_treat():
    """Refusals name the site or the option, and what to do."""

    def counts(rows, cols, y):
        with numpyro.plate("rows", R):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        with numpyro.plate("cols", C):
            v = numpyro.sample("v", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(u[rows] * v[cols])), obs=y)

    ones = np.ones(len(LISTED[0]), int)
    with pytest.raises(ModelStructureError, match="logistic factors.*leave bound out"):
        BilinearVG(counts, bound="jaakkola").run(random.key(0), *LISTED, ones)
    with pytest.raises(ModelStructureError, match="need bound='jaakkola'"):
        BilinearVG(binary_factorization, unlisted_cells="zero").run(random.key(0), *LISTED, ones, **SIZES)
    with pytest.raises(
        ModelStructureError, match="cells are listed twice or more, the first in row 0 .*List each cell once"
    ):
        twice = tuple(np.repeat(index, 2) for index in LISTED)
        options = {"bound": "jaakkola", "unlisted_cells": "zero"}
        BilinearVG(binary_factorization, **options).run(random.key(0), *twice, np.repeat(ones, 2), **SIZES)
    with pytest.raises(ValueError, match="35 pairs, more than max_cells=10.*by_row"):
        BilinearVG(binary_factorization, zeros="exact", max_cells=10, **options).run(
            random.key(0), *LISTED, ones, **SIZES
        )
    with pytest.raises(ValueError, match="update='bulk' is for independent"):
        BilinearVG(binary_factorization, bound="jaakkola", update="bulk", covariance="full").run(
            random.key(0), *LISTED, ones, **SIZES
        )


@needs_float64
@thorough
def test_what_an_observation_says_of_a_vector(dense):
    """The intercept is a nuisance: the information about a row is the entropy of an outcome less its mean given draws
    of the row, with everything else integrated over by draws."""
    cells = np.zeros(C, int), np.arange(C)
    gain = expected_information_gain(dense, *cells, focus={"u": [0], "b": [0]}, rng_key=random.key(2), **SIZES)["x"]
    rng = np.random.default_rng(5)
    mean, deviation = ({n: np.asarray(x) for n, x in found.items()} for found in _moments(dense))
    num = 400

    def draw(name, shape):
        return mean[name] + deviation[name] * rng.standard_normal((*shape, *np.shape(mean[name])))

    u, b = draw("u", (num,))[:, 0], draw("b", (num,))[:, 0]
    v, g, z = draw("v", (num,)), draw("g", (num,)), draw("z", (num,))
    logits = np.einsum("ik,jck->ijc", u, v) + b[:, None, None] + (g + z[:, None])[None]
    p = expit(logits).mean(1)

    def entropy(p):
        return -p * np.log(p) - (1.0 - p) * np.log1p(-p)

    np.testing.assert_allclose(gain, entropy(p.mean(0)) - entropy(p).mean(0), atol=0.008)
    with pytest.raises(ValueError, match="which all cells see"):
        expected_information_gain(dense, *cells, focus="z", rng_key=random.key(2), **SIZES)


def _moments(engine):
    sites = {n: engine.posterior[n] for n in ("u", "b", "v", "g", "z")}
    return [{n: s.mean for n, s in sites.items()}, {n: np.sqrt(s.variance) for n, s in sites.items()}]


@needs_float64
@thorough
@pytest.mark.parametrize("family", ["binomial", "negative binomial"])
def test_bounds_of_other_logistic_factors(family):
    """Below the bound with exact expectations, from the same start; that of Böhning is the lowest."""
    counts = np.random.default_rng(8).poisson(2.0, (R, C)).ravel()

    def model(rows, cols, y):
        with numpyro.plate("rows", R):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        with numpyro.plate("cols", C):
            v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        logits = (u[rows] * v[cols]).sum(-1) - 0.5
        if family == "binomial":
            numpyro.sample("y", dist.Binomial(10, logits=logits), obs=y)
        else:
            numpyro.sample("y", dist.NegativeBinomialLogits(3.0, logits), obs=y)

    ends = []
    for bound in ("bohning", "jaakkola", "exact"):
        engine = BilinearVG(model, bound=bound, tol=1e-8, num_restarts=3, progress_bar=False, num_samples=5)
        engine.run(random.key(0), *ALL, counts)
        assert engine.diagnostics.converged and np.all(np.diff(engine.diagnostics.objective_trace) >= -1e-8)
        ends.append(float(engine.log_evidence))
    assert ends[0] <= ends[1] + 1e-9 and ends[1] < ends[2] < ends[1] + 5.0
