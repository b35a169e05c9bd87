"""Two groups of people with chains of several kinds: free matrices beside pooled networks and counts.

``python -m benchmarks.sequences.chain_groups`` writes ``results/<date>-sequence-chain-groups.md``: networks of width 8
on 200 events of each of 40 people, the same where people of a group share a matrix, and 2,000 events of each of ten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import random

from numpyro_ext.sequences import Bigram, EventSequences, EventSplit, OwnBigram, PersonalMixture, Predictor

from ..harness import blocks, table, write_report
from .few_events import drawn, log_of
from .setup import network

NUM_ITEMS, WIDTH = 20, 8


def unrelated(rng: np.random.Generator) -> np.ndarray:
    """Rows of a sparse Dirichlet distribution."""
    return rng.dirichlet(np.full(NUM_ITEMS, 0.1), (2, NUM_ITEMS))


def permutations(rng: np.random.Generator, noise: float = 0.2) -> np.ndarray:
    """One follower of each item, another in each group, and uniform noise."""
    chains = np.full((2, NUM_ITEMS, NUM_ITEMS), noise / NUM_ITEMS)
    for chain in chains:
        chain[np.arange(NUM_ITEMS), rng.permutation(NUM_ITEMS)] += 1.0 - noise
    return chains


def preferred(rng: np.random.Generator) -> np.ndarray:
    """Two followers of each item, of which each group prefers another one."""
    chains = np.full((2, NUM_ITEMS, NUM_ITEMS), 0.1 / NUM_ITEMS)
    pairs = np.array([rng.choice(NUM_ITEMS, 2, replace=False) for _ in range(NUM_ITEMS)])
    for group in range(2):
        chains[group, np.arange(NUM_ITEMS), pairs[:, group]] += 0.9 * 0.8
        chains[group, np.arange(NUM_ITEMS), pairs[:, 1 - group]] += 0.9 * 0.2
    return chains


def tilted(rng: np.random.Generator) -> np.ndarray:
    """The same chain, in which each group prefers another half of the items."""
    base = rng.dirichlet(np.full(NUM_ITEMS, 0.3), NUM_ITEMS)
    tilt = 1.2 * rng.permutation(np.repeat([-1, 1], NUM_ITEMS // 2))
    chains = np.stack([base * np.exp(tilt), base * np.exp(-tilt)])
    return chains / chains.sum(-1, keepdims=True)


def rings(rng: np.random.Generator) -> np.ndarray:
    """One to five steps on a ring, forwards or backwards."""
    steps = (np.arange(NUM_ITEMS) - np.arange(NUM_ITEMS)[:, None]) % NUM_ITEMS
    forwards = 0.9 * ((steps >= 1) & (steps <= 5)) / 5 + 0.1 / NUM_ITEMS
    return np.stack([forwards, forwards.T])


def low_rank(rng: np.random.Generator) -> np.ndarray:
    """Logits of rank three, with loadings of the group."""
    logits = 1.5 * np.einsum("ir,gjr->gij", rng.normal(size=(NUM_ITEMS, 3)), rng.normal(size=(2, NUM_ITEMS, 3)))
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


KINDS: tuple[Callable[[np.random.Generator], np.ndarray], ...] = (
    unrelated,
    permutations,
    preferred,
    tilted,
    rings,
    low_rank,
)


class Simulated(NamedTuple):
    """Events of people of two groups in turn."""

    split: EventSplit
    true: float
    """Error of the true chains."""


def simulated(chains: np.ndarray, rng: np.random.Generator, people: int, num_events: tuple[int, int, int]) -> Simulated:
    """Training, validation and test of so many people."""
    own, before = chains[np.arange(people) % 2], sum(num_events[:2])
    items = drawn(own, sum(num_events), rng)
    parts = np.split(items, np.cumsum(num_events)[:2], axis=1)
    true = -np.log(own[np.arange(people)[:, None], items[:, before - 1 : -1], items[:, before:]]).mean()
    return Simulated(EventSplit(*(log_of(part, NUM_ITEMS) for part in parts)), float(true))


def error(predictor: Predictor, split: EventSplit) -> float:
    return float(-predictor.log_predictive(split).mean())


def one_person_a_group(split: EventSplit) -> EventSplit:
    """The events of all people of a group end to end."""

    def joined(part: EventSequences) -> EventSequences:
        own = [np.concatenate([part[user] for user in range(group, part.num_users, 2)]) for group in range(2)]
        return EventSequences(np.concatenate(own), np.array([len(o) for o in own]), part.item_labels, np.arange(2))

    return EventSplit(joined(split.train), joined(split.validation), joined(split.test))


def row(kind: Callable[[np.random.Generator], np.ndarray], key: int = 0) -> Iterable[Any]:
    """Errors of the true chains, of counts and of networks."""
    rng = np.random.default_rng(key)
    chains = kind(rng)
    split, true = simulated(chains, rng, 40, (200, 20, 50))
    run: dict[str, Any] = {"num_epochs": 400, "patience": 25, "width": WIDTH}
    engine, start = network(optax.adam(0.01)), random.key(key)
    counts: list[Predictor] = [part.fit(split.train, split.validation) for part in (Bigram(), OwnBigram(0.1))]
    counts.append(PersonalMixture().fit(split.train, split.validation))
    pooled = engine.run(start, split, personal="none", **run)
    free = engine.run(start, split, personal="full", **run)
    of_groups = network(optax.adam(0.01), batch_size=2).run(
        start, one_person_a_group(split), personal="full", num_epochs=150, patience=15, width=WIDTH
    )
    each = network(optax.adam(0.01)).run(start, split, personal="full", num_epochs=1, width=WIDTH)
    own = jnp.stack([of_groups.params["W_h"][user % 2] for user in range(40)])
    each.params = {**of_groups.params, "W_h": own}
    longer, true_longer = simulated(chains, rng, 10, (2000, 100, 200))
    engine, run = network(optax.adam(0.01), batch_size=10), {"num_epochs": 60, "patience": 8, "width": WIDTH}
    fits = [engine.run(start, longer, personal=personal, **run) for personal in ("none", "full")]
    errors = [true, *(error(found, split) for found in (*counts, pooled, free, each))]
    errors += [true_longer, *(error(fit, longer) for fit in fits)]
    return kind.__name__.replace("_", " "), *(f"{value:.3f}" for value in errors)


def main() -> None:
    columns = (
        "chains | true | 2-gram | own 2-gram | counts mixed | pooled | free matrices | matrices of the groups | "
        "2,000 events: true | pooled | free matrices"
    )
    lines = blocks(
        "# Two groups of people with chains of several kinds",
        "40 people, 20 items, 200 events each, 20 to stop by, 50 to be predicted; ten people of 2,000 events. Nats per "
        "event. Width 8, tanh, Adam 0.01, the best epoch on the validation.",
        table(columns, map(row, KINDS)),
    )
    write_report("sequence-chain-groups", lines)


if __name__ == "__main__":
    main()
