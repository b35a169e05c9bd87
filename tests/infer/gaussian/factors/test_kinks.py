"""Kinks that are written out by hand, which Laplace's method cannot know of before it fails."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, LaplaceApproximation
from numpyro_ext.infer.gaussian.fitting.kinks import slope_jumps

KEY = jax.random.key(0)
X = np.linspace(-1.0, 1.0, 12)
Y = 1.0 + X + np.random.default_rng(0).normal(size=12)


def regression(loss):
    def model():
        level = numpyro.sample("level", dist.Normal(0.0, 5.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
        numpyro.factor("loss", -jnp.sum(loss(Y - (level + slope * X))))

    return model


def pinball(residual):
    return residual * (0.75 - (residual < 0.0))


def huber(residual):
    """Its slope has corners and does not jump."""
    far = jnp.abs(residual) > 1.0
    return jnp.where(far, jnp.abs(residual) - 0.5, 0.5 * residual**2)


LOSSES = [
    (pinball, 1.0),  # the slope goes from -1/4 to 3/4 and changes nowhere else
    (lambda r: jnp.maximum(0.75 * r, -0.25 * r), 1.0),
    (lambda r: jnp.abs(r) + 0.5 * r**2, None),
    (huber, 0.0),
    (lambda r: jnp.log(jnp.cosh(3.0 * r)), 0.0),
]


@pytest.mark.parametrize("loss, expected", LOSSES)
def test_jumps_of_the_slope_are_told_from_steep_smooth_changes(loss, expected):
    reading = LaplaceApproximation(regression(loss))._read(KEY, (), {})
    found = np.asarray(slope_jumps(reading.compiled_form({}), 0))
    if expected is None:  # a jump of two among changes of eight prior deviations of the predictor
        scale = 5.0 * np.sqrt(1.0 + X**2)
        expected = 2.0 / (2.0 + 8.0 * scale)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.thorough
def test_laplace_names_the_site_with_kinks_and_the_engine_that_integrates_over_them():
    laplace, ep = LaplaceApproximation(regression(pinball), progress_bar=False), EP(regression(pinball))
    with pytest.warns(UserWarning, match="12 of 12 factors of 'loss' have a kink.*Use EP"):
        laplace.run(KEY)
    assert not laplace.diagnostics.converged and "kink" in laplace.diagnostics.messages[-1]
    ep.run(KEY)
    assert ep.diagnostics.converged
