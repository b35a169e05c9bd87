"""Scores of independent blocks as a metric: those of blocks fitted alone, and searches in many numbers that end."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import expit

from numpyro_ext.infer import EP, AdaptiveQuadrature, LaplaceApproximation
from numpyro_ext.infer.gaussian.fitting.block_scores import has_block_scores, information
from numpyro_ext.linalg.gaussian.design import SparseRows
from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
from numpyro_ext.models import item_response
from numpyro_ext.potentials import CumulativeLogitPotential, ElementwisePotential, Potential, ProbitPotential
from numpyro_ext.potentials.base import potential
from numpyro_ext.structure.latent_gaussian import Blocks, LatentGaussian

KEY = jax.random.key(0)


def graded_answers(num_people, num_items, num_traits, seed=0, num_categories=3, correlation=0.4):
    """Answers drawn from graded items with a trait each, of correlated traits, and the pattern of these."""
    rng = np.random.default_rng(seed)
    of_items = np.arange(num_items) % num_traits
    covariance = correlation + (1.0 - correlation) * np.eye(num_traits)
    trait = rng.multivariate_normal(np.zeros(num_traits), covariance, size=num_people)
    slope = np.exp(0.3 * rng.normal(size=num_items))
    cuts = np.linspace(-1.2, 1.2, num_categories - 1) + 0.2 * rng.normal(size=(num_items, 1))
    above = expit((slope * trait[:, of_items])[..., None] - cuts)
    answers = (rng.random((num_people, num_items, 1)) < above).sum(-1)
    return answers, np.eye(num_traits, dtype=int)[of_items]


def scores_of(engine, *args, **kwargs):
    """Scores of all blocks at the end of a run, its search, and its reading and programs."""
    reading = engine._read(KEY, args, kwargs)
    space, _, programs = engine._compile(reading)
    search = engine.last_state.search
    return np.asarray(programs._scores(reading.data, space.fixed, search)[0]), search


ARGUMENTS = {"family": "graded", "num_categories": 3, "correlated": True}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [EP, LaplaceApproximation])
def test_scores_are_derivatives_of_the_evidence_of_each_block_alone(kind):
    answers, pattern = graded_answers(30, 6, 2)
    answers = answers.astype(float)
    answers[2, 3] = np.nan
    engine = kind(partial(item_response, pattern=pattern, **ARGUMENTS), max_hyper_steps=3, progress_bar=False)
    with pytest.warns(UserWarning, match="did not converge"):
        engine.run(KEY, answers)
    found, search = scores_of(engine, answers)
    np.testing.assert_allclose(found.sum(0), search.best.gradient, atol=1e-6 * np.abs(search.best.gradient).max())
    # a person alone, by differences of the evidence along random directions
    rng = np.random.default_rng(1)
    for person in (0, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one person no item has two answers
            reading = engine._read(KEY, (answers[[person]],), {})
        space, _, programs = engine._compile(reading)
        for direction in rng.normal(size=(2, search.values.size)):
            sides = []
            for step in (1e-4, -1e-4):
                hyper = space.unpack(search.values + step * direction)
                begun = programs.init_state(reading.data, hyper)
                sides.append(float(programs.solve(reading.data, hyper, begun, num_steps=200)[2]))
            np.testing.assert_allclose(found[person] @ direction, (sides[0] - sides[1]) / 2e-4, rtol=1e-5, atol=1e-6)


def shared_numbers(count, group):
    """Priors and factors that share their numbers: a scale of all effects and a dispersion of all factors."""
    shift = numpyro.param("shift", np.zeros(19))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    dispersion = numpyro.sample("dispersion", dist.LogNormal(1.0, 0.5))
    with numpyro.plate("groups", 40):
        effect = numpyro.sample("effect", dist.Normal(0.0, scale))
    rate = 1.0 + effect[group] + shift[np.arange(group.size) % 19]
    numpyro.sample("count", dist.NegativeBinomial2(jnp.exp(rate), dispersion), obs=count)


@pytest.mark.thorough
def test_blocks_have_their_part_of_numbers_that_all_share():
    rng = np.random.default_rng(2)
    group = np.arange(400) % 40
    count = rng.poisson(np.exp(1.0 + 0.4 * rng.normal(size=40))[group])
    engine = EP(shared_numbers, max_hyper_steps=4, integrate="none", progress_bar=False)
    with pytest.warns(UserWarning, match="did not converge"):
        engine.run(KEY, count, group)
    found, search = scores_of(engine, count, group)
    reading = engine._read(KEY, (count, group), {})
    space, _, programs = engine._compile(reading)
    of_prior = np.asarray(jax.grad(lambda x: programs.log_prior(reading.data, space.fixed, x))(search.values))
    total = np.asarray(search.best.gradient)
    np.testing.assert_allclose(found.sum(0), total - of_prior, atol=1e-6 * np.abs(total).max())


@potential
class Levels(Potential):
    """Normal factors about levels of a table that all look up."""

    table: jax.Array
    index: jax.Array

    def log_density(self, eta):
        return -0.5 * jnp.square(eta - self.table[self.index])


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        (Levels(jnp.arange(3.0), jnp.arange(80) % 3), False),
        (ProbitPotential(jnp.ones(80)), True),
        (CumulativeLogitPotential(jnp.arange(80) % 3, jnp.array([-1.0, 1.0])), True),
        (ElementwisePotential(lambda eta, y: -jnp.square(eta - y), (jnp.zeros(80),)), False),
    ],
)
def test_factors_that_look_up_a_table_have_no_scores_of_blocks(factors, expected):
    rows = jnp.arange(80)
    form = LatentGaussian(
        (DiagonalPrior(jnp.ones(40)),), SparseRows((rows % 40)[:, None], jnp.ones((80, 1)), 40), jnp.zeros(80),
        (factors,), (jnp.ones(80, bool),), jnp.zeros(()), Blocks(rows.reshape(2, 40).T, jnp.arange(40)[:, None]),
    )  # fmt: skip
    assert has_block_scores(form, 20) == expected
    assert not has_block_scores(form, 41)  # more hyperparameters than blocks


def test_information_shrinks_correlations_that_chance_explains():
    rng = np.random.default_rng(0)
    scales = np.logspace(-2.0, 2.0, 40)
    alone = information(scales * rng.normal(size=(60, 40)))
    inner = alone / np.sqrt(np.outer(np.diagonal(alone), np.diagonal(alone)))
    assert np.abs(inner - np.eye(40)).max() < 0.2  # 0.4 of the sample itself
    root = np.linalg.cholesky(0.9 + 0.1 * np.eye(40))
    scores = rng.normal(size=(2000, 40)) @ root.T + 3.0
    np.testing.assert_allclose(information(scores) / 2000, root @ root.T, atol=0.1)
    few = information(scores[:20])
    assert np.linalg.eigvalsh(few)[0] > 0.0


def test_a_hyperparameter_without_effect_has_no_information():
    scores = np.random.default_rng(0).normal(size=(50, 3)) * [1.0, 0.0, 2.0]
    found = information(scores)
    assert np.all(np.isfinite(found)) and not np.any(found[1])


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "off"), [(EP, 0.005), (LaplaceApproximation, 0.2)])
def test_searches_over_many_items_of_correlated_traits_end_where_the_exact_one_does(kind, off):
    """Estimates by Laplace's method have a bias of their own, with eight items a trait."""
    answers, pattern = graded_answers(600, 16, 2)
    model = partial(item_response, pattern=pattern, **ARGUMENTS)
    exact = AdaptiveQuadrature(model, progress_bar=False)
    exact.run(KEY, answers)
    engine = kind(model, progress_bar=False)
    engine.run(KEY, answers)
    assert engine.diagnostics.converged
    assert engine.diagnostics.hyper.num_iterations < 40  # more than a hundred without a metric
    for name in ("free_discrimination", "cutpoints", "trait_cholesky"):
        np.testing.assert_allclose(engine.hyper[name].value, exact.hyper[name].value, rtol=off, atol=off)
