"""One image denoised or inpainted, with all that a user waits for: run in a process of its own, prints JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pywt

from numpyro_ext.infer import EP, StructuredMeanField
from numpyro_ext.models import wavelet_denoising, wavelet_inpainting

# Of the range of the image, where it is denoised and where it is inpainted.
NOISE = 0.1
_MEASUREMENT_NOISE = 0.01


def photograph(side: int, name: str = "camera") -> np.ndarray:
    """An image of PyWavelets, averaged over squares, between zero and one."""
    image = getattr(pywt.data, name)().astype(float)[:512, :512]
    step = image.shape[0] // side
    image = image.reshape(side, step, side, step).mean((1, 3))
    return (image - image.min()) / np.ptp(image)


def noisy_photograph(image: np.ndarray) -> np.ndarray:
    """The image in white noise."""
    return image + NOISE * np.random.default_rng(0).standard_normal(image.shape)


def inpainting_problem(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A quarter of the pixels with little noise, zero elsewhere; and which they are."""
    rng = np.random.default_rng(0)
    mask = rng.random(image.shape) < 0.25
    return np.where(mask, image + _MEASUREMENT_NOISE * rng.standard_normal(image.shape), 0.0), mask


def average_transforms(image: np.ndarray, num_shifts: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean under three wavelets at so many shifts each, and whether a band of 80 % holds the pixel."""
    engine = EP(
        wavelet_denoising,
        num_shifts=num_shifts,
        average_over={"wavelet": ["haar", "db2", "sym4"]},
        max_hyper_steps=300,
        progress_bar=False,
    )
    engine.run(jax.random.key(0), noisy_photograph(image), NOISE)
    found = engine.posterior["image"]
    lower, upper = found.interval(0.8)
    return np.asarray(found.mean), np.asarray((image >= lower) & (image <= upper))


def inpaint(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean, and whether a band of 80 % holds a pixel that is missing."""
    observed, mask = inpainting_problem(image)
    engine = StructuredMeanField(
        wavelet_inpainting, tol=0.2, num_variance_samples=8, num_samples=50, progress_bar=False
    )
    engine.run(jax.random.key(0), observed, mask)
    found = engine.posterior["image"]
    mean, deviation = np.asarray(found.mean), np.asarray(found.sd)
    return mean, (np.abs(mean - image) < 1.2816 * deviation)[~mask]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("denoising", "inpainting"))
    parser.add_argument("name")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--num-shifts", type=int, default=16)
    parser.add_argument("--mean", type=Path, help="where to write the mean (npy)")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    image = photograph(arguments.side, arguments.name)
    start = time.perf_counter()
    if arguments.what == "denoising":
        mean, is_covered = average_transforms(image, arguments.num_shifts)
    else:
        mean, is_covered = inpaint(image)
    seconds = time.perf_counter() - start
    np.save(arguments.mean, mean)
    result: dict[str, Any] = {"seconds": seconds, "covered": float(np.mean(is_covered)), "dtype": str(mean.dtype)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
