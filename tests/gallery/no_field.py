"""Models without a Gaussian field, which no engine takes: mixtures, hidden states, rates, differential equations."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.experimental.ode import odeint
from jax.scipy.special import logsumexp

from numpyro_ext.structure import Reason

from .catalogue import Refusal, published


def _refused(source, data, words, site=None, reason=Reason.NO_FIELD):
    return published(source, data, refusal=Refusal(reason, site, words))


def _two_bumps():
    rng = np.random.default_rng(120)
    return (np.concatenate([rng.normal(-2, 1, 15), rng.normal(2, 1, 15)]),)


def _counts():
    return (np.random.default_rng(121).poisson(4.0, 20),)


@_refused("Statistical Rethinking: 2.4, globe tossing", lambda: (6, 9), r"'p': 'Uniform'")
def globe(W, N):
    p = numpyro.sample("p", dist.Uniform(0, 1))
    numpyro.sample("W", dist.Binomial(N, p), obs=W)


@_refused("PyMC: introduction to Bayesian A/B testing", lambda: (np.array([100, 120]), np.array([9, 15])), "'Beta'")
def ab_test(trials, conversions):
    theta = numpyro.sample("theta", dist.Beta(100, 100).expand([2]))
    numpyro.sample("y", dist.Binomial(trials, theta), obs=conversions)
    numpyro.deterministic("uplift", theta[1] / theta[0] - 1)


@_refused(
    "Bayesian Data Analysis: 5.3, rat tumours", lambda: (np.array([20, 20, 19]), np.array([0, 1, 4])), "'Uniform'"
)
def rat_tumours(n, y):
    mean = numpyro.sample("mean", dist.Uniform(0, 1))
    size = numpyro.sample("size", dist.Uniform(0, 1)) ** -2
    numpyro.sample("y", dist.BetaBinomial(mean * size, (1 - mean) * size, n), obs=y)


@_refused("BUGS: pumps", lambda: (np.array([94.3, 15.7, 62.9]), np.array([5, 1, 5])), "'Exponential'|'Gamma'")
def pumps(t, failures):
    alpha = numpyro.sample("alpha", dist.Exponential(1))
    beta = numpyro.sample("beta", dist.Gamma(0.1, 1))
    with numpyro.plate("pumps", len(t)):
        theta = numpyro.sample("theta", dist.Gamma(alpha, beta))
        numpyro.sample("y", dist.Poisson(theta * t), obs=failures)


@_refused(
    "Stan case study: golf putting, geometry",
    lambda: (np.array([2, 6, 12]), np.array([100, 90, 80]), np.array([95, 50, 20])),
    "'HalfNormal'",
)
def golf_geometry(x, n, y):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    p = 2 * jax.scipy.stats.norm.cdf(jnp.arcsin((2.125 - 0.84) / 12 / x) / sigma) - 1
    numpyro.sample("y", dist.Binomial(n, p), obs=y)


@_refused("PyMC: coal mining disasters, a switch point", _counts, "discrete")
def switch_point(counts):
    early = numpyro.sample("early", dist.Exponential(1))
    late = numpyro.sample("late", dist.Exponential(1))
    switch = numpyro.sample("switch", dist.DiscreteUniform(0, len(counts)))
    rate = jnp.where(switch > np.arange(len(counts)), early, late)
    numpyro.sample("counts", dist.Poisson(rate), obs=counts)


@_refused("NumPyro: mixture of two Gaussians, states summed out", _two_bumps, "3 predictors", "y", Reason.STRUCTURE)
def gaussian_mixture(y):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    locs = numpyro.sample("locs", dist.Normal(0, 10).expand([3]))
    mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, scale))
    numpyro.sample("y", mixture, obs=y)


@_refused("Pyro: Gaussian mixture with enumeration", _two_bumps, "discrete", "assignment", Reason.STRUCTURE)
def gaussian_mixture_with_states(y):
    weights = numpyro.sample("weights", dist.Dirichlet(0.5 * jnp.ones(2)))
    scale = numpyro.sample("scale", dist.LogNormal(0, 2))
    with numpyro.plate("components", 2):
        locs = numpyro.sample("locs", dist.Normal(0, 10))
    with numpyro.plate("data", len(y)):
        assignment = numpyro.sample("assignment", dist.Categorical(weights), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(locs[assignment], scale), obs=y)


@_refused("NumPyro: annotation, Dawid and Skene", lambda: (np.arange(12) % 3, np.arange(12) % 2), "'Dirichlet'")
def annotators(annotator, annotation):
    prevalence = numpyro.sample("prevalence", dist.Dirichlet(jnp.ones(2)))
    confusion = numpyro.sample("confusion", dist.Dirichlet(jnp.ones(2)).expand([3, 2]))
    log_joint = jnp.log(prevalence) + jnp.log(confusion[annotator, :, annotation])
    numpyro.factor("annotations", logsumexp(log_joint, axis=-1).sum())


@_refused(
    "Stan user's guide: 2.6, hidden Markov model, summed out", _two_bumps, "predictors", "likelihood", Reason.STRUCTURE
)
def hidden_markov(y):
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-2, 2]), 1))
    stay = numpyro.sample("stay", dist.Beta(8, 2))
    transition = jnp.array([[stay, 1 - stay], [1 - stay, stay]])
    alpha = jnp.log(jnp.full(2, 0.5)) + dist.Normal(mu, 1).log_prob(y[0])
    for t in range(1, 6):
        alpha = logsumexp(alpha[:, None] + jnp.log(transition), axis=0) + dist.Normal(mu, 1).log_prob(y[t])
    numpyro.factor("likelihood", logsumexp(alpha))


@_refused(
    "NumPyro: predator and prey, Lotka and Volterra",
    lambda: (np.array([[30.0, 4.0], [47.2, 6.1], [70.2, 9.8]]),),
    "'z_init': 'LogNormal'",
)
def predator_and_prey(y):
    z_init = numpyro.sample("z_init", dist.LogNormal(jnp.log(10), 1).expand([2]))
    theta = numpyro.sample("theta", dist.TruncatedNormal(jnp.array([1.0, 0.05, 1.0, 0.05]), 0.2, low=0.0))

    def change(z, t, theta):
        u, v = z[0], z[1]
        alpha, beta, gamma, delta = theta
        return jnp.stack([(alpha - beta * v) * u, (-gamma + delta * u) * v])

    z = odeint(change, z_init, jnp.arange(3.0), theta, rtol=1e-6, atol=1e-5, mxstep=1000)
    sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1).expand([2]))
    numpyro.sample("y", dist.LogNormal(jnp.log(z), sigma), obs=y)


@_refused("NumPyro: Neal's funnel", lambda: (), "no observed site", reason=Reason.DATA)
def neals_funnel():
    y = numpyro.sample("y", dist.Normal(0, 3))
    numpyro.sample("x", dist.Normal(jnp.zeros(9), jnp.exp(y / 2)))


@_refused(
    "NumPyro: stochastic variational inference, a subsampled plate", _two_bumps, "subsample", reason=Reason.STRUCTURE
)
def subsampled(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("data", len(y), subsample_size=10) as index:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[index])
