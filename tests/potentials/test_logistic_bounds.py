"""Bounds of the logistic log-partition against tables, exact expectations and finite differences."""

import json
import math
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from numpyro_ext.potentials import (
    BinomialLogitPotential,
    BoundedPotential,
    LogitPotential,
    NegativeBinomialExpPotential,
    ProbitPotential,
    logistic_bound,
)
from numpyro_ext.potentials.bounds.logistic import ExactExpectation, JaakkolaBound, MinimumBound, PiecewiseBound
from numpyro_ext.potentials.bounds.piecewise import minimax_pieces
from numpyro_ext.potentials.elementwise import TemperedPotential
from numpyro_ext.potentials.integrals.logistic_expectation import expected_log_partition
from tests.tiers import few

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
REFERENCE = Path(__file__).parents[1] / "reference"
PIECES = json.loads((REFERENCE / "khan_piecewise_coefficients.json").read_text())["bounds"]
ROWS = json.loads((REFERENCE / "khan_llp_expectations.json").read_text())["rows"]
KINDS = {"L": "linear", "Q": "quadratic"}

# Means and variances of one shape, so that everything is compiled once: an even grid, then far tails.
MEANS = np.concatenate([np.linspace(-15.0, 15.0, 25), [-1e3, -60.0, 60.0, 1e3]])
GRID = tuple(x.ravel() for x in np.meshgrid(MEANS, np.logspace(-10.0, 6.0, 17)))
BOUNDS = [
    ExactExpectation(),
    logistic_bound("jaakkola"),
    logistic_bound("bohning"),
    *(PiecewiseBound("linear", num_pieces) for num_pieces in (3, 10)),
    *(PiecewiseBound("quadratic", num_pieces) for num_pieces in (3, 4, 5, 20, 40)),
    logistic_bound(("jaakkola", "piecewise-quadratic")),
]
evaluate = jax.jit(lambda bound, mean, variance: bound(mean, variance))


def identify(bound):
    return f"{bound.name}-{getattr(bound, 'num_pieces', '')}"


def column(name, key=None):
    return np.array([row[name] if key is None else row[name][key] for row in ROWS])


@pytest.mark.float32
@pytest.mark.parametrize("name", PIECES)
def test_minimax_pieces_are_those_of_the_table(name):
    # The table has twelve significant digits.
    expected = PIECES[name]
    found = minimax_pieces(KINDS[expected["kind"]], expected["R"])
    np.testing.assert_allclose(found.maximum_error, expected["eps"], rtol=5e-12)
    np.testing.assert_allclose(found.breakpoints, expected["t"], rtol=5e-12, atol=1e-12)
    np.testing.assert_allclose(np.stack(found[1:4], axis=-1), expected["abc"], rtol=5e-12, atol=1e-12)


@pytest.mark.float32
@pytest.mark.parametrize("kind", ["linear", "quadratic"])
@pytest.mark.parametrize("num_pieces", [3, 4, 7, 12, 25, 40])
def test_pieces_touch_the_function_and_are_off_by_the_same_error_everywhere(kind, num_pieces):
    t, a, b, c, error = minimax_pieces(kind, num_pieces)
    np.testing.assert_allclose(t, -t[::-1], atol=1e-14)
    ends = np.concatenate([[-60.0], t, [60.0]])
    for i in range(num_pieces):
        x = np.linspace(ends[i], ends[i + 1], 20001)
        gap = (a[i] * x + b[i]) * x + c[i] - np.logaddexp(0.0, x)
        # A mesh misses the extremes by a little: the curvature times the square of its step.
        missed = 0.25 * (x[1] - x[0]) ** 2
        assert -1e-14 <= gap.min() <= missed
        assert error - missed <= gap.max() <= error + 1e-14


