"""Coordinates of sequential Monte Carlo: densities as NumPyro has them, hierarchies and scans without their scales."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.util import log_density
from scipy.stats import multivariate_normal

from numpyro_ext.compilation.store import clear
from numpyro_ext.infer import SMC
from numpyro_ext.infer.monte_carlo import target as target_module
from numpyro_ext.infer.monte_carlo import verification
from numpyro_ext.infer.monte_carlo.coordinates import coordinates
from numpyro_ext.infer.monte_carlo.target import Target
from numpyro_ext.structure import ModelStructureError, Reason
from tests.tiers import few, thorough

KEY = random.key(0)
TRIL = jnp.array([[1.0, 0.0], [0.6, 0.5]])
ERROR = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
GAIN = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])


@pytest.mark.parametrize(
    ("fn", "is_gaussian"),
    few(
        [
            (dist.Normal(jnp.array([1.0, -2.0, 0.5]), 2.0), True),
            (dist.Normal(1, 2).expand([2, 3]).to_event(1), True),
            (dist.MultivariateNormal(jnp.array([1.0, 2.0]), scale_tril=TRIL).expand([3]), True),
            (dist.MultivariateNormal(0.0, precision_matrix=jnp.eye(2) + 0.5).expand([2, 3]).to_event(1), True),
            (dist.LogNormal(0.3, jnp.array([0.5, 1.5])), True),
            (dist.StudentT(4.0, 1.0, jnp.array([0.5, 2.0])), False),
            (dist.Cauchy(1.0, 2.0).expand([3]), False),
            (dist.Laplace(1.0, 2.0), False),
            (dist.Logistic(1.0, 2.0), False),
            (dist.Gumbel(1.0, 2.0), False),
            (dist.HalfNormal(jnp.array([0.5, 2.0])), False),
            (dist.HalfCauchy(3.0).expand([2]), False),
            (dist.Gamma(2.0, 3.0), False),
            (dist.Dirichlet(jnp.ones(3)), False),
            (dist.TruncatedNormal(0.0, 1.0, low=0.5), False),
            (dist.LKJCholesky(3, 2.0), False),
            (dist.GaussianRandomWalk(0.5, 4), False),
        ],
        6,
    ),
    ids=lambda value: type(value).__name__,
)
def test_densities_of_unconstrained_values(fn, is_gaussian):
    found = coordinates(fn)
    assert found.is_gaussian == is_gaussian
    value = fn.sample(KEY)
    z = found.transform.inv(value)
    np.testing.assert_allclose(found.transform(z), value, rtol=1e-9, atol=1e-12)
    with_jacobian = jnp.sum(fn.log_prob(value)) + jnp.sum(found.transform.log_abs_det_jacobian(z, value))
    if found.standard is not None:
        np.testing.assert_allclose(jnp.sum(found.standard.log_prob(z)), with_jacobian, rtol=1e-9)
    assert z.shape == dist.biject_to(fn.support).inv(value).shape


def schools(error, gain):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    spread = numpyro.sample("spread", dist.HalfNormal(5))
    with numpyro.plate("schools", 8):
        effect = numpyro.sample("effect", dist.Normal(mean, spread))
        numpyro.sample("gain", dist.Normal(effect, error), obs=gain)


@handlers.reparam(config={"effect": numpyro.infer.reparam.LocScaleReparam(0)})
def noncentred_schools(error, gain):
    schools(error, gain)


def autoregression(y):
    level = numpyro.sample("level", dist.LogNormal(0, 0.5))

    def step(x, y):
        x = numpyro.sample("x", dist.Normal(0.8 * x, level))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)
        return x, x

    scan(step, 0.0, y)


def wrapped_steps(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))

    def step(x, y):
        x = numpyro.sample("x", dist.Normal(0.8 * x, scale).expand([2]).to_event(1))
        v = numpyro.sample("v", dist.MultivariateNormal(x, scale_tril=TRIL))
        numpyro.sample("y", dist.Normal(v.sum(), 1), obs=y)
        return x, x

    scan(step, jnp.zeros(2), y)


def correlated(y):
    tail = numpyro.sample("tail", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", 3):
        pair = numpyro.sample("pair", dist.MultivariateNormal(tail * jnp.ones(2), scale_tril=tail * TRIL))
    heavy = numpyro.sample("heavy", dist.StudentT(2.0 + tail, pair[0, 0], tail))
    numpyro.sample("y", dist.Normal(heavy + pair.sum(), 1), obs=y)


SERIES = np.array([0.3, 1.0, 0.2, -0.7, -1.5, 0.4])


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (schools, (ERROR, GAIN)),
        (autoregression, (SERIES,)),
        (correlated, (0.5,)),
        *thorough((wrapped_steps, (SERIES,)), (noncentred_schools, (ERROR, GAIN))),
    ],
)
def test_models_have_their_density_in_these_coordinates(model, args):
    """Against NumPyro's density of the values, and the determinant of all derivatives of these."""
    target = Target(model, KEY, args, {}, {})
    vector = target.draw_prior(random.key(1), target.data)

    def values(vector):
        found = target.constrained(vector, target.data)
        return {name: found[name] for name in target.sites}

    expected, _ = log_density(model, args, {}, jax.jit(values)(vector))

    def flat(vector):
        return jax.flatten_util.ravel_pytree(values(vector))[0]

    assert flat(vector).shape == vector.shape
    jacobian = np.linalg.slogdet(np.asarray(jax.jit(jax.jacobian(flat))(vector)))[1]
    found = target.log_prior(vector, target.data) + target.log_likelihood(vector, target.data)
    np.testing.assert_allclose(found, expected + jacobian, rtol=1e-8)


