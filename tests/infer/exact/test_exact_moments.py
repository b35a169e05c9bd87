"""Exact draws of small models against sums over lattices, and ranks of the values that made the data."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import Predictive
from numpyro.infer.hmc import hmc
from numpyro.infer.util import initialize_model, log_density
from scipy import stats

from numpyro_ext.infer import EP, PosteriorReparam
from numpyro_ext.infer.exact.reparam import LATENT

GROUP = np.array([0, 0, 1, 1, 2, 2])
X = np.linspace(-1.5, 1.5, 9)
NOISE = np.random.default_rng(1).normal(size=9)


def fitted(model, *args, **options):
    engine = EP(model, progress_bar=False, **options)
    engine.run(random.key(0), *args)
    return engine


def two_groups(y):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.4))  # smaller ones would need a finer lattice
    rate = numpyro.sample("rate", dist.Normal(1.0, scale).expand([2]).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp(rate[np.array([0, 0, 0, 1, 1])])), obs=y)


def non_centred(y):
    """Binomial counts of two groups about a common level, as white numbers that a scale multiplies."""
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.7))
    white = numpyro.sample("white", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.BinomialProbs(probs=jax.scipy.stats.norm.cdf(-0.5 + scale * white), total_count=8), obs=y)


def logistic(y):
    line = numpyro.sample("line", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=line[0] + line[1] * X), obs=y)


def student(y):
    line = numpyro.sample("line", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.StudentT(3.0, line[0] + line[1] * X, noise), obs=y)


def negative_binomial(y):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 0.5))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(level + 0.3 * X), concentration), obs=y)


def gamma(y):
    line = numpyro.sample("line", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    shape = numpyro.sample("shape", dist.Exponential(0.5))
    numpyro.sample("y", dist.Gamma(shape, shape * jnp.exp(-line[0] - line[1] * X)), obs=y)


def ordinal(y):
    slope, gap = numpyro.sample("slope", dist.Normal(0.0, 2.0)), numpyro.sample("gap", dist.HalfNormal(2.0))
    numpyro.sample("y", dist.OrderedLogistic(slope * X, jnp.stack([-0.5 * gap, 0.5 * gap])), obs=y)


def process(y):
    """Two points of a Gaussian process with a length that is learned."""
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.7))
    x = jnp.array([0.0, 1.0])
    kernel = jnp.exp(-0.5 * jnp.square((x[:, None] - x) / length)) + 1e-3 * jnp.eye(2)
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(2), kernel))
    numpyro.sample("y", dist.Poisson(jnp.exp(f[np.array([0, 0, 1])])), obs=y)


def walk(y):
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.4))

    def step(state, y):
        state = numpyro.sample("state", dist.Normal(0.8 * state, scale))
        return state, numpyro.sample("y", dist.Poisson(jnp.exp(1.0 + state)), obs=y)

    scan(step, 0.0, y)


def lasso(y):
    """Coefficients whose prior is no Gaussian."""
    line = numpyro.sample("line", dist.Laplace(0.0, 0.5).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(line[0] + line[1] * X, 0.7), obs=y)


def zero_inflated(y):
    level, gate = numpyro.sample("level", dist.Normal(0.0, 2.0)), numpyro.sample("gate", dist.Beta(2.0, 2.0))
    numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(level + 0.3 * X)), obs=y)


SMALL: Mapping[Callable[..., Any], np.ndarray] = {
    two_groups: np.array([2, 5, 3, 7, 9]),
    non_centred: np.array([1, 6]),
    logistic: np.array([0, 0, 1, 0, 0, 1, 1, 0, 1]),
    student: 0.5 + X + NOISE,
    negative_binomial: np.array([3, 0, 1, 7, 2, 0, 4, 12, 5]),
    gamma: np.exp(0.3 + 0.5 * X + 0.6 * NOISE),
    ordinal: np.array([0, 1, 0, 1, 2, 0, 1, 2, 2]),
    process: np.array([1, 2, 4]),
    walk: np.array([2, 6]),
    lasso: 0.2 * X + 0.7 * NOISE,
    zero_inflated: np.array([0, 3, 0, 2, 4, 0, 0, 6, 3]),
}


def by_lattice(model, y, num_nodes=81, reach=10.0):
    """Mean and standard deviation of each site of a model with two or three unknown numbers, by a sum over a lattice.

    The lattice is even in NumPyro's unconstrained space, along the axes of the covariance that a lattice before it
    found. Marginals have to be small at its ends, so that nothing that counts lies beyond.
    """
    info = initialize_model(random.key(0), model, model_args=(y,))
    start, unravel = jax.flatten_util.ravel_pytree(info.param_info.z)
    steps = np.linspace(-reach, reach, num_nodes)
    white = np.stack(np.meshgrid(*[steps] * start.size, indexing="ij"), -1).reshape(-1, start.size)

    @jax.jit
    def at(points):
        def one(z):
            return -info.potential_fn(unravel(z)), info.postprocess_fn(unravel(z))

        return jax.lax.map(one, points, batch_size=10_000)

    center, axes = np.zeros(start.size), np.eye(start.size)
    for _ in range(4):
        points = center + white @ axes.T
        log_mass, sites = at(points)
        mass = np.nan_to_num(np.exp(log_mass - np.nanmax(log_mass)))
        mass /= mass.sum()
        center = mass @ points
        axes = np.linalg.cholesky((mass * (points - center).T) @ (points - center))
    cube = mass.reshape([num_nodes] * start.size)
    for axis in range(start.size):
        along = np.moveaxis(cube, axis, 0).reshape(num_nodes, -1).sum(1)
        assert max(along[0], along[-1]) < 1e-5 * along.max()
    out = {}
    for name in info.param_info.z:
        values = np.where(mass[:, None] > 0.0, np.asarray(sites[name]).reshape(mass.size, -1), 0.0)
        out[name] = mass @ values, np.sqrt(mass @ np.square(values - mass @ values))
    return out


@pytest.mark.thorough
@pytest.mark.parametrize("model", SMALL, ids=lambda model: model.__name__)
def test_moments_are_those_of_sums_over_a_lattice(model):
    y = SMALL[model]
    found = (
        fitted(model, y, integrate="none")
        .sample_exactly(random.key(3), 1000, num_chains=2)
        .get_samples(group_by_chain=True)
    )
    expected = by_lattice(model, y)
    assert set(expected) == set(found)
    for name, (mean, sd) in expected.items():
        values = (np.asarray(found[name]).reshape(2, 1000, -1) - mean) / sd
        for asked, wanted in ((values, 0.0), (np.square(values), 1.0)):
            error = asked.std((0, 1)) / np.sqrt(effective_sample_size(asked))
            assert np.all(np.abs(asked.mean((0, 1)) - wanted) < 4.0 * error), name
            assert np.all(error < 0.2), name


def grouped_counts(counts):
    scale, level = numpyro.sample("scale", dist.HalfNormal(1.0)), numpyro.sample("level", dist.Normal(0.0, 1.0))
    rate = numpyro.sample("rate", dist.Normal(level, scale).expand([3]).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp(rate[GROUP])), obs=counts)


def crossed_answers(answers):
    """Answers of four people to three questions, yes or no."""
    of_people = numpyro.sample("of_people", dist.HalfNormal(1.0))
    person = numpyro.sample("person", dist.Normal(0.0, of_people).expand([4]).to_event(1))
    question = numpyro.sample("question", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=person[:, None] + question).to_event(2), obs=answers)


def walk_of_counts(counts):
    scale = numpyro.sample("scale", dist.HalfNormal(0.5))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(scale, num_steps=8))
    numpyro.sample("y", dist.Poisson(jnp.exp(walk)).to_event(1), obs=counts)


SIMULATED = {
    "groups": (grouped_counts, np.array([0, 2, 7, 1, 1, 4])),
    "crossed": (crossed_answers, np.array([[0, 1, 1], [1, 1, 1], [0, 0, 1], [0, 1, 0]])),
    "walk": (walk_of_counts, np.array([0, 2, 1, 3, 5, 4, 6, 2])),
    "regression": (student, SMALL[student]),
}


def _ranks(reparam, model, keys, observed, truth, num_draws):
    """Ranks of the true values among thinned draws for each data set, all in one program: draws in the coordinates of
    one fit are exact at any data of these shapes.

    :param truth: values of the sites, one row for a data set.
    :return: shape ``(quantities, data sets)``.
    """
    coordinates, transformed = reparam.coordinates, reparam.reparam(model)

    def energy(y):
        return lambda white: -log_density(transformed, (y,), {}, {LATENT: white})[0]

    begin, move = hmc(potential_fn_gen=energy, algo="NUTS")

    def one(key, y, truth):
        start = jnp.zeros(coordinates.size)
        state = begin(start, num_warmup=200, adapt_mass_matrix=False, model_args=(y,), rng_key=key)

        def some(state, times):
            return jax.lax.fori_loop(0, times, lambda _, s: move(s, (y,)), state)

        _, white = jax.lax.scan(lambda s, _: (some(s, 4),) * 2, some(state, 200), length=num_draws)
        draws = jax.lax.map(lambda z: coordinates.values(z)[0], white.z)
        return jnp.concatenate([jnp.ravel((draws[n] < truth[n]).sum(0)) for n in truth])

    return np.asarray(jax.jit(jax.vmap(one))(keys, observed, truth)).T


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_ranks_of_true_values_are_even(name, num_simulations=100, num_draws=99):
    model, observed = SIMULATED[name]
    reparam = PosteriorReparam(fitted(model, observed))
    simulated = Predictive(model, num_samples=num_simulations)(random.key(7), None)
    truth = {site: simulated[site] for site in reparam.coordinates.names}
    keys = random.split(random.key(8), num_simulations)
    by_quantity = _ranks(reparam, model, keys, simulated["y"], truth, num_draws)
    limit = 0.001 / len(by_quantity)
    assert _evenness(by_quantity).min() > limit
    # the same ranks among draws that are half as wide would not pass
    assert _evenness(np.clip(2 * by_quantity - 50, 0, 99)).min() < limit


def _evenness(ranks):
    """P-values of ranks up to 99, shape ``(quantities, simulations)``, under even ones."""
    return stats.chisquare(np.stack([np.bincount(row // 20, minlength=5) for row in ranks]), axis=1).pvalue
