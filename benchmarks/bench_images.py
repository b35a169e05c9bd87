"""Images: sweeps of EP for deblurring against a Cholesky factor of as many unknowns; denoising and inpainting."""

from __future__ import annotations

import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pywt

from numpyro_ext.infer import EP, StructuredMeanField
from numpyro_ext.linalg import convolution
from numpyro_ext.models import poisson_deblurring, wavelet_denoising, wavelet_inpainting
from numpyro_ext.structure import read_latent_gaussian

from .compilation import compile_function, compile_sweep
from .results_table import Row, at_least, at_most

SIDES = (32, 64, 128)
KERNEL = np.outer([0.25, 0.5, 0.25], [0.25, 0.5, 0.25])


def photograph(side: int, name: str = "camera") -> np.ndarray:
    """An image of PyWavelets, averaged over squares, between zero and one."""
    image = getattr(pywt.data, name)().astype(float)[:512, :512]
    step = image.shape[0] // side
    image = image.reshape(side, step, side, step).mean((1, 3))
    return (image - image.min()) / np.ptp(image)


def decibels(image: np.ndarray, found: np.ndarray) -> float:
    """Peak signal-to-noise ratio."""
    return float(-10 * np.log10(np.mean((found - image) ** 2)))


@pytest.mark.parametrize("side", SIDES)
def test_deblurring_sweep(race, results, side):
    size = side * side
    blurred = convolution((side, side), KERNEL, boundary="replicate") @ jnp.asarray(10.0 * photograph(side).reshape(-1))
    counts = np.random.default_rng(0).poisson(np.asarray(blurred)).reshape(side, side)
    reading = read_latent_gaussian(poisson_deblurring, (counts, KERNEL), {"smoothness": 0.35})
    ours = compile_sweep(jax.jit(reading.form)({}, reading.data))
    # 16384 unknowns: two gibibytes and half a minute for the peer, so one round of it.
    floor = compile_function(jnp.linalg.cholesky, jnp.eye(size) + 0.5 / size)
    seconds, peer_seconds = race(ours.run, floor.run, rounds=5 if side < 128 else 1)
    results.add(
        Row(
            item=f"EP sweep, photon-limited deblurring, {side} x {side}",
            dtype="float64",
            seconds=seconds,
            peer=f"Cholesky, {size} x {size}",
            peer_seconds=peer_seconds,
            figure="time ratio",
            value=seconds / peer_seconds,
            target=at_most(4),
            compile_seconds=ours.seconds,
            peak_bytes=ours.peak_bytes,
            peer_peak_bytes=floor.peak_bytes,
            remark=f"{(ours.peak_bytes or 0) / size:.0f} bytes per pixel.",
        )
    )


def test_denoising_whole(benchmark, results):
    image = photograph(256)
    noisy = image + 0.1 * np.random.default_rng(0).standard_normal(image.shape)

    def run() -> Any:
        engine = StructuredMeanField(wavelet_denoising, tol=1e-2, progress_bar=False)
        engine.run(jax.random.key(0), noisy, 0.1)
        return np.asarray(engine.posterior["image"].mean)

    def threshold() -> np.ndarray:
        # BayesShrink (Chang, Yu and Vetterli 2000) with the noise known.
        coefficients = pywt.wavedec2(noisy, "db2", mode="periodization", level=5)
        shrunk = [coefficients[0]]
        for level in coefficients[1:]:
            bands = []
            for band in level:
                signal = np.sqrt(max(np.mean(band**2) - 0.01, 1e-12))
                bands.append(pywt.threshold(band, 0.01 / signal, "soft"))
            shrunk.append(tuple(bands))
        return pywt.waverec2(shrunk, "db2", mode="periodization")

    start = time.perf_counter()
    run()
    cold = time.perf_counter() - start
    found = benchmark.pedantic(run, rounds=2)
    start = time.perf_counter()
    shrunk = threshold()
    peer_seconds = time.perf_counter() - start
    seconds = benchmark.stats.stats.min
    results.add(
        Row(
            item="structured mean field, denoising 256 x 256, whole",
            dtype="float64",
            seconds=seconds,
            peer="soft thresholds, BayesShrink",
            peer_seconds=peer_seconds,
            figure="gain in dB",
            value=decibels(image, found) - decibels(image, shrunk),
            compile_seconds=cold - seconds,
            remark=f"{decibels(image, found):.2f} dB against {decibels(image, shrunk):.2f} dB.",
        )
    )


