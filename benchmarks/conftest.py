"""Fixtures of the benchmarks: the table of results, and measurement in turns with a peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from .harness.results_table import ResultsTable

jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="session")
def results() -> Iterator[ResultsTable]:
    """Rows of this session, written when it ends, whatever became of its tests."""
    table = ResultsTable()
    yield table
    table.write(Path(__file__).parent / "results")


@pytest.fixture
def race(benchmark: Any) -> Callable[..., tuple[float, ...]]:
    """Shortest times of several functions that take turns, so that what else the machine does falls on all of them.

    The first is shown in pytest-benchmark's table.
    """

    def run(ours: Callable[[], Any], *peers: Callable[[], Any], rounds: int) -> tuple[float, ...]:
        best = [float("inf")] * len(peers)

        def time_peers() -> None:
            for i, peer in enumerate(peers):
                start = time.perf_counter()
                peer()
                best[i] = min(best[i], time.perf_counter() - start)

        benchmark.pedantic(ours, setup=time_peers, rounds=rounds, warmup_rounds=1)
        return benchmark.stats.stats.min, *best

    return run
