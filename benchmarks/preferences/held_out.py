"""Held-out comparisons of people: ``python -m benchmarks.preferences.held_out WORK`` writes the table.

``WORK`` is a folder that keeps what was found, one file for each draw, so that a run that was ended goes on;
``--only sushi_a`` (or another experiment) computes that one alone and writes no table, ``--write REPORT`` writes one of
what is there. The data are those of ``load_sushi`` and ``load_best_worst_pairs``. Three quarters of an hour at most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..harness import write_report
from ..harness.repeats import begin, keep, kept_draws, parser_of_work
from .films import films, lovers, lovers_of_genres, movielens
from .sampled import sampled_report, sushi_a_sampled
from .sushi import few_persons, learned_kernel, many_persons, sushi_a, sushi_a_integrated, sushi_a_learned, sushi_b
from .thesis import sushi_a_thesis, thesis_report
from .unseen import unseen, unseen_films

EXPERIMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "sushi_a": (sushi_a, 10),
    "sushi_a_integrated": (sushi_a_integrated, 10),
    "movielens": (movielens, 5),
    "sushi_a_learned": (sushi_a_learned, 4),
    "sushi_b": (sushi_b, 2),
    "sushi_a_sampled": (sushi_a_sampled, 10),
    "sushi_a_thesis": (sushi_a_thesis, 10),
    "lovers": (lovers_of_genres, 1),
    "unseen_films": (unseen_films, 2),
}


# Each report by its name: its experiments, and what is written of their draws.
REPORTS: dict[str, tuple[tuple[str, ...], Callable[[list[dict[str, Any]]], list[str]]]] = {
    "preferences": (("sushi_a", "sushi_a_integrated"), few_persons),
    "preferences-movielens": (("movielens",), films),
    "preferences-learned-kernel": (("sushi_a_learned",), learned_kernel),
    "preferences-sushi-b": (("sushi_b",), many_persons),
    "preferences-lovers": (("lovers",), lovers),
    "preferences-unseen-films": (("unseen_films",), unseen),
    "preferences-thesis": (("sushi_a_thesis",), thesis_report),
    "preferences-sampled": (("sushi_a_sampled",), sampled_report),
}


def main() -> None:
    """Fit and write."""
    parser = parser_of_work(__doc__)
    parser.add_argument("--only", choices=tuple(EXPERIMENTS))
    parser.add_argument("--draws", type=int, default=10, help="of each experiment at most")
    parser.add_argument("--write", choices=tuple(REPORTS), help="write what is there of one, and compute nothing")
    arguments = begin(parser)
    work: Path = arguments.work
    for name in () if arguments.write else (arguments.only,) if arguments.only else EXPERIMENTS:
        experiment, num_draws = EXPERIMENTS[name]
        for seed in range(min(arguments.draws, num_draws)):
            keep(work / f"{name}-{seed}.json", partial(experiment, seed))
    if arguments.only:
        return
    for report in (arguments.write,) if arguments.write else REPORTS:
        experiments, lines_of = REPORTS[report]
        parts = zip(*(kept_draws(work, name) for name in experiments), strict=True)
        lines = lines_of([{key: value for each in draw for key, value in each.items()} for draw in parts])
        write_report(report, lines, script="preferences.held_out", remarks=work / f"remarks-{report}.md")


if __name__ == "__main__":
    main()
