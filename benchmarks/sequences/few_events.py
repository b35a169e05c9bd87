"""People of ten events each, on simulated chains of two groups: free matrices against two numbers integrated out.

``python -m benchmarks.sequences.few_events`` writes ``results/<date>-sequence-few-events.md``; ``--draws`` says how
many simulations there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
from jax import random

from numpyro_ext.sequences import EventSequences, EventSplit

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


def few_events(key: int) -> list[float]:
    """Errors of the true chains, of free matrices, of a pooled network and of two numbers a person."""
    free, pooled, people = ENGINES.values()
    rng = np.random.default_rng(key)
    chains = rng.dirichlet(np.full(20, 0.1), (2, 20))[np.arange(40) % 2]
    items = drawn(chains, 63, rng)
    train, validation, test = (log_of(part, 20) for part in np.split(items, [10, 13], axis=1))
    split = EventSplit(train, validation, test)
    true = -np.log(chains[np.arange(40)[:, None], items[:, 12:-1], items[:, 13:]]).mean()
    run: dict[str, Any] = {"num_epochs": 200, "patience": 25, "width": 8}
    fits = [engine.run(random.key(key), split, personal=personal, **run)
            for engine, personal in ((free, "full"), (pooled, "none"))]  # fmt: skip
    begun: dict[str, Any] = {"personal": "low-rank", "rank": RANK, "init_params": fits[1].params}
    fits.append(people.run(random.key(key), split, **begun, **run))
    return [float(true), *(float(-fit.log_predictive(split).mean()) for fit in fits)]


def main() -> None:
    study = Study(__doc__, {"key": few_events}, draws=5)
    rows = (
        (key, *(f"{error:.3f}" for error in errors), f"{errors[3] - errors[1]:+.3f}")
        for key, errors in enumerate(study.run()["key"])
    )
    lines = blocks(
        "# Ten events of each person",
        "Two groups with chains of their own, 40 people, 20 items, 10 events each, 3 to stop by, 50 to be predicted. "
        "Nats per event. Width 8, tanh, Adam 0.03; two numbers of a person, integrated out, begin at the pooled "
        "network, Adam 0.01. Wanted of five simulations: they are at least 0.1 below free matrices.",
        table(f"simulation | true chains | {' | '.join(ENGINES)} | less free matrices", rows),
    )
    study.write("sequence-few-events", lines)


if __name__ == "__main__":
    main()
