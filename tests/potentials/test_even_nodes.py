"""The trapezoidal rule for unknown factors is trusted where it is right, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.special import log_ndtr

from numpyro_ext.potentials import ElementwisePotential, tilted_moments
from numpyro_ext.potentials.integrals.tilted.tilted_moments import on_even_nodes, on_few_nodes
from numpyro_ext.potentials.moments import TiltedMoments

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="compares in double precision")


Rule = Callable[..., tuple[TiltedMoments, jax.Array]]
RULES: list[Rule] = [on_even_nodes, on_few_nodes]


def _kinks(num: int) -> tuple[np.ndarray, ...]:
    """Cavity means and variances, places of kinks, and slopes beside them from one millionth to thirty."""
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=num),
        10 ** rng.uniform(-2, 1.5, num),
        2 * rng.normal(size=num),
        10 ** rng.uniform(-6, 1.5, num),
    )


def _log_z(
    mean: np.ndarray, variance: np.ndarray, place: np.ndarray, left: np.ndarray, right: np.ndarray
) -> np.ndarray:
    """Of a factor that falls like ``exp(-left |x|)`` and ``exp(-right |x|)`` to the sides of a place."""
    scale = np.sqrt(variance)
    below = left * (mean - place) + 0.5 * left**2 * variance + log_ndtr((place - mean - left * variance) / scale)
    above = -right * (mean - place) + 0.5 * right**2 * variance + log_ndtr((mean - right * variance - place) / scale)
    return np.asarray(np.logaddexp(below, above))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_tent", [True, False])
def test_no_kink_is_trusted_for_which_the_sum_is_wrong(is_tent: bool, rule: Rule) -> None:
    mean, variance, place, slope = _kinks(4000)

    def log_factor(eta: jax.Array, place: jax.Array, slope: jax.Array) -> jax.Array:
        return -slope * (jnp.abs(eta - place) if is_tent else jnp.maximum(eta - place, 0.0))

    potential = ElementwisePotential(log_factor, (jnp.asarray(place), jnp.asarray(slope)))
    arrays = [jnp.asarray(x) for x in (mean, variance, np.ones_like(mean))]
    found, is_trusted = jax.jit(rule)(potential, *arrays)
    trusted = np.asarray(is_trusted)
    error = np.abs(np.asarray(found.log_z) - _log_z(mean, variance, place, slope * is_tent, slope))
    said = np.minimum(1.0, slope * np.sqrt(variance))
    assert np.max((error / said)[trusted]) < 1e-8
    # A kink that has mass to both sides is not for this rule.
    distance = np.abs(place - mean + slope * variance * (not is_tent)) / np.sqrt(variance)
    assert trusted[distance > 9.0].any()
    assert not trusted[
        (np.abs(place - mean) < np.sqrt(variance)) & (said > 1e-4) & (slope * np.sqrt(variance) < 1)
    ].any()


@pytest.mark.parametrize(("rule", "least", "tolerance"), [(on_even_nodes, 0.99, 1e-11), (on_few_nodes, 0.75, 1e-9)])
def test_smooth_factors_of_any_width_are_trusted_and_exact(rule: Rule, least: float, tolerance: float) -> None:
    """Bell curves from a hundredth to a hundred times the width of the cavity, up to thirty widths away."""
    rng = np.random.default_rng(1)
    width, place = 10 ** rng.uniform(-2, 2, 2000), rng.normal(size=2000) * 10
    variance = 10 ** rng.uniform(-1, 1, 2000)
    potential = ElementwisePotential(
        lambda eta, place, width: -0.5 * ((eta - place) / width) ** 2, (jnp.asarray(place), jnp.asarray(width))
    )
    arrays = [jnp.zeros(2000), jnp.asarray(variance), jnp.ones(2000)]
    found, is_trusted = jax.jit(rule)(potential, *arrays)
    trusted = np.asarray(is_trusted)
    exact = stats.norm.logpdf(place, 0.0, np.sqrt(variance + width**2)) + np.log(width * np.sqrt(2 * np.pi))
    assert trusted.mean() > least
    np.testing.assert_allclose(np.asarray(found.log_z)[trusted], exact[trusted], rtol=tolerance, atol=tolerance)
    exact_variance = 1.0 / (1.0 / variance + 1.0 / width**2)
    np.testing.assert_allclose(np.asarray(found.variance)[trusted], exact_variance[trusted], rtol=1e-9)


def beta_regression(eta, y, size):
    mean = jax.nn.sigmoid(eta)
    return dist.Beta(mean * size, (1.0 - mean) * size).log_prob(y)


@pytest.mark.thorough
@needs_float64
def test_values_at_few_nodes_are_enough_under_narrow_cavities():
    y, eta = jnp.array([0.02, 0.4, 0.9, 0.6]), jnp.array([-1.0, 0.5, 3.0, 0.0])
    factors = ElementwisePotential(beta_regression, (y, jnp.array([3.0, 10.0, 0.7, 100.0])))
    for variance in (1e-5, 1e-3, 0.02, 0.1, 10.0):
        cavity = eta, jnp.full(4, variance)
        found, is_trusted = on_few_nodes(factors, *cavity, jnp.ones(4))
        exact = tilted_moments(factors, *cavity, num_nodes=160)
        assert bool(jnp.all(is_trusted)) == (variance < 10.0)
        for part, unit in (("log_z", 1.0), ("mean", np.sqrt(variance)), ("variance", variance)):
            one, other = (np.asarray(getattr(m, part))[np.asarray(is_trusted)] for m in (found, exact))
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10 * unit)
        # site precisions by differences of values, in units of the precision of the cavity
        one, other = (variance * np.where(is_trusted, m.site_precision, 0.0) for m in (found, exact))
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@needs_float64
@pytest.mark.parametrize("width", [0.03, 0.1])
def test_kinks_and_narrow_peaks_are_not_trusted_at_few_nodes(width):
    places = jnp.linspace(-1.0, 1.0, 41)
    kinked = ElementwisePotential(lambda eta, y: -jnp.abs(eta - y) / 0.5, (places,))
    peaked = ElementwisePotential(
        lambda eta, y: jnp.logaddexp(0.0, 5.0 - 0.5 * jnp.square((eta - y) / width)), (places,)
    )
    for factors in (kinked, peaked):
        assert not bool(jnp.all(on_few_nodes(factors, jnp.zeros(41), jnp.ones(41), jnp.ones(41))[1]))


@pytest.mark.thorough
@needs_float64
def test_few_nodes_follow_the_mode():
    """Outcomes of which the tilted modes are up to six deviations of the cavity away."""
    y = jnp.array([1e-6, 1e-4, 0.03, 0.5])
    factors = ElementwisePotential(beta_regression, (y, jnp.full(4, 20.0)))
    cavity = jnp.zeros(4), jnp.full(4, 0.01)
    found, is_trusted = on_few_nodes(factors, *cavity, jnp.ones(4))
    exact = tilted_moments(factors, *cavity, num_nodes=160)
    assert bool(jnp.all(is_trusted))
    assert float(exact.mean[0]) < -0.6  # six of them
    for part in ("log_z", "mean", "variance"):
        np.testing.assert_allclose(getattr(found, part), getattr(exact, part), rtol=1e-9, atol=1e-12)


@pytest.mark.thorough
@needs_float64
def test_a_factor_that_is_no_number_where_it_has_no_mass_is_integrated():
    """Cauchy-like falls that are unknown beyond 25, where the density is a part of 1e-17 of its peak."""

    def fall(eta):
        return -3.0 * jnp.log1p(jnp.square(eta) / 8.0)

    def unknown_beyond(eta):
        return jnp.where(jnp.abs(eta) < 25.0, fall(eta), jnp.nan)

    def log_z(function, variance):
        found, is_trusted = on_even_nodes(ElementwisePotential(function), jnp.zeros(2), variance, jnp.ones(2))
        return jnp.sum(found.log_z), is_trusted

    values = jnp.full(2, 12.0)
    (found, is_trusted), slope = jax.value_and_grad(lambda v: log_z(unknown_beyond, v), has_aux=True)(values)
    (exact, _), exact_slope = jax.value_and_grad(lambda v: log_z(fall, v), has_aux=True)(values)
    assert bool(jnp.all(is_trusted))
    np.testing.assert_allclose(found, exact, rtol=1e-12)
    np.testing.assert_allclose(slope, exact_slope, rtol=1e-9)
