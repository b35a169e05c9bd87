"""Two groups of people with chains of several kinds: matrices of their own beside pooled networks and counts.

``python -m benchmarks.sequences.chain_groups`` writes ``results/<date>-sequence-chain-groups.md``: networks of width 8
on 200 events of each of 40 people, the same where people of a group share a matrix, 2,000 events of each of ten, and
ten events of each of 40.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax import random

from numpyro_ext.sequences import Bigram, EventSequences, EventSplit, OwnBigram, PersonalMixture, Predictor

from ..harness import Study, blocks, table
from .setup import network

NUM_ITEMS, WIDTH, RANK = 20, 8, 2


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


def drawn(chains: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """Items of each person's chain, shape ``(people, length)``; the first is uniform."""
    items = np.zeros((len(chains), length), int)
    items[:, 0] = rng.integers(chains.shape[-1], size=len(chains))
    for place in range(1, length):
        rows = chains[np.arange(len(chains)), items[:, place - 1]]
        items[:, place] = (rng.random(len(chains))[:, None] > rows.cumsum(-1)).sum(-1).clip(max=chains.shape[-1] - 1)
    return items


def log_of(items: np.ndarray) -> EventSequences:
    lengths = np.full(len(items), items.shape[1])
    return EventSequences(items.ravel(), lengths, np.arange(NUM_ITEMS), np.arange(len(items)))


def simulated(
    chains: np.ndarray, rng: np.random.Generator, people: int, num_events: tuple[int, int, int]
) -> tuple[EventSplit, float]:
    """Training, validation and test of people of two groups in turn, and the error of the true chains."""
    own, before = chains[np.arange(people) % 2], sum(num_events[:2])
    items = drawn(own, sum(num_events), rng)
    parts = np.split(items, np.cumsum(num_events)[:2], axis=1)
    true = -np.log(own[np.arange(people)[:, None], items[:, before - 1 : -1], items[:, before:]]).mean()
    return EventSplit(*map(log_of, parts)), float(true)


def error(predictor: Predictor, split: EventSplit) -> float:
    return float(-predictor.log_predictive(split).mean())


def one_person_a_group(split: EventSplit) -> EventSplit:
    """The events of all people of a group end to end."""

    def joined(part: EventSequences) -> EventSequences:
        own = [np.concatenate([part[user] for user in range(group, part.num_users, 2)]) for group in range(2)]
        return EventSequences(np.concatenate(own), np.array([len(o) for o in own]), part.item_labels, np.arange(2))

    return EventSplit(joined(split.train), joined(split.validation), joined(split.test))


def many_events(key: int, kind: Callable[[np.random.Generator], np.ndarray]) -> list[float]:
    """Errors of the true chains, of counts and of networks, of 200 and of 2,000 events."""
    rng = np.random.default_rng(key)
    chains = kind(rng)
    split, true = simulated(chains, rng, 40, (200, 20, 50))
    run: dict[str, Any] = {"num_epochs": 400, "patience": 25, "width": WIDTH}
    engine, start = network(optax.adam(0.01)), random.key(key)
    found: list[Predictor] = [part.fit(split.train, split.validation) for part in (Bigram(), OwnBigram(0.1))]
    found.append(PersonalMixture().fit(split.train, split.validation))
    found += [engine.run(start, split, personal=personal, **run) for personal in ("none", "full")]
    of_groups = network(optax.adam(0.01), batch_size=2).run(
        start, one_person_a_group(split), personal="full", num_epochs=150, patience=15, width=WIDTH
    )
    each = network(optax.adam(0.01)).run(start, split, personal="full", num_epochs=1, width=WIDTH)
    own = jnp.stack([of_groups.params["W_h"][user % 2] for user in range(40)])
    each.params = {**of_groups.params, "W_h": own}
    longer, true_longer = simulated(chains, rng, 10, (2000, 100, 200))
    engine, run = network(optax.adam(0.01), batch_size=10), {"num_epochs": 60, "patience": 8, "width": WIDTH}
    fits = [engine.run(start, longer, personal=personal, **run) for personal in ("none", "full")]
    return [true, *(error(one, split) for one in (*found, each)), true_longer, *(error(fit, longer) for fit in fits)]


ENGINES = {
    "free matrices": network(optax.adam(0.03), chunk=16),
    "pooled": network(optax.adam(0.03), chunk=16),
    "two numbers, integrated out": network(optax.adam(0.01), chunk=16, local="laplace"),
}
"""One each, since an engine keeps the programs of its last options."""


def few_events(key: int) -> list[float]:
    """Errors of the true chains, of free matrices, of a pooled network and of two numbers a person."""
    rng = np.random.default_rng(key)
    split, true = simulated(unrelated(rng), rng, 40, (10, 3, 50))
    run: dict[str, Any] = {"num_epochs": 200, "patience": 25, "width": WIDTH}
    free, pooled, people = ENGINES.values()
    fits = [free.run(random.key(key), split, personal="full", **run)]
    fits.append(pooled.run(random.key(key), split, personal="none", **run))
    begun: dict[str, Any] = {"personal": "low-rank", "rank": RANK, "init_params": fits[1].params}
    fits.append(people.run(random.key(key), split, **begun, **run))
    return [true, *(error(fit, split) for fit in fits)]


def main() -> None:
    kinds = {kind.__name__.replace("_", " "): partial(many_events, kind=kind) for kind in KINDS}
    study = Study(
        __doc__, kinds | {"few events": few_events}, draws=dict.fromkeys(kinds, 1) | {"unrelated": 5, "few events": 5}
    )
    found = study.run()
    lines = blocks(
        "# Two groups of people with chains of several kinds",
        "40 people, 20 items, 200 events each, 20 to stop by, 50 to be predicted; ten people of 2,000 events. Nats per "
        "event. Width 8, tanh, Adam 0.01, the best epoch on the validation. Wanted of free matrices with unrelated "
        "chains: at least 0.1 below the pooled network and pairs of all, and at most 0.15 above the true chains.",
        table(
            "chains | true | 2-gram | own 2-gram | counts mixed | pooled | free matrices | matrices of the groups | "
            "2,000 events: true | pooled | free matrices",
            ((kind, *(f"{value:.3f}" for value in errors)) for kind in kinds for errors in found[kind]),
        ),
        "Unrelated chains with ten events each, 3 to stop by; Adam 0.03; two numbers of a person, integrated out, "
        "begin at the pooled network, Adam 0.01. Wanted: they are at least 0.1 below free matrices.",
        table(
            f"true chains | {' | '.join(ENGINES)} | less free matrices",
            ((*(f"{e:.3f}" for e in errors), f"{errors[3] - errors[1]:+.3f}") for errors in found["few events"]),
        ),
    )
    study.write("sequence-chain-groups", lines)


if __name__ == "__main__":
    main()
