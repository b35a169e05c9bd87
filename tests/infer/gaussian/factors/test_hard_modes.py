"""Evidences by Laplace's method and EP where others stopped short of the mode and said nothing."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy.integrate import quad
from scipy.special import gammaln

from numpyro_ext.infer import EP, LaplaceApproximation

LEVEL, SCALE = 0.58, 2.0


def poisson_lognormal(y):
    """A rate of its own for each count, near zero before the data are seen."""
    rate = numpyro.sample("rate", dist.Normal(LEVEL, SCALE).expand([y.size]).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp(rate)), obs=y)


def _log_evidence(count):
    """Log evidence of one count by quadrature."""

    def log_joint(rate):
        prior = -0.5 * ((rate - LEVEL) / SCALE) ** 2 - np.log(SCALE * np.sqrt(2 * np.pi))
        return prior + count * rate - np.exp(rate) - gammaln(count + 1)

    grid = np.linspace(-20.0, 12.0, 6401)
    top, at = log_joint(grid).max(), grid[np.argmax(log_joint(grid))]
    return top + np.log(quad(lambda rate: np.exp(log_joint(rate) - top), at - 12, at + 8, points=[at], limit=200)[0])


@pytest.mark.thorough
@pytest.mark.parametrize(("engine", "tolerance"), [(EP, 0.01), (LaplaceApproximation, 0.2)])
def test_a_count_of_183_where_the_rate_is_near_zero(engine, tolerance):
    counts = np.array([183, 0, 1])
    each = [_log_evidence(count) for count in counts]
    assert each[0] == pytest.approx(-9.5, abs=0.1)  # the mode near the prior's mean would give -667
    found = engine(poisson_lognormal, progress_bar=False)
    found.run(random.key(0), counts)
    assert found.diagnostics.converged
    assert float(found.log_evidence) == pytest.approx(sum(each), abs=tolerance)


CONDITION = 2600.0


def _ill_conditioned(number=200):
    """Covariance matrix of a smooth process with a nugget that gives it the condition number."""
    x = np.linspace(0.0, 1.0, number)
    smooth = 9.0 * np.exp(-0.5 * ((x[:, None] - x) / 0.1) ** 2)
    smallest, largest = np.linalg.eigvalsh(smooth)[[0, -1]]
    covariance = smooth + (largest - CONDITION * smallest) / (CONDITION - 1.0) * np.eye(number)
    np.testing.assert_allclose(np.linalg.cond(covariance), CONDITION, rtol=1e-6)
    return covariance


def _laplace_evidence(covariance, y):
    """Newton's method with halved steps, in the weights of the representer theorem, to the last digit."""
    weights = np.zeros(y.size)

    def objective(weights):
        f = covariance @ weights
        return np.sum(y * f - np.exp(f) - gammaln(y + 1)) - 0.5 * weights @ f

    for _ in range(200):
        f = covariance @ weights
        gradient, curvature = y - np.exp(f) - weights, np.exp(f)
        step = np.linalg.solve(np.eye(y.size) + curvature[:, None] * covariance, gradient)
        size, least = 1.0, objective(weights) - 1e-9  # less than the rounding of the sum
        while not objective(weights + size * step) >= least:
            size *= 0.5
        weights = weights + size * step
        if np.abs(gradient).max() < 1e-9:
            break
    else:
        raise AssertionError("the reference has not converged")
    root = np.exp(0.5 * covariance @ weights)
    return objective(weights) - 0.5 * np.linalg.slogdet(np.eye(y.size) + root[:, None] * covariance * root)[1]


@pytest.mark.thorough
def test_an_ill_conditioned_process_is_fitted_to_its_mode_or_said_not_to_be():
    covariance = _ill_conditioned()
    rng = np.random.default_rng(0)
    y = rng.poisson(np.exp(np.minimum(np.linalg.cholesky(covariance) @ rng.normal(size=200), 6.0)))

    def process(y):
        f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(200), covariance))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    expected = _laplace_evidence(covariance, y)
    engine = LaplaceApproximation(process, progress_bar=False)
    engine.run(random.key(0), y)
    assert engine.diagnostics.converged
    np.testing.assert_allclose(engine.log_evidence, expected, atol=1e-3)
    early = LaplaceApproximation(process, progress_bar=False, num_steps=2)
    with pytest.warns(UserWarning, match="converge"):
        early.run(random.key(0), y)
    assert not early.diagnostics.converged