def test_small_cases_have_known_coefficients():
    # Khan (2012), section 4.3: three lines by hand; the middle piece of three parabolas is one of Jaakkola's.
    three = minimax_pieces("linear", 3)
    np.testing.assert_allclose(three.breakpoints, [-2.0 * math.log(2.0), 2.0 * math.log(2.0)], rtol=1e-13)
    np.testing.assert_allclose(three.constant[1], math.log(2.5), rtol=1e-13)
    np.testing.assert_allclose(three.maximum_error, math.log(1.25), rtol=1e-13)
    np.testing.assert_allclose(minimax_pieces("quadratic", 4).constant[1:3], math.log(2.0), rtol=1e-13)
    a, b, c = (x[1] for x in minimax_pieces("quadratic", 3)[1:4])
    xi = 2.0 * math.sqrt(math.log(2.0))
    for _ in range(200):  # the point where the parabola touches: tanh(xi / 2) / (4 xi) = a, as a fixed point
        xi = math.tanh(0.5 * xi) / (4.0 * a)
    assert b == 0.5
    np.testing.assert_allclose(c, np.logaddexp(0.0, xi) - 0.5 * xi - a * xi**2, rtol=1e-12)


@pytest.mark.thorough
def test_errors_fall_as_they_should():
    np.testing.assert_allclose(400**2 * minimax_pieces("linear", 400).maximum_error, math.pi**2 / 8.0, rtol=0.01)
    errors = [minimax_pieces("quadratic", num_pieces).maximum_error for num_pieces in (30, 60)]
    assert 7.5 < errors[0] / errors[1] < 8.5


@pytest.mark.float32
def test_expectations_of_the_table():
    mean, variance = column("m"), column("v")
    tolerance = 1e-11 if jax.config.jax_enable_x64 else 2e-6
    found = expected_log_partition(mean, variance)
    for part, name in zip(found, ("E_llp", "dE_dm", "dE_dv"), strict=True):
        np.testing.assert_allclose(part, column(name), rtol=tolerance, atol=tolerance)
    for name in ("jaakkola", "bohning"):
        found = logistic_bound(name)(mean, variance)
        np.testing.assert_allclose(found[0], column(name), rtol=tolerance, atol=tolerance)


@pytest.mark.float32
@pytest.mark.parametrize("name", ["L4", "L10", "Q3", "Q5", "Q10", "Q20"])
def test_piecewise_expectations_of_the_table(name):
    found = evaluate(PiecewiseBound(KINDS[name[0]], int(name[1:])), column("m"), column("v"))
    for part, key in zip(found, ("value", "d_dm", "d_dv"), strict=True):
        expected = column(name, key)
        if jax.config.jax_enable_x64:
            np.testing.assert_allclose(part, expected, rtol=1e-10, atol=1e-11)
        else:
            # A breakpoint at a mean of some tens of standard deviations is known to an error that this multiplies.
            np.testing.assert_allclose(part, expected, rtol=2e-4, atol=2e-5)


@needs_float64
def test_expectation_is_accurate_for_any_gaussian():
    # Against composite Gauss-Legendre rules, for narrow and wide Gaussians and on both sides of the switch of rules.
    nodes, weights = np.polynomial.legendre.leggauss(20)
    for scale in (1e-6, 0.3, 1.2499, 1.2501, 4.0, 100.0, 1e3):
        for mean in (-1e3, -30.0, -3.0, 0.0, 0.7, 25.0):
            mesh = mean + scale * np.linspace(-10.0, 10.0, 81)
            fine = np.linspace(-45.0, 45.0, 181)
            mesh = np.unique(np.concatenate([mesh, fine[np.abs(fine - mean) < 10.0 * scale]]))
            left, right = mesh[:-1, None], mesh[1:, None]
            x = 0.5 * (left + right) + 0.5 * (right - left) * nodes
            density = np.exp(-0.5 * ((x - mean) / scale) ** 2) / (scale * np.sqrt(2.0 * np.pi))
            measure = 0.5 * (right - left) * weights * density
            sigmoid = np.exp(-np.logaddexp(0.0, -x))
            bell = np.exp(-np.logaddexp(0.0, -x) - np.logaddexp(0.0, x))
            expected = [(measure * f).sum() for f in (np.logaddexp(0.0, x), sigmoid, 0.5 * bell)]
            # The mesh itself is rounded where the Gaussian is narrow.
            blur = 1e-15 * (1.0 + abs(mean) / scale)
            np.testing.assert_allclose(
                expected_log_partition(mean, scale**2), expected, rtol=2e-14 + blur, atol=4e-15 + 1e-3 * blur
            )


