"""``numpyro.factor`` of a quadratic function is a Gaussian, to all digits, and of other functions is none."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import multivariate_normal

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from numpyro_ext.structure import read_latent_gaussian

Y = np.array([0.4, -0.3, 1.2, 0.8])
STEPS, STEPS_OF_FIVE = np.diff(np.eye(4), axis=0), np.diff(np.eye(5), axis=0)
KEY = jax.random.key(0)
GAUSSIAN, OTHER = "Gaussian factor, written by hand", "elementwise factor, by quadrature"


def smooth(y, stiffness=2.0, constant=0.3):
    f = numpyro.sample("f", dist.Normal(0, 1).expand([4]))
    numpyro.factor("smooth", constant - 0.5 * stiffness * jnp.sum((f[1:] - f[:-1] - 0.1) ** 2))
    numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def exact_evidence(stiffness=2.0, constant=0.3):
    """Steps of the field that were seen to be 0.1, with the precision ``stiffness`` and without its normaliser."""
    rows, data = np.vstack([STEPS, np.eye(4)]), np.concatenate([np.full(3, 0.1), Y])
    covariance = rows @ rows.T + np.diag(np.concatenate([np.full(3, 1.0 / stiffness), np.full(4, 0.25)]))
    normaliser = 1.5 * np.log(2.0 * np.pi / stiffness)
    return multivariate_normal.logpdf(data, np.zeros(7), covariance) + normaliser + constant


@pytest.mark.parametrize("engine", [EP, LaplaceApproximation, VariationalGaussian])
def test_evidence_is_exact(engine):
    run = engine(smooth, progress_bar=False)
    run.run(KEY, Y)
    np.testing.assert_allclose(float(run.log_evidence), exact_evidence(), rtol=1e-10)


def test_parameters_of_the_factor_are_learned():
    def model(y):
        stiffness = numpyro.sample("stiffness", dist.Gamma(2.0, 1.0))
        smooth(y, stiffness, constant=jnp.log(stiffness))

    run = EP(model, progress_bar=False, integrate="none")
    run.run(KEY, Y)
    grid = np.linspace(0.05, 8.0, 4000)
    best = grid[np.argmax([exact_evidence(k, np.log(k)) + np.log(k) - k for k in grid])]
    np.testing.assert_allclose(run.hyper["stiffness"].value, best, atol=0.005)


def label(term, prior=None, **options):
    def model(y):
        f = numpyro.sample("f", (prior or dist.Normal(0, 1)).expand([4]))
        numpyro.factor("extra", term(f))
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    described = str(read_latent_gaussian(model, (Y,), **options))
    return next(line for line in described.splitlines() if "extra" in line)


@pytest.mark.parametrize(
    "term",
    [
        lambda f: -0.5 * jnp.sum(f**2),
        lambda f: dist.Normal(0, 0.01).log_prob(jnp.sum(f)),
        lambda f: jnp.sum(dist.Normal(f, 2).log_prob(jnp.array([1, 2, 3, 4]))),
        lambda f: -jnp.sum(jnp.square(f[1:] - f[:-1] - 0.5)) / 3,
        lambda f: -2 * jnp.sum(jnp.square(f) * jnp.array([1, 2, 3, 4])),
    ],
    ids=["squares", "sum to zero", "density", "difference", "weighted"],
)
def test_quadratic_functions_are_gaussian(term):
    assert GAUSSIAN in label(term)


@pytest.mark.parametrize(
    "term",
    [
        lambda f: -jnp.sum(jnp.abs(f)),
        lambda f: -jnp.sum(jnp.where(jnp.abs(f) < 50.0, 0.5 * f**2, 50.0 * jnp.abs(f) - 1250.0)),  # Huber, far out
        lambda f: -jnp.sum(f**2 + 1e-6 * f**4),
        lambda f: 0.1 * jnp.sum(f**2),
        lambda f: -jnp.sum(jax.nn.softplus(f)),
    ],
    ids=["kink", "kink far out", "quartic", "upwards", "softplus"],
)
def test_other_functions_are_not(term):
    assert OTHER in label(term)


@pytest.mark.float32
def test_an_improper_prior_that_a_factor_makes_proper():
    """An intrinsic autoregression whose sum is held, which single precision has digits for now."""

    def model(counts):
        phi = numpyro.sample("phi", dist.ImproperUniform(dist.constraints.real, (), event_shape=(5,)))
        numpyro.factor("pairwise", -0.5 * jnp.sum((phi[1:] - phi[:-1]) ** 2))
        numpyro.factor("sum to zero", dist.Normal(0, 0.001 * 5).log_prob(jnp.sum(phi)))
        numpyro.sample("y", dist.Poisson(jnp.exp(1.0 + phi)), obs=counts)

    counts = np.array([2, 4, 1, 6, 3])
    run = EP(model, progress_bar=False)
    run.run(KEY, counts)
    assert run.diagnostics.converged
    precision = STEPS_OF_FIVE.T @ STEPS_OF_FIVE + np.ones((5, 5)) / 0.005**2
    mode = np.zeros(5)
    for _ in range(50):  # Newton's method
        rate = np.exp(1.0 + mode)
        mode = mode + np.linalg.solve(precision + np.diag(rate), counts - rate - precision @ mode)
    np.testing.assert_allclose(run.posterior["phi"].mean, mode, atol=0.15)  # a mean is no mode
    np.testing.assert_allclose(np.sum(run.posterior["phi"].mean), 0.0, atol=1e-3)
