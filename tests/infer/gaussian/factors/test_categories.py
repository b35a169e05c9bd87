"""Expectation propagation on categories with a predictor each: against sums over grids of NumPyro's density."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from numpyro_ext.distributions import MultinomialProbit
from numpyro_ext.infer import EP
from numpyro_ext.structure import ModelStructureError

X = np.linspace(-1.5, 1.5, 12)
LABEL = np.array([0, 2, 0, 1, 2, 0, 1, 1, 2, 1, 1, 2])
WINS = np.array([0, 0, 1, 2, 0, 1, 0, 0, 2, 0])


def _logits(x):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]))
    return jnp.stack([b[0] - x, b[1] + x, jnp.zeros_like(x)], axis=-1)


def categories(x, y):
    numpyro.sample("y", dist.Categorical(logits=_logits(x)), obs=y)


def probit(x, y):
    numpyro.sample("y", MultinomialProbit(_logits(x)), obs=y)


def counts(x, y):
    numpyro.sample("y", dist.Multinomial(y.sum(-1), logits=_logits(x)), obs=y)


def ties(y):
    """Davidson's model of wins, ties and losses: three predictors that are functions of two."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]))
    difference, log_tie = jnp.broadcast_to(b[0], y.shape), jnp.broadcast_to(b[1], y.shape)
    logits = jnp.stack([difference / 2, log_tie, -difference / 2], axis=-1)
    numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def weighted(x, y):
    logits = _logits(x)
    with numpyro.handlers.scale(scale=4.0):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def _run(model, *args, **options):
    engine = EP(model, progress_bar=False, **options)
    engine.run(jax.random.key(0), *args)
    assert engine.diagnostics.converged
    return engine


def _on_grid(model, args, half_width=14.0, num_nodes=281):
    axis = np.linspace(-half_width, half_width, num_nodes)
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    joint = jax.jit(jax.vmap(lambda b: log_density(model, args, {}, {"b": b})[0]))
    values = np.asarray(joint(points))
    weight = np.exp(values - values.max())
    evidence = values.max() + np.log(weight.sum() * (axis[1] - axis[0]) ** 2)
    weight /= weight.sum()
    mean = weight @ points
    return evidence, mean, (weight * (points - mean).T) @ (points - mean)


ONE = np.array([[3, 1, 0]])


@pytest.mark.parametrize(
    ("model", "args"),
    [
        pytest.param(counts, (X[:1], ONE), marks=pytest.mark.thorough),
        pytest.param(weighted, (X[:1], LABEL[:1]), marks=pytest.mark.thorough),
        pytest.param(probit, (X[:1], LABEL[:1]), marks=pytest.mark.thorough),
    ],
)
def test_a_single_factor_is_exact(model, args):
    engine = _run(model, *args)
    evidence, mean, covariance = _on_grid(model, args)
    np.testing.assert_allclose(engine.log_evidence, evidence, atol=1e-5)
    np.testing.assert_allclose(engine.posterior["b"].mean, mean, atol=1e-5)
    np.testing.assert_allclose(engine.posterior["b"].sd, np.sqrt(np.diagonal(covariance)), rtol=1e-5)


def _ep_of_ties(y, num_sweeps=150):
    """Log evidence, means and deviations of damped EP on :func:`ties`, with moments by sums over grids."""
    design, number = np.array([[0.5, 0.0], [0.0, 1.0], [-0.5, 0.0]]), np.bincount(y)
    axis = np.linspace(-8.0, 8.0, 121)
    z = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    precisions, shifts, prior = np.zeros((3, 2, 2)), np.zeros((3, 2)), np.eye(2) / 4.0
    for _ in range(num_sweeps):
        total, shift = prior + np.einsum("k,kij->ij", number, precisions), number @ shifts
        evidence = 0.5 * (np.log(np.linalg.det(prior) / np.linalg.det(total)) + shift @ np.linalg.solve(total, shift))
        matched = []
        for k in range(3):
            inverse, linear = total - precisions[k], shift - shifts[k]
            cavity = np.linalg.inv(inverse)
            b = cavity @ linear + z @ np.linalg.cholesky(cavity).T
            eta = b @ design.T
            weight = np.exp(eta[:, k] - 0.5 * np.sum(z**2, axis=1)) / np.exp(eta).sum(1)
            log_z = np.log(weight.sum() * (axis[1] - axis[0]) ** 2 / (2 * np.pi))
            weight /= weight.sum()
            mean = weight @ b
            precision = np.linalg.inv((weight * (b - mean).T) @ (b - mean))
            matched.append((precision - inverse, precision @ mean - linear))
            log_site = 0.5 * np.log(np.linalg.det(inverse) / np.linalg.det(total))
            log_site += 0.5 * (shift @ np.linalg.solve(total, shift) - linear @ np.linalg.solve(inverse, linear))
            evidence += number[k] * (log_z - log_site)
        precisions = 0.9 * precisions + 0.1 * np.array([part[0] for part in matched])
        shifts = 0.9 * shifts + 0.1 * np.array([part[1] for part in matched])
    return evidence, np.linalg.solve(total, shift), np.sqrt(np.diagonal(np.linalg.inv(total)))


