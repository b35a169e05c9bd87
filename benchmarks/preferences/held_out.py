"""Held-out comparisons of people: ``python -m benchmarks.preferences.held_out WORK`` writes the pages.

``--only sushi_a`` (or others) computes these alone, and writes the pages that need no other. The data are those of
``load_sushi`` and ``load_best_worst_pairs``. Three quarters of an hour at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..harness import Study
from . import films, sushi, thesis, unseen

EXPERIMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "sushi_a": (sushi.sushi_a, 10),
    "sushi_a_integrated": (sushi.sushi_a_integrated, 10),
    "movielens": (films.movielens, 5),
    "sushi_a_thesis": (thesis.sushi_a_thesis, 10),
    "unseen_films": (unseen.unseen_films, 2),
}
"""Experiments and their numbers of draws."""
PAGES: dict[str, tuple[tuple[str, ...], Callable[[list[dict[str, Any]]], list[str]]]] = {
    "preferences": (("sushi_a", "sushi_a_integrated"), sushi.few_persons),
    "preferences-movielens": (("movielens",), films.page_of_films),
    "preferences-unseen-films": (("unseen_films",), unseen.page),
    "preferences-thesis": (("sushi_a_thesis",), thesis.page),
}
"""Experiments of each page, and what is written of their draws."""


def main() -> None:
    """Fit and write."""
    functions = {name: experiment for name, (experiment, _) in EXPERIMENTS.items()}
    study = Study(__doc__, functions, draws={name: draws for name, (_, draws) in EXPERIMENTS.items()})
    found = study.run()
    for name, (experiments, lines_of) in PAGES.items():
        parts = zip(*(found[experiment] for experiment in experiments), strict=False)  # those that all have
        draws = [{system: values for part in draw for system, values in part.items()} for draw in parts]
        if draws and set(experiments) <= set(study.options.only or EXPERIMENTS):
            study.write(name, lines_of(draws), f"remarks-{name}.md")


if __name__ == "__main__":
    main()
