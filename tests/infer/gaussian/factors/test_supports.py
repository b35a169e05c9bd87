"""Factors that are zero at the mean of the prior: intervals, censoring and boxes far from it, of no family."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro.infer.util import log_density
from scipy.stats import truncnorm

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.gaussian.algorithms.modes import laplace
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation
from numpyro_ext.infer.gaussian.variational import natural_gradient
from numpyro_ext.potentials import ElementwisePotential
from numpyro_ext.structure import read_latent_gaussian
from tests.tiers import thorough

RNG = np.random.default_rng(0)
X = RNG.normal(size=20)
Y = 40.0 + 5.0 * X + 2.0 * RNG.normal(size=20)
LOWER = np.floor(Y)


def line():
    return numpyro.sample("a", dist.Normal(0.0, 50.0)) + numpyro.sample("b", dist.Normal(0.0, 10.0)) * X


def intervals(scale=2.0):
    """The difference of two distribution functions is zero in the floating point where both are one."""
    mean = line()
    numpyro.factor("y", jnp.log(norm.cdf((LOWER + 1.0 - mean) / scale) - norm.cdf((LOWER - mean) / scale)))


def tens():
    mean = line()
    near = np.round(Y, -1)
    numpyro.factor("y", jnp.log(norm.cdf(near + 5.0, mean, 2.0) - norm.cdf(near - 5.0, mean, 2.0)))


def censored():
    """The logarithm of a probability underflows far below the limit."""
    mean = line()
    numpyro.factor("y", jnp.where(Y > 42.0, jnp.log(norm.cdf((mean - 42.0) / 0.5)), norm.logpdf(Y, mean, 2.0)))


def boxes():
    """Truly zero outside of boxes: the errors are bounded, and squares pull to the middle."""
    error = line() - Y
    numpyro.factor("y", jnp.where(jnp.abs(error) < 6.0, -0.5 * jnp.square(error), -jnp.inf))


@pytest.mark.parametrize("model", [intervals, *thorough(tens, censored, boxes)])
def test_laplace_finds_the_mode_from_outside_of_the_support(model):
    form = read_latent_gaussian(model, check=False).form({})
    start = laplace.init(form)
    assert not bool(jnp.all(jnp.isfinite(form.log_factors(form.offset))))
    state, info = jax.jit(laplace.solve)(form, start)
    assert bool(info.converged)
    mode = np.asarray(laplace.posterior(form, state).mean)

    def density(at):
        return log_density(model, (), {}, {"a": at[0], "b": at[1]})[0]

    gradient = jax.jacfwd(density)
    slope, curvature = jax.jit(lambda at: (gradient(at), jax.jacfwd(gradient)(at)))(mode)
    decrement = -slope @ np.linalg.solve(curvature, slope)
    assert 0.0 <= decrement < 1e-8


def exact_means(model):
    """Posterior means by a grid on NumPyro's own density."""
    a, b = np.linspace(35.0, 45.0, 161), np.linspace(0.0, 10.0, 161)
    one = jax.vmap(lambda a, b: log_density(model, (), {}, {"a": a, "b": b})[0])
    grid = np.stack(np.meshgrid(a, b, indexing="ij"), -1).reshape(-1, 2)
    value = np.asarray(jax.jit(one)(*grid.T))
    weight = np.exp(value - value.max())
    return weight @ grid / weight.sum()


@pytest.mark.parametrize("engine", thorough(LaplaceApproximation, EP, VariationalGaussian))
def test_engines_agree_with_quadrature(engine):
    fitted = engine(tens, progress_bar=False)
    fitted.run(random.key(0))
    assert fitted.diagnostics.converged
    found = np.array([float(fitted.posterior[name].mean) for name in "ab"])
    sd = np.array([float(fitted.posterior[name].sd) for name in "ab"])
    # EP and the bound are known to be good to a few thousandths here; a mode is not a mean.
    assert np.all(np.abs(found - exact_means(tens)) < (0.1 if engine is LaplaceApproximation else 0.02) * sd)


@pytest.mark.thorough
def test_the_bound_is_found_from_outside_of_the_support():
    form = read_latent_gaussian(intervals, check=False).form({})
    state, info = jax.jit(natural_gradient.solve)(form, natural_gradient.init(form))
    assert bool(info.converged)
    evidence = expectation_propagation.solve(form, expectation_propagation.init(form))[1].objective
    assert evidence - 0.05 < info.objective < evidence


@pytest.mark.thorough
def test_derivatives_of_the_evidence_know_nothing_of_where_factors_are_zero():
    """A factor that is zero at the predictor zero has no derivative there, which nobody asks for."""

    reading = read_latent_gaussian(lambda: intervals(numpyro.param("scale", 2.0)), check=False)

    def form(scale):
        return reading.form({"scale": scale})

    state, _ = jax.jit(expectation_propagation.solve)(form(2.0), expectation_propagation.init(form(2.0)))
    evidence = jax.jit(lambda scale: expectation_propagation.log_evidence(form(scale), state))
    slope, step = jax.grad(evidence)(2.0), 1e-4
    assert slope == pytest.approx(float(evidence(2.0 + step) - evidence(2.0 - step)) / (2 * step), rel=1e-5)


@pytest.mark.thorough
def test_moments_of_a_factor_that_is_narrow_beside_its_distance():
    """Jumps cost the quadrature digits, but none of nine points of a broad cavity has to be within them."""
    width, deviation = 2.0, np.array([10.0, 16.0, 50.0, 100.0])
    lower = np.array([20.0, -45.0, 33.0, 50.0])

    def inside(eta, lower):
        return jnp.where((eta > lower) & (eta < lower + width), 0.0, -jnp.inf)

    found = ElementwisePotential(inside, (lower,)).tilted_moments(np.zeros(4), deviation**2)
    exact = truncnorm(lower / deviation, (lower + width) / deviation, scale=deviation)
    np.testing.assert_allclose(found.mean, exact.mean(), atol=0.02)
    np.testing.assert_allclose(found.variance, exact.var(), rtol=0.02)
