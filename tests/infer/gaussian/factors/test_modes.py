"""Factors with two modes are said to have them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.gaussian.fitting.modes import valley_depths
from numpyro_ext.structure import read_latent_gaussian
from tests.tiers import thorough

SQUARES = np.array([4.0, 0.01, 1.0])


def squares(y, prior_scale=1.0):
    f = numpyro.sample("f", dist.Normal(0, prior_scale).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(f**2, 0.3).to_event(1), obs=y)


def test_depths_are_those_of_prior_times_factor():
    form = read_latent_gaussian(squares, (SQUARES,)).form({})

    def log_product(f, y):
        return -0.5 * ((y - f**2) / 0.3) ** 2 - 0.5 * f**2

    # Modes where the derivative vanishes, f^2 = y - s^2 / 2; the valley is at zero.
    peaks = np.sqrt(np.maximum(SQUARES - 0.045, 0.0))
    expected = log_product(peaks, SQUARES) - log_product(0.0, SQUARES)
    # The grid has 16 points to a unit; at a peak of 2 the curvature is 4 f^2 / s^2.
    np.testing.assert_allclose(valley_depths(form, 0), expected, atol=0.5 * (4.0 * 4.0 / 0.09) * (1.0 / 32.0) ** 2)


@pytest.mark.parametrize("engine_class", [EP, *thorough(VariationalGaussian)])
def test_engines_say_that_a_square_has_two_modes(engine_class):
    engine = engine_class(squares, progress_bar=False)
    with pytest.warns(UserWarning, match=r"2 of 3 factors of 'y' have two modes"):
        engine.run(jax.random.key(0), SQUARES)
    assert "two modes" in engine.diagnostics.messages[-1]


@pytest.mark.thorough
def test_a_function_with_one_mode_is_run_without_a_word():
    def cubes(y):
        f = numpyro.sample("f", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(f + f**3, 0.3).to_event(1), obs=y)

    engine = EP(cubes, progress_bar=False)
    engine.run(jax.random.key(0), jnp.asarray(SQUARES))
    assert engine.diagnostics.messages == ()


@pytest.mark.thorough
def test_a_search_that_ends_between_two_modes_says_where():
    def even(y, loc):
        f = numpyro.sample("f", dist.Normal(loc, 1.0).expand([3]))
        numpyro.sample("y", dist.Poisson(f**2 + 0.5), obs=y)

    y = np.array([4, 2, 5])
    with pytest.raises(ValueError, match=r"site 'y' are not log-concave.* factor 2 .* at the predictor 0,") as caught:
        LaplaceApproximation(even, progress_bar=False).run(jax.random.key(0), y, 0.0)
    # Of 5 log(f^2 + 1/2) - f^2 at zero: 5 * 2 / (1/2) - 2.
    assert "second derivative 18 " in str(caught.value)
    engine = LaplaceApproximation(even, progress_bar=False)
    with pytest.warns(UserWarning, match="have two modes"):
        engine.run(jax.random.key(0), y, 1.0)  # the way out that it names
    f = np.asarray(engine.posterior["f"].mean)
    slope = 2.0 * f * (y / (f**2 + 0.5) - 1.0) - (f - 1.0)
    assert engine.diagnostics.converged and np.all(f > 0.0)
    np.testing.assert_allclose(slope, 0.0, atol=1e-6 if f.dtype == np.float64 else 1e-2)
