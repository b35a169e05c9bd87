"""Updates of sequential Monte Carlo with more rows: one program for each doubling, and the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

from numpyro_ext.infer import SMC
from numpyro_ext.infer.monte_carlo.more_rows import MoreRows
from numpyro_ext.infer.monte_carlo.target import Target
from tests.compilations import compiled_programs
from tests.tiers import thorough

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 2)), RNG.normal(1.0, 1.0, 70)


def regression(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ slope, 1), obs=y)


def with_mask(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y)), numpyro.handlers.mask(mask=y < 2.0), numpyro.handlers.scale(scale=2.0):
        numpyro.sample("y", dist.Normal(x @ slope, 1), obs=y)


def several_columns(x, y):
    level = numpyro.sample("level", dist.Normal(0, 1))
    numpyro.sample("x", dist.Normal(level, 1), obs=x)
    numpyro.sample("y", dist.Normal(level, 1).expand([len(y)]).to_event(0), obs=y)


def of_centred(x, y):
    regression(x - x.mean(0), y)


def by_number(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ slope, len(y) ** 0.5), obs=y)


def prior_by_number(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1.0 / len(y)).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ slope, 1), obs=y)


def joint_rows(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("y", dist.MultivariateNormal(x @ slope, jnp.eye(len(y)) + 0.5), obs=y)


def steps(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))

    def step(last, row):
        numpyro.sample("y", dist.Normal(row @ slope + 0.5 * last, 1))
        return last, None

    with numpyro.handlers.condition(data={"y": jnp.asarray(y)}):
        scan(step, 0.0, x)


def latent_rows(x, y):
    with numpyro.plate("rows", len(y)):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(effect, 1), obs=y)


def log_evidence_and_mean(x, y):
    """In closed form, of the regression."""
    covariance = np.eye(len(y)) + x @ x.T
    log_determinant = np.linalg.slogdet(2 * np.pi * covariance)[1]
    mean = np.linalg.solve(np.eye(2) + x.T @ x, x.T @ y)
    return -0.5 * (log_determinant + y @ np.linalg.solve(covariance, y)), mean


@pytest.mark.thorough
def test_more_rows_compile_one_step_for_each_doubling():
    smc = SMC(regression, num_particles=400, kernel="random-walk", progress_bar=False)
    smc.run(KEY, X[:3], Y[:3])
    with compiled_programs() as names:
        for number in (5, 8, 8, 20, 4):
            smc.update(jnp.asarray(X[:number]), Y[:number])
            log_evidence, mean = log_evidence_and_mean(X[:number], Y[:number])
            assert smc.log_evidence == pytest.approx(log_evidence, abs=4 * smc.log_evidence.standard_error)
            np.testing.assert_allclose(smc.posterior["slope"].mean, mean, atol=0.15)
    assert names.count("jit(advance)") == 1


@pytest.mark.parametrize("model", [with_mask, *thorough(regression, several_columns, steps)])
def test_rows_that_are_filled_up_tell_nothing(model):
    before, after = (Target(model, KEY, (X[:number], Y[:number]), {}, {}) for number in (5, 34))
    filled = MoreRows(model).targets(before, after)
    vector = jnp.full(after.size, 0.3)
    for one, other in ((before, filled.before), (after, filled.after)):
        assert [len(data) for data in other.data] == [64] * 3
        expected, found = (target.densities(vector, target.data) for target in (one, other))
        jax.tree.map(np.testing.assert_allclose, found.log_prior, expected.log_prior)
        for name, terms in expected.log_likelihood.items():
            np.testing.assert_allclose(found.log_likelihood[name][: len(terms)], terms)
            assert not np.any(found.log_likelihood[name][len(terms) :])


@pytest.mark.parametrize("model", [by_number, *thorough(of_centred, prior_by_number, joint_rows, latent_rows)])
def test_models_whose_rows_cannot_be_filled_up_are_run_as_they_are(model):
    smc = SMC(model, num_particles=20, progress_bar=False)
    run, target = (Target(model, KEY, (X[:number], Y[:number]), {}, {}) for number in (5, 7))
    rows = MoreRows(model)
    filled = rows.targets(run, target)
    if filled is None:
        return
    vectors = jnp.linspace(-1.0, 1.0, 4)[:, None] * jnp.ones(target.size)
    programs = smc._programs_of(run)
    at = programs.from_prior(jax.random.split(KEY, 20), run.data)._replace(
        vectors=vectors, log_likelihood=programs.levels(vectors, run.data)[1]
    )
    assert not rows.are_same(filled, smc._programs_of(filled.after), smc._programs_of(target), target, at)
    assert rows.targets(run, target) is None
