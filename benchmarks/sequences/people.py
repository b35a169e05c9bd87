"""Networks with people integrated out, and with a gate to the person's own counts, on edits of Wikipedia.

``python -m benchmarks.sequences.people`` writes ``results/<date>-sequence-people.md``; ``--keys`` says how many keys
are tried, and ``--epochs`` how many epochs people are integrated out for (minutes each; none by default). Data are
below ``NUMPYRO_EXT_DATA``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import optax
from jax import random

from numpyro_ext.datasets import load_wikipedia_edits
from numpyro_ext.infer import ChunkedFit
from numpyro_ext.sequences import EventSplit, PersonalMixture, compare_sequences

from ..harness import blocks, cpu_seconds, table, write_report
from .setup import divided, network

WIDTH, RANK = 64, 8
POOLED: dict[str, Any] = {"cell": "gru", "personal": "none", "width": WIDTH}


def trained(split: EventSplit, key: int, **options: Any) -> ChunkedFit:
    """Network without latent part, by the settings of ``networks``."""
    return network().run(random.key(key), split, num_epochs=25, patience=3, **POOLED, **options)


def integrated(split: EventSplit, key: int, pooled: ChunkedFit, num_epochs: int) -> ChunkedFit:
    """Network with eight numbers of each person integrated out, begun at the pooled one."""
    engine = network(optax.adam(0.002), batch_size=10, chunk=128, max_chunks=2, local="laplace")
    options = {**POOLED, "personal": "low-rank", "rank": RANK, "init_params": pooled.params}
    return engine.run(random.key(key), split, num_epochs=num_epochs, patience=2, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=0)
    arguments = parser.parse_args()
    split = divided(load_wikipedia_edits())

    def row(name: str, key: int, fit: ChunkedFit, seconds: float) -> Iterable[Any]:
        predictors = {"counts": PersonalMixture(), "network": fit, "with it": PersonalMixture(network=fit)}
        table = compare_sequences(predictors, split)
        gain, error = table.difference("with it", "counts")
        errors = [f"{table[which].error:.3f}" for which in ("network", "with it")]
        print(fit.validation_errors.round(3), fit.losses.round(3), fit.notes)
        return name, key, *errors, f"{gain:+.3f} ({error:.3f})", fit.best_epoch, f"{seconds:.0f}"

    def rows() -> Iterator[Iterable[Any]]:
        for key in range(arguments.keys):
            pooled, seconds = cpu_seconds(trained, split, key)
            yield row("pooled GRU", key, pooled, seconds)
            gated = {"pointer": True, "carry": (jnp.zeros(WIDTH), jnp.zeros(split.train.num_items))}
            yield row("pooled GRU, gate to own counts", key, *cpu_seconds(trained, split, key, **gated))
            if arguments.epochs:
                people = cpu_seconds(integrated, split, key, pooled, arguments.epochs)
                yield row(f"{RANK} numbers a person, integrated out", key, *people)

    counts = split.mean_over_users(-PersonalMixture().fit(split.train, split.validation).log_predictive(split))
    lines = blocks(
        "# Networks with a gate to counts, and with a personal part as a posterior",
        f"Edits of Wikipedia, {split.test.num_users} users, {split.test.num_items} items. Nats per test event, mean "
        f"over users. GRU of width {WIDTH}, RMSprop 0.0075, the best epoch on validation, trained without it. Numbers "
        'of a person by `ChunkedSVI(local="laplace")` from the pooled network of the same key, Adam 0.002, over the '
        f"last 256 events of each, 16 draws. Five counts mixed: {counts:.3f}.",
        table(
            "network | key | alone | with five counts | change (s.e., paired over users) | best epoch | CPU-seconds",
            rows(),
        ),
        "Wanted: the gate alone no worse than the mixture of counts with a network; numbers of a person no worse than "
        "pooled; of three keys. A gate is learned from events that the network knows by heart, those of a mixture "
        "from the validation.",
    )
    if not arguments.epochs:
        lines += ["Numbers of a person were not measured here: an epoch costs minutes on this machine."]
    write_report("sequence-people", lines)


if __name__ == "__main__":
    main()
