"""Denoising by one sum-product: against dense matrices, enumeration of a small posterior, and on an image."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.baselines.tree_denoising import denoise, fit
from benchmarks.baselines.tree_parameters import initial_parameters
from numpyro_ext.linalg import wavelet_transform
from numpyro_ext.potentials import wavelet_forest
from numpyro_ext.potentials.trees.mixture import tilted_moments

NOISE = 0.04
TRANSFORM = wavelet_transform((8, 8), "db2", 2)
FOREST = wavelet_forest(TRANSFORM, per_orientation=True)


@pytest.fixture(scope="module")
def image():
    """A bright square on a dark ground, and noise."""
    u = np.zeros((8, 8))
    u[2:6, 3:7] = 1.0
    return u + np.sqrt(NOISE) * np.random.default_rng(0).normal(size=u.shape)


@pytest.fixture(scope="module")
def parameters(image):
    return initial_parameters(FOREST, TRANSFORM @ image.reshape(-1), NOISE)


@pytest.mark.thorough
def test_mixture_over_shifts_equals_separate_posteriors(image, parameters):
    shifts = np.array([[0, 0], [1, 3], [5, 2]])
    found = denoise(TRANSFORM, FOREST, parameters, image, NOISE, shifts, batch_size=2)
    matrix = np.asarray(TRANSFORM.materialise())
    means, variances = [], []
    for shift, log_evidence in zip(shifts, found.log_evidence, strict=True):
        moved = np.roll(image, shift, (0, 1)).reshape(-1)
        moments = tilted_moments(FOREST, parameters, matrix @ moved, NOISE)
        means.append(np.roll((matrix.T @ moments.mean).reshape(8, 8), -shift, (0, 1)))
        variances.append(np.roll((np.square(matrix).T @ moments.variance).reshape(8, 8), -shift, (0, 1)))
        np.testing.assert_allclose(log_evidence, moments.log_z, rtol=1e-10)
    np.testing.assert_allclose(found.mean, np.mean(means, 0), rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(found.variance, np.mean(variances, 0) + np.var(means, 0), rtol=1e-9)


def test_mean_is_the_slope_of_the_evidence(image, parameters):
    """By Tweedie's formula the posterior mean is the data plus the noise variance times the slope of the evidence."""

    def log_evidence(y):
        return denoise(TRANSFORM, FOREST, parameters, y, NOISE, np.array([[1, 3]])).log_evidence[0]

    slope = jax.jit(jax.grad(log_evidence))(jnp.asarray(image))
    found = denoise(TRANSFORM, FOREST, parameters, image, NOISE, np.array([[1, 3]]))
    np.testing.assert_allclose(found.mean, image + NOISE * slope, rtol=1e-8, atol=1e-9)


@pytest.mark.thorough
def test_learning_never_lowers_the_evidence_and_finds_the_noise():
    """Long flat stretches: the noise is seen in the details. Learned together with the scales it takes many steps."""
    transform = wavelet_transform(1024, "haar", 5)
    forest = wavelet_forest(transform)
    rng = np.random.default_rng(1)
    # Jumps at places that no shift of the basis prefers.
    signal = np.repeat(rng.normal(size=16), 64)[17:]
    signal = np.concatenate([signal, np.full(17, signal[-1])])
    y = signal + 0.2 * rng.normal(size=1024)
    start = initial_parameters(forest, transform @ y, 0.1)
    found = fit(transform, forest, start, y, 0.1, num_steps=420, learn_noise=True)
    trace = np.asarray(found.log_evidence)
    assert np.all(np.diff(trace) > -1e-6 * abs(trace[-1])), np.diff(trace).min()
    np.testing.assert_allclose(found.noise_variance, 0.04, rtol=0.1)
    smooth = denoise(transform, forest, found.parameters, y, found.noise_variance, np.arange(8)[:, None])
    assert np.mean((smooth.mean - signal) ** 2) < 0.15 * np.mean((y - signal) ** 2)


def test_an_image_of_another_shape_is_refused(parameters):
    with pytest.raises(ValueError, match=r"shape \(8, 8\); the image has \(64,\)"):
        denoise(TRANSFORM, FOREST, parameters, np.zeros(64), NOISE)
