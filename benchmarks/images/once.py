"""One picture in a process of its own: ``python -m benchmarks.images.once denoising camera`` prints JSON.

Pictures of 256 x 256 are denoised or inpainted with all that a user waits for; ``large 1024`` denoises one of that side
in one basis, compilation apart, and measures memory too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from numpyro_ext.infer import EP, StructuredMeanField
from numpyro_ext.models import wavelet_denoising, wavelet_inpainting

from ..harness import cpu_seconds, peak_bytes
from .pictures import NOISE, decibels, inpainting_problem, inside, noisy_photograph, photograph

_SIDE, _NUM_SHIFTS, _LARGEST = 256, 16, 512


def denoising(image: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean under three wavelets at some shifts each, and the share of pixels in bands of 80 %."""
    wavelets = {"wavelet": ["haar", "db2", "sym4"]}
    options = {"num_shifts": _NUM_SHIFTS, "average_over": wavelets, "max_hyper_steps": 300}
    engine = EP(wavelet_denoising, progress_bar=False, **options)
    engine.run(jax.random.key(0), noisy_photograph(image), NOISE)
    site = engine.posterior["image"]
    return np.asarray(site.mean), inside(site, image)


def inpainting(image: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean, and the share of missing pixels in bands of 80 %."""
    observed, mask = inpainting_problem(image)
    options = {"tol": 0.2, "num_variance_samples": 8, "num_samples": 50}
    engine = StructuredMeanField(wavelet_inpainting, progress_bar=False, **options)
    engine.run(jax.random.key(0), observed, mask)
    site = engine.posterior["image"]
    mean, deviation = np.asarray(site.mean), np.asarray(site.sd)
    return mean, float(np.mean((np.abs(mean - image) < 1.2816 * deviation)[~mask]))


def large(side: int) -> dict[str, Any]:
    """CPU-seconds and memory of a fit in one basis, single precision."""
    # Mirror images of one photograph side by side: all sizes have the same statistics, and no edges at the seams.
    image = np.pad(photograph(_LARGEST), [(0, side - _LARGEST)] * 2, mode="symmetric").astype(np.float32)
    noisy = image + NOISE * np.random.default_rng(0).standard_normal(image.shape, np.float32)
    before = peak_bytes()

    def fit(max_hyper_steps: int) -> tuple[np.ndarray, Any]:
        engine = EP(wavelet_denoising, max_hyper_steps=max_hyper_steps, progress_bar=False)
        engine.run(jax.random.key(1), noisy, NOISE)
        return np.asarray(engine.posterior["image"].mean), engine.diagnostics

    _, first = cpu_seconds(fit, 1)  # compiles
    (mean, end), seconds = cpu_seconds(fit, 300)
    return {
        "seconds": seconds,
        "first": first,
        "evaluations": end.hyper.num_evaluations,
        "converged": end.converged,
        "decibels": decibels(image, mean),
        "bytes": peak_bytes() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("denoising", "inpainting", "large"))
    parser.add_argument("which", help="name of the photograph, or side")
    parser.add_argument("--mean", type=Path, help="where to write the mean (npy)")
    options = parser.parse_args()
    if options.what == "large":
        print(json.dumps(large(int(options.which))))
        return
    jax.config.update("jax_enable_x64", True)
    start = time.perf_counter()
    mean, covered = {"denoising": denoising, "inpainting": inpainting}[options.what](photograph(_SIDE, options.which))
    seconds = time.perf_counter() - start
    np.save(options.mean, mean)
    print(json.dumps({"seconds": seconds, "covered": covered, "dtype": str(mean.dtype)}))


if __name__ == "__main__":
    main()