@needs_float64
@pytest.mark.parametrize("order", few([1, 2, 3], 1))
def test_derivatives_of_the_expectation_of_every_order(order):
    # Slopes in the variance are half the second derivatives in the mean, of which the rule knows every order.
    def value(mean, variance):
        return expected_log_partition(mean, variance).value

    in_mean = in_variance = value
    for _ in range(order):
        in_mean, in_variance = jax.grad(jax.grad(in_mean)), jax.grad(in_variance, 1)
    for mean, variance in ((0.4, 0.3), (-2.0, 9.0)):
        np.testing.assert_allclose(in_variance(mean, variance), in_mean(mean, variance) / 2.0**order, rtol=1e-12)
    if order == 1:
        difference = (value(0.4, 0.3 + 1e-5) - value(0.4, 0.3 - 1e-5)) / 2e-5
        np.testing.assert_allclose(in_variance(0.4, 0.3), difference, rtol=1e-9)


@needs_float64
def test_many_pieces_tend_to_the_expectation():
    # The loss of wide Gaussians is the average gap: between zero and the maximum, and the same for all of them.
    mean, variance = jnp.array([-300.0, 0.0, 20.0, 1e3]), jnp.array([1e5, 1e6, 1e4, 1e6])
    t, a, b, c, error = minimax_pieces("quadratic", 40)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    left, right = t[:-1, None], t[1:, None]
    x = 0.5 * (left + right) + 0.5 * (right - left) * nodes
    inner = (a[1:-1, None] * x + b[1:-1, None]) * x + c[1:-1, None] - np.logaddexp(0.0, x)
    tail_nodes = t[-1] + 20.0 * (nodes + 1.0)
    value, *_ = PiecewiseBound("quadratic", 40)(mean, variance)
    exact = expected_log_partition(mean, variance).value
    for i in range(4):
        m, v = float(mean[i]), float(variance[i])

        def density(x, m=m, v=v):
            return np.exp(-0.5 * (x - m) ** 2 / v) / np.sqrt(2.0 * np.pi * v)

        loss = (0.5 * (right - left) * weights * inner * density(x)).sum()
        for side in (1.0, -1.0):  # the tails are the asymptotes, raised by the error
            z = (side * t[-1] - m) / np.sqrt(v)
            loss += error * special.ndtr(-side * z)
            loss -= (20.0 * weights * np.log1p(np.exp(-tail_nodes)) * density(side * tail_nodes)).sum()
        np.testing.assert_allclose(value[i] - exact[i], loss, atol=1e-15 * (20.0 + 20.0 * exact[i]))


@pytest.mark.float32
@pytest.mark.parametrize("bound", BOUNDS, ids=identify)
def test_bounds_on_a_grid(bound):
    mean, variance = (jnp.asarray(x) for x in GRID)
    rounding = 50.0 * jnp.finfo(mean.dtype).eps
    exact = evaluate(ExactExpectation(), mean, variance)[0]
    found = evaluate(bound, mean, variance)
    assert all(np.all(np.isfinite(part)) for part in found)
    slack = rounding * (1.0 + np.abs(exact))
    assert np.all(found[0] >= exact - slack)
    assert np.all(found[0] <= exact + bound.maximum_error + slack)
    # U(-m, v) = U(m, v) - m, and its slopes.
    mirrored = evaluate(bound, -mean, variance)
    np.testing.assert_allclose(mirrored[0] - found[0] + mean, 0.0, atol=rounding * 1e3)
    wide = np.asarray(variance) > 1e-2  # narrower ones jump from one piece to the next where the means are rounded
    np.testing.assert_allclose((mirrored[1] + found[1])[wide], 1.0, atol=1e2 * rounding)
    np.testing.assert_allclose((mirrored[2] - found[2])[wide], 0.0, atol=1e2 * rounding)


