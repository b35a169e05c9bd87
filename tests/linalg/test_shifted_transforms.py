"""Several shifted wavelet bases as one operator."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg import adjoint_error, shifted_transforms, wavelet_transform

SHIFTS = np.array([[0, 0], [1, 2], [3, 5]])


def test_rows_are_those_of_the_shifted_bases():
    transform = wavelet_transform((4, 8), "haar", 2)
    frame = shifted_transforms(transform, SHIFTS)
    basis = np.asarray(transform.materialise()).reshape(32, 4, 8)
    expected = np.concatenate([np.roll(basis, shift, (1, 2)).reshape(32, 32) for shift in SHIFTS])
    np.testing.assert_allclose(frame.materialise(), expected, atol=1e-6 if expected.dtype == np.float32 else 1e-12)
    assert adjoint_error(frame) < 1e-5
    np.testing.assert_allclose(frame.T @ (frame @ jnp.arange(32.0)), 3.0 * np.arange(32.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shifts", [[0, 1], [[0], [1]], [[0.5, 0.0]], np.zeros((0, 2), int)])
def test_what_is_no_shift(shifts):
    with pytest.raises(ValueError, match="one row per basis"):
        shifted_transforms(wavelet_transform((4, 8), "haar", 2), shifts)
