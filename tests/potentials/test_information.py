"""Entropies of outcomes under Gaussian predictors, against reference values, sums and adaptive quadrature."""

import csv
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from scipy import integrate, stats
from scipy.special import entr, expit

from numpyro_ext.potentials import (
    BinomialLogitPotential,
    CumulativeLogitPotential,
    GaussianPotential,
    LaplacePotential,
    LogitPotential,
    NegativeBinomialExpPotential,
    PoissonExpPotential,
    ProbitPotential,
    StudentTPotential,
)
from numpyro_ext.potentials.families.location import LogisticPotential
from numpyro_ext.potentials.families.ordinal import CumulativeProbitPotential
from numpyro_ext.potentials.families.stochastic_volatility import StochasticVolatilityPotential
from numpyro_ext.potentials.information import expected_conditional_entropy, expected_information, predictive_entropy
from numpyro_ext.potentials.outcomes import log_predictive_probabilities, with_outcome
from tests.tiers import few

REFERENCE = Path(__file__).parents[1] / "reference" / "active_gpc_bald_scalar.csv"


@pytest.fixture(scope="module")
def scalar():
    with REFERENCE.open() as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def test_probit_entropies_are_those_of_thirty_digits(scalar):
    factors, mean, variance = ProbitPotential(0), scalar["mu"], scalar["var"]
    bits = np.log(2.0)
    marginal = predictive_entropy(factors, mean, variance) / bits
    np.testing.assert_allclose(marginal, scalar["H_marginal_bits"], atol=1e-14)
    exact = expected_conditional_entropy(factors, mean, variance) / bits
    np.testing.assert_allclose(exact, scalar["EH_exact_bits"], atol=3e-10)
    closed = expected_conditional_entropy(factors, mean, variance, method="closed-form") / bits
    np.testing.assert_allclose(closed, scalar["EH_approx_bits"], atol=1e-14)
    # The closed form is an upper bound, which for little variance makes the information negative.
    assert np.all(closed > exact - 1e-8)
    information = np.asarray(expected_information(factors, mean, variance))
    np.testing.assert_allclose(information, scalar["U_exact_nats"], atol=3e-10)
    assert np.all(information > 0.0)


def test_information_in_probit_labels_is_never_negative_and_small_one_keeps_its_digits():
    mean, variance = np.meshgrid(np.linspace(-13.0, 13.0, 53), np.r_[0.0, np.geomspace(1e-12, 1e6, 37)])
    found = np.asarray(expected_information(ProbitPotential(0), mean, variance))
    assert np.all(found[0] == 0.0) and np.all(found[:, abs(mean[0]) < 6.0][1:] > 0.0) and np.all(found >= 0.0)
    # Half the Fisher information times the variance; no difference of entropies of a certain label has a digit of it.
    at = mean[0, abs(mean[0]) < 11.0]  # 1e-27 are left
    fisher = np.exp(2.0 * stats.norm.logpdf(at) - stats.norm.logcdf(at) - stats.norm.logsf(at))
    for row in np.flatnonzero((variance[:, 0] > 1e-11) & (variance[:, 0] < 1e-5)):
        np.testing.assert_allclose(found[row, abs(mean[0]) < 11.0], 0.5 * fisher * variance[row, 0], rtol=2e-3)


