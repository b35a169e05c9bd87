"""Denoising by the average of exact posteriors over shifts and wavelets: three photographs, through the engine."""

import functools
import time

import jax
import numpy as np
import pytest

from numpyro_ext.infer import EP
from numpyro_ext.models import wavelet_denoising

from .test_wavelet_images import decibels, photograph

WAVELETS = {"wavelet": ["haar", "db2", "sym4"]}
# dB with 16 shifts; total variation with the best weight reaches 28.6, 26.1, 27.1.
TARGETS = {"camera": 29.0, "ascent": 26.9, "aero": 27.5}


def restore(truth, **options):
    noisy = truth + 0.1 * np.random.default_rng(0).normal(size=truth.shape)
    engine = EP(wavelet_denoising, average_over=WAVELETS, pooling="average", progress_bar=False, **options)
    start = time.perf_counter()
    engine.run(jax.random.key(0), noisy, 0.1)
    site = engine.posterior["image"]
    found = decibels(truth, site.mean.reshape(-1))
    lower, upper = site.interval(0.8)
    inside = float(np.mean((truth >= lower) & (truth <= upper)))
    print(f"{found:.2f} dB, 80 % bands cover {100 * inside:.1f} %, {time.perf_counter() - start:.0f} s")
    return engine, found, inside


@functools.cache
def restored(name):
    # Aero needs more than the hundred steps that are the default to learn its parameters.
    _, found, inside = restore(photograph(name, 256), num_shifts=16, num_samples=480, max_hyper_steps=300)
    return found, inside


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_three_photographs(name):
    assert restored(name)[0] >= TARGETS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_coverage_of_bands(name):
    assert 0.75 < restored(name)[1] < 0.85


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_coverage_of_bands_by_risk(name):
    """Small pictures with a margin, where the mixture holds 87 to 90 %; estimates are within four of their errors."""
    truth = photograph(name, 128)
    noisy = truth + 0.1 * np.random.default_rng(0).normal(size=truth.shape)
    bases = {"num_shifts": 8, "num_learning_shifts": 4, "average_over": {"wavelet": ["haar", "sym4"]}}
    engine = EP(wavelet_denoising, **bases, pooling="risk", progress_bar=False)
    engine.run(jax.random.key(1), noisy, 0.1, margin=8)
    site = engine.posterior["image"]
    error = float(np.mean(np.square(np.asarray(site.mean) - truth)))
    lower, upper = site.interval(0.8)
    print(name, site.risk, error)
    assert 0.75 < float(np.mean((truth >= lower) & (truth <= upper))) < 0.85
    assert abs(site.risk.estimate - error) < 4.0 * site.risk.standard_error
