"""Series in time: walks, trends and seasons written without a scan."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

from .catalogue import published


def _returns():
    rng = np.random.default_rng(60)
    return (rng.normal(size=24) * np.exp(-2.0 + np.cumsum(0.2 * rng.normal(size=24))),)


def _walk(scale=0.3):
    rng = np.random.default_rng(61)
    return (np.cumsum(scale * rng.normal(size=24)) + 0.3 * rng.normal(size=24),)


def _monthly():
    rng = np.random.default_rng(62)
    t = np.arange(36)
    return t, 0.05 * t + np.sin(2 * np.pi * t / 12) + 0.2 * rng.normal(size=36)


@published("NumPyro: stochastic volatility", _returns, "s", "sigma nu")
def stochastic_volatility(returns):
    step_size = numpyro.sample("sigma", dist.Exponential(50.0))
    s = numpyro.sample("s", dist.GaussianRandomWalk(scale=step_size, num_steps=jnp.shape(returns)[0]))
    nu = numpyro.sample("nu", dist.Exponential(0.1))
    numpyro.sample("r", dist.StudentT(df=nu, loc=0.0, scale=jnp.exp(s)), obs=returns)


@published("Stan user's guide: 2.5, stochastic volatility", _returns, "mu h_std", "phi sigma")
def stochastic_volatility_from_noise(y):
    mu = numpyro.sample("mu", dist.Cauchy(0, 10))
    phi = numpyro.sample("phi", dist.Uniform(-1, 1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(5))
    h_std = numpyro.sample("h_std", dist.Normal(0, 1).expand([len(y)]))
    h = [mu + h_std[0] * sigma / jnp.sqrt(1 - phi**2)]
    for t in range(1, len(y)):
        h.append(mu + phi * (h[-1] - mu) + sigma * h_std[t])
    numpyro.sample("y", dist.Normal(0, jnp.exp(jnp.stack(h) / 2)), obs=y)


@published(
    "Bayesian Analysis of Time Series: a level of counts",
    lambda: (np.array([2, 4, 3, 6, 5]),),
    "level_0 level_1 level_2 level_3 level_4 level_5",
    "sigma",
)
def level_of_counts(y):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    level = numpyro.sample("level_0", dist.Normal(0.0, 5.0))
    for t in range(5):
        level = numpyro.sample(f"level_{t + 1}", dist.Normal(0.9 * level, sigma))
        numpyro.sample(f"y_{t}", dist.Poisson(jnp.exp(level)), obs=y[t])


@published("Stan user's guide: 2.1, autoregressive model", _walk, "alpha beta", "sigma")
def autoregression(y):
    alpha = numpyro.sample("alpha", dist.Normal(0, 10))
    beta = numpyro.sample("beta", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2))
    numpyro.sample("y", dist.Normal(alpha + beta * y[:-1], sigma), obs=y[1:])


@published("PyMC: forecasting with structural AR models", _monthly, "alpha beta fourier", "sigma")
def trend_and_season(t, y):
    alpha = numpyro.sample("alpha", dist.Normal(0, 5))
    beta = numpyro.sample("beta", dist.Normal(0, 0.5))
    fourier = numpyro.sample("fourier", dist.Normal(0, 1).expand([4]))
    angle = 2 * np.pi * t[:, None] * np.arange(1, 3) / 12
    season = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=1) @ fourier
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(alpha + beta * t + season, sigma), obs=y)


@published("PyMC: Air passengers, a Prophet-like model", _monthly, "k m delta", "tau sigma")
def piecewise_trend(t, y):
    s = np.linspace(3, 33, 6)
    a = (t[:, None] > s).astype(int)
    k = numpyro.sample("k", dist.Normal(0, 1))
    m = numpyro.sample("m", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    delta = numpyro.sample("delta", dist.Normal(0, tau).expand([6]))
    trend = (k + a @ delta) * t + (m + a @ (-s * delta))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(trend, sigma), obs=y)


@published("PyMC: inferring a walk seen with noise", _walk, "level", "sigma sigma_y")
def noisy_walk(y):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    sigma_y = numpyro.sample("sigma_y", dist.HalfNormal(1))
    level = numpyro.sample("level", dist.GaussianRandomWalk(sigma, num_steps=len(y)))
    numpyro.sample("y", dist.Normal(level, sigma_y), obs=y)


@published("NumPyro: time series forecasting, a walk from its steps", _walk, "steps_base start", "drift sigma")
def walk_from_transformed_steps(y):
    drift = numpyro.sample("drift", dist.HalfNormal(1))
    start = numpyro.sample("start", dist.Normal(0, 5))
    with handlers.reparam(config={"steps": TransformReparam()}):
        scaled = dist.transforms.AffineTransform(0, drift)
        steps = numpyro.sample("steps", dist.TransformedDistribution(dist.Normal(0, 1).expand([len(y)]), scaled))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(start + jnp.cumsum(steps), sigma), obs=y)


@published("PyMC: election forecasting, a walk backwards from the day", _walk, "final steps", "sd noise")
def walk_backwards(y):
    final = numpyro.sample("final", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(0.5))
    steps = numpyro.sample("steps", dist.Normal(0, sd).expand([len(y) - 1]))
    path = jnp.zeros(len(y)).at[-1].set(final)
    path = path.at[:-1].set(final + jnp.cumsum(steps[::-1])[::-1])
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))
    numpyro.sample("y", dist.Normal(path, noise), obs=y)


def _deaths():
    rng = np.random.default_rng(63)
    age, space, time = (rng.integers(0, n, 40) for n in (4, 3, 5))
    population = rng.integers(100, 300, 40)
    return age, space, time, population, rng.binomial(population, 0.1)


@published(
    "NumPyro: mortality by age, place and year",
    _deaths,
    "intercept alpha_age_decentered space_effect_decentered beta",
    "sigma_alpha sigma_space sigma_beta",
    is_slow=True,
)
def mortality(age, space, time, population, deaths=None):
    num_age, num_space, num_time = (len(np.unique(i)) for i in (age, space, time))
    intercept = numpyro.sample("intercept", dist.Normal(-2, 1))
    with handlers.reparam(config={"alpha_age": LocScaleReparam(0), "space_effect": LocScaleReparam(0)}):
        sigma_alpha = numpyro.sample("sigma_alpha", dist.HalfNormal(1.0))
        with numpyro.plate("age_groups", num_age - 1):
            alpha_age = numpyro.sample("alpha_age", dist.Normal(0, sigma_alpha))
        alpha_age_cum = jnp.cumsum(alpha_age)
        age_effect = jnp.pad(alpha_age_cum, (1, 0))
        sigma_space = numpyro.sample("sigma_space", dist.HalfNormal(1.0))
        with numpyro.plate("space_groups", num_space):
            space_effect = numpyro.sample("space_effect", dist.Normal(0, sigma_space))
    sigma_beta = numpyro.sample("sigma_beta", dist.HalfNormal(1.0))
    with numpyro.plate("year", num_time - 1, dim=-2), numpyro.plate("age_drift", num_age, dim=-1):
        beta = numpyro.sample("beta", dist.Normal(0, sigma_beta))
    beta_cum = jnp.pad(jnp.cumsum(beta, axis=-2), [(1, 0), (0, 0)])
    latent = intercept + age_effect[age] + space_effect[space] + beta_cum[time, age]
    with numpyro.plate("N", len(age)):
        numpyro.sample("deaths", dist.Binomial(population, logits=latent), obs=deaths)


@published("NumPyro: distributions, a Gaussian state space", _walk, "z", "noise")
def gaussian_state_space(y):
    transition = np.array([[1.0, 1.0], [0.0, 0.9]])
    z = numpyro.sample("z", dist.GaussianStateSpace(len(y), transition, scale_tril=np.array([[0.3, 0.0], [0.0, 0.1]])))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(z[:, 0], noise), obs=y)
