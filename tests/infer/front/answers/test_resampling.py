"""Draws resampled by Pareto-smoothed importance weights: against quadrature, where the plain ones are off."""

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.importance import _psis_khat
from scipy.stats import genpareto, halfnorm, multivariate_normal, norm, poisson

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.front.answers.resampling import pareto_smoothed, psis_resampled
from tests.tiers import thorough

KEY = jax.random.key(0)
GAUSSIAN = [EP, VariationalGaussian, LaplaceApproximation]


def run(engine, model, *args, **options):
    engine = engine(model, progress_bar=False, **options)
    engine.run(KEY, *args)
    return engine


@pytest.mark.parametrize("shape", [-0.3, 0.2, 0.6, 1.1])
def test_smoothed_weights_are_those_of_others(shape):
    log_weights = np.log(genpareto.rvs(shape, size=2000, random_state=1) + 1.0)
    smoothed, found = pareto_smoothed(log_weights)
    np.testing.assert_allclose(found, _psis_khat(log_weights), rtol=1e-10)
    assert np.all(np.diff(smoothed[np.argsort(log_weights)]) >= 0.0) and np.max(smoothed) <= 0.0
    if az.__version__.startswith("0."):
        weights, theirs = az.psislw(log_weights)
        np.testing.assert_allclose(found, theirs, rtol=1e-10)
        np.testing.assert_allclose(np.exp(smoothed) / np.exp(smoothed).sum(), np.exp(weights), rtol=1e-6)


def test_weights_without_a_tail():
    assert pareto_smoothed(np.full(1000, -3.0))[1] == 0.0
    one = np.where(np.arange(1000) == 7, 0.0, -1e4)
    assert pareto_smoothed(one)[1] == np.inf
    with pytest.warns(UserWarning, match="k-hat inf .* 1 of the 50 resampled draws"):
        assert set(psis_resampled(one, 50, KEY)) == {7}
    with pytest.raises(FloatingPointError, match="None of the draws"):
        psis_resampled(np.full(1000, -np.inf), 50, KEY)


X = np.array([-1.0, 0.0, 0.5, 1.0])
COUNTS = np.array([0, 1, 0, 2])


