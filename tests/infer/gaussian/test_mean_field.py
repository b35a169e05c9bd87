"""Gaussians of independent unknowns: the bound from its definition, its optimum by a general optimiser, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import optimize

from numpyro_ext.infer import VariationalGaussian
from numpyro_ext.infer.gaussian.algorithms.posterior import gaussian_prior
from numpyro_ext.infer.gaussian.variational import natural_gradient as vg
from numpyro_ext.infer.gaussian.variational.bound import evaluate
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior
from numpyro_ext.potentials import LogitPotential, PoissonExpPotential
from tests.infer.gaussian.gaussian_forms import (
    dense_prior_precision,
    identity,
    kernel,
    make_form,
    mixed_prior,
    random_dense,
    random_sparse,
)
from tests.monte_carlo import assert_close_covariance
from tests.tiers import thorough

NUM = 12
COUNTS = jnp.asarray(np.resize([3.0, 0.0, 1.0, 7.0, 2.0, 0.0], NUM))
LABELS = jnp.asarray(np.resize([1.0, 0.0, 0.0, 1.0, 1.0], NUM))


@jax.jit
def fit(form):
    return vg.solve(form, vg.init(form), num_steps=300, tol=1e-10, covariance="diagonal")


def independent_bound(form, precision, mean, variance):
    """Expected log density plus entropy of independent Gaussians, by the definition."""
    design = form.design.to_dense()
    moments = design @ mean + form.offset, design**2 @ variance
    parts = zip(form.potentials, *map(form.split_rows, moments), strict=True)
    expected = sum(jnp.sum(potential.expected_log_density(m, v).value) for potential, m, v in parts)
    proper = np.concatenate([np.full(block.size, not isinstance(block, FlatPrior)) for block in form.prior])
    log_prior = 0.5 * jnp.linalg.slogdet(precision[np.ix_(proper, proper)])[1] - 0.5 * proper.sum() * np.log(2 * np.pi)
    log_prior -= 0.5 * (mean @ precision @ mean + jnp.sum(jnp.diagonal(precision) * variance))
    return form.log_constant + expected + log_prior + 0.5 * jnp.sum(jnp.log(2 * np.pi * np.e * variance))


@pytest.mark.parametrize(
    "space, is_flat", [*thorough(("observation", False)), ("coefficient", True), *thorough(("sparse", True))]
)
def test_bound_of_any_sites_is_that_of_the_definition(space, is_flat):
    rng = np.random.default_rng(3)
    design = random_sparse(rng, NUM, 11, 3)
    # A column that repeats inside a row.
    design = SparseRows(design.columns.at[:, 1].set(design.columns[:, 0]), design.values, 11)
    form = make_form(mixed_prior(rng, is_flat), design, (PoissonExpPotential(COUNTS, 1.0),), jnp.full(NUM, 0.3))
    if is_flat:  # every flat unknown is seen
        form = form._replace(design=SparseRows(design.columns.at[:2, 2].set(jnp.array([9, 10])), design.values, 11))
    sites, shift = jnp.asarray(rng.uniform(0.1, 2.0, NUM)), jnp.asarray(rng.normal(size=NUM))
    matrix, precision = np.asarray(form.design.to_dense()), dense_prior_precision(form.prior)
    total = precision + matrix.T @ (np.asarray(sites)[:, None] * matrix)
    mean = np.linalg.solve(total, matrix.T @ np.asarray(shift - sites * form.offset))
    variance = 1.0 / np.diagonal(total)
    point = jax.jit(lambda form: evaluate(form, gaussian_prior(form, space, "diagonal"), sites, shift))(form)
    np.testing.assert_allclose(point.bound, independent_bound(form, precision, mean, variance), rtol=1e-11)
    np.testing.assert_allclose(point.mean, matrix @ mean + 0.3, rtol=1e-10)
    np.testing.assert_allclose(point.variance, matrix**2 @ variance, rtol=1e-11)


@pytest.mark.parametrize("family", ["counts", pytest.param("binary", marks=pytest.mark.slow)])
def test_optimum_is_that_of_a_general_optimiser(family):
    rng = np.random.default_rng(4)
    potential = PoissonExpPotential(COUNTS, 1.0) if family == "counts" else LogitPotential(LABELS)
    form = make_form(mixed_prior(rng), random_dense(rng, NUM, 11), (potential,), jnp.full(NUM, 0.2))
    state, info = fit(form)
    assert info.converged
    assert np.all(np.diff(np.asarray(info.objective_trace)[: info.num_steps]) > -1e-11)
    precision = jnp.asarray(dense_prior_precision(form.prior))

    @jax.jit
    def loss(values):
        return -independent_bound(form, precision, values[:11], jnp.exp(values[11:]))

    found = optimize.minimize(
        jax.jit(jax.value_and_grad(loss)), np.zeros(22), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    np.testing.assert_allclose(info.objective, -found.fun, atol=1e-9)
    posterior = vg.posterior(form, state, covariance="diagonal")
    np.testing.assert_allclose(posterior.mean, found.x[:11], atol=1e-6)
    np.testing.assert_allclose(np.diagonal(posterior.scale_tril()) ** 2, np.exp(found.x[11:]), rtol=1e-5)
    full, _ = jax.jit(lambda form: vg.solve(form, vg.init(form)))(form)
    assert float(info.objective) < float(full.point.bound) - 0.01


@pytest.mark.slow
def test_nothing_is_lost_where_the_posterior_is_independent():
    form = make_form((DiagonalPrior(jnp.linspace(0.5, 3.0, NUM)),), identity(NUM), (PoissonExpPotential(COUNTS, 1.0),))
    full, _ = jax.jit(lambda form: vg.solve(form, vg.init(form), tol=1e-10))(form)
    np.testing.assert_allclose(fit(form)[1].objective, full.point.bound, rtol=1e-12)


def test_gradient_of_the_bound_is_that_of_the_reoptimised_one():
    def form_of(parameters):
        scale, mean, stretch, base = parameters
        prior = (CovariancePrior(kernel(NUM, scale, jitter=1e-2)[None]), DiagonalPrior(base * jnp.ones(1)))
        design = DenseDesign(jnp.concatenate([stretch * jnp.eye(NUM), jnp.ones((NUM, 1))], axis=1))
        return make_form(prior, design, (PoissonExpPotential(COUNTS, 1.0),), jnp.full(NUM, mean))

    @jax.jit
    def evidence(parameters):
        state, info = vg.solve(form_of(parameters), vg.init(form_of(parameters)), tol=1e-11, covariance="diagonal")
        bound = jax.value_and_grad(lambda p: vg.log_evidence(form_of(p), state, covariance="diagonal"))
        return *bound(parameters), info.objective

    point, step = jnp.array([1.5, 0.3, 0.8, 2.0]), 1e-4
    value, gradient, objective = evidence(point)
    np.testing.assert_allclose(value, objective, rtol=1e-12)
    for i in range(4):
        shift = step * jnp.eye(4)[i]
        difference = (evidence(point + shift)[0] - evidence(point - shift)[0]) / (2 * step)
        np.testing.assert_allclose(gradient[i], difference, rtol=1e-5)


def regression(x, y):
    weights = numpyro.sample("weights", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


@pytest.mark.thorough
def test_engine():
    x = np.random.default_rng(0).normal(size=(NUM, 3)) + 0.5
    engine = VariationalGaussian(regression, covariance="diagonal", progress_bar=False)
    engine.run(jax.random.key(0), x, LABELS.astype(int))
    assert engine.diagnostics.converged and engine.log_evidence.is_lower_bound
    covariance = np.asarray(engine.posterior["weights"].covariance())
    np.testing.assert_array_equal(covariance, np.diag(np.diagonal(covariance)))
    np.testing.assert_allclose(engine.posterior["weights"].variance, np.diagonal(covariance), rtol=1e-12)
    assert_close_covariance(engine.get_samples()["weights"], covariance)
    full = VariationalGaussian(regression, progress_bar=False)
    full.run(jax.random.key(0), x, LABELS.astype(int))
    assert float(engine.log_evidence) < float(full.log_evidence)
    assert np.all(covariance.diagonal() < full.posterior["weights"].variance)


def test_options_are_checked():
    with pytest.raises(ValueError, match="covariance must be one of 'full', 'diagonal', 'shared'"):
        VariationalGaussian(regression, covariance="low-rank")
    with pytest.raises(ValueError, match="natural-gradient' only"):
        VariationalGaussian(regression, covariance="diagonal", method="cholesky")
