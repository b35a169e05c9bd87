"""Engines on models with scans: against a Kalman smoother, and against the same model without a scan."""

import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from tests import scan_models

NUM_STEPS = 500
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


def test_gaussian_data_give_what_a_kalman_smoother_gives(trend):
    engine = LaplaceApproximation(
        scan_models.local_linear_trend, hyper_values=TREND, num_samples=50, progress_bar=False
    )
    engine.run(jax.random.key(0), jnp.asarray(trend))
    assert "state" in engine.describe()
    log_density, means, covariances = trend_by_kalman(trend, **TREND)
    np.testing.assert_allclose(engine.log_evidence, log_density, atol=1e-8)
    for number, name in enumerate(("level", "slope")):
        np.testing.assert_allclose(engine.posterior[name].mean, means[:, number], atol=1e-8)
        np.testing.assert_allclose(engine.posterior[name].variance, covariances[:, number, number], atol=1e-8)
    draws = engine.get_samples()
    assert draws["level"].shape == (50, NUM_STEPS) and draws["first"].shape == (50, 2)
    np.testing.assert_allclose(draws["twice"], 2.0 * draws["level"])
    error = (draws["level"].mean(0) - means[:, 0]) / np.sqrt(covariances[:, 0, 0] / 50)
    assert np.abs(error).max() < 5.0


def without_scan(y):
    """The chain of ``second_order`` as one site with the covariance that its steps imply."""
    phi = numpyro.sample("phi", dist.Uniform(-0.5, 0.9))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    size = len(y)
    steps = jnp.eye(size) - 0.4 * jnp.eye(size, k=-1) - phi * jnp.eye(size, k=-2)
    root = sigma * jax.scipy.linalg.solve_triangular(steps, jnp.eye(size), lower=True)
    x = numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(size), covariance_matrix=root @ root.T))
    numpyro.sample("y", dist.Bernoulli(logits=x), obs=y)


@pytest.mark.parametrize("engine", [EP, LaplaceApproximation, VariationalGaussian])
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


def test_hyperparameters_are_learned_and_results_are_those_of_any_model(trend, capsys):
    y = trend[:270]
    engine = LaplaceApproximation(scan_models.local_linear_trend, num_samples=20, progress_bar=False)
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
    assert engine.to_arviz().posterior["slope"].shape == (1, 20, 270)
    assert set(engine.posterior) >= {"first", "level", "slope", "twice"}


def test_updates_one_by_one_are_dense_and_give_the_same(trend):
    """The sequential schedule needs the joint covariance, from which sites of the state space are answered as well."""
    fits = []
    for schedule in ("parallel", "sequential"):
        fits.append(EP(scan_models.smooth_trend, schedule=schedule, hyper_values={"scale": 0.02}, progress_bar=False))
        fits[-1].run(jax.random.key(0), jnp.asarray(np.random.default_rng(0).poisson(2.0, 260)))
    for moment in ("mean", "variance"):
        np.testing.assert_allclose(*(getattr(f.posterior["slope"], moment) for f in fits), atol=1e-6)
    np.testing.assert_allclose(fits[0].log_evidence, fits[1].log_evidence, atol=1e-6)


@pytest.mark.slow
def test_time_and_memory_are_linear_in_the_number_of_steps():
    """Ten times as many steps take at most ``10**1.1`` times as long, once compiled, and as much memory more."""
    seconds, memory = [], []
    for size in (10_000, 100_000):
        rng = np.random.default_rng(0)
        y = jnp.asarray(np.cumsum(0.1 * rng.normal(size=size)) + 0.5 * rng.normal(size=size))
        engine = LaplaceApproximation(
            scan_models.local_level, hyper_values={"drift": 0.1, "noise": 0.5}, progress_bar=False
        )
        engine.run(jax.random.key(0), y)
        started = time.process_time()
        for _ in range(3):
            engine.run(jax.random.key(0), y)
        seconds.append((time.process_time() - started) / 3.0)
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert seconds[1] <= 10**1.1 * seconds[0]
    # far less than a matrix of 10^5 by 10^5 would take
    assert (memory[1] - memory[0]) * 1024 < 100_000 * 20_000
