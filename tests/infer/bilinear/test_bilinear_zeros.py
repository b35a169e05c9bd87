"""Zeros in all cells that are not listed: bounds and steps against the same with every cell visited."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density

from numpyro_ext.infer import BilinearVG
from numpyro_ext.infer.bilinear.algorithms import steps
from numpyro_ext.infer.bilinear.algorithms import sweeps as bg
from numpyro_ext.infer.bilinear.algorithms.background import listed_potential, rising_zero
from numpyro_ext.infer.bilinear.algorithms.cells import Block, make_view, sum_cells, sum_values
from numpyro_ext.infer.bilinear.algorithms.schedules import loop
from numpyro_ext.potentials.base import Potential, potential
from numpyro_ext.potentials.families.poisson import PoissonSoftplusPotential
from numpyro_ext.structure import ModelStructureError
from numpyro_ext.structure.bilinear.form import Background, Bilinear, GaussianSide, order_cells
from tests.tiers import few

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
R, C, EXPOSURE, OFFSET = 6, 5, 0.7, -0.4


@potential
class Parabola(Potential):
    """The bound of the log factor of a zero."""

    tangent: jax.Array

    def log_density(self, eta):
        distance = eta - self.tangent
        rise = jax.nn.sigmoid(self.tangent)
        return -EXPOSURE * (jax.nn.softplus(self.tangent) + rise * distance + distance**2 / 8.0)


@potential
class Mixed(Potential):
    """Counts where they are listed, else parabolas."""

    counts: PoissonSoftplusPotential
    parabola: Parabola
    is_listed: jax.Array

    def log_density(self, eta):
        return jnp.where(self.is_listed, self.counts.log_density(eta), self.parabola.log_density(eta))


def problem(seed, *, is_paired, sizes=(3, 3)):
    """Listed cells of some pairs, and the same with all pairs, of which the zeros come as parabolas."""
    rng = np.random.default_rng(seed)
    listed = rng.uniform(size=(R, C)) < 0.3
    listed[0] = True
    listed[1] = False
    counts = np.where(listed, rng.poisson(3.0, (R, C)), 0)
    sides = [
        GaussianSide(jnp.asarray(0.2 * rng.normal(size=(n, k))), jnp.asarray(rng.uniform(1.0, 2.0, (n, k))))
        for n, k in ((R, sizes[0]), (C, sizes[1]))
    ]
    coupling = rng.uniform(0.5, 1.5, (1, 2)) if is_paired else 0.5 * rng.normal(size=(1, *sizes))
    linear = [jnp.asarray(0.5 * rng.normal(size=(1, k))) for k in sizes]

    def form(rows, columns, found, **zeros):
        return order_cells(
            Bilinear(
                *sides,
                jnp.asarray(rows),
                jnp.asarray(columns),
                jnp.asarray(coupling),
                *linear,
                jnp.full(len(rows), OFFSET),
                found,
                jnp.ones(len(rows)),
                jnp.zeros(()),
                jnp.zeros(len(rows), int),
                jnp.zeros(len(rows), int),
                **zeros,
            )
        )

    rows, columns = np.nonzero(listed)
    exposure = jnp.full(len(rows), EXPOSURE)
    sparse = form(
        rows,
        columns,
        PoissonSoftplusPotential(jnp.asarray(counts[listed], float), exposure),
        background=Background(jnp.asarray(EXPOSURE)),
    )

    def dense(tangent):
        rows, columns = np.divmod(np.arange(R * C), C)
        found = PoissonSoftplusPotential(jnp.asarray(counts.ravel(), float), jnp.full(R * C, EXPOSURE))
        return form(rows, columns, Mixed(found, Parabola(tangent[rows]), jnp.asarray(listed.ravel())))

    blocks = [
        Block(jnp.asarray(rng.normal(size=s.mean.shape)), jnp.asarray(rng.uniform(0.05, 0.4, s.mean.shape)))
        for s in sides
    ]
    return sparse, dense, listed, blocks


def mean_of_zeros(form, listed, rows, columns):
    """Mean of the expected predictors of the zeros of each row, and zero for a row without one."""
    every = form._replace(row_index=np.repeat(np.arange(R), C), column_index=np.tile(np.arange(C), R))
    predictor = every._replace(offset=jnp.full(R * C, OFFSET)).predictor(rows.mean, columns.mean).reshape(R, C)
    return jnp.sum(jnp.where(listed, 0.0, predictor), 1) / np.maximum(np.sum(~listed, 1), 1)


def as_family(block, family):
    if family == "point":
        return Block(block.mean, None)
    if family == "diagonal":
        return block
    size = block.mean.shape[1]
    matrix = block.covariance[:, :, None] * jnp.eye(size) + 0.03
    return Block(block.mean, matrix)


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize(
    "is_paired, families",
    [
        (True, ("diagonal", "diagonal")),
        pytest.param(False, ("full", "point"), marks=pytest.mark.thorough),
        pytest.param(True, ("full", "diagonal"), marks=pytest.mark.slow),
    ],
)
def test_sums_are_those_of_all_cells(is_paired, families):
    """The dense sums visit every pair, with the parabola in the place of a zero."""
    sparse, dense, listed, blocks = problem(0, is_paired=is_paired, sizes=(3, 3) if is_paired else (3, 2))
    rows, columns = (as_family(b, f) for b, f in zip(blocks, families, strict=True))
    views = bg.with_tangents(bg.make_views(sparse, rows, columns), rows, columns)
    tangent = mean_of_zeros(sparse, listed, rows, columns)
    whole = bg.make_views(dense(tangent), rows, columns)
    for side, own, other in (("rows", rows, columns), ("columns", columns, rows)):
        view, reference = getattr(views, side), getattr(whole, side)
        found, expected = jax.jit(sum_cells)(view, own, other), jax.jit(sum_cells)(reference, own, other)
        np.testing.assert_allclose(jnp.sum(found.value), jnp.sum(expected.value), rtol=1e-10)
        if side == "rows":
            np.testing.assert_allclose(found.value, expected.value, rtol=1e-9)
        np.testing.assert_allclose(found.slope, expected.slope, atol=1e-9)
        np.testing.assert_allclose(found.precision, expected.precision, atol=1e-9)
        np.testing.assert_allclose(sum_values(view, own, other), found.value, rtol=1e-12)


@pytest.mark.thorough
@needs_float64
def test_tangents_are_the_best_and_the_bound_is_one():
    """Any other tangents lower the bound, which is below that with exact expectations of all zeros."""
    sparse, dense, listed, (rows, columns) = problem(1, is_paired=True)
    views = bg.with_tangents(bg.make_views(sparse, rows, columns), rows, columns)
    tangent = mean_of_zeros(sparse, listed, rows, columns)
    for found, expected in zip(views.rows.zeros.own_bound, rising_zero(tangent), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    best = sum_values(views.rows, rows, columns)
    for shift in (-0.3, 0.3):
        moved = views.rows._replace(zeros=views.rows.zeros._replace(own_bound=rising_zero(tangent + shift)))
        other = sum_values(moved, rows, columns)
        assert np.all(other[1:] < best[1:]) and np.isclose(other[0], best[0])
    exact = dense(tangent)
    exact = exact._replace(potential=exact.potential.counts)
    value = bg.bound(sparse, rows, columns)
    np.testing.assert_allclose(value, jnp.sum(best) - steps.divergence(rows, sparse.rows).sum()
                               - steps.divergence(columns, sparse.columns).sum(), rtol=1e-12)  # fmt: skip
    assert value < bg.bound(exact, rows, columns)
    u, v = rows.mean, columns.mean
    np.testing.assert_allclose(sparse.log_density(u, v), exact.log_density(u, v), rtol=1e-12)


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("family", ["diagonal", pytest.param("full", marks=pytest.mark.slow)])
def test_sweeps_raise_the_bound_to_a_stationary_point(family):
    sparse, _, _, _ = problem(2, is_paired=True)
    state = bg.init(sparse, jax.random.key(0), family, family)
    state, info = jax.jit(partial(loop.solve, num_sweeps=400, tol=1e-12))(sparse, state)
    trace = np.asarray(info.objective_trace)[: int(info.num_steps)]
    assert bool(info.converged) and np.all(np.diff(trace) >= -1e-10)
    bound = jax.jit(bg.bound)
    np.testing.assert_allclose(bound(sparse, state.rows, state.columns), info.objective, rtol=1e-9)
    rng, step = np.random.default_rng(0), 1e-4
    for side in ("rows", "columns"):
        block = getattr(state, side)
        direction = jnp.asarray(rng.normal(size=block.mean.shape))
        ends = []
        for h in (-step, step):
            moved = state._replace(**{side: Block(block.mean + h * direction, block.covariance)})
            ends.append(bound(sparse, moved.rows, moved.columns))
        np.testing.assert_allclose((ends[1] - ends[0]) / (2.0 * step), 0.0, atol=1e-4)


@needs_float64
def test_derivatives_of_listed_factors():
    base = PoissonSoftplusPotential(jnp.array([1.0, 4.0]), 2.0)
    pairs = make_view(problem(0, is_paired=True)[0], "rows", 6).zeros
    pairs = pairs._replace(own_bound=rising_zero(jnp.linspace(-1.0, 0.5, R)))
    listed = listed_potential(pairs, base, jnp.array([0, R - 1]), jnp.array([1, 2]))
    eta = jnp.array([0.3, -2.0])
    for found, expected in zip(listed.derivatives(eta), Potential.derivatives(listed, eta), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.thorough
def test_the_cost_does_not_know_of_zeros():
    """Of the compiled sums: ten times the rows without cells cost no more than their vectors."""

    def flops(num):
        sparse, _, _, _ = problem(3, is_paired=True)
        sides = [
            GaussianSide(*(jnp.tile(x[:1], (n, 1)) for x in side[:2]))
            for side, n in ((sparse.rows, num), (sparse.columns, num))
        ]
        form = sparse._replace(rows=sides[0], columns=sides[1])
        block = Block(jnp.zeros((num, 3)), jnp.ones((num, 3)))
        view = make_view(form, "rows", 6)
        cost = jax.jit(sum_values).lower(view, block, block).compile().cost_analysis()
        return (cost[0] if isinstance(cost, list) else cost)["flops"]

    few, many, more = flops(100), flops(1000), flops(1900)
    assert more - many <= 1.1 * (many - few)


def model(rows, cols, counts, num_rows=R, exposure=1.0, mask=True):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", num_rows):
        w = numpyro.sample("w", dist.Normal(0.0, 0.7).expand([2]).to_event(1))
    with numpyro.plate("cols", C):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    eta = level + (w[rows] * z[cols]).sum(-1)
    with numpyro.handlers.mask(mask=mask):
        numpyro.sample("counts", dist.Poisson(exposure * jax.nn.softplus(eta)), obs=counts)


def dense_model(counts):
    rows, cols = np.divmod(np.arange(R * C), C)
    model(rows, cols, counts.ravel())


MATRIX = np.random.default_rng(5).poisson(0.5, (R, C)) * np.random.default_rng(6).integers(1, 4, (R, C))
ROWS, COLS = np.nonzero(MATRIX)


def run(model, *args, **options):
    engine = BilinearVG(model, progress_bar=False, tol=1e-7, num_samples=50, **options)
    engine.run(jax.random.key(0), *args)
    return engine


@needs_float64
@pytest.mark.slow
def test_the_engine():
    """The draws have the density of all cells; folded in, rows are those of the fit."""
    engine = run(model, ROWS, COLS, MATRIX[ROWS, COLS], unlisted_cells="zero", hyper_values={"level": -1.0})
    assert engine.log_evidence.is_lower_bound and np.all(np.diff(engine.diagnostics.objective_trace) >= -1e-8)
    assert f"{R * C - len(ROWS)} zeros" in engine.describe()
    values = {name: draws[3] for name, draws in engine.get_samples().items()}
    joint, _ = log_density(dense_model, (MATRIX,), {}, values)
    np.testing.assert_allclose(engine.get_extra_fields()["potential_energy"][3], -joint, rtol=1e-9)
    chosen = ROWS < 2
    again = engine.fold_in(jax.random.key(1), ROWS[chosen], COLS[chosen], MATRIX[ROWS, COLS][chosen], num_rows=2)
    np.testing.assert_allclose(again.posterior["w"].mean, engine.posterior["w"].mean[:2], atol=0.02)


@needs_float64
@pytest.mark.slow
def test_the_engine_against_all_cells():
    """Below the bound with exact expectations, and not by much; without zeros the common level is far higher."""
    cells = ROWS, COLS, MATRIX[ROWS, COLS]
    zeros, exact, plain = run(model, *cells, unlisted_cells="zero"), run(dense_model, MATRIX), run(model, *cells)
    assert exact.log_evidence - 5.0 < zeros.log_evidence < exact.log_evidence
    bounded, dense, listed = (float(e.hyper["level"].value) for e in (zeros, exact, plain))
    assert abs(bounded - dense) < 0.5 and listed - dense > 1.0


@pytest.mark.parametrize(
    "arguments, words",
    few(
        [
            ({"exposure": 1.0 + np.arange(len(ROWS))}, ["exposure", "differs"]),
            ({"mask": np.arange(len(ROWS)) > 0}, ["masked"]),
            ({"cols": np.zeros(len(ROWS), int)}, ["twice", "Add up"]),
        ],
        1,
    ),
)
def test_what_zeros_cannot_be_added_to(arguments, words):
    given = {"rows": ROWS, "cols": COLS, "counts": MATRIX[ROWS, COLS], **arguments}
    with pytest.raises(ModelStructureError) as refusal:
        BilinearVG(model, unlisted_cells="zero").run(jax.random.key(0), **given)
    for word in words:
        assert word in str(refusal.value)


def with_likelihood(likelihood):
    """A model of one component whose cells have another likelihood."""

    def of_likelihood(rows, cols, x):
        with numpyro.plate("rows", R):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("cols", C):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", likelihood(w[rows] * z[cols]), obs=x)

    return of_likelihood


def test_zeros_of_another_likelihood_are_refused():
    measured = with_likelihood(lambda eta: dist.Normal(eta, 1.0))
    with pytest.raises(ModelStructureError, match=r"\['x'\] cannot be zeros: their factors are .*Potential"):
        BilinearVG(measured, unlisted_cells="zero").run(jax.random.key(0), ROWS, COLS, np.ones(len(ROWS)))


def test_options():
    exponential = with_likelihood(lambda eta: dist.Poisson(jnp.exp(eta)))
    with pytest.raises(ModelStructureError, match="softplus"):
        BilinearVG(exponential, unlisted_cells="zero").run(jax.random.key(0), ROWS, COLS, MATRIX[ROWS, COLS])
    with pytest.raises(ValueError, match="must be one of 'missing', 'zero'"):
        BilinearVG(model, unlisted_cells="zeros")
    with pytest.raises(ValueError, match="one device"):
        BilinearVG(model, unlisted_cells="zero", devices=jax.devices())
