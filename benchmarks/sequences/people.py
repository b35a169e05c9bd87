"""Networks with people integrated out, and with a gate to the person's own counts, on edits of Wikipedia.

``python -m benchmarks.sequences.people`` writes ``results/<date>-sequence-people.md``; ``--keys`` says how many keys
are tried, and ``--epochs`` how many epochs people are integrated out for (minutes each; none by default). Data are
below ``NUMPYRO_EXT_DATA``.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax.numpy as jnp
import optax
from jax import random

from numpyro_ext.datasets import load_wikipedia_edits
from numpyro_ext.infer import ChunkedFit, ChunkedSVI
from numpyro_ext.models import collaborative_rnn
from numpyro_ext.sequences import EventSplit, PersonalMixture, compare_sequences

from ..harness import table_head, write_report
from .counts import divided

WIDTH, RANK = 64, 8
POOLED: dict[str, Any] = {"cell": "gru", "personal": "none", "width": WIDTH}


def trained_in_chunks(split: EventSplit, key: int, **options: Any) -> ChunkedFit:
    """Network without latent part, by the settings of ``sequence_networks``."""
    engine = ChunkedSVI(
        collaborative_rnn,
        optim=optax.rmsprop(0.0075, decay=0.997, bias_correction=True),
        plate="users",
        batch_size=20,
        chunk=64,
        progress_bar=False,
    )
    return engine.run(random.key(key), split, num_epochs=25, patience=3, **POOLED, **options)


def integrated(split: EventSplit, key: int, pooled: ChunkedFit, num_epochs: int) -> ChunkedFit:
    """Network with eight numbers of each person integrated out, begun at the pooled one."""
    engine = ChunkedSVI(
        collaborative_rnn,
        optim=optax.adam(0.002),
        plate="users",
        batch_size=10,
        chunk=128,
        max_chunks=2,
        local="laplace",
        progress_bar=False,
    )
    options = {**POOLED, "personal": "low-rank", "rank": RANK, "init_params": pooled.params}
    return engine.run(random.key(key), split, num_epochs=num_epochs, patience=2, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=0)
    arguments = parser.parse_args()
    split = divided(load_wikipedia_edits())
    rows: list[str] = []

    def measured(name: str, key: int, fit: ChunkedFit, seconds: float) -> None:
        predictors = {"counts": PersonalMixture(), "network": fit, "with it": PersonalMixture(network=fit)}
        table = compare_sequences(predictors, split)
        gain, error = table.difference("with it", "counts")
        rows.append(
            f"| {name} | {key} | {table['network'].error:.3f} | {table['with it'].error:.3f} | "
            f"{gain:+.3f} ({error:.3f}) | {fit.best_epoch} | {seconds:.0f} |"
        )
        print(rows[-1], fit.validation_errors.round(3), fit.losses.round(3), fit.notes, flush=True)

    for key in range(arguments.keys):
        start = time.process_time()
        pooled = trained_in_chunks(split, key)
        measured("pooled GRU", key, pooled, time.process_time() - start)
        start = time.process_time()
        gate = trained_in_chunks(split, key, pointer=True, carry=(jnp.zeros(WIDTH), jnp.zeros(split.train.num_items)))
        measured("pooled GRU, gate to own counts", key, gate, time.process_time() - start)
        if arguments.epochs:
            start = time.process_time()
            people = integrated(split, key, pooled, arguments.epochs)
            measured(f"{RANK} numbers a person, integrated out", key, people, time.process_time() - start)
    report(split, rows)


def report(split: EventSplit, rows: list[str]) -> None:
    """Write the results file."""
    counts = split.mean_over_users(-PersonalMixture().fit(split.train, split.validation).log_predictive(split))
    lines = [
        "# Networks with a gate to counts, and with a personal part as a posterior",
        "",
        f"Edits of Wikipedia, {split.test.num_users} users, {split.test.num_items} items. Nats per test event, mean",
        f"over users. GRU of width {WIDTH}, RMSprop 0.0075, the best epoch on validation, trained without it. Numbers",
        'of a person by `ChunkedSVI(local="laplace")` from the pooled network of the same key, Adam 0.002, over the',
        f"last 256 events of each, 16 draws. Five counts mixed: {counts:.3f}.",
        "",
        *table_head(
            "network | key | alone | with five counts | change (s.e., paired over users) | best epoch | CPU-seconds"
        ),
        *rows,
        "",
        "Wanted: the gate alone no worse than the mixture of counts with a network; numbers of a person no worse than",
        "pooled; of three keys. A gate is learned from events that the network knows by heart, those of a mixture",
        "from the validation.",
    ]
    if not any("integrated out" in row for row in rows):
        lines += ["Numbers of a person were not measured here: an epoch costs minutes on this machine."]
    write_report("sequence-people", lines, "sequences.people")


if __name__ == "__main__":
    main()
