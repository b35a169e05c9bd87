"""Factors, components and embeddings: products of two blocks of unknowns."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.structure import Reason

from .catalogue import GAUSSIAN, Refusal, published

GAUSSIAN_OR_BILINEAR = f"{GAUSSIAN} BilinearVG"
NUM_ROWS, NUM_COLUMNS = 12, 4


def _table():
    rng = np.random.default_rng(90)
    z, w = rng.normal(size=(NUM_ROWS, 2)), rng.normal(size=(2, NUM_COLUMNS))
    return (z @ w + 0.3 * rng.normal(size=(NUM_ROWS, NUM_COLUMNS)),)


@published(
    "scikit-learn: factor analysis, as NumPyro params",
    _table,
    "z",
    "loadings noise",
    engines=GAUSSIAN,
)
def factor_analysis(y):
    loadings = numpyro.param("loadings", jnp.linspace(-1.0, 1.0, 2 * y.shape[1]).reshape(2, y.shape[1]))
    noise = numpyro.param("noise", jnp.ones(y.shape[1]), constraint=dist.constraints.positive)
    with numpyro.plate("rows", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(z @ loadings, noise).to_event(1), obs=y)


@published("TensorFlow Probability: probabilistic principal components", _table, "z", "w sigma", GAUSSIAN_OR_BILINEAR)
def principal_components(y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, y.shape[1]]).to_event(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(z @ w, sigma).to_event(1), obs=y)


def _ratings():
    rng = np.random.default_rng(91)
    user, film = rng.integers(0, NUM_ROWS, 60), rng.integers(0, 9, 60)
    u, v = rng.normal(size=(NUM_ROWS, 3)), rng.normal(size=(9, 3))
    return user, film, np.sum(u[user] * v[film], -1) + 0.3 * rng.normal(size=60)


@published(
    "PyMC: probabilistic matrix factorisation for recommendations",
    _ratings,
    "U",
    "V",
    GAUSSIAN_OR_BILINEAR,
    is_slow=True,
)
def matrix_factorisation(user, film, rating):
    U = numpyro.sample("U", dist.Normal(0, 1).expand([NUM_ROWS, 3]).to_event(2))
    V = numpyro.sample("V", dist.Normal(0, 1).expand([9, 3]).to_event(2))
    numpyro.sample("R", dist.Normal(jnp.sum(U[user] * V[film], axis=-1), 0.5), obs=rating)


@published(
    "PyMC: confirmatory factor analysis", _table, "tau eta", "loading Psi sd", f"{GAUSSIAN} BilinearVG", is_slow=True
)
def confirmatory_factor_analysis(y):
    tau = numpyro.sample("tau", dist.Normal(0, 1).expand([NUM_COLUMNS]))
    loading = numpyro.sample("loading", dist.Normal(1, 0.5).expand([2]))
    sd = numpyro.sample("sd", dist.HalfNormal(1).expand([2]))
    Psi = numpyro.sample("Psi", dist.HalfNormal(1))
    with numpyro.plate("people", y.shape[0]):
        eta = numpyro.sample("eta", dist.Normal(0, 1).expand([2]).to_event(1)) * sd
    nu = tau + jnp.stack([eta[:, 0], loading[0] * eta[:, 0], eta[:, 1], loading[1] * eta[:, 1]], axis=-1)
    numpyro.sample("y", dist.Normal(nu, Psi), obs=y)


def _spikes():
    rng = np.random.default_rng(92)
    x = rng.normal(size=(40, 6))
    return x, rng.poisson(np.exp(0.3 * x[:, 0] - 0.4 * x[:, 3]))


@published(
    "PyMC: Gaussian process latent variable model",
    _table,
    refusal=Refusal(Reason.STRUCTURE, "y", "covariance of site 'y' depends on"),
)
def latent_variable_process(y):
    z = numpyro.sample("z", dist.Normal(0, 1).expand([NUM_ROWS, 4]))
    squared = jnp.sum((z[:, None] - z) ** 2, -1)
    k = jnp.exp(-0.5 * squared) + 0.1 * jnp.eye(NUM_ROWS)
    with numpyro.plate("columns", y.shape[1]):
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(NUM_ROWS), k), obs=y.T)


@published(
    "NumPyro: Bayesian neural network",
    _spikes,
    refusal=Refusal(Reason.STRUCTURE, "y", "120 predictors"),
)
def neural_network(x, y):
    w1 = numpyro.sample("w1", dist.Normal(jnp.zeros((6, 10)), 1))
    w2 = numpyro.sample("w2", dist.Normal(jnp.zeros((10, 10)), 1))
    w3 = numpyro.sample("w3", dist.Normal(jnp.zeros((10, 1)), 1))
    z = jnp.tanh(jnp.tanh(x @ w1) @ w2) @ w3
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(z[:, 0], sigma), obs=y)


@published(
    "NumPyro: logistic network of one layer, by its last weights",
    _spikes,
    "w2",
    "w1 b1",
    is_slow=True,
    engines=GAUSSIAN,
)
def small_network(x, y):
    w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([6, 2]))
    b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([2]))
    w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([2]))
    numpyro.sample("y", dist.Bernoulli(logits=jnp.tanh(x @ w1 + b1) @ w2), obs=(y > 0).astype(int))


def _mediator():
    rng = np.random.default_rng(93)
    x = rng.normal(size=40)
    m = 0.5 * x + 0.5 * rng.normal(size=40)
    return x, m, m - 0.2 * x + 0.5 * rng.normal(size=40)


@published("PyMC: Bayesian mediation analysis", _mediator, "im iy a b cprime", "sm sy")
def mediation(x, m, y):
    im = numpyro.sample("im", dist.Normal(0, 10))
    iy = numpyro.sample("iy", dist.Normal(0, 10))
    a = numpyro.sample("a", dist.Normal(0, 10))
    b = numpyro.sample("b", dist.Normal(0, 10))
    cprime = numpyro.sample("cprime", dist.Normal(0, 10))
    sm = numpyro.sample("sm", dist.HalfCauchy(1))
    sy = numpyro.sample("sy", dist.HalfCauchy(1))
    numpyro.sample("m", dist.Normal(im + a * x, sm), obs=m)
    numpyro.sample("y", dist.Normal(iy + b * m + cprime * x, sy), obs=y)
    numpyro.deterministic("indirect effect", a * b)


def _instrument():
    rng = np.random.default_rng(94)
    q, u = rng.normal(size=(2, 40))
    e = q + u + 0.5 * rng.normal(size=40)
    return q, e, u + 0.5 * rng.normal(size=40)


@published(
    "Statistical Rethinking: 14.3, instruments, two outcomes together",
    _instrument,
    "aW aE bEW bQE",
    "Sigma Rho",
    is_slow=True,
)
def instrumental_variable(q, e, w):
    aW = numpyro.sample("aW", dist.Normal(0, 0.2))
    aE = numpyro.sample("aE", dist.Normal(0, 0.2))
    bEW = numpyro.sample("bEW", dist.Normal(0, 0.5))
    bQE = numpyro.sample("bQE", dist.Normal(0, 0.5))
    mu = jnp.stack([aW + bEW * e, aE + bQE * q], 1)
    Rho = numpyro.sample("Rho", dist.LKJ(2, 2))
    Sigma = numpyro.sample("Sigma", dist.Exponential(1).expand([2]))
    cov = jnp.outer(Sigma, Sigma) * Rho
    numpyro.sample("W,E", dist.MultivariateNormal(mu, cov), obs=jnp.stack([w, e], 1))


@published(
    "Stan user's guide: 1.15, seemingly unrelated regressions",
    _table,
    "beta",
    "L_Omega L_sigma",
    engines=GAUSSIAN,
    is_slow=True,
)
def seemingly_unrelated_regressions(y):
    x = np.column_stack([np.ones(NUM_ROWS), np.linspace(-1, 1, NUM_ROWS)])
    beta = numpyro.sample("beta", dist.Normal(0, 5).expand([NUM_COLUMNS, 2]))
    L_Omega = numpyro.sample("L_Omega", dist.LKJCholesky(NUM_COLUMNS, 4))
    L_sigma = numpyro.sample("L_sigma", dist.HalfCauchy(2.5).expand([NUM_COLUMNS]))
    with numpyro.plate("rows", NUM_ROWS):
        numpyro.sample("y", dist.MultivariateNormal(x @ beta.T, scale_tril=L_sigma[:, None] * L_Omega), obs=y)


def _cells():
    rng = np.random.default_rng(95)
    return (rng.poisson(2.0, (NUM_ROWS, NUM_COLUMNS)),)


@published("Pyro: Poisson factors of counts", _cells, "z", "w", GAUSSIAN_OR_BILINEAR)
def poisson_factors(y):
    w = numpyro.sample("w", dist.Normal(0, 0.5).expand([2, NUM_COLUMNS]))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([NUM_ROWS, 2]))
    numpyro.sample("y", dist.Poisson(jax.nn.softplus(z @ w + 1)), obs=y)
