"""Priors of the coefficients of a signal in a frame."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from scipy.stats import laplace

from numpyro_ext.distributions import AnalysisPrior, HiddenMarkovTree
from numpyro_ext.linalg import from_matrix, shifted_transforms, wavelet_transform
from numpyro_ext.potentials import Forest
from tests.tiers import few

TURN = np.array([[1.0, 1.0], [1.0, -1.0]]) / np.sqrt(2.0)
FRAME = from_matrix(np.concatenate([np.eye(2), TURN]))
LAPLACE = dist.Laplace(0.0, 0.7).expand([4]).to_event(1)


def grid(limit, num):
    x = np.linspace(-limit, limit, num)
    return np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2), (x[1] - x[0]) ** 2


def test_density_is_a_power_of_that_of_the_coefficients():
    x = np.random.default_rng(0).standard_normal((3, 2))
    found = AnalysisPrior(FRAME, LAPLACE, 0.5).log_prob(jnp.asarray(x))
    expected = 0.5 * laplace.logpdf(x @ np.asarray(FRAME.materialise()).T, scale=0.7).sum(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


TREE = HiddenMarkovTree(Forest.from_parents([-1, 0, -1, 2]), dist.Laplace(0, 0.3), dist.Laplace(0, 1))


@pytest.mark.parametrize("prior", few([LAPLACE, TREE], 1))
def test_geometric_means_of_densities_integrate_to_at_most_one(prior):
    points, cell = grid(12.0, 801)
    total = cell * jnp.sum(jnp.exp(AnalysisPrior(FRAME, prior, 0.5).log_prob(jnp.asarray(points))))
    assert 0.5 < total < 1.0
    single = AnalysisPrior(from_matrix(TURN), dist.Laplace(0.0, 0.7).expand([2]).to_event(1))
    np.testing.assert_allclose(cell * jnp.sum(jnp.exp(single.log_prob(jnp.asarray(points)))), 1.0, rtol=1e-3)


@pytest.mark.slow
def test_nuts_has_the_moments_of_quadrature():
    prior = AnalysisPrior(FRAME, LAPLACE, 0.5)
    data = np.array([1.0, -0.4])

    def model():
        x = numpyro.sample("x", prior)
        numpyro.sample("y", dist.Normal(x, 0.5).to_event(1), obs=data)

    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(0))
    points, _ = grid(6.0, 601)
    log_density = np.asarray(prior.log_prob(jnp.asarray(points))) - 0.5 * (((points - data) / 0.5) ** 2).sum(-1)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ points
    draws = np.asarray(mcmc.get_samples()["x"])
    np.testing.assert_allclose(draws.mean(0), mean, atol=0.05)
    np.testing.assert_allclose(draws.var(0), weights @ (points - mean) ** 2, rtol=0.15)


def test_what_cannot_be():
    with pytest.raises(TypeError, match="needs a LinearOperator"):
        AnalysisPrior(np.eye(2), LAPLACE)
    with pytest.raises(ValueError, match="makes 4 coefficients"):
        AnalysisPrior(FRAME, dist.Laplace(0.0, 1.0).expand([3]).to_event(1))
    with pytest.raises(ValueError, match="weight must be positive"):
        AnalysisPrior(FRAME, LAPLACE, 0.0)
    with pytest.raises(ValueError, match="centered at zero"):
        AnalysisPrior(FRAME, dist.Laplace(1.0, 1.0).expand([4]).to_event(1))
    with pytest.raises(NotImplementedError, match="cannot be sampled"):
        AnalysisPrior(FRAME, LAPLACE).sample(jax.random.key(0))


def test_a_shifted_signal_is_as_likely():
    frame = shifted_transforms(wavelet_transform((8,), "haar", 2), [[k] for k in range(4)])
    prior = AnalysisPrior(frame, dist.Laplace(0.0, 1.0).expand([32]).to_event(1), 0.25)
    x = jnp.asarray(np.random.default_rng(1).standard_normal(8))
    np.testing.assert_allclose(prior.log_prob(jnp.roll(x, 3)), prior.log_prob(x), rtol=1e-5)
