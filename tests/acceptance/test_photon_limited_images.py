"""Deblurring from photon counts, Table 2.4 of Ko (2017), on images of PyWavelets, hyperparameters by the evidence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pywt
from numpyro import handlers

from numpyro_ext.infer import EP
from numpyro_ext.linalg import convolution
from numpyro_ext.models import poisson_deblurring, wavelet_denoising

pytestmark = pytest.mark.slow

# Gaussian, standard deviation 0.3 pixels, 3 x 3.
KERNEL = np.exp(-0.5 * np.add.outer(np.arange(-1, 2) ** 2, np.arange(-1, 2) ** 2) / 0.09)
KERNEL /= KERNEL.sum()
INTENSITIES = (10.0, 20.0, 30.0)


def photons(name, side, largest, seed=0):
    """The image of PyWavelets averaged over squares and scaled to a largest intensity, and counts of its blur."""
    image = getattr(pywt.data, name)().astype(float)
    step = image.shape[0] // side
    image = image.reshape(side, step, side, step).mean((1, 3))
    image *= largest / image.max()
    blurred = convolution(image.shape, KERNEL, boundary="replicate") @ jnp.asarray(image.reshape(-1))
    return image, np.random.default_rng(seed).poisson(np.asarray(blurred)).reshape(image.shape)


def relative_error(image, counts, model=poisson_deblurring, **kwargs):
    engine = EP(model, integrate="none", progress_bar=False, tol=1e-4)
    engine.run(jax.random.key(0), counts, KERNEL, **kwargs)
    assert engine.diagnostics.converged
    mean = np.asarray(engine.posterior["image"].mean)
    return np.abs(mean - image).sum() / image.sum(), engine


@pytest.mark.parametrize("name", ["camera", "ascent"])
def test_rectified_poisson_beats_gaussian_noise_at_every_intensity(name):
    """Against a noise variance that the evidence chooses, and against the mean count, the best guess at it.

    The ratio of the errors rises with the intensity in the thesis. Here it does not: the evidence of the Gaussian model
    takes too small a variance where photons are many, and with the mean count the ratio stays between 0.91 and 1.
    """
    for largest in INTENSITIES:
        image, counts = photons(name, 32, largest)
        poisson, learned = (relative_error(image, counts, noise=noise)[0] for noise in ("poisson", "gaussian"))
        given = handlers.condition(poisson_deblurring, data={"noise_variance": counts.mean()})
        best = relative_error(image, counts, model=given, noise="gaussian")[0]
        print(name, largest, poisson, learned, best, np.abs(counts - image).sum() / image.sum())
        assert poisson < learned
        assert poisson < best


def test_camera_at_128_is_within_a_fifth_of_the_thesis():
    # The row Cameraman of Table 2.4 at 10 photons; the smoothness is learned on the image at a quarter of the size.
    small, engine = relative_error(*photons("camera", 32, 10.0))
    image, counts = photons("camera", 128, 10.0)
    error, engine = relative_error(image, counts, smoothness=float(engine.hyper["smoothness"].value))
    print(small, error)
    assert abs(error - 0.124) < 0.2 * 0.124
    deviation = np.sqrt(np.asarray(engine.posterior["image"].variance))
    covered = np.mean(np.abs(np.asarray(engine.posterior["image"].mean) - image) < 1.2816 * deviation)
    assert 0.7 < covered < 0.97


@pytest.mark.filterwarnings("ignore:.*ended at the edge of the support")
@pytest.mark.parametrize("name", ["camera", "ascent"])
def test_trees_are_level_with_the_best_total_variation(name):
    """Square roots under Haar trees, which do not know the true picture; total variation has the best of 13 weights.

    On `ascent`, with other photons, the setting was chosen; `camera` had no part in that.
    """
    peers = pytest.importorskip("benchmarks.images.peers", reason="scikit-image is in the dev extra")
    image, counts = photons(name, 64, 10.0)
    engine = EP(wavelet_denoising, num_shifts=32, num_learning_shifts=8, progress_bar=False)
    options = {"wavelet": "haar", "num_levels": 4, "per_orientation": False, "low": "gaussian", "high": "gaussian"}
    engine.run(jax.random.key(0), 2.0 * np.sqrt(counts + 0.375), 1.0, margin=16, **options)
    roots = engine.posterior["image"]
    error = np.abs(peers.from_square_roots(np.asarray(roots.interval(1e-9)[0])) - image).sum() / image.sum()
    best = peers.photons_denoised(counts, image)["Anscombe + total variation"].image
    best_error = np.abs(best - image).sum() / image.sum()
    lower, upper = (np.maximum(np.asarray(bound), 0.0) ** 2 / 4 - 0.375 for bound in roots.interval(0.8))
    covered = np.mean((lower <= image) & (image <= upper))
    print(name, error, best_error, covered)
    assert error < 1.02 * best_error
    assert 0.75 < covered < 0.95
