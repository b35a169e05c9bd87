"""Probability integral transforms: the histogram against the density written out, and models that are right or not."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy import integrate, stats

from numpyro_ext.design import draws_of
from numpyro_ext.infer import pit_histogram, predictive_pit


def test_histogram_spreads_each_observation_over_its_jump():
    rng = np.random.default_rng(0)
    low = rng.random(7) * 0.6
    high = low + rng.random(7) * 0.4
    low[0] = high[0]  # continuous
    found = pit_histogram(low, high, num_bins=5)
    for b, (start, end) in enumerate(zip(found.edges[:-1], found.edges[1:], strict=True)):
        mass = float(start <= low[0] < end)
        for one, other in zip(low[1:], high[1:], strict=True):
            mass += integrate.quad(lambda u, a=one, b=other: (a <= u <= b) / (b - a), start, end, points=[one, other])[
                0
            ]
        np.testing.assert_allclose(found.density[b] / 5, mass / 7, atol=1e-6)
    p = found.density / 5
    np.testing.assert_allclose(found.kl, np.sum(0.2 * np.log(0.2 / p)))
    np.testing.assert_allclose(pit_histogram([0.0, np.nan], [1.0, 0.5], 3).density, 1.0)
    assert pit_histogram([0.0], [0.5], 2).kl == np.inf
    for wrong in (([np.nan], [np.nan]), ([0.5], [0.2]), ([0.5], [1.2])):
        with pytest.raises(ValueError, match=r"observations and bins|between zero and one"):
            pit_histogram(*wrong)


def kinds(level, counts, choice, real):
    """A discrete site without bound, one with few values, and one declared an event, half of it masked."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("counts", dist.Poisson(rate * level), obs=counts)
    numpyro.sample("choice", dist.OrderedLogistic(jnp.log(rate) * level, jnp.array([-1.0, 0.5])), obs=choice)
    with handlers.mask(mask=jnp.arange(len(level)) % 2 == 0):
        numpyro.sample("real", dist.Normal(rate * level[:, None], jnp.ones(2)).to_event(1), obs=real)


def test_every_kind_of_site_has_its_distribution_function():
    rng = np.random.default_rng(1)
    level, counts, choice = rng.random(6), rng.poisson(1.0, 6), rng.integers(0, 3, 6)
    real, rates = rng.normal(size=(6, 2)), np.array([0.8, 1.7])
    found = predictive_pit(draws_of({"rate": rates}, model=kinds, args=(level, counts, choice, real)), num_bins=4)

    def both(name):
        for rate in rates:
            if name == "counts":
                yield stats.poisson.cdf(counts - 1, rate * level), stats.poisson.cdf(counts, rate * level)
            elif name == "choice":
                below = stats.logistic.cdf(np.array([-1, 0.5]) - np.log(rate) * level[:, None])
                steps = np.concatenate([np.zeros((6, 1)), below, np.ones((6, 1))], 1)
                yield tuple(np.take_along_axis(steps, (choice + k)[:, None], 1) for k in (0, 1))
            else:
                yield (stats.norm.cdf(real - rate * level[:, None])[::2],) * 2

    for name, histogram in found.items():
        expected = np.mean([pit_histogram(*pair, 4).density for pair in both(name)], 0)
        np.testing.assert_allclose(histogram.density, expected, atol=1e-5)
    assert set(found) == {"counts", "choice", "real"}


def test_histograms_are_flat_for_the_truth_and_bowed_for_wide_predictions():
    def model(y, scale):
        level = numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(level, scale), obs=y)

    y = np.random.default_rng(2).normal(size=4000)
    kl = {scale: predictive_pit(draws_of({"level": np.zeros(2)}, model=model, args=(y, scale)))["y"].kl
          for scale in (1.0, 2.0)}  # fmt: skip
    # Of a right model 2 n KL is chi-squared with bins - 1 degrees of freedom.
    assert stats.chi2.sf(2 * 4000 * kl[1.0], 19) > 1e-3 and kl[2.0] > 0.1


def test_sites_without_a_distribution_function_and_sources_without_draws_are_refused():
    def vectors(y):
        level = numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.MultivariateNormal(level * jnp.ones(2), jnp.eye(2)), obs=y)

    with pytest.raises(TypeError, match="'y' is MultivariateNormal, whose values are vectors"):
        predictive_pit(draws_of({"level": np.zeros(2)}, model=vectors, args=(np.zeros(2),)))
    with pytest.raises(
        TypeError, match="predictive_pit takes an engine or MCMC after its run.*; got an object of class dict"
    ):
        predictive_pit({"level": np.zeros(2)})
