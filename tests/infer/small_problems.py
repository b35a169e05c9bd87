"""Models of two or three unknowns, whose evidence and means are found by quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import logsumexp

X = np.linspace(-2.0, 2.0, 8)


def line(likelihood, y, scale=2.0):
    """A level and a slope."""

    def model(y):
        weights = numpyro.sample("weights", dist.Normal(0, scale).expand([2]))
        numpyro.sample("y", likelihood(weights[0] + weights[1] * X), obs=y)

    return model, np.asarray(y)


def field(likelihood, y, correlation=0.8, scale=1.5, mean=0.0, size=3):
    """Correlated unknowns, with several observations of each."""
    covariance = scale**2 * (correlation + (1 - correlation) * np.eye(size))

    def model(y):
        f = numpyro.sample("f", dist.MultivariateNormal(mean, jnp.asarray(covariance)))
        numpyro.sample("y", likelihood(f[np.arange(len(y)) % size]), obs=y)

    return model, np.asarray(y)


PROBLEMS = {
    "probit line, classes nearly apart": line(
        lambda eta: dist.Bernoulli(jax.scipy.stats.norm.cdf(eta)), [0, 0, 1, 0, 1, 1, 1, 1]
    ),
    "logistic line": line(lambda eta: dist.Bernoulli(logits=eta), [0, 1, 0, 0, 1, 1, 0, 1]),
    "Bernoulli, correlation 0.98": field(
        lambda eta: dist.Bernoulli(logits=eta), [1, 0, 1, 1, 1, 1], correlation=0.98, scale=4.0
    ),
    "Poisson line, few counts": line(lambda eta: dist.Poisson(jnp.exp(eta)), [0, 0, 1, 0, 0, 2, 1, 3], scale=1.0),
    "rectified-linear Poisson field": field(
        lambda eta: dist.Poisson(jnp.maximum(eta, 0.0)), [0, 2, 1, 1, 0, 3], mean=1.0, size=2
    ),
    "softplus Poisson field": field(lambda eta: dist.Poisson(jax.nn.softplus(eta)), [0, 2, 1, 1, 3, 0]),
    "Student-t line with an outlier": line(
        lambda eta: dist.StudentT(4.0, eta, 0.5), [-1.2, -1.0, -0.2, 0.1, 3.0, 0.4, 1.3, 1.1]
    ),
    "Laplace line": line(lambda eta: dist.Laplace(eta, 0.5), [-1.2, -1.0, -0.2, 0.1, 1.0, 0.4, 1.3, 1.1]),
    "ordinal line": line(lambda eta: dist.OrderedLogistic(eta, jnp.array([-1.0, 1.0])), [0, 0, 1, 0, 2, 1, 2, 2]),
    "negative binomial field": field(lambda eta: dist.NegativeBinomial2(jnp.exp(eta), 1.5), [0, 4, 1, 0, 7, 2]),
    "binomial field": field(lambda eta: dist.Binomial(6, logits=eta), [0, 5, 3]),
    "Bernoulli, complementary log-log": line(
        lambda eta: dist.Bernoulli(-jnp.expm1(-jnp.exp(eta))), [0, 0, 0, 1, 0, 1, 1, 1]
    ),
}


def by_quadrature(engine, num_points=None):
    """Log evidence and means of the field's site, on a lattice in coordinates in which the posterior of an engine is
    standard normal: sums over it converge exponentially, algebraically where a factor has a kink."""
    run = engine._run
    (name,) = engine.posterior
    form, mean, factor = run.programs.weight_inputs(*run.inputs)
    size = mean.size
    grid = np.linspace(-9.0, 9.0, num_points or {2: 601, 3: 121}[size])
    axes = jnp.asarray(np.stack(np.meshgrid(*[grid] * (size - 1), indexing="ij"), -1).reshape(-1, size - 1))

    @jax.jit
    def plane(first):
        z = jnp.concatenate([jnp.full((len(axes), 1), first), axes], axis=1)
        points = mean + z @ factor.T
        log_density = jax.vmap(form.log_density)(points)
        total = jax.scipy.special.logsumexp(log_density)
        return total, jnp.exp(log_density - jnp.where(total > -jnp.inf, total, 0.0)) @ points

    totals, means = map(np.asarray, jax.lax.map(plane, jnp.asarray(grid)))
    log_volume = size * np.log(grid[1] - grid[0]) + np.sum(np.log(np.diagonal(factor)))
    unknowns = np.exp(totals - logsumexp(totals)) @ means
    design, offset = run.reading.maps({}, run.reading.data)[name]
    return logsumexp(totals) + log_volume, np.asarray(design.matvec(unknowns) + offset)
