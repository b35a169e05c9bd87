"""Engines on models with scans: against a Kalman smoother, and against the same model without a scan."""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.gaussian.programs import Programs
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.structure import read_latent_gaussian
from tests import scan_models
from tests.tiers import thorough

NUM_STEPS = 500
ENGINES = [EP, LaplaceApproximation, VariationalGaussian]
TREND = {"scales": jnp.array([0.3, 0.05]), "noise": jnp.asarray(0.6)}


def smooth(y, transition, noise, seen, variance, mean, covariance):
    """Kalman filter, and Rauch, Tung and Striebel's smoother: log density of ``y``, means and covariances of states."""
    means, covariances, log_density = [], [], 0.0
    for value in y:
        mean, covariance = transition @ mean, transition @ covariance @ transition.T + noise
        predicted, spread = seen @ mean, seen @ covariance @ seen + variance
        log_density -= 0.5 * ((value - predicted) ** 2 / spread + np.log(2.0 * np.pi * spread))
        weight = covariance @ seen / spread
        mean, covariance = mean + weight * (value - predicted), covariance - np.outer(weight, weight) * spread
        means, covariances = [*means, mean], [*covariances, covariance]
    for t in range(len(y) - 2, -1, -1):
        ahead = transition @ covariances[t] @ transition.T + noise
        back = np.linalg.solve(ahead, transition @ covariances[t]).T
        means[t] = means[t] + back @ (means[t + 1] - transition @ means[t])
        covariances[t] = covariances[t] + back @ (covariances[t + 1] - ahead) @ back.T
    return log_density, np.array(means), np.array(covariances)


def trend_by_kalman(y, scales, noise):
    transition, noises = np.array([[1.0, 1.0], [0.0, 1.0]]), np.diag(np.asarray(scales) ** 2)
    return smooth(y, transition, noises, np.array([1.0, 0.0]), float(noise) ** 2, np.zeros(2), 25.0 * np.eye(2))


@pytest.fixture(scope="module")
def trend():
    rng = np.random.default_rng(4)
    slope = 0.1 + np.cumsum(0.05 * rng.normal(size=NUM_STEPS))
    return np.cumsum(slope + 0.3 * rng.normal(size=NUM_STEPS)) + 0.6 * rng.normal(size=NUM_STEPS)


@pytest.mark.thorough
def test_gaussian_data_give_what_a_kalman_smoother_gives(trend):
    engine = LaplaceApproximation(
        scan_models.local_linear_trend, hyper_values=TREND, num_samples=50, progress_bar=False
    )
    engine.run(jax.random.key(0), jnp.asarray(trend))
    assert "state" in engine.describe()
    log_density, means, covariances = trend_by_kalman(trend, **TREND)
    np.testing.assert_allclose(engine.log_evidence, log_density, rtol=0, atol=1e-8)
    for number, name in enumerate(("level", "slope")):
        np.testing.assert_allclose(engine.posterior[name].mean, means[:, number], rtol=0, atol=1e-8)
        np.testing.assert_allclose(engine.posterior[name].variance, covariances[:, number, number], rtol=0, atol=1e-8)
    draws = engine.get_samples()
    assert draws["level"].shape == (50, NUM_STEPS) and draws["first"].shape == (50, 2)
    np.testing.assert_allclose(draws["twice"], 2.0 * draws["level"])
    error = (draws["level"].mean(0) - means[:, 0]) / np.sqrt(covariances[:, 0, 0] / 50)
    assert np.abs(error).max() < 5.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, components, hyper, variances, prior, states",
    [
        ("local_level", {"level": "llevel"}, {"drift": 0.3, "noise": 0.6}, [0.36, 0.09], [100.0], ["level"]),
        (
            "local_linear_trend", {"level": "lltrend"}, TREND, [0.36, 0.09, 0.0025], [25.0, 25.0], ["level", "slope"],
        ),
        (
            "seasonal_dummies",
            {"level": "llevel", "seasonal": 4},
            {"sigma": jnp.array([0.3, 0.1, 0.6])},
            [0.36, 0.09, 0.01],
            [25.0, 4.0, 4.0, 4.0],
            ["level", "season"],
        ),
    ],
)  # fmt: skip
def test_structural_series_are_those_of_statsmodels(name, components, hyper, variances, prior, states, trend):
    structural = pytest.importorskip("statsmodels.tsa.statespace.structural", reason="statsmodels is in the dev extra")
    y = trend[:300] + np.tile([0.5, -0.2, 0.1, -0.4], 75)
    components = structural.UnobservedComponents(y, **components)
    components.update(variances)
    space = components.ssm
    transition, selection = space["transition"], space["selection"]
    first = transition @ np.diag(prior) @ transition.T + selection @ space["state_cov"] @ selection.T
    space.initialize_known(np.zeros(len(prior)), first)
    space.loglikelihood_burn, space.tolerance = 0, 0.0
    expected = space.smooth()
    engine = LaplaceApproximation(getattr(scan_models, name), hyper_values=hyper, progress_bar=False)
    engine.run(jax.random.key(0), y)
    np.testing.assert_allclose(engine.log_evidence, expected.llf, atol=1e-8)
    for number, state in enumerate(states):
        np.testing.assert_allclose(engine.posterior[state].mean, expected.smoothed_state[number], atol=1e-8)
        variance = expected.smoothed_state_cov[number, number]
        np.testing.assert_allclose(engine.posterior[state].variance, variance, atol=1e-8)


