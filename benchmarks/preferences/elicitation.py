"""The next pair to ask each person: ``python -m benchmarks.preferences.elicitation WORK`` writes the table.

The protocol of Houlsby (2014), section 6.5: of the 45 pairs of ten items each person has answered 5, may be asked 35,
and is tested on 5; ten questions, one to each person in each round, by information (BALD), by the entropy of the
answer, or at random. The sushi are those of ``load_sushi``; of the seven metals of the Jura (``jura/jura.csv``) 3
answers are given, 15 may be asked and 3 are tests. A quarter of an hour.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_ext.potentials import ProbitPotential
from numpyro_ext.potentials.information import expected_information, predictive_entropy

from ..harness import Study, blocks, summary, table
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


def ask(seed: int, data: str, system: str) -> dict[str, list[float]]:
    """Errors along the questions by each acquisition."""
    people = DATA[data](seed)
    return {a: query(SYSTEMS[system](people), people.answers, a, seed) for a in _ACQUISITIONS}


def _mean(values: np.ndarray) -> str:
    error = f" ± {summary(values)['standard_error']:.4f}" if values.size > 1 else ""
    return f"{values.mean():.3f}{error}"


CASES = {
    f"{data}-{system.replace(', ', '_').replace(' ', '_')}": (data, system)
    for system, data in itertools.product(SYSTEMS, DATA)
}


def _rows(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name, (data, system) in sorted(CASES.items(), key=lambda case: list(DATA).index(case[1][0])):
        draws = found[name]
        if draws:
            last = {a: np.array([draw[a][-1] for draw in draws]) for a in _ACQUISITIONS}
            values = [np.array([draw["random"][0] for draw in draws]), *last.values()]
            values += [last["information"] - last[a] for a in ("random", "entropy")]
            yield data, system, len(draws), *map(_mean, values), " / ".join(map(str, _THESIS[data].get(system, ())))


def main() -> None:
    """Ask and write."""
    experiments = {name: partial(ask, data=data, system=system) for name, (data, system) in CASES.items()}
    study = Study(__doc__, experiments, draws=25)
    found = study.run()
    lines = blocks(
        "# Preference elicitation",
        f"Share of wrong answers of {NUM_USERS} people after {_NUM_QUERIES} questions to each: mean over draws ± its "
        "standard error; differences are paired. The last column is table 6.3 of Houlsby (2014), in the same order.",
        table(
            "data | system | draws | before | information | entropy | random | less random | less entropy | thesis",
            _rows(found),
        ),
    )
    study.write("elicitation", lines)


if __name__ == "__main__":
    main()
