"""Methods that one would take for images otherwise, with the settings that are best when the truth is known."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.interpolate
from skimage import restoration

from .pictures import relative_error

Errors = Callable[[np.ndarray, np.ndarray], float]


class Picture(NamedTuple):
    """The best of several settings, and the seconds that one of them took."""

    image: np.ndarray
    seconds: float
    num_settings: int


def _best(makers: Sequence[Callable[[], np.ndarray]], loss: Callable[[np.ndarray], float]) -> Picture:
    start = time.perf_counter()
    found = [make() for make in makers]
    seconds = (time.perf_counter() - start) / len(makers)
    return Picture(min(found, key=loss), seconds, len(makers))


def denoised(
    noisy: np.ndarray, noise: float, loss: Callable[[np.ndarray], float], channel_axis: int | None = None
) -> dict[str, Picture]:
    """Total variation, iterated to its end, and non-local means, which know the noise."""

    def variation(weight: float) -> np.ndarray:
        return restoration.denoise_tv_chambolle(noisy, weight, eps=1e-5, max_num_iter=1000, channel_axis=channel_axis)

    def patches(size: int, h: float) -> np.ndarray:
        return restoration.denoise_nl_means(noisy, size, 11, h=h, sigma=noise, channel_axis=channel_axis)

    weights = noise * np.geomspace(0.4, 3.0, 13)
    settings = itertools.product((3, 5, 7), noise * np.array([0.5, 0.6, 0.7, 0.8, 1.0]))
    return {
        "total variation": _best([partial(variation, weight) for weight in weights], loss),
        "non-local means": _best([partial(patches, *setting) for setting in settings], loss),
    }


def from_square_roots(roots: np.ndarray) -> np.ndarray:
    """The unbiased inverse of Anscombe's square root, in the closed form of Makitalo and Foi (2011)."""
    z = np.maximum(roots, 2.0 * np.sqrt(0.375))
    return z**2 / 4 + np.sqrt(1.5) / z / 4 - 11 / 8 / z**2 + 5 * np.sqrt(1.5) / 8 / z**3 - 1 / 8


def noise_variance_of_square_roots(counts: np.ndarray) -> float:
    """The variance of the noise of Anscombe's square roots, on the average over a picture.

    It is near one but where photons are few. A count of zero says zero, of one 5/4 and of more one: on the average over
    a Poisson variable of any mean that is within 0.009 of the variance of its square root.
    """
    return float(np.mean(np.choose(np.minimum(counts, 2), [0.0, 1.25, 1.0])))


def photons_denoised(counts: np.ndarray, image: np.ndarray) -> dict[str, Picture]:
    """The same of the square roots of counts, whose noise has the variance one."""
    found = denoised(2.0 * np.sqrt(counts + 0.375), 1.0, lambda roots: relative_error(image, from_square_roots(roots)))
    return {f"Anscombe + {name}": peer._replace(image=from_square_roots(peer.image)) for name, peer in found.items()}


def inpainted(observed: np.ndarray, mask: np.ndarray) -> dict[str, Picture]:
    """Interpolation between the seen pixels; nothing is tuned."""
    places = np.argwhere(mask), observed[mask], tuple(np.indices(mask.shape))
    start = time.perf_counter()
    nearest = scipy.interpolate.griddata(*places, method="nearest")
    first = time.perf_counter()
    linear = scipy.interpolate.griddata(*places, method="linear")
    middle = time.perf_counter()
    biharmonic = restoration.inpaint_biharmonic(np.where(mask, observed, 0.0), ~mask)
    end = time.perf_counter()
    return {
        "nearest pixel": Picture(nearest, first - start, 1),
        "linear interpolation": Picture(np.where(np.isnan(linear), nearest, linear), middle - first, 1),
        "biharmonic": Picture(biharmonic, end - middle, 1),
    }
