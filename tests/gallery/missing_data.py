"""Measurement error, missing values and masks."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_ext.structure import Reason

from .catalogue import GAUSSIAN, Refusal, published


def _seen_with_error():
    rng = np.random.default_rng(100)
    x = rng.normal(size=24)
    return x + 0.3 * rng.normal(size=24), 0.7 * x + 0.4 * rng.normal(size=24)


@published("Stan user's guide: 6.1, measurement error, given slope", _seen_with_error, "a x", "sigma")
def error_in_covariate(x_seen, y):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("N", len(y)):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.sample("x_seen", dist.Normal(x, 0.3), obs=x_seen)
        numpyro.sample("y", dist.Normal(a + 0.7 * x, sigma), obs=y)


@published(
    "Stan user's guide: 6.1, Bayesian measurement error model",
    _seen_with_error,
    "mu_x x alpha",
    "beta sigma_x sigma",
    f"{GAUSSIAN} BilinearVG",
    is_slow=True,
)
def error_in_covariate_with_slope(x_seen, y):
    mu_x = numpyro.sample("mu_x", dist.Normal(0, 1))
    sigma_x = numpyro.sample("sigma_x", dist.HalfNormal(1))
    x = numpyro.sample("x", dist.Normal(mu_x, sigma_x).expand([len(y)]))
    numpyro.sample("x_seen", dist.Normal(x, 0.3), obs=x_seen)
    alpha = numpyro.sample("alpha", dist.Normal(0, 10))
    beta = numpyro.sample("beta", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(5))
    numpyro.sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)


def _divorces():
    rng = np.random.default_rng(101)
    age, marriage = rng.normal(size=(2, 20))
    sd = rng.uniform(0.1, 0.6, 20)
    return age, marriage, -0.6 * age + sd * rng.normal(size=20), sd


@published("Statistical Rethinking: 15.1, measurement error of the outcome", _divorces, "a bA bM D_true", "sigma")
def divorce_with_error(A, M, D_obs, D_sd):
    a = numpyro.sample("a", dist.Normal(0, 0.2))
    bA = numpyro.sample("bA", dist.Normal(0, 0.5))
    bM = numpyro.sample("bM", dist.Normal(0, 0.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1))
    mu = a + bA * A + bM * M
    D_true = numpyro.sample("D_true", dist.Normal(mu, sigma))
    numpyro.sample("D_obs", dist.Normal(D_true, D_sd), obs=D_obs)


def _milk():
    rng = np.random.default_rng(102)
    mass = rng.normal(size=24)
    neocortex = 0.6 * mass + 0.6 * rng.normal(size=24)
    kcal = 0.5 * neocortex - 0.5 * mass + 0.4 * rng.normal(size=24)
    return np.where(rng.uniform(size=24) < 0.3, np.nan, neocortex), mass, kcal


@published("Statistical Rethinking: 15.2, missing values of a covariate", _milk, "a nu bM B_impute", "bB sigma_B sigma")
def milk_imputation(B, M, K):
    a = numpyro.sample("a", dist.Normal(0, 0.5))
    nu = numpyro.sample("nu", dist.Normal(0, 0.5))
    bB = numpyro.sample("bB", dist.Normal(0, 0.5))
    bM = numpyro.sample("bM", dist.Normal(0, 0.5))
    sigma_B = numpyro.sample("sigma_B", dist.Exponential(1))
    sigma = numpyro.sample("sigma", dist.Exponential(1))
    missing = np.nonzero(np.isnan(B))[0]
    B_impute = numpyro.sample("B_impute", dist.Normal(nu, sigma_B).expand([len(missing)]).mask(False))
    B = jnp.asarray(B).at[missing].set(B_impute)
    numpyro.sample("B", dist.Normal(nu, sigma_B), obs=B)
    numpyro.sample("K", dist.Normal(a + bB * B + bM * M, sigma), obs=K)


def _titanic():
    rng = np.random.default_rng(103)
    group = rng.integers(0, 3, 40)
    age = np.array([-0.5, 0.0, 0.6])[group] + rng.normal(size=40)
    survived = rng.binomial(1, 1 / (1 + np.exp(0.5 * age)))
    return group, np.where(rng.uniform(size=40) < 0.2, np.nan, age), survived


@published("NumPyro: Bayesian imputation of ages", _titanic, "age_mu age_impute b_group", "age_sigma b_age")
def titanic_ages(group, age, survived):
    b_group = numpyro.sample("b_group", dist.Normal(0, 1).expand([3]))
    age_mu = numpyro.sample("age_mu", dist.Normal(0, 1).expand([3]))[group]
    age_sigma = numpyro.sample("age_sigma", dist.HalfNormal(1).expand([3]))[group]
    is_missing = np.isnan(age)
    hidden = np.nonzero(is_missing)[0]
    age_impute = numpyro.sample("age_impute", dist.Normal(age_mu[hidden], age_sigma[hidden]).mask(False))
    age = jnp.asarray(age).at[hidden].set(age_impute)
    numpyro.sample("age", dist.Normal(age_mu, age_sigma), obs=age)
    b_age = numpyro.sample("b_age", dist.Normal(0, 1))
    numpyro.sample("survived", dist.Bernoulli(logits=b_group[group] + b_age * age), obs=survived)


def _holes():
    rng = np.random.default_rng(104)
    x = rng.normal(size=30)
    y = 1.0 + x + 0.5 * rng.normal(size=30)
    return x, np.where(rng.uniform(size=30) < 0.2, np.nan, y)


@published("NumPyro: handlers, outcomes under a mask", _holes, "b", "sigma")
def masked_outcomes(x, y):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with handlers.mask(mask=~np.isnan(y)):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x, sigma), obs=np.nan_to_num(y))


@published("NumPyro: primitives, obs_mask", _holes, "b", "sigma")
def partly_observed(x, y):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(b[0] + b[1] * x, sigma), obs=np.nan_to_num(y), obs_mask=~np.isnan(y))


@published("Stan user's guide: 3.1, missing data as parameters", _holes, "b y_missing", "sigma")
def outcomes_as_parameters(x, y):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    mean = b[0] + b[1] * x
    seen = ~np.isnan(y)
    numpyro.sample("y_missing", dist.Normal(mean[~seen], sigma))
    numpyro.sample("y_seen", dist.Normal(mean[seen], sigma), obs=y[seen])


@published(
    "NumPyro: primitives, outcomes given with their holes", _holes, refusal=Refusal(Reason.DATA, "y", "not finite")
)
def forgotten_holes(x, y):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(b[0] + b[1] * x, sigma), obs=y)


@published(
    "Statistical Rethinking: 15.3, discrete missingness of cats",
    lambda: (np.arange(6) % 2, np.arange(6)),
    "alpha beta",
    "k",
)
def cats_and_singing(cat, notes):
    alpha = numpyro.sample("alpha", dist.Normal(0, 1))
    beta = numpyro.sample("beta", dist.Normal(0, 0.5))
    k = numpyro.sample("k", dist.Beta(2, 2))
    numpyro.sample("cat", dist.Bernoulli(k), obs=cat)
    numpyro.sample("notes", dist.Poisson(jnp.exp(alpha + beta * cat)), obs=notes)
