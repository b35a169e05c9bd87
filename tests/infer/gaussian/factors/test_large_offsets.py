"""Exposures of millions, whose logarithms are offsets of predictors, and columns that are nearly alike:
digits are kept, or said to be missing."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, LaplaceApproximation
from tests.tiers import thorough

NUM_GROUPS = 20
GROUP = np.arange(200) % NUM_GROUPS


def rates(group, exposure, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.plate("groups", NUM_GROUPS):
        shift = numpyro.sample("shift", dist.Normal(0.0, scale))
    numpyro.deterministic("log_rate", mean + shift)
    numpyro.sample("y", dist.Poisson(jnp.exp(jnp.log(exposure) + mean + shift[group])), obs=y)


@pytest.mark.thorough
@pytest.mark.float32
@pytest.mark.parametrize("units", [1.0, 1e7])
@pytest.mark.parametrize("engine", [LaplaceApproximation, EP])
def test_large_offsets_are_fitted_or_single_precision_is_named(engine, units):
    """Groups have some 1000 events, which say their rates to 3 %; what little the prior adds is less than that."""
    rng = np.random.default_rng(0)
    exposure = 1e7 * rng.uniform(0.5, 2.0, len(GROUP))
    y = rng.poisson(exposure * np.exp(-11.3 + 0.5 * rng.normal(size=NUM_GROUPS)[GROUP]))
    run = engine(rates, hyper_values={"scale": 0.5}, progress_bar=False)
    is_single = not jax.config.jax_enable_x64
    if is_single and engine is LaplaceApproximation and units == 1.0:
        message = (
            r"(?s)Single precision has too few digits.*site 'y'.*offset 1[56].*enable_x64\(\).*take the offset out"
        )
        with pytest.raises(ValueError, match=message):
            run.run(jax.random.key(0), GROUP, exposure / units, y)
        return
    run.run(jax.random.key(0), GROUP, exposure / units, y)
    events, times = (np.bincount(GROUP, values) for values in (y, exposure / units))
    site = run.posterior["log_rate"]
    assert run.diagnostics.converged
    np.testing.assert_allclose(site.mean, np.log(events / times), atol=float(np.max(events**-0.5)))
    np.testing.assert_allclose(site.sd, events**-0.5, rtol=0.05)


@pytest.mark.float32
def test_levels_of_a_million_are_read_or_said_to_have_no_digits():
    """A float32 near a million is a multiple of a sixteenth: densities of what is beside it differ by rounding."""

    def model(group, y):
        level = numpyro.sample("level", dist.Normal(0.0, 10.0))
        shift = numpyro.sample("shift", dist.Normal(0.0, 0.5).expand([NUM_GROUPS]))
        numpyro.sample("y", dist.Normal(1e6 + level + shift[group], 1.0), obs=y)

    y = 1e6 + np.random.default_rng(0).normal(2.0, 1.0, 200)
    run = EP(model, progress_bar=False)
    if not jax.config.jax_enable_x64:
        message = r"(?s)float32 has too few digits.*site 'y'.*offset 1e\+06.*enable_x64\(\).*the offset out"
        with pytest.raises(ValueError, match=message):
            run.run(jax.random.key(0), GROUP, y)
        return
    run.run(jax.random.key(0), GROUP, y)
    # means of groups have the variance 0.5^2 + 1 / 10
    weight = NUM_GROUPS / (0.25 + 0.1)
    np.testing.assert_allclose(run.posterior["level"].mean, np.mean(y - 1e6) * weight / (weight + 0.01), rtol=1e-6)


def bent(x, z, y=None):
    """Counts over years: the logarithm of the year is nearly a line, and nearly constant."""
    line = numpyro.sample("level", dist.Normal(0, 10)) + numpyro.sample("slope", dist.Normal(0, 10)) * x
    numpyro.sample("y", dist.Poisson(jnp.exp(line + numpyro.sample("bend", dist.Normal(0, 100)) * z)), obs=y)


def mode_and_deviations(columns, y):
    """By Newton's method, in columns that are standardised by the triangle of their factorisation."""
    scales = np.array([10.0, 10.0, 100.0])
    basis, triangle = np.linalg.qr(columns)
    root = np.linalg.inv(triangle).T @ np.diag(1 / scales)  # prior of the new coefficients
    prior = root @ root.T
    new = np.linalg.lstsq(basis, np.log(y), rcond=None)[0]
    for _ in range(50):
        rate = np.exp(basis @ new)
        precision = (basis.T * rate) @ basis + prior
        new = new + np.linalg.solve(precision, basis.T @ (y - rate) - prior @ new)
    back = np.linalg.inv(triangle)
    return back @ new, np.sqrt(np.diag(back @ np.linalg.inv(precision) @ back.T))


@pytest.mark.float32
@pytest.mark.parametrize("engine", [LaplaceApproximation, *thorough(EP)])
def test_columns_that_are_nearly_alike_are_fitted_or_single_precision_is_named(engine):
    """Counts are of 400 events a year, under which the mode is the mean."""
    named, run = 0, engine(bent, progress_bar=False)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        year = np.sort(rng.integers(1950, 2020, 70)).astype(np.float32)
        columns = np.stack([np.ones(70), year - 1985, np.log(year)]).astype(jnp.result_type(float))
        y = rng.poisson(np.exp(6 + 0.03 * (year - 1985)))
        mode, deviation = mode_and_deviations(columns.T.astype(float), y)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                run.run(jax.random.key(0), columns[1], columns[2], y)
            except ValueError as error:
                assert "float64" in str(error)
                continue
        sites = [run.posterior[name] for name in ("level", "slope", "bend")]
        if run.diagnostics.converged:
            errors = (np.array([float(site.mean) for site in sites]) - mode) / deviation
            np.testing.assert_allclose(errors, 0.0, atol=0.15)
            np.testing.assert_allclose([float(site.sd) for site in sites], deviation, rtol=0.15)
            continue
        assert any("enable_x64()" in str(warning.message) for warning in caught)
        named += any("lost the digits of the posterior of site" in message for message in run.diagnostics.messages)
    assert (named > 0) == (not jax.config.jax_enable_x64)