def line(x, y):
    level = numpyro.sample("level", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    numpyro.sample("y", dist.Poisson(jnp.exp(level + slope * x)), obs=y)


@pytest.mark.parametrize(
    "engine, options",
    [
        (GAUSSIAN[0], {}),
        *thorough(*((engine, {}) for engine in GAUSSIAN[1:])),
        (VariationalGaussian, {"covariance": "diagonal"}),
    ],
)
def test_weights_are_the_model_over_the_gaussian(engine, options):
    fitted = run(engine, line, X, COUNTS, **options)
    found = fitted._run._propose(KEY, 50, is_weighted=True)
    points = np.stack([found.sites["level"], found.sites["slope"]], axis=1)
    deviations = [np.sqrt(fitted.posterior[name].variance) for name in ("level", "slope")]
    mean = [fitted.posterior[name].mean for name in ("level", "slope")]
    covariance = np.diag(np.square(deviations))
    if not options:
        factor = fitted._run.programs.weight_inputs(*fitted._run.inputs)[2]
        covariance = np.asarray(factor @ factor.T)
    log_q = multivariate_normal.logpdf(points, mean, covariance)
    log_p = norm.logpdf(points[:, 0], 0, 2) + norm.logpdf(points[:, 1])
    log_p += poisson.logpmf(COUNTS, np.exp(points[:, :1] + points[:, 1:] * X)).sum(1)
    np.testing.assert_allclose(found.log_weight, log_p - log_q, rtol=1e-6, atol=1e-8)


def moments_by_quadrature():
    level, slope = np.linspace(-9, 5, 401)[:, None], np.linspace(-6, 6, 301)
    log_density = norm.logpdf(level, 0, 2) + norm.logpdf(slope)
    log_density = log_density + poisson.logpmf(COUNTS, np.exp(level[..., None] + slope[..., None] * X)).sum(-1)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = np.array([np.sum(weights * level), np.sum(weights * slope)])
    return mean, np.sqrt([np.sum(weights * (level - mean[0]) ** 2), np.sum(weights * (slope - mean[1]) ** 2)])


@pytest.mark.parametrize("engine", [LaplaceApproximation, *thorough(VariationalGaussian, INLA)])
def test_resampled_draws_of_few_counts_are_closer(engine):
    """The posterior is skewed: the mode is a fifth of a deviation from the mean."""
    fitted = run(engine, line, X, COUNTS, num_samples=4000)
    mean, sd = moments_by_quadrature()
    plain, better = fitted.get_samples(), fitted.get_samples(resample="psis")
    assert better["level"].shape == (4000,) and set(better) == set(plain)
    gaps = [
        np.abs([draws["level"].mean() - mean[0], draws["slope"].mean() - mean[1], draws["level"].std() - sd[0]]) / sd[0]
        for draws in (plain, better)
    ]
    # Of draws that repeat, with half the effective number at least.
    assert np.all(gaps[1] < 5 * np.sqrt(2 / 4000)), gaps
    if engine is LaplaceApproximation:
        assert gaps[0][0] > 0.15
    again = fitted.get_samples(resample="psis")["level"]
    np.testing.assert_array_equal(again, better["level"])
    other = fitted.get_samples(group_by_chain=True, seed=1, resample="psis")["level"]
    assert other.shape == (4, 1000) and not np.array_equal(other.reshape(-1), again)


def spread(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.5))
    level = numpyro.sample("level", dist.Normal(0, scale))
    numpyro.deterministic("rate", jnp.exp(level))
    numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "engine, integrate", [*thorough((LaplaceApproximation, "grid"), (LaplaceApproximation, "ccd")), (EP, "normal")]
)
def test_hyperparameters_are_weighted_with_the_field(engine, integrate):
    """The density of the scale is skewed, which a normal one with skewness follows: with one width the field moved by a
    quarter of a deviation."""
    y = np.array([0, 0, 1])
    u, level = np.linspace(-12, 4, 801)[:, None], np.linspace(-12, 5, 801)
    scale = np.exp(u)
    log_density = halfnorm.logpdf(scale, scale=1.5) + u + norm.logpdf(level, 0, scale)
    log_density = log_density + poisson.logpmf(y, np.exp(level)[:, None]).sum(-1)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = np.sum(weights * level)
    sd = np.sqrt(np.sum(weights * (level - mean) ** 2))
    fitted = run(engine, spread, y, integrate=integrate, num_samples=4000)
    plain = fitted.get_samples()
    gap = abs(plain["level"].mean() - mean) / sd
    if integrate == "normal":  # lighter in its tails, which the weights tell
        assert gap < 0.15
        with pytest.warns(UserWarning, match="The importance weights of draws .* cannot hold: Pareto k-hat"):
            fitted.get_samples(resample="psis")
        return
    better = fitted.get_samples(resample="psis")
    np.testing.assert_allclose(better["rate"], np.exp(better["level"]), rtol=1e-5)
    assert abs(better["level"].mean() - mean) / sd < 0.6 * gap
    np.testing.assert_allclose(better["level"].std(), sd, rtol=0.1)


@pytest.mark.thorough
def test_weights_that_cannot_hold_are_said():
    def heavy(y):
        level = numpyro.sample("level", dist.Normal(0, 100).expand([12]))
        numpyro.sample("y", dist.StudentT(1.0, level, 0.1), obs=y)

    fitted = run(LaplaceApproximation, heavy, np.linspace(-1.0, 1.0, 12))
    with pytest.warns(UserWarning, match=r"k-hat .* \(above 0.7.*Use get_samples\(\) without resample"):
        assert fitted.get_samples(resample="psis")["level"].shape == (1000, 12)


def test_few_draws_and_missing_values():
    def missing(y):
        level = numpyro.sample("level", dist.Normal(0, 2))
        mask = ~np.isnan(y)
        numpyro.sample("y", dist.Normal(level, 0.5), obs=jnp.where(mask, y, 0.0), obs_mask=mask)

    fitted = run(EP, missing, np.array([0.3, np.nan, 1.0]), num_samples=7)
    draws = fitted.get_samples(resample="psis")
    assert {name: value.shape[0] for name, value in draws.items()} == dict.fromkeys(fitted.get_samples(), 7)


def test_what_cannot_be_weighted_is_refused():
    fitted = run(EP, line, X, COUNTS)
    with pytest.raises(ValueError, match="resample must be one of 'psis', got 'sir'"):
        fitted.get_samples(resample="sir")

    def sparse(y):
        x = numpyro.sample("x", dist.Laplace(0, 1).expand([4]))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    with pytest.raises(RuntimeError, match="Leave it out"):
        run(EP, sparse, np.arange(4.0)).get_samples(resample="psis")