@pytest.mark.thorough
def test_information_in_probit_labels_is_a_series_where_there_is_little_variance():
    at = np.array([0.0, -0.3, 2.0, 5.0, 9.0])
    # As much as the variance goes to zero, in the digits of the polynomial.
    fisher = np.exp(2.0 * stats.norm.logpdf(at) - stats.norm.logcdf(at) - stats.norm.logsf(at))
    for variance in (1e-200, 1e-16, 1e-14, 1e-12, 1e-10):
        found = expected_information(ProbitPotential(0), at, variance)
        np.testing.assert_allclose(found / variance, 0.5 * fisher, rtol=1e-7 if variance == 1e-10 else 1e-8)
    # Series and nodes agree where the one takes over from the other.
    border = np.finfo(float).eps ** (1 / 3)
    below, above = (expected_information(ProbitPotential(0), at, border * (1.0 + d)) for d in (-1e-10, 1e-10))
    np.testing.assert_allclose(below, above, rtol=1e-9)
    for of in (expected_information, expected_conditional_entropy):
        slope = jax.vmap(jax.grad(lambda v, m, of=of: of(ProbitPotential(0), m, v), 0), (None, 0))(0.0, at)
        step = 1e-4  # nodes, not the series
        f = [np.asarray(of(ProbitPotential(0), at, k * step)) for k in range(5)]
        differences = (-25.0 * f[0] + 48.0 * f[1] - 36.0 * f[2] + 16.0 * f[3] - 3.0 * f[4]) / (12.0 * step)
        np.testing.assert_allclose(slope, differences, rtol=1e-6, atol=1e-9)


def test_nothing_is_known_of_what_has_no_bounds():
    double, single = np.array([1e30, np.inf]), np.float32(np.inf)
    np.testing.assert_allclose(expected_information(ProbitPotential(0), 0.0, double), np.log(2.0), rtol=1e-9)
    with jax.enable_x64(False):
        found = expected_information(ProbitPotential(0), np.float32(0.0), single)
    # one of the nodes knows the outcome of an infinite predictor at its centre no better than any
    np.testing.assert_allclose(found, np.log(2.0), rtol=2e-3)


@pytest.mark.thorough
def test_information_in_probit_labels_has_the_shape_of_the_factors():
    for labels in (ProbitPotential(jnp.zeros(3)), LogitPotential(jnp.zeros(3))):  # one predictor for many factors
        for of in (predictive_entropy, expected_conditional_entropy, expected_information):
            alone = of(dataclasses.replace(labels, label=jnp.array(0.0)), 0.3, 0.8)
            np.testing.assert_allclose(of(labels, 0.3, 0.8), np.full(3, alone), rtol=1e-12)
    assert expected_information(ProbitPotential(0), 1, 2).shape == ()


PLACES = jnp.array([-1.5, 0.0, 4.0]), jnp.array([0.9, 3.0, 40.0])


def _some_left(mean, variance):
    return expected_information(ProbitPotential(0), mean, variance, left=0.2)


@pytest.mark.thorough
def test_information_in_probit_labels_has_slopes_and_their_slopes():
    weights, way = jnp.array([1.0, -0.7, 0.4]), (jnp.array([0.3, -1.0, 0.8]), jnp.array([0.5, 0.6, -1.0]))

    def total(*at):
        return weights @ _some_left(*at)

    slopes = jax.jit(jax.grad(total, (0, 1)))
    along = jax.jit(lambda at: jax.jvp(total, at, way)[1])
    bends = jax.jit(lambda at: jax.jvp(jax.grad(total, (0, 1)), at, way)[1])

    def differences(of):
        shifted = [jax.tree.map(lambda x, d, k=k: x + k * 1e-3 * d, PLACES, way) for k in (-2, -1, 1, 2)]
        a, b, c, d = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(of(at))]) for at in shifted)
        return (a - 8.0 * b + 8.0 * c - d) / 12e-3

    inner = sum(slope @ d for slope, d in zip(slopes(PLACES[0], PLACES[1]), way, strict=True))
    np.testing.assert_allclose(inner, along(PLACES), rtol=1e-12)
    np.testing.assert_allclose(differences(lambda at: total(*at)), along(PLACES), rtol=1e-6)
    np.testing.assert_allclose(differences(lambda at: slopes(*at)), np.concatenate(bends(PLACES)), rtol=1e-6)


@pytest.mark.thorough
def test_information_in_probit_labels_has_second_slopes_in_every_mode():
    jax.test_util.check_grads(_some_left, PLACES, 2, rtol=1e-6)


CUTS = np.array([-1.0, 0.5, 1.0])


