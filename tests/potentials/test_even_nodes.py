"""The trapezoidal rule for unknown factors is trusted where it is right, and nowhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import log_ndtr

from numpyro_ext.potentials import ElementwisePotential
from numpyro_ext.potentials.integrals.tilted_moments import on_even_nodes


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


@pytest.mark.parametrize("is_tent", [True, False])
def test_no_kink_is_trusted_for_which_the_sum_is_wrong(is_tent: bool) -> None:
    mean, variance, place, slope = _kinks(4000)

    def log_factor(eta: jax.Array, place: jax.Array, slope: jax.Array) -> jax.Array:
        return -slope * (jnp.abs(eta - place) if is_tent else jnp.maximum(eta - place, 0.0))

    potential = ElementwisePotential(log_factor, (jnp.asarray(place), jnp.asarray(slope)))
    arrays = [jnp.asarray(x) for x in (mean, variance, np.ones_like(mean))]
    found, is_trusted = jax.jit(on_even_nodes)(potential, *arrays)
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


def test_smooth_factors_of_any_width_are_trusted_and_exact() -> None:
    """Bell curves from a hundredth to a hundred times the width of the cavity, up to thirty widths away."""
    rng = np.random.default_rng(1)
    width, place = 10 ** rng.uniform(-2, 2, 2000), rng.normal(size=2000) * 10
    variance = 10 ** rng.uniform(-1, 1, 2000)
    potential = ElementwisePotential(
        lambda eta, place, width: -0.5 * ((eta - place) / width) ** 2, (jnp.asarray(place), jnp.asarray(width))
    )
    arrays = [jnp.zeros(2000), jnp.asarray(variance), jnp.ones(2000)]
    found, is_trusted = jax.jit(on_even_nodes)(potential, *arrays)
    trusted = np.asarray(is_trusted)
    exact = stats.norm.logpdf(place, 0.0, np.sqrt(variance + width**2)) + np.log(width * np.sqrt(2 * np.pi))
    assert trusted.mean() > 0.99
    np.testing.assert_allclose(np.asarray(found.log_z)[trusted], exact[trusted], rtol=1e-11, atol=1e-11)
    exact_variance = 1.0 / (1.0 / variance + 1.0 / width**2)
    np.testing.assert_allclose(np.asarray(found.variance)[trusted], exact_variance[trusted], rtol=1e-9)
