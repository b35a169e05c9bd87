"""Regressions of real, binary and categorical outcomes, without groups."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm

from .catalogue import OF_PAIRS, published

NO_VECTORS = "EP LaplaceApproximation VariationalGaussian"
NUM_ROWS = 40


def _numbers(seed=0, num_columns=2):
    rng = np.random.default_rng(seed)
    return rng, rng.normal(size=(NUM_ROWS, num_columns))


def _line(scale=0.5):
    rng, x = _numbers(1)
    return x[:, 0], x[:, 1], 0.5 + x @ np.array([1.0, -0.7]) + scale * rng.normal(size=NUM_ROWS)


def _binary():
    rng, x = _numbers(2, 3)
    return x, rng.binomial(1, 1 / (1 + np.exp(-x @ np.array([1.0, -1.0, 0.5]))))


def _classes():
    rng, x = _numbers(3, 2)
    return x, np.argmax(x @ rng.normal(size=(2, 3)) + rng.gumbel(size=(NUM_ROWS, 3)), axis=1)


def _ordered(num_levels=4):
    rng, x = _numbers(4, 3)
    latent = x @ np.array([1.0, -0.5, 0.2]) + rng.logistic(size=NUM_ROWS)
    return x, np.digitize(latent, np.linspace(-1.5, 1.5, num_levels - 1))


@published("NumPyro: Bayesian regression using NumPyro", _line, "a bM bA", "sigma")
def divorce(marriage, age, divorce=None):
    a = numpyro.sample("a", dist.Normal(0.0, 0.2))
    bM = numpyro.sample("bM", dist.Normal(0.0, 0.5))
    bA = numpyro.sample("bA", dist.Normal(0.0, 0.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    mu = a + bM * marriage + bA * age
    numpyro.sample("obs", dist.Normal(mu, sigma), obs=divorce)


def _heights():
    rng = np.random.default_rng(5)
    return (rng.normal(154, 8, 50),)


@published("Statistical Rethinking: 4.3, a Gaussian model of height", _heights, "mu", "sigma")
def heights(height):
    mu = numpyro.sample("mu", dist.Normal(178, 20))
    sigma = numpyro.sample("sigma", dist.Uniform(0, 50))
    numpyro.sample("height", dist.Normal(mu, sigma), obs=height)


def _heights_and_weights():
    rng = np.random.default_rng(6)
    weight = rng.normal(45, 6, 50)
    return weight, 154 + 0.9 * (weight - weight.mean()) + rng.normal(0, 5, 50)


@published("Statistical Rethinking: 4.4, linear prediction", _heights_and_weights, "a", "b sigma")
def heights_and_weights(weight, height=None):
    a = numpyro.sample("a", dist.Normal(178, 20))
    b = numpyro.sample("b", dist.LogNormal(0, 1))
    sigma = numpyro.sample("sigma", dist.Uniform(0, 50))
    mu = numpyro.deterministic("mu", a + b * (weight - weight.mean()))
    numpyro.sample("height", dist.Normal(mu, sigma), obs=height)


def _rugged():
    rng = np.random.default_rng(7)
    continent, rugged = rng.integers(0, 2, 40), rng.uniform(0, 1, 40)
    return continent, rugged, 1 + 0.1 * continent + 0.2 * (rugged - 0.2) + 0.1 * rng.normal(size=40)


@published("Statistical Rethinking: 8.1, building an interaction", _rugged, "a b", "sigma")
def ruggedness(cid, rugged_std, log_gdp_std=None):
    a = numpyro.sample("a", dist.Normal(1, 0.1).expand([2]))
    b = numpyro.sample("b", dist.Normal(0, 0.3).expand([2]))
    sigma = numpyro.sample("sigma", dist.Exponential(1))
    mu = a[cid] + b[cid] * (rugged_std - 0.215)
    numpyro.sample("log_gdp_std", dist.Normal(mu, sigma), obs=log_gdp_std)


def _basis():
    rng = np.random.default_rng(8)
    day = np.linspace(0, 1, 30)
    basis = np.exp(-0.5 * ((day[:, None] - np.linspace(0, 1, 6)) / 0.15) ** 2)
    return basis, 100 + basis @ rng.normal(0, 5, 6) + rng.normal(size=30)


@published("Statistical Rethinking: 4.5, splines of the cherry blossom", _basis, "a w", "sigma")
def cherry_blossom(basis, day):
    a = numpyro.sample("a", dist.Normal(100, 10))
    w = numpyro.sample("w", dist.Normal(0, 10).expand([basis.shape[1]]))
    sigma = numpyro.sample("sigma", dist.Exponential(1))
    mu = numpyro.deterministic("mu", a + basis @ w)
    numpyro.sample("D", dist.Normal(mu, sigma), obs=day)


def _outliers():
    rng, x = _numbers(9, 2)
    return x, x @ np.array([1.0, 2.0]) + 0.3 * rng.standard_t(3, NUM_ROWS)


@published("PyMC: GLM, robust linear regression", _outliers, "b a", "sigma nu")
def robust_regression(x, y):
    b = numpyro.sample("b", dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1))
    a = numpyro.sample("a", dist.Normal(0.0, 10.0))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.0))
    nu = numpyro.sample("nu", dist.Gamma(2.0, 0.1))
    numpyro.sample("y", dist.StudentT(nu, a + x @ b, sigma), obs=y)


def _two_groups():
    rng = np.random.default_rng(10)
    return np.repeat([0, 1], 20), np.concatenate([rng.normal(101, 3, 20), rng.normal(100, 2, 20)])


@published("PyMC: Bayesian estimation supersedes the t-test", _two_groups, "group_mean", "group_std nu")
def two_groups(group, y):
    with numpyro.plate("groups", 2):
        group_mean = numpyro.sample("group_mean", dist.Normal(100, 10))
        group_std = numpyro.sample("group_std", dist.Uniform(1, 10))
    nu = numpyro.sample("nu", dist.Exponential(1 / 29.0)) + 1
    numpyro.deterministic("difference of means", group_mean[0] - group_mean[1])
    numpyro.sample("y", dist.StudentT(nu, group_mean[group], group_std[group]), obs=y)


@published("bambi: quantile regression", _line, "b", "sigma")
def quantile_regression(x1, x2, y):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([3]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    mu = b[0] + b[1] * x1 + b[2] * x2
    numpyro.sample("y", dist.AsymmetricLaplaceQuantile(mu, sigma, 0.9), obs=y)


@published("PyMC: truncated regression", lambda: (*_line()[:2], np.abs(_line()[2])), "slope intercept", "sigma")
def truncated_regression(x, unused, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.TruncatedNormal(slope * x + intercept, sigma, low=0.0), obs=y)


def _censored():
    x, _, y = _line()
    return x, np.maximum(y, 0.0)


@published("PyMC: censored regression (tobit)", _censored, "slope intercept", "sigma")
def tobit(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    mu = slope * x + intercept
    below = jnp.asarray(y <= 0.0)
    seen = dist.Normal(mu, sigma).log_prob(y)
    hidden = norm.logcdf(0.0, mu, sigma)
    numpyro.factor("y", jnp.where(below, hidden, seen))


@published("bambi: distributional models, location and scale", _line, "a b g", engines=OF_PAIRS)
def location_and_scale(x, unused, y):
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 2))
    g = numpyro.sample("g", dist.Normal(0, 1).expand([2]))
    numpyro.sample("y", dist.Normal(a + b * x, jnp.exp(g[0] + g[1] * x)), obs=y)


def _two_lines():
    rng = np.random.default_rng(120)
    return (np.concatenate([rng.normal(-2, 1, 15), rng.normal(2, 1, 15)]),)


@published("Bayesian Data Analysis: 22.2, mixture of two regressions", _two_lines, "b", "p", "LaplaceApproximation")
def two_regressions(y):
    x = np.linspace(-1, 1, len(y))
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2, 2]))
    p = numpyro.sample("p", dist.Beta(2, 2))
    parts = jnp.stack([b[0, 0] + b[0, 1] * x, b[1, 0] + b[1, 1] * x], -1)
    weights = dist.Categorical(probs=jnp.stack([p, 1 - p]))
    numpyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(parts, 0.5)), obs=y)


def _rates():
    rng, x = _numbers(11, 2)
    mean = 1 / (1 + np.exp(-0.8 * x[:, 0]))
    return x, np.clip(rng.beta(8 * mean, 8 * (1 - mean)), 0.01, 0.99)


@published("bambi: beta regression", _rates, "b", "kappa")
def beta_regression(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([x.shape[1]]))
    kappa = numpyro.sample("kappa", dist.HalfNormal(20))
    mu = jax.nn.sigmoid(x @ b)
    numpyro.sample("y", dist.Beta(mu * kappa, (1 - mu) * kappa), obs=y)


def _waiting():
    rng, x = _numbers(12, 2)
    return x, rng.gamma(3.0, np.exp(0.3 + x @ np.array([0.5, -0.2])) / 3.0)


@published("bambi: Wald and gamma regression", _waiting, "b a", "shape")
def gamma_regression(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([x.shape[1]]))
    a = numpyro.sample("a", dist.Normal(0, 1))
    shape = numpyro.sample("shape", dist.HalfCauchy(5))
    mean = jnp.exp(a + jnp.dot(x, b))
    numpyro.sample("y", dist.Gamma(shape, shape / mean), obs=y)


# Temperature at launch and whether an O-ring was damaged, for the shuttle flights before Challenger.
_FAHRENHEIT = [66, 70, 69, 68, 67, 72, 73, 70, 57, 63, 70, 78, 67, 53, 67, 75, 70, 81, 76, 79, 75, 76, 58]
_DAMAGED = [0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1]


@published(
    "Bayesian Methods for Hackers: Challenger",
    lambda: (np.array(_FAHRENHEIT), np.array(_DAMAGED)),
    "alpha beta",
)
def challenger(temperature, damaged=None):
    alpha = numpyro.sample("alpha", dist.Normal(0, 10))
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    centred = temperature - temperature.mean()
    p = numpyro.deterministic("p", 1.0 / (1.0 + jnp.exp(beta * centred + alpha)))
    numpyro.sample("damaged", dist.Bernoulli(p), obs=damaged)


@published(
    "Bayesian Data Analysis: 3.7, a bioassay experiment",
    lambda: (np.array([-0.86, -0.3, -0.05, 0.73]), 5, np.array([0, 1, 3, 5])),
    "alpha beta",
)
def bioassay(dose, animals, deaths):
    alpha = numpyro.sample("alpha", dist.Normal(0, 2))
    beta = numpyro.sample("beta", dist.Normal(10, 10))
    numpyro.sample("deaths", dist.Binomial(animals, logits=alpha + beta * dose), obs=deaths)


@published("Stan user's guide: 1.5, logistic and probit regression", _binary, "beta")
def probit_regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 5).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(x @ beta)), obs=y)


@published("NumPyro: subsampling with a plate, all rows", lambda: tuple(map(jnp.asarray, _binary())), "b")
def subsample_of_all(x, y):
    b = numpyro.sample("b", dist.Normal(jnp.zeros(x.shape[1]), jnp.ones(x.shape[1])).to_event(1))
    with numpyro.plate("N", x.shape[0], subsample_size=None) as index:
        numpyro.sample("obs", dist.Bernoulli(logits=(x @ b)[index]), obs=y[index])


@published("Statistical Rethinking: 12.3, ordered categorical outcomes", _ordered, "b", "c_y")
def ordinal_regression(x, y):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    cut = numpyro.sample(
        "c_y", dist.TransformedDistribution(dist.Dirichlet(jnp.ones(4)), dist.transforms.SimplexToOrderedTransform(0.0))
    )
    numpyro.sample("y", dist.OrderedLogistic(x @ b, cut), obs=y)


def _trolley():
    x, y = _ordered()
    return np.digitize(x[:, 1], [-0.5, 0.5]), x[:, 0], y


@published("Statistical Rethinking: 12.4, ordered categorical predictors", _trolley, "bA bE", "cutpoints delta")
def ordered_predictor(education, action, response):
    bA = numpyro.sample("bA", dist.Normal(0, 1))
    bE = numpyro.sample("bE", dist.Normal(0, 1))
    delta = numpyro.sample("delta", dist.Dirichlet(jnp.repeat(2, 2)))
    delta_j = jnp.pad(delta, (1, 0))
    steps = jnp.sum(jnp.where(jnp.arange(3) <= education[..., None], delta_j, 0), -1)
    ordered = dist.transforms.OrderedTransform()
    cutpoints = numpyro.sample("cutpoints", dist.TransformedDistribution(dist.Normal(0, 1.5).expand([3]), ordered))
    numpyro.sample("R", dist.OrderedLogistic(bE * steps + bA * action, cutpoints), obs=response)


@published("Stan user's guide: 1.6, multi-logit regression", _classes, "beta", engines=NO_VECTORS)
def multi_logit(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 5).expand([x.shape[1], 3]).to_event(2))
    numpyro.sample("y", dist.Categorical(logits=x @ beta), obs=y)


@published("Stan user's guide: 1.6, identifiability of multi-logit", _classes, "beta", engines=NO_VECTORS)
def multi_logit_with_pivot(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 5).expand([x.shape[1], 2]).to_event(2))
    logits = jnp.concatenate([jnp.zeros((x.shape[0], 1)), x @ beta], axis=-1)
    numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


@published("Statistical Rethinking: 11.3, multinomial and categorical models", _classes, "a b", engines=NO_VECTORS)
def career_choice(x, career):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([2]))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]))
    scores = jnp.stack([a[0] + b[0] * x[:, 0], a[1] + b[1] * x[:, 0], jnp.zeros(len(x))], axis=-1)
    numpyro.sample("career", dist.Categorical(probs=jax.nn.softmax(scores, axis=-1)), obs=career)


def _incomes():
    rng = np.random.default_rng(41)
    income = np.array([1.0, 2.0, 5.0])
    return income, rng.choice(3, size=40, p=np.exp(0.5 * income) / np.exp(0.5 * income).sum())


@published("Statistical Rethinking: 11.3, careers by their income", _incomes, "a", "b", NO_VECTORS)
def career_by_income(income, career):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([2]))
    b = numpyro.sample("b", dist.HalfNormal(0.5))
    s_1 = a[0] + b * income[0]
    s_2 = a[1] + b * income[1]
    p = jax.nn.softmax(jnp.stack([s_1, s_2, jnp.zeros(())]))
    numpyro.sample("career", dist.Categorical(probs=p), obs=career)