def ordinal(y, f):
    edges = np.r_[-np.inf, CUTS, np.inf]
    return stats.norm.cdf(edges[y + 1] - f) - stats.norm.cdf(edges[y] - f)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("factors", "probability", "number"),
    few([
        (LogitPotential(jnp.zeros(1)), lambda y, f: expit((2 * y - 1) * f), 2),
        (BinomialLogitPotential(jnp.zeros(1), jnp.array([3.0])), lambda y, f: stats.binom.pmf(y, 3, expit(f)), 4),
        (CumulativeProbitPotential(jnp.zeros(1, int), jnp.asarray(CUTS)[None]), ordinal, 4),
        (PoissonExpPotential(jnp.zeros(1), jnp.array([2.0])), lambda y, f: stats.poisson.pmf(y, 2 * np.exp(f)), 1500),
    ], 2),
    ids=["logit", "binomial", "ordinal", "poisson"],
)  # fmt: skip
def test_sums_over_outcomes_against_a_fine_grid(factors, probability, number):
    mean, variance = 0.4, 0.8
    f = mean + np.sqrt(variance) * np.linspace(-6.0, 6.0, 601)
    share = stats.norm(mean, np.sqrt(variance)).pdf(f)
    share /= share.sum()
    table = probability(np.arange(number)[:, None], f)
    at = jnp.array([mean]), jnp.array([variance])
    np.testing.assert_allclose(expected_conditional_entropy(factors, *at), [entr(table).sum(0) @ share], atol=1e-7)
    np.testing.assert_allclose(predictive_entropy(factors, *at), [entr(table @ share).sum()], atol=1e-7)


@pytest.mark.parametrize(
    ("factors", "noise"),
    few(
        [
            (GaussianPotential(jnp.zeros(1), jnp.array([0.5])), stats.norm(0, 0.5)),
            (StudentTPotential(jnp.zeros(1), jnp.array([0.5]), jnp.array([3.0])), stats.t(3.0, 0, 0.5)),
            (LaplacePotential(jnp.zeros(1), jnp.array([0.5])), stats.laplace(0, 0.5)),
            (LogisticPotential(jnp.zeros(1), jnp.array([0.5])), stats.logistic(0, 0.5)),
        ],
        2,
    ),
)
def test_real_outcomes(factors, noise):
    at = jnp.array([1.0]), jnp.array([2.0])
    np.testing.assert_allclose(expected_conditional_entropy(factors, *at), [noise.entropy()], atol=1e-6)

    t, z = np.linspace(-13.0, 13.0, 2001), np.linspace(-8.0, 8.0, 4001)
    y = 1.0 + np.sinh(t)
    p = np.array([noise.pdf(value - 1.0 - np.sqrt(2.0) * z) @ stats.norm.pdf(z) for value in y]) * (z[1] - z[0])
    expected = integrate.simpson(entr(p) * np.cosh(t), x=t)
    np.testing.assert_allclose(predictive_entropy(factors, *at), [expected], atol=2e-6)


def test_mixtures_over_components():
    weights = np.array([0.3, 0.7])
    mean, variance = np.array([[-1.0], [2.0]]), np.array([[0.5], [0.1]])
    factors = GaussianPotential(jnp.zeros((2, 1)), jnp.array([[0.5], [0.2]]))
    sds = np.sqrt(variance[:, 0] + np.array([0.25, 0.04]))
    y = np.linspace(-9.0, 9.0, 20001)
    p = weights @ stats.norm(mean, sds[:, None]).pdf(y)
    expected = -np.sum(p * np.log(p)) * (y[1] - y[0])
    np.testing.assert_allclose(predictive_entropy(factors, mean, variance, weights), [expected], atol=1e-7)
    conditional = weights @ stats.norm(0.0, [0.5, 0.2]).entropy()
    found = expected_conditional_entropy(factors, mean, variance, weights)
    np.testing.assert_allclose(found, [conditional], atol=1e-12)
    probit = ProbitPotential(jnp.zeros((2, 1)))
    table = np.exp(log_predictive_probabilities(probit, mean, variance, weights, 2))
    share = weights @ stats.norm.cdf(mean / np.sqrt(1.0 + variance))
    np.testing.assert_allclose(table, [1.0 - share, share], atol=1e-13)


