"""Models of images: shapes, densities, and what the engines make of small ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import pywt
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_ext.infer import EP, StructuredMeanField
from numpyro_ext.linalg import convolution, masked_fourier, total_variation, wavelet_transform
from numpyro_ext.models import (
    compressed_sensing,
    poisson_deblurring,
    wavelet_denoising,
    wavelet_images,
    wavelet_inpainting,
)
from numpyro_ext.potentials import wavelet_forest
from numpyro_ext.structure.program.rows.costs import RowCosts
from tests.readings import with_layouts
from tests.tiers import few

# Gaussian, standard deviation 0.3 pixels.
KERNEL = np.exp(-0.5 * np.add.outer(np.arange(-1, 2) ** 2, np.arange(-1, 2) ** 2) / 0.09)
KERNEL /= KERNEL.sum()


def steps(shape):
    """Two flat regions."""
    image = np.full(shape, 2.0)
    image[shape[0] // 3 :, shape[1] // 2 :] = 12.0
    return image


@pytest.mark.slow
def test_poisson_deblurring_beats_gaussian_noise_and_learns_the_smoothness():
    """Table 2.4 of Ko (2017) on a patch of 16 x 16 pixels: the thesis has ratios of 0.65 and less at ten photons."""
    camera = pywt.data.camera().astype(float)[60:124, 200:264].reshape(16, 4, 16, 4).mean((1, 3))
    image = 10.0 * camera / camera.max()
    blur = convolution(image.shape, KERNEL, boundary="replicate")
    counts = np.random.default_rng(0).poisson(np.asarray(blur @ jnp.asarray(image.reshape(-1)))).reshape(16, 16)
    errors, smoothness = {}, {}
    for noise in ("poisson", "gaussian"):
        engine = EP(poisson_deblurring, progress_bar=False)
        engine.run(jax.random.key(0), counts, KERNEL, noise=noise)
        assert engine.diagnostics.converged
        errors[noise] = np.abs(engine.posterior["image"].mean - image).sum() / image.sum()
        smoothness[noise] = float(engine.hyper["smoothness"].value)
    assert errors["poisson"] < 0.7 * errors["gaussian"] < 0.7 * np.abs(counts - image).sum() / image.sum()
    # The power of the smoothness that belongs to the prior keeps its estimate inside; see the model.
    assert 0.1 < smoothness["poisson"] < 2.0


def test_one_noise_variance_serves_all_pixels_seen_or_not():
    counts, mask = np.array([[1, 0, 4], [2, 1, 5]]), np.array([[True, True, False], [True, True, True]])
    model = handlers.seed(handlers.condition(poisson_deblurring, {"u": jnp.ones(6)}), 0)
    sites = handlers.trace(model).get_trace(counts, mask=mask, noise="gaussian")
    assert sites["noise_variance"]["value"].shape == ()


def test_density_of_the_smoothness_is_that_of_the_normalised_prior():
    counts = np.array([[1, 0, 4], [2, 1, 5]])
    u = jnp.linspace(1.0, 3.0, 6)
    absolute = jnp.abs(total_variation((2, 3)) @ u).sum()

    def log_joint(smoothness):
        model = handlers.condition(poisson_deblurring, {"u": u})
        return log_density(model, (counts,), {}, {"smoothness": smoothness})[0]

    found = jax.grad(log_joint)(0.7)
    prior = dist.LogNormal(jnp.log(10.0 / 5.0), 2.0)
    np.testing.assert_allclose(found, (6 - 1) / 0.7 - absolute + jax.grad(prior.log_prob)(0.7), rtol=1e-6)


@pytest.mark.thorough
def test_wavelet_denoising_of_a_side_that_is_no_power_of_two():
    image = steps((30, 20))
    noisy = image + 1.0 * np.random.default_rng(1).standard_normal(image.shape)
    engine = StructuredMeanField(wavelet_denoising, tol=0.05, progress_bar=False)
    engine.run(jax.random.key(0), noisy, 1.0, wavelet="haar", num_levels=2)
    found = engine.posterior["image"]
    assert found.mean.shape == found.variance.shape == image.shape
    assert np.mean((found.mean - image) ** 2) < 0.4 * np.mean((noisy - image) ** 2)
    assert engine.log_evidence.is_lower_bound


# Two flat regions have next to no coefficients on some levels, whose scales go to zero.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ended at the edge of the support")
def test_wavelet_inpainting_and_compressed_sensing():
    image = steps((16, 16))
    rng = np.random.default_rng(2)
    mask = rng.random(image.shape) < 0.6
    engine = StructuredMeanField(wavelet_inpainting, tol=0.05, progress_bar=False)
    engine.run(jax.random.key(0), np.where(mask, image, np.nan), mask, 0.1, wavelet="haar", num_levels=2, num_bases=1)
    found = engine.posterior["image"].mean
    filled = np.where(mask, image, image[mask].mean())
    assert np.mean((found - image) ** 2) < 0.5 * np.mean((filled - image) ** 2)

    operator = masked_fourier(rng.random(image.shape) < 0.7)
    measurements = operator @ jnp.asarray(image.reshape(-1)) + 0.1 * rng.standard_normal(operator.shape[0])
    engine = StructuredMeanField(compressed_sensing, tol=0.05, progress_bar=False)
    engine.run(jax.random.key(0), measurements, operator, image.shape, 0.1, wavelet="haar", num_levels=2)
    adjoint = np.asarray(operator.T @ measurements).reshape(image.shape)
    found = engine.posterior["image"].mean
    assert np.mean((found - image) ** 2) < np.mean((adjoint - image) ** 2)


def test_a_shift_moves_the_basis():
    noisy = steps((16, 16))
    coefficients = jnp.asarray(np.random.default_rng(3).standard_normal(256))

    def image(**kwargs):
        model = handlers.seed(handlers.condition(wavelet_denoising, {"s": coefficients}), jax.random.key(0))
        return handlers.trace(model).get_trace(noisy, 1.0, **kwargs)["image"]["value"]

    np.testing.assert_array_equal(image(shift=jnp.array([3, -1])), jnp.roll(image(), (3, -1), (0, 1)))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: poisson_deblurring(np.ones(3)), "takes a matrix of counts"),
        (lambda: poisson_deblurring(np.ones((3, 3)), noise="none"), "noise must be 'poisson' or 'gaussian'"),
        (lambda: poisson_deblurring(np.ones((3, 3)), mask=np.zeros((3, 3), bool)), "keeps no pixel"),
        (lambda: poisson_deblurring(np.ones((3, 3)), mask=False), "keeps no pixel"),
        (lambda: poisson_deblurring(np.ones((3, 3)), mask=np.ones((3, 2), bool)), "The mask has the shape"),
        (lambda: wavelet_denoising(np.ones((8, 8, 3)), 0.1), r"like one of colours.*image\[:, :, 0\]"),
        (lambda: wavelet_denoising(np.ones((4, 8, 16)), 0.1, num_levels=2), r"image\[0, :, :\]"),
        (lambda: wavelet_inpainting(np.ones((8, 8, 3)), np.ones((8, 8, 3), bool)), "like one of colours"),
        (lambda: wavelet_denoising(np.ones((8, 8, 1)), 0.1), "axes of two places or more"),
        (lambda: wavelet_denoising(3.0, 0.1), "one to three axes"),
        (lambda: wavelet_denoising(np.array([[np.nan, 1.0], [1.0, 1.0]]), 0.1), "wavelet_inpainting.image, ~isnan"),
        (lambda: wavelet_denoising(np.ones((8, 8)), 0.1, wavelet="bior2.2"), "not orthogonal"),
        (lambda: wavelet_denoising(np.ones((8, 8)), 0.1, low="cauchy"), "A component is one of"),
        (lambda: wavelet_inpainting(np.ones((8, 8)), np.zeros((8, 8), bool)), "keeps no pixel"),
        (lambda: wavelet_inpainting(np.ones((8, 8)), np.ones((8, 7), bool)), "The mask has the shape"),
        (lambda: compressed_sensing(np.ones(4), masked_fourier(np.ones((4, 4), bool)), (8, 8)), "takes 16 pixels"),
    ],
)
def test_what_cannot_be(call, message):
    with pytest.raises(ValueError, match=message), handlers.seed(rng_seed=0):
        call()


def test_volumes_are_read():
    noisy = np.random.default_rng(0).standard_normal((8, 4, 8))
    trace = handlers.trace(handlers.seed(wavelet_denoising, 0)).get_trace(noisy, 1.0, wavelet="haar")
    assert trace["image"]["value"].shape == noisy.shape


def few_edges(measurements, operator, shape):
    """An image with few edges behind measurements of all pixels at once."""
    u = numpyro.sample("u", dist.ImproperUniform(dist.constraints.real_vector, (), (shape[0] * shape[1],)))
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    differences = total_variation(shape)
    numpyro.sample("gradients", dist.Laplace(differences @ u, 0.5), obs=jnp.zeros(differences.shape[0]))
    numpyro.deterministic("seen", operator @ u)
    numpyro.sample("measurements", dist.Normal(operator @ u, noise), obs=measurements)


@pytest.mark.thorough
def test_rows_of_a_transform_are_never_written_down():
    rng, shape = np.random.default_rng(0), (24, 24)
    image = np.where(np.add.outer(np.arange(24), np.arange(24)) > 20, 5.0, 1.0)
    mask = rng.random(shape) < 0.5
    mask[0, 0] = False
    with pytest.raises(ValueError, match="do not change if the same is added to its elements 0, 1, 2, 3, 4, ..."):
        operator = masked_fourier(mask)
        EP(few_edges, integrate="none").run(jax.random.key(0), np.ones(operator.shape[0]), operator, shape)
    mask[0, 0] = True
    operator = masked_fourier(mask)
    clean = np.asarray(operator @ jnp.asarray(image.reshape(-1)))
    measurements = clean + rng.standard_normal(clean.shape)
    dense_ep = with_layouts(EP, rows=RowCosts(smallest_operator=10_000))
    found, dense = (engine(few_edges, integrate="none", progress_bar=False) for engine in (EP, dense_ep))
    for engine in (found, dense):
        engine.run(jax.random.key(0), measurements, operator, shape)
    assert "known by its products" not in dense.describe()
    assert "known by its products" in found.describe()
    np.testing.assert_allclose(found.log_evidence, dense.log_evidence, rtol=1e-8)
    np.testing.assert_allclose(found.hyper["noise"].value, dense.hyper["noise"].value, rtol=1e-5)
    for name in ("u", "seen"):
        a, b = found.posterior[name], dense.posterior[name]
        np.testing.assert_allclose(a.mean, b.mean, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(a.sd, b.sd, rtol=1e-4)
    draws, site = found.get_samples()["u"], found.posterior["u"]
    np.testing.assert_allclose(draws.mean(0), site.mean, atol=6 * float(site.sd.max()) / len(draws) ** 0.5)


@pytest.mark.parametrize(("shape", "wavelet"), few([((16, 8), "db2"), ((32,), "haar"), ((4, 8, 8), "haar")], 1))
def test_expected_squares_of_details_are_averages_over_shifts(shape, wavelet):
    """Where all is seen exactly; where pixels are missing at random on the average over what is missing."""
    rng = np.random.default_rng(0)
    image = np.cumsum(rng.normal(size=shape), axis=-1)
    transform = wavelet_transform(shape, wavelet, 2)
    groups = np.asarray(wavelet_forest(transform, per_orientation=True).groups)
    shifts = list(itertools.product(*map(range, shape)))
    moved = jnp.asarray([np.roll(image, shift, tuple(range(len(shape)))).reshape(-1) for shift in shifts])
    first = [int(np.flatnonzero(groups == group)[0]) for group in range(groups.max() + 1)]
    squares = np.mean(np.square(np.asarray(jax.vmap(transform.matvec)(moved))), axis=0)
    expected = np.where(groups == 0, 0.0, squares[first][groups])
    whole = wavelet_images.squares_between_seen(transform, jnp.asarray(image), jnp.ones(shape), jnp.asarray(image))
    np.testing.assert_allclose(whole, expected, rtol=1e-8, atol=1e-8)

    masks = rng.random((400, *shape)) < 0.5
    found = jax.vmap(
        lambda mask: wavelet_images.squares_between_seen(transform, jnp.asarray(image) * mask, mask, jnp.asarray(image))
    )(jnp.asarray(masks, float))
    error = np.std(found, axis=0) / np.sqrt(len(masks))
    assert np.all(np.abs(np.mean(found, axis=0) - expected)[groups > 0] < 5.0 * error[groups > 0])


@pytest.mark.thorough
def test_what_fills_a_gap_does_not_say_how_rough_a_picture_is():
    """White noise: what fills it has few details, and the scales of the model start at those of the noise."""
    rng = np.random.default_rng(1)
    image = rng.normal(size=(64, 64))
    mask = rng.random(image.shape) < 0.25
    filled = np.asarray(wavelet_images.filled_gaps(jnp.asarray(np.where(mask, image, 0.0)), mask))
    finest = {}
    for model, data in {
        wavelet_denoising: (filled, 1e-3),
        wavelet_inpainting: (np.where(mask, image, np.nan), mask, 1e-3),
    }.items():
        trace = handlers.trace(handlers.seed(model, 0)).get_trace(*data, wavelet="haar", num_levels=3, num_bases=1)
        finest[model] = 2.0 * np.asarray(trace["low_scale"]["value"])[-3:]
    assert np.all(finest[wavelet_denoising] < 0.6)
    np.testing.assert_allclose(finest[wavelet_inpainting], 1.0, atol=0.15)


@pytest.mark.thorough
def test_a_margin_is_a_larger_picture_that_is_cut():
    data = np.random.default_rng(2).normal(size=(5, 8))
    given = {"low_scale": jnp.ones(3), "high_scale": 2.0 * jnp.ones(3), "transition": jnp.array([[0.2, 0.7]])}
    options = {"wavelet": "db2", "num_levels": 2, "per_orientation": False}
    engines = [EP(wavelet_denoising, hyper_values=given | {"root_probability": jnp.full(2, 0.4)}) for _ in range(2)]
    engines[0].run(jax.random.key(0), data, 1.0, margin=3, **options)
    # Of 11 x 14 pixels, both continue to 12 x 16.
    engines[1].run(jax.random.key(0), np.pad(data, 3, mode="symmetric"), 1.0, **options)
    found, whole = (engine.posterior["image"] for engine in engines)
    np.testing.assert_allclose(found.mean, whole.mean[3:8, 3:11], rtol=1e-10)
    np.testing.assert_allclose(found.variance, whole.variance[3:8, 3:11], rtol=1e-10)
    assert float(engines[0].log_evidence) == pytest.approx(float(engines[1].log_evidence))


def test_margins_that_are_refused():
    with pytest.raises(ValueError, match="margin must be at least 0"):
        handlers.trace(handlers.seed(wavelet_denoising, 0)).get_trace(np.ones((4, 4)), 1.0, margin=-1)
    with pytest.raises(ValueError, match="like one of colours"):
        handlers.trace(handlers.seed(wavelet_denoising, 0)).get_trace(np.ones((8, 8, 3)), 1.0, margin=8)


@pytest.mark.parametrize("name", ["margin", "num_levels", "num_bases"])
def test_numbers_of_pixels_levels_and_bases_are_integers_of_any_kind(name):
    model = handlers.trace(handlers.seed(wavelet_denoising, 0))
    data = np.random.default_rng(0).normal(size=(8, 8))
    for wrong in (True, np.bool_(True), 2.0, "2"):
        with pytest.raises(ValueError, match=f"{name} must be an integer; got"):
            model.get_trace(data, 1.0, **{name: wrong})
    shapes = [model.get_trace(data, 1.0, **{name: kind(1)})["noisy"]["value"].shape for kind in (int, np.int64)]
    assert shapes[0] == shapes[1]
