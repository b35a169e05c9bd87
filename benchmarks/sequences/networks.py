"""Recurrent networks beside counts: errors alone, and what each adds to a mixture of counts.

``python -m benchmarks.sequences.networks`` writes ``results/<date>-sequence-networks.md``; ``--keys`` says how many
keys are tried on edits of Wikipedia, and one is on films. Data are below ``NUMPYRO_EXT_DATA``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import optax
from jax import random

from numpyro_ext.datasets import load_movielens_events, load_wikipedia_edits
from numpyro_ext.sequences import Bigram, EventSplit, PersonalMixture, compare_sequences

from ..harness import blocks, cpu_seconds, table, write_report
from .setup import divided, network

NETWORKS: dict[str, dict[str, Any]] = {
    "pooled GRU, width 64": {"cell": "gru", "personal": "none", "width": 64},
    "GRU by user, width 32": {"cell": "gru", "personal": "full", "width": 32},
    "tanh by user, width 32": {"cell": "tanh", "personal": "full", "width": 32},
    "GRU, deviations by user, width 64": {"cell": "gru", "personal": "deviation", "width": 64},
    "GRU, 8 numbers a user, width 64": {"cell": "gru", "personal": "low-rank", "width": 64, "rank": 8},
}
"""The first is where latent personal parts begin, key by key."""
ON_FILMS = "pooled GRU, width 64", "GRU by user, width 32"
COLUMNS = (
    "network | key | alone | with five counts | change (s.e., paired over users) | with a gate | "
    "weight at histories below 10, 30, 100 and more | training, CPU-seconds"
)


def compared(split: EventSplit, names: Iterable[str], num_keys: int) -> Iterator[Iterable[Any]]:
    """Rows of the table of one log."""
    for key in range(num_keys):
        pooled: dict[str, Any] = {}
        for name in names:
            options = NETWORKS[name]
            is_latent = options["personal"] in ("deviation", "low-rank")
            optim = optax.rmsprop(0.003, decay=0.997, bias_correction=True) if is_latent else None
            engine = network(optim, guide_scale=0.05 if is_latent else None)
            given = {"num_epochs": 25, "patience": 3, **options, **({"init_params": pooled} if is_latent else {})}
            fit, seconds = cpu_seconds(engine.run, random.key(key), split, **given)
            pooled = pooled or fit.params
            is_pooled = options["personal"] == "none"
            mixtures = {"counts": PersonalMixture(), "with it": PersonalMixture(network=fit)}
            if is_pooled:
                mixtures["with a gate"] = PersonalMixture(network=fit, gate=True)
            found = compare_sequences({"network": fit, **mixtures}, split)
            gain, error = found.difference("with it", "counts")
            weights = ", ".join(f"{weight:.2f}" for weight in np.asarray(mixtures["with it"].weights)[:, -1])
            errors = [f"{found[which].error:.3f}" for which in ("network", "with it")]
            gated = f"{found['with a gate'].error:.3f}" if is_pooled else ""
            yield name, key, *errors, f"{gain:+.3f} ({error:.3f})", gated, weights, f"{seconds:.0f}"


def counts_of(split: EventSplit) -> str:
    found = compare_sequences({"2-gram": Bigram(0.01), "five counts mixed": PersonalMixture()}, split)
    return ", ".join(f"{name} {found[name].error:.3f}" for name in found.predictors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=3)
    num_keys = parser.parse_args().keys
    edits, films = divided(load_wikipedia_edits()), divided(load_movielens_events())
    lines = blocks(
        "# What a network knows beside counts",
        "Nats per test event, mean over users. Networks by `ChunkedSVI` (RMSprop 0.0075 with bias corrected, 20 users "
        "and 64 events a step, at most 25 epochs, the best on validation), trained without the validation. Latent "
        "personal parts by `AutoNormal`, RMSprop 0.003: it begins at the prior's mean, with deviations of 0.05, and at "
        "the pooled network of the same key. The mixture has its weights, also that of the network, by EM on the "
        "validation; with a gate they depend on the state of the network.",
        "## Edits of Wikipedia",
        f"{edits.test.num_users} users, {edits.test.num_items} items. Counts alone: {counts_of(edits)}.",
        table(COLUMNS, compared(edits, NETWORKS, num_keys)),
        "Wanted of a network alone: pooled at most 3.85, by user 4.10, deviations 3.70; of the change: at most -0.09 "
        "and four standard errors; with a gate no more than without.",
        "## Films in the order of their ratings",
        f"{films.test.num_users} users, {films.test.num_items} items. Counts alone: {counts_of(films)}.",
        table(COLUMNS, compared(films, ON_FILMS, 1)),
    )
    write_report("sequence-networks", lines)


if __name__ == "__main__":
    main()
