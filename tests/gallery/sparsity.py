"""Priors that shrink, and those that are typed against extremes: horseshoes, Laplace, Student-t, Cauchy, logistic."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.structure import Reason

from .catalogue import GAUSSIAN, INTEGRATED, Refusal, published

SPARSE = f"{INTEGRATED} StructuredMeanField"


def _few_of_many():
    rng = np.random.default_rng(110)
    x = rng.normal(size=(30, 5))
    return x, x @ np.array([2.0, 0, 0, -1.5, 0]) + 0.5 * rng.normal(size=30)


def _few_of_many_classes():
    x, y = _few_of_many()
    return x, (y > 0).astype(int)


def _overlapping_classes():
    rng = np.random.default_rng(111)
    x = rng.normal(size=(30, 5))
    return x, (x @ np.array([2.0, 0, 0, -1.5, 0]) + 1.5 * rng.logistic(size=30) > 0).astype(int)


@published("NumPyro: horseshoe regression", _few_of_many, "unscaled_betas", "lambdas tau prec_obs", GAUSSIAN)
def horseshoe(x, y):
    lambdas = numpyro.sample("lambdas", dist.HalfCauchy(jnp.ones(x.shape[1])))
    tau = numpyro.sample("tau", dist.HalfCauchy(jnp.ones(1)))
    unscaled = numpyro.sample("unscaled_betas", dist.Normal(0.0, jnp.ones(x.shape[1])))
    betas = numpyro.deterministic("betas", tau * lambdas * unscaled)
    prec = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
    numpyro.sample("y", dist.Normal(x @ betas, 1.0 / jnp.sqrt(prec)), obs=y)


@published("Stan case study: regularised horseshoe", _few_of_many_classes, "alpha z", "tau lambda_ c2", GAUSSIAN)
def regularised_horseshoe(x, y):
    alpha = numpyro.sample("alpha", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
    lambda_ = numpyro.sample("lambda_", dist.HalfCauchy(1).expand([x.shape[1]]))
    c2 = numpyro.sample("c2", dist.InverseGamma(2, 8))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([x.shape[1]]))
    shrunk = jnp.sqrt(c2 * lambda_**2 / (c2 + tau**2 * lambda_**2))
    numpyro.sample("y", dist.Bernoulli(logits=alpha + x @ (z * tau * shrunk)), obs=y)


@published("Park and Casella: the Bayesian lasso", _few_of_many, "beta", "sigma", SPARSE)
def lasso(x, y):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    beta = numpyro.sample("beta", dist.Laplace(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


@published("PyMC: Air passengers, Prophet with Laplace changes of slope", _few_of_many, "delta", "sigma", SPARSE)
def laplace_changes(x, y):
    t = np.linspace(0, 1, len(y))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    delta = numpyro.sample("delta", dist.Laplace(0, 0.5).expand([5]))
    bend = np.maximum(t[:, None] - np.linspace(0, 0.8, 5), 0)
    numpyro.sample("y", dist.Normal(bend @ delta, sigma), obs=y)


@published(
    "Gelman et al.: a weakly informative Cauchy prior for logistic regression",
    _overlapping_classes,
    "beta",
    engines=INTEGRATED,
)
def cauchy_logistic(x, y):
    beta = numpyro.sample("beta", dist.Cauchy(0, 2.5).expand([x.shape[1]]))
    numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


@published(
    "rstanarm: Student-t coefficients of a logistic regression",
    _overlapping_classes,
    "beta",
    engines=INTEGRATED,
)
def student_t_logistic(x, y):
    beta = numpyro.sample("beta", dist.StudentT(7, 0, 2.5).expand([x.shape[1]]))
    numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


@published(
    "Stan wiki: choice of priors, a learned scale of Laplace coefficients",
    _few_of_many,
    "a b",
    "tau sigma",
    INTEGRATED,
)
def lasso_with_a_learned_scale(x, y):
    a = numpyro.sample("a", dist.StudentT(3, 0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("columns", x.shape[1]):
        b = numpyro.sample("b", dist.Laplace(0, tau))
    numpyro.sample("y", dist.Normal(a + x @ b, sigma), obs=y)


@published("brms: a linear model with its default priors of intercept and scale", _few_of_many, "Intercept b", "sigma")
def brms_defaults(x, y):
    intercept = numpyro.sample("Intercept", dist.StudentT(3, 0, 2.5))
    sigma = numpyro.sample("sigma", dist.FoldedDistribution(dist.StudentT(3, 0, 2.5)))
    b = numpyro.sample("b", dist.Normal(0, 10).expand([5]))
    numpyro.sample("y", dist.Normal(intercept + (x - x.mean(0)) @ b, sigma), obs=y)


@published("brms: logistic priors of a logistic regression", _few_of_many_classes, "Intercept b")
def logistic_coefficients(x, y):
    intercept = numpyro.sample("Intercept", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Logistic(0, 1), sample_shape=(5,))
    numpyro.sample("y", dist.BernoulliLogits(intercept + x @ b), obs=y)


@published(
    "bambi: R2-D2 prior",
    _few_of_many,
    "z",
    "r2 phi sigma",
)
def r2d2(x, y):
    r2 = numpyro.sample("r2", dist.Beta(2, 2))
    phi = numpyro.sample("phi", dist.Dirichlet(jnp.ones(x.shape[1])))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([x.shape[1]]))
    beta = z * sigma * jnp.sqrt(phi * r2 / (1 - r2))
    numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


@published("PyMC: spike and slab", _few_of_many, refusal=Refusal(Reason.STRUCTURE, "xi", "discrete"))
def spike_and_slab(x, y):
    xi = numpyro.sample("xi", dist.Bernoulli(0.5).expand([x.shape[1]]))
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([x.shape[1]]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(x @ (xi * beta), sigma), obs=y)
