"""What a fit of a long series answers beyond its moments: forecasts, scores, files, integrals over hyperparameters."""

from __future__ import annotations

from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import Predictive

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian, cross_validate
from numpyro_ext.structure import ModelStructureError
from tests.infer.gaussian.fields.test_state_spaces import smooth
from tests.monte_carlo import assert_close_deviations, assert_close_means
from tests.readings import with_layouts

NUM_STEPS, NUM_AHEAD = 270, 4
IS_DOUBLE = jax.config.jax_enable_x64
RNG = np.random.default_rng(8)
WALK = np.cumsum(0.3 * RNG.normal(size=NUM_STEPS)) + 0.5 * RNG.normal(size=NUM_STEPS)
COUNTS = RNG.poisson(np.exp(1.0 + 0.5 * np.sin(np.arange(NUM_STEPS) / 20.0)))
HYPER = {"drift": 0.3, "noise": 0.5}


def local_level(y: Any = None, num_steps: int = NUM_STEPS) -> None:
    """As in NumPyro's page on scan, with numbers as one types them."""
    drift = numpyro.sample("drift", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))

    def transition(x_prev: Any, y_curr: Any) -> tuple[Any, Any]:
        x_curr = numpyro.sample("x", dist.Normal(x_prev, drift))
        y_curr = numpyro.sample("y", dist.Normal(x_curr, noise), obs=y_curr)
        return x_curr, (x_curr, y_curr)

    x0 = numpyro.sample("x_0", dist.Normal(0, 1))
    scan(transition, x0, y, length=num_steps)


def masked_counts(y: Any, mask: Any = True) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(1))

    def step(x: Any, now: Any) -> tuple[Any, None]:
        value, is_seen = now
        x = numpyro.sample("x", dist.Normal(0.9 * x, scale))
        with handlers.mask(mask=is_seen):
            numpyro.sample("y", dist.Poisson(jnp.exp(x + 1)), obs=value)
        return x, None

    scan(step, 0, (y, jnp.broadcast_to(mask, np.shape(y))))


def by_kalman(hyper: dict[str, float] = HYPER) -> Any:
    one = np.ones((1, 1))
    return smooth(WALK, one, hyper["drift"] ** 2 * one, np.ones(1), hyper["noise"] ** 2, np.zeros(1), one)


@pytest.fixture(scope="module")
def level() -> LaplaceApproximation:
    engine = LaplaceApproximation(local_level, hyper_values=HYPER, num_samples=4000, progress_bar=False)
    engine.run(jax.random.key(0), WALK)
    return engine


@pytest.mark.thorough
@pytest.mark.float32
def test_moments_in_either_precision(level: LaplaceApproximation) -> None:
    """A level is known to some thousandths of its deviation after sums over hundreds of steps in single precision."""
    _, means, covariances = by_kalman()
    site = level.posterior["x"]
    assert site.mean.dtype == jnp.result_type(float) and level.diagnostics.converged
    tolerance = 1e-8 if IS_DOUBLE else 1e-3
    np.testing.assert_allclose(site.mean, means[:, 0], atol=tolerance)
    np.testing.assert_allclose(site.sd, np.sqrt(covariances[:, 0, 0]), rtol=tolerance)


@pytest.mark.thorough
def test_forecasts_go_on_from_the_last_state(level: LaplaceApproximation) -> None:
    """Steps beyond those of the fit are drawn by the model, each draw from its own last state."""
    draws = level.get_samples()
    found = Predictive(local_level, draws)(jax.random.key(1), num_steps=NUM_STEPS + NUM_AHEAD)["y"][:, NUM_STEPS:]
    _, means, covariances = by_kalman()
    ahead = np.arange(1, NUM_AHEAD + 1)
    assert_close_means(found, np.full(NUM_AHEAD, means[-1, 0]))
    variance = covariances[-1, 0, 0] + ahead * HYPER["drift"] ** 2 + HYPER["noise"] ** 2
    assert_close_deviations(found, np.sqrt(variance))
    scores = level.log_predictive(np.append(WALK, np.zeros(NUM_AHEAD)), num_steps=NUM_STEPS + NUM_AHEAD)["y"]
    expected = dist.Normal(means[-1, 0], np.sqrt(variance)).log_prob(0.0)
    np.testing.assert_allclose(scores[NUM_STEPS:], expected, atol=1e-8 if IS_DOUBLE else 1e-3)
    np.testing.assert_array_equal(scores[:NUM_STEPS], 0.0)


