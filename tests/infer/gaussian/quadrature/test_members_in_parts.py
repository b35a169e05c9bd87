"""Members of large models, a part of them at a time: against all at once, and against sums in NumPy."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import log_expit, logsumexp

from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.infer.gaussian.algorithms.nodes.interpolated_priors import InterpolatedPriors
from numpyro_ext.infer.gaussian.runs.quadrature_parts_run import MembersRun
from numpyro_ext.models import item_response
from numpyro_ext.structure.model.running.execution import ModelCall
from numpyro_ext.structure.model.running.parts import split_members
from tests.monte_carlo import assert_close_means
from tests.readings import with_fit_costs

_NUM_PEOPLE, _NUM_ITEMS = 101, 6
_InParts = with_fit_costs(AdaptiveQuadrature, most_cells_at_once=120)


def _answers(seed=0, num_people=_NUM_PEOPLE, num_outcomes=2):
    generator = np.random.default_rng(seed)
    trait = generator.normal(size=(num_people, 1))
    levels = trait * np.linspace(0.7, 1.5, _NUM_ITEMS) + np.linspace(-1, 1, _NUM_ITEMS) + generator.logistic(
        size=(num_people, _NUM_ITEMS)
    )  # fmt: skip
    return sum((levels > bound).astype(np.int8) for bound in (0.0, 0.8)[: num_outcomes - 1])


def _with_gaps(answers):
    out = answers.astype(float)
    out[50:, 1] = np.nan
    return out


def _run(engine_type, model, *args, **kwargs):
    engine = engine_type(model, progress_bar=False)
    engine.run(jax.random.key(0), *args, **kwargs)
    return engine


@pytest.mark.thorough
@pytest.mark.parametrize("has_gaps", [False, True])
def test_a_fit_is_that_of_all_members_at_once(has_gaps):
    answers = _with_gaps(_answers(5)) if has_gaps else _answers(5)
    model = partial(item_response, family="2pl")
    engine, whole = _run(_InParts, model, answers), _run(AdaptiveQuadrature, model, answers)
    assert isinstance(engine._run, MembersRun) and not isinstance(whole._run, MembersRun)
    assert engine._run.in_parts.parts.size == 20 and engine.diagnostics.converged
    assert abs(float(engine.log_evidence) - float(whole.log_evidence)) < 1e-8
    for name in ("discrimination", "intercept"):
        np.testing.assert_allclose(engine.hyper[name].value, whole.hyper[name].value, atol=1e-5)
        np.testing.assert_allclose(engine.hyper[name].standard_error, whole.hyper[name].standard_error, rtol=1e-4)
    # sums over a grid, by NumPy
    slope, intercept = (np.asarray(engine.hyper[name].value) for name in ("discrimination", "intercept"))
    grid = np.linspace(-9.0, 9.0, 901)
    logits = (slope * grid[:, None] + intercept)[:, None]
    terms = np.where(answers == 1, log_expit(logits), log_expit(-logits))
    log_density = np.where(np.isnan(answers), 0.0, terms).sum(-1) - 0.5 * grid[:, None] ** 2
    weights = np.exp(log_density - logsumexp(log_density, axis=0))
    evidence = np.sum(logsumexp(log_density, axis=0) + np.log(grid[1] - grid[0]) - 0.5 * np.log(2 * np.pi))
    assert abs(evidence - float(engine.log_evidence)) < 1e-8 > engine.diagnostics.quadrature_error
    mean = weights.T @ grid
    np.testing.assert_allclose(engine.posterior["trait"].mean, mean, atol=1e-9)
    np.testing.assert_allclose(engine.posterior["trait"].variance, weights.T @ grid**2 - mean**2, atol=1e-9)


def regression(covariate, answers=None):
    """A trait whose location differs between people, of a size that nothing but the covariate has."""
    slope = numpyro.param("slope", jnp.linspace(0.6, 1.4, _NUM_ITEMS), constraint=dist.constraints.positive)
    cutpoints = numpyro.param("cutpoints", jnp.array([-0.5, 0.6]), constraint=dist.constraints.ordered_vector)
    by = numpyro.param("by", jnp.array(0.4))
    with numpyro.plate("people", len(covariate)):
        trait = numpyro.sample("trait", dist.Normal(by * jnp.asarray(covariate), 1.2))
        numpyro.deterministic("twice", 2.0 * trait)
    numpyro.sample("answers", dist.OrderedLogistic(slope * trait[:, None], cutpoints), obs=answers)


@pytest.mark.thorough
def test_a_latent_regression_is_that_of_all_members_at_once():
    """Locations of traits that are learned, against all members at once, and against sums in NumPy."""
    covariate, answers = np.sin(np.arange(_NUM_PEOPLE)), _answers(5, num_outcomes=3)
    engine = _run(_InParts, regression, covariate, answers)
    assert isinstance(engine._run, MembersRun) and engine.diagnostics.converged
    by, slope, cutpoints = (np.asarray(engine.hyper[name].value) for name in ("by", "slope", "cutpoints"))
    grid = np.linspace(-11.0, 11.0, 1101)
    above = [log_expit(side * (slope * grid[:, None] - c)) for c in cutpoints for side in (1.0, -1.0)]
    middle = above[0] + np.log1p(-np.exp(above[2] - above[0]))
    table = np.stack([above[1], middle, above[2]])  # (3, grid, items)
    of_answers = sum(np.einsum("ni,gi->ng", answers == k, table[k]) for k in range(3))
    away = (grid - by * covariate[:, None]) / 1.2
    log_density = of_answers - 0.5 * away**2 - 0.5 * np.log(2 * np.pi) - np.log(1.2)
    evidence = np.sum(logsumexp(log_density, axis=1) + np.log(grid[1] - grid[0]))
    assert abs(evidence - float(engine.log_evidence)) < 1e-8
    weights = np.exp(log_density - logsumexp(log_density, axis=1, keepdims=True))
    np.testing.assert_allclose(engine.posterior["trait"].mean, weights @ grid, atol=1e-8)
    whole = _run(AdaptiveQuadrature, regression, covariate, answers)
    assert not isinstance(whole._run, MembersRun)
    for name in ("slope", "cutpoints", "by"):
        np.testing.assert_allclose(engine.hyper[name].value, whole.hyper[name].value, atol=1e-6)
        np.testing.assert_allclose(engine.hyper[name].standard_error, whole.hyper[name].standard_error, rtol=1e-5)


def test_priors_are_sums_of_those_of_a_few_and_of_no_few_where_they_are_no_sums():
    """A column of the last blocks alone, and variances of three groups, at ten hyperparameters."""
    generator = np.random.default_rng(0)
    covariates = generator.normal(size=(300, 2))
    covariates[:280, 1] = 0.0
    group = np.repeat([0, 1, 2], 100)
    location = covariates @ generator.normal(size=(2, 10)) + generator.normal(size=10)
    priors = np.concatenate([location, generator.uniform(0.5, 2.0, (3, 10))[group]], axis=1)
    found = InterpolatedPriors(8, 1e-9)
    parts = [found.weights(priors[start : start + 60], np.arange(start, start + 60)) for start in range(0, 300, 60)]
    own = priors[found.blocks]
    for start, weights in zip(range(0, 300, 60), parts, strict=True):
        np.testing.assert_allclose(weights @ own[: weights.shape[1]], priors[start : start + 60], atol=1e-8)
        np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-9)
    assert len(found.blocks) == 5 and len(set(group[found.blocks])) == 3 and max(found.blocks) >= 280
    curved = np.exp(covariates[:, :1] * generator.normal(size=10))
    assert InterpolatedPriors(8, 1e-9).weights(curved, np.arange(300)) is None


def _curved(covariate, answers=None):
    """Locations that are no sums of those of a few people: a power of each covariate is learned."""
    power = numpyro.param("power", jnp.array(1.0))
    slope = numpyro.param("slope", jnp.linspace(0.6, 1.4, _NUM_ITEMS))
    with numpyro.plate("people", len(covariate)):
        trait = numpyro.sample("trait", dist.Normal(jnp.exp(power * jnp.asarray(covariate)), 1.0))
    numpyro.sample("answers", dist.Bernoulli(logits=slope * trait[:, None]), obs=answers)


@pytest.mark.thorough
def test_locations_that_are_no_sums_are_of_all_members_at_once():
    engine = _run(_InParts, _curved, np.sin(np.arange(_NUM_PEOPLE)), _answers())
    assert not isinstance(engine._run, MembersRun) and engine.diagnostics.converged


@pytest.mark.thorough
def test_new_members_are_scored_as_all_at_once():
    fitted = _run(AdaptiveQuadrature, regression, np.linspace(-1, 1, 200), _answers(1, 200, 3))
    covariate, answers = np.sin(np.arange(_NUM_PEOPLE)), _answers(2, num_outcomes=3)
    whole = fitted.fold_in(jax.random.key(1), covariate, answers)
    fitted.__class__ = _InParts
    engine = fitted.fold_in(jax.random.key(1), covariate, answers)
    assert isinstance(engine._run, MembersRun) and not isinstance(whole._run, MembersRun)
    assert engine.diagnostics.quadrature_error < 1e-6
    np.testing.assert_allclose(float(engine.log_evidence), float(whole.log_evidence), rtol=1e-11)
    quantiles = jnp.array([0.1, 0.9])
    for name in ("trait", "twice"):
        own, other = engine.posterior[name], whole.posterior[name]
        np.testing.assert_allclose(own.mean, other.mean, atol=1e-11)
        np.testing.assert_allclose(own.variance, other.variance, atol=1e-11)
        np.testing.assert_allclose(own.quantile(quantiles), other.quantile(quantiles), atol=1e-7)
    assert f"trait {(_NUM_PEOPLE,)}" in repr(engine)
    draws = engine.get_samples(num_samples=400)
    assert draws["trait"].shape == (400, _NUM_PEOPLE) and draws["slope"].shape == (400, _NUM_ITEMS)
    np.testing.assert_allclose(draws["twice"], 2.0 * draws["trait"])
    assert_close_means(draws["trait"], whole.posterior["trait"].mean)
    # what needs all members at once
    assert "whole" not in vars(engine._run)
    np.testing.assert_allclose(engine._run.leave_one_out[0], whole._run.leave_one_out[0], atol=1e-10)
    # members of members
    again = engine.fold_in(jax.random.key(2), covariate[:20], answers[:20])
    np.testing.assert_allclose(again.posterior["trait"].mean, whole.posterior["trait"].mean[:20], atol=1e-11)


def _centred(covariate, answers=None):
    regression(covariate - np.mean(covariate), answers)


def _summed(covariate, answers=None):
    regression(jnp.cumsum(covariate), answers)


def _numbered(covariate, answers=None):
    regression(np.unique(np.round(covariate, 1), return_inverse=True)[1] * 0.1, answers)


def _counted(covariate, answers=None):
    regression(jnp.asarray(covariate) / len(covariate), answers)


def _scaled(covariate, answers=None):
    """By the largest of all, which the first part and the last one have, and none between them."""
    regression(jnp.asarray(covariate) / jnp.max(covariate), answers)


_MORE = [pytest.param(model, marks=pytest.mark.thorough) for model in (_centred, _summed, _numbered, _counted)]


@pytest.mark.thorough
@pytest.mark.parametrize("model", [_scaled, *_MORE])
def test_members_that_see_others_are_no_parts(model):
    fitted = _run(AdaptiveQuadrature, regression, np.linspace(-1, 1, 200), _answers(1, 200, 3))
    covariate, answers = np.sin(np.arange(_NUM_PEOPLE)), _answers(2, num_outcomes=3)
    covariate[[0, -1]] = 2.0
    hyper = {name: found.value for name, found in fitted.hyper.items()}
    engine = _InParts(model, hyper_values=hyper, progress_bar=False)
    engine.run(jax.random.key(0), covariate, answers)
    whole = AdaptiveQuadrature(model, hyper_values=hyper, progress_bar=False)
    whole.run(jax.random.key(0), covariate, answers)
    np.testing.assert_allclose(engine.posterior["trait"].mean, whole.posterior["trait"].mean, atol=1e-11)
    np.testing.assert_allclose(float(engine.log_evidence), float(whole.log_evidence), rtol=1e-11)


@pytest.mark.thorough
def test_columns_of_a_later_part_that_differ_are_not_those_of_the_first():
    """Slopes that differ between people, in the last part alone."""

    def model(scale, answers=None):
        slope = numpyro.param("slope", jnp.linspace(0.6, 1.4, _NUM_ITEMS))
        with numpyro.plate("people", len(scale)):
            trait = numpyro.sample("trait", dist.Normal(0.0, 1.0))
        logits = slope * (jnp.asarray(scale) * trait)[:, None]
        numpyro.sample("answers", dist.Bernoulli(logits=logits), obs=answers)

    scale = np.ones(_NUM_PEOPLE)
    assert isinstance(_run(_InParts, model, scale, _answers())._run, MembersRun)
    scale[-1] = 2.0
    engine, whole = (_run(kind, model, scale, _answers()) for kind in (_InParts, AdaptiveQuadrature))
    assert not isinstance(engine._run, MembersRun)
    np.testing.assert_allclose(float(engine.log_evidence), float(whole.log_evidence), rtol=1e-10)


def test_parts_are_of_one_size_and_cover_all_members():
    call = ModelCall(partial(item_response, family="2pl"), (_with_gaps(_answers()),), {}, jax.random.key(0))
    parts = split_members(call, 120)
    assert parts.starts == [0, 20, 40, 60, 80, 81] and [new for new, _ in parts.calls()] == [0, 0, 0, 0, 0, 19]
    assert parts.has_members("trait") and parts.has_members("response") and not parts.has_members("intercept")
    assert split_members(call, 400) is None
