"""Categorical distributions: enumeration, their definitions, sampling, shapes, pytrees and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from jax import random

from numpyro_ext.distributions import (
    AdjacentCategory,
    ContinuationRatio,
    MultinomialProbit,
    OrderedProbit,
    StickBreakingCategorical,
)
from numpyro_ext.potentials.families.binary import LogitPotential
from numpyro_ext.potentials.families.stick_breaking import stick_breaking_labels

THRESHOLDS = np.array([-0.8, 0.4])
PREDICTOR = np.array([-1.5, 0.2])
LOGITS = np.array([[0.5, -0.3], [2.0, 1.0]])
SCORES = np.array([0.0, 0.3, 1.0])
# Distributions of three categories, two of each.
CASES = {
    StickBreakingCategorical: (LOGITS,),
    OrderedProbit: (PREDICTOR, THRESHOLDS),
    ContinuationRatio: (PREDICTOR, THRESHOLDS[::-1]),
    AdjacentCategory: (PREDICTOR, THRESHOLDS, SCORES),
    MultinomialProbit: (np.array([[0.0, 1.0, -0.5], [2.0, 0.0, 1.5]]),),
}
ALL = pytest.mark.parametrize("family", CASES)


@pytest.mark.float32
@ALL
def test_probabilities_sum_to_one_and_are_those_of_log_prob(family):
    d = family(*(jnp.asarray(x, float) for x in CASES[family]))
    assert d.num_categories == 3
    assert d.batch_shape == (2,)
    assert d.event_shape == ()
    categories = d.enumerate_support()
    assert categories.shape == (3, 2)
    assert d.enumerate_support(expand=False).shape == (3, 1)
    log_prob = d.log_prob(categories)
    np.testing.assert_allclose(np.exp(log_prob).sum(0), 1.0, rtol=1e-6)
    np.testing.assert_allclose(d.probs, np.exp(log_prob).T, rtol=1e-5)
    assert d.probs.shape == (2, 3)
    assert bool(d.support(jnp.array([0, 2])).all())
    assert not bool(d.support(jnp.array([-1, 3])).any())


@pytest.mark.float32
def test_stick_breaking_by_breaking_sticks():
    first, second = scipy.stats.logistic.cdf(LOGITS).T
    expected = np.stack([first, (1 - first) * second, (1 - first) * (1 - second)], axis=-1)
    np.testing.assert_allclose(StickBreakingCategorical(LOGITS).probs, expected, rtol=1e-6)
    # The same as binary observations, some of them missing.
    labels, observed = stick_breaking_labels(jnp.array([1, 2]), 2)
    sites = LogitPotential(labels).log_density(jnp.asarray(LOGITS, float))
    log_prob = StickBreakingCategorical(LOGITS).log_prob(np.array([1, 2]))
    np.testing.assert_allclose(jnp.where(observed, sites, 0.0).sum(-1), log_prob, rtol=1e-6)
    # A continuation ratio breaks sticks of one predictor.
    ratio = ContinuationRatio(PREDICTOR, THRESHOLDS)
    sticks = StickBreakingCategorical(THRESHOLDS - PREDICTOR[:, None])
    np.testing.assert_allclose(ratio.log_probs, sticks.log_probs, rtol=1e-5)


@pytest.mark.float32
def test_ordered_ones_by_their_definitions():
    cdf = scipy.stats.norm.cdf(THRESHOLDS - PREDICTOR[:, None])
    np.testing.assert_allclose(np.cumsum(OrderedProbit(PREDICTOR, THRESHOLDS).probs, -1)[:, :2], cdf, rtol=1e-5)
    log_probs = AdjacentCategory(PREDICTOR, THRESHOLDS, SCORES).log_probs
    expected = np.diff(SCORES) * PREDICTOR[:, None] - THRESHOLDS
    np.testing.assert_allclose(np.diff(log_probs, axis=-1), expected, atol=1e-5)
    default = AdjacentCategory(PREDICTOR, THRESHOLDS).log_probs
    np.testing.assert_allclose(default, AdjacentCategory(PREDICTOR, THRESHOLDS, np.arange(3.0)).log_probs, rtol=1e-6)
    # A softmax of scores times the predictor.
    logits = SCORES * PREDICTOR[:, None] - np.array([0.0, -0.8, -0.4])
    np.testing.assert_allclose(log_probs, dist.Categorical(logits=logits).log_prob(np.arange(3)[:, None]).T, rtol=1e-5)


@ALL
def test_sampling_frequencies(family):
    d = family(*CASES[family])
    draws = d.sample(random.key(1), (20000,))
    assert draws.shape == (20000, 2)
    assert jnp.issubdtype(draws.dtype, jnp.integer)
    frequencies = (np.asarray(draws)[..., None] == np.arange(3)).mean(0)
    # Four and a half standard errors.
    np.testing.assert_array_less(np.abs(frequencies - d.probs), 4.5 * np.sqrt(d.probs * (1 - d.probs) / 20000))


def shape_of(function, *arguments):
    """The shape of what a function returns, without compiling it."""
    return jax.eval_shape(function, *arguments).shape


@ALL
def test_shapes(family):
    d = family(*CASES[family])
    assert shape_of(d.log_prob, jnp.zeros((3, 2), int)) == (3, 2)
    assert shape_of(d.log_prob, 1) == (2,)
    assert shape_of(d.sample, random.key(0)) == (2,)
    assert shape_of(d.expand((4, 2)).sample, random.key(0)) == (4, 2)
    single = family(*(x[0] if x.ndim == 2 or x is PREDICTOR else x for x in CASES[family]))
    assert single.batch_shape == shape_of(single.sample, random.key(0)) == shape_of(single.log_prob, 2) == ()
    np.testing.assert_allclose(single.log_probs, d.log_probs[0], rtol=1e-6)
    if len(CASES[family]) > 1:
        assert family(np.zeros((4, 1)), np.stack([THRESHOLDS] * 3)).batch_shape == (4, 3)


@pytest.mark.float32
@ALL
def test_is_a_pytree(family):
    d = family(*(jnp.asarray(x, float) for x in CASES[family]))
    value = jnp.array([2, 0])
    again = jax.tree.unflatten(jax.tree.structure(d), jax.tree.leaves(d))
    assert type(again) is family
    np.testing.assert_array_equal(again.log_prob(value), d.log_prob(value))
    np.testing.assert_allclose(jax.jit(lambda d, y: d.log_prob(y))(d, value), d.log_prob(value), rtol=1e-5)
    first, rest = jnp.asarray(CASES[family][0], float), CASES[family][1:]
    mapped = jax.vmap(lambda x, y: family(x, *rest).log_prob(y))(first, value)
    np.testing.assert_allclose(mapped, d.log_prob(value), rtol=1e-5)


@ALL
def test_values_out_of_range(family):
    value = jnp.array([-1, 3])
    assert np.all(np.isnan(family(*CASES[family], validate_args=False).log_prob(value)))
    with pytest.warns(UserWarning, match="Out-of-support values"):
        np.testing.assert_array_equal(family(*CASES[family], validate_args=True).log_prob(value), -np.inf)


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="OrderedProbit distribution got invalid cutpoints parameter"):
        OrderedProbit(0.0, THRESHOLDS[::-1], validate_args=True)
    with pytest.raises(ValueError, match="StickBreakingCategorical distribution got invalid logits parameter"):
        StickBreakingCategorical(np.array([np.nan, 0.0]), validate_args=True)
    with pytest.raises(ValueError, match="AdjacentCategory needs one score more than thresholds, 3 on the last axis"):
        AdjacentCategory(0.0, THRESHOLDS, np.arange(2.0))
    for family in (OrderedProbit, ContinuationRatio, AdjacentCategory):
        with pytest.raises(ValueError, match=f"{family.__name__} needs .* for at least two categories"):
            family(0.0, np.zeros(0))
    for family, argument in ((StickBreakingCategorical, 0.0), (MultinomialProbit, np.zeros(1))):
        with pytest.raises(ValueError, match=f"{family.__name__} needs .* for at least two categories"):
            family(argument)


@ALL
def test_sample_wants_a_key(family):
    with pytest.raises(TypeError, match=f"{family.__name__}.sample needs a random key"):
        family(*CASES[family]).sample(None)
