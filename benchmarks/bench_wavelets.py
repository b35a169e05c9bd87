"""Wavelet transforms against PyWavelets, their growth with the size, and belief propagation per node of a quad-tree."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pywt

from numpyro_ext.linalg import wavelet_transform
from numpyro_ext.potentials import sum_product, wavelet_forest

from .harness import at_least, at_most, compile_function

NUM_LEVELS = 5


def image(side: int) -> np.ndarray:
    return np.random.default_rng(side).normal(size=(side, side))


@pytest.mark.parametrize("wavelet", ["haar", "db2", "sym4", "db8"])
@pytest.mark.parametrize("direction", ["analysis", "synthesis"])
def test_against_pywavelets(race, results, wavelet, direction):
    transform, x = wavelet_transform((512, 512), wavelet, NUM_LEVELS), image(512)
    details = pywt.wavedec2(x, wavelet, mode="periodization", level=NUM_LEVELS)
    coefficients = pywt.coeffs_to_array(details)[0]
    if direction == "analysis":
        ours = compile_function(transform.matvec, jnp.asarray(x.reshape(-1)))
        expected = coefficients

        def peer() -> object:
            return pywt.wavedec2(x, wavelet, mode="periodization", level=NUM_LEVELS)
    else:
        ours = compile_function(transform.rmatvec, jnp.asarray(coefficients.reshape(-1)))
        expected = x

        def peer() -> object:
            return pywt.waverec2(details, wavelet, mode="periodization")

    seconds, peer_seconds = race(ours.run, peer, rounds=15)
    error = float(np.max(np.abs(np.asarray(ours.run()).reshape(x.shape) - expected)))
    results.record(
        f"wavelet {direction}, 512², {wavelet}",
        peer="PyWavelets",
        times=(seconds, peer_seconds),
        figure="speed-up",
        target=at_least(1),
        programs=(ours,),
        remark=f"Largest difference {error:.0e}.",
    )


def test_growth(race, results):
    small, large = (
        compile_function(
            wavelet_transform((side, side), "db2", NUM_LEVELS).matvec, jnp.asarray(image(side).reshape(-1))
        )
        for side in (1024, 4096)
    )
    copies = [functools.partial(np.copy, image(side)) for side in (4096, 1024)]
    seconds, peer_seconds, large_copy, small_copy = race(large.run, small.run, *copies, rounds=7)
    results.record(
        "wavelet analysis, 4096², db2",
        peer="the same, 1024²",
        times=(seconds, peer_seconds),
        figure="time per pixel, ratio",
        value=seconds / peer_seconds / 16.0,
        target=at_most(2),
        programs=(large, small),
        remark=f"That ratio of copies of the images: {large_copy / small_copy / 16.0:.2f}.",
    )


def test_belief_propagation(race, results):
    rng = np.random.default_rng(0)
    log_root = jnp.log(jnp.array([0.5, 0.5]))
    log_transition = jnp.log(jnp.array([[0.9, 0.1], [0.2, 0.8]]))
    runs = []
    for side in (256, 1024):
        forest = wavelet_forest(wavelet_transform((side, side), "db2", NUM_LEVELS))
        evidence = jnp.asarray(rng.normal(size=(side * side, 2)))
        runs.append(compile_function(jax.jit(sum_product), forest, evidence, log_root, log_transition))
    seconds, peer_seconds = race(runs[1].run, runs[0].run, rounds=15)
    results.record(
        "belief propagation, quad-trees of 1024² nodes",
        peer="the same, 256²",
        times=(seconds, peer_seconds),
        figure="nanoseconds per node",
        value=1e9 * seconds / 1024**2,
        target=at_most(200),
        programs=(runs[1], runs[0]),
    )
