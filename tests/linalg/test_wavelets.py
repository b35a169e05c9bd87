"""The wavelet transform, against PyWavelets and as an orthonormal operator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pywt

from numpyro_ext.linalg import wavelet_transform
from numpyro_ext.linalg.operators.wavelets import _filters

# PyWavelets warns of levels whose coefficients all see the border.
pytestmark = pytest.mark.filterwarnings("ignore:Level value of")
ORTHOGONAL = [name for name in pywt.wavelist(kind="discrete") if pywt.Wavelet(name).orthogonal]


def reference(x, wavelet, num_levels):
    return pywt.coeffs_to_array(pywt.wavedecn(x, wavelet, mode="periodization", level=num_levels))[0].reshape(-1)


@pytest.mark.parametrize(
    ("shape", "wavelet", "num_levels"),
    [
        ((16,), "haar", 4),
        ((48,), "db2", 3),
        ((16,), "db20", 3),
        ((2,), "sym4", 1),
        ((24, 16), "db2", 3),
        ((32, 8), "sym5", 2),
        ((8, 8), "coif3", 2),
        ((64, 64), "dmey", 1),
        ((8, 4, 16), "db3", 2),
        ((4, 2, 2), "haar", 1),
    ],
)
def test_equals_pywavelets_and_its_transpose_is_the_adjoint(shape, wavelet, num_levels):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=shape), rng.normal(size=np.prod(shape))
    transform = wavelet_transform(shape, wavelet, num_levels)
    found = transform @ jnp.asarray(x).reshape(-1)
    np.testing.assert_allclose(found, reference(x, wavelet, num_levels), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found @ y, (transform.T @ jnp.asarray(y)) @ x.reshape(-1), rtol=1e-12)


@pytest.mark.parametrize("wavelet", ORTHOGONAL)
def test_filters_of_every_orthogonal_family_have_the_documented_accuracy(wavelet):
    """Shifted by even numbers, both filters are orthonormal: then the adjoint is the inverse for every shape."""
    low, high = map(np.array, _filters(wavelet))
    error = 0.0
    for shift in range(0, low.size, 2):
        rest = low.size - shift
        for a, b in ((low, low), (high, high), (low, high), (high, low)):
            error = max(error, abs(a[shift:] @ b[:rest] - (shift == 0 and a is b)))
    assert error < (5e-3 if wavelet == "dmey" else 1e-10)


def test_the_transpose_is_the_inverse():
    for shape, wavelet in (((64,), "db4"), ((32, 16), "sym4"), ((8, 8, 8), "haar")):
        x = np.random.default_rng(1).normal(size=np.prod(shape))
        transform = wavelet_transform(shape, wavelet)
        np.testing.assert_allclose(transform.T @ (transform @ x), x, atol=1e-11)
        np.testing.assert_allclose(transform @ (transform.T @ x), x, atol=1e-11)


@pytest.mark.float32
def test_single_precision_batches_and_derivatives():
    transform = wavelet_transform((8, 8), "db2", 2)
    x = np.random.default_rng(2).normal(size=(64, 3)).astype(np.float32)
    found = transform @ x
    assert found.dtype == jnp.float32
    for column in range(3):
        expected = reference(x[:, column].reshape(8, 8), "db2", 2)
        np.testing.assert_allclose(found[:, column], expected, atol=2e-6)
    slope = jax.grad(lambda u: jnp.sum(jnp.square(transform @ u)))(jnp.asarray(x[:, 0]))
    np.testing.assert_allclose(slope, 2.0 * x[:, 0], rtol=1e-5, atol=1e-5)


def test_default_levels_and_attributes():
    transform = wavelet_transform((256, 192), "db2")
    assert (transform.shape_of_signal, transform.wavelet, transform.num_levels) == ((256, 192), "db2", 6)
    assert wavelet_transform(48, "haar").num_levels == 4
    assert wavelet_transform(48, "haar").shape == (48, 48)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((12, 16), "db2", 3), r"divisible by 2\^3 = 8; the\s+shape is \(12, 16\). Pad to \(16, 16\)"),
        (((15,), "db2"), "cannot be halved"),
        (((4, 4), "db8"), "shorter than the filter"),
        (((8, 8), "bior2.2"), "bior2.2 .* is not orthogonal"),
        (((8, 8), "morl"), "not a discrete wavelet"),
        (((8, 8), "haar", -1), "whole number"),
        (((2, 2, 2, 2), "haar", 1), "one to three axes"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        wavelet_transform(*arguments)
