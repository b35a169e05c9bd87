"""Time series as users write them with ``numpyro.contrib.control_flow.scan`` and ``jax.lax.scan``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.contrib.control_flow import scan


def local_level(y: Any) -> None:
    drift = numpyro.sample("drift", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    first = numpyro.sample("first", dist.Normal(0.0, 10.0))

    def step(level: Any, value: Any) -> tuple[Any, Any]:
        level = numpyro.sample("level", dist.Normal(level, drift))
        numpyro.sample("y", dist.Normal(level, noise), obs=value)
        return level, level

    scan(step, first, y)


def local_linear_trend(y: Any) -> None:
    """The observations are outside, on the stacked states, and the slope moves as well."""
    scales = numpyro.sample("scales", dist.HalfNormal(1.0).expand([2]))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    first = numpyro.sample("first", dist.Normal(0.0, 5.0).expand([2]).to_event(1))

    def step(carry: Any, _: Any) -> tuple[Any, Any]:
        level, slope = carry
        level = numpyro.sample("level", dist.Normal(level + slope, scales[0]))
        slope = numpyro.sample("slope", dist.Normal(slope, scales[1]))
        return (level, slope), level

    _, levels = scan(step, (first[0], first[1]), None, length=len(y))
    numpyro.deterministic("twice", 2.0 * levels)
    numpyro.sample("y", dist.Normal(levels, noise), obs=y)


def smooth_trend(y: Any) -> None:
    """Two states and one innovation: their joint distribution at a step is singular."""
    scale = numpyro.sample("scale", dist.HalfNormal(0.2))

    def step(carry: Any, value: Any) -> tuple[Any, None]:
        level, slope = carry
        level = level + slope
        slope = numpyro.sample("slope", dist.Normal(slope, scale))
        numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=value)
        return (level, slope), None

    scan(step, (0.5, 0.0), y)


def seasonal_dummies(y: Any) -> None:
    """A local level and effects of four seasons that sum to zero up to noise."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0).expand([3]))
    level = numpyro.sample("level_0", dist.Normal(0.0, 5.0))
    season = numpyro.sample("season_0", dist.Normal(0.0, 2.0).expand([3]))

    def step(carry: Any, value: Any) -> tuple[Any, Any]:
        level, season = carry
        level = numpyro.sample("level", dist.Normal(level, sigma[0]))
        new = numpyro.sample("season", dist.Normal(-jnp.sum(season), sigma[1]))
        numpyro.sample("y", dist.Normal(level + new, sigma[2]), obs=value)
        return (level, jnp.concatenate([new[None], season[:-1]])), new

    scan(step, (level, season), y)


def trigonometric_season(y: Any, period: float = 6.0) -> None:
    angle = 2.0 * np.pi / period
    turn = jnp.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    start = numpyro.sample("start", dist.Normal(0.0, 2.0).expand([2]).to_event(1))

    def step(state: Any, value: Any) -> tuple[Any, None]:
        state = numpyro.sample("state", dist.Normal(turn @ state, 0.1 * sigma).to_event(1))
        numpyro.sample("y", dist.Normal(state[0], sigma), obs=value)
        return state, None

    scan(step, start, y)


def second_order(y: Any) -> None:
    """An AR(2) below Bernoulli observations."""
    phi = numpyro.sample("phi", dist.Uniform(-0.5, 0.9))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))

    def step(carry: Any, value: Any) -> tuple[Any, None]:
        last, before = carry
        x = numpyro.sample("x", dist.Normal(0.4 * last + phi * before, sigma))
        numpyro.sample("y", dist.Bernoulli(logits=x), obs=value)
        return (x, last), None

    scan(step, (0.0, 0.0), y)


