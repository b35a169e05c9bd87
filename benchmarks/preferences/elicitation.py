"""Which pair to ask each person next: ``python -m benchmarks.preferences.elicitation WORK`` writes the table.

The protocol of Houlsby (2014), section 6.5: of the 45 pairs of ten items each person has answered 5, may be asked 35,
and is tested on 5; ten questions, one to each person in each round, by information (BALD), by the entropy of the
answer, or at random. ``WORK`` keeps one file for each draw, so that a run that was ended goes on; ``--draws`` says how
many there are at most, ``--minutes`` when to begin no other. The sushi are those of ``load_sushi``; of the seven metals
of the Jura (``jura/jura.csv``) 3 answers are given, 15 may be asked and 3 are tests. A quarter of an hour.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from numpyro_ext.potentials import ProbitPotential
from numpyro_ext.potentials.information import expected_information, predictive_entropy

from ..harness import summary, table_head, write_report
from ..harness.repeats import begin, keep, kept_draws, parser_of_draws
from .people import DATA, NUM_USERS, Moments, People, alone, products, shared_moments

_NUM_QUERIES = 10
_NUM_FIRST = {45: 5, 21: 3}
"""Answers to begin with, and those held out, by the number of pairs."""
_ACQUISITIONS = "information", "entropy", "random"
_THESIS = {
    "synthetic": {
        "alone": (0.249, 0.259, 0.268),
        "products": (0.153, 0.16, 0.173),
        "products, people alike": (0.135, 0.135, 0.139),
    },
    "sushi": {
        "alone": (0.179, 0.197, 0.212),
        "products": (0.144, 0.151, 0.176),
        "products, people alike": (0.148, 0.153, 0.178),
    },
    "jura": {
        "alone": (0.176, 0.166, 0.197),
        "products": (0.138, 0.138, 0.169),
        "products, people alike": (0.143, 0.141, 0.168),
    },
}


def query(moments: Callable[[np.ndarray], Moments], answers: np.ndarray, acquisition: str, seed: int) -> list[float]:
    """Share of wrong answers in the tests, before the first question and after each."""
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random(answers.shape), axis=1)
    people = np.arange(len(answers))[:, None]
    asked = np.zeros(answers.shape, bool)
    num_tests = num_first = _NUM_FIRST[answers.shape[1]]
    asked[people, order[:, :num_first]] = True
    pool = np.zeros(answers.shape, bool)
    pool[people, order[:, num_first:-num_tests]] = True
    tests = order[:, -num_tests:]
    errors = []
    for number in range(_NUM_QUERIES + 1):
        mean, variance = moments(asked)
        errors.append(float(np.mean((mean > 0)[people, tests] != (answers == 1)[people, tests])))
        if number == _NUM_QUERIES:
            break
        score = rng.random(answers.shape)
        if acquisition != "random":
            of = expected_information if acquisition == "information" else predictive_entropy
            score = np.asarray(of(ProbitPotential(jnp.ones(answers.shape)), mean, variance)) + 1e-12 * score
        chosen = np.argmax(np.where(pool & ~asked, score, -np.inf), axis=1)
        asked[people[:, 0], chosen] = True
    return errors


_products = products(_NUM_QUERIES + max(_NUM_FIRST.values()))
SYSTEMS: dict[str, Callable[[People], Callable[[np.ndarray], Moments]]] = {
    "alone": lambda people: alone(people.answers, people.kernel),
    "shared moments": lambda people: shared_moments(people.answers, people.kernel),
    "products": lambda people: _products(people.answers, people.kernel),
    "products, people alike": lambda people: _products(*people),
}


def _name(data: str, system: str) -> str:
    return f"{data}-{system.replace(', ', '_').replace(' ', '_')}"


def _ask(data: str, system: str, seed: int) -> dict[str, list[float]]:
    people = DATA[data](seed)
    return {a: query(SYSTEMS[system](people), people.answers, a, seed) for a in _ACQUISITIONS}


def _mean(values: np.ndarray) -> str:
    error = f" ± {summary(values)['standard_error']:.4f}" if values.size > 1 else ""
    return f"{values.mean():.3f}{error}"


def _rows(work: Path) -> Iterator[str]:
    yield from table_head(
        "data | system | draws | before | information | entropy | random | less random | less entropy | thesis"
    )
    for name, system in itertools.product(DATA, SYSTEMS):
        draws = kept_draws(work, _name(name, system))
        if not draws:
            continue
        last = {a: np.array([draw[a][-1] for draw in draws]) for a in _ACQUISITIONS}
        before = np.array([draw["random"][0] for draw in draws])
        cells = [_mean(before), *(_mean(last[a]) for a in _ACQUISITIONS)]
        cells += [_mean(last["information"] - last[a]) for a in ("random", "entropy")]
        thesis = " / ".join(map(str, _THESIS[name].get(system, ())))
        yield f"| {name} | {system} | {len(draws)} | {' | '.join(cells)} | {thesis} |"


def main() -> None:
    """Ask and write."""
    parser = parser_of_draws(__doc__)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    arguments = begin(parser)
    work: Path = arguments.work
    if not arguments.write:
        end = time.monotonic() + 60.0 * arguments.minutes
        for seed, system, name in itertools.product(range(arguments.draws), arguments.systems, DATA):
            keep(work / f"{_name(name, system)}-{seed}.json", partial(_ask, name, system, seed), end)
    lines = [
        "# Preference elicitation",
        "",
        f"Share of wrong answers of {NUM_USERS} people after {_NUM_QUERIES} questions to each: mean over draws ± its "
        "standard error; differences are paired. The last column is table 6.3 of Houlsby (2014), in the same order.",
        "",
        *_rows(work),
    ]
    write_report("elicitation", lines, remarks=work / "remarks.md")


if __name__ == "__main__":
    main()
