"""People of ten events each, and of 200, on simulated chains of two groups: their own matrices and shared ones.

``python -m benchmarks.sequences.few_events`` writes ``results/<date>-sequence-few-events.md``; ``--draws`` says how
many simulations there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import optax
from jax import random

from numpyro_ext.sequences import Bigram, EventSequences, EventSplit, Predictor

from ..harness import Study, blocks, table
from .setup import network

RANK = 2


def drawn(chains: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """Items of each person's chain, shape ``(people, length)``; the first is uniform."""
    items = np.zeros((len(chains), length), int)
    items[:, 0] = rng.integers(chains.shape[-1], size=len(chains))
    for place in range(1, length):
        rows = chains[np.arange(len(chains)), items[:, place - 1]]
        items[:, place] = (rng.random(len(chains))[:, None] > rows.cumsum(-1)).sum(-1).clip(max=chains.shape[-1] - 1)
    return items


def log_of(items: np.ndarray, num_items: int) -> EventSequences:
    lengths = np.full(len(items), items.shape[1])
    return EventSequences(items.ravel(), lengths, np.arange(num_items), np.arange(len(items)))


ENGINES = {
    "free matrices": network(optax.adam(0.03), chunk=16),
    "pooled": network(optax.adam(0.03), chunk=16),
    "two numbers, integrated out": network(optax.adam(0.01), chunk=16, local="laplace"),
}
"""One each, since an engine keeps the programs of its last options."""


def simulated(key: int, num_events: tuple[int, int, int]) -> tuple[EventSplit, float]:
    """Training, validation and test of two groups with chains of their own, and the error of the true chains."""
    rng = np.random.default_rng(key)
    chains = rng.dirichlet(np.full(20, 0.1), (2, 20))[np.arange(40) % 2]
    items, before = drawn(chains, sum(num_events), rng), sum(num_events[:2])
    parts = np.split(items, np.cumsum(num_events)[:2], axis=1)
    true = -np.log(chains[np.arange(40)[:, None], items[:, before - 1 : -1], items[:, before:]]).mean()
    return EventSplit(*(log_of(part, 20) for part in parts)), float(true)


def few_events(key: int) -> list[float]:
    """Errors of the true chains, of free matrices, of a pooled network and of two numbers a person."""
    free, pooled, people = ENGINES.values()
    split, true = simulated(key, (10, 3, 50))
    run: dict[str, Any] = {"num_epochs": 200, "patience": 25, "width": 8}
    fits = [engine.run(random.key(key), split, personal=personal, **run)
            for engine, personal in ((free, "full"), (pooled, "none"))]  # fmt: skip
    begun: dict[str, Any] = {"personal": "low-rank", "rank": RANK, "init_params": fits[1].params}
    fits.append(people.run(random.key(key), split, **begun, **run))
    return [true, *(float(-fit.log_predictive(split).mean()) for fit in fits)]


def many_events(key: int) -> list[float]:
    """Errors of the true chains, of free matrices, of a pooled network and of pairs of all."""
    split, true = simulated(key, (200, 20, 50))
    run: dict[str, Any] = {"num_epochs": 150, "patience": 10, "width": 8}
    fits: list[Predictor] = [
        network(optax.adam(0.01), chunk=32).run(random.key(key), split, personal=personal, **run)
        for personal in ("full", "none")
    ]
    fits.append(Bigram().fit(split.train, split.validation))
    return [true, *(float(-fit.log_predictive(split).mean()) for fit in fits)]


def main() -> None:
    study = Study(__doc__, {"key": few_events, "many": many_events}, draws=5)
    found = study.run()

    def rows(name: str, first: int, second: int) -> Iterator[Iterable[Any]]:
        for key, errors in enumerate(found[name]):
            yield key, *(f"{error:.3f}" for error in errors), f"{errors[first] - errors[second]:+.3f}"

    lines = blocks(
        "# Ten events of each person, and two hundred",
        "Two groups with chains of their own, 40 people, 20 items, 10 events each, 3 to stop by, 50 to be predicted. "
        "Nats per event. Width 8, tanh, Adam 0.03; two numbers of a person, integrated out, begin at the pooled "
        "network, Adam 0.01. Wanted of five simulations: they are at least 0.1 below free matrices.",
        table(f"simulation | true chains | {' | '.join(ENGINES)} | less free matrices", rows("key", 3, 1)),
        "The same with 200 events each, 20 to stop by, 50 to be predicted; Adam 0.01. Wanted of free matrices: at "
        "least 0.1 below the pooled network and pairs of all, and at most 0.15 above the true chains.",
        table("simulation | true chains | free matrices | pooled | 2-gram | free less pooled", rows("many", 1, 2)),
    )
    study.write("sequence-few-events", lines)


if __name__ == "__main__":
    main()