@needs_float64
@pytest.mark.parametrize("bound", BOUNDS, ids=identify)
def test_slopes_are_those_of_the_value(bound):
    mean, variance = (jnp.asarray(x) for x in GRID)
    _, *slopes = evaluate(bound, mean, variance)
    gradients = jax.jit(jax.grad(lambda m, v: bound(m, v)[0].sum(), (0, 1)))(mean, variance)
    for gradient, slope in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient, slope, rtol=1e-12, atol=1e-14)
    # Differences of the value, extrapolated, in steps that are small beside the standard deviation and beside one.
    chosen = (np.abs(GRID[0]) < 20.0) & (GRID[1] > 1e-3)
    steps = [np.where(chosen, 2e-3 * np.sqrt(GRID[1]).clip(max=1.0), 0.0), np.where(chosen, 2e-3 * GRID[1], 0.0)]

    def central(index, step):
        shift = [step if i == index else 0.0 for i in range(2)]
        plus, minus = (evaluate(bound, mean + s * shift[0], variance + s * shift[1])[0] for s in (1, -1))
        return (plus - minus)[chosen] / (2.0 * step[chosen])

    for index, slope in enumerate(slopes):
        difference = (4.0 * central(index, steps[index]) - central(index, 2.0 * steps[index])) / 3.0
        size = 1.0 + np.asarray(evaluate(bound, mean, variance)[0])[chosen]
        tolerance = 1e-9 + 1e-12 * size / steps[index][chosen]
        assert np.all(np.abs(difference - slope[chosen]) <= tolerance * (1.0 + np.abs(slope[chosen])))


@pytest.mark.thorough
@hypothesis.settings(derandomize=True, deadline=None, max_examples=15)
@hypothesis.given(seed=st.integers(0, 2**31), spread=st.floats(0.1, 300.0), width=st.floats(-10.0, 6.0))
def test_bounds_at_random(seed, spread, width):
    rng = np.random.default_rng(seed)
    mean = jnp.asarray(spread * rng.normal(size=GRID[0].size))
    variance = jnp.asarray(10.0 ** (width + rng.uniform(-2.0, 2.0, size=GRID[0].size)).clip(-10.0, 6.0))
    exact = evaluate(ExactExpectation(), mean, variance)[0]
    slack = 50.0 * jnp.finfo(mean.dtype).eps * (1.0 + exact)
    for bound in BOUNDS:
        value = evaluate(bound, mean, variance)[0]
        assert np.all(value >= exact - slack) and np.all(value <= exact + bound.maximum_error + slack), bound
    jaakkola, bohning = (evaluate(bound, mean, variance)[0] for bound in BOUNDS[1:3])
    assert np.all(jaakkola <= bohning + slack)


@pytest.mark.float32
def test_minimum_is_the_smallest():
    parts = ("jaakkola", "piecewise-quadratic", "bohning")
    values = [evaluate(logistic_bound(part), *GRID) for part in parts]
    best = np.argmin([value[0] for value in values], axis=0)
    assert {0, 1} <= set(best.tolist())
    bound = logistic_bound(parts)
    assert bound.maximum_error == logistic_bound("piecewise-quadratic").maximum_error
    for k, part in enumerate(evaluate(bound, *GRID)):
        np.testing.assert_array_equal(part, np.take_along_axis(np.stack([v[k] for v in values]), best[None], 0)[0])


