"""The bilinear bound, its steps and its gauge against reference values, dense evaluations and known optima."""

import itertools
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer.bilinear.algorithms import steps
from numpyro_ext.infer.bilinear.algorithms import sweeps as bg
from numpyro_ext.infer.bilinear.algorithms.cells import Block, make_view, sum_cells, sum_values
from numpyro_ext.infer.bilinear.algorithms.gauge import gauge_residual, gauge_step
from numpyro_ext.infer.bilinear.algorithms.schedules import loop
from numpyro_ext.potentials import (
    LogitPotential,
    NegativeBinomialExpPotential,
    PoissonExpPotential,
    ProbitPotential,
)
from numpyro_ext.potentials.families.ordinal import CumulativeProbitPotential
from numpyro_ext.potentials.families.poisson import PoissonSoftplusPotential
from numpyro_ext.potentials.integrals.products.exponential_product import log_expected_exp_product
from numpyro_ext.structure.bilinear.form import Bilinear, GaussianSide, order_cells
from tests.infer.bilinear.bilinear_forms import REFERENCE, factorisation, reference_problem, synthetic_counts
from tests.tiers import few

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
BOTH = pytest.mark.float32
solve = jax.jit(partial(loop.solve, num_sweeps=400, tol=1e-7))
bound = jax.jit(bg.bound)
step_side = jax.jit(steps.step_side)
init = jax.jit(bg.init, static_argnums=(2, 3))
make_views = jax.jit(bg.make_views)
margin_of = jax.jit(bg.spectral_margin)
best_gauge = jax.jit(gauge_step)
sums_of = jax.jit(sum_cells)
values_of = jax.jit(sum_values)


def blocks_of(found, families):
    out = []
    for mean, covariance, family in ((found["a"], found["A"], families[0]), (found["b"], found["B"], families[1])):
        spread = {"full": covariance, "diagonal": np.einsum("eii->ei", covariance), "point": None}[family]
        out.append(Block(jnp.asarray(mean), None if spread is None else jnp.asarray(spread)))
    return out


@BOTH
@pytest.mark.parametrize(
    "families, value",
    [
        (("full", "full"), ("VB", "bound")),
        (("diagonal", "diagonal"), ("MF", "bound")),
        (("full", "point"), ("EM", "bound_penalised")),
        (("point", "point"), ("MAP", "log_joint")),
    ],
)
def test_values_of_the_reference(families, value):
    form, found = reference_problem()
    got = bound(form, *blocks_of(found, families))
    np.testing.assert_allclose(got, found[value[0]][value[1]], rtol=1e-12 if got.dtype == np.float64 else 1e-5)


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize(
    "method, family, names", few([("VB", "full", ("A", "B")), ("MF", "diagonal", ("Avar", "Bvar"))], 1)
)
def test_gradients_of_the_reference(method, family, names):
    form, found = reference_problem()
    rows, columns = blocks_of(found, (family, family))
    views = bg.make_views(form, rows, columns)
    sides = ((views.rows, rows, columns, form.rows, "a"), (views.columns, columns, rows, form.columns, "b"))
    for (view, own, other, prior, mean_name), name in zip(sides, names, strict=True):
        sums = sums_of(view, own, other)
        slope = sums.slope - prior.apply(own.mean)
        np.testing.assert_allclose(slope, found[method][f"grad_{mean_name}"], atol=1e-12)
        if family == "full":
            curvature = jnp.linalg.inv(own.covariance) - sums.precision - prior.precision[:, :, None] * jnp.eye(2)
        else:
            curvature = 1.0 / own.covariance - sums.precision - prior.precision
        np.testing.assert_allclose(0.5 * curvature, found[method][f"grad_{name}"], atol=1e-12)


