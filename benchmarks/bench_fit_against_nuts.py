"""Whole fits, from the model function to 1000 draws, against NUTS: cold and warm, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .fit_once import NUM_SAMPLES, NUM_WARMUP, PROBLEMS
from .results_table import Row, at_least

ROOT = Path(__file__).parents[1]


def fit(engine: str, problem: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.fit_once", engine, problem]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def errors(ep: dict[str, Any], nuts: dict[str, Any]) -> tuple[float, float]:
    """Errors of the posterior means of EP and of NUTS in standard deviations, root mean square over the elements.

    That of NUTS is its Monte Carlo error; that of EP is its distance to NUTS, less the part that is NUTS's.
    """
    sampling = np.mean(1.0 / np.array(nuts["effective_sample_size"]))
    distance = np.mean(((np.array(ep["mean"]) - nuts["mean"]) / nuts["deviation"]) ** 2)
    return float(np.sqrt(max(distance - sampling, 0.0))), float(np.sqrt(sampling))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_whole_fit(benchmark, results, problem):
    ep: dict[str, Any] = benchmark.pedantic(fit, args=("EP", problem), rounds=1)
    nuts = fit("NUTS", problem)
    ep_error, nuts_error = errors(ep, nuts)
    # To be as inaccurate as EP, NUTS needs fewer draws; its warmup, which is a third of the transitions, remains.
    share = min(1.0, (nuts_error / ep_error) ** 2) if ep_error > 0.0 else 1.0
    length = (NUM_WARMUP + share * NUM_SAMPLES) / (NUM_WARMUP + NUM_SAMPLES)
    remark = (
        f"Error of the means in posterior standard deviations: EP {ep_error:.3f}, NUTS {nuts_error:.3f} (smallest"
        f" effective sample size {min(nuts['effective_sample_size']):.0f} of {NUM_SAMPLES})."
    )
    for temperature, target in (("cold", 3), ("warm", 30)):
        seconds, nuts_seconds = ep[f"{temperature}_seconds"], nuts[f"{temperature}_seconds"]
        compiling = nuts["cold_seconds"] - nuts["warm_seconds"] if temperature == "cold" else 0.0
        peer_seconds = compiling + length * (nuts_seconds - compiling)
        results.add(
            Row(
                item=f"whole fit, {problem}, {temperature}",
                dtype="float64",
                seconds=seconds,
                peer="NUTS",
                peer_seconds=peer_seconds,
                figure="speed-up",
                value=peer_seconds / seconds,
                target=at_least(target),
                compile_seconds=ep["cold_seconds"] - ep["warm_seconds"],
                peak_bytes=ep["peak_bytes"],
                peer_peak_bytes=nuts["peak_bytes"],
                remark=(
                    f"{remark} Its {NUM_WARMUP} + {NUM_SAMPLES} transitions took {nuts_seconds:.3g} s; the time is that"
                    f" of a run cut to EP's accuracy, {share * NUM_SAMPLES:.0f} draws."
                ),
            )
        )
