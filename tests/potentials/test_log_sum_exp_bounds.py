"""Bounds of the expected log-sum-exp, against reference values, quadrature and finite differences."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_ext.potentials.bounds.log_sum_exp import LOG_SUM_EXP_BOUNDS, log_sum_exp_bound

ROWS = json.loads((Path(__file__).parents[1] / "reference" / "khan_lse_bounds.json").read_text())["rows"]
COLUMNS = {
    "bohning": "bohning_sym",
    "log": "log",
    "tilted": "tilted_full",
    "product-of-sigmoids": "pos_exact",
    "delta": "delta",
    "quadrature": "E_lse",
}
ALL = pytest.mark.parametrize("name", COLUMNS)
BOUNDS = [name for name, bound in LOG_SUM_EXP_BOUNDS.items() if bound.is_bound]
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="tolerances of double precision")
COMPILED = {name: jax.jit(bound) for name, bound in LOG_SUM_EXP_BOUNDS.items()}


def column(name):
    return np.array([row[name] for row in ROWS])


MEAN, COVARIANCE = column("m"), column("V")


def random_moments(seed, scale, num_cases=6, size=3):
    """``num_cases`` means and full covariances, so that every example has the shapes of the reference."""
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(num_cases, size, size + 1))
    return scale * rng.normal(size=(num_cases, size)), scale**2 * factor @ factor.swapaxes(-1, -2) / (size + 1)


@pytest.mark.float32
@ALL
def test_reference_values(name):
    mean, covariance = jnp.asarray(MEAN, float), jnp.asarray(COVARIANCE, float)
    result = COMPILED[name](mean, covariance)
    # The reference has 12 digits, and its quadrature an error below 1e-8.
    tolerance = 2e-6 if mean.dtype == jnp.float32 else 1e-8 if name == "quadrature" else 2e-11
    np.testing.assert_allclose(result.value, column(COLUMNS[name]), rtol=tolerance)
    np.testing.assert_allclose(result.mean_slope.sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(result.covariance_slope, np.swapaxes(result.covariance_slope, -1, -2), atol=1e-12)


@needs_float64
def test_reference_slopes():
    quadrature, tilted = (COMPILED[name](MEAN, COVARIANCE) for name in ("quadrature", "tilted"))
    np.testing.assert_allclose(quadrature.mean_slope, column("E_softmax"), atol=1e-8)
    np.testing.assert_allclose(tilted.mean_slope, column("a_full"), atol=1e-11)


@needs_float64
def test_only_the_full_covariance_makes_the_tilted_bound_one():
    # Khan's form drops the correlations (correction C21): below the expectation here, as in two of the reference rows.
    mean, covariance = jnp.zeros(2), jnp.array([[1.0, -1.0], [-1.0, 1.0]])
    expectation = COMPILED["quadrature"](mean, covariance).value
    bound = COMPILED["tilted"]
    dropped = bound(mean, jnp.diag(jnp.diagonal(covariance))).value
    assert dropped < expectation < bound(mean, covariance).value
    np.testing.assert_allclose(
        [expectation, dropped, bound(mean, covariance).value], [1.067714, 0.943147, 1.193147], atol=1e-6
    )
    violated = column("tilted_diag") < column("E_lse")
    assert violated.sum() == 2
    assert np.all(COMPILED["tilted"](MEAN, COVARIANCE).value > column("E_lse"))


@pytest.mark.thorough
@needs_float64
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0.01, 2.0))
def test_bounds_are_above_the_expectation(seed, scale):
    mean, covariance = random_moments(seed, scale)
    expectation = COMPILED["quadrature"](mean, covariance).value
    values = {name: COMPILED[name](mean, covariance).value for name in BOUNDS}
    for name in BOUNDS:
        # Two-dimensional quadrature is good to 1e-6 in this range.
        assert np.all(values[name] >= expectation - 1e-6), name
    assert np.all(values["tilted"] <= values["log"] + 1e-12)
    # Theorem 5.5.1 of Khan (2012).
    difference = values["bohning"] - values["log"]
    variance = np.diagonal(covariance, axis1=-2, axis2=-1)
    trace = 0.5 * (variance.sum(-1) - covariance.sum((-2, -1)) / 3.0)
    assert np.all(difference <= 0.5 * trace - 0.5 * variance.min(-1) + 1e-12)
    assert np.all(difference >= 0.5 * trace - 0.5 * variance.max(-1) - 1e-12)


@needs_float64
@ALL
def test_slopes_are_derivatives(name):
    mean, covariance = random_moments(1, 0.8)
    bound = COMPILED[name]
    result = bound(mean, covariance)
    by_mean, by_covariance = jax.grad(lambda m, v: bound(m, v).value.sum(), (0, 1))(mean, covariance)
    # The slopes of the quadrature are expectations, not those of its rule, which is good to 1e-8 here.
    tolerance = 1e-7 if name == "quadrature" else 1e-11
    np.testing.assert_allclose(by_mean, result.mean_slope, atol=tolerance)
    np.testing.assert_allclose(
        0.5 * (by_covariance + by_covariance.swapaxes(-1, -2)), result.covariance_slope, atol=tolerance
    )
    rng = np.random.default_rng(2)
    step, spread = 1e-5 * rng.normal(size=mean.shape), rng.normal(size=covariance.shape)
    spread = 1e-5 * (spread + spread.swapaxes(-1, -2))
    above, below = bound(mean + step, covariance + spread), bound(mean - step, covariance - spread)
    expected = (result.mean_slope * step).sum(-1) + (result.covariance_slope * spread).sum((-2, -1))
    np.testing.assert_allclose(0.5 * (above.value - below.value), expected, rtol=1e-6, atol=1e-12)
    # Slopes can be differentiated once more, through the best local parameter.
    _, change = jax.jvp(lambda m, v: bound(m, v).mean_slope, (mean, covariance), (step, spread))
    np.testing.assert_allclose(0.5 * (above.mean_slope - below.mean_slope), change, atol=2e-7 * np.abs(change).max())


@needs_float64
@pytest.mark.parametrize("name", ["tilted", "product-of-sigmoids"])
@pytest.mark.parametrize("scale", [1e-3, 3.0, 30.0, 300.0])
def test_local_parameters_are_the_best_ones(name, scale):
    mean, covariance = random_moments(3, scale)
    variance = np.diagonal(covariance, axis1=-2, axis2=-1)
    result = COMPILED[name](mean, covariance)
    if name == "tilted":
        # The bound is the largest value of a concave function of the probabilities: no gap is left between the two.
        probs = result.mean_slope
        dual = (probs * (mean + 0.5 * variance)).sum(-1) - 0.5 * np.einsum("ni,nij,nj->n", probs, covariance, probs)
        dual = dual + jax.scipy.special.entr(probs).sum(-1)
        np.testing.assert_allclose(result.value, dual, rtol=1e-12, atol=1e-12)
    else:
        np.testing.assert_allclose(result.mean_slope.sum(-1), 1.0, rtol=1e-12)


@needs_float64
def test_two_categories_are_a_logistic():
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    x = 1.1 + np.sqrt(1.3 + 0.6 - 0.4) * nodes
    expectation = -0.4 + np.sum(weights * np.logaddexp(0.0, x)) / weights.sum()
    result = COMPILED["quadrature"](np.array([0.7, -0.4]), np.array([[1.3, 0.2], [0.2, 0.6]]))
    np.testing.assert_allclose(result.value, expectation, rtol=1e-10)
    slope = np.sum(weights / (1.0 + np.exp(-x))) / weights.sum()
    np.testing.assert_allclose(result.mean_slope, [slope, 1.0 - slope], rtol=1e-9)


@needs_float64
@ALL
def test_singular_covariances(name):
    # No variance, and one latent variable that raises all predictors: the expectation is that of the means.
    covariance = np.zeros_like(COVARIANCE)
    covariance[::2] = 2.0
    result = COMPILED[name](MEAN, covariance)
    assert all(np.all(np.isfinite(part)) for part in result)
    exact = jax.nn.logsumexp(MEAN, axis=-1)
    if name in ("quadrature", "bohning", "tilted", "delta"):
        np.testing.assert_allclose(result.value, exact, rtol=1e-10)
    else:
        assert np.all(result.value >= exact - 1e-12)


@needs_float64
def test_quasi_random_points_and_products_of_rules_agree():
    # Four categories by a product rule; a fifth one that never happens makes it quasi-random in four dimensions.
    mean, covariance = random_moments(5, 1.0, size=4)
    bound = COMPILED["quadrature"]
    product = bound(mean, covariance)
    more = np.zeros((6, 5, 5))
    more[:, 1:, 1:] = covariance
    points = bound(np.concatenate([np.full((6, 1), -60.0), mean], axis=1), more)
    np.testing.assert_allclose(points.value, product.value, atol=1e-3)
    np.testing.assert_allclose(points.mean_slope[:, 1:], product.mean_slope, atol=1e-3)
    np.testing.assert_allclose(points.covariance_slope[:, 1:, 1:], product.covariance_slope, atol=1e-3)
    # Quadratic functions are integrated exactly, so that small covariances are served to many digits.
    small = bound(np.concatenate([np.full((6, 1), -60.0), mean], axis=1), 1e-4 * more).value
    np.testing.assert_allclose(small, bound(mean, 1e-4 * covariance).value, atol=1e-8)


@pytest.mark.float32
@pytest.mark.parametrize("name", ["tilted", "log"])
def test_vmap_equals_broadcasting(name):
    mean, covariance = jnp.asarray(MEAN, float), jnp.asarray(COVARIANCE, float)
    for mapped, direct in zip(
        jax.vmap(COMPILED[name])(mean, covariance), COMPILED[name](mean, covariance), strict=True
    ):
        np.testing.assert_allclose(mapped, direct, rtol=2e-5, atol=1e-6)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'bohning', 'log', 'tilted', 'product-of-sigmoids', 'delta', 'quadrature'"):
        log_sum_exp_bound("taylor")