@pytest.mark.parametrize("name", ["camera", "ascent", "aero"])
def test_averaged_denoising_whole(results, name):
    """Three wavelets at 16 shifts each, against what scikit-image has, with weights that know the truth."""
    restoration = pytest.importorskip("skimage.restoration", reason="scikit-image comes with -e '.[benchmark]'")
    image = photograph(256, name)
    noisy = image + 0.1 * np.random.default_rng(0).standard_normal(image.shape)
    engine = EP(
        wavelet_denoising,
        num_shifts=16,
        average_over={"wavelet": ["haar", "db2", "sym4"]},
        max_hyper_steps=300,
        progress_bar=False,
    )
    start = time.perf_counter()
    engine.run(jax.random.key(0), noisy, 0.1)
    found = engine.posterior["image"]
    mean = np.asarray(found.mean)
    seconds = time.perf_counter() - start
    lower, upper = found.interval(0.8)
    covered = np.mean((image >= lower) & (image <= upper))
    variation = max(decibels(image, restoration.denoise_tv_chambolle(noisy, w)) for w in np.geomspace(0.05, 0.3, 19))
    start = time.perf_counter()
    choices = itertools.product((3, 5, 7), (0.05, 0.06, 0.07, 0.08, 0.1))
    patches = [restoration.denoise_nl_means(noisy, size, 11, h=h, sigma=0.1) for size, h in choices]
    peer_seconds = (time.perf_counter() - start) / len(patches)
    best = max(decibels(image, patch) for patch in patches)
    results.add(
        Row(
            item=f"EP over 48 wavelet transforms, denoising {name} 256 x 256",
            dtype=str(mean.dtype),
            seconds=seconds,
            peer="non-local means, scikit-image",
            peer_seconds=peer_seconds,
            figure="gain over total variation in dB",
            value=decibels(image, mean) - variation,
            target=at_least(0),
            remark=f"{decibels(image, mean):.2f} dB, with compilation; total variation {variation:.2f} dB, non-local "
            f"means {best:.2f} dB, both with their best settings of many. 80 % bands hold {100 * covered:.1f} % of the "
            "pixels.",
        )
    )


@pytest.mark.parametrize("name", ["camera", "ascent", "aero"])
def test_inpainting_whole(results, name):
    """A quarter of the pixels, with noise of a hundredth of the range, against scikit-image."""
    restoration = pytest.importorskip("skimage.restoration", reason="scikit-image comes with -e '.[benchmark]'")
    image = photograph(256, name)
    rng = np.random.default_rng(0)
    mask = rng.random(image.shape) < 0.25
    observed = np.where(mask, image + 0.01 * rng.standard_normal(image.shape), 0.0)

    def run() -> tuple[np.ndarray, np.ndarray, float]:
        engine = StructuredMeanField(
            wavelet_inpainting, tol=0.2, num_variance_samples=8, num_samples=50, progress_bar=False
        )
        start = time.perf_counter()
        engine.run(jax.random.key(0), observed, mask)
        seconds = time.perf_counter() - start
        found = engine.posterior["image"]
        return np.asarray(found.mean), np.asarray(found.sd), seconds

    mean, deviation, seconds = run()
    start = time.perf_counter()
    smooth = restoration.inpaint_biharmonic(observed, ~mask)
    peer_seconds = time.perf_counter() - start
    covered = np.mean(np.abs(mean - image)[~mask] < 1.2816 * deviation[~mask])
    results.add(
        Row(
            item=f"structured mean field, inpainting {name} 256 x 256",
            dtype=str(mean.dtype),
            seconds=seconds,
            peer="biharmonic interpolation, scikit-image",
            peer_seconds=peer_seconds,
            figure="gain in dB",
            value=decibels(image, mean) - decibels(image, smooth),
            target=at_least(0),
            remark=f"{decibels(image, mean):.2f} dB against {decibels(image, smooth):.2f} dB; with compilation. "
            f"80 % bands hold {100 * covered:.1f} % of the missing pixels.",
        )
    )
