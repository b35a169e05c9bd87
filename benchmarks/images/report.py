"""Pictures by the engines and by scikit-image: photons, and the eight methods of the thesis.

``python -m benchmarks.images.report`` writes ``results/<date>-images.md``. Peers have their best settings of several,
chosen with the true picture; the engines learn theirs. Averages over bases of pictures of 256 x 256 are in
``bench_images``. Options name other reports, ``results/<date>-images-<option>.md``: ``--medians`` and ``--bands`` of
mixtures and averages over bases, ``--colours``, ``--photons``, ``--inpainting`` of 256 x 256 pictures after a few
steps, and ``--large`` pictures of up to 4096 x 4096.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import numpyro
import skimage.data

from numpyro_ext.infer import EP, StructuredMeanField
from numpyro_ext.models import wavelet_denoising, wavelet_inpainting

from ..harness import blocks, cpu_seconds, in_own_process, table, write_report
from .peers import Picture, denoised, inpainted
from .photons import photons, photons_at_one_setting
from .pictures import NOISE, decibels, inpainting_problem, inside, noisy_photograph, photograph
from .rows import Methods, risk_of

KEY = jax.random.key(0)


def best_denoised(image: np.ndarray, noisy: np.ndarray, **options: Any) -> dict[str, Picture]:
    """By each peer, in its best setting."""
    return denoised(noisy, NOISE, lambda found: -decibels(image, found), **options)


def medians(photo: str) -> Methods:
    """Denoising by a mixture over bases: each pixel by its mean and by its median, which heeds a few bases less."""
    methods = Methods(f"Denoising, {photo} 128 x 128, noise 0.1", "dB", is_error=False)
    image = photograph(128, photo)
    noisy = noisy_photograph(image)
    poolings = ((0, "mixture"), (8, "mixture"), (8, "risk"))
    for num_shifts, (margin, pooling) in itertools.product((8, 16), poolings):
        start = time.process_time()
        # with a margin, parameters are learned from some of the shifts
        options = {"num_shifts": num_shifts, "num_learning_shifts": 4 if margin else 1, "pooling": pooling}
        engine = EP(wavelet_denoising, average_over={"wavelet": ["haar", "sym4"]}, progress_bar=False, **options)
        engine.run(jax.random.key(1), noisy, NOISE, margin=margin)
        site = engine.posterior["image"]
        found = {"mean": np.asarray(site.mean), "median": np.asarray(site.interval(1e-6)[0])}
        covered, seconds = inside(site, image), time.process_time() - start
        for which, picture in found.items():
            frame = (f"margin of {margin}, " if margin else "") + ("bands by risk, " if pooling == "risk" else "")
            name = f"EP, trees, {2 * num_shifts} bases, {frame}{which}"
            methods.add(name, decibels(image, picture), covered, seconds, risk_of(site, pooling, NOISE))
    methods.peers(best_denoised(image, noisy), image)
    return methods


def timed_fit(engine: Any, *arguments: Any, find: Callable[[Any], Any], **options: Any) -> tuple[Any, ...]:
    """Mean of a picture, its bands, and CPU-seconds until each."""

    def mean() -> np.ndarray:
        engine.run(*arguments, **options)
        return np.asarray(engine.posterior["image"].mean)

    found, seconds = cpu_seconds(mean)
    of_bands, more = cpu_seconds(lambda: np.asarray(find(engine.posterior["image"])))
    return found, of_bands, (f"{seconds:.1f}", f"{seconds + more:.1f}")


def bands() -> list[str]:
    """Shares of pixels in the bands of 256 x 256 pictures, 32 bases, and CPU-seconds once everything is compiled."""
    tails = np.array([0.025, 0.1, 0.25, 0.75, 0.9, 0.975])

    def row(name: str, pooling: str) -> Iterable[Any]:
        image = photograph(256, name)
        engine = EP(wavelet_denoising, **SEVERAL, pooling=pooling, max_hyper_steps=300, progress_bar=False)
        data = jax.random.key(1), noisy_photograph(image), NOISE
        mean, ends, times = timed_fit(engine, *data, find=lambda site: site.quantile(tails))
        held = [np.mean((ends[i] <= image) & (image <= ends[5 - i])) for i in (2, 1, 0)]
        return name, pooling, f"{decibels(image, mean):.2f}", *(f"{share:.1%}" for share in held), *times

    row("camera", "mixture")  # compiles
    rows = (row(*case) for case in itertools.product(("camera", "ascent", "aero"), ("mixture", "average")))
    return table("picture | pooling | dB | 50 % | 80 % | 95 % | mean, CPU-s | and bands", rows)


def colour() -> Methods:
    """A picture of three colours: each by itself, or along their principal axes, in which white noise stays white.

    Peers take all colours together, as they offer to, or each principal colour with its own best setting.
    """
    methods = Methods("Denoising in colour, astronaut 128 x 128, noise 0.1", "dB", is_error=False)
    image = skimage.data.astronaut().astype(float).reshape(128, 4, 128, 4, 3).mean((1, 3)) / 255
    noisy = image + NOISE * np.random.default_rng(0).standard_normal(image.shape)
    methods.add("noisy", decibels(image, noisy))
    _, _, principal = np.linalg.svd(noisy.reshape(-1, 3) - noisy.mean((0, 1)), full_matrices=False)
    for name, axes in {"each colour": np.eye(3), "principal colours": principal}.items():
        start = time.process_time()
        engine = EP(wavelet_denoising, **SEVERAL, pooling="average", progress_bar=False)
        found = []
        for plane in np.moveaxis(noisy @ axes.T, -1, 0):
            engine.run(jax.random.key(1), plane, NOISE)
            found.append(np.asarray(engine.posterior["image"].mean))
        value = decibels(image, np.stack(found, -1) @ axes)
        methods.add(f"EP, trees, 32 bases, {name}", value, None, time.process_time() - start)
    peers = best_denoised(image, noisy, channel_axis=-1)
    methods.peers({f"{name}, all colours": peer for name, peer in peers.items()}, image)
    truth, seen = (np.moveaxis(picture @ principal.T, -1, 0) for picture in (image, noisy))
    by_plane = [best_denoised(true, plane) for plane, true in zip(seen, truth, strict=True)]
    for name in by_plane[0]:
        picture = np.stack([found[name].image for found in by_plane], -1) @ principal
        num_settings = by_plane[0][name].num_settings
        seconds = sum(found[name].seconds for found in by_plane)
        remark = f"best of {num_settings} for each, seconds of one"
        methods.add(f"{name}, principal colours", decibels(image, picture), None, seconds, remark)
    return methods


def early_inpainting() -> list[str]:
    """Pictures of 256 x 256 after few steps of four bases, and CPU-seconds once everything is compiled."""

    def row(name: str, num_steps: int) -> Iterable[Any]:
        image = photograph(256, name)
        observed, mask = inpainting_problem(image)
        options = {"num_steps": num_steps, "tol": 0.2, "num_variance_samples": 8, "num_samples": 20}
        engine = StructuredMeanField(wavelet_inpainting, progress_bar=False, **options)
        mean, sd, times = timed_fit(engine, KEY, observed, mask, find=lambda site: site.sd, num_bases=4)
        held = np.mean((np.abs(mean - image) < 1.2816 * sd)[~mask])
        found, peers = engine.diagnostics, inpainted(observed, mask)
        others = (f"{decibels(image, peers[peer].image):.2f}" for peer in ("linear interpolation", "biharmonic"))
        return name, found.num_steps, found.converged, f"{decibels(image, mean):.2f}", f"{held:.1%}", *times, *others

    row("camera", 3)  # compiles
    rows = (row(*case) for case in itertools.product(("camera", "ascent", "aero"), (3, 6)))
    heads = "picture | steps | converged | dB | 80 % | mean, CPU-s | and bands | linear, dB | biharmonic, dB"
    return table(heads, rows)


def large_pictures() -> list[str]:
    """One fit in one basis of each size, in processes of their own."""

    def rows() -> Iterator[Iterable[Any]]:
        first = np.ones(2)
        for side in (1024, 2048, 4096):
            found = in_own_process("images.once", "large", side)
            each = 1e6 * found["seconds"] / side**2 * np.array([1.0, 1.0 / found["evaluations"]])
            first = each if side == 1024 else first
            own = [f"{found['seconds']:.1f}", found["evaluations"], found["converged"], f"{found['decibels']:.2f}"]
            yield f"{side} x {side}", *own, f"{found['bytes'] / 2**30:.1f}", *each, *(each / first)

    heads = "picture | CPU-s | evaluations | converged | dB | memory, GiB | µs a pixel | and evaluation | ratio | ratio"
    return table(heads, rows())


SEVERAL: dict[str, Any] = {"num_shifts": 16, "average_over": {"wavelet": ["haar", "sym4"]}}
COMPONENTS = {"Laplace": ("laplace", "laplace"), "Student-t": ("gaussian", "student")}


def eight_methods() -> list[Methods]:
    """Modes and bounds, independent and trees, Laplace and Student-t components, one basis (Ko 2017, table 2.6)."""
    tables = [
        Methods("Denoising, camera 64 x 64, one basis unless said", "dB", is_error=False),
        Methods("Inpainting, camera 64 x 64, a quarter of the pixels, one basis unless said", "dB", is_error=False),
    ]
    image = photograph(128).reshape(64, 2, 64, 2).mean((1, 3))
    generator = np.random.default_rng(0)
    noisy = image + NOISE * generator.standard_normal(image.shape)
    mask = generator.random(image.shape) < 0.25
    observed = np.where(mask, image, np.nan)
    tasks: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
        (wavelet_denoising, (noisy, NOISE), {}),
        (wavelet_inpainting, (observed, mask, 0.01), {"num_bases": 1, "wavelet": "db2"}),
    )
    cases = list(itertools.product(COMPONENTS.items(), ("independent", "tree")))
    for methods, (model, data, options) in zip(tables, tasks, strict=True):
        for (family, (low, high)), shape in cases:
            learned: dict[str, Any] = {}
            for variances, what in (("auto", "bound"), ("none", "mode")):
                engine = StructuredMeanField(
                    model, tol=0.2, variances=variances, num_variance_samples=10, hyper_values=learned,
                    progress_bar=False,
                )  # fmt: skip
                given = {"factorial": shape == "independent", "low": low, "high": high}
                methods.fit(
                    f"{what}, {shape}, {family}", image, engine, KEY, *data, has_bands=False, **given, **options
                )
                learned = {name: parameter.value for name, parameter in engine.hyper.items()}
    for methods, found in zip(tables, (best_denoised(image, noisy), inpainted(observed, mask)), strict=True):
        methods.peers(found, image)
    return tables


PEERS = [
    "Total variation and non-local means have the best of several settings, chosen with the true picture; engines",
    "learn theirs unless it is said. Seconds are of the processor, with compilation (peers: of the clock).",
]
Report = tuple[str, list[str], Callable[[], list[str]]]
REPORTS: dict[str, Report] = {
    "medians": (
        "Pictures: means and medians of mixtures over bases",
        [
            *PEERS,
            "With a margin the data are continued by reflection on every side, and parameters are learned from four",
            "shifts and not from one. *By risk* (`pooling`) bands are those of the mixture, scaled so that the mean",
            "variance is the squared error of the mean, as Stein's estimate and its standard error tell it without",
            "the true picture; the last column has the error and the estimate, in variances of the noise. The rule",
            "was chosen on other pictures: house, peppers, monarch, boat and couple of Set12, and moon, clock, page,",
            "brick, gravel and cell of scikit-image. Single precision.",
        ],
        lambda: _lines_of([medians("camera"), medians("ascent"), medians("aero")]),
    ),
    "colours": ("Pictures: colours", [*PEERS, "Single precision."], lambda: colour().lines()),
    "bands": (
        "Pictures: bands of averages over bases",
        [
            "What bands of so many per cent hold of the pixels. A mixture takes one basis to be right; the average has",
            "the deviations of its own error. CPU-seconds are of a fit that compiles nothing: until its mean, and to",
            "bands by 1000 draws. Denoising, 256 x 256, noise 0.1, 32 bases. Single precision.",
        ],
        bands,
    ),
    "inpainting": (
        "Pictures: inpainting in few steps",
        [
            "A quarter of the pixels is seen, in noise of a hundredth of the range. Three or six steps of four bases:",
            "the iteration has not converged, and its report says so. `2026-11-28-cpu.md` has the same pictures and",
            "masks where the iteration ends, with eight bases and another start. Bands are of the missing pixels, from",
            "20 draws.",
            "CPU-seconds are of a fit that compiles nothing: until the mean, and to bands. Linear and biharmonic",
            "interpolation have nothing to tune. 256 x 256, single precision.",
        ],
        early_inpainting,
    ),
    "photons": (
        "Pictures: photons",
        [
            "64 x 64, at most ten photons a pixel, double precision. Relative errors are sums of absolute ones over",
            "that of the intensities. *Margin* is one setting for all pictures, with nothing of theirs in it: trees",
            "with Gaussian components, four levels and a margin of 16 pixels, on Anscombe's square roots, 32 shifts",
            "for each wavelet, parameters learned from 8 of them, and back by the closed form of the unbiased inverse",
            "(Makitalo and Foi 2011). It was chosen by medians on other pictures and draws of photons; which wavelets",
            "to take was not settled before camera had been seen. Bands are of the mixture, of the *average*, or of it",
            "*by risk* (`pooling`): those of the mixture, scaled so that the mean variance is the squared error of the",
            "mean of the square roots, as Stein's estimate and its standard error tell it without the true picture;",
            "the last column has both. The estimate is given what the counts say of the noise: on the average over",
            "the picture the variance is zero where nothing is counted, 5/4 where one photon is and one elsewhere.",
            "The rule was chosen on pictures of Set12 and of scikit-image, its noise after bands on camera were seen.",
            "Total variation, non-local means and the Gaussian filter have their best settings with the true",
            "picture.",
            "Seconds are of the processor, with compilation where a program is new (peers: of the clock).",
        ],
        photons_at_one_setting,
    ),
    "large": (
        "Pictures: one fit as they grow",
        [
            "Denoising by wavelet trees in one basis (db2, five levels), noise 0.1, as `EP(wavelet_denoising)` does",
            "it, parameters learned: a photograph of 512 x 512 and its mirror images, so that all sizes have the same",
            "statistics. Seconds are of the processor, to the mean, in a process that has compiled everything; memory",
            "is what the process grew by, its compiler included. An evaluation is one of the evidence of the whole",
            "picture and its gradient; searches begin on samples of its trees, whose evaluations are in the seconds",
            "alone. The ratios are those of the two columns before them to the smallest picture. Single precision.",
        ],
        large_pictures,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    for name, (title, *_) in REPORTS.items():
        which.add_argument(f"--{name}", action="store_const", const=name, dest="report", help=f"only {title!r}")
    report = parser.parse_args().report
    if report is not None:
        title, words, lines = REPORTS[report]
        write_report(f"images-{report}", blocks(f"# {title}", words, lines()), f"images.report --{report}")
        return
    numpyro.enable_x64()
    tables = [photons()]
    numpyro.enable_x64(False)
    tables += eight_methods()
    words = [*PEERS, "Photons in double precision, the rest in single."]
    write_report("images", blocks("# Pictures by the engines and by scikit-image", words, _lines_of(tables)))


def _lines_of(tables: list[Methods]) -> list[str]:
    return blocks(*(methods.lines() for methods in tables))


if __name__ == "__main__":
    main()
