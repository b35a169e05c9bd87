"""Ordinal factors: against NumPyro's distribution, sums over categories, autodiff and limits in the tails."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats

from numpyro_ext.potentials.families.ordinal import (
    AdjacentCategoryPotential,
    ContinuationRatioPotential,
    CumulativeLogitPotential,
    CumulativeProbitPotential,
    cumulative_logit_table,
)
from numpyro_ext.potentials.families.stick_breaking import stick_breaking_labels
from numpyro_ext.potentials.integrals.normal_interval import normal_interval
from numpyro_ext.potentials.integrals.tilted.tilted_moments import tilted_moments

THRESHOLDS = np.array([-1.2, 0.3, 0.9])
SCORES = np.array([0.0, 0.4, 0.7, 1.5])
ETA = np.linspace(-4.0, 5.0, 7)
LABELS = np.arange(4)[:, None]
FAMILIES = {
    "cumulative logit": CumulativeLogitPotential,
    "cumulative probit": CumulativeProbitPotential,
    "continuation ratio": ContinuationRatioPotential,
    "adjacent category": lambda label, thresholds: AdjacentCategoryPotential(label, thresholds, SCORES),
}
ALL = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="tolerances of double precision")


def direct_probabilities(name, eta):
    """The defining formulas, one category after the other."""
    sigmoid = scipy.stats.logistic.cdf
    if name == "adjacent category":
        logits = SCORES[:, None] * eta - np.concatenate([[0.0], np.cumsum(THRESHOLDS)])[:, None]
        return np.exp(logits) / np.exp(logits).sum(0)
    if name == "continuation ratio":
        rows, left = [], 1.0
        for threshold in THRESHOLDS:
            rows.append(left * sigmoid(threshold - eta))
            left = left - rows[-1]
        return np.array([*rows, left])
    cdf = sigmoid if name == "cumulative logit" else scipy.stats.norm.cdf
    return np.diff([np.zeros_like(eta), *cdf(THRESHOLDS[:, None] - eta), np.ones_like(eta)], axis=0)


@pytest.mark.float32
@pytest.mark.parametrize("name", FAMILIES)
def test_probabilities_are_the_defining_ones_and_sum_to_one(name):
    eta = jnp.asarray(ETA, float)
    probs = np.exp(FAMILIES[name](LABELS, jnp.asarray(THRESHOLDS, float)).log_density(eta))
    tolerance = 1e-5 if eta.dtype == jnp.float32 else 1e-13
    np.testing.assert_allclose(probs.sum(0), 1.0, rtol=tolerance)
    np.testing.assert_allclose(probs, direct_probabilities(name, ETA), rtol=tolerance, atol=tolerance)


@needs_float64
def test_cumulative_logit_is_the_ordered_logistic_of_numpyro():
    expected = dist.OrderedLogistic(ETA, THRESHOLDS).log_prob(LABELS)
    np.testing.assert_allclose(CumulativeLogitPotential(LABELS, THRESHOLDS).log_density(ETA), expected, rtol=1e-12)


@needs_float64
@ALL
def test_derivatives_are_those_of_the_log_density(family):
    @jax.jit
    def log_density(eta, thresholds):
        return family(LABELS, thresholds).log_density(eta)

    eta = np.broadcast_to(ETA, (4, 7))
    value, slope, curvature = family(LABELS, THRESHOLDS).derivatives(eta)
    step = 1e-4
    above, below = log_density(eta + step, THRESHOLDS), log_density(eta - step, THRESHOLDS)
    np.testing.assert_allclose(slope, (above - below) / (2 * step), atol=1e-7)
    np.testing.assert_allclose(curvature, (above - 2 * value + below) / step**2, atol=1e-6)
    first = jax.grad(lambda e: log_density(e, THRESHOLDS).sum())(eta)
    _, second = jax.jvp(jax.grad(lambda e: log_density(e, THRESHOLDS).sum()), (eta,), (np.ones_like(eta),))
    np.testing.assert_allclose(slope, first, atol=1e-13)
    np.testing.assert_allclose(curvature, second, atol=1e-13)
    assert np.all(curvature <= 0.0)
    direction = np.array([0.3, -0.2, 0.5])
    gradient = jax.grad(lambda t: log_density(eta, t).sum())(THRESHOLDS)
    ends = [log_density(eta, THRESHOLDS + sign * step * direction).sum() for sign in (1, -1)]
    np.testing.assert_allclose(gradient @ direction, (ends[0] - ends[1]) / (2 * step), atol=1e-6)


@pytest.mark.float32
@ALL
def test_tails(family):
    eta = jnp.array([-1e4, 1e4])
    value, slope, curvature = family(LABELS, jnp.asarray(THRESHOLDS, float)).derivatives(eta)
    assert all(np.all(np.isfinite(part)) for part in (value, slope, curvature))
    np.testing.assert_allclose([value[0, 0], value[-1, 1]], 0.0, atol=1e-12)
    # The least probable category falls with the predictor, and ever faster or straight.
    assert np.all(value[0, 1] < -1e3)
    assert np.all(value[-1, 0] < -1e3)
    np.testing.assert_allclose([slope[0, 0], slope[-1, 1]], 0.0, atol=1e-12)
    for gradient in jax.grad(lambda e, t: family(LABELS, t).log_density(e).sum(), (0, 1))(eta, THRESHOLDS):
        assert np.all(np.isfinite(gradient))


@needs_float64
@pytest.mark.parametrize("family", [CumulativeLogitPotential, ContinuationRatioPotential])
def test_logistic_terms_describe_the_factor(family):
    potential = family(LABELS, THRESHOLDS)
    terms = potential.logistic_terms()
    np.testing.assert_allclose(terms.log_density(ETA), potential.log_density(ETA), atol=1e-13)
    assert np.all(terms.weights >= 0.0)
    # One set of thresholds for every row.
    rows = family(np.array([0, 2, 3]), THRESHOLDS + np.arange(3.0)[:, None])
    np.testing.assert_allclose(rows.logistic_terms().log_density(ETA[:3]), rows.log_density(ETA[:3]), atol=1e-13)
    single = family(2, THRESHOLDS)
    np.testing.assert_allclose(single.log_density(ETA), potential.log_density(ETA)[2], rtol=1e-14)


@ALL
def test_labels_out_of_range_are_nan_and_thresholds_out_of_order_show(family):
    assert np.all(np.isnan(family(np.array([-1, 4]), THRESHOLDS).log_density(0.0)))
    if family in (FAMILIES["cumulative logit"], FAMILIES["cumulative probit"]):
        assert np.isnan(family(1, THRESHOLDS[::-1]).log_density(0.0))


@pytest.mark.float32
@ALL
def test_vmap_over_labels_and_thresholds(family):
    labels, thresholds = jnp.array([0, 1, 3]), jnp.asarray(THRESHOLDS + np.arange(3.0)[:, None], float)
    mapped = jax.vmap(lambda y, t: family(y, t).log_density(0.5))(labels, thresholds)
    np.testing.assert_allclose(mapped, family(labels, thresholds).log_density(0.5), rtol=2e-6)


@needs_float64
@pytest.mark.parametrize(
    ("lower", "upper"),
    [(-np.inf, 0.0), (-5.0, np.inf), (-3.0, 8.0), (2.0, 2.5), (-30.0, 30.0), (0.1, 0.1 + 1e-7), (-60.0, -59.0)],
)
def test_normal_interval(lower, upper):
    found = normal_interval(lower, upper)
    # The integral itself, on a fine grid and measured from the highest point of the density.
    peak = float(np.clip(0.0, lower, upper))
    nodes, weights = np.polynomial.legendre.leggauss(400)
    low, high = max(lower, peak - 10.0), min(upper, peak + 10.0)
    t = low + 0.5 * (high - low) * (nodes + 1.0)
    density = 0.5 * (high - low) * weights * np.exp(-0.5 * (t - peak) * (t + peak))
    log_mass = np.log(density.sum()) - 0.5 * peak**2 - 0.5 * np.log(2.0 * np.pi)
    mean = peak + (density * (t - peak)).sum() / density.sum()
    np.testing.assert_allclose(found.log_mass, log_mass, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-13, atol=1e-13)
    variance = (density * (t - mean) ** 2).sum() / density.sum()
    np.testing.assert_allclose(found.variance, variance, rtol=1e-7 if upper - lower < 1e-3 else 1e-11)


@needs_float64
def test_what_a_wide_interval_takes_from_the_variance_keeps_its_digits():
    """As one less the variance it is rounding; the series of the tails has it."""
    lower, upper = -9.5, 9.0
    ends = np.array([9.5, 9.0])
    expected = np.sum(ends * np.exp(-0.5 * ends**2)) / np.sqrt(2.0 * np.pi)
    np.testing.assert_allclose(normal_interval(lower, upper).shrinkage, expected, rtol=1e-10)
    np.testing.assert_allclose(normal_interval(-np.inf, 9.0).shrinkage, 9.0 * scipy.stats.norm.pdf(9.0), rtol=1e-10)
    for ends in ((-3.0, 8.0), (2.0, 2.5), (-np.inf, -40.0), (-1.0, 1e-3)):
        found = normal_interval(*ends)
        np.testing.assert_allclose(found.shrinkage, 1.0 - found.variance, rtol=1e-13, atol=1e-13)


@needs_float64
@pytest.mark.parametrize("variance", [1e-3, 0.7, 40.0])
def test_moments_of_cumulative_probit_are_those_of_quadrature(variance):
    """The closed form against the rule for any factor, also where a category is next to impossible."""
    potential = CumulativeProbitPotential(LABELS, THRESHOLDS)
    mean = np.broadcast_to(np.linspace(-9.0, 9.0, 7), (4, 7))
    closed = potential.tilted_moments(mean, variance)
    by_rule = tilted_moments(potential, mean, np.full_like(mean, variance), 1.0)
    for found, expected in zip(closed, by_rule, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-9)
    gradient = jax.grad(lambda m: potential.log_normaliser(m, variance).sum())(jnp.asarray(mean))
    np.testing.assert_allclose(gradient, (closed.mean - mean) / variance, atol=1e-9)


@pytest.mark.float32
def test_stick_breaking_labels():
    labels, observed = stick_breaking_labels(jnp.array([[0, 1], [2, 3]]), 3)
    assert labels.shape == observed.shape == (2, 2, 3)
    np.testing.assert_array_equal(labels, [[[1, 0, 0], [0, 1, 0]], [[0, 0, 1], [0, 0, 0]]])
    np.testing.assert_array_equal(observed, [[[1, 0, 0], [1, 1, 0]], [[1, 1, 1], [1, 1, 1]]])
    assert not stick_breaking_labels(jnp.array([-1, 4]), 3)[1].any()


@ALL
def test_derivatives_at_the_thresholds_themselves_are_those_beside_them(family):
    at = jnp.asarray(THRESHOLDS)
    slope = jax.vmap(jax.grad(lambda eta, label: family(label, THRESHOLDS).log_density(eta)), (0, None))
    for label in range(4):
        beside = 0.5 * (slope(at - 1e-3, label) + slope(at + 1e-3, label))
        np.testing.assert_allclose(slope(at, label), beside, atol=1e-4)


@pytest.mark.float32
def test_a_table_of_all_categories_has_the_values_of_each_label_and_its_derivatives():
    cuts = jnp.array([[-2.0, -0.5, 1.0], [-jnp.inf, 0.0, 3.0], [0.0, 2.0, jnp.inf], [-1.0, jnp.inf, jnp.inf]])
    one_by_one = CumulativeLogitPotential(jnp.arange(4), cuts[:, None])
    for eta in map(jnp.array, ([0.3, -1.2, 2.0, 0.1], [-0.5, 0.0, 0.0, -1.0], [40.0] * 4, [-40.0] * 4)):
        table, slope, curvature = cumulative_logit_table(eta, cuts), *by_differentiation(eta, cuts)
        expected = one_by_one.derivatives(eta[:, None])
        np.testing.assert_allclose(table, expected[0], rtol=1e-6)
        is_there = np.isfinite(table)
        np.testing.assert_allclose(slope[is_there], expected[1][is_there], atol=1e-6)
        np.testing.assert_allclose(curvature[is_there], expected[2][is_there], atol=1e-6)


def by_differentiation(eta, cuts):
    """Slope and curvature of each row of the table by its own predictor."""
    slope = jax.jacfwd(cumulative_logit_table)
    own = np.arange(4)
    return slope(eta, cuts)[own, :, own], jax.jacfwd(slope)(eta, cuts)[own, :, own, own]
