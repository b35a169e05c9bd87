"""Times to an event, seen or censored."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from .catalogue import GAUSSIAN, published


def _times():
    rng = np.random.default_rng(30)
    x = rng.integers(0, 2, 40)
    time = rng.weibull(1.5, 40) * np.exp(1.0 - 0.5 * x)
    return x, np.minimum(time, 3.0), (time < 3.0).astype(int)


@published("Statistical Rethinking: 11.4, censoring and survival of cats", _times, "a")
def cat_adoptions(color_id, days, adopted):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([2]))
    lambda_ = 1 / jnp.exp(a)[color_id]
    numpyro.sample("seen", dist.Exponential(lambda_).mask(adopted == 1), obs=days)
    numpyro.factor("censored", jnp.where(adopted == 0, -lambda_ * days, 0))


@published("PyMC: survival analysis, Weibull accelerated failure times", _times, "beta", "alpha")
def weibull_failure_times(x, time, event):
    beta = numpyro.sample("beta", dist.Normal(0, 5).expand([2]))
    alpha = numpyro.sample("alpha", dist.Gamma(5, 5))
    eta = beta[0] + beta[1] * x
    scaled = (time * jnp.exp(-eta)) ** alpha
    hazard = jnp.log(alpha) - eta + (alpha - 1) * (jnp.log(time) - eta)
    numpyro.factor("likelihood", event * hazard - scaled)


@published("Stan user's guide: 4.3, censored data", _times, "b", "sigma")
def log_normal_with_right_censoring(x, time, event):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    fn = dist.RightCensoredDistribution(dist.Normal(b[0] + b[1] * x, sigma), 1 - event)
    numpyro.sample("log time", fn, obs=np.log(time))


def _intervals():
    x, time, event = _times()
    cut = np.arange(0, 3.0, 0.5)
    exposure = np.clip(time[:, None] - cut, 0, 0.5)
    died = (event[:, None] == 1) & (np.floor(time / 0.5)[:, None] == np.arange(len(cut)))
    return x, exposure, died.astype(int)


@published("PyMC: Bayesian survival analysis, piecewise hazards", _intervals, "beta log_hazard", "sd")
def piecewise_hazards(x, exposure, died):
    beta = numpyro.sample("beta", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    log_hazard = numpyro.sample("log_hazard", dist.GaussianRandomWalk(sd, num_steps=exposure.shape[1]))
    rate = jnp.exp(beta * x[:, None] + log_hazard) * (exposure + 1e-6)
    numpyro.sample("died", dist.Poisson(rate), obs=died)


@published("PyMC: frailty and survival", _intervals, "beta frailty", "hazard sd", GAUSSIAN)
def frailty(x, exposure, died):
    beta = numpyro.sample("beta", dist.Normal(0, 2))
    hazard = numpyro.sample("hazard", dist.Gamma(1, 1).expand([exposure.shape[1]]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("patients", len(x)):
        frailty = numpyro.sample("frailty", dist.Normal(0, sd))
    rate = hazard * jnp.exp(beta * x + frailty)[:, None] * (exposure + 1e-6)
    numpyro.sample("died", dist.Poisson(rate).to_event(2), obs=died)
