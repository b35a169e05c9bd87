"""Distributions that a reading takes for others of the same density."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro.distributions.transforms import AffineTransform, LowerCholeskyAffine

from numpyro_ext.infer import EP
from numpyro_ext.structure import read_latent_gaussian
from numpyro_ext.structure.model.equivalent import as_gaussian, with_exact_density

LOWER = np.array([[2.0, 0.0], [-1.0, 0.5]])


@pytest.mark.parametrize(
    "fn",
    [
        dist.TransformedDistribution(dist.Normal(0, 1), AffineTransform(jnp.arange(3.0), -2)),
        dist.TransformedDistribution(dist.Normal(0, 1).expand([3]).to_event(1), [AffineTransform(1, 2)] * 2),
        dist.TransformedDistribution(dist.Normal(1, 3).expand([3]), AffineTransform(0.5, 2.0)).to_event(1),
        dist.TransformedDistribution(dist.Normal(0, 1), AffineTransform(0.5, 2.0)).expand([3]).mask(False),
        dist.TransformedDistribution(
            dist.Normal(1, jnp.array([1.0, 3.0])).to_event(1), LowerCholeskyAffine(jnp.ones(2), LOWER)
        ),
    ],
    ids=["scalar", "twice", "event", "masked", "cholesky"],
)
def test_affine_transforms_of_normals_are_gaussian(fn):
    found = as_gaussian(fn)
    value = jnp.linspace(-1.0, 2.0, 3)[: fn.event_shape[0] if fn.event_shape else 3]
    assert (found.batch_shape, found.event_shape) == (fn.batch_shape, fn.event_shape)
    np.testing.assert_allclose(found.log_prob(value), fn.log_prob(value), rtol=1e-6)
    base = found
    while hasattr(base, "base_dist"):
        base = base.base_dist
    assert type(base) in (dist.Normal, dist.MultivariateNormal)


def test_other_transforms_stay_what_they_are():
    fn = dist.TransformedDistribution(dist.Normal(0, 1), [AffineTransform(0, 1), dist.transforms.ExpTransform()])
    assert as_gaussian(fn) is fn
    assert as_gaussian(dist.LogNormal(0, 1)).__class__ is dist.LogNormal


def test_a_transformed_effect_is_of_the_field():
    # As tutorials write what TransformReparam takes apart.
    def model(group, y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("groups", 3):
            effect = numpyro.sample(
                "effect", dist.TransformedDistribution(dist.Normal(0, 1), AffineTransform(1, scale))
            )
        numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=y)

    reading = read_latent_gaussian(model, (np.array([0, 0, 1, 2]), np.array([1, 2, 3, 1])))
    assert (reading.field, sorted(reading.hyper)) == (("effect",), ["scale"])


@pytest.mark.parametrize(("low", "high"), [(-1.0, None), (None, 2.0), (-1.0, 2.0)])
def test_truncated_densities_are_finite_wherever_the_location_is(low, high):
    loc, scale = np.array([-300.0, -5.0, 0.1, 5.0, 300.0]), 0.7
    found = with_exact_density(dist.TruncatedNormal(loc, scale, low=low, high=high)).log_prob(0.5)
    ends = [-np.inf if low is None else low, np.inf if high is None else high]
    expected = scipy.stats.truncnorm.logpdf(0.5, *((end - loc) / scale for end in ends), loc=loc, scale=scale)
    np.testing.assert_allclose(found, expected, rtol=1e-9 if found.dtype == np.float64 else 1e-3)


@pytest.mark.thorough
def test_compound_counts_have_no_jumps():
    # Those of betaln in JAX are of 1e-6, where an argument is eight.
    mean, size = np.linspace(0.1, 0.9, 9), np.array([3.0, 8.0, 12.0])[:, None]
    found = with_exact_density(dist.BetaBinomial(mean * size, (1 - mean) * size, 20)).log_prob(np.arange(9))
    expected = scipy.stats.betabinom.logpmf(np.arange(9), 20, mean * size, (1 - mean) * size)
    rtol = 1e-12 if found.dtype == np.float64 else 1e-5
    np.testing.assert_allclose(found, expected, rtol=rtol)

    counts = dist.ZeroInflatedNegativeBinomial2(10 * mean, size, gate=0.2)
    found, expected = (
        with_exact_density(counts).log_prob(3),
        scipy.stats.nbinom.logpmf(3, size, size / (size + 10 * mean)),
    )
    np.testing.assert_allclose(found, np.log(0.8) + expected, rtol=rtol)
    assert with_exact_density(counts).log_prob(np.zeros(9)).shape == (3, 9)


def test_beta_densities_and_their_ends():
    a, b = np.array([0.4, 1.0, 3.0, 8.0, 60.0, 2.0]), np.array([2.0, 1.0, 0.5, 8.0, 700.0, 8.0])
    value = np.array([0.1, 0.5, 0.999, 0.3, 0.07, 0.2])
    fn = with_exact_density(dist.Beta(a, b))
    expected = scipy.stats.beta.logpdf(value, a, b)
    rtol = 1e-12 if fn.log_prob(value).dtype == np.float64 else 1e-4
    np.testing.assert_allclose(fn.log_prob(value), expected, rtol=rtol, atol=rtol)
    by_mean = with_exact_density(dist.BetaProportion(a / (a + b), a + b))
    assert type(by_mean) is type(fn)  # a short program, as well
    np.testing.assert_allclose(by_mean.log_prob(value), expected, rtol=10 * rtol, atol=10 * rtol)
    for end in (0.0, 1.0):
        reference = dist.Beta(a, b, validate_args=False)
        np.testing.assert_allclose(
            fn.log_prob(np.full(6, end)), reference.log_prob(np.full(6, end)), rtol=1e-4, atol=1e-6
        )
        slope = jax.grad(lambda a, end=end: with_exact_density(dist.Beta(a, b)).log_prob(np.full(6, end)).sum())(a)
        assert np.all(np.isfinite(slope))


@pytest.mark.thorough
def test_a_truncated_regression_is_that_of_a_grid():
    # At wide cavities the density of NumPyro is infinite, which was the end of it.
    x, y = np.linspace(-1, 1, 12), np.linspace(-0.9, 1.4, 12) + 0.3 * np.cos(np.arange(12))

    def model(y):
        slope = numpyro.sample("slope", dist.Normal(0, 3))
        numpyro.sample("y", dist.TruncatedNormal(slope * x, 0.3, low=-1), obs=y)

    engine = EP(model, progress_bar=False)
    engine.run(jax.random.key(0), y)
    grid = np.linspace(-4, 4, 4001)
    density = scipy.stats.truncnorm.logpdf(y, (-1 - grid[:, None] * x) / 0.3, np.inf, grid[:, None] * x, 0.3).sum(1)
    weight = np.exp(density + scipy.stats.norm.logpdf(grid, 0, 3))
    mean = np.sum(weight * grid) / np.sum(weight)
    sd = np.sqrt(np.sum(weight * (grid - mean) ** 2) / np.sum(weight))
    np.testing.assert_allclose(engine.log_evidence, np.log(np.trapezoid(weight, grid)), atol=1e-2)
    np.testing.assert_allclose(engine.posterior["slope"].mean, mean, atol=0.02 * sd)
    np.testing.assert_allclose(engine.posterior["slope"].sd, sd, rtol=0.02)