@pytest.mark.float32
def test_names():
    for name in ("exact", "jaakkola", "bohning", "piecewise-linear", "piecewise-quadratic"):
        assert logistic_bound(name, num_pieces=5).name == name
    assert logistic_bound("piecewise-linear", 7).breakpoints.shape == (6,)
    assert isinstance(logistic_bound(["exact"]), MinimumBound)
    with pytest.raises(ValueError, match="'exact', 'jaakkola', 'bohning', 'piecewise-linear', 'piecewise-quadratic'"):
        logistic_bound("delta")
    with pytest.raises(ValueError, match="num_pieces must be an integer of at least 3, got 2"):
        logistic_bound("piecewise-linear", 2)
    with pytest.raises(ValueError, match="kind must be 'linear' or 'quadratic', got 'cubic'"):
        PiecewiseBound("cubic", 5)
    with pytest.raises(ValueError, match="at least one"):
        logistic_bound(())


@needs_float64
def test_bounded_potential():
    mean, variance = jnp.array([0.3, -2.0]), jnp.array([4.0, 30.0])
    base = TemperedPotential(NegativeBinomialExpPotential(jnp.array([3.0, 0.0]), 2.0, jnp.array([1.0, 5.0])), 0.5)
    exact = base.expected_log_density(mean, variance)
    potential = BoundedPotential(base, PiecewiseBound("quadratic", 20))

    @jax.jit
    def with_gradient(potential):
        def total(mean, variance):
            found = potential.expected_log_density(mean, variance)
            return found.value.sum(), found

        return jax.grad(total, (0, 1), has_aux=True)(mean, variance)

    gradient, found = with_gradient(potential)
    weights = base.logistic_terms().weights.sum(axis=0)
    assert np.all(found.value < exact.value)
    assert np.all(found.value >= exact.value - weights * potential.bound.maximum_error)
    for slope, other, near in zip(found[1:], gradient, exact[1:], strict=True):
        np.testing.assert_allclose(slope, other, rtol=1e-12)
        np.testing.assert_allclose(slope, near, rtol=0.02)
    same = BoundedPotential(base, ExactExpectation())
    for part, other in zip(same.expected_log_density(mean, variance), exact, strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-13)
    # All else is that of the base.
    np.testing.assert_array_equal(potential.log_density(mean), base.log_density(mean))
    np.testing.assert_array_equal(potential.mean(mean), base.mean(mean))
    np.testing.assert_array_equal(potential.derivatives(mean), base.derivatives(mean))
    traced, of_base = (str(jax.make_jaxpr(p.tilted_moments)(mean, variance)) for p in (potential, base))
    assert traced == of_base
    assert potential.is_log_concave == potential.bound.is_convex
    assert potential.is_smooth and potential.logistic_terms() is not None


@pytest.mark.float32
def test_bounds_of_factors_by_hand():
    # y m - U(m, v) for a label, and m y - n U(m, v) for counts.
    mean, variance = jnp.array([0.3, -2.0, 1.0]), jnp.array([4.0, 3.0, 0.1])
    bound = JaakkolaBound()
    value, mean_slope, variance_slope = bound(mean, variance)
    label = jnp.array([0.0, 1.0, 1.0])
    found = BoundedPotential(LogitPotential(label), bound).expected_log_density(mean, variance)
    for part, other in zip(found, (label * mean - value, label - mean_slope, -variance_slope), strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-5)
    count, total = jnp.array([0.0, 3.0, 4.0]), jnp.array([2.0, 4.0, 4.0])
    found = BoundedPotential(BinomialLogitPotential(count, total), bound).expected_log_density(mean, variance)
    constant = np.log([1.0, 4.0, 1.0])
    by_hand = constant + count * mean - total * value, count - total * mean_slope, -total * variance_slope
    for part, other in zip(found, by_hand, strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-4, atol=1e-5)


def test_other_factors_cannot_be_bounded():
    with pytest.raises(
        ValueError, match="bound 'jaakkola' holds for logistic factors; ProbitPotential .* bound='exact'"
    ):
        BoundedPotential(ProbitPotential(jnp.ones(2)), JaakkolaBound())
