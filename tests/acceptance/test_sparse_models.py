"""Crossed effects, maps and surfaces as people write them: beside dense algebra, and long chains."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.sparse
from jax import random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.util import initialize_model

from numpyro_ext import EP, LaplaceApproximation
from numpyro_ext.distributions import (
    GaussianMarkovRandomField,
    difference_precision,
    graph_precision,
    kronecker_sum,
    leroux,
    pedigree_precision,
    sparse_matmul,
)
from tests.map_models import bym2

RNG = np.random.default_rng(0)


class Case(NamedTuple):
    """A model with its arguments, all but the last of which are known, and given hyperparameters."""

    model: Any
    args: tuple[Any, ...]
    given: dict[str, Any]


def grid(side, islands=0):
    node = np.arange(side**2).reshape(side, side)
    edges = [(node[1:], node[:-1]), (node[:, 1:], node[:, :-1])]
    pairs = np.concatenate([np.stack([a.ravel(), b.ravel()], axis=1) for a, b in edges])
    return graph_precision(pairs, num_nodes=side**2 + islands)


def effects(name, size, scale):
    with numpyro.plate(f"{name}_plate", size):
        return numpyro.sample(name, dist.Normal(0, scale))


def counts(log_rate):
    return RNG.poisson(np.exp(log_rate))


def crossed(first, second, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
    a = numpyro.sample("a", dist.Normal(0, 5))
    u, v = effects("u", 150, scale[0]), effects("v", 90, scale[1])
    numpyro.sample("y", dist.Poisson(jnp.exp(a + u[first] + v[second])), obs=y)


def nested(school, pupil, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
    u, v = effects("u", 20, scale[0]), effects("v", 220, scale[1])
    numpyro.sample("y", dist.Poisson(jnp.exp(u[school] + v[pupil])), obs=y)


def several_members(weights, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    u = effects("u", 210, scale)
    numpyro.sample("y", dist.Poisson(jnp.exp(0.2 + sparse_matmul(weights, u))), obs=y)


def slopes(group, other, x, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([3]).to_event(1))
    u, s, v = effects("u", 120, scale[0]), effects("s", 120, scale[1]), effects("v", 40, scale[2])
    numpyro.sample("y", dist.Poisson(jnp.exp(u[group] + s[group] * x + v[other])), obs=y)


def surface(precision, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    field = GaussianMarkovRandomField(precision.scale_by(1 / tau**2), null_space=precision.null_space)
    w = numpyro.sample("w", field)
    numpyro.sample("y", dist.Poisson(jnp.exp(w)), obs=y)


def leroux_map(graph, y=None):
    share, tau = numpyro.sample("share", dist.Uniform(0, 1)), numpyro.sample("tau", dist.HalfNormal(1))
    w = numpyro.sample("w", GaussianMarkovRandomField(leroux(graph, share).scale_by(1 / tau**2)))
    numpyro.sample("y", dist.Poisson(jnp.exp(w)), obs=y)


def age_period_cohort(age, period, cohort, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([3]).to_event(1))
    total = numpyro.sample("level", dist.Normal(0, 5))
    for k, (name, size, index) in enumerate((("age", 80, age), ("period", 60, period), ("cohort", 139, cohort))):
        walk = difference_precision(size, 2)
        field = GaussianMarkovRandomField(
            walk.scale_by(1 / scale[k] ** 2), null_space=walk.null_space, sum_to_zero=True
        )
        total = total + numpyro.sample(name, field)[index]
    numpyro.sample("y", dist.Poisson(jnp.exp(total)), obs=y)


def breeding(relationship, animal, y=None):
    a, scale = numpyro.sample("a", dist.Normal(0, 5)), numpyro.sample("scale", dist.HalfNormal(1))
    value = numpyro.sample("value", GaussianMarkovRandomField(relationship.scale_by(1 / scale**2)))
    numpyro.sample("y", dist.Poisson(jnp.exp(a + value[animal])), obs=y)


def _cases():
    first, second = RNG.integers(0, 150, 800), RNG.integers(0, 90, 800)
    pupil = RNG.integers(0, 220, 600)
    members = RNG.integers(0, 210, (500, 3))
    weights = scipy.sparse.csr_matrix(
        (np.full(1500, 1 / 3), (np.repeat(np.arange(500), 3), members.ravel())), (500, 210)
    )
    group, other, x = RNG.integers(0, 120, 700), RNG.integers(0, 40, 700), RNG.normal(size=700)
    age, period = (part.ravel() for part in np.meshgrid(np.arange(80), np.arange(60)))
    parents = [(max(0, k // 3 - 1), max(0, k // 2 - 1)) if k > 20 else (-1, -1) for k in range(240)]
    father, mother = np.array(parents).T
    mother = np.where((father == mother) & (mother >= 0), mother + 1, mother)
    two, three = {"scale": jnp.array([0.5, 0.3])}, {"scale": jnp.array([0.5, 0.3, 0.4])}
    walks = kronecker_sum(difference_precision(15, 2), difference_precision(16, 1))
    return {
        "crossed": Case(crossed, (first, second, counts(0.3 * RNG.normal(size=800))), two),
        "nested": Case(nested, (pupil // 11, pupil, counts(0.3 * RNG.normal(size=600))), two),
        "several members": Case(several_members, (weights, counts(0.2 + 0.1 * RNG.normal(size=500))), {"scale": 0.6}),
        "slopes": Case(slopes, (group, other, x, counts(0.3 * RNG.normal(size=700))), three),
        "islands": Case(
            bym2,
            (grid(15, 3), np.ones(228), RNG.normal(size=228), counts(0.3 * RNG.normal(size=228))),
            {"sigma": 0.6, "rho": 0.7},
        ),
        "surface": Case(surface, (walks, counts(0.5 * RNG.normal(size=240))), {"tau": 0.7}),
        "leroux": Case(leroux_map, (grid(15), counts(0.5 * RNG.normal(size=225))), {"share": 0.8, "tau": 0.7}),
        "age, period, cohort": Case(
            age_period_cohort,
            (age, period, period - age + 79, counts(1.0 + 0.2 * RNG.normal(size=4800))),
            {"scale": jnp.array([0.1, 0.2, 0.1])},
        ),
        "pedigree": Case(
            breeding,
            (pedigree_precision(father, mother), np.arange(240), counts(0.5 * RNG.normal(size=240))),
            {"scale": 0.5},
        ),
    }


CASES = _cases()


def dense_laplace(case):
    """Mode, its inverse Hessian and the log evidence by NumPyro's density in unconstrained coordinates."""
    known = handlers.condition(case.model, data=case.given)
    found = initialize_model(random.key(0), known, model_args=case.args)
    flat, unravel = jax.flatten_util.ravel_pytree(found.param_info.z)
    potential = jax.jit(lambda z: found.potential_fn(unravel(z)))
    slope, curvature = jax.jit(jax.grad(potential)), jax.jit(jax.hessian(potential))
    mode = jnp.zeros_like(flat)
    for _ in range(50):
        step = jnp.linalg.solve(curvature(mode), slope(mode))
        size = 1.0
        while potential(mode - size * step) > potential(mode) + 1e-9:
            size *= 0.5
        mode = mode - size * step
        if jnp.max(jnp.abs(step)) < 1e-10:
            break
    hessian = curvature(mode)
    sites = jax.jit(lambda z: found.postprocess_fn(unravel(z)))
    placed = handlers.substitute(handlers.seed(known, 0), data=sites(mode))
    trace = handlers.trace(placed).get_trace(*case.args)
    log_prior = sum(jnp.sum(trace[name]["fn"].log_prob(trace[name]["value"])) for name in case.given)
    value = 0.5 * mode.size * np.log(2 * np.pi) - 0.5 * jnp.linalg.slogdet(hessian)[1] - potential(mode) - log_prior
    draws = jnp.linalg.inv(hessian)
    slopes_of = jax.jacobian(sites)(mode)
    variances = {n: jnp.einsum("...i,ij,...j->...", d, draws, d) for n, d in slopes_of.items()}
    return sites(mode), variances, float(value)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_evidence_and_moments_are_those_of_dense_algebra(name):
    case = CASES[name]
    mean, variance, log_evidence = dense_laplace(case)
    engine = LaplaceApproximation(case.model, hyper_values=case.given, tol=1e-12, progress_bar=False)
    engine.run(random.key(0), *case.args)
    assert engine.diagnostics.converged
    np.testing.assert_allclose(engine.log_evidence, log_evidence, rtol=1e-8)
    for site in engine.posterior:
        if site in mean and site not in case.given:
            np.testing.assert_allclose(engine.posterior[site].mean, mean[site], rtol=1e-6, atol=1e-7, err_msg=site)
            found = engine.posterior[site].variance
            np.testing.assert_allclose(found, variance[site], rtol=1e-6, atol=1e-9, err_msg=site)


