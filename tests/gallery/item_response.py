"""Abilities, items, contests and choices."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from .catalogue import GAUSSIAN, published
from .regression import NO_VECTORS

NUM_STUDENTS, NUM_ITEMS = 8, 5


def _responses():
    rng = np.random.default_rng(80)
    student, item = np.divmod(np.arange(NUM_STUDENTS * NUM_ITEMS), NUM_ITEMS)
    logits = rng.normal(size=NUM_STUDENTS)[student] - np.linspace(-1, 1, NUM_ITEMS)[item]
    return student, item, rng.binomial(1, 1 / (1 + np.exp(-logits)))


@published("Stan user's guide: 1.11, item-response theory, one parameter", _responses, "theta b", "sd_ability")
def rasch(student, item, correct):
    sd = numpyro.sample("sd_ability", dist.HalfNormal(1.0))
    with numpyro.plate("students", NUM_STUDENTS):
        theta = numpyro.sample("theta", dist.Normal(0.0, sd))
    with numpyro.plate("items", NUM_ITEMS):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("responses", len(correct)):
        numpyro.sample("y", dist.Bernoulli(logits=theta[student] - b[item]), obs=correct)


@published("Stan case study: two-parameter logistic model", _responses, "theta b", "a")
def two_parameter_logistic(student, item, correct):
    with numpyro.plate("students", NUM_STUDENTS):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("items", NUM_ITEMS):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        a = numpyro.sample("a", dist.LogNormal(0.0, 0.5))
    numpyro.sample("y", dist.Bernoulli(logits=a[item] * theta[student] - b[item]), obs=correct)


@published("PyMC: item response theory with guessing", _responses, "theta b", "c")
def with_guessing(student, item, correct):
    theta = numpyro.sample("theta", dist.Normal(0, 1).expand([NUM_STUDENTS]))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([NUM_ITEMS]))
    c = numpyro.sample("c", dist.Beta(5, 23))
    p = c + (1 - c) * jax.nn.sigmoid(theta[student] - b[item])
    numpyro.sample("y", dist.Bernoulli(probs=p), obs=correct)


def _levels():
    rng = np.random.default_rng(81)
    student, item, _ = _responses()
    latent = rng.normal(size=NUM_STUDENTS)[student] + rng.logistic(size=len(student))
    return student, item, np.digitize(latent, [-1.0, 1.0])


@published("Stan case study: graded response model", _levels, "theta", "kappa", engines=GAUSSIAN)
def graded_response(student, item, level):
    theta = numpyro.sample("theta", dist.Normal(0, 1).expand([NUM_STUDENTS]))
    ordered = dist.transforms.OrderedTransform()
    prior = dist.TransformedDistribution(dist.Normal(0, 2).expand([NUM_ITEMS, 2]).to_event(1), ordered)
    kappa = numpyro.sample("kappa", prior)
    numpyro.sample("y", dist.OrderedLogistic(theta[student], kappa[item]), obs=level)


def _matches():
    rng = np.random.default_rng(82)
    first = rng.integers(0, 6, 40)
    second = (first + rng.integers(1, 6, 40)) % 6
    skill = np.linspace(-1, 1, 6)
    return first, second, rng.binomial(1, 1 / (1 + np.exp(skill[second] - skill[first])))


@published("Stan case study: Bradley-Terry model", _matches, "alpha", "sigma")
def bradley_terry(player0, player1, y):
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 0.5))
    alpha = numpyro.sample("alpha", dist.Normal(0, sigma).expand([6]))
    numpyro.sample("y", dist.Bernoulli(logits=alpha[player0] - alpha[player1]), obs=y)


def _games():
    rng = np.random.default_rng(83)
    home, away = np.nonzero(~np.eye(5, dtype=bool))
    return home, away, rng.poisson(20, len(home)), rng.poisson(17, len(home))


@published(
    "PyMC: a hierarchical model for Rugby prediction",
    _games,
    "home intercept atts_star defs_star",
    "sd_att sd_def",
    is_slow=True,
)
def rugby(home, away, goals_home, goals_away):
    home_advantage = numpyro.sample("home", dist.Normal(0, 1))
    sd_att = numpyro.sample("sd_att", dist.HalfNormal(2.0))
    sd_def = numpyro.sample("sd_def", dist.HalfNormal(2.0))
    intercept = numpyro.sample("intercept", dist.Normal(3, 1))
    with numpyro.plate("team", 5):
        atts_star = numpyro.sample("atts_star", dist.Normal(0, sd_att))
        defs_star = numpyro.sample("defs_star", dist.Normal(0, sd_def))
    atts = numpyro.deterministic("atts", atts_star - jnp.mean(atts_star))
    defs = numpyro.deterministic("defs", defs_star - jnp.mean(defs_star))
    home_theta = jnp.exp(intercept + home_advantage + atts[home] + defs[away])
    away_theta = jnp.exp(intercept + atts[away] + defs[home])
    numpyro.sample("home_points", dist.Poisson(home_theta), obs=goals_home)
    numpyro.sample("away_points", dist.Poisson(away_theta), obs=goals_away)


@published("NumPyro: ranking of NFL teams by difference of points", _games, "skill home", "sd noise")
def point_difference(home, away, goals_home, goals_away):
    sd = numpyro.sample("sd", dist.HalfNormal(10))
    skill = numpyro.sample("skill", dist.ZeroSumNormal(sd, event_shape=(5,)))
    advantage = numpyro.sample("home", dist.Normal(0, 10))
    noise = numpyro.sample("noise", dist.HalfNormal(10))
    numpyro.sample("y", dist.Normal(skill[home] - skill[away] + advantage, noise), obs=goals_home - goals_away)


def _choices():
    rng = np.random.default_rng(84)
    price, quality = rng.normal(size=(2, 30, 3))
    return price, quality, np.argmax(-price + 0.5 * quality + rng.gumbel(size=(30, 3)), axis=1)


@published("PyMC: discrete choice and random utility", _choices, "alphas beta", engines=NO_VECTORS)
def discrete_choice(price, quality, chosen):
    alphas = numpyro.sample("alphas", dist.Normal(0, 1).expand([2]))
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    intercept = jnp.zeros(3).at[:2].set(alphas)
    u = intercept + beta[0] * price + beta[1] * quality
    numpyro.sample("choice", dist.Categorical(logits=u), obs=chosen)


@published(
    "PyMC: discrete choice, heating systems by their costs", _choices, "alphas beta_ic beta_oc", engines=NO_VECTORS
)
def heating_choice(installation, operating, chosen):
    beta_ic = numpyro.sample("beta_ic", dist.Normal(0, 1))
    beta_oc = numpyro.sample("beta_oc", dist.Normal(0, 1))
    alphas = numpyro.sample("alphas", dist.Normal(0, 1).expand([3]))
    u = [alphas[j] + beta_ic * installation[:, j] + beta_oc * operating[:, j] for j in range(2)]
    s = jnp.stack([*u, 0 + beta_ic * installation[:, 2] + beta_oc * operating[:, 2]], axis=1)
    p = numpyro.deterministic("p", jax.nn.softmax(s, axis=1))
    numpyro.sample("y_cat", dist.Categorical(probs=p), obs=chosen)


@published(
    "Stan user's guide: 1.11, ideal points of legislators", _responses, "x a", "b", engines=f"{GAUSSIAN} BilinearVG"
)
def ideal_points(legislator, bill, vote):
    x = numpyro.sample("x", dist.Normal(0, 1).expand([NUM_STUDENTS]))
    a = numpyro.sample("a", dist.Normal(0, 3).expand([NUM_ITEMS]))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([NUM_ITEMS]))
    numpyro.sample("vote", dist.Bernoulli(logits=b[bill] * x[legislator] + a[bill]), obs=vote)
