"""People of ten events each, on simulated chains of two groups: free matrices against two numbers integrated out.

``python -m benchmarks.sequences.few_events`` writes ``results/<date>-sequence-few-events.md``; ``--keys`` says how many
simulations there are.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
import optax
from jax import random

from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.models import collaborative_rnn
from numpyro_ext.sequences import EventSequences, EventSplit

from ..harness import table_head, write_report

RANK = 2


def engine(learning_rate: float, **options: Any) -> ChunkedSVI:
    """Engine of all networks."""
    return ChunkedSVI(
        collaborative_rnn, optim=optax.adam(learning_rate), plate="users", batch_size=20, progress_bar=False, **options
    )


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


def few_events(keys: int) -> list[str]:
    """Two groups with chains of their own and ten events a person: free matrices against two numbers a person."""
    rows = []
    # one each, since an engine keeps the programs of its last options
    free_matrices, all_alike = engine(0.03, chunk=16), engine(0.03, chunk=16)
    integrated = engine(0.01, chunk=16, local="laplace")
    run: dict[str, Any] = {"num_epochs": 200, "patience": 25, "width": 8}
    for key in range(keys):
        rng = np.random.default_rng(key)
        chains = rng.dirichlet(np.full(20, 0.1), (2, 20))[np.arange(40) % 2]
        items = drawn(chains, 63, rng)
        train, validation, test = (log_of(part, 20) for part in np.split(items, [10, 13], axis=1))
        split = EventSplit(train, validation, test)
        true = -np.log(chains[np.arange(40)[:, None], items[:, 12:-1], items[:, 13:]]).mean()
        free = free_matrices.run(random.key(key), split, personal="full", **run)
        pooled = all_alike.run(random.key(key), split, personal="none", **run)
        begun: dict[str, Any] = {"personal": "low-rank", "rank": RANK, "init_params": pooled.params}
        people = integrated.run(random.key(key), split, **begun, **run)
        errors = [-fit.log_predictive(split).mean() for fit in (free, pooled)]
        errors.append(-people.log_predictive(split).mean())
        shown = " | ".join(f"{error:.3f}" for error in (true, *errors))
        rows.append(f"| {key} | {shown} | {errors[2] - errors[0]:+.3f} |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=5)
    keys = parser.parse_args().keys
    lines = [
        "# Ten events of each person",
        "",
        "Two groups with chains of their own, 40 people, 20 items, 10 events each, 3 to stop by, 50 to be predicted.",
        "Nats per event. Width 8, tanh, Adam 0.03; two numbers of a person, integrated out, begin at the pooled",
        "network, Adam 0.01. Wanted of five simulations: they are at least 0.1 below free matrices.",
        "",
        *table_head(
            "simulation | true chains | free matrices | pooled | two numbers, integrated out | less free matrices"
        ),
        *few_events(keys),
    ]
    write_report("sequence-few-events", lines, "sequences.few_events")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
