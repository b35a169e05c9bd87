"""Series in time whose steps are written with a scan."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.reparam import LocScaleReparam

from .catalogue import INTEGRATED, published


def _series(seed=70, scale=0.3):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(np.cumsum(scale * rng.normal(size=24)) + 0.4 * rng.normal(size=24)),)


def _quarterly():
    rng = np.random.default_rng(71)
    t = np.arange(24)
    return (jnp.asarray(0.05 * t + np.tile([0.6, -0.2, 0.1, -0.5], 6) + 0.2 * rng.normal(size=24)),)


def _two_series():
    return (jnp.asarray(np.random.default_rng(72).normal(size=(20, 2))),)


def _table():
    rng = np.random.default_rng(73)
    return (np.cumsum(0.2 * rng.normal(size=(20, 3)), axis=0) + 0.3 * rng.normal(size=(20, 3)),)


def _regression_in_time():
    rng = np.random.default_rng(74)
    x = rng.normal(size=(24, 2))
    return x, np.sum(x * np.cumsum(0.2 * rng.normal(size=(24, 2)), axis=0), axis=1) + 0.3 * rng.normal(size=24)


def _positive():
    rng = np.random.default_rng(75)
    return (5.0 + np.cumsum(0.3 * np.abs(rng.normal(size=20))),)


@published("NumPyro: control flow, a Gaussian hidden Markov model", _series, "x_0 x")
def gaussian_hidden_markov(y):
    def transition(x_prev, y_curr):
        x_curr = numpyro.sample("x", dist.Normal(x_prev, 1))
        y_curr = numpyro.sample("y", dist.Normal(x_curr, 1), obs=y_curr)
        return x_curr, (x_curr, y_curr)

    x0 = numpyro.sample("x_0", dist.Normal(0, 1))
    scan(transition, x0, y, length=len(y))


@published("NumPyro: AR2 process", _series, "alpha_1 alpha_2 const", "sigma")
def second_order_process(y):
    alpha_1 = numpyro.sample("alpha_1", dist.Normal(0, 1))
    alpha_2 = numpyro.sample("alpha_2", dist.Normal(0, 1))
    const = numpyro.sample("const", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))

    def transition(carry, _):
        y_prev, y_prev_prev = carry
        m_t = const + alpha_1 * y_prev + alpha_2 * y_prev_prev
        y_t = numpyro.sample("y", dist.Normal(m_t, sigma))
        return (y_t, y_prev), m_t

    with handlers.condition(data={"y": y[2:]}):
        _, mu = scan(transition, (y[1], y[0]), jnp.arange(len(y) - 2))
    numpyro.deterministic("mu", mu)


@published("NumPyro: VAR2 process", _two_series, "c Phi1 Phi2", "sigma L_omega")
def vector_process(y):
    num_series = y.shape[1]
    c = numpyro.sample("c", dist.Normal(0, 1).expand([num_series]).to_event(1))
    phi_1 = numpyro.sample("Phi1", dist.Normal(0, 1).expand([num_series, num_series]).to_event(2))
    phi_2 = numpyro.sample("Phi2", dist.Normal(0, 1).expand([num_series, num_series]).to_event(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0).expand([num_series]).to_event(1))
    correlation = numpyro.sample("L_omega", dist.LKJCholesky(num_series, 1.0))
    scale_tril = sigma[..., None] * correlation

    def transition(carry, _):
        before, long_before = carry
        mean = c + jnp.dot(phi_1, before) + jnp.dot(phi_2, long_before)
        now = numpyro.sample("y", dist.MultivariateNormal(mean, scale_tril=scale_tril))
        return (now, before), mean

    with handlers.condition(data={"y": y[2:]}):
        scan(transition, (y[1], y[0]), jnp.arange(2, len(y)))


@published(
    "NumPyro: Holt-Winters exponential smoothing",
    _quarterly,
    "level_init trend_init seasonality_init",
    "level_smoothing trend_smoothing seasonality_smoothing noise",
)
def holt_winters(y, n_seasons=4, future=0):
    num_steps = y.shape[0]
    level_smoothing = numpyro.sample("level_smoothing", dist.Beta(1, 1))
    trend_smoothing = numpyro.sample("trend_smoothing", dist.Beta(1, 1))
    seasonality_smoothing = numpyro.sample("seasonality_smoothing", dist.Beta(1, 1))
    adjusted = seasonality_smoothing * (1 - level_smoothing)
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    level_init = numpyro.sample("level_init", dist.Normal(0, 1))
    trend_init = numpyro.sample("trend_init", dist.Normal(0, 1))
    with numpyro.plate("n_seasons", n_seasons):
        seasonality_init = numpyro.sample("seasonality_init", dist.Normal(0, 1))

    def transition(carry, t):
        level_0, trend_0, season_0 = carry
        is_past = t < num_steps
        updated = level_smoothing * (y[t] - season_0[0]) + (1 - level_smoothing) * (level_0 + trend_0)
        level = jnp.where(is_past, updated, level_0)
        trend = jnp.where(is_past, trend_smoothing * (level - level_0) + (1 - trend_smoothing) * trend_0, trend_0)
        season = adjusted * (y[t] - (level_0 + trend_0)) + (1 - adjusted) * season_0[0]
        season = jnp.where(is_past, season, season_0[0])
        mu = level_0 + jnp.where(is_past, 1, t - num_steps + 1) * trend_0 + season_0[0]
        pred = numpyro.sample("pred", dist.Normal(mu, noise))
        return (level, trend, jnp.concatenate([season_0[1:], season[None]], axis=0)), pred

    with handlers.condition(data={"pred": y}):
        scan(transition, (level_init, trend_init, seasonality_init), jnp.arange(num_steps + future))


@published(
    "NumPyro: hierarchical forecasting, a level per station",
    _table,
    "drift_decentered offset",
    "drift_scale sigma",
)
def hierarchical_forecasting(y):
    num_steps, num_series = y.shape
    drift_scale = numpyro.sample("drift_scale", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    offset = numpyro.sample("offset", dist.Normal(0, 1).expand([num_series]))
    time, series = numpyro.plate("time", num_steps, dim=-2), numpyro.plate("series", num_series, dim=-1)
    with series, time, handlers.reparam(config={"drift": LocScaleReparam(centered=0)}):
        drift = numpyro.sample("drift", dist.Normal(0, drift_scale))

    def transition(level, t):
        level = level + drift[t]
        return level, level

    _, levels = scan(transition, jnp.zeros(num_series), jnp.arange(num_steps))
    with series, time:
        numpyro.sample("y", dist.Normal(offset + levels, sigma), obs=y)


@published("NumPyro forum: a latent AR(2) by lax.scan", _series, "white", "beta_1 beta_2 tau sigma")
def latent_second_order_process(y):
    beta_1 = numpyro.sample("beta_1", dist.Normal(0, 0.3))
    beta_2 = numpyro.sample("beta_2", dist.Normal(0, 0.3))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    white = numpyro.sample("white", dist.Normal(0, 1).expand([len(y)]))

    def step(carry, noise):
        before, long_before = carry
        now = beta_1 * before + beta_2 * long_before + tau * noise
        return (now, before), now

    _, z = lax.scan(step, (0.0, 0.0), white)
    numpyro.sample("y", dist.Normal(z, sigma), obs=y)


@published("TensorFlow Probability: structural series, local level", _series, "level_0 level", "scale noise")
def structural_level(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))

    def step(level, value):
        level = numpyro.sample("level", dist.Normal(level, scale))
        numpyro.sample("y", dist.Normal(level, noise), obs=value)
        return level, level

    scan(step, numpyro.sample("level_0", dist.Normal(0, 10)), y)


@published(
    "TensorFlow Probability: structural series, trend and season",
    _quarterly,
    "level_0 slope_0 season_0 level slope season",
    "scale noise",
)
def structural_trend_and_season(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([3]))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    level_0 = numpyro.sample("level_0", dist.Normal(0, 5))
    slope_0 = numpyro.sample("slope_0", dist.Normal(0, 1))
    season_0 = numpyro.sample("season_0", dist.Normal(0, 1).expand([3]))

    def step(carry, value):
        level, slope, season = carry
        level = numpyro.sample("level", dist.Normal(level + slope, scale[0]))
        slope = numpyro.sample("slope", dist.Normal(slope, scale[1]))
        now = numpyro.sample("season", dist.Normal(-season.sum(), scale[2]))
        numpyro.sample("y", dist.Normal(level + now, noise), obs=value)
        return (level, slope, jnp.concatenate([now[None], season[:-1]])), None

    scan(step, (level_0, slope_0, season_0), y)


@published("PyMC: regression with coefficients that walk", _regression_in_time, "beta_0 beta", "scale noise")
def coefficients_that_walk(x, y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    beta_0 = numpyro.sample("beta_0", dist.Normal(0, 1).expand([2]).to_event(1))

    def step(beta, now):
        covariates, value = now
        beta = numpyro.sample("beta", dist.Normal(beta, scale).to_event(1))
        numpyro.sample("y", dist.Normal(covariates @ beta, noise), obs=value)
        return beta, beta

    scan(step, beta_0, (x, y))


@published("Stan user's guide: 2.5, stochastic volatility step by step", _series, "h mu", "phi sigma")
def volatility_step_by_step(y):
    mu = numpyro.sample("mu", dist.Cauchy(0, 10))
    phi = numpyro.sample("phi", dist.Uniform(-1, 1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(5))

    def step(h, value):
        h = numpyro.sample("h", dist.Normal(mu + phi * (h - mu), sigma))
        numpyro.sample("y", dist.Normal(0, jnp.exp(h / 2)), obs=value)
        return h, h

    scan(step, mu, y)


@published(
    "NumPyro: time series forecasting, seasonal with global trend",
    _positive,
    "coef_trend",
    "sigma pow_trend_beta level_sm",
    engines=INTEGRATED,
)
def global_trend(y):
    sigma = numpyro.sample("sigma", dist.HalfCauchy(1))
    coefficient = numpyro.sample("coef_trend", dist.Cauchy(0, 1))
    power = 1.5 * numpyro.sample("pow_trend_beta", dist.Beta(1, 1)) - 0.5
    smoothing = numpyro.sample("level_sm", dist.Beta(1, 2))

    def step(level, value):
        expected = jnp.clip(level + coefficient * level**power, 0)
        numpyro.sample("y", dist.StudentT(10, expected, sigma), obs=value)
        return jnp.clip(smoothing * value + (1 - smoothing) * level, 0), expected

    scan(step, y[0], y[1:])
