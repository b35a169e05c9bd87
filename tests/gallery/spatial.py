"""Gaussian processes and fields on maps."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import tinygp
from numpyro.contrib.hsgp.approximation import hsgp_matern, hsgp_squared_exponential

from .catalogue import published
from .regression_of_counts import oceania


def _curve(num_points=24):
    rng = np.random.default_rng(70)
    x = np.linspace(-1, 1, num_points)
    return x, np.sin(4 * x) + 0.2 * rng.normal(size=num_points)


def _labelled():
    x, y = _curve()
    return x, (y > 0).astype(int)


def _counted():
    x, y = _curve()
    return x, np.random.default_rng(71).poisson(np.exp(1 + y))


def squared_exponential(x, var, length, noise, jitter=1.0e-6):
    deltaXsq = jnp.power((x[:, None] - x) / length, 2.0)
    return var * jnp.exp(-0.5 * deltaXsq) + (noise + jitter) * jnp.eye(x.shape[0])


@published("NumPyro: Gaussian process", _curve, "f", "kernel_var kernel_noise kernel_length")
def gaussian_process(x, y):
    var = numpyro.sample("kernel_var", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("kernel_noise", dist.LogNormal(0.0, 1.0))
    length = numpyro.sample("kernel_length", dist.LogNormal(0.0, 1.0))
    k = squared_exponential(x, var, length, 0)
    f = numpyro.sample("f", dist.MultivariateNormal(loc=jnp.zeros(x.shape[0]), covariance_matrix=k))
    numpyro.sample("y", dist.Normal(f, jnp.sqrt(noise)), obs=y)


@published("PyMC: Gaussian processes, marginal likelihood with a mean", _curve, "a b", "var noise length", is_slow=True)
def marginal_gaussian_process(x, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    var = numpyro.sample("var", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    length = numpyro.sample("length", dist.LogNormal(0.0, 1.0))
    numpyro.sample("y", dist.MultivariateNormal(a + b * x, squared_exponential(x, var, length, noise)), obs=y)


@published("Stan user's guide: 10.3, a Gaussian process of classes", _labelled, "z", "length eta")
def gaussian_process_of_classes(x, y):
    length = numpyro.sample("length", dist.InverseGamma(5.0, 5.0))
    eta = numpyro.sample("eta", dist.HalfNormal(2.0))
    k = squared_exponential(x, eta**2, length, 0)
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([x.shape[0]]).to_event(1))
    f = numpyro.deterministic("f", jnp.linalg.cholesky(k) @ z)
    numpyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)


@published("tinygp: getting started with NumPyro", _counted, "log_rate", "scale length mean")
def tinygp_counts(x, y):
    mean = numpyro.sample("mean", dist.HalfNormal(3))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    length = numpyro.sample("length", dist.HalfNormal(1))
    gp = tinygp.GaussianProcess(scale**2 * tinygp.kernels.Matern32(length), x, diag=1e-5, mean=mean)
    log_rate = numpyro.sample("log_rate", gp.numpyro_dist())
    numpyro.sample("obs", dist.Poisson(jnp.exp(log_rate)), obs=y)


@published("tinygp: transforms of predictors, a marginal likelihood", _curve, "offset", "scale length noise")
def tinygp_marginal(x, y):
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    length = numpyro.sample("length", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    offset = numpyro.sample("offset", dist.Normal(0, 1))
    gp = tinygp.GaussianProcess(scale**2 * tinygp.kernels.ExpSquared(length), x, diag=noise**2, mean=offset)
    numpyro.sample("y", gp.numpyro_dist(), obs=y)


@published("PyMC: Student-t processes, a heavy-tailed noise", _curve, "f", "length scale nu noise")
def gaussian_process_with_heavy_noise(x, y):
    length = numpyro.sample("length", dist.Gamma(2, 4))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    nu = numpyro.sample("nu", dist.Gamma(2, 0.1))
    noise = numpyro.sample("noise", dist.HalfCauchy(1))
    f = numpyro.sample("f", dist.MultivariateNormal(0, squared_exponential(x, scale**2, length, 0)))
    numpyro.sample("y", dist.StudentT(nu, f, noise), obs=y)


@published(
    "NumPyro: Hilbert space approximation, first steps", _curve, "intercept beta", "alpha length noise", is_slow=True
)
def hilbert_space(x, y):
    alpha = numpyro.sample("alpha", dist.HalfNormal(1))
    length = numpyro.sample("length", dist.InverseGamma(5, 5))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    f = hsgp_squared_exponential(x, alpha=alpha, length=length, ell=1.5, m=8)
    numpyro.sample("y", dist.Normal(intercept + f, noise), obs=y)


@published("NumPyro: Hilbert space approximation, Matérn", _counted, "beta", "alpha length")
def hilbert_space_matern(x, y):
    alpha = numpyro.sample("alpha", dist.HalfNormal(1))
    length = numpyro.sample("length", dist.InverseGamma(5, 5))
    f = hsgp_matern(x, nu=5 / 2, alpha=alpha, length=length, ell=1.5, m=8)
    numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def _islands():
    _, _, tools = oceania()
    log_population = np.log(1000 * np.array([1.1, 1.5, 3.6, 4.791, 7.4, 8.0, 9.2, 13.0, 17.5, 275.0]))
    rng = np.random.default_rng(72)
    place = rng.uniform(0, 4, (10, 2))
    return np.sqrt(np.sum((place[:, None] - place) ** 2, -1)), log_population, tools


@published("Statistical Rethinking: 14.5, islands in space", _islands, "b z", "etasq rhosq")
def islands(distance, log_population, tools):
    b = numpyro.sample("b", dist.Normal(0.3, 0.5))
    etasq = numpyro.sample("etasq", dist.Exponential(2))
    rhosq = numpyro.sample("rhosq", dist.Exponential(0.5))
    sigma = etasq * jnp.exp(-rhosq * jnp.square(distance))
    sigma = sigma.at[jnp.diag_indices(10)].add(0.01)
    z = numpyro.sample("z", dist.Normal(0, 1).expand([10]))
    k = numpyro.deterministic("k", (jnp.linalg.cholesky(sigma) @ z[..., None])[..., 0])
    numpyro.sample("T", dist.Poisson(jnp.exp(k + b * log_population)), obs=tools)


@published("Statistical Rethinking: 14.5, phylogenetic distance", _islands, "a bM", "etasq rhosq", is_slow=True)
def phylogeny(distance, log_mass, brain):
    a = numpyro.sample("a", dist.Normal(0, 1))
    bM = numpyro.sample("bM", dist.Normal(0, 0.5))
    etasq = numpyro.sample("etasq", dist.HalfNormal(1))
    rhosq = numpyro.sample("rhosq", dist.HalfNormal(3))
    K = etasq * jnp.exp(-rhosq * distance) + 0.01 * jnp.identity(len(brain))
    standard = (np.log(brain) - np.log(brain).mean()) / np.log(brain).std()
    numpyro.sample("B", dist.MultivariateNormal(a + bM * log_mass, K), obs=standard)


def _ring(num=8):
    adjacency = np.roll(np.eye(num, dtype=int), 1, 0)
    adjacency = adjacency + adjacency.T
    rng = np.random.default_rng(73)
    exposure, covariate = rng.uniform(1, 5, num), rng.normal(size=num)
    return adjacency, exposure, covariate, rng.poisson(exposure * np.exp(0.3 * covariate))


@published("PyMC: conditional autoregressive models", _ring, "beta phi theta", "tau alpha sd")
def besag_york_mollie(adjacency, exposure, covariate, counts):
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.Gamma(2.0, 2.0))
    alpha = numpyro.sample("alpha", dist.Uniform(0.1, 0.99))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    phi = numpyro.sample("phi", dist.CAR(0.0, alpha, tau, adjacency))
    theta = numpyro.sample("theta", dist.Normal(0.0, sd).expand([len(counts)]).to_event(1))
    rate = exposure * jnp.exp(beta[0] + beta[1] * covariate + phi + theta)
    numpyro.sample("y", dist.Poisson(rate).to_event(1), obs=counts)


@published(
    "Stan case study: spatial models with an intrinsic prior (BYM2)", _ring, "beta phi theta", "rho sigma", is_slow=True
)
def besag_york_mollie_2(adjacency, exposure, covariate, counts):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    rho = numpyro.sample("rho", dist.Beta(0.5, 0.5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    n = len(counts)
    first, second = np.nonzero(np.triu(adjacency))
    phi = numpyro.sample("phi", dist.ImproperUniform(dist.constraints.real, (), event_shape=(n,)))
    numpyro.factor("pairwise", -0.5 * jnp.sum((phi[first] - phi[second]) ** 2))
    numpyro.factor("sum to zero", dist.Normal(0, 0.001 * n).log_prob(jnp.sum(phi)))
    theta = numpyro.sample("theta", dist.Normal(0, 1).expand([n]))
    convolved = jnp.sqrt(1 - rho) * theta + jnp.sqrt(rho / 0.4) * phi
    numpyro.sample(
        "y", dist.Poisson(jnp.exp(np.log(exposure) + beta[0] + beta[1] * covariate + sigma * convolved)), obs=counts
    )


def _grid():
    rng = np.random.default_rng(74)
    return (rng.poisson(3.0, (4, 5)),)


@published("PyMC: log-Gaussian Cox process", _grid, "mu log_intensity", "variance length", is_slow=True)
def cox_process_on_a_grid(counts):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    variance = numpyro.sample("variance", dist.InverseGamma(3, 1))
    length = numpyro.sample("length", dist.Uniform(0.5, 5))
    place = np.stack(np.meshgrid(np.arange(4), np.arange(5), indexing="ij"), -1).reshape(-1, 2)
    distance = np.sqrt(np.sum((place[:, None] - place) ** 2, -1))
    k = variance * jnp.exp(-distance / length)
    log_intensity = numpyro.sample("log_intensity", dist.MultivariateNormal(mu, k))
    numpyro.sample("counts", dist.Poisson(jnp.exp(log_intensity.reshape(4, 5))), obs=counts)


@published("NumPyro: distributions, a circulant field on a ring", _counted, "f", "scale")
def circulant_field(x, y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    lag = np.minimum(np.arange(len(x)), len(x) - np.arange(len(x)))
    row = scale**2 * (jnp.exp(-0.5 * (lag / 3.0) ** 2) + 1e-3 * (lag == 0))
    f = numpyro.sample("f", dist.CirculantNormal(jnp.zeros(len(x)), covariance_row=row))
    numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@published("Stan user's guide: 10.4, a multivariate output process", lambda: (_grid()[0],), "f", "length noise")
def two_outputs(counts):
    length = numpyro.sample("length", dist.InverseGamma(5, 5))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    rows = jnp.linalg.cholesky(squared_exponential(np.arange(4), 1, length, 0))
    columns = jnp.linalg.cholesky(0.5 * jnp.eye(5) + 0.5)
    f = numpyro.sample("f", dist.MatrixNormal(jnp.zeros((4, 5)), rows, columns))
    numpyro.sample("y", dist.Normal(f, noise), obs=np.log1p(counts))