def without_scan(y):
    """The chain of ``second_order`` as one site with the covariance that its steps imply."""
    phi = numpyro.sample("phi", dist.Uniform(-0.5, 0.9))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    size = len(y)
    steps = jnp.eye(size) - 0.4 * jnp.eye(size, k=-1) - phi * jnp.eye(size, k=-2)
    root = sigma * jax.scipy.linalg.solve_triangular(steps, jnp.eye(size), lower=True)
    x = numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(size), covariance_matrix=root @ root.T))
    numpyro.sample("y", dist.Bernoulli(logits=x), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_the_dense_engine_gives_the_same(engine):
    data = jnp.asarray((np.random.default_rng(3).random(NUM_STEPS) < 0.6).astype(int))
    fits = []
    for model in (scan_models.second_order, without_scan):
        options = {"hyper_values": {"phi": 0.3, "sigma": 0.8}, "tol": 1e-11, "progress_bar": False}
        fits.append(engine(model, **options))
        fits[-1].run(jax.random.key(0), data)
        assert fits[-1].diagnostics.converged
    np.testing.assert_allclose(fits[0].log_evidence, fits[1].log_evidence, atol=1e-8)
    for moment in ("mean", "variance"):
        found, expected = (getattr(fit.posterior["x"], moment) for fit in fits)
        np.testing.assert_allclose(found, expected, atol=1e-8)


@pytest.mark.thorough
def test_hyperparameters_are_learned_and_results_are_those_of_any_model(trend, capsys):
    y = trend[:270]
    engine = LaplaceApproximation(scan_models.local_linear_trend, integrate="none", num_samples=20, progress_bar=False)
    engine.run(jax.random.key(0), jnp.asarray(y))
    assert engine.diagnostics.converged

    best = np.concatenate([engine.hyper["scales"].value, [engine.hyper["noise"].value]])

    def objective(step):
        """Log density by the Kalman filter, with the half-normal priors, along a direction in the logarithms."""
        values = best * np.exp(step)
        return trend_by_kalman(y, values[:2], values[2])[0] - 0.5 * np.sum(values**2)

    slopes = [(objective(d) - objective(-d)) / 2e-5 for d in 1e-5 * np.eye(3)]
    np.testing.assert_allclose(slopes, 0.0, atol=1e-3)
    engine.print_summary()
    assert "level[0]" in capsys.readouterr().out
    assert engine.to_arviz().posterior["slope"].shape == (4, 5, 270)
    assert set(engine.posterior) >= {"first", "level", "slope", "twice"}


@pytest.mark.thorough
def test_updates_one_by_one_are_dense_and_give_the_same(trend):
    """The sequential schedule needs the joint covariance, from which sites of the state space are answered as well."""
    fits = []
    for schedule in ("parallel", "sequential"):
        fits.append(EP(scan_models.smooth_trend, schedule=schedule, hyper_values={"scale": 0.02}, progress_bar=False))
        fits[-1].run(jax.random.key(0), jnp.asarray(np.random.default_rng(0).poisson(2.0, 260)))
    for moment in ("mean", "variance"):
        np.testing.assert_allclose(*(getattr(f.posterior["slope"], moment) for f in fits), atol=1e-6)
    np.testing.assert_allclose(fits[0].log_evidence, fits[1].log_evidence, atol=1e-6)


def sizes_of_arrays(jaxpr):
    """Of everything that a program computes, inner programs included."""
    for eqn in jaxpr.eqns:
        yield from (math.prod(v.aval.shape) for v in eqn.outvars)
        for leaf in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(leaf, "jaxpr", leaf)
            if hasattr(inner, "eqns"):
                yield from sizes_of_arrays(inner)


def programs_of(engine, data):
    """What an engine would run on some data, without running it."""
    reading = read_latent_gaussian(engine.model, (data,), check=False)
    space = UnconstrainedSpace(reading.hyper, {})
    options = {"num_steps": 20, "tol": 1e-8, "hyper_tol": 1e-3, "max_iterations": 20}
    return reading, space, Programs(reading.structure.value, engine.algorithm(reading), space, **options)


@pytest.mark.parametrize(
    "engine, model",
    [
        (ENGINES[0], scan_models.local_linear_trend),
        *thorough(*((engine, scan_models.local_linear_trend) for engine in ENGINES[1:])),
        (LaplaceApproximation, scan_models.random_walk),
    ],
)
def test_no_program_holds_steps_by_steps(engine, model):
    num_steps = 4096
    reading, space, programs = programs_of(engine(model), jnp.zeros(num_steps))
    data, hyper = reading.data, reading.initial_hyper()
    state = jax.eval_shape(programs.init_state, data, hyper)
    traced = [
        programs.evaluate.trace(data, {}, space.pack(hyper), state, 1e-8),
        programs.solve.trace(data, hyper, state, num_steps=20),
        programs.moments.trace(data, hyper, state),
        programs.log_predictive.trace(data, hyper, state),
        programs.draws.trace(data, hyper, state, jax.random.key(0), num_samples=10),
    ]
    largest = [max(sizes_of_arrays(program.jaxpr.jaxpr)) for program in traced]
    assert all(num_steps < size < 200 * num_steps for size in largest), largest


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_time_and_memory_are_linear_in_the_number_of_steps(engine):
    """Ten times as many steps take at most ``10**1.1`` times as long, once compiled, and as much memory more."""
    seconds, memory = [], []
    for size in (10_000, 100_000):
        data = jnp.asarray((np.random.default_rng(3).random(size) < 0.6).astype(int))
        fit = engine(scan_models.second_order, hyper_values={"phi": 0.3, "sigma": 0.8}, progress_bar=False)
        fit.run(jax.random.key(0), data)
        assert fit.diagnostics.converged
        times = []
        for _ in range(5):
            started = os.times().user  # what the system takes for new pages of memory is no work of the algorithm
            fit.run(jax.random.key(0), data)
            jax.block_until_ready(fit.posterior["x"].variance)
            times.append(os.times().user - started)
        seconds.append(min(times))
        run = fit._run
        compiled = run.programs.solve.lower(run.reading.data, run.reading.initial_hyper(), None, num_steps=20).compile()
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
    assert seconds[1] <= 10**1.1 * seconds[0], seconds
    assert memory[1] <= 10**1.1 * memory[0], memory
