"""Rectified-linear Poisson moments against 60-digit values: accuracy, derivatives, other methods, broadcasting."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_ext.potentials import RectifiedLinearPoissonPotential
from numpyro_ext.potentials.elementwise import TemperedPotential
from numpyro_ext.potentials.families.rectified_linear_poisson import rectified_linear_poisson_moments

from .direct_integral import direct_moments

# Computed with 60 and more digits by three independent routes that agreed to 45; the inputs are exact doubles.
TABLE = np.genfromtxt(Path(__file__).parent.parent / "reference" / "relu_poisson_tilted.csv", delimiter=",", names=True)
INPUTS = tuple(TABLE[name] for name in ("y", "cavity_mean", "cavity_var", "exposure", "offset"))
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")


def _errors(log_z, mean, variance):
    log_z, mean, variance = (np.asarray(value, np.float64) for value in (log_z, mean, variance))
    scale = np.maximum(np.abs(TABLE["tilted_mean"]), np.sqrt(TABLE["tilted_var"]))
    return (
        np.abs(log_z - TABLE["log_z"]) / np.maximum(1.0, np.abs(TABLE["log_z"])),
        np.abs(mean - TABLE["tilted_mean"]) / scale,
        np.abs(variance / TABLE["tilted_var"] - 1.0),
    )


@needs_float64
def test_reference_moments_float64():
    errors = _errors(*jax.jit(rectified_linear_poisson_moments)(*INPUTS))
    assert all(error.max() < 1e-13 for error in errors), [error.max() for error in errors]


@pytest.mark.float32
def test_reference_moments_float32():
    result = jax.jit(rectified_linear_poisson_moments)(*(jnp.asarray(x, jnp.float32) for x in INPUTS))
    assert {value.dtype for value in result} == {jnp.dtype("float32")}
    log_z, mean, variance = _errors(*result)
    assert (log_z.max() < 2e-6) and (mean.max() < 2e-5) and (variance.max() < 2e-5)


@needs_float64
def test_first_derivatives_are_alpha_and_beta():
    y, mean, variance, exposure, offset = INPUTS

    def total(mean, variance):
        return rectified_linear_poisson_moments(y, mean, variance, exposure, offset)[0].sum()

    by_mean, by_variance = jax.jit(jax.grad(total, (0, 1)))(mean, variance)
    alpha, beta = TABLE["alpha"], TABLE["beta"]
    np.testing.assert_array_less(np.abs(by_mean - alpha) / np.maximum(1.0, np.abs(alpha)), 1e-13)
    expected = 0.5 * (alpha**2 - beta)
    size = np.maximum(np.maximum(alpha**2, beta), 1e-300)
    np.testing.assert_array_less(np.abs(by_variance - expected) / size, 1e-11)


@needs_float64
@pytest.mark.float32
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 1e-4)])
def test_site_parameters(dtype, tolerance):
    y, mean, variance, exposure, offset = (jnp.asarray(x, dtype) for x in INPUTS)
    potential = RectifiedLinearPoissonPotential(y, exposure, offset)
    moments = jax.jit(potential.tilted_moments)(mean, variance)
    ratio = TABLE["tilted_var"] / TABLE["cavity_var"]
    # The precision is beta / ratio; both underflow in the tail where the factor is one.
    tiny = 1e3 * float(jnp.finfo(dtype).tiny)
    beta = np.asarray(moments.site_precision, np.float64) * ratio
    visible = TABLE["beta"] > tiny
    np.testing.assert_array_less(np.abs(beta / np.where(visible, TABLE["beta"], 1.0) - 1.0)[visible], tolerance)
    assert np.all(beta[~visible] <= 2 * tiny)
    expected = (TABLE["alpha"] + TABLE["beta"] * TABLE["cavity_mean"]) / ratio
    natural = np.abs(TABLE["tilted_mean"] / TABLE["tilted_var"]) + np.abs(TABLE["cavity_mean"] / TABLE["cavity_var"])
    parts = np.abs(TABLE["alpha"]) + np.abs(TABLE["beta"] * TABLE["cavity_mean"])
    size = np.where(ratio < 0.5, natural, parts) + tiny
    # A tenth of the terms that are subtracted cancels again in the difference of shifts in float64.
    np.testing.assert_array_less(np.abs(moments.site_shift - expected) / size, max(tolerance, 1e-7))


@needs_float64
@pytest.mark.slow
def test_second_derivatives_and_derivatives_of_moments_match_differences():
    y = jnp.array([0.0, 0.0, 0.0, 1.0, 3.0, 3.0, 40.0, 200.0, 0.0])
    mean = jnp.array([-2.0, 0.3, 6.0, -4.0, 2.0, 30.0, 35.0, 180.0, -40.0])
    variance = jnp.array([1.5, 40.0, 2.0, 9.0, 0.7, 900.0, 60.0, 25.0, 400.0])

    def gradient(mean, variance):
        return jax.grad(lambda m, v: rectified_linear_poisson_moments(y, m, v)[0].sum(), (0, 1))(mean, variance)

    def moments(mean, variance):
        return rectified_linear_poisson_moments(y, mean, variance)[1:]

    @functools.partial(jax.jit, static_argnums=0)
    def derivative_along(function, mean, variance, direction):
        return jax.jvp(function, (mean, variance), tuple(direction))[1]

    for function in (jax.jit(gradient), jax.jit(moments)):
        for argument, scale in ((0, jnp.sqrt(variance)), (1, variance)):
            direction = [jnp.zeros_like(mean), jnp.zeros_like(mean)]
            direction[argument] = 1e-4 * scale
            exact = derivative_along(function, mean, variance, direction)
            above = function(mean + direction[0], variance + direction[1])
            below = function(mean - direction[0], variance - direction[1])
            for derivative, high, low in zip(exact, above, below, strict=True):
                np.testing.assert_allclose(derivative, 0.5 * (high - low), rtol=2e-6, atol=1e-11 * np.abs(high).max())


@pytest.mark.thorough
@needs_float64
def test_derivatives_in_exposure_and_offset():
    def log_z(exposure, offset):
        return rectified_linear_poisson_moments(4.0, 1.5, 2.0, exposure, offset)[0]

    point, step = jnp.array([0.7, 0.4]), 1e-5
    exact = jnp.stack(jax.jit(jax.grad(log_z, (0, 1)))(*point))
    for i in range(2):
        move = step * jnp.eye(2)[i]
        difference = (log_z(*(point + move)) - log_z(*(point - move))) / (2 * step)
        np.testing.assert_allclose(exact[i], difference, rtol=1e-8)


@needs_float64
def test_recursion_agrees_where_it_is_stable_and_fails_where_it_is_not():
    y, mean, variance, exposure, offset = INPUTS
    errors = np.stack(_errors(*jax.jit(lambda *a: rectified_linear_poisson_moments(*a, method="recursion"))(*INPUTS)))
    # The stated domain. Its variance is a difference there, v - v^2 beta, of relative error eps * v / tilted_var.
    stable = exposure * variance <= mean + offset
    assert stable.sum() > 150
    cancellation = variance / TABLE["tilted_var"]
    counted = stable & (y > 0)
    assert errors[0, counted].max() < 1e-11
    assert errors[1, counted].max() < 1e-11
    assert (errors[2, counted] / cancellation[counted]).max() < 1e-11
    # Outside it, wide cavities are lost: many results are not numbers or have no correct digit.
    wide = (exposure * (variance * exposure - mean - offset) > 25.0 * exposure * np.sqrt(variance)) & (y >= 10)
    assert wide.sum() > 20
    assert np.mean(~(errors[:, wide] < 0.1).all(axis=0)) > 0.9


@needs_float64
def test_trapezoid_is_an_independent_check():
    log_z, mean, variance = _errors(
        *jax.jit(lambda *a: rectified_linear_poisson_moments(*a, method="trapezoid"))(*INPUTS)
    )
    assert (log_z.max() < 1e-11) and (mean.max() < 1e-10) and (variance.max() < 1e-9)


@needs_float64
@pytest.mark.slow
def test_higher_moments():
    y, mean, variance = (
        np.array([0.0, 0.0, 2.0, 25.0]),
        np.array([0.5, -3.0, 1.0, 18.0]),
        np.array([4.0, 1.0, 9.0, 30.0]),
    )
    exposure, offset = 0.8, 0.25
    *_, moments = rectified_linear_poisson_moments(y, mean, variance, exposure, offset, order=4)
    assert moments.shape == (4, 4)
    first = rectified_linear_poisson_moments(y, mean, variance, exposure, offset)
    np.testing.assert_allclose(moments[:, 0], first[1], rtol=1e-12)
    np.testing.assert_allclose(moments[:, 1] - moments[:, 0] ** 2, first[2], rtol=1e-11)
    # E[eta^4] - 4 E[eta^3] E[eta] + ... is the fourth central moment, and the slope of the variance in the natural
    # parameter gives the third one.
    third = moments[:, 2] - 3.0 * moments[:, 1] * moments[:, 0] + 2.0 * moments[:, 0] ** 3

    def tilted_variance(mean):
        return rectified_linear_poisson_moments(y, mean, variance, exposure, offset)[2]

    _, slope = jax.jvp(tilted_variance, (jnp.asarray(mean),), (jnp.asarray(variance),))
    np.testing.assert_allclose(third, slope, rtol=1e-9)


@pytest.mark.thorough
@needs_float64
def test_fractional_power_against_direct_integral():
    y = np.array([0.0, 1.0, 3.0, 40.0])
    potential = RectifiedLinearPoissonPotential(y, 2.0, 0.5)
    mean, variance = np.array([-0.5, -3.0, 1.0, 25.0]), np.array([0.04, 9.0, 100.0, 1.0])
    for power in (0.3, 0.9):
        moments = potential.tilted_moments(mean, variance, power)
        tempered = TemperedPotential(potential, jnp.full(4, power)).tilted_moments(mean, variance)
        for i in range(4):
            expected = direct_moments(
                lambda x, i=i: np.asarray(RectifiedLinearPoissonPotential(y[i], 2.0, 0.5).log_density(x)),
                mean[i], variance[i], power, anchors=[-0.5],
            )  # fmt: skip
            np.testing.assert_allclose([value[i] for value in moments[:3]], expected, rtol=1e-8)
            np.testing.assert_allclose([value[i] for value in tempered[:3]], expected, rtol=1e-8)


@pytest.mark.thorough
def test_broadcasting_jit_vmap_and_cost_shape():
    y, mean = jnp.array([0, 5, 300]), jnp.array([[-1.0], [4.0]])
    log_z, tilted_mean, tilted_variance = rectified_linear_poisson_moments(y, mean, 2.0)
    assert log_z.shape == tilted_mean.shape == tilted_variance.shape == (2, 3)
    mapped = jax.vmap(lambda m: jax.vmap(lambda y: rectified_linear_poisson_moments(y, m[0], 2.0))(y))(mean)
    for value, other in zip((log_z, tilted_mean, tilted_variance), mapped, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6 if value.dtype == jnp.float32 else 1e-14)


def test_arguments_without_meaning_give_nan():
    y = jnp.array([-1.0, 2.5, jnp.nan, 3.0, 3.0, 3.0, 3.0])
    variance = jnp.array([1.0, 1.0, 1.0, -1.0, 0.0, 1.0, 1.0])
    exposure = jnp.array([1.0, 1.0, 1.0, 1.0, 1.0, -2.0, 1.0])
    log_z, mean, tilted_variance = rectified_linear_poisson_moments(y, 1.0, variance, exposure)
    for value in (log_z, mean, tilted_variance):
        np.testing.assert_array_equal(jnp.isnan(value), [True] * 6 + [False])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "simpson"}, "method must be 'uniform', 'recursion' or 'trapezoid', got 'simpson'"),
        ({"order": 0}, "order must be a positive integer"),
        ({"order": 2, "method": "recursion"}, "needs method='uniform'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        rectified_linear_poisson_moments(3, 1.0, 1.0, **options)


def test_log_density_and_its_slope_at_the_kink():
    potential = RectifiedLinearPoissonPotential(jnp.array([0.0, 0.0, 0.0, 2.0, 2.0]), 3.0, 1.0)
    eta = jnp.array([-2.0, -1.0, 1.0, -2.0, 1.0])
    np.testing.assert_allclose(
        potential.log_density(eta), [0.0, 0.0, -6.0, -jnp.inf, 2 * np.log(6.0) - 6.0 - np.log(2.0)], rtol=1e-6
    )
    slope = jax.vmap(jax.grad(lambda y, x: RectifiedLinearPoissonPotential(y, 3.0, 1.0).log_density(x), 1))
    np.testing.assert_allclose(slope(potential.count, eta), [0.0, 0.0, -3.0, 0.0, 3.0 * (2.0 / 6.0 - 1.0)], rtol=1e-6)
    assert jnp.isnan(potential.log_density(jnp.nan)).all()


@needs_float64
@settings(max_examples=60, deadline=None)
@given(
    y=st.integers(0, 10**7),
    log_deviation=st.floats(-8.0, 8.0),
    position=st.floats(-60.0, 60.0),
)
def test_factor_is_log_concave_for_any_cavity(y, log_deviation, position):
    variance = np.exp(2.0 * log_deviation)
    mean = y + position * np.exp(log_deviation)
    moments = _tilted(jnp.asarray([float(y)] * 2), jnp.asarray([mean, mean + 0.5]), jnp.asarray([variance] * 2))
    assert all(np.isfinite(value).all() for value in moments)
    assert np.all((moments.variance > 0.0) & (moments.variance <= variance * (1.0 + 1e-12)))
    assert np.all(moments.site_precision >= 0.0)
    assert moments.mean[1] >= moments.mean[0] - 1e-9 * abs(moments.mean[0])


@jax.jit
def _tilted(y, mean, variance):
    return RectifiedLinearPoissonPotential(y).tilted_moments(mean, variance)


@pytest.mark.float32
def test_numpy_numbers_have_the_precision_at_hand():
    factors = RectifiedLinearPoissonPotential(np.array([0, 3]), np.float64(2.0), np.zeros(2))
    found = factors.log_density(np.array([-1.0, 1.5]))
    assert found.dtype == jnp.result_type(float)
    np.testing.assert_allclose(found, [0.0, 3.0 * np.log(3.0) - 3.0 - np.log(6.0)], rtol=1e-6)
