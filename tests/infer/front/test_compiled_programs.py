"""How many programs a run compiles, which is what a first fit takes its time for."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.compilation import quick_jit as module
from numpyro_ext.compilation.quick_jit import quick_jit
from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from tests.compilations import compiled_programs
from tests.tiers import thorough

NUM_ROWS, NUM_GROUPS = 24, 4


def random_intercepts(group, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", NUM_GROUPS):
        shift = numpyro.sample("shift", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Poisson(jnp.exp(mean + shift[group])), obs=y)


def grouped_counts(group, y=None):
    """Without a common mean, so that groups are independent blocks."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", NUM_GROUPS):
        shift = numpyro.sample("shift", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Poisson(jnp.exp(shift[group])), obs=y)


def one_hot_counts(indicators, y, has_mean):
    """Both of these with a dense design."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0)) if has_mean else 0.0
    shift = numpyro.sample("shift", dist.Normal(0.0, scale).expand([NUM_GROUPS]).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp(mean + indicators @ shift)), obs=y)


def fit(engine, seed, group, model=random_intercepts, **options):
    """A run up to draws and marginals."""
    y = np.random.default_rng(seed).poisson(np.exp(1.0 + np.linspace(-1.5, 1.5, NUM_GROUPS))[group])
    run = engine(model, num_samples=10, progress_bar=False, **options)
    run.run(jax.random.key(seed), group, y)
    jax.block_until_ready((run.get_samples(), [(site.mean, site.sd) for site in run.posterior.values()]))
    return run


@pytest.mark.thorough
@pytest.mark.first
@pytest.mark.parametrize("engine", [EP, *thorough(LaplaceApproximation, VariationalGaussian)])
def test_first_fit_compiles_few_programs_and_the_second_none(engine):
    group = np.arange(NUM_ROWS) % NUM_GROUPS
    jax.clear_caches()
    for options in ({}, {"is_small": True}, {"is_small": True, "is_lean": True}):
        quick_jit(lambda: 0, **options)  # asks once in a process which options the compiler knows
    with compiled_programs() as names:
        fit(engine, 0, group)
    assert len(names) <= 26, names
    # the algorithm is in one of them
    fitting = [name for name in names if any(part in name for part in ("_search", "_visit", "_fits"))]
    assert len(fitting) == 1 and "_visit" in fitting[0], fitting
    with compiled_programs() as names:
        fit(engine, 1, group)
    assert names == []


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [EP, LaplaceApproximation, VariationalGaussian])
@pytest.mark.parametrize("model", [random_intercepts, grouped_counts])
def test_another_index_of_the_same_shape_compiles_nothing(engine, model):
    fit(engine, 0, np.arange(NUM_ROWS) % NUM_GROUPS, model)
    fit(engine, 0, np.repeat(np.arange(NUM_GROUPS), [9, 7, 5, 3]), model)
    with compiled_programs() as names:
        fit(engine, 1, np.random.default_rng(1).permutation(np.arange(NUM_ROWS) % NUM_GROUPS), model)
        fit(engine, 2, np.repeat(np.arange(NUM_GROUPS), [3, 10, 3, 8]), model)
    assert names == []
    run = fit(engine, 2, np.repeat(np.arange(NUM_GROUPS), [3, 10, 3, 8]), model, integrate="none")
    group, y = run._run.reading.args
    scale = float(run.hyper["scale"].value)
    dense = engine(one_hot_counts, hyper_values={"scale": scale}, progress_bar=False)
    dense.run(jax.random.key(0), np.eye(NUM_GROUPS)[np.asarray(group)], y, model is random_intercepts)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dense.posterior["shift"].mean.dtype == "float64" else {"rtol": 1e-2}
    for name in dense.posterior:
        np.testing.assert_allclose(run.posterior[name].mean, dense.posterior[name].mean, **tolerance)
        np.testing.assert_allclose(run.posterior[name].sd, dense.posterior[name].sd, **tolerance)


@pytest.mark.thorough
def test_predictions_at_other_rows_compile_nothing_from_the_second_on():
    group = np.arange(NUM_ROWS) % NUM_GROUPS
    run = fit(EP, 0, group)

    def predict(seed):
        rows = np.random.default_rng(seed).integers(NUM_GROUPS, size=3)
        return jax.block_until_ready(run.predict(jax.random.key(seed), rows).get_samples()["y"])

    first = predict(0)
    with compiled_programs() as names:
        second = predict(1)
    assert first.shape == second.shape == (10, 3)
    assert not names


@pytest.mark.thorough
def test_scores_of_a_number_of_other_rows_compile_few_programs():
    """Their forms, and what the field is there, are a program each, not one for each operation."""
    run = fit(EP, 0, np.arange(NUM_ROWS) % NUM_GROUPS)
    run.log_predictive(np.arange(3), np.array([3, 1, 2]))
    with compiled_programs() as names:
        found = run.log_predictive(np.arange(4), np.array([3, 1, 2, 5]))["y"]
    assert len(names) <= 12, names
    np.testing.assert_allclose(found[:3], run.log_predictive(np.arange(3), np.array([3, 1, 2]))["y"], rtol=1e-5)


def grouped_shares(group, y):
    """A likelihood of no family, whose observations share predictors."""
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0).expand([NUM_GROUPS]))
    mean = jax.nn.sigmoid(shift[group])
    numpyro.sample("y", dist.Beta(8.0 * mean, 8.0 * (1.0 - mean)), obs=y)


def shares_by_row(indicators, y):
    """The same with a predictor for each observation."""
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0).expand([NUM_GROUPS]))
    mean = jax.nn.sigmoid(indicators @ shift)
    numpyro.sample("y", dist.Beta(8.0 * mean, 8.0 * (1.0 - mean)), obs=y)


@pytest.mark.thorough
def test_another_index_into_shared_predictors_compiles_nothing():
    def run(model, first, y):
        engine = LaplaceApproximation(model, num_samples=10, progress_bar=False)
        engine.run(jax.random.key(0), first, y)
        jax.block_until_ready((engine.get_samples(), [(site.mean, site.sd) for site in engine.posterior.values()]))
        return engine.posterior["shift"]

    rng = np.random.default_rng(3)
    y = rng.uniform(0.1, 0.9, NUM_ROWS)
    run(grouped_shares, np.arange(NUM_ROWS) % NUM_GROUPS, y)
    group = rng.permutation(np.repeat(np.arange(NUM_GROUPS), [3, 10, 3, 8]))
    with compiled_programs() as names:
        found = run(grouped_shares, group, y)
    assert names == []
    expected = run(shares_by_row, np.eye(NUM_GROUPS)[group], y)  # of Laplace's method, the same mode and curvature
    tolerance = 1e-6 if found.mean.dtype == "float64" else 1e-3
    np.testing.assert_allclose(found.mean, expected.mean, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.sd, expected.sd, rtol=tolerance)
    # A group without observations is as its prior, whichever it is.
    for missing in (1, 3):
        group = np.arange(NUM_ROWS) % (NUM_GROUPS - 1)
        found = run(grouped_shares, group + (group >= missing), y)
        np.testing.assert_allclose(found.mean[missing], 0.0, atol=1e-6)
        np.testing.assert_allclose(found.sd[missing], 1.0, rtol=1e-6)


def test_unknown_options_of_the_compiler_are_left_out(monkeypatch):
    monkeypatch.setitem(module._SIMPLE, "xla_cpu_no_such_option", True)
    assert quick_jit(lambda x: 2.0 * x)(3.0) == 6.0


@pytest.mark.parametrize("options", [{}, {"is_small": True}, {"adds_much": True}])
def test_less_optimisation_computes_the_same(options):
    x = jnp.linspace(0.1, 3.0, 7)

    def function(x):
        return jnp.cumsum(jnp.log1p(jnp.exp(-x)) * x), jnp.linalg.cholesky(jnp.eye(7) + x[:, None] * x)

    for quick, usual in zip(quick_jit(function, **options)(x), jax.jit(function)(x), strict=True):
        np.testing.assert_allclose(quick, usual, rtol=100 * jnp.finfo(x.dtype).eps, atol=1e-6 * (x.dtype == "float32"))
