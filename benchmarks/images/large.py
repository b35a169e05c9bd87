"""A large picture denoised in one basis, in a process of its own: seconds and memory, compilation apart, as JSON."""

from __future__ import annotations

import argparse
import json
import resource
import time

import jax
import numpy as np

from numpyro_ext.infer import EP
from numpyro_ext.models import wavelet_denoising

from .peers import decibels
from .pictures import NOISE, photograph

_SIDE = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", type=int)
    side = parser.parse_args().side
    # Mirror images of one photograph side by side: all sizes have the same statistics, and no edges at the seams.
    image = np.pad(photograph(_SIDE), [(0, side - _SIDE)] * 2, mode="symmetric").astype(np.float32)
    noisy = image + NOISE * np.random.default_rng(0).standard_normal(image.shape, np.float32)
    before = _peak_bytes()

    def fit(max_hyper_steps: int) -> tuple[EP, np.ndarray]:
        engine = EP(wavelet_denoising, max_hyper_steps=max_hyper_steps, progress_bar=False)
        engine.run(jax.random.key(1), noisy, NOISE)
        return engine, np.asarray(engine.posterior["image"].mean)

    start = time.process_time()
    fit(1)  # compiles
    first = time.process_time() - start
    start = time.process_time()
    engine, mean = fit(300)
    end = engine.diagnostics
    result = {
        "seconds": time.process_time() - start,
        "first": first,
        "evaluations": end.hyper.num_evaluations,
        "converged": end.converged,
        "decibels": decibels(image, mean),
        "bytes": _peak_bytes() - before,
        "dtype": str(mean.dtype),
    }
    print(json.dumps(result))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
