"""Widths and their penalties against brute-force conjugation, and the convexified Student penalty."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from numpyro_ext.potentials import GaussianPotential, LaplacePotential, StudentTPotential, potential
from numpyro_ext.potentials.bounds.super_gaussian import SuperGaussianPotential

FACTORS = [
    LaplacePotential(jnp.asarray(0.4), jnp.asarray(0.3)),
    StudentTPotential(jnp.asarray(-0.2), jnp.asarray(0.7), jnp.asarray(2.1)),
    GaussianPotential(jnp.asarray(0.1), jnp.asarray(0.5)),
]
IDS = ["laplace", "student", "gauss"]
SQUARED = jnp.array([1e-6, 1e-2, 0.3, 2.0, 50.0])


def brute_force_penalty(factor, width):
    """Largest ``-x / width - 2 log t(sqrt x)`` over a grid in log x, refined by bounded search."""

    def objective(log_x):
        return float(np.exp(log_x) / width + 2.0 * factor.radial_log_density(np.exp(log_x)))

    grid = np.linspace(-30.0, 15.0, 200)
    values = np.exp(grid) / width + 2.0 * np.asarray(factor.radial_log_density(jnp.exp(grid)))
    best = int(np.argmin(values))
    lower, upper = grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)]
    found = minimize_scalar(objective, bounds=(lower, upper), method="bounded", options={"xatol": 1e-9})
    return -min(found.fun, values[best])


@pytest.mark.parametrize("factor", FACTORS[:2], ids=IDS[:2])
def test_penalty_is_the_conjugate(factor):
    for width in (0.05, 0.3, 1.0, 8.0):
        np.testing.assert_allclose(factor.width_penalty(width), brute_force_penalty(factor, width), rtol=1e-6)


def test_gaussian_penalty_is_finite_at_its_variance_only():
    factor = FACTORS[2]
    np.testing.assert_allclose(factor.width_penalty(0.25), brute_force_penalty(factor, 0.25), rtol=1e-6)
    assert np.isinf(factor.width_penalty(0.2)) and np.isinf(factor.width_penalty(0.3))


@pytest.mark.parametrize("factor", FACTORS, ids=IDS)
def test_width_is_the_slope_and_attains_the_factor(factor):
    width = factor.width(SQUARED)
    np.testing.assert_allclose(width, SuperGaussianPotential.width(factor, SQUARED), rtol=1e-9)
    envelope = -0.5 * (SQUARED / width + factor.width_penalty(width))
    np.testing.assert_allclose(envelope, factor.log_density(factor.center + jnp.sqrt(SQUARED)), rtol=1e-12)


@pytest.mark.parametrize("factor", FACTORS[:2], ids=IDS[:2])
def test_every_width_bounds_the_factor_from_below(factor):
    widths = jnp.geomspace(1e-3, 1e3, 61)[:, None]
    bound = -0.5 * (SQUARED / widths + factor.width_penalty(widths))
    assert jnp.all(bound <= factor.radial_log_density(SQUARED) + 1e-12)


def test_convexified_student_penalty():
    factor = FACTORS[1]
    squared = jnp.linspace(1e-3, 20.0, 400)
    reference = factor.width(2.0)
    penalty = factor.convexified_penalty(squared, reference)
    exact = -2.0 * factor.radial_log_density(squared)
    assert jnp.all(penalty.value >= exact - 1e-12)
    at_reference = factor.convexified_penalty(2.0, reference)
    np.testing.assert_allclose(at_reference.value, -2.0 * factor.radial_log_density(2.0), rtol=1e-12)
    np.testing.assert_allclose(at_reference.width, reference, rtol=1e-12)
    # The minimum over the width of the linearised penalty, by brute force.
    nu, variance = 2.1, 0.49
    widths = jnp.geomspace(1e-4, 1e4, 40001)[:, None]
    linearised = (nu + 1.0) * (jnp.log(reference) + widths / reference - 1.0) + nu * variance / widths
    constant = factor.width_penalty(3.0) - (nu * variance / 3.0 + (nu + 1.0) * jnp.log(3.0))
    brute = jnp.min(squared[::40] / widths + linearised, axis=0) + constant
    np.testing.assert_allclose(penalty.value[::40], brute, rtol=1e-6)


def test_convexified_student_penalty_is_convex_where_the_exact_one_is_not():
    factor = FACTORS[1]
    points, step, variance = jnp.linspace(-6.0, 6.0, 241), 0.05, 0.3

    def curvature(penalty):
        value = penalty(variance + points**2)
        return (value[2:] - 2.0 * value[1:-1] + value[:-2]) / step**2

    assert jnp.all(curvature(lambda x: factor.convexified_penalty(x, 1.3).value) > 0.0)
    assert jnp.any(curvature(lambda x: -2.0 * factor.radial_log_density(x)) < 0.0)


def test_convexified_penalty_slope_is_half_the_inverse_width():
    factor, reference = FACTORS[1], 0.8
    slope = jax.vmap(jax.grad(lambda x: factor.convexified_penalty(x, reference).value))(SQUARED)
    np.testing.assert_allclose(slope, 1.0 / factor.convexified_penalty(SQUARED, reference).width, rtol=1e-10)


def test_log_concave_factors_need_no_convexification():
    penalty = FACTORS[0].convexified_penalty(SQUARED, 0.123)
    np.testing.assert_allclose(penalty.value, -2.0 * FACTORS[0].radial_log_density(SQUARED))
    np.testing.assert_allclose(penalty.width, FACTORS[0].width(SQUARED))


def test_other_families_get_their_width_by_differentiation():
    @potential
    class Hyperbolic(SuperGaussianPotential):
        scale: float

        def log_density(self, eta):
            return -jnp.sqrt(1.0 + jnp.square(eta / self.scale))

    factor = Hyperbolic(0.5)
    # log t = -sqrt(1 + 4 x) has the slope -2 / sqrt(1 + 4 x).
    np.testing.assert_allclose(factor.width(SQUARED), 0.25 * jnp.sqrt(1.0 + 4.0 * SQUARED), rtol=1e-12)
    with pytest.raises(NotImplementedError, match="Hyperbolic"):
        factor.width_penalty(1.0)
    with pytest.raises(NotImplementedError, match="treat it directly"):
        factor.convexified_penalty(1.0, 1.0)
    assert dataclasses.is_dataclass(factor)