@pytest.mark.thorough
def test_scores_of_observations_are_the_densities_of_gaussians(level: LaplaceApproximation) -> None:
    _, means, covariances = by_kalman()
    scale = np.sqrt(covariances[:, 0, 0] + HYPER["noise"] ** 2)
    expected = dist.Normal(means[:, 0], scale).log_prob(jnp.asarray(WALK))
    np.testing.assert_allclose(level.log_predictive(WALK)["y"], expected, atol=1e-8)


@pytest.mark.thorough
def test_files_and_arviz(level: LaplaceApproximation, tmp_path: Any) -> None:
    level.save(tmp_path / "run")
    loaded = LaplaceApproximation.load(tmp_path / "run", local_level)
    for moment in ("mean", "sd"):
        np.testing.assert_array_equal(getattr(loaded.posterior["x"], moment), getattr(level.posterior["x"], moment))
    draws = az.from_numpyro(level).posterior["x"]
    assert draws.shape[-1] == NUM_STEPS
    np.testing.assert_array_equal(np.asarray(draws).reshape(-1, NUM_STEPS), level.get_samples()["x"])


@pytest.mark.thorough
def test_folds_are_scored_as_those_of_a_matrix() -> None:
    folds, scores = np.arange(NUM_STEPS) % 3, []
    for fewest in (8, NUM_STEPS):
        engine = with_layouts(EP, time_blocks=fewest)(masked_counts, hyper_values={"scale": 0.4}, progress_bar=False)
        scores.append(cross_validate(engine, jax.random.key(0), COUNTS, folds=folds, num_folds=3).log_predictive)
    np.testing.assert_allclose(*scores, atol=1e-6)


@pytest.mark.thorough
def test_independent_unknowns_are_those_of_a_matrix_and_shared_covariances_are_refused() -> None:
    options: dict[str, Any] = {"hyper_values": {"scale": 0.4}, "progress_bar": False}
    engines = []
    for fewest in (8, NUM_STEPS):
        engines.append(
            with_layouts(VariationalGaussian, time_blocks=fewest)(masked_counts, covariance="diagonal", **options)
        )
        engines[-1].run(jax.random.key(0), COUNTS)
    np.testing.assert_allclose(*(e.log_evidence for e in engines), atol=1e-8)
    for moment in ("mean", "sd"):
        np.testing.assert_allclose(*(getattr(e.posterior["x"], moment) for e in engines), atol=1e-8)
    with pytest.raises(ModelStructureError, match="the steps of a scan are one"):
        VariationalGaussian(masked_counts, covariance="shared", **options).run(jax.random.key(0), COUNTS)


@pytest.mark.slow
def test_hyperparameters_are_integrated_as_for_a_matrix() -> None:
    engines = []
    for fewest in (8, NUM_STEPS):
        engines.append(with_layouts(INLA, time_blocks=fewest)(masked_counts, progress_bar=False))
        engines[-1].run(jax.random.key(0), COUNTS)
    assert "steps of" in engines[0].describe() and "dense" in engines[1].describe()
    np.testing.assert_allclose(*(e.log_evidence for e in engines), atol=1e-5)
    for moment in ("mean", "sd"):
        np.testing.assert_allclose(*(getattr(e.posterior["x"], moment) for e in engines), atol=1e-5)


@pytest.mark.thorough
def test_what_needs_all_covariances_of_a_long_series_is_refused() -> None:
    y = np.zeros(31_000)
    engine = LaplaceApproximation(local_level, hyper_values=HYPER, progress_bar=False)
    engine.run(jax.random.key(0), y, num_steps=y.size)
    with pytest.raises(ValueError, match="joint covariance of the 31001 unknowns .* draws"):
        _ = engine.guide
    with pytest.raises(ModelStructureError, match=r"31001 unknowns.*INLA\(model, marginal='gaussian'\)"):
        INLA(local_level, hyper_values=HYPER, progress_bar=False).run(jax.random.key(0), y, num_steps=y.size)
