"""Errors of predictors of the next event, on edits of Wikipedia and on films in the order of their ratings.

``python -m benchmarks.sequences.counts`` writes ``results/<date>-sequences.md``. Data are below ``NUMPYRO_EXT_DATA``.
"""

from __future__ import annotations

import time

from numpyro_ext.datasets import load_movielens_events, load_wikipedia_edits
from numpyro_ext.datasets.event_logs import EventLog
from numpyro_ext.sequences import (
    Bigram,
    EventSequences,
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

from ..harness import table_head, write_report


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


def divided(log: EventLog) -> EventSplit:
    """Division by the rules of the source's public code, with one nat as the least entropy."""
    sequences = EventSequences.from_events(*log[:3]).filter(min_item=10, min_user=11, min_entropy=1.0)
    return sequences.split(share=0.1, least=3, most=500)


def section(title: str, split: EventSplit) -> list[str]:
    """Lines of the report about one data set."""
    named, seconds = predictors(), {}
    for name, predictor in named.items():
        start = time.process_time()
        predictor.fit(split.train, split.validation)
        seconds[name] = time.process_time() - start
    table = compare_sequences(named, split)
    best, other = table.difference("and a hidden Markov chain", "the same, Kneser-Ney")
    history, test = split.history, split.test
    entropies = list(table["uniform"].by_entropy)
    lines = [
        f"## {title}",
        "",
        f"{history.num_users:,} users, {history.num_items:,} items, {history.items.size:,} events before the test and "
        f"{test.items.size:,} in it.",
        "",
        *table_head("predictor | error | s.e. | " + " | ".join((*KINDS, *entropies)) + " | fit, CPU-seconds"),
    ]
    for name, scores in table.scores.items():
        cells = [scores.by_kind[kind].error if kind in scores.by_kind else float("nan") for kind in KINDS]
        cells += [scores.by_entropy[group].error for group in entropies]
        shown = " | ".join("" if value != value else f"{value:.3f}" for value in cells)  # noqa: PLR0124 (nan)
        lines.append(f"| {name} | {scores.error:.3f} | {scores.standard_error:.3f} | {shown} | {seconds[name]:.2f} |")
    weights = named["the same, Kneser-Ney"].weights  # type: ignore[attr-defined]
    lines += [
        "",
        f"A hidden Markov chain beside the counts changes the error by {best:+.3f} (s.e. {other:.3f}, paired over",
        "users).",
        "",
        "Weights of the five counts with Kneser-Ney smoothing:",
        "",
        *table_head(
            "events so far | repeat the last | own frequencies | own pairs | pairs of all | frequencies of all"
        ),
    ]
    for name, row in zip(("below 10", "10 to 29", "30 to 99", "100 and more"), weights, strict=True):
        lines.append(f"| {name} | " + " | ".join(f"{weight:.2f}" for weight in row) + " |")
    return [*lines, ""]


def main() -> None:
    lines = [
        "# What counting knows of the next event",
        "",
        "Nats per event, mean over users, with standard errors over users. Items with ten events or more, users with",
        "eleven or more of these and an entropy above one nat; the last tenth of each sequence is test, the tenth",
        "before it validation, by which weights and `eps` are chosen, and then all before the test is counted. What is",
        "mixed counts for each person causally, test events after they were predicted.",
        "",
        *section("Edits of Wikipedia", divided(load_wikipedia_edits())),
        *section("Films in the order of their ratings", divided(load_movielens_events())),
        "Nobody rates a film twice. What a person did is then of no use, by her own counts (all components of the",
        "person have no weight) as by the factorisation: every count is one, so that it fits a constant and predicts",
        "all films alike. Pairs of all are rare, so that smoothing decides on the 2-gram, and the states of a hidden",
        "Markov chain know more than all counts, as they group films that are rated together. None of these",
        "predictors knows that a film does not come again.",
    ]
    write_report("sequences", lines)


if __name__ == "__main__":
    main()
