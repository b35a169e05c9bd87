"""Variational EM for rows: against exact Gaussian formulas, the engine on model functions, and optimality by slopes."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats
from sklearn.decomposition import FactorAnalysis

from numpyro_ext.infer import VariationalGaussian, variational_em
from numpyro_ext.infer.rows.expectation import expectation_step, initial_modes, initial_posteriors, shared_posteriors
from numpyro_ext.infer.rows.maximisation import maximisation_step
from numpyro_ext.infer.rows.posteriors import (
    LatentGaussianRows,
    predictive_log_density,
)
from numpyro_ext.models import factor_analysis
from numpyro_ext.potentials import (
    BoundedPotential,
    GaussianPotential,
    LogitPotential,
    PoissonExpPotential,
    SoftmaxPotential,
)
from numpyro_ext.potentials.bounds.logistic import BohningBound, JaakkolaBound

NUM_ROWS = 40
ALL = ("loadings", "intercept", "noise")


def simulated(rng=None):
    rng = np.random.default_rng(3) if rng is None else rng
    loadings = np.array([[1.0, 0.2], [-0.8, 0.5], [0.3, 1.1], [0.6, -0.9], [0.1, 0.4]])
    eta = rng.normal(size=(NUM_ROWS, 2)) @ loadings.T + np.array([0.5, -1.0, 0.0, 2.0, 0.3])
    return rng, eta


def make_rows(potentials, observed, num_factors=2, weights=None):
    num_predictors = sum(
        mask.shape[1] * getattr(part, "dimension", 1) for part, mask in zip(potentials, observed, strict=True)
    )
    start = 0.5 * np.cos(1.0 + np.arange(num_predictors)[:, None] + 2.0 * np.arange(num_factors))
    weights = jnp.ones(len(observed[0])) if weights is None else jnp.asarray(weights)
    return LatentGaussianRows(
        jnp.zeros(num_factors),
        jnp.eye(num_factors),
        jnp.asarray(start),
        jnp.zeros(num_predictors),
        tuple(potentials),
        tuple(map(jnp.asarray, observed)),
        weights,
    )


def real_rows(observed=None, scale=None):
    rng, eta = simulated()
    table = eta + 0.7 * rng.normal(size=eta.shape)
    observed = np.ones(eta.shape, bool) if observed is None else observed
    scale = jnp.ones(5) if scale is None else scale
    return table, make_rows([GaussianPotential(jnp.asarray(table), scale)], [observed])


def gaussian_log_density(rows, table, observed):
    """Of each row, from its marginal covariance."""
    scale = np.broadcast_to(rows.potentials[0].scale, (table.shape[1],))
    covariance = np.asarray(rows.loadings @ rows.covariance @ rows.loadings.T) + np.diag(scale**2)
    mean = np.asarray(rows.loadings @ rows.mean + rows.intercept)
    return np.array(
        [
            stats.multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]).logpdf(row[seen])
            for row, seen in zip(table, observed, strict=True)
        ]
    )


def assert_rises(trace):
    assert np.all(np.isfinite(trace)) and np.all(np.diff(trace) > -1e-9 * (1.0 + np.abs(trace[1:])))


def mixed_rows():
    """Two real, two count and one categorical column, with missing cells and weights."""
    rng, eta = simulated()
    real = jnp.asarray(eta[:, :2] + 0.5 * rng.normal(size=(NUM_ROWS, 2)))
    count = jnp.asarray(rng.poisson(np.exp(0.5 * eta[:, 2:4])))
    label = jnp.asarray(rng.integers(3, size=(NUM_ROWS, 1)))
    seen = rng.random((NUM_ROWS, 5)) > 0.2
    potentials = [
        GaussianPotential(real, jnp.ones(2)),
        PoissonExpPotential(count),
        SoftmaxPotential(label, 3, pinned=0, bound="log"),
    ]
    return make_rows(potentials, [seen[:, :2], seen[:, 2:4], seen[:, 4:]], weights=0.5 + rng.random(NUM_ROWS))


@pytest.mark.thorough
def test_real_columns_are_exact_factor_analysis():
    table, rows = real_rows()
    found = variational_em(rows, learn=ALL, num_steps=3000, tol=1e-11)
    assert found.converged
    assert_rises(found.objective_trace)
    exact = gaussian_log_density(found.rows, table, np.ones(table.shape, bool))
    np.testing.assert_allclose(found.posteriors.bound, exact, atol=1e-9)
    peer = FactorAnalysis(n_components=2, tol=1e-12, max_iter=20000, svd_method="lapack").fit(table)
    assert found.objective_trace[-1] == pytest.approx(NUM_ROWS * peer.score(table), abs=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "scale", [pytest.param(jnp.ones(5), marks=pytest.mark.slow), jnp.asarray(1.0)], ids=["own", "shared"]
)
def test_real_columns_with_missing_cells_and_weights(scale):
    observed = np.random.default_rng(0).random((NUM_ROWS, 5)) > 0.3
    table, rows = real_rows(observed, scale)
    table = np.where(observed, table, np.nan)
    potential = GaussianPotential(jnp.asarray(table), scale)
    rows = rows._replace(potentials=(potential,), weights=jnp.linspace(0.5, 1.5, NUM_ROWS))
    found = variational_em(rows, learn=(*ALL, "mean", "covariance"), num_steps=100, tol=-1.0)
    assert found.num_steps == 100 and not found.converged and len(found.objective_trace) == 201
    assert_rises(found.objective_trace)
    exact = gaussian_log_density(found.rows, table, observed)
    np.testing.assert_allclose(found.posteriors.bound, exact, atol=1e-9)
    assert found.rows.potentials[0].scale.shape == scale.shape


@pytest.mark.slow
def test_mixed_columns_reach_a_stationary_point_in_chunks_or_not():
    rows = mixed_rows()
    learn = ("loadings", "intercept")
    whole = variational_em(rows, learn=learn, num_steps=300, tol=-1.0, expectation_tol=1e-14)
    parts = variational_em(rows, learn=learn, num_steps=5, tol=-1.0, expectation_tol=1e-14, chunk_size=16)
    assert_rises(whole.objective_trace)
    np.testing.assert_allclose(parts.objective_trace, whole.objective_trace[:11], rtol=1e-10)

    def bound(loadings, intercept):
        """The bound at the fitted Gaussians, differentiated by JAX and not by the slopes that the fit uses."""
        at = whole.rows._replace(loadings=loadings, intercept=intercept)
        values = [f.expect(whole.posteriors.mean, whole.posteriors.covariance).value for f in at.families()]
        return sum(jnp.sum(at.weights[:, None] * value) for value in values)

    slope = jax.jit(jax.grad(bound, argnums=(0, 1)))
    at_start = slope(rows.loadings, rows.intercept)
    at_end = slope(whole.rows.loadings, whole.rows.intercept)
    for start, end in zip(at_start, at_end, strict=True):
        assert jnp.max(jnp.abs(start)) > 1.0
        assert jnp.max(jnp.abs(end)) < 0.005 * jnp.max(jnp.abs(start))


@pytest.mark.slow
def test_gaussians_are_where_the_bound_is_stationary():
    rows = mixed_rows()
    posteriors = expectation_step(rows, initial_posteriors(rows), num_steps=100, tol=1e-15)
    identity = np.broadcast_to(np.eye(2), (NUM_ROWS, 2, 2))
    np.testing.assert_allclose(posteriors.covariance @ posteriors.precision, identity, atol=1e-10)

    def bound(mean, root):
        covariance = root @ root.swapaxes(1, 2)
        half_log_det = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(root, axis1=1, axis2=2))))
        trace = jnp.trace(covariance, axis1=1, axis2=2)
        divergence = 0.5 * jnp.sum(trace + jnp.sum(mean**2, -1) - 2) - half_log_det
        return sum(jnp.sum(family.expect(mean, covariance).value) for family in rows.families()) - divergence

    root = jnp.linalg.cholesky(posteriors.covariance)
    np.testing.assert_allclose(bound(posteriors.mean, root), posteriors.bound.sum(), rtol=1e-12)
    slopes = jax.jit(jax.grad(bound, argnums=(0, 1)))(posteriors.mean, root)
    assert max(float(jnp.max(jnp.abs(jnp.tril(slope)))) for slope in slopes) < 1e-5


@pytest.mark.slow
def test_each_step_of_the_maximisation_is_no_descent_on_its_own():
    rows = mixed_rows()
    posteriors = expectation_step(rows, initial_posteriors(rows), num_steps=100)
    total = float(rows.weights @ posteriors.bound)
    for learn in ("mean", "covariance", "loadings", "intercept", "noise"):
        new = maximisation_step(rows, posteriors, learn=(learn,))
        assert float(new.weights @ expectation_step(new, posteriors, num_steps=1).start_bound) > total
        kept = {"mean", "covariance", "loadings", "intercept"} - {learn}
        assert all(np.array_equal(getattr(new, name), getattr(rows, name)) for name in kept)


@pytest.mark.slow
def test_the_engine_on_the_model_function_reaches_the_same_bound():
    rng, eta = simulated()
    table = rng.random(eta.shape) < 1.0 / (1.0 + np.exp(-eta))
    mask = rng.random(eta.shape) > 0.1
    rows = make_rows([BoundedPotential(LogitPotential(jnp.asarray(table)), BohningBound())], [mask])
    found = variational_em(rows, learn=("loadings", "intercept"), num_steps=2000, tol=1e-10)
    model = partial(factor_analysis, num_factors=2, kinds="binary")
    engine = VariationalGaussian(model, bound="bohning", progress_bar=False)
    engine.run(jax.random.key(0), jnp.asarray(table, int), mask=jnp.asarray(mask))
    assert found.converged and engine.diagnostics.converged
    assert found.objective_trace[-1] == pytest.approx(float(engine.log_evidence), abs=1e-4)


def test_predictive_densities_of_real_cells():
    observed = np.random.default_rng(1).random((NUM_ROWS, 5)) > 0.3
    table, rows = real_rows(observed)
    posteriors = expectation_step(rows, initial_posteriors(rows))
    values = predictive_log_density(rows, posteriors)[0]
    row, column = np.argwhere(~observed)[0]
    more = observed.copy()
    more[row, column] = True
    joint = gaussian_log_density(rows, table, more)[row] - gaussian_log_density(rows, table, observed)[row]
    np.testing.assert_allclose(values[row, column], joint, rtol=1e-9)


@pytest.mark.slow
def test_sparse_precision():
    rng = np.random.default_rng(0)
    precision = np.diag(np.full(4, 2.0)) + np.diag(np.full(3, -0.8), 1) + np.diag(np.full(3, -0.8), -1)
    table = rng.multivariate_normal(np.zeros(4), np.linalg.inv(precision), size=400)
    table = jnp.asarray(table + 0.1 * rng.normal(size=table.shape))
    observed = (jnp.ones(table.shape, bool),)
    rows = LatentGaussianRows(
        jnp.zeros(4), jnp.eye(4), jnp.eye(4), jnp.zeros(4), (GaussianPotential(table, 0.1),), observed, jnp.ones(400)
    )
    found = variational_em(rows, learn=("mean", "covariance"), num_steps=40, sparsity=0.1)
    assert_rises(found.objective_trace)
    is_zero = found.precision == 0.0
    assert is_zero[0, 3] and not np.any(np.diagonal(found.precision, 1) == 0.0)
    np.testing.assert_allclose(found.precision @ found.rows.covariance, np.eye(4), atol=1e-9)
    # Stationarity of the penalised objective: the scatter is off by the penalty where the precision is not zero.
    centered = found.posteriors.mean - found.rows.mean
    scatter = found.posteriors.covariance.mean(axis=0) + centered.T @ centered / 400
    gap = np.asarray(found.rows.covariance - scatter)
    off = ~np.eye(4, dtype=bool)
    np.testing.assert_allclose(gap[off & ~is_zero], 0.1 * np.sign(found.precision)[off & ~is_zero], atol=2e-2)
    assert np.all(np.abs(gap[off]) < 0.1 + 2e-2)
    dense = variational_em(rows, learn=("mean", "covariance"), num_steps=40)
    assert dense.precision is None and dense.objective_trace[-1] > found.objective_trace[-1]


def test_a_column_without_observations_changes_nothing():
    observed = np.ones((NUM_ROWS, 5), bool)
    observed[:, 4] = False
    table, rows = real_rows(observed)
    found = variational_em(rows, learn=ALL, num_steps=5, tol=-1.0)
    np.testing.assert_allclose(found.rows.loadings[4], rows.loadings[4])
    assert found.rows.intercept[4] == 0.0 and found.rows.potentials[0].scale[4] == 1.0
    exact = gaussian_log_density(found.rows, table, observed)
    np.testing.assert_allclose(found.posteriors.bound, exact, atol=1e-9)


def test_what_to_learn_is_checked():
    _, rows = real_rows()
    with pytest.raises(ValueError, match="learn must hold some of 'mean'.*'scales'"):
        variational_em(rows, learn=("scales",))
    with pytest.raises(ValueError, match="no potential is a GaussianPotential"):
        counts = PoissonExpPotential(jnp.ones((NUM_ROWS, 5)))
        variational_em(rows._replace(potentials=(counts,)), learn=("noise",))
    with pytest.raises(ValueError, match="a number or one per column"):
        own = GaussianPotential(jnp.ones((NUM_ROWS, 5)), jnp.ones((NUM_ROWS, 5)))
        variational_em(rows._replace(potentials=(own,)), learn=("noise",))
    with pytest.raises(ValueError, match="'covariance' must be among"):
        variational_em(rows, learn=("loadings",), sparsity=0.1)


# --- one covariance for rows with the same observed cells


def constant_rows():
    """Two real, two binary and one categorical column with constant curvatures, and three patterns of missing cells."""
    rng, eta = simulated()
    real = GaussianPotential(jnp.asarray(eta[:, :2]), jnp.array([0.5, 0.8]))
    binary = BoundedPotential(LogitPotential(jnp.asarray(rng.random((NUM_ROWS, 2)) < 0.4)), BohningBound())
    label = SoftmaxPotential(jnp.asarray(rng.integers(3, size=(NUM_ROWS, 1))), 3, pinned=0, bound="bohning")
    seen = np.ones((NUM_ROWS, 5), bool)
    seen[::3, 1:3] = False
    seen[1::3, 4] = False
    weights = 0.5 + rng.random(NUM_ROWS)
    return make_rows([real, binary, label], [seen[:, :2], seen[:, 2:4], seen[:, 4:]], weights=weights)


@pytest.mark.slow
def test_rows_with_the_same_observed_cells_share_a_covariance():
    rows = constant_rows()
    start = shared_posteriors(rows)
    assert start.covariance.shape == (3, 2, 2)
    own = expectation_step(rows, initial_posteriors(rows), num_steps=200, tol=1e-15)
    for chunk_size in (4096, 16):
        shared = expectation_step(rows, start, num_steps=200, tol=1e-15, chunk_size=chunk_size)
        np.testing.assert_allclose(shared.bound, own.bound, rtol=1e-12)
        np.testing.assert_allclose(shared.mean, own.mean, atol=1e-6)
        np.testing.assert_allclose(shared.covariances(), own.covariance, rtol=1e-10)
        assert np.all(shared.start_bound <= shared.bound + 1e-12)
    for one, other in zip(predictive_log_density(rows, shared), predictive_log_density(rows, own), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    # The same sums over rows, so the same parameters.
    learn = ("mean", "covariance", "loadings", "intercept", "noise")
    new = maximisation_step(rows, shared._replace(mean=own.mean), learn=learn)
    expected = maximisation_step(rows, own, learn=learn)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10), new, expected)


@pytest.mark.slow
def test_em_with_shared_covariances_rises_and_ends_where_the_general_one_does(monkeypatch):
    rows, options = constant_rows(), {"learn": ALL, "num_steps": 20, "tol": -1.0, "expectation_tol": 1e-14}
    shared = variational_em(rows, **options)
    assert_rises(shared.objective_trace)
    assert shared.posteriors.covariance.shape == (3, 2, 2)
    module = importlib.import_module("numpyro_ext.infer.rows.expectation_maximisation")
    monkeypatch.setattr(module, "shared_posteriors", lambda rows: None)
    general = variational_em(rows, **options)
    assert general.posteriors.covariance.shape == (NUM_ROWS, 2, 2)
    np.testing.assert_allclose(shared.objective_trace[1:], general.objective_trace[1:], rtol=1e-7)


@pytest.mark.slow
def test_covariances_are_not_shared_where_they_differ():
    assert shared_posteriors(mixed_rows()) is None
    rows = constant_rows()
    seen = jnp.asarray(np.random.default_rng(2).random((NUM_ROWS, 2)) > 0.5)
    many = rows._replace(observed=(seen, *rows.observed[1:]))
    assert len(shared_posteriors(many).covariance) == len(np.unique(np.concatenate(many.observed, axis=1), axis=0))
    own_noise = GaussianPotential(rows.potentials[0].observation, 1.0 + jnp.arange(2.0 * NUM_ROWS).reshape(-1, 2))
    assert shared_posteriors(rows._replace(potentials=(own_noise, *rows.potentials[1:]))) is None


# --- modes, and a prior on the loadings


@pytest.mark.thorough
def test_modes_maximise_the_joint_density():
    rows = mixed_rows()
    found = expectation_step(rows, initial_modes(rows), num_steps=100, tol=1e-15)
    real, counts, labels = rows.potentials

    @jax.jit
    def loss(flat):
        z = flat.reshape(NUM_ROWS, 2)
        eta = z @ rows.loadings.T + rows.intercept
        parts = real.log_density(eta[:, :2]), counts.log_density(eta[:, 2:4]), labels.log_density(eta[:, None, 4:])
        total = sum(jnp.sum(jnp.where(mask, part, 0.0)) for mask, part in zip(rows.observed, parts, strict=True))
        return 0.5 * jnp.sum(z**2) + NUM_ROWS * jnp.log(2 * jnp.pi) - total

    best = optimize.minimize(jax.value_and_grad(loss), np.zeros(2 * NUM_ROWS), jac=True, method="BFGS")
    np.testing.assert_allclose(found.bound.sum(), -best.fun, rtol=1e-9)
    np.testing.assert_allclose(found.mean.ravel(), best.x, atol=1e-4)
    eta = found.mean @ rows.loadings.T + rows.intercept
    values = predictive_log_density(rows, found)
    np.testing.assert_allclose(values[1], counts.log_density(eta[:, 2:4]), rtol=1e-12)
    np.testing.assert_allclose(values[2], labels.log_density(eta[:, None, 4:]), atol=1e-6)
    parts = expectation_step(rows, initial_modes(rows), num_steps=100, tol=1e-15, chunk_size=16)
    np.testing.assert_allclose(parts.bound, found.bound, rtol=1e-12)


def test_the_baseline_of_modes_climbs_to_a_stationary_point_of_the_penalised_joint_density():
    rng, eta = simulated()
    table = jnp.asarray(rng.random(eta.shape) < 1.0 / (1.0 + np.exp(-eta)))
    rows = make_rows([LogitPotential(table)], [np.ones(eta.shape, bool)])
    found = variational_em(
        rows, learn=("loadings", "intercept"), method="map", loading_scale=2.0, num_steps=2000, tol=1e-12
    )
    assert_rises(found.objective_trace)
    assert not np.any(found.posteriors.covariance)

    def joint(z, loadings, intercept):
        value = jnp.sum(LogitPotential(table).log_density(z @ loadings.T + intercept))
        return value - 0.5 * jnp.sum(z**2) - NUM_ROWS * jnp.log(2 * jnp.pi) - 0.5 * jnp.sum(loadings**2) / 4.0

    at = (found.posteriors.mean, found.rows.loadings, found.rows.intercept)
    np.testing.assert_allclose(joint(*at), found.objective_trace[-1], rtol=1e-12)
    assert max(float(jnp.max(jnp.abs(slope))) for slope in jax.grad(joint, argnums=(0, 1, 2))(*at)) < 1e-3


@pytest.mark.thorough
def test_a_prior_on_the_loadings_of_real_columns():
    table, rows = real_rows()
    found = variational_em(rows, learn=ALL, loading_scale=0.5, num_steps=3000, tol=1e-11)
    assert_rises(found.objective_trace)

    def objective(loadings, intercept, scale):
        covariance = loadings @ loadings.T + jnp.diag(scale**2)
        density = jax.scipy.stats.multivariate_normal.logpdf(jnp.asarray(table), intercept, covariance)
        return jnp.sum(density) - 0.5 * jnp.sum(loadings**2) / 0.25

    at = (found.rows.loadings, found.rows.intercept, found.rows.potentials[0].scale)
    np.testing.assert_allclose(objective(*at), found.objective_trace[-1], rtol=1e-10)
    assert max(float(jnp.max(jnp.abs(slope))) for slope in jax.grad(objective, argnums=(0, 1, 2))(*at)) < 1e-3


# --- minibatches


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["real", pytest.param("binary", marks=pytest.mark.slow)])
def test_batches_come_near_the_optimum_of_all_rows(kind):
    rng = np.random.default_rng(5)
    loadings = rng.normal(size=(5, 2))
    eta = rng.normal(size=(300, 2)) @ loadings.T + 0.3
    seen = rng.random(eta.shape) > 0.1
    learn = ("loadings", "intercept")
    if kind == "real":
        potential = GaussianPotential(jnp.asarray(eta + 0.5 * rng.normal(size=eta.shape)), jnp.ones(5))
        learn = ALL
    else:
        table = rng.random(eta.shape) < 1.0 / (1.0 + np.exp(-eta))
        potential = BoundedPotential(LogitPotential(jnp.asarray(table)), JaakkolaBound())
    rows = make_rows([potential], [seen])
    whole = variational_em(rows, learn=learn, num_steps=150, progress_bar=False)
    options = {"learn": learn, "num_steps": 8, "batch_size": 50, "rng_key": jax.random.key(0), "progress_bar": False}
    batched = variational_em(rows, **options)
    start = float(expectation_step(rows, initial_posteriors(rows), num_steps=50).bound.sum())
    end = batched.objective_trace.item()
    assert 0.95 * (whole.objective_trace[-1] - start) < end - start < whole.objective_trace[-1] - start + 1.0
    assert not batched.converged and batched.posteriors.mean.shape == (300, 2)
    once, again = (variational_em(rows, **{**options, "num_steps": 1}).rows.loadings for _ in range(2))
    np.testing.assert_array_equal(once, again)


def test_one_batch_of_all_rows_is_the_whole():
    _, rows = real_rows()
    options = {"learn": (*ALL, "mean", "covariance"), "num_steps": 1, "loading_scale": 1.0, "tol": -1.0}
    one = variational_em(rows, batch_size=NUM_ROWS, rng_key=jax.random.key(0), **options)
    whole = variational_em(rows, **options)
    for name in ("mean", "covariance", "loadings", "intercept"):
        np.testing.assert_allclose(getattr(one.rows, name), getattr(whole.rows, name), rtol=1e-9, atol=1e-12)


def test_options_that_do_not_go_together_are_refused():
    _, rows = real_rows()
    with pytest.raises(ValueError, match="method must be"):
        variational_em(rows, learn=ALL, method="mcmc")
    with pytest.raises(ValueError, match="needs a loading_scale"):
        variational_em(rows, learn=ALL, method="map")
    with pytest.raises(ValueError, match="cannot learn the covariance"):
        variational_em(rows, learn=("covariance",), method="map")
    with pytest.raises(ValueError, match="loading_scale must be positive"):
        variational_em(rows, learn=ALL, loading_scale=0.0)
    with pytest.raises(ValueError, match="batch_size must be between 1 and"):
        variational_em(rows, learn=ALL, batch_size=NUM_ROWS + 1, rng_key=jax.random.key(0))
    with pytest.raises(ValueError, match="needs an rng_key"):
        variational_em(rows, learn=ALL, batch_size=10)
