"""Multilevel models in the form in which tutorials of NumPyro, PyMC and Stan present them, on small simulated data.

Each entry of :data:`MODELS` is a model, its arguments, the field that a statistician would name and the rest.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

rng = np.random.default_rng(20)
NUM_ROWS, NUM_GROUPS = 24, 4
GROUP = np.arange(NUM_ROWS) % NUM_GROUPS
OTHER = (np.arange(NUM_ROWS) // 5) % 3
X = rng.normal(size=NUM_ROWS)
DESIGN = rng.normal(size=(NUM_ROWS, 3))
COUNTS = rng.poisson(3.0, NUM_ROWS)
BINARY = rng.binomial(1, 0.4, NUM_ROWS)
REAL = rng.normal(size=NUM_ROWS)


def eight_schools(sigma: Any, y: Any = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("J", len(sigma)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def eight_schools_noncentered(sigma: Any, y: Any = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("J", len(sigma)):
        with handlers.reparam(config={"theta": TransformReparam()}):
            theta = numpyro.sample(
                "theta", dist.TransformedDistribution(dist.Normal(0.0, 1.0), dist.transforms.AffineTransform(mu, tau))
            )
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def baseball_partially_pooled_logit(at_bats: Any, hits: Any = None) -> None:
    loc = numpyro.sample("loc", dist.Normal(-1, 1))
    scale = numpyro.sample("scale", dist.HalfCauchy(1))
    num_players = at_bats.shape[0]
    with numpyro.plate("num_players", num_players):
        alpha = numpyro.sample("alpha", dist.Normal(loc, scale))
        return numpyro.sample("obs", dist.Binomial(at_bats, logits=alpha), obs=hits)


def admissions_varying_slopes(dept: Any, male: Any, applications: Any, admit: Any = None) -> None:
    v_mu = numpyro.sample("v_mu", dist.Normal(0, jnp.array([4.0, 1.0])))
    sigma = numpyro.sample("sigma", dist.HalfNormal(jnp.ones(2)))
    L_Rho = numpyro.sample("L_Rho", dist.LKJCholesky(2, concentration=2))
    scale_tril = sigma[..., jnp.newaxis] * L_Rho
    num_dept = len(np.unique(dept))
    z = numpyro.sample("z", dist.Normal(jnp.zeros((num_dept, 2)), 1))
    v = jnp.dot(scale_tril, z.T).T
    logits = v_mu[0] + v[dept, 0] + (v_mu[1] + v[dept, 1]) * male
    numpyro.sample("admit", dist.Binomial(applications, logits=logits), obs=admit)


def admissions_centred(dept: Any, male: Any, applications: Any, admit: Any = None) -> None:
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 0.5))
    sigma = numpyro.sample("sigma_cafe", dist.Exponential(1).expand([2]).to_event(1))
    Rho = numpyro.sample("Rho", dist.LKJ(2, concentration=2))
    cov = jnp.outer(sigma, sigma) * Rho
    ab = numpyro.sample("a_b", dist.MultivariateNormal(jnp.stack([a, b]), cov).expand([len(set(dept.tolist()))]))
    numpyro.sample("admit", dist.Binomial(applications, logits=ab[dept, 0] + ab[dept, 1] * male), obs=admit)


def radon(county: Any, floor: Any, uranium: Any, log_radon: Any = None) -> None:
    g = numpyro.sample("g", dist.Normal(0.0, 10.0).expand([2]))
    sd_a = numpyro.sample("sd_a", dist.Exponential(1.0))
    mu_b = numpyro.sample("mu_b", dist.Normal(0.0, 1.0))
    sd_b = numpyro.sample("sd_b", dist.Exponential(1.0))
    sigma = numpyro.sample("sigma_y", dist.Exponential(1.0))
    with numpyro.plate("county", len(np.unique(county))):
        a = numpyro.sample("a", dist.Normal(g[0] + g[1] * uranium, sd_a))
        z_b = numpyro.sample("z_b", dist.Normal(0.0, 1.0))
    b = numpyro.deterministic("b", mu_b + z_b * sd_b)
    theta = a[county] + b[county] * floor
    with numpyro.plate("data", len(county)):
        numpyro.sample("y", dist.Normal(theta, sigma), obs=log_radon)


def stochastic_volatility(returns: Any) -> None:
    step_size = numpyro.sample("sigma", dist.Exponential(50.0))
    s = numpyro.sample("s", dist.GaussianRandomWalk(scale=step_size, num_steps=jnp.shape(returns)[0]))
    nu = numpyro.sample("nu", dist.Exponential(0.1))
    numpyro.sample("r", dist.StudentT(df=nu, loc=0.0, scale=jnp.exp(s)), obs=returns)


def mortality(age: Any, space: Any, time: Any, population: Any, deaths: Any = None) -> None:
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


def rats(x: Any, y: Any) -> None:
    mu_alpha = numpyro.sample("mu_alpha", dist.Normal(0.0, 100.0))
    mu_beta = numpyro.sample("mu_beta", dist.Normal(0.0, 100.0))
    sigma_y = numpyro.sample("sigma_y", dist.HalfCauchy(5.0))
    sigma_alpha = numpyro.sample("sigma_alpha", dist.HalfCauchy(5.0))
    sigma_beta = numpyro.sample("sigma_beta", dist.HalfCauchy(5.0))
    with numpyro.plate("rat", y.shape[0], dim=-2):
        alpha = numpyro.sample("alpha", dist.Normal(mu_alpha, sigma_alpha))
        beta = numpyro.sample("beta", dist.Normal(mu_beta, sigma_beta))
        with numpyro.plate("week", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(alpha + beta * (x - x.mean()), sigma_y), obs=y)


def seeds(x1: Any, x2: Any, total: Any, germinated: Any) -> None:
    alpha = numpyro.sample("alpha", dist.Normal(0.0, 10.0).expand([4]).to_event(1))
    tau = numpyro.sample("tau", dist.Gamma(0.5, 0.5))
    with numpyro.plate("plates", len(total)):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0 / jnp.sqrt(tau)))
        logit = alpha[0] + alpha[1] * x1 + alpha[2] * x2 + alpha[3] * x1 * x2 + b
        numpyro.sample("r", dist.Binomial(total, logits=logit), obs=germinated)


def epilepsy(covariates: Any, subject: Any, visit: Any, seizures: Any) -> None:
    beta0 = numpyro.sample("beta0", dist.Normal(0.0, 10.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 10.0).expand([covariates.shape[1]]).to_event(1))
    sd_subject = numpyro.sample("sd_subject", dist.HalfNormal(1.0))
    sd_visit = numpyro.sample("sd_visit", dist.HalfNormal(1.0))
    b_subject = numpyro.sample("b_subject", dist.Normal(0.0, sd_subject).expand([len(np.unique(subject))]).to_event(1))
    b_visit = numpyro.sample("b_visit", dist.Normal(0.0, sd_visit).expand([len(subject)]).to_event(1))
    log_mu = beta0 + covariates @ beta + b_subject[subject] + b_visit
    numpyro.sample("y", dist.Poisson(jnp.exp(log_mu)).to_event(1), obs=seizures)


def rugby(home: Any, away: Any, goals_home: Any, goals_away: Any) -> None:
    home_advantage = numpyro.sample("home", dist.Normal(0, 1))
    sd_att = numpyro.sample("sd_att", dist.HalfNormal(2.0))
    sd_def = numpyro.sample("sd_def", dist.HalfNormal(2.0))
    intercept = numpyro.sample("intercept", dist.Normal(3, 1))
    with numpyro.plate("team", NUM_GROUPS):
        atts_star = numpyro.sample("atts_star", dist.Normal(0, sd_att))
        defs_star = numpyro.sample("defs_star", dist.Normal(0, sd_def))
    atts = numpyro.deterministic("atts", atts_star - jnp.mean(atts_star))
    defs = numpyro.deterministic("defs", defs_star - jnp.mean(defs_star))
    home_theta = jnp.exp(intercept + home_advantage + atts[home] + defs[away])
    away_theta = jnp.exp(intercept + atts[away] + defs[home])
    numpyro.sample("home_points", dist.Poisson(home_theta), obs=goals_home)
    numpyro.sample("away_points", dist.Poisson(away_theta), obs=goals_away)


def besag_york_mollie(adjacency: Any, exposure: Any, covariate: Any, counts: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.Gamma(2.0, 2.0))
    alpha = numpyro.sample("alpha", dist.Uniform(0.1, 0.99))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    phi = numpyro.sample("phi", dist.CAR(0.0, alpha, tau, adjacency))
    theta = numpyro.sample("theta", dist.Normal(0.0, sd).expand([len(counts)]).to_event(1))
    rate = exposure * jnp.exp(beta[0] + beta[1] * covariate + phi + theta)
    numpyro.sample("y", dist.Poisson(rate).to_event(1), obs=counts)


def cherry_blossom_splines(basis: Any, day: Any) -> None:
    a = numpyro.sample("a", dist.Normal(100, 10))
    w = numpyro.sample("w", dist.Normal(0, 10).expand([basis.shape[1]]))
    sigma = numpyro.sample("sigma", dist.Exponential(1))
    mu = numpyro.deterministic("mu", a + basis @ w)
    numpyro.sample("D", dist.Normal(mu, sigma), obs=day)


def rasch(student: Any, item: Any, correct: Any) -> None:
    sd = numpyro.sample("sd_ability", dist.HalfNormal(1.0))
    with numpyro.plate("students", NUM_GROUPS):
        theta = numpyro.sample("theta", dist.Normal(0.0, sd))
    with numpyro.plate("items", 3):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("responses", len(correct)):
        numpyro.sample("y", dist.Bernoulli(logits=theta[student] - b[item]), obs=correct)


def two_parameter_logistic(student: Any, item: Any, correct: Any) -> None:
    with numpyro.plate("students", NUM_GROUPS):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("items", 3):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        a = numpyro.sample("a", dist.LogNormal(0.0, 0.5))
    numpyro.sample("y", dist.Bernoulli(logits=a[item] * theta[student] - b[item]), obs=correct)


def horseshoe(x: Any, y: Any) -> None:
    lambdas = numpyro.sample("lambdas", dist.HalfCauchy(jnp.ones(x.shape[1])))
    tau = numpyro.sample("tau", dist.HalfCauchy(jnp.ones(1)))
    unscaled = numpyro.sample("unscaled_betas", dist.Normal(0.0, jnp.ones(x.shape[1])))
    betas = numpyro.deterministic("betas", tau * lambdas * unscaled)
    prec = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
    numpyro.sample("y", dist.Normal(x @ betas, 1.0 / jnp.sqrt(prec)), obs=y)


def zero_inflated_poisson(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    gate = numpyro.sample("gate", dist.Beta(2.0, 4.0))
    numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(x @ b)), obs=y)


def ordinal_regression(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    cut = numpyro.sample(
        "c_y", dist.TransformedDistribution(dist.Dirichlet(jnp.ones(4)), dist.transforms.SimplexToOrderedTransform(0.0))
    )
    numpyro.sample("y", dist.OrderedLogistic(x @ b, cut), obs=y)


def gaussian_process(x: Any, y: Any) -> None:
    var = numpyro.sample("kernel_var", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("kernel_noise", dist.LogNormal(0.0, 1.0))
    length = numpyro.sample("kernel_length", dist.LogNormal(0.0, 1.0))
    k = var * jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-6 * jnp.eye(x.shape[0])
    f = numpyro.sample("f", dist.MultivariateNormal(loc=jnp.zeros(x.shape[0]), covariance_matrix=k))
    numpyro.sample("y", dist.Normal(f, jnp.sqrt(noise)), obs=y)


def gaussian_process_whitened(x: Any, y: Any) -> None:
    length = numpyro.sample("length", dist.InverseGamma(5.0, 5.0))
    eta = numpyro.sample("eta", dist.HalfNormal(2.0))
    k = eta**2 * jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-6 * jnp.eye(x.shape[0])
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([x.shape[0]]).to_event(1))
    f = numpyro.deterministic("f", jnp.linalg.cholesky(k) @ z)
    numpyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)


def bernoulli_with_subsample_none(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(jnp.zeros(x.shape[1]), jnp.ones(x.shape[1])).to_event(1))
    with numpyro.plate("N", x.shape[0], subsample_size=None) as index:
        numpyro.sample("obs", dist.Bernoulli(logits=(x @ b)[index]), obs=y[index])


def measurement_error(x_seen: Any, y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("N", len(y)):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.sample("x_seen", dist.Normal(x, 0.3), obs=x_seen)
        numpyro.sample("y", dist.Normal(a + 0.7 * x, sigma), obs=y)


def local_level(y: Any) -> None:
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    level = numpyro.sample("level_0", dist.Normal(0.0, 5.0))
    for t in range(5):
        level = numpyro.sample(f"level_{t + 1}", dist.Normal(0.9 * level, sigma))
        numpyro.sample(f"y_{t}", dist.Poisson(jnp.exp(level)), obs=y[t])


def robust_regression(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1))
    a = numpyro.sample("a", dist.Normal(0.0, 10.0))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.0))
    nu = numpyro.sample("nu", dist.Gamma(2.0, 0.1))
    numpyro.sample("y", dist.StudentT(nu, a + x @ b, sigma), obs=y)


def factor_analysis(y: Any) -> None:
    loadings = numpyro.param("loadings", jnp.linspace(-1.0, 1.0, 2 * y.shape[1]).reshape(2, y.shape[1]))
    noise = numpyro.param("noise", jnp.ones(y.shape[1]), constraint=dist.constraints.positive)
    with numpyro.plate("rows", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(z @ loadings, noise).to_event(1), obs=y)


def negative_binomial_offset(x: Any, log_exposure: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
    phi = numpyro.sample("reciprocal_phi", dist.Exponential(1.0))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(x @ b + log_exposure), 1.0 / phi), obs=y)


_ring = np.zeros((6, 6))
for _i in range(6):
    _ring[_i, (_i + 1) % 6] = _ring[(_i + 1) % 6, _i] = 1.0
_total = np.full(NUM_ROWS, 20)
_some = rng.binomial(20, 0.3, NUM_ROWS)

# name: (model, args, field, hyperparameters)
MODELS: dict[str, tuple[Any, tuple, set[str], set[str]]] = {
    "eight schools": (eight_schools, (np.ones(8), REAL[:8]), {"mu", "theta"}, {"tau"}),
    "eight schools, non-centred": (
        eight_schools_noncentered,
        (np.ones(8), REAL[:8]),
        {"mu", "theta_base"},
        {"tau"},
    ),
    "baseball": (baseball_partially_pooled_logit, (_total[:6], _some[:6]), {"loc", "alpha"}, {"scale"}),
    "admissions, non-centred": (
        admissions_varying_slopes,
        (GROUP, BINARY, _total, _some),
        {"v_mu", "z"},
        {"sigma", "L_Rho"},
    ),
    "admissions, centred": (
        admissions_centred,
        (GROUP, BINARY, _total, _some),
        {"a", "b", "a_b"},
        {"sigma_cafe", "Rho"},
    ),
    "radon": (
        radon,
        (GROUP, BINARY, rng.normal(size=NUM_GROUPS), REAL),
        {"g", "mu_b", "a", "z_b"},
        {"sd_a", "sd_b", "sigma_y"},
    ),
    "stochastic volatility": (stochastic_volatility, (REAL,), {"s"}, {"sigma", "nu"}),
    "mortality": (
        mortality,
        (GROUP, OTHER, (np.arange(NUM_ROWS) * 7) % 5, _total, _some),
        {"intercept", "alpha_age_decentered", "space_effect_decentered", "beta"},
        {"sigma_alpha", "sigma_space", "sigma_beta"},
    ),
    "rats": (
        rats,
        (np.array([8.0, 15.0, 22.0]), rng.normal(size=(4, 3))),
        {"mu_alpha", "mu_beta", "alpha", "beta"},
        {"sigma_y", "sigma_alpha", "sigma_beta"},
    ),
    "seeds": (seeds, (BINARY, 1 - BINARY, _total, _some), {"alpha", "b"}, {"tau"}),
    "epilepsy": (
        epilepsy,
        (DESIGN, GROUP, OTHER, COUNTS),
        {"beta0", "beta", "b_subject", "b_visit"},
        {"sd_subject", "sd_visit"},
    ),
    "rugby": (
        rugby,
        (GROUP, (GROUP + 1) % NUM_GROUPS, COUNTS, COUNTS[::-1].copy()),
        {"home", "intercept", "atts_star", "defs_star"},
        {"sd_att", "sd_def"},
    ),
    "disease mapping": (
        besag_york_mollie,
        (_ring, np.linspace(1.0, 3.0, 6), X[:6], COUNTS[:6]),
        {"beta", "phi", "theta"},
        {"tau", "alpha", "sd"},
    ),
    "splines": (cherry_blossom_splines, (rng.uniform(size=(NUM_ROWS, 5)), REAL + 100), {"a", "w"}, {"sigma"}),
    "Rasch": (rasch, (GROUP, OTHER, BINARY), {"theta", "b"}, {"sd_ability"}),
    "two-parameter logistic": (two_parameter_logistic, (GROUP, OTHER, BINARY), {"theta", "b"}, {"a"}),
    "horseshoe": (horseshoe, (DESIGN, REAL), {"unscaled_betas"}, {"lambdas", "tau", "prec_obs"}),
    "zero-inflated Poisson": (zero_inflated_poisson, (DESIGN, COUNTS), {"b"}, {"gate"}),
    "ordinal regression": (ordinal_regression, (DESIGN, GROUP), {"b"}, {"c_y"}),
    "Gaussian process": (gaussian_process, (X, REAL), {"f"}, {"kernel_var", "kernel_noise", "kernel_length"}),
    "Gaussian process, whitened": (gaussian_process_whitened, (X, BINARY), {"z"}, {"length", "eta"}),
    "subsample None": (bernoulli_with_subsample_none, (jnp.asarray(DESIGN), jnp.asarray(BINARY)), {"b"}, set()),
    "measurement error": (measurement_error, (X, REAL), {"a", "x"}, {"sigma"}),
    "local level": (local_level, (COUNTS,), {f"level_{t}" for t in range(6)}, {"sigma"}),
    "robust regression": (robust_regression, (DESIGN, REAL), {"b", "a"}, {"sigma", "nu"}),
    "factor analysis": (factor_analysis, (rng.normal(size=(6, 4)),), {"z"}, {"loadings", "noise"}),
    "negative binomial": (
        negative_binomial_offset,
        (DESIGN, np.zeros(NUM_ROWS), COUNTS),
        {"b"},
        {"reciprocal_phi"},
    ),
}
