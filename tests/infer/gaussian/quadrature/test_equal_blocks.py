"""Blocks that are alike, counted once: against the same sums over all blocks, and against sums in NumPy."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp

from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.infer.gaussian.algorithms.nodes.find_shared_columns import find_kinds, kinds_hold
from numpyro_ext.infer.gaussian.algorithms.nodes.shared_columns import SharedColumns
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from tests.compilations import compiled_programs
from tests.readings import with_fit_costs

_NUM_PEOPLE = 60
_GROUP = np.arange(_NUM_PEOPLE) % 3


_WEIGHTS = np.where(np.arange(_NUM_PEOPLE) % 2, 1.5, 0.5)


def two_kinds_of_items(answers=None, grades=None, mask=True, weights=1.0):
    """Two families, gaps, weights of grades, and a location and a spread of the trait that differ between groups."""
    a = numpyro.param("slope", jnp.array([0.7, 1.3]), constraint=dist.constraints.positive)
    d = numpyro.param("intercept", jnp.array([0.2, -0.4]))
    cutpoints = numpyro.param("cutpoints", jnp.array([-1.0, 0.3]))
    location = numpyro.param("location", jnp.array([0.0, 0.5, 0.5]))
    spread = numpyro.param("spread", jnp.array([1.0, 1.2, 0.8]), constraint=dist.constraints.positive)
    with numpyro.plate("people", _NUM_PEOPLE):
        trait = numpyro.sample("trait", dist.Normal(location[_GROUP], spread[_GROUP]))
    with numpyro.handlers.mask(mask=mask):
        numpyro.sample("answers", dist.Bernoulli(logits=a * trait[:, None] + d), obs=answers)
    with nullcontext() if np.ndim(weights) == 0 else numpyro.handlers.scale(scale=weights):
        numpyro.sample("grades", dist.OrderedLogistic(trait, cutpoints), obs=grades)


weighted_items = partial(two_kinds_of_items, weights=_WEIGHTS)


def two_traits(answers=None, grades=None, mask=True):
    slopes = numpyro.param("slopes", jnp.array([[0.7, 0.0], [0.6, 1.1]]))
    d = numpyro.param("intercept", jnp.array([0.2, -0.4]))
    with numpyro.plate("people", _NUM_PEOPLE):
        traits = numpyro.sample("traits", dist.Normal(jnp.zeros((_NUM_PEOPLE, 2)), 1.0).to_event(1))
    with numpyro.handlers.mask(mask=mask):
        numpyro.sample("answers", dist.Bernoulli(logits=traits @ slopes.T + d), obs=answers)
    numpyro.sample("grades", dist.OrderedLogistic(traits @ jnp.array([0.3, 0.5]), jnp.array([-1.0, 0.3])), obs=grades)


def _data(seed=0):
    generator = np.random.default_rng(seed)
    answers, grades = generator.integers(0, 2, (_NUM_PEOPLE, 2)), generator.integers(0, 3, _NUM_PEOPLE)
    mask = np.ones((_NUM_PEOPLE, 2), bool)
    mask[::7, 0] = False
    return answers, np.minimum(grades, 1 + _GROUP // 2), mask


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "chunk"),
    [(two_kinds_of_items, None), (two_kinds_of_items, 7), (weighted_items, 7), (two_traits, None)],
)
def test_all_sums_are_those_over_all_blocks(model, chunk):
    engine = with_fit_costs(AdaptiveQuadrature, most_kinds=2.0)(model)
    plain = engine._read(jax.random.key(0), _data(), {})
    reading = engine._with_kinds(plain)
    with_kinds, without = engine.algorithm(reading), engine.algorithm(plain)
    assert isinstance(with_kinds, SharedColumns) and without == dataclasses.replace(with_kinds, num_kinds=None)
    # one for each combination of group, answers, gaps, grade and weight, counted by NumPy
    answers, grades, mask = _data()
    own = np.column_stack(
        [np.where(mask, answers, -1), grades, _GROUP * (model is not two_traits), _WEIGHTS * (model is weighted_items)]
    )
    assert int(np.sum(reading.kinds.number > 0)) == len(np.unique(own, axis=0)) < _NUM_PEOPLE
    if chunk is not None:
        with_kinds = dataclasses.replace(with_kinds, largest_chunk=chunk * with_kinds.num_nodes)
    space = UnconstrainedSpace(reading.hyper, {})
    values = space.initial() + 0.1 * np.cos(np.arange(space.size))

    def everything(algorithm, of):
        def form_fn(x):
            return of.form(space.unpack(x), of.data)

        def found(x):
            grid, info, held = algorithm.solve_and_hold(form_fn(x), None, num_steps=1, tol=1e-8)
            return {
                "evidence": (info.objective, algorithm.log_evidence(form_fn(x), grid)),
                "gradient": jax.grad(lambda y: algorithm.held_evidence(form_fn(y), grid, held))(x),
                "information": algorithm.second_derivatives(form_fn, x, grid, is_rough=False),
                "blocks": algorithm.with_finer_rule(form_fn(x), grid),
                "moments": algorithm.posterior(form_fn(x), grid).block_moments(),
            }

        return jax.jit(found)(values)

    found, expected = everything(with_kinds, reading), everything(without, plain)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11), found, expected)


def test_priors_that_differ_elsewhere_are_no_kind():
    """People of different groups are alike where all groups have the same location, and nowhere else."""
    engine = with_fit_costs(AdaptiveQuadrature, most_kinds=2.0)(two_kinds_of_items)
    reading = engine._read(jax.random.key(0), _data(), {})
    hyper = dict(reading.initial_hyper())
    same = reading.compiled_form(hyper | {"location": jnp.zeros(3), "spread": jnp.ones(3)})
    algorithm = engine.algorithm(reading)
    kinds = find_kinds([same], algorithm, 2.0)
    assert kinds is not None and kinds_hold(same._replace(kinds=kinds), algorithm)
    other = reading.compiled_form(hyper)._replace(kinds=kinds)
    assert not kinds_hold(other, algorithm)


def short_test(response):
    a = numpyro.param("slope", jnp.ones(4), constraint=dist.constraints.positive)
    d = numpyro.param("intercept", jnp.zeros(4))
    with numpyro.plate("people", len(response)):
        trait = numpyro.sample("trait", dist.Normal(0.0, 1.0))
    numpyro.sample("response", dist.Bernoulli(logits=a * trait[:, None] + d), obs=response)


def _short_answers(seed):
    generator = np.random.default_rng(seed)
    trait = generator.normal(size=(400, 1))
    return (generator.random((400, 4)) < 1.0 / (1.0 + np.exp(-np.array([0.8, 1.2, 1.0, 1.5]) * trait))).astype(int)


@pytest.fixture(scope="module")
def engine():
    found = AdaptiveQuadrature(short_test, progress_bar=False)
    found.run(jax.random.key(0), _short_answers(0))
    return found


@pytest.mark.thorough
def test_a_short_test_has_a_row_for_each_pattern_and_answers_for_each_person(engine):
    y, grid = _short_answers(0), np.linspace(-9.0, 9.0, 1001)
    assert engine._run.algorithm.num_kinds == 16 and engine.diagnostics.converged
    logit = np.asarray(engine.hyper["slope"].value) * grid[:, None] + np.asarray(engine.hyper["intercept"].value)
    terms = np.where(y[:, None, :] == 1, -np.logaddexp(0, -logit), -np.logaddexp(0, logit)).sum(-1)
    terms = terms - 0.5 * grid**2 - 0.5 * np.log(2 * np.pi) + np.log(grid[1] - grid[0])
    weights = np.exp(terms - logsumexp(terms, axis=1, keepdims=True))
    assert float(engine.log_evidence) == pytest.approx(logsumexp(terms, axis=1).sum(), abs=1e-8)
    np.testing.assert_allclose(engine.posterior["trait"].mean, weights @ grid, atol=1e-8)
    assert engine.get_samples()["trait"].shape == (1000, 400)
    likelihood = 1.0 / (1.0 + np.exp(np.where(y[:, None, :] == 1, -logit, logit)))
    without = -np.log(np.einsum("bq,bqg->bg", weights, 1.0 / likelihood))
    np.testing.assert_allclose(engine._run.leave_one_out[0].reshape(y.shape), without, atol=1e-8)


@pytest.mark.thorough
def test_items_are_those_of_a_fit_to_all_people_one_by_one(engine):
    one_by_one = with_fit_costs(AdaptiveQuadrature, most_kinds=0.0)(short_test, progress_bar=False)
    one_by_one.run(jax.random.key(0), _short_answers(0))
    assert one_by_one._run.algorithm.num_kinds is None
    for name, found in engine.hyper.items():  # searches end where no derivative is above 1e-4
        expected = one_by_one.hyper[name]
        assert np.all(np.abs(found.value - expected.value) < 1e-3 * expected.standard_error)
        np.testing.assert_allclose(found.standard_error, expected.standard_error, rtol=1e-3)


@pytest.mark.thorough
def test_other_answers_compile_nothing_and_files_hold_no_kinds(engine, tmp_path):
    np.asarray(engine.posterior["trait"].mean)
    with compiled_programs() as names:
        other = AdaptiveQuadrature(short_test, progress_bar=False)
        other.run(jax.random.key(1), _short_answers(1))
        np.asarray(other.posterior["trait"].mean)
    assert names == []
    engine.save(tmp_path / "fit")
    loaded = AdaptiveQuadrature.load(tmp_path / "fit", short_test)
    np.testing.assert_array_equal(loaded.get_samples()["trait"], engine.get_samples()["trait"])
    new = engine.fold_in(jax.random.key(2), _short_answers(0)[:100])
    np.testing.assert_allclose(new.posterior["trait"].mean, engine.posterior["trait"].mean[:100], atol=1e-10)
