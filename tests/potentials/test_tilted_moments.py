"""Tilted moments of every family against brute-force integration, over cavities of twelve orders of magnitude."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from numpyro_ext.potentials import (
    BinomialLogitPotential,
    CumulativeLogitPotential,
    ElementwisePotential,
    GaussianPotential,
    LaplacePotential,
    LogitPotential,
    NegativeBinomialExpPotential,
    PoissonExpPotential,
    ProbitPotential,
    StudentTPotential,
)
from numpyro_ext.potentials.families.location import AsymmetricLaplacePotential, LogisticPotential, SoftLaplacePotential
from numpyro_ext.potentials.families.logit_counts import NegativeBinomialLogitPotential
from numpyro_ext.potentials.families.poisson import PoissonSoftplusPotential
from numpyro_ext.potentials.families.rectified_linear_poisson import rectified_linear_poisson_moments
from tests.tiers import few, thorough

from .direct_integral import direct_moments, largest_errors
from .log_densities import (
    asymmetric_laplace,
    binomial,
    log_sigmoid,
    logistic,
    negative_binomial,
    poisson,
    soft_laplace,
    softplus,
)

REFERENCE = Path(__file__).parents[1] / "reference"
VARIANCES = (1e-8, 0.01, 1.0, 25.0, 1e4, 1e8)
MEANS = (-30.0, 0.7, 12.0)
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")


def _student(observation, scale, df):
    return lambda x: stats.t.logpdf(x, df, observation, scale)


def _laplace(location, scale):
    return lambda x: stats.laplace.logpdf(x, location, scale)


def _ordered_logistic(label, lower, upper):
    def log_density(x):
        gap = np.log(-np.expm1(lower - upper))
        terms = {0: log_sigmoid(lower - x), 1: log_sigmoid(upper - x) + log_sigmoid(x - lower) + gap}
        return terms.get(label, log_sigmoid(x - upper))

    return log_density


# Family, its parameters row by row, the same log density in NumPy, points where it bends.
FAMILIES = {
    "poisson_exp": (PoissonExpPotential, [(0.0, 1.0), (1.0, 2.0), (20.0, 0.1), (1e6, 1.0)], poisson, [0.0, 5.3, 13.8]),
    "poisson_softplus": (
        PoissonSoftplusPotential,
        [(0.0, 1.0), (1.0, 2.0), (20.0, 0.1), (1e6, 1.0)],
        softplus,
        [0, 1e6],
    ),
    "probit": (ProbitPotential, [(0,), (1,)], lambda label: lambda x: special.log_ndtr((2 * label - 1) * x), [0.0]),
    "logit": (LogitPotential, [(0,), (1,)], lambda label: lambda x: log_sigmoid((2 * label - 1) * x), [0.0]),
    "binomial": (BinomialLogitPotential, [(0.0, 5.0), (40.0, 100.0), (1e6, 2e6)], binomial, [0.0]),
    "negative_binomial_exp": (
        NegativeBinomialExpPotential,
        [(0.0, 0.5, 1.0), (3.0, 2.0, 0.3), (1e6, 10.0, 1.0)],
        lambda count, size, exposure: negative_binomial(count, size, np.log(exposure / size)),
        [0.0, 2.3, 13.8],
    ),
    "negative_binomial_logit": (
        NegativeBinomialLogitPotential,
        [(0.0, 0.5), (3.0, 2.0), (200.0, 7.0)],
        lambda count, size: negative_binomial(count, size, 0.0),
        [0.0, 3.4],
    ),
    "gaussian": (
        GaussianPotential,
        [(0.0, 1.0), (5.0, 0.05)],
        lambda observation, scale: lambda x: stats.norm.logpdf(x, observation, scale),
        [0.0, 5.0],
    ),
    "laplace": (LaplacePotential, [(0.0, 1.0), (5.0, 0.05)], _laplace, [0.0, 5.0]),
    "logistic": (LogisticPotential, [(0.0, 1.0), (5.0, 0.05)], logistic, [0.0, 5.0]),
    "soft_laplace": (SoftLaplacePotential, [(0.0, 1.0), (5.0, 0.05)], soft_laplace, [0.0, 5.0]),
    "asymmetric_laplace": (
        AsymmetricLaplacePotential,
        [(0.0, 1.0, 2.0), (5.0, 0.05, 0.3)],
        asymmetric_laplace,
        [0.0, 5.0],
    ),
    # The last two: narrow and far from the cavity, where the tilted density has two separate modes.
    "student_t": (
        StudentTPotential,
        [(0.0, 1.0, 4.0), (40.0, 0.5, 2.0), (5.0, 0.05, 3.0), (-3.0, 1e-4, 4.0)],
        _student,
        [0.0, 40.0, 5.0, -3.0],
    ),
}


def _grid(rows, variances=VARIANCES):
    mean, variance, row = np.meshgrid(MEANS, variances, np.arange(len(rows)), indexing="ij")
    mean, variance, row = mean.ravel(), variance.ravel(), row.ravel()
    columns = [np.array([rows[i][k] for i in row]) for k in range(len(rows[0]))]
    return mean, variance, row, columns


@needs_float64
@pytest.mark.parametrize("power", [*thorough(1.0), 0.4])
@pytest.mark.parametrize("name", few(FAMILIES, 4))
def test_family_against_direct_integral(name, power):
    family, rows, density, anchors = FAMILIES[name]
    mean, variance, row, columns = _grid(rows)
    moments = jax.jit(lambda columns, m, v: family(*columns).tilted_moments(m, v, power))(columns, mean, variance)
    expected = [
        direct_moments(density(*rows[i]), m, v, power, anchors) for i, m, v in zip(row, mean, variance, strict=True)
    ]
    errors = largest_errors(moments, expected, mean, variance)
    # The brute-force integrand of counts of 10^6 rounds at 1e-9.
    assert errors.max() < 5e-8, errors


# Short rules apply only where no cavity of the call is wide, so these need grids of their own.
SHORT_RULES = {
    "logit": (FAMILIES["logit"][0], FAMILIES["logit"][2], [(0,), (1,)], (1e-8, 0.01, 0.3, 1.0, 2.0, 4.0)),
    "poisson_exp": (
        FAMILIES["poisson_exp"][0],
        FAMILIES["poisson_exp"][2],
        [(0.0, 1.0), (1.0, 2.0), (20.0, 0.1), (1000.0, 1.0)],
        (1e-8, 1e-4, 0.03, 0.2, 0.5, 1.0, 2.0, 4.0),
    ),
    "binomial_logit": (
        FAMILIES["binomial"][0],
        FAMILIES["binomial"][2],
        [(0.0, 1.0), (0.0, 30.0), (7.0, 9.0), (5.0, 5.0), (990.0, 1000.0)],
        (1e-8, 1e-4, 0.03, 0.2, 0.5, 1.0, 2.0, 4.0),
    ),
    "negative_binomial_exp": (
        FAMILIES["negative_binomial_exp"][0],
        FAMILIES["negative_binomial_exp"][2],
        [(0.0, 2.0, 1.0), (1.0, 0.1, 3.0), (20.0, 5.0, 0.1), (300.0, 50.0, 1.0)],
        (1e-8, 1e-4, 0.03, 0.2, 0.5, 1.0, 2.0, 4.0),
    ),
    # up to where the short rule ends: beyond, a tilted density may have two modes
    "student_t": (
        FAMILIES["student_t"][0],
        FAMILIES["student_t"][2],
        [(0.0, 2.0, 4.0), (-3.0, 3.0, 1.0), (5.0, 1.8, 30.0), (40.0, 2.5, 0.6)],
        (1e-8, 1e-4, 0.03, 0.5, 2.0, 4.0),
    ),
    # the last row: two thresholds so close that the factor is a bell between them
    "cumulative_logit": (
        lambda label, lower, upper: CumulativeLogitPotential(label, jnp.stack([lower, upper], axis=-1)),
        _ordered_logistic,
        [(0, -1.0, 1.5), (1, -1.0, 1.5), (2, -30.0, -20.0), (1, 3.0, 3.0001)],
        (1e-8, 0.01, 0.3, 1.0, 2.0, 4.0),
    ),
}


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("name", ["logit", *thorough(*(name for name in SHORT_RULES if name != "logit"))])
def test_short_rules_of_narrow_cavities(name):
    family, density, rows, variances = SHORT_RULES[name]
    anchors = [0.0, 3.0, 5.3, 13.8, 1.3, -2.7, 5.0, -3.0, 40.0]
    mean, variance, row, columns = _grid(rows, variances)
    solve = jax.jit(lambda columns, m, v: family(*columns).tilted_moments(m, v))
    moments = solve(columns, mean, variance)
    expected = [
        direct_moments(density(*rows[i]), m, v, 1.0, anchors) for i, m, v in zip(row, mean, variance, strict=True)
    ]
    # The brute-force integral itself rounds at 1e-12 for a thousand counts.
    assert largest_errors(moments, expected, mean, variance).max() < 2e-11
    # A rule may go by the widest cavity of a call: each width by itself.
    for alone in variances:
        rows_here = np.flatnonzero(variance == alone)
        found = [value[rows_here] for value in solve(columns, mean, np.full_like(variance, alone))]
        wanted = [expected[i] for i in rows_here]
        assert largest_errors(found, wanted, mean[rows_here], variance[rows_here]).max() < 2e-11, alone

    alpha, beta = (moments.mean - mean) / variance, (1.0 - moments.variance / variance) / variance
    by_mean, by_variance = jax.grad(lambda *cavity: solve(columns, *cavity).log_z.sum(), (0, 1))(mean, variance)
    largest = np.max(np.abs(alpha)) * 1e-7
    np.testing.assert_allclose(by_mean, alpha, rtol=1e-6, atol=largest)
    wide = variance > 0.02  # differences of nearly equal numbers otherwise
    np.testing.assert_allclose(by_variance[wide], 0.5 * (alpha**2 - beta)[wide], rtol=1e-6, atol=1e-9)


@needs_float64
@pytest.mark.parametrize("name", few(FAMILIES, 5))
def test_log_density_and_derivatives(name):
    family, rows, density, _ = FAMILIES[name]
    eta = np.array([-31.0, -2.5, 0.4, 6.0, 12.5])
    for parameters in rows:
        potential = family(*(jnp.asarray(value) for value in parameters))
        expected = density(*parameters)(eta)
        np.testing.assert_allclose(potential.log_density(eta), expected, rtol=1e-9, atol=1e-8)
        value, slope, curvature = potential.derivatives(jnp.asarray(eta))
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-8)
        single = jax.grad(lambda x, p=potential: p.log_density(x))
        np.testing.assert_allclose(slope, jax.vmap(single)(eta), rtol=1e-9, atol=1e-9)
        rounding = 1e-14 * np.max(np.abs(curvature))
        np.testing.assert_allclose(curvature, jax.vmap(jax.grad(single))(eta), rtol=1e-9, atol=rounding)
        if family.is_log_concave:
            assert np.all(curvature <= 1e-12)


@pytest.mark.thorough
@needs_float64
def test_factors_that_say_nothing_keep_their_digits():
    # Site precisions of 1e-11 to 1e-8 relative to the cavity, where 1 / variance - 1 / v has no digits.
    variance = jnp.array([1e-8, 1e-8, 1e-9, 1e-9])
    mean = jnp.array([0.3, -1.0, 0.3, 2.0])
    for potential in (
        LogitPotential(jnp.ones(4)),
        ProbitPotential(jnp.ones(4)),
        PoissonExpPotential(jnp.full(4, 3.0)),
        GaussianPotential(jnp.full(4, 1.0), 50.0),
        StudentTPotential(jnp.full(4, 1.0), 5.0, 3.0),
    ):
        moments = potential.tilted_moments(mean, variance)
        _, slope, second = potential.derivatives(mean)
        np.testing.assert_allclose(moments.site_precision, -second, rtol=2e-7)
        np.testing.assert_allclose(moments.site_shift, slope - second * mean, rtol=2e-7)


@pytest.mark.thorough
@needs_float64
def test_gradients_in_cavity_and_parameters_are_those_of_the_integral():
    mean, variance = jnp.array([-1.0, 0.5, 2.0, 6.0]), jnp.array([0.5, 4.0, 30.0, 1.0])
    potentials = [
        NegativeBinomialExpPotential(jnp.array([0.0, 1.0, 7.0, 30.0]), jnp.full(4, 2.5), jnp.full(4, 0.8)),
        StudentTPotential(jnp.array([0.0, 4.0, -7.0, 6.5]), jnp.full(4, 0.7), jnp.full(4, 3.0)),
        LaplacePotential(jnp.array([0.0, 4.0, -7.0, 6.5]), jnp.full(4, 0.7)),
    ]

    @jax.jit
    def value(potential, mean, variance):
        return potential.tilted_moments(mean, variance).log_z.sum()

    for potential in potentials:
        by_potential, by_mean, by_variance = jax.grad(value, (0, 1, 2))(potential, mean, variance)
        moments = potential.tilted_moments(mean, variance)
        alpha = (moments.mean - mean) / variance
        np.testing.assert_allclose(by_mean, alpha, rtol=1e-8, atol=1e-10)
        beta = (1.0 - moments.variance / variance) / variance
        np.testing.assert_allclose(by_variance, 0.5 * (alpha**2 - beta), rtol=1e-7, atol=1e-9)
        leaves, structure = jax.tree.flatten(potential)
        for k, exact in enumerate(jax.tree.leaves(by_potential)[1:], start=1):
            step = 1e-5 * leaves[k]
            above = jax.tree.unflatten(structure, [*leaves[:k], leaves[k] + step, *leaves[k + 1 :]])
            below = jax.tree.unflatten(structure, [*leaves[:k], leaves[k] - step, *leaves[k + 1 :]])
            difference = value(above, mean, variance) - value(below, mean, variance)
            np.testing.assert_allclose(jnp.sum(exact * step) * 2.0, difference, rtol=1e-6)


@pytest.mark.float32
@pytest.mark.parametrize(
    "name", few(["poisson_exp", "probit", "logit", "laplace", "student_t", "negative_binomial_exp"], 2)
)
def test_float32(name):
    family, rows, density, anchors = FAMILIES[name]
    # Left out is what float32 cannot say: predictors near 12 are spaced by 1e-6, too far for scales of 1e-4 and for the
    # slope of 10^5 that the Poisson factor has there. A narrow cavity alone does no harm.
    rows = [parameters for parameters in rows if parameters[0] < 1e4 and 1e-4 not in parameters]
    mean, variance, row, columns = _grid(rows, VARIANCES[1:] if name == "poisson_exp" else VARIANCES)
    mean, variance = jnp.asarray(mean, jnp.float32), jnp.asarray(variance, jnp.float32)
    columns = [jnp.asarray(column, jnp.float32) for column in columns]
    moments = jax.jit(lambda columns, m, v: family(*columns).tilted_moments(m, v))(columns, mean, variance)
    assert {value.dtype for value in moments} == {jnp.dtype("float32")}
    mean, variance = np.asarray(mean, np.float64), np.asarray(variance, np.float64)
    rounded = [[float(column[np.argmax(row == i)]) for column in columns] for i in range(len(rows))]
    expected = [
        direct_moments(density(*rounded[i]), m, v, 1.0, anchors) for i, m, v in zip(row, mean, variance, strict=True)
    ]
    log_z, tilted_mean, *others = largest_errors(moments, expected, mean, variance)
    assert log_z < 1e-5 and tilted_mean < 1e-5 and max(others) < 2e-4


class TestElementwise:
    """Factors known only as a function, which sees all rows at once and nothing else."""

    @staticmethod
    def student(eta, observation, scale, df):
        if eta.shape != (18,):
            raise AssertionError(f"evaluated at the shape {eta.shape}")
        return jax.scipy.stats.t.logpdf(eta, df, observation, scale)

    @pytest.mark.thorough
    @needs_float64
    def test_student_t_without_being_told_where_its_peak_is(self):
        mean, variance, _, columns = _grid([(5.0, 0.05, 3.0)])
        moments = ElementwisePotential(self.student, tuple(map(jnp.asarray, columns))).tilted_moments(mean, variance)
        expected = StudentTPotential(*columns).tilted_moments(mean, variance)
        for value, other in zip(moments[:3], expected[:3], strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-9)

    @needs_float64
    def test_kink_at_the_peak(self):
        mean, variance, _, columns = _grid([(5.0, 0.05)])
        columns = tuple(map(jnp.asarray, columns))
        potential = ElementwisePotential(lambda eta, a, b: -jnp.abs(eta - a) / b - jnp.log(2.0 * b), columns)
        expected = LaplacePotential(*columns).tilted_moments(mean, variance)
        for value, other in zip(potential.tilted_moments(mean, variance), expected, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-6, atol=1e-9)

    @pytest.mark.thorough
    @needs_float64
    def test_half_line_and_kinks_elsewhere_to_four_digits(self):
        count = jnp.array([0.0, 1.0, 20.0])

        def rectified(eta, count):
            safe = jnp.where(eta > 0.0, eta, 1.0)
            inside = count * jnp.log(safe) - safe - jax.lax.lgamma(count + 1.0)
            return jnp.where(eta > 0.0, inside, jnp.where(count == 0.0, 0.0, -jnp.inf))

        potential = ElementwisePotential(rectified, (count,))
        for mean, variance in ((-3.0, 1.0), (0.7, 1.0), (12.0, 25.0), (0.0, 1e4)):
            log_z, tilted_mean, tilted_variance = rectified_linear_poisson_moments(count, mean, variance)
            moments = potential.tilted_moments(jnp.full(3, mean), jnp.full(3, variance))
            np.testing.assert_allclose(moments.log_z, log_z, atol=1e-4)
            np.testing.assert_array_less(jnp.abs(moments.mean - tilted_mean) / jnp.sqrt(tilted_variance), 1e-4)
            np.testing.assert_allclose(moments.variance, tilted_variance, rtol=1e-4)

    @pytest.mark.thorough
    def test_a_factor_that_vanishes_where_the_cavity_is_gives_nan(self):
        nowhere = ElementwisePotential(lambda eta: jnp.full_like(eta, -jnp.inf))
        undefined = ElementwisePotential(lambda eta: jnp.full_like(eta, jnp.nan))
        for potential in (nowhere, undefined):
            for value in potential.tilted_moments(jnp.zeros(2), jnp.ones(2)):
                assert jnp.isnan(value).all()
        for value in LogitPotential(jnp.ones(2)).tilted_moments(jnp.zeros(2), jnp.array([-1.0, 0.0])):
            assert jnp.isnan(value).all()

    @pytest.mark.thorough
    def test_vmap_over_cavities(self):
        potential = ElementwisePotential(lambda eta, y: -jnp.log1p((eta - y) ** 2), (jnp.array([0.0, 3.0, -1.0]),))
        means = jnp.array([[0.0, 1.0, 2.0], [3.0, -4.0, 5.0]])
        together = jax.jit(jax.vmap(lambda m: potential.tilted_moments(m, 2.0)))(means)
        for k in range(2):
            for value, other in zip(together, potential.tilted_moments(means[k], 2.0), strict=True):
                tolerance = 1e-4 if value.dtype == jnp.float32 else 1e-10
                # One mean is zero by symmetry: rounding of the order of its standard deviation of about one remains.
                np.testing.assert_allclose(value[k], other, rtol=tolerance, atol=tolerance)


@needs_float64
def test_reference_values_of_the_probit():
    """Moments and sites computed elsewhere, with forty digits."""
    table = np.genfromtxt(REFERENCE / "hm_probit_ep.csv", delimiter=",", names=True)
    potential = ProbitPotential(jnp.asarray(table["y"] > 0))
    found = potential.tilted_moments(jnp.asarray(table["m"]), jnp.asarray(table["v"]))
    np.testing.assert_allclose(found.log_z, table["logZ"], rtol=1e-9)
    np.testing.assert_allclose(found.mean, table["m_new"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.variance, table["v_new"], rtol=1e-9)
    np.testing.assert_allclose(found.site_precision, table["site_prec"], rtol=1e-9)
    np.testing.assert_allclose(found.site_shift, table["site_prec_mean"], rtol=1e-9)


@pytest.mark.float32
@pytest.mark.parametrize("variance", [0.2, 3.0])
def test_a_count_of_zero_without_exposure_says_nothing(variance):
    factors = PoissonExpPotential(jnp.zeros(2), jnp.array([0.0, 1.0]))
    cavity = jnp.array([0.7, 0.7]), jnp.array([variance, variance])
    found = factors.tilted_moments(*cavity)
    np.testing.assert_allclose([found.log_z[0], found.mean[0], found.variance[0]], [0.0, 0.7, variance], atol=2e-6)
    np.testing.assert_allclose(found.log_z, factors.log_normaliser(*cavity), atol=2e-6)
    assert found.log_z[1] < -0.5