@pytest.mark.parametrize("factors", [ProbitPotential(jnp.zeros(1)), LogitPotential(jnp.zeros(1))])
def test_a_part_of_the_predictor(factors):
    mean, variance, left = 0.3, 2.0, 1.2
    link = stats.norm.cdf if isinstance(factors, ProbitPotential) else lambda f: 1.0 / (1.0 + np.exp(-f))
    z = np.linspace(-9.0, 9.0, 801)
    share = stats.norm.pdf(z) * (z[1] - z[0])
    inner = link(mean + np.sqrt(variance - left) * z[:, None] + np.sqrt(left) * z) @ share
    entropies = -inner * np.log(inner) - (1.0 - inner) * np.log1p(-inner)
    found = expected_conditional_entropy(factors, jnp.array([mean]), jnp.array([variance]), left=jnp.array([left]))
    np.testing.assert_allclose(found, [share @ entropies], atol=1e-7)
    # between knowing all of it and knowing nothing
    at = jnp.array([mean]), jnp.array([variance])
    remains = jnp.array([0.0]), jnp.array([left]), jnp.array([variance])
    whole, part, none = (float(expected_information(factors, *at, left=x)[0]) for x in remains)
    assert whole > part > none and abs(none) < 1e-10


@pytest.mark.float32
def test_small_information_keeps_its_digits_in_both_precisions():
    variance = jnp.array([1e-2, 1e-4, 1e-6])
    for factors in (ProbitPotential(jnp.zeros(3)), CumulativeLogitPotential(jnp.zeros(3, int), jnp.zeros((3, 1)))):
        scale = 2.0 / np.pi if isinstance(factors, ProbitPotential) else 0.25
        found = np.asarray(expected_information(factors, jnp.zeros(3), variance))
        # half the Fisher information times the variance, as it goes to zero
        np.testing.assert_allclose(found[1:], 0.5 * scale * np.asarray(variance)[1:], rtol=2e-3)
        assert np.all(found > 0.0)


@pytest.mark.thorough
@pytest.mark.float32
def test_slopes_are_finite_where_an_outcome_has_no_probability_left():
    """In single precision a label that predictors almost exclude had a slope that was no number."""
    mean, variance, factors = jnp.array([[-0.03], [-0.9]]), jnp.array([[2.0], [1.0]]), ProbitPotential(jnp.ones((2, 1)))

    def found(mean):
        return expected_information(factors, mean, variance, jnp.array([0.6, 0.4]))[0]

    step = 3e-2
    slope = (found(mean + step) - found(mean - step)) / (2 * step)
    np.testing.assert_allclose(jnp.sum(jax.grad(found)(mean)), slope, rtol=2e-3)


@pytest.mark.float32
def test_outcomes_that_are_certain_tell_nothing():
    """A Gaussian factor overflowed there, and the score of the whole pool was no number."""
    mean = jnp.array([1e3, -1e3, 1e5])
    np.testing.assert_array_equal(expected_information(ProbitPotential(jnp.zeros(3)), mean, 0.5 * jnp.ones(3)), 0.0)


@pytest.mark.thorough
def test_outcomes_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="StochasticVolatilityPotential does not say what its outcomes are"):
        predictive_entropy(StochasticVolatilityPotential(jnp.zeros(1)), 0.0, 1.0)
    with pytest.raises(TypeError, match="LogitPotential have as many nodes .* no value within jax.jit or vmap"):
        jax.jit(lambda v: expected_information(LogitPotential(jnp.zeros(1)), 0.0 * v, v))(jnp.ones(1))
    with pytest.raises(ValueError, match="closed form is one of probit factors"):
        expected_conditional_entropy(LogitPotential(jnp.zeros(1)), 0.0, 1.0, method="closed-form")
    with pytest.raises(ValueError, match="too uncertain to add counts up"):
        predictive_entropy(NegativeBinomialExpPotential(jnp.zeros(1), jnp.ones(1)), 0.0, 400.0)
    assert with_outcome(LogitPotential(jnp.array([0, 1])), 1.0).label.dtype == jnp.array([0]).dtype
