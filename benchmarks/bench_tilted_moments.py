"""Tilted moments of a million rectified-linear Poisson sites, with large counts and against quadrature."""

from __future__ import annotations

import math
import time

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate

from numpyro_ext.potentials.families.rectified_linear_poisson import rectified_linear_poisson_moments

from .harness import at_least, at_most, compile_function

NUM_SITES = 10**6
NUM_QUADRATURES = 300


def cavities(count: int, dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, means and variances such that the data say less than, as much as, or more than the cavity."""
    rng = np.random.default_rng(count)
    variance = count * np.exp(rng.normal(size=NUM_SITES))
    mean = count + 2.0 * math.sqrt(count) * rng.normal(size=NUM_SITES)
    return np.full(NUM_SITES, count, dtype), mean.astype(dtype), variance.astype(dtype)


def quadrature(count: float, mean: float, variance: float, tolerance: float) -> tuple[float, float, float]:
    """Log normaliser, mean and variance by three calls of ``quad``, told where the mass is and how accurate to be."""
    shifted = mean - variance
    mode = 0.5 * (shifted + math.sqrt(shifted * shifted + 4.0 * variance * count))
    width = 1.0 / math.sqrt(1.0 / variance + count / mode**2)
    lower, upper = max(mode - 20.0 * width, 0.0), mode + 20.0 * width

    def log_density(f: float) -> float:
        return count * math.log(f) - f - 0.5 * (f - mean) ** 2 / variance

    height = log_density(mode)

    def moment(power: int) -> float:
        def integrand(f: float) -> float:
            return (f - mode) ** power * math.exp(log_density(f) - height)

        return integrate.quad(integrand, lower, upper, epsabs=tolerance * width ** (power + 1), epsrel=tolerance)[0]

    total, first, second = moment(0), moment(1), moment(2)
    first, second = first / total, second / total
    log_z = math.log(total) + height - math.lgamma(count + 1.0) - 0.5 * math.log(2.0 * math.pi * variance)
    return log_z, mode + first, second - first**2


def trapezoid(counts: np.ndarray, mean: np.ndarray, variance: np.ndarray, chunk: int = 10**4) -> np.ndarray:
    """Means of all sites by sums over as many points as double precision needs, a chunk of sites at a time."""
    shifted = mean - variance
    mode = 0.5 * (shifted + np.sqrt(shifted * shifted + 4.0 * variance * counts))
    width = 1.0 / np.sqrt(1.0 / variance + counts / mode**2)
    out = np.empty((mean.size, 2))
    for start in range(0, mean.size, chunk):
        y, m, v, top, step = (x[start : start + chunk, None] for x in (counts, mean, variance, mode, width))
        f = np.maximum(top + step * np.linspace(-9.0, 9.0, 61), 1e-300)
        log_density = y * np.log(f / top) - (f - top) - 0.5 * ((f - m) ** 2 - (top - m) ** 2) / v
        weight = np.exp(log_density)
        total = weight.sum(1)
        center = (weight * f).sum(1) / total
        out[start : start + chunk, 0] = center
        out[start : start + chunk, 1] = (weight * (f - center[:, None]) ** 2).sum(1) / total
    return out


def test_against_sums_in_numpy(race, results):
    """The plainest way to treat all sites at once, where no count is so small that the edge at zero matters."""
    arrays = tuple(x.astype(float) for x in cavities(1000, np.float64))
    ours = compile_function(rectified_linear_poisson_moments, *map(jnp.asarray, arrays))
    seconds, peer_seconds = race(ours.run, lambda: trapezoid(*arrays), rounds=2)
    found, expected = np.stack(ours.run()[1:3], axis=-1), trapezoid(*arrays)
    results.record(
        "tilted moments, 10⁶ sites, y = 1000",
        peer="sums over 61 points in NumPy",
        times=(seconds, peer_seconds),
        figure="speed-up",
        target=at_least(1),
        programs=(ours,),
        remark=f"Largest relative difference of means and variances {np.max(np.abs(found / expected - 1.0)):.0e}.",
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_large_counts(race, results, dtype):
    small, large = (
        compile_function(rectified_linear_poisson_moments, *map(jnp.asarray, cavities(count, dtype)))
        for count in (10, 1000)
    )
    seconds, peer_seconds = race(large.run, small.run, rounds=7)
    results.record(
        "tilted moments, 10⁶ sites, y = 1000",
        dtype=np.dtype(dtype).name,
        peer="the same, y = 10",
        times=(seconds, peer_seconds),
        target=at_most(1.3),
        compile_seconds=small.seconds,
        peak_bytes=large.peak_bytes,
        peer_peak_bytes=small.peak_bytes,
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("count", [10, 1000])
def test_quadrature(race, results, count, dtype):
    arrays = cavities(count, dtype)
    ours = compile_function(rectified_linear_poisson_moments, *map(jnp.asarray, arrays))
    (seconds,) = race(ours.run, rounds=5)

    sites = np.stack(arrays, axis=-1)[:NUM_QUADRATURES].astype(float).tolist()
    tolerance = 1e-11 if dtype == np.float64 else 1e-6
    start = time.perf_counter()
    reference = np.array([quadrature(*site, tolerance) for site in sites])
    peer_seconds = (time.perf_counter() - start) * NUM_SITES / NUM_QUADRATURES

    found = np.stack(ours.run(), axis=-1)[:NUM_QUADRATURES]
    error = np.max(np.abs(found - reference) / np.maximum(np.abs(reference), 1.0))
    results.record(
        f"tilted moments, 10⁶ sites, y = {count}",
        dtype=np.dtype(dtype).name,
        peer="scipy.integrate.quad",
        times=(seconds, peer_seconds),
        figure="speed-up",
        target=at_least(1000),
        programs=(ours,),
        remark=f"Three integrals to {tolerance:.0e} on {NUM_QUADRATURES} sites; difference {error:.0e}.",
    )
