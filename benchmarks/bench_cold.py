"""First and next fits and those of a new process, in CPU-seconds beside NUTS and SVI."""

from __future__ import annotations

from typing import Any

import pytest

from .harness import at_most, in_own_process
from .runs.once import ENGINES, NUM_SAMPLES, NUM_SVI_STEPS, NUM_WARMUP, PEERS, SMALL

FIRST = {"few-rows": 2.0, "random-intercepts": 5.0}
"""CPU-seconds that a first fit of EP may take; others may take those of the Laplace engine before."""
FIRST_OF_OTHERS = {"few-rows": 1.9, "random-intercepts": 7.2}
NEXT, NEW_PROCESS = 0.1, 1.5
NUM_ROUNDS = 3
NAMES = {
    "NUTS": f"NUTS, {NUM_WARMUP} + {NUM_SAMPLES} transitions",
    "SVI": f"SVI, {NUM_SVI_STEPS} steps",
}


def cold(engine: str, problem: str, *options: str) -> dict[str, Any]:
    return in_own_process("runs.once", engine, problem, *options)


@pytest.fixture(scope="module")
def peers() -> dict[tuple[str, str], dict[str, Any]]:
    return {(peer, problem): cold(peer, problem) for peer in PEERS for problem in SMALL}


@pytest.mark.parametrize("problem", SMALL)
@pytest.mark.parametrize("engine", ENGINES)
def test_cold(benchmark, results, peers, tmp_path, engine, problem):
    found: dict[str, Any] = benchmark.pedantic(cold, args=(engine, problem), rounds=1)
    cold(engine, problem, f"--cache={tmp_path}")
    processes = [cold(engine, problem, f"--cache={tmp_path}")["first"] for _ in range(NUM_ROUNDS)]
    kept = min(processes, key=lambda process: process["cpu"])
    first = (FIRST if engine == "EP" else FIRST_OF_OTHERS)[problem]
    fits = {
        "first fit": (found["first"]["cpu"], "first", at_most(first)),
        "next fit": (found["next"]["cpu"], "next", at_most(NEXT)),
        "other groups": (found["other groups"]["cpu"], "other groups", at_most(NEXT)),
        "first fit of a new process, programs kept": (kept["cpu"], "first", at_most(NEW_PROCESS)),
    }
    for item, (seconds, kind, target) in fits.items():
        for peer in PEERS:
            results.record(
                f"{item}, {engine}, {problem}",
                peer=NAMES[peer],
                times=(seconds, peers[peer, problem][kind]["cpu"]),
                figure="CPU-seconds",
                target=target,
            )


def test_many_hyperparameters(benchmark, results):
    """EP beside Laplace's method where 96 numbers are learned: the least of some rounds in turns."""
    ep, laplace = [], []

    def once() -> None:
        ep.append(cold("EP", "graded-response"))
        laplace.append(cold("LaplaceApproximation", "graded-response"))

    benchmark.pedantic(once, rounds=NUM_ROUNDS)
    for kind in ("first", "next", "other groups"):
        seconds, others = (min(found[kind]["cpu"] for found in runs) for runs in (ep, laplace))
        results.record(
            f"{kind if kind == 'other groups' else f'{kind} fit'}, EP, graded response",
            peer="LaplaceApproximation",
            times=(seconds, others),
            figure="times the peer's CPU-seconds",
            target=at_most(3.0),
        )
