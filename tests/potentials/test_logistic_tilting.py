"""The short rule of logistic factors against sums over many more nodes, and what it sees of a factor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.potentials import CumulativeLogitPotential, LogitPotential
from numpyro_ext.potentials.integrals.tilted import logistic_tilting
from tests.potentials.test_tilted_moments import needs_float64
from tests.tiers import few

MEANS = np.linspace(-15.0, 15.0, 121)
WIDTHS = (0.001, 0.5, 4.0, 30.0)
VARIANCES = sorted({1e-6, *logistic_tilting._WIDEST_OF_RULE, 1.0001, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 12.0, 16.0})


def factors():
    """Labels of two and of three categories, the middle one of several widths, at each of the means."""
    yield from (LogitPotential(jnp.full(len(MEANS), label)) for label in (0.0, 1.0))
    for width in WIDTHS:
        for label in (0, 1, 2):
            yield CumulativeLogitPotential(jnp.full(len(MEANS), label), 0.5 * width * jnp.array([-1.0, 1.0]))


def means_of(variance):
    """As far as factors pull."""
    return MEANS * max(1.0, variance / 4.0)


@jax.jit
def moments(potential, means, variance):
    return potential.tilted_moments(means, jnp.full(len(MEANS), variance))


@jax.jit
def many_nodes(potential, means, variance):
    """Log normaliser, mean and variance in units of the cavity, and the mean of the slope and its covariance with the
    predictor in these units, by 4001 even nodes."""
    z = jnp.linspace(-20.0, 20.0, 4001)[:, None]
    eta = means + jnp.sqrt(variance) * z
    value, slope, _ = jax.vmap(potential.derivatives)(eta)
    exponent = value - 0.5 * z**2
    height = jnp.max(exponent, axis=0)
    weight = jnp.exp(exponent - height)
    total = jnp.sum(weight, axis=0)
    mean = jnp.sum(weight * z, axis=0) / total
    spread = jnp.sum(weight * (z - mean) ** 2, axis=0) / total
    push = jnp.sum(weight * slope, axis=0) / total
    bend = jnp.sum(weight * slope * (z - mean), axis=0) / total
    return height + jnp.log(total * 0.01 / jnp.sqrt(2.0 * jnp.pi)), mean, spread, push, bend


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("variance", few(VARIANCES, 6))
def test_moments_at_the_widest_cavities_of_each_rule(variance):
    scale, means = np.sqrt(variance), means_of(variance)
    for potential in factors():
        found = moments(potential, means, variance)
        log_z, mean, spread, push, bend = many_nodes(potential, means, variance)
        np.testing.assert_allclose(found.log_z, log_z, rtol=1e-13, atol=1e-12)
        np.testing.assert_allclose((found.mean - means) / scale, mean, atol=2e-12)
        np.testing.assert_allclose(found.variance / variance, spread, atol=2e-12)
        # by Stein's identity, without the cancellation of moments that a narrow cavity has
        np.testing.assert_allclose(found.site_precision, -bend / (spread * scale), rtol=1e-9, atol=1e-11)
        shift = (push - bend / scale * means) / spread
        np.testing.assert_allclose(found.site_shift, shift, rtol=1e-9, atol=1e-11 * (1.0 + np.abs(means)).max())


@needs_float64
@pytest.mark.parametrize("far", [0.0, 700.0, -4000.0])
def test_a_factor_as_seen_from_anywhere(far):
    eta, step = far + MEANS, jnp.linspace(-9.0, 9.0, 7)[:, None]

    @jax.jit
    def view(potential):
        whole = potential if isinstance(potential, LogitPotential) else potential._interval(eta, 1.0)
        return whole.seen_from(jnp.asarray(eta)), jax.vmap(potential.log_density)(eta + step)

    for potential in factors():
        seen, expected = view(potential)
        parts = jnp.stack(seen[1:])
        np.testing.assert_allclose(jnp.sum(parts, axis=0), 1.0, rtol=1e-14)
        assert bool(jnp.all(parts >= 0.0))
        there = seen.log_value - jnp.log(seen.level + seen.fall * jnp.exp(step) + seen.rise * jnp.exp(-step))
        np.testing.assert_allclose(there, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@needs_float64
def test_derivatives_of_the_log_normaliser_alone_are_those_of_the_moments():
    thresholds = jnp.stack([jnp.linspace(-2.0, 0.0, 121), jnp.linspace(0.5, 3.0, 121)], axis=-1)
    label, variance = jnp.arange(121) % 3, jnp.linspace(0.1, 3.9, 121)

    def of_moments(*cavity_and_thresholds):
        mean, variance, thresholds = cavity_and_thresholds
        return CumulativeLogitPotential(label, thresholds).tilted_moments(mean, variance).log_z.sum()

    def alone(*cavity_and_thresholds):
        mean, variance, thresholds = cavity_and_thresholds
        return CumulativeLogitPotential(label, thresholds).log_normaliser(mean, variance).sum()

    at = jnp.asarray(MEANS), variance, thresholds
    np.testing.assert_allclose(alone(*at), of_moments(*at), rtol=1e-14)
    for here, there in zip(jax.grad(alone, (0, 1, 2))(*at), jax.grad(of_moments, (0, 1, 2))(*at), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-12, atol=1e-14)