def vector_autoregression(y: Any) -> None:
    """VAR(1) with correlated innovations, and observations of a mixture of the states."""
    loadings = jnp.array([[1.0, 0.0], [0.3, 1.0], [0.5, -0.5]])
    transition = jnp.array([[0.7, 0.1], [-0.2, 0.5]])
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    covariance = scale**2 * jnp.array([[1.0, 0.4], [0.4, 0.5]])
    start = numpyro.sample("start", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))

    def step(state: Any, values: Any) -> tuple[Any, None]:
        state = numpyro.sample("state", dist.MultivariateNormal(transition @ state, covariance))
        numpyro.sample("y", dist.Normal(loadings @ state, 0.5).to_event(1), obs=values)
        return state, None

    scan(step, start, y)


def innovations_by_lax(y: Any) -> None:
    """Innovations are one site outside; the recursion is JAX's own, and has moving-average terms."""
    phi = numpyro.sample("phi", dist.Uniform(-0.9, 0.9))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    white = numpyro.sample("white", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))

    def step(carry: Any, now: Any) -> tuple[Any, Any]:
        x, before = carry
        x = phi * x + sigma * (now + 0.4 * before)
        return (x, now), x

    x = jax.lax.scan(step, (jnp.zeros(()), jnp.zeros(())), white)[1]
    numpyro.sample("y", dist.StudentT(4.0, x, 0.3), obs=y)


def shared_level(y: Any) -> None:
    """One level for several series, each with a level of its own around it, and a covariate."""
    trend = numpyro.sample("trend", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))

    def step(carry: Any, value: Any) -> tuple[Any, None]:
        common, own = carry
        common = numpyro.sample("common", dist.Normal(common + 0.1 * trend, 0.3))
        with numpyro.plate("series", y.shape[1]):
            own = numpyro.sample("own", dist.Normal(0.5 * own, scale))
            numpyro.sample("y", dist.Normal(common + own, 0.5), obs=value)
        return (common, own), None

    scan(step, (0.0, jnp.zeros(y.shape[1])), y)


def stochastic_volatility(returns: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(-1.0, 1.0))
    phi = numpyro.sample("phi", dist.Uniform(0.5, 0.99))
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5))

    def step(h: Any, value: Any) -> tuple[Any, Any]:
        h = numpyro.sample("h", dist.Normal(mean + phi * (h - mean), sigma))
        numpyro.sample("y", dist.Normal(0.0, jnp.exp(h / 2.0)), obs=value)
        return h, h

    scan(step, mean, returns)


def conditioned_autoregression(y: Any) -> None:
    """Observations are given by a handler, and the recursion runs through them: a regression on their past."""
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
    constant = numpyro.sample("constant", dist.Normal(0.0, 1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))

    def step(last: Any, _: Any) -> tuple[Any, Any]:
        mean = constant + weight * last
        value = numpyro.sample("y", dist.Normal(mean, sigma))
        return value, mean

    with handlers.condition(data={"y": y[1:]}):
        _, means = scan(step, y[0], jnp.arange(len(y) - 1))
    numpyro.deterministic("means", means)


def holt_winters(y: Any, period: int = 4) -> None:
    """Exponential smoothing: states follow from the data, and only where they start is unknown."""
    smoothing = numpyro.sample("smoothing", dist.Beta(2.0, 2.0).expand([3]))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    level = numpyro.sample("level_0", dist.Normal(0.0, 3.0))
    trend = numpyro.sample("trend_0", dist.Normal(0.0, 1.0))
    season = numpyro.sample("season_0", dist.Normal(0.0, 1.0).expand([period]))

    def step(carry: Any, value: Any) -> tuple[Any, Any]:
        level, trend, season = carry
        mean = level + trend + season[0]
        numpyro.sample("y", dist.Normal(mean, noise), obs=value)
        new = level + trend + smoothing[0] * (value - mean)
        trend = trend + smoothing[1] * (new - level - trend)
        season = jnp.concatenate([season[1:], (season[0] + smoothing[2] * (value - mean))[None]])
        return (new, trend, season), mean

    scan(step, (level, trend, season), y)


def random_walk(y: Any) -> None:
    """No scan at all, but a sum over all earlier steps."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(scale, num_steps=len(y)))
    numpyro.sample("y", dist.Normal(walk, 1), obs=y)
