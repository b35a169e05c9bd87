"""Expectations of exponential products of Gaussian vectors against 50-digit references and finite differences."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.potentials.integrals.products.exponential_product import (
    log_expected_exp_product,
    log_expected_exp_product_diagonal,
    product_expectation,
    product_moments,
    semidefinite_root,
    spectral_radius,
)

CASES = json.loads((Path(__file__).parents[1] / "reference" / "ko-pmf-expectations.json").read_text())["cases"]
log_expected_exp_product = jax.jit(log_expected_exp_product)
log_expected_exp_product_diagonal = jax.jit(log_expected_exp_product_diagonal)
product_expectation = jax.jit(product_expectation)
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
BOTH = pytest.mark.float32


def padded(cases, size):
    """All cases as one batch: components that are zero change nothing, and make the covariances singular."""
    out = []
    for name in ("a", "A", "b", "B"):
        shape = (size,) if name.islower() else (size, size)
        batch = np.zeros((len(cases), *shape))
        for i, case in enumerate(cases):
            d = case["D"]
            batch[(i, slice(0, d)) if name.islower() else (i, slice(0, d), slice(0, d))] = case[name]
        out.append(jnp.asarray(batch))
    return tuple(out)


SMALL = [c for c in CASES if c["D"] <= 5]
LARGE = [c for c in CASES if c["D"] > 5]


def tolerances(cases, is_double):
    """Rounding grows as the gap closes: the value and the moments are rational functions of it."""
    eps = 1e-15 if is_double else 2e-7
    gap = 1.0 - np.array([min(c["rho"], 0.999) for c in cases])
    return 100 * eps / gap**2


@BOTH
@pytest.mark.parametrize("cases, size", [(SMALL, 5), (LARGE, 15)])
def test_values_and_tilted_moments(cases, size):
    a, A, b, B = padded(cases, size)
    value = np.asarray(log_expected_exp_product(a, A, b, B))
    mirrored = np.asarray(log_expected_exp_product(b, B, a, A))
    exists = np.array([c["exists"] for c in cases])
    np.testing.assert_array_equal(np.isfinite(value), exists)
    assert np.all(value[~exists] == np.inf)
    np.testing.assert_array_equal(np.isfinite(mirrored), exists)
    found_v = product_expectation(a, A, b, semidefinite_root(B))
    found_u = product_expectation(b, B, a, semidefinite_root(A))
    for i, tol in enumerate(tolerances(cases, value.dtype == np.float64)):
        case, d = cases[i], cases[i]["D"]
        if not case["exists"]:
            continue
        np.testing.assert_allclose([value[i], mirrored[i]], case["logE"], rtol=tol, atol=tol)
        for found, side in ((found_u, "u"), (found_v, "v")):
            mean, spread = case[f"{side}_tilt_mean"], case[f"{side}_tilt_cov"]
            np.testing.assert_allclose(found.mean[i, :d], mean, rtol=tol, atol=tol * np.max(np.abs(mean)))
            np.testing.assert_allclose(found.covariance[i, :d, :d], spread, rtol=tol, atol=tol * np.max(np.abs(spread)))
    mean, variance = product_moments(a, A, b, B)
    rtol = 1e-12 if value.dtype == np.float64 else 1e-5
    np.testing.assert_allclose(mean, [c["mean_f"] for c in cases], rtol=rtol, atol=rtol)
    np.testing.assert_allclose(variance, [c["var_f"] for c in cases], rtol=rtol)


@needs_float64
def test_spectral_radius_is_the_condition():
    _, A, _, B = padded(SMALL, 5)
    radius = spectral_radius(A, semidefinite_root(B))
    np.testing.assert_allclose(radius, [c["rho"] for c in SMALL], rtol=1e-9, atol=1e-12)


def test_determinant_of_two_wrong_signs_is_no_existence():
    """Where two eigenvalues of AB exceed one the determinant of I - AB is positive: the printed formula is finite."""
    a, b = jnp.array([0.1, 0.2]), jnp.array([0.3, -0.1])
    A, B = 1.5 * jnp.eye(2), jnp.diag(jnp.array([1.5, 1.2]))
    assert jnp.linalg.det(jnp.eye(2) - A @ B) > 0.9
    assert log_expected_exp_product(a, A, b, B) == jnp.inf
    assert log_expected_exp_product_diagonal(a, jnp.diag(A), b, jnp.diag(B)) == jnp.inf


@BOTH
def test_diagonal_agrees_with_full():
    a, A, b, B = padded([c for c in SMALL if "diag" in c["name"] or c["name"].startswith(("point", "just"))], 5)
    keep = np.eye(5)
    full = log_expected_exp_product(a, A * keep, b, B * keep)
    diagonal = log_expected_exp_product_diagonal(a, jnp.einsum("...ii->...i", A), b, jnp.einsum("...ii->...i", B))
    np.testing.assert_allclose(diagonal, full, rtol=1e-12 if full.dtype == np.float64 else 2e-4)


@needs_float64
def test_gradients_against_finite_differences():
    case = next(c for c in CASES if c["name"] == "D2_rho0.8_full")
    arguments = tuple(jnp.asarray(case[n]) for n in "aAbB")
    slopes = jax.jit(jax.grad(log_expected_exp_product, argnums=(0, 1, 2, 3)))(*arguments)
    curvature = jax.jit(jax.hessian(log_expected_exp_product))(*arguments)
    rng = np.random.default_rng(0)
    for which, slope in enumerate(slopes):
        direction = rng.standard_normal(slope.shape)
        direction = direction + direction.T if slope.ndim == 2 else direction
        moved = [
            log_expected_exp_product(*(x + h * direction if i == which else x for i, x in enumerate(arguments)))
            for h in (1e-5, -1e-5)
        ]
        np.testing.assert_allclose(jnp.sum(slope * direction), (moved[0] - moved[1]) / 2e-5, rtol=1e-8)
    # the weight e^(u'v) makes of N(a, A) a Gaussian whose log normaliser is quadratic in a, with the tilted covariance
    found = product_expectation(*arguments[:3], semidefinite_root(arguments[3]))
    np.testing.assert_allclose(curvature, found.covariance, rtol=1e-10)


@needs_float64
def test_gradients_of_independent_components():
    case = next(c for c in CASES if c["name"] == "D3_rho0.7_diag")
    a, A, b, B = (jnp.asarray(case[n]) for n in "aAbB")
    arguments = (a, jnp.diag(A), b, jnp.diag(B))
    slopes = jax.grad(log_expected_exp_product_diagonal, argnums=(0, 1, 2, 3))(*arguments)
    full = jax.grad(log_expected_exp_product, argnums=(0, 1, 2, 3))(a, A, b, B)
    for slope, other in zip(slopes, full, strict=True):
        np.testing.assert_allclose(slope, jnp.diag(other) if other.ndim == 2 else other, rtol=1e-10)


@BOTH
def test_infinite_values_have_no_nan_in_their_gradients():
    one = jnp.eye(2)
    slopes = jax.grad(log_expected_exp_product, argnums=(0, 1, 2, 3))(jnp.ones(2), 2.0 * one, jnp.ones(2), one)
    assert all(np.all(np.isfinite(s)) for s in slopes)
    scalars = jnp.ones(2)
    slopes = jax.grad(log_expected_exp_product_diagonal, argnums=(0, 1))(scalars, 2.0 * scalars, scalars, scalars)
    assert all(np.all(np.isfinite(s)) for s in slopes)


def test_root_of_a_singular_covariance():
    factor = np.random.default_rng(1).standard_normal((4, 2))
    for covariance in (factor @ factor.T, np.diag([0.0, 2.0, 0.0, 1.0]), np.zeros((4, 4))):
        root = semidefinite_root(jnp.asarray(covariance))
        tol = 1e-13 if root.dtype == jnp.float64 else 1e-5
        np.testing.assert_allclose(root @ root.T, covariance, atol=tol)
