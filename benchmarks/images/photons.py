"""Pictures behind few photons, by the engines and by what one would take otherwise."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pywt
import scipy.ndimage
import skimage.color
import skimage.data

from numpyro_ext.infer import EP
from numpyro_ext.linalg import convolution
from numpyro_ext.models import poisson_deblurring, wavelet_denoising

from ..harness import blocks, cpu_seconds, table
from .peers import from_square_roots, noise_variance_of_square_roots, photons_denoised
from .pictures import inside, relative_error
from .rows import Methods, risk_of

KEY = jax.random.key(0)
Options = dict[str, Any]

SHIFTS: Options = {"num_shifts": 32, "num_learning_shifts": 8}
TWO_WAVELETS: Options = {"average_over": {"wavelet": ["haar", "sym4"]}}
MARGIN: Options = {"num_levels": 4, "margin": 16, "low": "gaussian", "high": "gaussian", "per_orientation": False}
HAAR: Options = {"wavelet": "haar"}
AT_ONE_SETTING = {
    "Haar trees, margin": (SHIFTS, HAAR | MARGIN),
    "Haar and sym4 trees, margin": (SHIFTS | TWO_WAVELETS, MARGIN),
}


def picture(name: str, side: int = 64) -> np.ndarray:
    """Averaged over squares; ten in the brightest pixel, and black where the picture has it, unlike ``photograph``."""
    if name == "astronaut":
        image = skimage.color.rgb2gray(skimage.data.astronaut())
    elif name == "coins":
        image = skimage.data.coins()[:256, :256].astype(float)
    else:
        image = getattr(pywt.data, name)().astype(float)[:512, :512]
    step = image.shape[0] // side
    image = image.reshape(side, step, side, step).mean((1, 3))
    return image * (10.0 / image.max())


def photon_counts(image: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Counts, and the kernel that hardly blurs, of the stored notebook of before."""
    squares = np.arange(-1, 2) ** 2
    kernel = np.exp(-0.5 * np.add.outer(squares, squares) / 0.3**2)
    kernel /= kernel.sum()
    blurred = convolution(image.shape, kernel, boundary="replicate") @ jnp.asarray(image.reshape(-1))
    return np.random.default_rng(seed).poisson(np.asarray(blurred)).reshape(image.shape), kernel


def photons(name: str = "camera", *, with_edges: bool = True) -> Methods:
    """Ten photons in the brightest pixel, hardly any blur.

    :param with_edges: whether Laplace factors on differences are among the methods.
    """
    methods = Methods(f"Photons, {name} 64 x 64, at most ten a pixel", "relative error", is_error=True)
    image = picture(name)
    counts, kernel = photon_counts(image)
    methods.add("counts", relative_error(image, counts))
    methods.add("constant", relative_error(image, np.full(image.shape, counts.mean())), remark="mean count")
    widths = np.linspace(0.4, 2.5, 22)
    smooth = min(relative_error(image, scipy.ndimage.gaussian_filter(counts.astype(float), w)) for w in widths)
    methods.add("Gaussian filter", smooth, remark=f"best of {widths.size}")
    if with_edges:
        _add_edges(methods, image, counts, kernel)
    for trees, engine, model in (
        ("Haar trees", {"num_shifts": 32}, HAAR | {"per_orientation": False}),
        *((name, *options) for name, options in AT_ONE_SETTING.items()),
        ("Haar and sym4 trees, margin, average", SHIFTS | TWO_WAVELETS | {"pooling": "average"}, MARGIN),
        *((f"{name}, by risk", few | {"pooling": "risk"}, model) for name, (few, model) in AT_ONE_SETTING.items()),
    ):
        _add_trees(methods, f"EP, Anscombe + {trees}", image, counts, engine, model)
    methods.peers(photons_denoised(counts, image), image, relative_error)
    return methods


def _add_edges(methods: Methods, image: np.ndarray, counts: np.ndarray, kernel: np.ndarray) -> None:
    def fit(**given: float) -> tuple[float, float, EP]:
        engine = EP(poisson_deblurring, tol=1e-4, integrate="none", progress_bar=False)
        engine.run(KEY, counts, kernel, **given)
        site = engine.posterior["image"]
        return relative_error(image, np.asarray(site.mean)), inside(site, image), engine

    (error, covered, engine), seconds = cpu_seconds(fit)
    learned = float(engine.hyper["smoothness"].value)
    methods.add("EP, few edges and Poisson factors", error, covered, seconds, f"smoothness {learned:.2f}, learned")
    tried = (0.6, 0.7, 0.8, 0.9, 1.0)
    fits, seconds = cpu_seconds(lambda: [(*fit(smoothness=value)[:2], value) for value in tried])
    error, covered, smoothness = min(fits)
    remark = f"{smoothness}, best of {len(tried)}, seconds of one"
    methods.add("EP, few edges, smoothness by the truth", error, covered, seconds / len(tried), remark)


def _square_roots(counts: np.ndarray, engine: Options, model: Options) -> Any:
    """The posterior of Anscombe's square roots, whose noise has the variance one."""
    trees = EP(wavelet_denoising, progress_bar=False, **engine)
    trees.run(KEY, 2.0 * np.sqrt(counts + 0.375), 1.0, **model)
    return trees


def _add_trees(
    methods: Methods, name: str, image: np.ndarray, counts: np.ndarray, engine: Options, model: Options
) -> None:
    start = time.process_time()
    trees = _square_roots(counts, engine, model)
    roots, pooling = trees.posterior["image"], engine.get("pooling", "mixture")
    if pooling == "risk":
        roots = roots.with_noise_variance(noise_variance_of_square_roots(counts))
    found = {"median": np.asarray(roots.interval(1e-9)[0]), "mean": np.asarray(roots.mean)}
    covered = inside(roots, image, transform=lambda z: np.maximum(z, 0.0) ** 2 / 4 - 0.375)
    seconds = time.process_time() - start
    remark = risk_of(roots, pooling) if trees.diagnostics.converged else "not converged"
    for which, of_roots in found.items():
        error = relative_error(image, from_square_roots(of_roots))
        methods.add(f"{name}, {which}", error, covered, seconds, remark)


def _medians(names: Sequence[str], num_draws: int) -> list[str]:
    """Averages over draws of the photons of the errors of medians, and of their ratios to total variation's."""
    problems = [(image, photon_counts(image, seed)[0]) for image in map(picture, names) for seed in range(num_draws)]
    errors: dict[str, list[float]] = {}
    for image, counts in problems:
        for name, peer in photons_denoised(counts, image).items():
            errors.setdefault(name, []).append(relative_error(image, peer.image))
        for name, (engine, model) in AT_ONE_SETTING.items():
            median = np.asarray(_square_roots(counts, engine, model).posterior["image"].interval(1e-9)[0])
            errors.setdefault(name, []).append(relative_error(image, from_square_roots(median)))
    best = np.array(errors["Anscombe + total variation"])
    rows = (
        (
            name,
            *(f"{error:.4f}" for error in np.reshape(found, (len(names), -1)).mean(1)),
            f"{np.mean(found / best):.3f}",
        )
        for name, found in errors.items()
    )
    title = f"## The same pictures, averages over {num_draws} draws of the photons"
    return blocks(title, table(f"method | {' | '.join(names)} | ratio to total variation", rows))


def photons_at_one_setting() -> list[str]:
    """Camera and two pictures that had no part in the choice of the setting."""
    numpyro.enable_x64()
    names = ("camera", "astronaut", "coins")
    return blocks(
        *(photons(name, with_edges=name == "camera").lines() for name in names),
        _medians(names, 3),
    )