@needs_float64
@pytest.mark.parametrize("method, family", [("VB", "full"), ("MF", "diagonal")])
def test_the_optimum_of_one_side_is_unique(method, family):
    """From two starts the steps of one side end at the optimum of the reference, found there by L-BFGS."""
    form, found = reference_problem()
    expected = found[method]["user_block_optimum"]
    rows, columns = blocks_of(found, (family, family))
    view = bg.make_views(form, rows, columns).rows
    other_start = Block(-rows.mean, 0.3 * rows.covariance)
    for start in (rows, other_start):
        block, step = start, jnp.full(5, 0.5)
        previous = jnp.full(5, -jnp.inf)
        for _ in range(60):
            block, step, value, _ = step_side(view, block, columns, form.rows, step)
            assert np.all(value >= previous - 1e-12)
            previous = value
        np.testing.assert_allclose(block.mean, expected["a"], atol=1e-7)
        np.testing.assert_allclose(block.covariance, expected["A"], atol=1e-7)
        # the file leaves out of these parts what the priors of the other side contribute
        np.testing.assert_allclose(bound(form, block, columns), expected["bound"], rtol=1e-12)


@pytest.mark.thorough
@needs_float64
def test_one_cell_against_the_exact_evidence():
    cases = json.loads((REFERENCE / "ko-pmf-bounds.json").read_text())["evidence_D1"]
    assert {c["sigma2_u"] for c in cases} == {1.0}
    zero = np.zeros(1, int)
    for case in cases:
        form = factorisation(zero, zero, [case["y"]], (1, 1), (case["sigma2_u"], case["sigma2_v"]), 1)
        ends = [solve(form, init(form, jax.random.key(seed), "diagonal", "diagonal")) for seed in range(3)]
        state, info = max(ends, key=lambda end: float(end[1].objective))
        assert info.objective <= case["log_evidence"]
        np.testing.assert_allclose(info.objective, case["vg"]["bound"], atol=1e-6)
        spreads = float(state.rows.covariance[0, 0]), float(state.columns.covariance[0, 0])
        np.testing.assert_allclose(spreads, (case["vg"]["A"], case["vg"]["B"]), rtol=0.02)


def random_form(rng, *, is_paired, is_shared):
    """Three rows of size three, four columns of size three or two, linear terms, offsets, exposures, correlations."""
    n, num, sizes = 9, (3, 4), (3, 3 if is_paired else 2)
    lead = 1 if is_shared else n
    sides = []
    for count, size in zip(num, sizes, strict=True):
        root = rng.standard_normal((count, size, size))
        precision = root @ root.swapaxes(-1, -2) + 2.0 * np.eye(size)
        sides.append(GaussianSide(jnp.asarray(0.3 * rng.standard_normal((count, size))), jnp.asarray(precision)))
    coupling = rng.standard_normal((lead, 2) if is_paired else (lead, *sizes))
    return order_cells(
        Bilinear(
            *sides,
            jnp.asarray(rng.integers(0, num[0], n)),
            jnp.asarray(rng.integers(0, num[1], n)),
            jnp.asarray(coupling),
            jnp.asarray(0.5 * rng.standard_normal((lead, sizes[0]))),
            jnp.asarray(0.5 * rng.standard_normal((lead, sizes[1]))),
            jnp.asarray(0.5 * rng.standard_normal(n)),
            PoissonExpPotential(jnp.asarray(rng.poisson(1.5, n), float), jnp.asarray(rng.uniform(0.5, 2.0, n))),
            jnp.asarray(rng.choice([0.0, 1.0, 2.0], n, p=[0.2, 0.6, 0.2])),
            jnp.asarray(0.7),
            jnp.zeros(n, int),
            jnp.zeros(n, int),
        )
    )


