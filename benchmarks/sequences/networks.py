"""Recurrent networks beside counts, on edits of Wikipedia: errors alone, and what each adds to a mixture of counts.

``python -m benchmarks.sequences.networks`` writes ``results/<date>-sequence-networks.md``; ``--seeds`` says how many
keys are tried of networks without latent parts. Data are below ``NUMPYRO_EXT_DATA``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jax import random

from numpyro_ext.datasets import load_wikipedia_edits
from numpyro_ext.sequences import Bigram, PersonalMixture, compare_sequences

from ..harness import blocks, cpu_seconds, table, write_report
from .setup import divided, network

NETWORKS: dict[str, dict[str, Any]] = {
    "pooled GRU, width 32": {"cell": "gru", "personal": "none", "width": 32},
    "pooled GRU, width 64": {"cell": "gru", "personal": "none", "width": 64},
    "GRU by user, width 32": {"cell": "gru", "personal": "full", "width": 32},
    "tanh by user, width 32": {"cell": "tanh", "personal": "full", "width": 32},
    "GRU, deviations by user, width 32": {"cell": "gru", "personal": "deviation", "width": 32},
    "GRU, 8 numbers a user, width 64": {"cell": "gru", "personal": "low-rank", "width": 64, "rank": 8},
}
NUM_EPOCHS, PATIENCE = 25, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    num_seeds = parser.parse_args().seeds
    split = divided(load_wikipedia_edits())
    counts = {"2-gram": Bigram(0.01), "five counts mixed": PersonalMixture()}
    of_counts = compare_sequences(counts, split)
    pooled: dict[int, Any] = {}

    def rows() -> Iterator[Iterable[Any]]:
        for name, options in NETWORKS.items():
            is_latent = options["personal"] in ("deviation", "low-rank")
            for seed in range(1 if is_latent else num_seeds):
                begun = {"init_params": pooled[options["width"]]} if is_latent else {}
                given = {"num_epochs": NUM_EPOCHS, "patience": PATIENCE, **options, **begun}
                engine = network(is_latent=is_latent)
                fit, seconds = cpu_seconds(lambda: engine.run(random.key(seed), split, **given))  # noqa: B023
                if options["personal"] == "none" and seed == 0:
                    pooled[options["width"]] = fit.params
                mixture = PersonalMixture(network=fit)
                table = compare_sequences({**counts, "network": fit, "with it": mixture}, split)
                gain, error = table.difference("with it", "five counts mixed")
                weights = ", ".join(f"{weight:.2f}" for weight in np.asarray(mixture.weights)[:, -1])
                errors = [f"{table[which].error:.3f}" for which in ("network", "with it")]
                yield name, seed, *errors, f"{gain:+.3f} ({error:.3f})", weights, f"{seconds:.0f}"

    lines = blocks(
        "# What a network knows beside counts",
        f"Edits of Wikipedia, {split.test.num_users} users, {split.test.num_items} items. Nats per test event, mean "
        "over users. Networks by `ChunkedSVI` (RMSprop 0.0075 with bias corrected, 20 users and 64 events a step, "
        f"at most {NUM_EPOCHS} epochs, "
        "the best on validation), trained without the validation; latent personal parts by `AutoNormal` that begins at "
        "the prior's mean and at the pooled network of the same width. The mixture has its weights, also that of the "
        "network, by EM on the validation.",
        f"Counts alone: {', '.join(f'{name} {of_counts[name].error:.3f}' for name in counts)}.",
        table(
            "network | key | alone | with five counts | change (s.e., paired over users) | "
            "weight at histories below 10, 30, 100 and more | training, CPU-seconds",
            rows(),
        ),
        "Wanted of a network alone: pooled at most 3.85, by user 4.10, deviations 3.70; of the change: at most -0.09. "
        "Without the correction of bias the first steps of RMSprop are 18 times as long as later ones: one key of "
        "three of the pooled network then ended at 5.529, networks by user at 4.6 and 4.9. A guide that begins at "
        "random numbers, as AutoNormal does by itself, ended at 6.7 and 6.8.",
    )
    write_report("sequence-networks", lines)


if __name__ == "__main__":
    main()
