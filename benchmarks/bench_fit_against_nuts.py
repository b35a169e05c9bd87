"""Whole fits, from the model function to 1000 draws, against NUTS: cold and warm, each in a process of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .harness import at_least, in_own_process
from .runs.once import LARGE, NUM_SAMPLES, NUM_WARMUP


def fit(engine: str, problem: str, num_samples: int = NUM_SAMPLES) -> dict[str, Any]:
    return in_own_process("runs.once", engine, problem, f"--num-samples={num_samples}")


def error_bound(ep: dict[str, Any], reference: dict[str, Any]) -> float:
    """Error of EP's posterior means in standard deviations, root mean square over the elements: an upper bound.

    The mean square of its distance to the reference, less the part that is the reference's own Monte Carlo error, plus
    two standard deviations of that part.
    """
    own = np.mean(1.0 / np.array(reference["effective_sample_size"]))
    distance = np.mean(((np.array(ep["mean"]) - reference["mean"]) / reference["deviation"]) ** 2)
    return float(np.sqrt(max(distance - own, 0.0) + 2.0 * own * np.sqrt(2.0 / len(ep["mean"]))))


def seconds_of_draws(num_draws: float, nuts: dict[str, Any], reference: dict[str, Any], num_more: int) -> float:
    """Seconds that so many draws, more or (negative) fewer, add to the time of NUTS.

    More draws cost what the ``num_more`` ones of the reference did, or nothing if there is none. Fewer save their share
    of the transitions, which is generous to NUTS because those of the warmup take longer.
    """
    if num_draws < 0:
        return num_draws / (NUM_WARMUP + NUM_SAMPLES) * nuts["next"]["cpu"]
    if num_more == 0:
        return 0.0
    return num_draws / num_more * (reference["next"]["cpu"] - nuts["next"]["cpu"])


@pytest.mark.parametrize("problem", LARGE)
def test_whole_fit(benchmark, results, problem):
    ep: dict[str, Any] = benchmark.pedantic(fit, args=("EP", problem), rounds=1)
    nuts = fit("NUTS", problem)
    num_reference = LARGE[problem].num_reference_samples
    reference = nuts if num_reference == NUM_SAMPLES else fit("NUTS", problem, num_reference)

    ep_error = error_bound(ep, reference)
    nuts_error = float(np.sqrt(np.mean(1.0 / np.array(nuts["effective_sample_size"]))))
    num_draws = NUM_SAMPLES * (nuts_error / ep_error) ** 2
    extra_seconds = seconds_of_draws(num_draws - NUM_SAMPLES, nuts, reference, num_reference - NUM_SAMPLES)
    for temperature, kind, target in (("cold", "first", 3), ("warm", "next", 30)):
        seconds, nuts_seconds = ep[kind]["cpu"], nuts[kind]["cpu"]
        run = f"NUTS, {NUM_WARMUP} + {NUM_SAMPLES} transitions"
        peers = {run: nuts_seconds, "NUTS, equally accurate (calculated)": nuts_seconds + extra_seconds}
        for peer, peer_seconds in peers.items():
            results.record(
                f"whole fit, {problem}, {temperature}",
                peer=peer,
                times=(seconds, peer_seconds),
                figure="speed-up",
                target=at_least(target),
                compile_seconds=ep["first"]["cpu"] - ep["next"]["cpu"],
                peak_bytes=ep["peak_bytes"],
                peer_peak_bytes=nuts["peak_bytes"],
                remark=f"Error of the means of {run} {nuts_error:.3f} posterior deviations, of EP's {ep_error:.3f} at "
                f"most, against a reference of {num_reference} draws; equal after {num_draws:.0f} draws.",
            )
