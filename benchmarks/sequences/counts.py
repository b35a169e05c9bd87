"""Errors of predictors of the next event, on edits of Wikipedia and on films in the order of their ratings.

``python -m benchmarks.sequences.counts`` writes ``results/<date>-sequences.md``. Data are below ``NUMPYRO_EXT_DATA``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from numpyro_ext.datasets import load_movielens_events, load_wikipedia_edits
from numpyro_ext.sequences import (
    Bigram,
    EventSplit,
    HiddenMarkovBaseline,
    KneserNey,
    MatrixFactorisation,
    OwnBigram,
    OwnFrequencies,
    PersonalMixture,
    RepeatLast,
    SequencePredictor,
    Uniform,
    Unigram,
    compare_sequences,
)
from numpyro_ext.sequences.scores import KINDS

from ..harness import blocks, cpu_seconds, table, write_report
from .setup import divided


def predictors() -> dict[str, SequencePredictor]:
    """Predictors that are compared, by their names in the table."""
    parts: list[SequencePredictor] = [RepeatLast(1.0), OwnFrequencies(0.0), OwnBigram(0.0), KneserNey(0.01)]
    return {
        "uniform": Uniform(),
        "1-gram": Unigram(0.01),
        "matrix factorisation, width 16": MatrixFactorisation(16, 0.05),
        "hidden Markov, 8 states": HiddenMarkovBaseline(8),
        "hidden Markov, 32 states": HiddenMarkovBaseline(32),
        "own frequencies of the training": OwnFrequencies(causal=False),
        "own frequencies so far": OwnFrequencies(),
        "repeat the last": RepeatLast(),
        "2-gram": Bigram(0.01),
        "2-gram, eps by validation": Bigram(),
        "2-gram, Kneser-Ney": KneserNey(),
        "five counts mixed": PersonalMixture(),
        "the same, Kneser-Ney": PersonalMixture(kneser_ney=True),
        "and a hidden Markov chain": PersonalMixture([*parts, Unigram(0.01), HiddenMarkovBaseline(32)]),
    }


def section(title: str, split: EventSplit) -> list[str]:
    """Lines of the report about one data set."""
    named = predictors()
    seconds = {name: cpu_seconds(each.fit, split.train, split.validation)[1] for name, each in named.items()}
    found = compare_sequences(named, split)
    best, other = found.difference("and a hidden Markov chain", "the same, Kneser-Ney")
    history, test = split.history, split.test
    weights = named["the same, Kneser-Ney"].weights  # type: ignore[attr-defined]
    entropies = list(found["uniform"].by_entropy)

    def row(name: str) -> Iterable[Any]:
        scores = found.scores[name]
        cells = [scores.by_kind[kind].error if kind in scores.by_kind else np.nan for kind in KINDS]
        cells += [scores.by_entropy[group].error for group in entropies]
        shown = ["" if np.isnan(value) else f"{value:.3f}" for value in cells]
        return name, f"{scores.error:.3f}", f"{scores.standard_error:.3f}", *shown, f"{seconds[name]:.2f}"

    lengths = zip(("below 10", "10 to 29", "30 to 99", "100 and more"), weights, strict=True)
    heads = " | ".join(("predictor", "error", "s.e.", *KINDS, *entropies, "fit, CPU-seconds"))
    return blocks(
        f"## {title}",
        f"{history.num_users:,} users, {history.num_items:,} items, {history.items.size:,} events before the test and "
        f"{test.items.size:,} in it.",
        table(heads, map(row, found.scores)),
        f"A hidden Markov chain beside the counts changes the error by {best:+.3f} (s.e. {other:.3f}, paired over "
        "users).",
        "Weights of the five counts with Kneser-Ney smoothing:",
        table(
            "events so far | repeat the last | own frequencies | own pairs | pairs of all | frequencies of all",
            ((name, *(f"{weight:.2f}" for weight in row)) for name, row in lengths),
        ),
    )


def main() -> None:
    lines = blocks(
        "# What counting knows of the next event",
        "Nats per event, mean over users, with standard errors over users. Items with ten events or more, users with "
        "eleven or more of these and an entropy above one nat; the last tenth of each sequence is test, the tenth "
        "before it validation, by which weights and `eps` are chosen, and then all before the test is counted. What is "
        "mixed counts for each person causally, test events after they were predicted.",
        section("Edits of Wikipedia", divided(load_wikipedia_edits())),
        section("Films in the order of their ratings", divided(load_movielens_events())),
        "Nobody rates a film twice. What a person did is then of no use, by her own counts (all components of the "
        "person have no weight) as by the factorisation: every count is one, so that it fits a constant and predicts "
        "all films alike. Pairs of all are rare, so that smoothing decides on the 2-gram, and the states of a hidden "
        "Markov chain know more than all counts, as they group films that are rated together. None of these "
        "predictors knows that a film does not come again.",
    )
    write_report("sequences", lines)


if __name__ == "__main__":
    main()
