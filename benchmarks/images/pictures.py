"""Photographs that are denoised and inpainted, and what their reconstructions are told by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pywt

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


def decibels(image: np.ndarray, found: np.ndarray) -> float:
    """Peak signal-to-noise ratio where one is white."""
    return float(-10 * np.log10(np.mean((found - image) ** 2)))


def relative_error(image: np.ndarray, found: np.ndarray) -> float:
    """Sum of absolute errors over that of the intensities."""
    return float(np.abs(found - image).sum() / image.sum())


def inside(site: Any, image: np.ndarray, where: np.ndarray | slice = slice(None), transform: Any = None) -> float:
    """Share of the pixels in bands of 80 %."""
    lower, upper = (np.asarray(bound) for bound in site.interval(0.8))
    if transform is not None:
        lower, upper = transform(lower), transform(upper)
    return float(np.mean(((lower <= image) & (image <= upper))[where]))