def seen_rows(y):
    x = numpyro.sample("x", dist.Normal(0, 2))
    with handlers.mask(mask=np.arange(4) < 3), numpyro.plate("rows", 4):
        numpyro.sample("y", dist.Normal(x, 1), obs=y)


def twice_as_likely(sites):
    """Sites of a model, those with data counted twice."""

    class Twice(sites):
        def process_message(self, msg):
            super().process_message(msg)
            if msg["type"] == "sample" and msg["is_observed"]:
                msg["scale"] = 2.0

    return Twice


@pytest.mark.parametrize("is_wrong", ["sites", "coordinates", "nothing"])
def test_particles_of_another_density_than_the_models_are_refused(is_wrong, monkeypatch):
    clear(verification.Compared)
    if is_wrong == "sites":
        monkeypatch.setattr(target_module, "PlainSites", twice_as_likely(target_module.PlainSites))
    if is_wrong == "coordinates":
        halved = dist.Normal(0.0, 0.5)
        monkeypatch.setattr(target_module, "coordinates", lambda fn, **_: coordinates(fn)._replace(standard=halved))
    smc_target = Target(seen_rows, KEY, (np.array([0.3, 1.0, 0.2, -0.7]),), {}, {})
    vectors = jnp.array([[0.4], [-1.0], [2.0]])
    if is_wrong == "nothing":
        return verification.check_target(smc_target, vectors)
    with pytest.raises(ModelStructureError, match="log density of a draw from its prior") as refused:
        verification.check_target(smc_target, vectors)
    assert refused.value.reason is Reason.MISREAD


@pytest.mark.thorough
def test_a_centred_model_is_sampled_as_its_noncentred_twin():
    found = []
    for model in (schools, noncentred_schools):
        smc = SMC(model, num_particles=1000, progress_bar=False)
        smc.run(KEY, ERROR, GAIN)
        assert smc.diagnostics.converged
        assert "hmc" in smc.describe()
        assert smc.history.num_moves.max() < 20  # three hundred were not enough in the coordinates of the sites
        found.append(smc)
    centred, noncentred = found
    np.testing.assert_allclose(centred.log_evidence, noncentred.log_evidence, rtol=1e-6)
    np.testing.assert_allclose(centred.particles["effect"], noncentred.particles["effect"], rtol=1e-5, atol=1e-8)


@pytest.mark.thorough
def test_a_series_by_scan():
    def series(y):
        def step(x, y):
            x = numpyro.sample("x", dist.Normal(0.8 * x, 0.7))
            numpyro.sample("y", dist.Normal(x, 1), obs=y)
            return x, x

        scan(step, 0.0, y)

    y = np.sin(np.arange(12.0))
    smc = SMC(series, num_particles=1000, progress_bar=False)
    smc.run(KEY, y)
    innovations = np.tril(0.8 ** np.maximum(np.subtract.outer(np.arange(12), np.arange(12)), 0))
    covariance = 0.49 * innovations @ innovations.T
    exact = multivariate_normal.logpdf(y, np.zeros(12), covariance + np.eye(12))
    assert smc.diagnostics.converged
    assert abs(smc.log_evidence - exact) < 3.0 * smc.log_evidence.standard_error < 0.3
    mean = covariance @ np.linalg.solve(covariance + np.eye(12), y)
    np.testing.assert_allclose(np.asarray(smc.get_samples()["x"]).mean(0), mean, atol=4.0 * 0.7 / np.sqrt(400))


@pytest.mark.thorough
@pytest.mark.parametrize("size", [20, *thorough(5)])
def test_evidences_of_a_regression_are_not_biased(size):
    """By slices about the particles in 20 dimensions they were too large by two of their standard errors."""
    x = np.random.default_rng(0).normal(size=(60, size))
    y = x @ np.random.default_rng(1).normal(size=size) + np.random.default_rng(2).normal(size=60)

    def regression(x, y):
        slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([size]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ slopes, 1), obs=y)

    exact = multivariate_normal.logpdf(y, np.zeros(60), np.eye(60) + x @ x.T)
    with pytest.raises(ValueError, match=f"take at least {40 * size**2} particles"):
        SMC(regression, num_particles=40 * size**2 - 1, kernel="elliptical-slice").run(KEY, x, y)
    smc = SMC(regression, num_particles=1000, progress_bar=False)
    errors, told = [], []
    for seed in range(6):
        smc.run(random.key(seed), x, y)
        errors.append(smc.log_evidence - exact)
        told.append(smc.log_evidence.standard_error)
    # the mean of six runs, each a little too large by the convexity of the logarithm
    assert abs(np.mean(errors)) < 3.0 * np.mean(told) / np.sqrt(6)
    assert np.sqrt(np.mean(np.square(errors))) < 2.0 * np.mean(told)


@pytest.mark.thorough
def test_slices_need_no_gaussian_prior():
    """A rate with a flat prior on an interval: the evidence is an integral of one dimension."""

    def waits(y):
        rate = numpyro.sample("rate", dist.Uniform(0, 10))
        numpyro.sample("y", dist.Exponential(rate), obs=y)

    y = np.linspace(0.1, 2.0, 30)
    smc = SMC(waits, num_particles=1000, progress_bar=False)
    smc.run(KEY, y)
    rates = np.linspace(0.0, 10.0, 20_001)[1:]
    exact = np.log(np.trapezoid(rates**30 * np.exp(-rates * y.sum()), rates) / 10.0)
    assert "elliptical-slice" in smc.describe()
    assert abs(smc.log_evidence - exact) < 3.0 * smc.log_evidence.standard_error < 0.3


def test_pcn_needs_one():
    with pytest.raises(ValueError, match="'pcn' needs Normal, LogNormal or MultivariateNormal priors"):
        SMC(schools, kernel="pcn").run(KEY, ERROR, GAIN)
