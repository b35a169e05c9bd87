"""The tails of the normal distribution, against 50-digit values and scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from numpyro_ext.potentials.integrals.normal import erfcx, inverse_mills_ratio, log_ndtr, truncated_normal

# log Phi(x), phi(x) / Phi(x), and mean, variance and 1 - variance of N(x, 1) given that it is positive; mpmath 1.3,
# 120 digits.
REFERENCE = np.array(
    [
        [-1000000.0, -500000000014.73444, 1000000.000001, 9.99999999998e-07, 9.99999999994e-13, 0.999999999999],
        [-1000.0, -500007.82669481216, 1000.000999998, 0.00099999800001, 9.999940000499995e-07, 0.999999000006],
        [
            -100.0,
            -5005.524208694205,
            100.00999800099926,
            0.009998000999260705,
            9.994004994826346e-05,
            0.9999000599500517,
        ],
        [-40.0, -804.6084420137538, 40.02496884720726, 0.024968847207263722, 0.0006226683785913888, 0.9993773316214086],
        [
            -20.0,
            -203.91715537109727,
            20.04975306852785,
            0.049753068527850546,
            0.0024632616150521637,
            0.9975367383849478,
        ],
        [-8.5, -39.19739642821767, 8.614595320165172, 0.11459532016517288, 0.012807691192272094, 0.9871923088077279],
        [-3.25, -7.457624891374112, 3.51639514446875, 0.26639514446874984, 0.06324940748003686, 0.9367505925199632],
        [-1.0, -1.8410216450092636, 1.525135276160981, 0.5251352761609812, 0.1990976655703488, 0.8009023344296512],
        [-0.125, -0.7979261427530241, 0.879127895756634, 0.754127895756634, 0.3370251298720921, 0.6629748701279079],
        [0.0, -0.6931471805599453, 0.7978845608028654, 0.7978845608028654, 0.3633802276324187, 0.6366197723675814],
        [0.001, -0.6923496142726883, 0.7972480500564331, 0.7982480500564331, 0.3635982986311587, 0.6364017013688413],
        [0.5, -0.3689464152886564, 0.5091604338370335, 1.0091604338370335, 0.4861754356963671, 0.5138245643036329],
        [1.75, -0.04088361815209493, 0.08987774553340024, 1.8398777455334003, 0.8346359361743829, 0.16536406382561705],
        [
            4.0,
            -3.167174337748927e-05,
            0.00013383446446857514,
            4.000133834464469,
            0.9994646442304618,
            0.0005353557695381802,
        ],
        [
            8.0,
            -6.220960574271786e-16,
            5.052271083536895e-15,
            8.000000000000005,
            0.9999999999999596,
            4.0418168668295186e-14,
        ],
        [12.0, -1.776482112077679e-33, 2.1463837356630605e-32, 12.0, 1.0, 2.5756604827956722e-31],
    ]
)


@pytest.mark.float32
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_truncated_normal_has_full_relative_accuracy(dtype):
    if dtype == "float64" and not jax.config.jax_enable_x64:
        pytest.skip("float64 is off")
    x = jnp.asarray(REFERENCE[:, 0], dtype)
    values = np.stack([np.asarray(v, np.float64) for v in truncated_normal(x)], axis=1)
    assert truncated_normal(x).mean.dtype == dtype
    representable = np.abs(REFERENCE[:, 1:]) > float(jnp.finfo(dtype).tiny)
    error = np.where(representable, np.abs(values / REFERENCE[:, 1:] - 1.0), 0.0)
    assert error.max() < 12 * jnp.finfo(dtype).eps


def test_log_ndtr_and_erfcx_agree_with_scipy():
    # Further up the positive axis scipy's values, which are off by 1.1e-13 from 28 on, are not normal numbers.
    x = np.concatenate([np.linspace(-40.0, 37.0, 201), -np.logspace(2.0, 7.0, 11)])
    np.testing.assert_allclose(log_ndtr(x), special.log_ndtr(x), rtol=2e-13)
    y = np.linspace(-25.0, 60.0, 301)
    np.testing.assert_allclose(erfcx(y), special.erfcx(y), rtol=3e-13)


@pytest.mark.slow
def test_derivatives_up_to_third_order():
    x = jnp.array([-1e5, -300.0, -31.0, -29.0, -3.0, 0.0, 2.0, 9.0])
    first = jax.vmap(jax.grad(log_ndtr))
    second = jax.vmap(jax.grad(jax.grad(log_ndtr)))
    moments = truncated_normal(x)
    np.testing.assert_allclose(first(x), moments.ratio, rtol=1e-15)
    np.testing.assert_allclose(second(x), -moments.shrinkage, rtol=1e-13)
    # The third derivative of log Phi is that of the variance; in the tail it tends to 2 / |x|^3.
    third = jax.vmap(jax.grad(lambda x: truncated_normal(x).variance))
    step = 1e-4 * jnp.maximum(1.0, jnp.abs(x))
    difference = (truncated_normal(x + step).variance - truncated_normal(x - step).variance) / (2.0 * step)
    np.testing.assert_allclose(third(x), difference, rtol=1e-6, atol=1e-12)
    far = jnp.array([-1e30, 1e30])
    np.testing.assert_allclose(jax.vmap(jax.grad(inverse_mills_ratio))(far), [-1.0, 0.0], rtol=1e-15)


def test_infinite_arguments():
    moments = truncated_normal(jnp.array([-jnp.inf, jnp.inf]))
    np.testing.assert_array_equal(moments.variance, [0.0, 1.0])
    np.testing.assert_array_equal(moments.log_mass, [-jnp.inf, 0.0])
