"""Images: sweeps of EP against a Cholesky factor of as many unknowns; denoising and inpainting, each in a process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import pywt

from numpyro_ext.infer import StructuredMeanField
from numpyro_ext.linalg import LinearOperator, convolution, masked_fourier, total_variation
from numpyro_ext.models import poisson_deblurring, wavelet_denoising
from numpyro_ext.structure import read_latent_gaussian

from .harness import at_least, at_most, compile_function, compile_sweep, in_own_process
from .images.peers import denoised, inpainted
from .images.pictures import NOISE, decibels, inpainting_problem, noisy_photograph, photograph

KERNELS = {f"blurred by {n} x {n}": np.full((n, n), 1.0 / n**2) for n in (3, 9)}
# Of 128 x 128 pixels the floor takes six gibibytes and a minute.
PROBLEMS = [(name, side) for name in (*KERNELS, "half of its Fourier transform") for side in (32, 64, 128)]


def image_from_frequencies(measurements: np.ndarray, operator: LinearOperator, shape: tuple[int, int]) -> None:
    """An image with few edges, seen through an operator in white noise."""
    u = numpyro.sample("u", dist.ImproperUniform(dist.constraints.real_vector, (), (shape[0] * shape[1],)))
    differences = total_variation(shape)
    numpyro.sample("gradients", dist.Laplace(differences @ u, 3.0), obs=jnp.zeros(differences.shape[0]))
    numpyro.sample("measurements", dist.Normal(operator @ u, 1.0), obs=measurements)


def read_problem(name: str, side: int) -> Any:
    """The model of ten photons a pixel, or of as many Fourier coefficients as half the pixels."""
    image, rng, shape = 10.0 * photograph(side), np.random.default_rng(0), (side, side)
    if name in KERNELS:
        blurred = convolution(shape, KERNELS[name], boundary="replicate") @ jnp.asarray(image.reshape(-1))
        counts = rng.poisson(np.asarray(blurred)).reshape(shape)
        return read_latent_gaussian(poisson_deblurring, (counts, KERNELS[name]), {"smoothness": 0.35})
    operator = masked_fourier(rng.random(shape) < 0.5)
    clean = np.asarray(operator @ jnp.asarray(image.reshape(-1)))
    return read_latent_gaussian(image_from_frequencies, (clean + rng.standard_normal(clean.shape), operator, shape))


@pytest.mark.parametrize("name, side", PROBLEMS)
def test_sweep(race, results, name, side):
    size = side * side
    reading = read_problem(name, side)
    ours = compile_sweep(jax.jit(reading.form)({}, reading.data))
    floor = compile_function(jnp.linalg.cholesky, jnp.eye(size) + 0.5 / size)
    seconds, peer_seconds = race(ours.run, floor.run, rounds=5 if side < 64 else 1)
    results.record(
        f"EP sweep, image {name}, {side} x {side}",
        peer=f"Cholesky, {size} x {size}",
        times=(seconds, peer_seconds),
        target=at_most(4),
        programs=(ours, floor),
        remark=f"{(ours.peak_bytes or 0) / size / 1e3:.0f} kB per pixel.",
    )


def test_denoising_whole(benchmark, results):
    image = photograph(256)
    noisy = noisy_photograph(image)

    def run() -> Any:
        engine = StructuredMeanField(wavelet_denoising, tol=1e-2, progress_bar=False)
        engine.run(jax.random.key(0), noisy, NOISE)
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
    results.record(
        "structured mean field, denoising 256 x 256, whole",
        peer="soft thresholds, BayesShrink",
        times=(seconds, peer_seconds),
        figure="gain in dB",
        value=decibels(image, found) - decibels(image, shrunk),
        compile_seconds=cold - seconds,
        remark=f"{decibels(image, found):.2f} dB against {decibels(image, shrunk):.2f} dB.",
    )


NAMES = ("camera", "ascent", "aero")


def in_a_process(what: str, name: str, folder: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """The mean of the image and what else is known of the run; nothing that an earlier run compiled is there."""
    path = folder / "mean.npy"
    no_cache = {name: None for name in os.environ if "COMPILATION_CACHE" in name}
    found = in_own_process("images.once", what, name, "--mean", path, environment=no_cache)
    return np.load(path), found


@pytest.mark.parametrize("name", NAMES)
def test_averaged_denoising_whole(results, name, tmp_path):
    """Three wavelets at 16 shifts each, against what scikit-image has, with weights that know the truth."""
    image = photograph(256, name)
    noisy = noisy_photograph(image)
    mean, run = in_a_process("denoising", name, tmp_path)
    peers = denoised(noisy, NOISE, lambda picture: -decibels(image, picture))
    variation, patches = peers["total variation"], peers["non-local means"]
    others = {
        "total variation, scikit-image": (decibels(image, variation.image), variation.seconds),
        "non-local means, scikit-image": (decibels(image, patches.image), patches.seconds),
    }
    for peer, (found, seconds) in others.items():
        results.record(
            f"EP over 48 wavelet transforms, denoising {name} 256 x 256",
            dtype=run["dtype"],
            times=(run["seconds"], seconds),
            peer=peer,
            figure="gain in dB",
            value=decibels(image, mean) - found,
            target=at_least(0) if "variation" in peer else None,
            remark=f"{decibels(image, mean):.2f} dB, in a process of its own with compilation. Peers have their best "
            f"settings of many. 80 % bands hold {100 * run['covered']:.1f} % of the pixels.",
        )


@pytest.mark.parametrize("name", NAMES)
def test_inpainting_whole(results, name, tmp_path):
    """A quarter of the pixels, with noise of a hundredth of the range, against scikit-image."""
    image = photograph(256, name)
    observed, mask = inpainting_problem(image)
    mean, run = in_a_process("inpainting", name, tmp_path)
    peers = inpainted(observed, mask)
    for peer, found in peers.items():
        results.record(
            f"structured mean field, inpainting {name} 256 x 256",
            dtype=run["dtype"],
            times=(run["seconds"], found.seconds),
            peer=peer,
            figure="gain in dB",
            value=decibels(image, mean) - decibels(image, found.image),
            target=at_least(0) if peer == "biharmonic" else None,
            remark=f"{decibels(image, mean):.2f} dB, in a process of its own with compilation. 80 % bands hold "
            f"{100 * run['covered']:.1f} % of the missing pixels.",
        )
