"""Small models and fits that the tests of the engines share, so that each is compiled once."""

import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

NUM_OBSERVATIONS = 12


def line(x, y=None, mask=True):
    """Regression with known noise: every engine is exact."""
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    level = numpyro.param("level", 0.3)
    slopes = numpyro.sample("slopes", dist.Normal(0.0, scale).expand([2]).to_event(1))
    numpyro.deterministic("fitted", level + x @ slopes)
    numpyro.deterministic("steepness", slopes[0] ** 2)
    with numpyro.plate("observations", x.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(level + x @ slopes, 0.5), obs=y)


def counts(t, y=None, mask=True):
    """A Gaussian process seen through Poisson counts."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    covariance = scale**2 * jnp.exp(-0.5 * (t[:, None] - t) ** 2) + 1e-6 * jnp.eye(t.size)
    f = numpyro.sample("f", dist.MultivariateNormal(0.5, covariance))
    numpyro.deterministic("rate", jnp.exp(f))
    with numpyro.plate("time", t.size), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.fixture(scope="session")
def line_case():
    generator = np.random.default_rng(1)
    x = jnp.asarray(generator.normal(size=(NUM_OBSERVATIONS, 2)))
    y = 0.4 + x @ jnp.array([1.0, -0.7]) + 0.5 * jnp.asarray(generator.normal(size=NUM_OBSERVATIONS))
    return SimpleNamespace(model=line, x=x, y=y, mask=jnp.arange(NUM_OBSERVATIONS) % 4 != 0)


@pytest.fixture(scope="session")
def counts_case():
    t = jnp.linspace(-3.0, 3.0, NUM_OBSERVATIONS)
    y = jnp.asarray(np.random.default_rng(2).poisson(np.exp(0.5 + np.sin(t))))
    return SimpleNamespace(model=counts, t=t, y=y, mask=jnp.arange(NUM_OBSERVATIONS) % 4 != 0)


@pytest.fixture(scope="session")
def fitted_line(line_case):
    from numpyro_ext.infer import EP

    engine = EP(line_case.model, integrate="none", progress_bar=False, num_samples=4000)
    engine.run(jax.random.key(0), line_case.x, line_case.y, mask=line_case.mask)
    return engine


@pytest.fixture(scope="session")
def fitted_counts(counts_case):
    from numpyro_ext.infer import EP

    engine = EP(counts_case.model, progress_bar=False)
    engine.run(jax.random.key(0), counts_case.t, counts_case.y, mask=counts_case.mask)
    return engine


@pytest.fixture
def python_handles_control_c():
    """A test run in the background of a shell ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
