"""Data that break naive code: the result is right, or what went wrong is said."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.integrate import quad
from scipy.special import gammaln

from numpyro_ext.distributions import RectifiedLinearPoisson
from numpyro_ext.infer import EP, LaplaceApproximation
from tests.tiers import few, thorough


def _moments(log_density: Any, center: float, width: float) -> tuple[float, float]:
    """Mean and variance of a density concentrated around ``center``, by adaptive quadrature."""
    top = log_density(center)
    low, high = center - 12 * width, center + 12 * width
    norm, mean, second = (
        quad(lambda f, k=k: (f - center) ** k * np.exp(log_density(f) - top), low, high, limit=500, points=[center])[0]
        for k in range(3)
    )
    mean /= norm
    return center + mean, second / norm - mean**2


def _independent(y: Any, link: str) -> None:
    f = numpyro.sample("f", dist.Normal(0.0, 1e4 if link == "rectified" else 10.0).expand([4]).to_event(1))
    likelihood = RectifiedLinearPoisson(f) if link == "rectified" else dist.Poisson(jnp.exp(f))
    numpyro.sample("y", likelihood.to_event(1), obs=y)


@pytest.mark.parametrize("link", few(["rectified", "exponential"], 1))
def test_a_million_among_zeros(link: str) -> None:
    y = np.array([0, 0, 1_000_000, 0])
    ep = EP(_independent, progress_bar=False)
    ep.run(jax.random.key(0), y, link)
    assert ep.diagnostics.converged
    assert ep.diagnostics.num_skipped == 0
    posterior = ep.posterior["f"]
    assert np.isfinite(posterior.mean).all()
    if link == "rectified":
        prior_sd, center, width = 1e4, 1e6 - 1e4, 1e3

        def log_density(f: float) -> float:
            return 1e6 * np.log(f) - f - gammaln(1e6 + 1) - 0.5 * (f / prior_sd) ** 2

        # the prior pulls: the mode solves 1e6 / f - 1 = f / prior_sd**2
        center = (-1.0 + np.sqrt(1.0 + 4e6 / prior_sd**2)) / (2.0 / prior_sd**2)
        width = 1.0 / np.sqrt(1e6 / center**2 + 1.0 / prior_sd**2)
    else:
        prior_sd, center, width = 10.0, np.log(1e6), 1e-3

        def log_density(f: float) -> float:
            return 1e6 * (f - center) - 1e6 * np.expm1(f - center) - 0.5 * (f / prior_sd) ** 2

    mean, variance = _moments(log_density, center, width)
    np.testing.assert_allclose(float(posterior.mean[2]), mean, atol=1e-6 * np.sqrt(variance) + 1e-9 * abs(mean))
    np.testing.assert_allclose(float(posterior.variance[2]), variance, rtol=1e-5)


def _logistic(x: Any, y: Any, flat: bool = False) -> None:
    size = (x.shape[1],)
    prior = dist.ImproperUniform(dist.constraints.real_vector, (), size) if flat else dist.Normal(0, 10).expand(size)
    b = numpyro.sample("b", prior if flat else prior.to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


@pytest.mark.thorough
def test_hundred_thousand_observations() -> None:
    rng = np.random.default_rng(0)
    x, b = rng.normal(size=(100_000, 20)), rng.normal(size=20)
    y = rng.binomial(1, 1.0 / (1.0 + np.exp(-x @ b)))
    engines = [EP(_logistic, progress_bar=False), LaplaceApproximation(_logistic, progress_bar=False)]
    for engine in engines:
        engine.run(jax.random.key(0), x, y)
        assert engine.diagnostics.converged
    ep, laplace = (engine.posterior["b"] for engine in engines)
    assert np.max(np.abs(ep.mean - b) / ep.sd) < 4.0
    # with so much data the posterior is Gaussian
    assert np.max(np.abs(ep.mean - laplace.mean) / laplace.sd) < 0.05
    np.testing.assert_allclose(ep.sd, laplace.sd, rtol=0.01)


SEPARATED = np.column_stack([np.ones(20), np.linspace(-2, 2, 20)])
CLASSES = (SEPARATED[:, 1] > 0).astype(int)


def test_separated_classes_with_a_prior() -> None:
    ep = EP(_logistic, progress_bar=False)
    ep.run(jax.random.key(0), SEPARATED, CLASSES)
    assert ep.diagnostics.converged
    signed = (2 * CLASSES - 1)[:, None] * SEPARATED
    mean, covariance = _logistic_ep(signed, np.eye(2) / 100.0)
    np.testing.assert_allclose(ep.posterior["b"].mean, mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ep.posterior["b"].covariance(), covariance, rtol=1e-5, atol=1e-6)
    # All factors cut the prior from one side, so the slope's posterior is skewed and EP itself is a fifth too narrow:
    # on a grid the exact deviations are (1.685, 6.166), and the mean is 0.05 of them off.
    grid = np.stack(np.meshgrid(np.linspace(-45, 45, 601), np.linspace(0, 60, 601), indexing="ij"), -1).reshape(-1, 2)
    logits = (2 * CLASSES - 1) * (grid @ SEPARATED.T)
    log_weight = -np.logaddexp(0, -logits).sum(1) - 0.5 * (grid**2).sum(1) / 100
    weight = np.exp(log_weight - log_weight.max())
    mean = weight @ grid / weight.sum()
    sd = np.sqrt(weight @ (grid - mean) ** 2 / weight.sum())
    np.testing.assert_allclose(ep.posterior["b"].sd / sd, [0.9743, 0.7959], atol=1e-3)
    np.testing.assert_allclose((ep.posterior["b"].mean - mean) / sd, [0.0, 0.054], atol=1e-3)


def _logistic_ep(signed: np.ndarray, precision: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the fixed point of EP with factors ``logistic(signed @ b)``, by sums on a fine grid."""
    sites, shifts = np.zeros(len(signed)), np.zeros(len(signed))
    for _ in range(100):
        covariance = np.linalg.inv(precision + signed.T @ (sites[:, None] * signed))
        variance = np.einsum("ni,ij,nj->n", signed, covariance, signed)
        mean = signed @ covariance @ signed.T @ shifts
        cavity = 1.0 / variance - sites
        centre = (mean / variance - shifts) / cavity
        eta = centre[:, None] + np.linspace(-12.0, 12.0, 4001) / np.sqrt(cavity)[:, None]
        log_weight = -np.logaddexp(0.0, -eta) - 0.5 * cavity[:, None] * (eta - centre[:, None]) ** 2
        weight = np.exp(log_weight - log_weight.max(1, keepdims=True))
        weight /= weight.sum(1, keepdims=True)
        tilted = (weight * eta).sum(1)
        spread = (weight * (eta - tilted[:, None]) ** 2).sum(1)
        step = 1.0 / spread - cavity - sites
        sites, shifts = sites + 0.5 * step, 0.5 * shifts + 0.5 * (tilted / spread - cavity * centre)
        if np.max(np.abs(step)) < 1e-10:
            break
    return covariance @ signed.T @ shifts, covariance


@pytest.mark.parametrize("engine", [EP, *thorough(LaplaceApproximation)])
def test_separated_classes_without_a_prior_are_reported(engine: Any) -> None:
    """The posterior is improper: no engine may return a result that looks converged."""
    fit = engine(_logistic, progress_bar=False)
    with pytest.raises((ValueError, RuntimeError, FloatingPointError, UserWarning)):
        fit.run(jax.random.key(0), SEPARATED, CLASSES, flat=True)
        assert not fit.diagnostics.converged
