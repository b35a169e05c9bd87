"""Gaussian expectations of the log factors of every family against brute-force integration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from numpyro_ext.potentials import (
    BinomialLogitPotential,
    ElementwisePotential,
    GaussianPotential,
    LaplacePotential,
    LogitPotential,
    NegativeBinomialExpPotential,
    PoissonExpPotential,
    ProbitPotential,
    RectifiedLinearPoissonPotential,
    StudentTPotential,
)
from numpyro_ext.potentials.elementwise import TemperedPotential
from numpyro_ext.potentials.families.location import AsymmetricLaplacePotential, LogisticPotential, SoftLaplacePotential
from numpyro_ext.potentials.families.logit_counts import NegativeBinomialLogitPotential
from numpyro_ext.potentials.families.poisson import PoissonSoftplusPotential
from numpyro_ext.potentials.families.stochastic_volatility import StochasticVolatilityPotential
from tests.tiers import few

from .log_densities import (
    asymmetric_laplace,
    binomial,
    log_sigmoid,
    logistic,
    negative_binomial,
    soft_laplace,
    softplus,
)

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")

NODES, WEIGHTS = np.polynomial.legendre.leggauss(16)
OFFSETS = np.concatenate([[0.0], np.logspace(-9.0, 1.2, 250)])


def direct_expectation(log_density, mean, variance, anchors):
    """Value, slopes and the sizes of what is summed, by meshes that grow geometrically around the mean and anchors.

    The slopes come from the value alone, as ``E f z / sqrt(v)`` and ``E f (z^2 - 1) / (2 v)``.
    """
    scale = np.sqrt(variance)
    points = [center + sign * OFFSETS * scale for center in (mean, *anchors) for sign in (-1.0, 1.0)]
    mesh = np.unique(np.concatenate([*points, *(mean + scale * np.linspace(-12.0, 12.0, 49),)]))
    mesh = mesh[np.abs(mesh - mean) <= 12.0 * scale]
    left, right = mesh[:-1, None], mesh[1:, None]
    x = 0.5 * (left + right) + 0.5 * (right - left) * NODES
    z = (x - mean) / scale
    weights = 0.5 * (right - left) * WEIGHTS * np.exp(-0.5 * z**2) / (scale * np.sqrt(2.0 * np.pi))
    values = weights * log_density(x)
    terms = [values, values * z / scale, values * (z**2 - 1.0) / (2.0 * variance)]
    return [term.sum() for term in terms], [np.abs(term).sum() for term in terms]


def _laplace(location, scale):
    return lambda x: -np.abs(x - location) / scale - np.log(2.0 * scale)


def _rectified(exposure, offset):
    return lambda x: -np.maximum(exposure * (x + offset), 0.0)


# Potential of two rows, their log densities in NumPy, the points where they bend.
FAMILIES = {
    "probit": (ProbitPotential(jnp.array([0, 1])), [lambda x: special.log_ndtr(-x), special.log_ndtr], [0.0]),
    "logit": (LogitPotential(jnp.array([0, 1])), [lambda x: log_sigmoid(-x), log_sigmoid], [0.0]),
    "binomial": (
        BinomialLogitPotential(jnp.array([4.0, 90.0]), jnp.array([5.0, 100.0])),
        [binomial(4.0, 5.0), binomial(90.0, 100.0)],
        [0.0],
    ),
    "negative_binomial_exp": (
        NegativeBinomialExpPotential(jnp.array([0.0, 30.0]), jnp.array([0.5, 8.0]), jnp.array([1.0, 0.2])),
        [negative_binomial(0.0, 0.5, np.log(2.0)), negative_binomial(30.0, 8.0, np.log(0.025))],
        [-np.log(2.0), -np.log(0.025)],
    ),
    "negative_binomial_logit": (
        NegativeBinomialLogitPotential(jnp.array([0.0, 30.0]), jnp.array([0.5, 8.0])),
        [negative_binomial(0.0, 0.5, 0.0), negative_binomial(30.0, 8.0, 0.0)],
        [0.0],
    ),
    "poisson_softplus": (
        PoissonSoftplusPotential(jnp.array([0.0, 25.0]), jnp.array([1.0, 0.3])),
        [softplus(0.0, 1.0), softplus(25.0, 0.3)],
        [0.0, 80.0],
    ),
    "gaussian": (
        GaussianPotential(jnp.array([0.5, -3.0]), jnp.array([0.1, 20.0])),
        [lambda x: stats.norm.logpdf(0.5, x, 0.1), lambda x: stats.norm.logpdf(-3.0, x, 20.0)],
        [],
    ),
    "student_t": (
        StudentTPotential(jnp.array([0.5, -3.0]), jnp.array([2.0, 0.05]), jnp.array([4.0, 1.0])),
        [lambda x: stats.t.logpdf(0.5, 4.0, x, 2.0), lambda x: stats.t.logpdf(-3.0, 1.0, x, 0.05)],
        [0.5, -3.0],
    ),
    "logistic": (
        LogisticPotential(jnp.array([0.5, -3.0]), jnp.array([2.0, 0.05])),
        [logistic(0.5, 2.0), logistic(-3.0, 0.05)],
        [0.5, -3.0],
    ),
    "soft_laplace": (
        SoftLaplacePotential(jnp.array([0.5, -3.0]), jnp.array([2.0, 0.05])),
        [soft_laplace(0.5, 2.0), soft_laplace(-3.0, 0.05)],
        [0.5, -3.0],
    ),
    "asymmetric_laplace": (
        AsymmetricLaplacePotential(jnp.array([0.5, -3.0]), jnp.array([2.0, 0.05]), jnp.array([2.0, 0.3])),
        [asymmetric_laplace(0.5, 2.0, 2.0), asymmetric_laplace(-3.0, 0.05, 0.3)],
        [0.5, -3.0],
    ),
    "laplace": (
        LaplacePotential(jnp.array([0.5, -3.0]), jnp.array([2.0, 0.05])),
        [_laplace(0.5, 2.0), _laplace(-3.0, 0.05)],
        [0.5, -3.0],
    ),
    "rectified_linear_poisson": (
        RectifiedLinearPoissonPotential(jnp.zeros(2), jnp.array([1.0, 4.0]), jnp.array([0.0, 2.0])),
        [_rectified(1.0, 0.0), _rectified(4.0, 2.0)],
        [0.0, -2.0],
    ),
    "kink": (
        ElementwisePotential(lambda x, y: -jnp.abs(x - y), (jnp.array([0.7123, -2.0]),)),
        [lambda x: -np.abs(x - 0.7123), lambda x: -np.abs(x + 2.0)],
        [0.7123, -2.0],
    ),
    "huber": (
        ElementwisePotential(
            lambda x, c: -jnp.where(jnp.abs(x) < c, 0.5 * x**2, c * (jnp.abs(x) - 0.5 * c)), (jnp.array([0.3, 2.0]),)
        ),
        [lambda x, c=c: -np.where(np.abs(x) < c, 0.5 * x**2, c * (np.abs(x) - 0.5 * c)) for c in (0.3, 2.0)],
        [-2.0, -0.3, 0.3, 2.0],
    ),
    "tempered": (
        TemperedPotential(StudentTPotential(jnp.array([0.5, -3.0]), 0.2, 2.0), jnp.array([0.25, 3.0])),
        [lambda x: 0.25 * stats.t.logpdf(0.5, 2.0, x, 0.2), lambda x: 3.0 * stats.t.logpdf(-3.0, 2.0, x, 0.2)],
        [0.5, -3.0],
    ),
}
MEANS, VARIANCES, NARROW = (-1e3, -6.0, 0.7, 12.0, 1e3), (1e-4, 0.3, 30.0, 1e4), 1e-12
GRID = [(m, v) for v in (NARROW, *VARIANCES) for m in MEANS]


@jax.jit
def _on_grid(potential, grid):
    """Expectations, and the gradients of their values."""

    def one(cell):
        def total(mean, variance):
            found = potential.expected_log_density(mean, variance)
            return found.value.sum(), found

        gradients, found = jax.grad(total, (0, 1), has_aux=True)(jnp.full(2, cell[0]), jnp.full(2, cell[1]))
        return found, gradients

    return jax.vmap(one)(grid)


# Their quadrature takes long to compile; a kink and a bend as sharp are among the others.
SLOW = ("poisson_softplus", "tempered", "kink")


@needs_float64
@pytest.mark.parametrize(
    "family",
    [*few([f for f in FAMILIES if f not in SLOW], 3), *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW)],
)
def test_against_direct_integration(family):
    potential, log_densities, anchors = FAMILIES[family]
    found, gradients = jax.tree.map(np.asarray, _on_grid(potential, jnp.asarray(GRID)))
    for i, (mean, variance) in enumerate(GRID):
        if variance == NARROW:
            # The expectation is the function, up to its curvature times the variance.
            value, slope, curvature = potential.derivatives(jnp.full(2, mean))
            for part, other in zip(found, (value, slope, 0.5 * curvature), strict=True):
                np.testing.assert_allclose(part[i], other, rtol=1e-8, atol=1e-10)
        else:
            for row, log_density in enumerate(log_densities):
                expected, sizes = direct_expectation(log_density, mean, variance, anchors)
                for value, other, size in zip((part[i, row] for part in found), expected, sizes, strict=True):
                    assert abs(value - other) <= 2e-12 * size + 1e-15, (mean, variance, row)
        # The gradient of the value is what is returned as the slopes.
        steepness = np.abs(found.mean_slope[i]) + 1e-3
        scales = steepness, np.abs(found.variance_slope[i]) + steepness / np.sqrt(variance)
        for gradient, slope, scale in zip(gradients, found[1:], scales, strict=True):
            assert np.all(np.abs(gradient[i] - slope[i]) <= 1e-12 * scale), (mean, variance, gradient[i], slope[i])


@pytest.mark.float32
@pytest.mark.parametrize(
    "potential",
    [
        PoissonExpPotential(jnp.array([0.0, 3.0]), jnp.array([1.0, 0.2])),
        TemperedPotential(PoissonExpPotential(jnp.array([1.0, 300.0])), jnp.array([0.5, 2.0])),
        StochasticVolatilityPotential(jnp.array([0.0, -1.7])),
    ],
    ids=["poisson", "tempered poisson", "stochastic volatility"],
)
def test_exponential_families_against_gauss_hermite(potential):
    # Entire functions, for which the Gauss-Hermite rule converges quickly at moderate variances.
    mean, variance = jnp.array([0.3, -1.2]), jnp.array([1.5, 0.2])
    nodes, weights = (jnp.asarray(x) for x in np.polynomial.hermite_e.hermegauss(40))
    terms = jax.vmap(lambda z: potential.log_density(mean + jnp.sqrt(variance) * z))(nodes)
    found = potential.expected_log_density(mean, variance)
    tolerance = 1e-12 if mean.dtype == jnp.float64 else 1e-5
    np.testing.assert_allclose(found.value, weights @ terms / weights.sum(), rtol=tolerance)
    gradient = jax.grad(lambda m, v: potential.expected_log_density(m, v).value.sum(), (0, 1))(mean, variance)
    for part, other in zip(found[1:], gradient, strict=True):
        # The slopes are differences of counts and rates.
        np.testing.assert_allclose(part, other, rtol=tolerance, atol=tolerance * np.abs(found.value).max())


def test_stochastic_volatility_is_the_normal_density():
    potential = StochasticVolatilityPotential(jnp.array([0.3, -2.0]))
    eta = np.array([-1.0, 2.5])
    np.testing.assert_allclose(
        potential.log_density(eta), stats.norm.logpdf([0.3, -2.0], scale=np.exp(0.5 * eta)), rtol=1e-12
    )


@needs_float64
def test_derivatives_in_parameters_and_of_slopes():
    # Against differences of the value: in the scale of a Student-t, and of its slopes in mean and variance.
    mean, variance = jnp.array([0.3, -40.0]), jnp.array([2.0, 900.0])

    def of(scale, mean, variance):
        return StudentTPotential(jnp.array([1.0, 2.0]), scale, 3.0).expected_log_density(mean, variance)

    arguments = jnp.array([0.5, 0.1]), mean, variance
    tangents = jnp.array([0.3, -0.05]), jnp.array([0.2, 3.0]), jnp.array([-0.4, 70.0])
    _, found = jax.jvp(of, arguments, tangents)
    step = 1e-4

    def shifted(count):
        return of(*(x + count * step * dx for x, dx in zip(arguments, tangents, strict=True)))

    for value, *ends in zip(found, shifted(2), shifted(-2), shifted(1), shifted(-1), strict=True):
        difference = (8.0 * (ends[2] - ends[3]) - (ends[0] - ends[1])) / (12.0 * step)
        np.testing.assert_allclose(value, difference, rtol=1e-7, atol=1e-11)


@pytest.mark.float32
def test_single_precision():
    mean, variance = jnp.array([0.5, -30.0]), jnp.array([1e-6, 400.0])
    potential = StudentTPotential(jnp.array([1.0, 2.0]), 0.5, 3.0)
    found = potential.expected_log_density(mean, variance)
    for i in range(2):
        log_density = [lambda x: stats.t.logpdf(1.0, 3.0, x, 0.5), lambda x: stats.t.logpdf(2.0, 3.0, x, 0.5)][i]
        expected, _ = direct_expectation(log_density, float(mean[i]), float(variance[i]), [1.0, 2.0])
        np.testing.assert_allclose(found.value[i], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found.mean_slope[0], potential.derivatives(mean)[1][0], rtol=1e-4)


@pytest.mark.float32
def test_positive_counts_with_a_rectified_rate_have_no_expectation():
    potential = TemperedPotential(RectifiedLinearPoissonPotential(jnp.array([0.0, 2.0])), 0.5)
    np.testing.assert_array_equal(potential.has_finite_expectation(), [True, False])
    found = potential.expected_log_density(jnp.array([1.0, 50.0]), jnp.ones(2))
    assert np.isfinite(found.value[0]) and found.value[1] == -np.inf
    np.testing.assert_array_equal(np.isnan(found.mean_slope), [False, True])
    np.testing.assert_array_equal(np.isnan(found.variance_slope), [False, True])
    assert LogitPotential(jnp.ones(2)).has_finite_expectation()
