"""Regressions of counts, without groups."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from .catalogue import OF_PAIRS, published
from .regression import NO_VECTORS

# Ten island societies of Oceania: thousands of people, rate of contact (1 is high), kinds of tools.
_POPULATION = [1.1, 1.5, 3.6, 4.791, 7.4, 8.0, 9.2, 13.0, 17.5, 275.0]
_CONTACT = [0, 0, 0, 1, 1, 1, 1, 0, 1, 0]
_TOOLS = [13, 22, 24, 43, 33, 19, 40, 28, 55, 71]


def oceania():
    log_population = np.log(1000 * np.array(_POPULATION))
    standard = (log_population - log_population.mean()) / log_population.std()
    return standard, np.array(_CONTACT), np.array(_TOOLS)


def counts(seed=20, num_rows=40, num_columns=3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, num_columns))
    mean = np.exp(0.8 + x @ np.linspace(0.5, -0.5, num_columns))
    return rng, x, mean


def _poisson():
    rng, x, mean = counts()
    return x, rng.poisson(mean)


def _inflated():
    rng, x, mean = counts(21)
    return x, rng.poisson(mean) * rng.binomial(1, 0.7, len(mean))


def _exposed():
    rng, x, mean = counts(22)
    days = rng.choice([1, 7], len(mean))
    return x, np.log(days), rng.poisson(days * mean * rng.gamma(5, 0.2, len(mean)))


@published("Statistical Rethinking: 11.2, Oceanic tool complexity", oceania, "a b")
def oceanic_tools(P, cid, T):
    a = numpyro.sample("a", dist.Normal(3, 0.5).expand([2]))
    b = numpyro.sample("b", dist.Normal(0, 0.2).expand([2]))
    lambda_ = jnp.exp(a[cid] + b[cid] * P)
    numpyro.sample("T", dist.Poisson(lambda_), obs=T)


@published("Statistical Rethinking: 11.2, offsets for exposures", _exposed, "a b")
def poisson_with_exposure(x, log_days, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Poisson(jnp.exp(log_days + a + b * x[:, 0])), obs=y)


@published("PyMC: GLM, negative binomial regression", _exposed, "b", "reciprocal_phi")
def negative_binomial(x, log_exposure, y):
    b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
    phi = numpyro.sample("reciprocal_phi", dist.Exponential(1.0))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(x @ b + log_exposure), 1.0 / phi), obs=y)


@published("NumPyro: zero-inflated Poisson regression", _inflated, "b", "gate")
def zero_inflated_poisson(x, y):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    gate = numpyro.sample("gate", dist.Beta(2.0, 4.0))
    numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(x @ b)), obs=y)


@published("Statistical Rethinking: 12.2, zero-inflated outcomes", lambda: (_inflated()[1],), "al", "ap")
def monks(y):
    ap = numpyro.sample("ap", dist.Normal(-1.5, 1))
    al = numpyro.sample("al", dist.Normal(1, 0.5))
    p = jax.scipy.special.expit(ap)
    numpyro.sample("y", dist.ZeroInflatedPoisson(p, jnp.exp(al)), obs=y)


@published("bambi: zero-inflated models with a regression of the zeros", _inflated, "b g", engines=OF_PAIRS)
def zeros_with_their_regression(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
    g = numpyro.sample("g", dist.Normal(0, 1).expand([2]))
    numpyro.sample("y", dist.ZeroInflatedPoisson(jax.nn.sigmoid(g[0] + g[1] * x[:, 0]), jnp.exp(x @ b)), obs=y)


@published("bambi: hurdle models", _inflated, "b", "psi")
def hurdle_poisson(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
    psi = numpyro.sample("psi", dist.Beta(2, 2))
    numpyro.sample("y", dist.HurdlePoisson(psi, jnp.exp(x @ b)), obs=y)


def _putts():
    feet = np.array([2, 3, 4, 5, 6, 8, 10, 12, 15, 20])
    tries = np.array([144, 69, 40, 36, 33, 24, 20, 20, 17, 15]) * 2
    rng = np.random.default_rng(23)
    return feet, tries, rng.binomial(tries, 1 / (1 + np.exp(-2.2 + 0.26 * feet)))


@published("Stan case study: golf putting, logistic regression", _putts, "a b")
def golf_logistic(x, n, y):
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    numpyro.sample("y", dist.Binomial(n, jax.nn.sigmoid(a + b * x)), obs=y)


def _overdispersed():
    rng, x, mean = counts(24)
    total = np.full(len(mean), 15)
    p = rng.beta(4 / (1 + np.exp(-x[:, 0])), 4 - 4 / (1 + np.exp(-x[:, 0])))
    return (x[:, 0] > 0).astype(int), total, rng.binomial(total, p)


@published("Statistical Rethinking: 12.1, over-dispersed counts", _overdispersed, "a", "phi")
def beta_binomial_admissions(gid, N, A):
    a = numpyro.sample("a", dist.Normal(0, 1.5).expand([2]))
    phi = numpyro.sample("phi", dist.Exponential(1))
    theta = numpyro.deterministic("theta", phi + 2)
    pbar = jax.nn.sigmoid(a[gid])
    numpyro.sample("A", dist.BetaBinomial(pbar * theta, (1 - pbar) * theta, N), obs=A)


def _tables():
    rng = np.random.default_rng(25)
    x = rng.normal(size=(20, 2))
    probs = np.exp(x @ rng.normal(size=(2, 3)))
    return x, np.array([rng.multinomial(12, p / p.sum()) for p in probs])


@published("bambi: categorical regression, counts by category", _tables, "beta", engines=NO_VECTORS)
def multinomial_regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2, 3]).to_event(2))
    numpyro.sample("y", dist.Multinomial(12, logits=x @ beta), obs=y)


@published("Statistical Rethinking: 11.3, multinomial in disguise as Poisson", _tables, "a b")
def multinomial_as_poisson(x, y):
    a = numpyro.sample("a", dist.Normal(0, 1.5).expand([3]))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
    for k in range(3):
        numpyro.sample(f"y{k}", dist.Poisson(jnp.exp(a[k] + b[k] * x[:, 0])), obs=y[:, k])


@published("Stan user's guide: 1.12, truncated counts", lambda: (_poisson()[0], _poisson()[1] + 1), "b")
def counts_above_zero(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
    rate = jnp.exp(x @ b)
    numpyro.sample("y", dist.Poisson(rate), obs=y)
    numpyro.factor("above zero", -jnp.log1p(-jnp.exp(-rate)))