@pytest.mark.thorough
def test_ties_end_where_another_implementation_does():
    engine = _run(ties, WINS)
    evidence, mean, sd = _ep_of_ties(WINS)
    np.testing.assert_allclose(engine.log_evidence, evidence, atol=1e-6)
    np.testing.assert_allclose(engine.posterior["b"].mean, mean, atol=1e-5)
    np.testing.assert_allclose(engine.posterior["b"].sd, sd, rtol=1e-5)
    # and near the posterior, as far as EP is
    evidence, mean, covariance = _on_grid(ties, (WINS,))
    sd = np.sqrt(np.diagonal(covariance))
    np.testing.assert_allclose(engine.log_evidence, evidence, atol=0.02)
    np.testing.assert_allclose(engine.posterior["b"].mean, mean, atol=0.01 * sd.min())
    np.testing.assert_allclose(engine.posterior["b"].sd, sd, rtol=0.04)


@pytest.mark.parametrize("model", [pytest.param(m, marks=pytest.mark.thorough) for m in (categories, probit)])
def test_moments_and_evidence_of_two_unknowns(model):
    engine = _run(model, X, LABEL)
    evidence, mean, covariance = _on_grid(model, (X, LABEL))
    sd = np.sqrt(np.diagonal(covariance))
    np.testing.assert_allclose(engine.log_evidence, evidence, atol=0.02)
    np.testing.assert_allclose(engine.posterior["b"].mean, mean, atol=0.02 * sd.min())
    np.testing.assert_allclose(engine.posterior["b"].sd, sd, rtol=0.04)


@pytest.mark.parametrize(
    ("outcome", "size"),
    [
        (lambda logits: dist.Categorical(logits=logits), 7),
        pytest.param(MultinomialProbit, 5, marks=pytest.mark.thorough),
    ],
)
def test_more_categories_than_rules_have_dimensions_are_refused(outcome, size):
    def many(y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([size]))
        numpyro.sample("y", outcome(jnp.broadcast_to(b, (*y.shape, size))), obs=y)

    told = f"up to six categories.*up to four.*'y' has {size} predictors.*VariationalGaussian"
    with pytest.raises(ModelStructureError, match=told):
        _run(many, LABEL)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [4, 5, 6])
def test_moments_and_evidence_of_more_categories(size):
    """Two unknowns behind the predictors of all categories, whose posterior is summed over a grid."""
    slopes = np.linspace(-1.0, 1.0, size) ** 2
    label = np.arange(12) * 7 % size

    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]))
        logits = b[0] * np.arange(size) / size + b[1] * slopes * X[:, None] + 0.3 * np.cos(np.arange(size))
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    engine = _run(model, label)
    evidence, mean, covariance = _on_grid(model, (label,), half_width=6.0, num_nodes=121)
    sd = np.sqrt(np.diagonal(covariance))
    np.testing.assert_allclose(engine.log_evidence, evidence, atol=0.02)
    np.testing.assert_allclose(engine.posterior["b"].mean, mean, atol=0.02 * sd.min())
    np.testing.assert_allclose(engine.posterior["b"].sd, sd, rtol=0.02)


@pytest.mark.slow
def test_correlated_intercepts_against_nuts():
    rng = np.random.default_rng(0)
    group, x = np.arange(150) % 10, rng.normal(size=150)
    effects = rng.normal(size=(10, 2)) @ np.array([[1.0, 0.4], [0.0, 0.7]])
    eta = np.stack([0.3 + 0.8 * x + effects[group, 0], -0.2 - 0.5 * x + effects[group, 1], 0 * x], axis=1)
    label = np.argmax(eta + rng.gumbel(size=eta.shape), axis=1)

    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2, 2]))
        factor = jnp.array([[1.0, 0.0], [0.4, 0.7]])
        with numpyro.plate("groups", 10):
            white = numpyro.sample("white", dist.Normal(0, 1).expand([2]).to_event(1))
        logits = b[0] + x[:, None] * b[1] + (white @ factor.T)[group]
        numpyro.sample("y", dist.Categorical(logits=jnp.pad(logits, ((0, 0), (0, 1)))), obs=y)

    engine = _run(model, label)
    nuts = MCMC(NUTS(model), num_warmup=500, num_samples=4000, progress_bar=False)
    nuts.run(jax.random.key(1), label)
    for name, draws in nuts.get_samples().items():
        own = engine.posterior[name]
        sd = draws.std(0)
        assert np.all(np.abs(own.mean - draws.mean(0)) < 0.12 * sd)
        assert np.all(np.abs(np.log(own.sd / sd)) < 0.1)