def ratings(s, d, i, x, y=None):
    a, b = numpyro.sample("a", dist.Normal(0, 5)), numpyro.sample("b", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([3]).to_event(1))
    us, ui, ud = (numpyro.sample(n, dist.Normal(0, 1).expand([k]).to_event(1)) for n, k in zip(
        ("us", "ui", "ud"), (200, 80, 14), strict=True))  # fmt: skip
    logits = a + b * x + scale[0] * us[s] + scale[1] * ui[i] + scale[2] * ud[d]
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def _ratings():
    rng = np.random.default_rng(1)
    s, i, d, x = rng.integers(0, 200, 5000), rng.integers(0, 80, 5000), rng.integers(0, 14, 5000), rng.normal(size=5000)
    us, ui, ud = 0.5 * rng.normal(size=200), 0.5 * rng.normal(size=80), 0.2 * rng.normal(size=14)
    logits = 0.3 + 0.2 * x + us[s] + ui[i] + ud[d]
    return s, d, i, x, (rng.random(5000) < 1 / (1 + np.exp(-logits))).astype(int)


def _map_of_300():
    graph, rng = grid(17, 11), np.random.default_rng(2)
    expected, x = rng.gamma(3.0, 3.0, 300), rng.normal(size=300)
    truth = {name: jnp.array([value]) for name, value in {"a": 0.1, "b": 0.4, "sigma": 0.6, "rho": 0.7}.items()}
    y = Predictive(bym2, posterior_samples=truth)(random.key(3), graph, expected, x)["y"][0]
    return graph, expected, x, np.asarray(y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "make", "names", "hyper"),
    [(ratings, _ratings, ("a", "b"), ("scale",)), (bym2, _map_of_300, ("a", "b", "f"), ("sigma", "rho"))],
    ids=["5,000 crossed marks", "300 areas"],
)
def test_moments_are_those_of_long_chains(model, make, names, hyper):
    args = make()
    mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=4000, progress_bar=False)
    mcmc.run(random.key(0), *args)
    draws = {n: np.asarray(mcmc.get_samples()[n]) for n in (*names, *hyper)}
    engine = EP(model, progress_bar=False)
    engine.run(random.key(0), *args)
    assert engine.diagnostics.converged
    for name, draw in draws.items():
        size = np.maximum(effective_sample_size(draw[None]), 1.0)
        mean, deviation = draw.mean(0), draw.std(0)
        found = engine.posterior[name]
        assert np.max(np.abs(found.mean - mean) / deviation - 4.0 / np.sqrt(size)) < 0.1, name
        ratio = np.sqrt(found.variance) / deviation
        allowed = (0.10 if name in hyper else 0.05) + 4.0 / np.sqrt(2.0 * size)
        assert np.max(np.abs(ratio - 1.0) - allowed) < 0.0, name
