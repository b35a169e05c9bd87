"""Counts with a rectified rate, against SciPy's and NumPyro's Poisson and against finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from jax import random
from numpyro.distributions.batch_util import vmap_over

from numpyro_ext.distributions import RectifiedLinearPoisson, SoftplusPoisson

BOTH = pytest.mark.parametrize("family", [RectifiedLinearPoisson, SoftplusPoisson])
PREDICTOR = np.array([-3.0, -0.4, 0.0, 0.3, 1.7, 40.0])
EXPOSURE = np.array([1.0, 0.5, 2.0, 3.0, 0.25, 1.5])
OFFSET = 0.5
EPS = float(jnp.finfo(jnp.result_type(float)).eps)


def expected_rate(family: type) -> np.ndarray:
    shifted = PREDICTOR + OFFSET
    return EXPOSURE * (np.maximum(shifted, 0.0) if family is RectifiedLinearPoisson else np.logaddexp(shifted, 0.0))


@pytest.mark.float32
@BOTH
def test_log_prob_mean_variance_and_cdf_are_those_of_a_poisson(family):
    d = family(PREDICTOR, EXPOSURE, OFFSET)
    rate = expected_rate(family)
    counts = np.arange(12)[:, None]
    # The terms of the log density reach 160 and cancel.
    expected = scipy.stats.poisson.logpmf(counts, rate)
    np.testing.assert_allclose(d.log_prob(counts), expected, rtol=20 * EPS, atol=600 * EPS)
    np.testing.assert_allclose(d.mean, rate, rtol=20 * EPS, atol=20 * EPS)
    np.testing.assert_allclose(d.variance, rate, rtol=20 * EPS, atol=20 * EPS)
    values = np.array([-1.0, 0.0, 0.5, 3.0, 50.0])[:, None]
    np.testing.assert_allclose(d.cdf(values), scipy.stats.poisson.cdf(values, rate), atol=100 * EPS)


def test_equals_the_composition_with_numpyro_poisson():
    counts = jnp.array([0, 0, 4, 2, 1, 60])
    for family, rectify in (
        (RectifiedLinearPoisson, lambda x: jnp.maximum(x, 0.0)),
        (SoftplusPoisson, jax.nn.softplus),
    ):
        composition = dist.Poisson(EXPOSURE * rectify(PREDICTOR + OFFSET))
        np.testing.assert_allclose(
            family(PREDICTOR, EXPOSURE, OFFSET).log_prob(counts), composition.log_prob(counts), rtol=1e-14
        )


@BOTH
def test_probabilities_sum_to_one(family):
    total = jnp.exp(family(PREDICTOR, EXPOSURE, OFFSET).log_prob(jnp.arange(200)[:, None])).sum(0)
    np.testing.assert_allclose(total, 1.0, rtol=1e-12)


def test_zero_rate_allows_only_the_count_zero():
    d = RectifiedLinearPoisson(jnp.array([-2.0, -2.0, 0.0, 0.0]))
    np.testing.assert_array_equal(d.log_prob(jnp.array([0, 1, 0, 3])), [0.0, -np.inf, 0.0, -np.inf])


def log_prob_of(family: type, count: float):
    return lambda f, c, b: family(f, c, b).log_prob(count)


@functools.cache
def derivatives_of(family: type):
    """Value, gradient and matrix of second derivatives at a point and a count, as one program for all cases."""

    def log_prob(point, count):
        return family(*point).log_prob(count)

    return jax.jit(lambda *x: (log_prob(*x), jax.grad(log_prob)(*x), jax.hessian(log_prob)(*x)))


@BOTH
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("predictor", [0.3, 2.0, 25.0])
def test_gradients_match_finite_differences(family, count, predictor):
    derivatives = derivatives_of(family)
    point = np.array([predictor, 1.3, 0.2])
    _, gradient, hessian = derivatives(point, count)
    for i, step in enumerate(1e-5 * np.eye(3)):
        (above, slope_above, _), (below, slope_below, _) = (
            derivatives(point + step, count),
            derivatives(point - step, count),
        )
        np.testing.assert_allclose(gradient[i], (above - below) / 2e-5, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(hessian[i], (slope_above - slope_below) / 2e-5, rtol=1e-5, atol=1e-7)


@pytest.mark.float32
def test_gradient_is_zero_and_finite_where_the_rate_is_zero():
    for count in (0, 2):
        gradient = jax.grad(log_prob_of(RectifiedLinearPoisson, count), argnums=(0, 1, 2))
        for predictor in (-1e30, -1.0, 0.0):
            np.testing.assert_array_equal(gradient(predictor, 2.0, 0.0), 0.0)
    assert jax.grad(log_prob_of(RectifiedLinearPoisson, 0))(1.0, 2.0, 0.0) == -2.0


@pytest.mark.float32
def test_softplus_log_rate_and_its_slope_are_accurate_in_the_left_tail():
    def log_rate(f):
        return SoftplusPoisson(f).log_prob(1) + jax.nn.softplus(f)

    x = jnp.linspace(-700.0, 3.0, 1407)
    tolerance = 60 * EPS
    # Extended precision reaches exp(-11000), where float64 ends at exp(-745) and float32 at exp(-103).
    exact = np.asarray(x).astype(np.longdouble)
    softplus = np.log1p(np.exp(exact))
    np.testing.assert_allclose(log_rate(x), np.log(softplus).astype(float), rtol=tolerance, atol=tolerance)
    slope = 1.0 / ((1.0 + np.exp(-exact)) * softplus)
    np.testing.assert_allclose(jax.vmap(jax.grad(log_rate))(x), slope.astype(float), rtol=tolerance)


@pytest.mark.float32
@BOTH
def test_sample_moments(family):
    d = family(PREDICTOR, EXPOSURE, OFFSET)
    num_samples = 20_000
    draws = d.sample(random.key(0), (num_samples,))
    assert draws.shape == (num_samples, 6)
    assert jnp.issubdtype(draws.dtype, jnp.integer)
    rate = expected_rate(family)
    standard_error = np.sqrt(rate / num_samples)
    assert np.all(np.abs(draws.mean(0) - rate) <= 4 * standard_error)
    # Var(sample variance) = (fourth central moment - variance^2) / n; the former is 3 rate^2 + rate.
    assert np.all(np.abs(draws.var(0) - rate) <= 4 * np.sqrt((2 * rate**2 + rate) / num_samples))


def shape_of(function, *arguments):
    """The shape of what a function returns, without compiling it."""
    return jax.eval_shape(function, *arguments).shape


@BOTH
def test_shapes(family):
    d = family(jnp.ones((3, 1)), exposure=jnp.ones(4), offset=jnp.zeros((2, 1, 1)))
    assert d.batch_shape == (2, 3, 4)
    assert d.event_shape == ()
    assert d.mean.shape == d.variance.shape == shape_of(d.sample, random.key(0)) == (2, 3, 4)
    assert shape_of(lambda key: d.sample(key, (5,)), random.key(0)) == (5, 2, 3, 4)
    assert shape_of(d.log_prob, jnp.zeros((5, 1, 1, 1))) == (5, 2, 3, 4)
    scalar = family(1.0)
    assert scalar.batch_shape == shape_of(scalar.sample, random.key(0)) == shape_of(scalar.log_prob, 2) == ()


@BOTH
def test_expand_and_to_event(family):
    d = family(PREDICTOR, EXPOSURE, OFFSET)
    counts = jnp.arange(6)
    expanded = d.expand((2, 6))
    np.testing.assert_array_equal(expanded.log_prob(counts), jnp.broadcast_to(d.log_prob(counts), (2, 6)))
    assert expanded.sample(random.key(1), (3,)).shape == (3, 2, 6)
    event = family(1.0 + np.abs(PREDICTOR)).to_event(1)
    assert event.event_shape == (6,)
    np.testing.assert_allclose(event.log_prob(counts), event.base_dist.log_prob(counts).sum(), rtol=1e-14)
    assert event.support.is_discrete


@BOTH
def test_integer_and_numpy_parameters(family):
    np.testing.assert_allclose(family(2, 3, 1).log_prob(4), family(2.0, 3.0, 1.0).log_prob(4.0), rtol=1e-15)
    assert jnp.issubdtype(family(np.array([2, 3])).mean.dtype, jnp.floating)


@BOTH
def test_is_a_pytree(family):
    d = family(PREDICTOR, EXPOSURE, OFFSET)
    leaves, structure = jax.tree.flatten(d)
    assert len(leaves) == 3
    again = jax.tree.unflatten(structure, leaves)
    counts = jnp.arange(6)
    assert type(again) is family
    assert again.batch_shape == d.batch_shape
    np.testing.assert_array_equal(again.log_prob(counts), d.log_prob(counts))
    np.testing.assert_allclose(jax.jit(lambda d, y: d.log_prob(y))(d, counts), d.log_prob(counts), rtol=1e-14)
    doubled = jax.jit(lambda d: family(2.0 * d.predictor, d.exposure, d.offset))(d)
    np.testing.assert_array_equal(doubled.predictor, 2 * PREDICTOR)


@BOTH
def test_vmap_equals_broadcasting(family):
    d = family(PREDICTOR, EXPOSURE, OFFSET)
    counts = jnp.arange(6)
    batched = jax.vmap(family, in_axes=(0, 0, None))(PREDICTOR, EXPOSURE, OFFSET)
    np.testing.assert_array_equal(jax.vmap(lambda d, y: d.log_prob(y))(batched, counts), d.log_prob(counts))
    full = family(PREDICTOR, EXPOSURE, np.full(6, OFFSET))
    axes = vmap_over(full, predictor=0, exposure=0, offset=0)
    by_axes = jax.vmap(lambda d, y: d.log_prob(y), in_axes=(axes, 0))(full, counts)
    np.testing.assert_array_equal(by_axes, d.log_prob(counts))


@BOTH
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"predictor": np.nan}, "predictor"),
        ({"predictor": np.array([1.0, np.inf])}, "predictor"),
        ({"predictor": 1.0, "exposure": 0.0}, "exposure"),
        ({"predictor": 1.0, "exposure": -1.0}, "exposure"),
        ({"predictor": 1.0, "offset": np.nan}, "offset"),
    ],
)
def test_invalid_parameters_are_refused_by_name(family, arguments, name):
    with pytest.raises(ValueError, match=f"{family.__name__} distribution got invalid {name} parameter"):
        family(**arguments, validate_args=True)


@BOTH
def test_invalid_counts_have_probability_zero_when_validated(family):
    d = family(1.0, validate_args=True)
    with pytest.warns(UserWarning, match="Out-of-support values"):
        np.testing.assert_array_equal(d.log_prob(jnp.array([-1.0, 0.5])), -np.inf)


@BOTH
def test_sample_wants_a_key(family):
    with pytest.raises(TypeError, match=f"{family.__name__}.sample needs a random key"):
        family(1.0).sample(None)


def test_incompatible_shapes_are_refused():
    with pytest.raises(ValueError, match="[Ii]ncompatible shapes"):
        RectifiedLinearPoisson(jnp.ones(3), exposure=jnp.ones(2))