def augmented_bound(form, rows, columns):
    """The bound with constants in both vectors and one kernel per cell: nothing of the code under test."""
    sizes = rows.mean.shape[1], columns.mean.shape[1]

    def cell(r, s, m, alpha, beta, offset, y, exposure, weight):
        product = jnp.zeros(sizes).at[: m.shape[0], : m.shape[0]].set(jnp.diag(m)) if form.is_paired else m
        whole = jnp.block([[product, alpha[:, None]], [beta[None, :], offset]])
        a, b = jnp.append(rows.mean[r], 1.0), whole @ jnp.append(columns.mean[s], 1.0)
        A = jnp.pad(rows.covariance[r], [(0, 1), (0, 1)])
        B = whole @ jnp.pad(columns.covariance[s], [(0, 1), (0, 1)]) @ whole.T
        value = y * (a @ b + jnp.log(exposure)) - exposure * jnp.exp(log_expected_exp_product(a, A, b, B))
        return weight * (value - jax.scipy.special.gammaln(y + 1.0))

    def divergence(m, v, mu, p):
        logdet = jnp.linalg.slogdet(p)[1] + jnp.linalg.slogdet(v)[1]
        return 0.5 * (jnp.trace(p @ v) + (m - mu) @ p @ (m - mu) - m.size - logdet)

    spread = [
        jnp.broadcast_to(x, (form.num_cells, *x.shape[1:]))
        for x in (form.coupling, form.row_linear, form.column_linear)
    ]
    data = form.potential.count, form.potential.exposure, form.weight
    total = form.log_constant + jnp.sum(jax.vmap(cell)(form.row_index, form.column_index, *spread, form.offset, *data))
    for block, prior in ((rows, form.rows), (columns, form.columns)):
        total -= jnp.sum(jax.vmap(divergence)(*block, *prior[:2]))
    return total


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize(
    "is_paired, is_shared",
    [
        (True, True),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_dense_evaluation_with_linear_terms(is_paired, is_shared):
    """Values and slopes against automatic differentiation of a bound on augmented vectors."""
    rng = np.random.default_rng(3)
    form = random_form(rng, is_paired=is_paired, is_shared=is_shared)
    blocks = []
    for prior in (form.rows, form.columns):
        root = 0.2 * rng.standard_normal(prior.precision.shape)
        mean = 0.5 * rng.standard_normal(prior.mean.shape)
        covariance = root @ root.swapaxes(-1, -2) + 0.02 * np.eye(prior.mean.shape[1])
        blocks.append(Block(jnp.asarray(mean), jnp.asarray(covariance)))
    dense = jax.jit(jax.value_and_grad(lambda blocks: augmented_bound(form, *blocks)))
    families = ["full", "diagonal"] if is_paired else ["full"]
    for family in families:
        used = blocks
        if family == "diagonal":
            used = [Block(b.mean, jnp.einsum("eii->ei", b.covariance)) for b in blocks]
        as_full = [
            Block(b.mean, b.covariance if b.covariance.ndim == 3 else jax.vmap(jnp.diag)(b.covariance)) for b in used
        ]
        value, slopes = dense(as_full)
        np.testing.assert_allclose(bound(form, *used), value, rtol=1e-12)
        for i, (side, prior) in enumerate((("rows", form.rows), ("columns", form.columns))):
            # four chunks, the last of them padded
            view = make_view(form, side, 1)
            sums = sums_of(view, used[i], used[1 - i])
            np.testing.assert_allclose(sums.value, values_of(view, used[i], used[1 - i]), rtol=1e-13)
            residual = used[i].mean - prior.mean
            np.testing.assert_allclose(sums.slope - prior.apply(residual), slopes[i].mean, atol=1e-11)
            half = 0.5 * (jnp.linalg.inv(as_full[i].covariance) - prior.precision)
            expected = slopes[i].covariance
            expected = 0.5 * (expected + expected.swapaxes(-1, -2)) - half
            if family == "diagonal":
                expected = jnp.einsum("eii->ei", expected)
            np.testing.assert_allclose(-0.5 * sums.precision, expected, atol=1e-11)


_COUNTS = jnp.array([0.0, 3.0, 1.0, 0.0, 7.0, 2.0, 0.0, 1.0, 4.0])
_LABELS = (_COUNTS > 1.0).astype(int)
_OTHERS = {
    "probit": ProbitPotential(_LABELS),
    "logit": LogitPotential(_LABELS),
    "softplus": PoissonSoftplusPotential(_COUNTS, jnp.ones(9)),
    "negative_binomial": NegativeBinomialExpPotential(_COUNTS, jnp.full(9, 1.5), jnp.ones(9)),
    "ordered": CumulativeProbitPotential(
        jnp.minimum(_COUNTS, 2.0).astype(int), jnp.tile(jnp.array([-1.0, 0.5]), (9, 1))
    ),
}
_FAMILIES = [("full", "full"), ("full", "point"), ("point", "full"), ("point", "point"), ("diagonal", "diagonal")]
_QUICK = {("probit", _FAMILIES[0]), ("probit", _FAMILIES[3])}
_RISES = [
    pytest.param(*case, marks=pytest.mark.thorough if case in _QUICK else pytest.mark.slow)
    for case in itertools.product(_OTHERS, _FAMILIES)
]


@needs_float64
@pytest.mark.parametrize("name, families", _RISES)
def test_no_sweep_lowers_the_objective(name, families):
    """Ten random problems; vectors of three components meet those of two, so that products have silent directions."""
    sweep = jax.jit(lambda form, views, state: bg.sweep(form, views, state)[0])
    for seed in range(10):
        rng = np.random.default_rng(seed)
        form = random_form(rng, is_paired=families[0] == "diagonal", is_shared=False)._replace(potential=_OTHERS[name])
        state = init(form, jax.random.key(seed), *families)
        views = make_views(form, state.rows, state.columns)
        trace = [float(bound(form, state.rows, state.columns))]
        for _ in range(15):
            state = sweep(form, views, state)
            trace.append(float(bound(form, state.rows, state.columns)))
            np.testing.assert_allclose(state.objective, trace[-1], rtol=1e-9)
        assert np.all(np.diff(trace) >= -1e-9 * np.abs(trace[:-1])), trace


@needs_float64
def test_points_are_gaussians_without_spread():
    """Covariances that vanish give the expected log factors of points, of one side or of both."""
    form, found = reference_problem()
    rows, columns = blocks_of(found, ("full", "full"))
    tiny = Block(columns.mean, 1e-12 * columns.covariance)
    view = bg.make_views(form, rows, columns).rows
    point = sums_of(view, rows, Block(columns.mean, None))
    for got, expected in zip(point, sums_of(view, rows, tiny), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.thorough
@needs_float64
def test_the_gauge_step_raises_the_bound_and_leaves_the_data_alone():
    form, found = reference_problem()
    for families in (("full", "full"), ("diagonal", "diagonal"), ("full", "point")):
        rows, columns = blocks_of(found, families)
        before = bound(form, rows, columns)
        new_rows, new_columns = best_gauge(form, rows, columns)
        assert bound(form, new_rows, new_columns) > before
        views = bg.make_views(form, rows, columns)
        data = values_of(views.rows, rows, columns)
        np.testing.assert_allclose(values_of(views.rows, new_rows, new_columns), data, rtol=1e-12)
        assert gauge_residual(form, new_rows, new_columns) < 1e-12
        again = best_gauge(form, new_rows, new_columns)
        np.testing.assert_allclose(again[0].mean, new_rows.mean, atol=1e-12)


@pytest.mark.thorough
@needs_float64
def test_an_infeasible_start_is_legal():
    train, _ = synthetic_counts()
    form = factorisation(*train, (50, 60), (1.0, 0.1), 3)
    start = init(form, jax.random.key(0), "full", "full")
    wide = [Block(b.mean, 40.0 * b.covariance) for b in (start.rows, start.columns)]
    assert bound(form, *wide) == -jnp.inf
    state, info = solve(form, start._replace(rows=wide[0], columns=wide[1]))
    assert bool(info.converged) and np.isfinite(info.objective)
    products = np.asarray(state.rows.covariance)[train[0]] @ np.asarray(state.columns.covariance)[train[1]]
    exact = np.linalg.eigvals(products).real.max()
    assert 0.0 < exact < 1.0
    np.testing.assert_allclose(1.0 - margin_of(form, state), exact, rtol=1e-10)


@pytest.mark.thorough
@BOTH
def test_rows_without_cells_and_cells_without_weight():
    """A cell without weight is no cell, and a vector without cells keeps its prior."""
    (rows, columns, counts), _ = synthetic_counts()
    kept = rows < 40
    rtol = 1e-12 if jax.config.jax_enable_x64 else 1e-5
    form = factorisation(rows, columns, counts, (50, 60), (1.0, 0.1), 3)._replace(weight=jnp.asarray(kept * 1.0))
    removed = factorisation(rows[kept], columns[kept], counts[kept], (50, 60), (1.0, 0.1), 3)
    start = init(form, jax.random.key(0), "diagonal", "diagonal")
    np.testing.assert_allclose(
        bound(form, start.rows, start.columns), bound(removed, start.rows, start.columns), rtol=rtol
    )
    state, info = solve(form, start)
    assert np.all(np.diff(info.objective_trace[: info.num_steps]) >= -1e3 * rtol)
    np.testing.assert_allclose(state.rows.mean[40:], 0.0, atol=1e-2)
    np.testing.assert_allclose(state.rows.covariance[40:], 1.0, rtol=0.05)


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("family, best", few([("full", -1115.66), ("diagonal", -1120.09)], 1))
def test_synthetic_counts(family, best):
    """Monotone, close to the best bound known, and at a point where the gauge equation holds."""
    train, _ = synthetic_counts()
    reference = json.loads((REFERENCE / "ko-pmf-synth-results.json").read_text())["runs"][1]
    listed = max(reference["VB" if family == "full" else "MF"]["all_bounds"])
    np.testing.assert_allclose(listed, best, atol=0.05)
    form = factorisation(*train, (50, 60), (1.0, reference["sigma2_v"]), 3)
    # Diagonal covariances have several optima within two nats; this start leads to the best.
    state, info = solve(form, init(form, jax.random.key(3), family, family))
    trace = np.asarray(info.objective_trace)[: int(info.num_steps)]
    assert bool(info.converged)
    assert np.all(np.diff(trace) >= -1e-8 * abs(best))
    np.testing.assert_allclose(info.objective, listed, atol=2e-3)
    np.testing.assert_allclose(bound(form, state.rows, state.columns), info.objective, rtol=1e-12)
    assert gauge_residual(form, state.rows, state.columns) < 1e-8
    # at any optimum the posterior is narrower than the prior
    if family == "full":
        assert np.all(np.linalg.eigvalsh(np.eye(3) - np.asarray(state.rows.covariance)) > 0.0)


@needs_float64
def test_rotations_and_permutations_change_nothing():
    (rows, columns, counts), _ = synthetic_counts()
    form = factorisation(rows, columns, counts, (50, 60), (1.0, 0.3), 3)
    state = init(form, jax.random.key(0), "full", "full")
    rng = np.random.default_rng(0)
    rotation = jnp.asarray(np.linalg.qr(rng.standard_normal((3, 3)))[0])
    turned = [Block(b.mean @ rotation.T, rotation @ b.covariance @ rotation.T) for b in (state.rows, state.columns)]
    order = rng.permutation(len(rows))
    shuffled = factorisation(rows[order], columns[order], counts[order], (50, 60), (1.0, 0.3), 3)
    expected = bound(form, state.rows, state.columns)
    np.testing.assert_allclose(bound(form, *turned), expected, rtol=1e-12)
    np.testing.assert_allclose(bound(shuffled, state.rows, state.columns), expected, rtol=1e-12)


@needs_float64
def test_all_zero_and_huge_counts():
    (rows, columns, counts), _ = synthetic_counts()
    for values in (np.zeros_like(counts), np.where(np.arange(len(counts)) % 50 == 0, 10**6, counts)):
        form = factorisation(rows, columns, values, (50, 60), (1.0, 0.1), 3)
        state, info = solve(form, init(form, jax.random.key(2), "diagonal", "diagonal"))
        trace = np.asarray(info.objective_trace)[: int(info.num_steps)]
        assert np.all(np.isfinite(trace)) and np.all(np.diff(trace) >= -1e-8 * np.abs(trace[1:]))
        assert 0.0 < margin_of(form, state) < 1.0
