"""Which pair to ask each person next: ``python -m benchmarks.elicitation_table WORK`` writes the table.

The protocol of Houlsby (2014), section 6.5: of the 45 pairs of ten items each person has answered 5, may be asked 35,
and is tested on 5; ten questions, one to each person in each round, by information (BALD), by the entropy of the
answer, or at random. ``WORK`` keeps one file for each draw, so that a run that was ended goes on; ``--draws`` says how
many there are at most, ``--minutes`` when to begin no other. The sushi are those of ``load_sushi``; of the seven metals
of the Jura (``jura/jura.csv``) 3 answers are given, 15 may be asked and 3 are tests. Five minutes.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.datasets import data_path, load_sushi
from numpyro_ext.infer import EP
from numpyro_ext.potentials import ProbitPotential
from numpyro_ext.potentials.information import expected_information, predictive_entropy

from .results_table import write_report

__all__ = ["main"]

_NUM_USERS, _NUM_ITEMS, _NUM_QUERIES = 100, 10, 10
_METALS = ("Cd", "Co", "Cr", "Cu", "Ni", "Pb", "Zn")
_NUM_FIRST = {45: 5, 21: 3}
"""Answers to begin with, and those held out, by the number of pairs."""
_ACQUISITIONS = "information", "entropy", "random"
_THESIS = {
    "synthetic": {"alone": (0.249, 0.259, 0.268), "shared moments": ("0.153 / 0.16 / 0.173 (CP)",)},
    "sushi": {"alone": (0.179, 0.197, 0.212), "shared moments": ("0.144 / 0.151 / 0.176 (CP)",)},
    "jura": {"alone": (0.176, 0.166, 0.197), "shared moments": ("0.138 / 0.138 / 0.169 (CP)",)},
}


def _pairs(num_items: int) -> np.ndarray:
    return np.array(list(itertools.combinations(range(num_items), 2)))


def _kernel(features: np.ndarray, length: float | None = None) -> np.ndarray:
    """Squared exponential, by default of the median distance."""
    squares = np.sum((features[:, None] - features) ** 2, axis=-1)
    length = float(np.sqrt(np.median(squares[squares > 0]))) if length is None else length
    return np.asarray(np.exp(-0.5 * squares / length**2) + 1e-5 * np.eye(len(features)))


def synthetic(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers of each person to all pairs, one where the first is preferred, and the covariance of the items."""
    rng = np.random.default_rng(seed)
    width = np.sqrt(3.0)  # of a uniform distribution of variance one
    items, users = (rng.uniform(-width, width, (size, 2)) for size in (_NUM_ITEMS, _NUM_USERS))
    roots = [np.linalg.cholesky(_kernel(features, 1.0)) for features in (users, items)]
    W, H = (root @ rng.standard_normal((len(root), 5)) for root in roots)
    first, second = _pairs(_NUM_ITEMS).T
    g = (W @ H.T)[:, first] - (W @ H.T)[:, second]
    return (g + rng.standard_normal(g.shape) > 0).astype(int), _kernel(items, 1.0)


def sushi(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of people who ranked ten kinds of sushi."""
    data = load_sushi("a")
    rankings = data.rankings[np.random.default_rng(1000 + seed).permutation(len(data.rankings))[:_NUM_USERS]]
    places = np.argsort(rankings, axis=1)
    first, second = _pairs(_NUM_ITEMS).T
    return (places[:, first] < places[:, second]).astype(int), _kernel(np.asarray(data.item_features))


def jura(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sites that "prefer" the metal of which they have more, in standard units; 20 other sites are features."""
    with data_path("jura", "jura.csv").open() as file:
        rows = [[float(row[metal]) for metal in _METALS] for row in csv.DictReader(file)]
    values = (np.array(rows) - np.mean(rows, axis=0)) / np.std(rows, axis=0)
    order = np.random.default_rng(2000 + seed).permutation(len(values))
    features, sites = values[order[:20]].T, values[order[20 : 20 + _NUM_USERS]]
    first, second = _pairs(len(_METALS)).T
    return (sites[:, first] > sites[:, second]).astype(int), _kernel(features)


Moments = tuple[np.ndarray, np.ndarray]
"""Mean and variance of the difference of utilities, shape ``(users, pairs)``."""


def _person(mean: Array, kernel: Array, won: Array | None = None, asked: Any = True) -> None:
    f = numpyro.sample("f", dist.MultivariateNormal(mean, kernel))
    with handlers.mask(mask=asked):
        first, second = _pairs(kernel.shape[0]).T
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(f[first] - f[second])), obs=won)
    with handlers.mask(mask=False):  # looked at only
        numpyro.sample("utility", dist.Normal(f, 1.0), obs=jnp.zeros(kernel.shape[0]))


@functools.cache
def _all_people(num_items: int) -> Callable[..., tuple[Array, ...]]:
    """Fits of all people, given a mean and a covariance, as one program."""
    names, no = ("mean", "kernel", "won", "asked"), jnp.zeros(len(_pairs(num_items)), int)
    example = jnp.zeros(num_items), jnp.eye(num_items), no, no == 0
    program = EP(_person).program(*example, changing=names)

    def one(*arrays: Array) -> tuple[Array, ...]:
        given = dict(zip(names, arrays, strict=True))
        found = program.predictors(given, program.fit(given, program.init(given)))
        return *found["won"], *found["utility"]

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0)))


def _people(answers: np.ndarray) -> Callable[..., tuple[np.ndarray, ...]]:
    """Means and variances of pairs and of utilities, as a function of mean, covariance and what has been asked."""

    def fit(mean: np.ndarray, kernel: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, ...]:
        found = _all_people(len(kernel))(
            jnp.asarray(mean), jnp.asarray(kernel), jnp.asarray(answers), jnp.asarray(asked)
        )
        return tuple(map(np.asarray, found))

    return fit


def alone(answers: np.ndarray, kernel: np.ndarray) -> Callable[[np.ndarray], Moments]:
    """Each person by a Gaussian process of their own."""
    people = _people(answers)
    return lambda asked: people(np.zeros(len(kernel)), kernel, asked)[:2]


def shared_moments(answers: np.ndarray, kernel: np.ndarray) -> Callable[[np.ndarray], Moments]:
    """Utilities whose mean and covariance all people share, by expectation maximisation (Birlutiu et al. 2013)."""
    people = _people(answers)
    mean, covariance, is_first = np.zeros(len(kernel)), kernel, True
    first, second = _pairs(len(kernel)).T

    def moments(asked: np.ndarray) -> Moments:
        nonlocal mean, covariance, is_first
        for _ in range(20 if is_first else 5):
            _, of_pairs, means, variances = people(mean, covariance, asked)
            each = np.zeros((*means.shape, means.shape[1]))
            each[:, first, second] = 0.5 * (variances[:, first] + variances[:, second] - of_pairs)
            each += np.swapaxes(each, 1, 2) + variances[:, :, None] * np.eye(means.shape[1])
            mean = means.mean(axis=0)
            away = means - mean
            covariance = np.mean(each + away[:, :, None] * away[:, None], axis=0)
        is_first = False
        return people(mean, covariance, asked)[:2]

    return moments


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


DATA: dict[str, Callable[[int], tuple[np.ndarray, np.ndarray]]] = {
    "synthetic": synthetic,
    "sushi": sushi,
    "jura": jura,
}
SYSTEMS: dict[str, Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], Moments]]] = {
    "alone": alone,
    "shared moments": shared_moments,
}


def _compute(work: Path, num_draws: int, minutes: float) -> None:
    start = time.monotonic()
    for seed, system, name in itertools.product(range(num_draws), SYSTEMS, DATA):
        path = work / f"{name}-{system.replace(' ', '_')}-{seed}.json"
        if path.exists() or time.monotonic() - start > 60.0 * minutes:
            continue
        answers, kernel = DATA[name](seed)
        begun = time.process_time()
        found = {a: query(SYSTEMS[system](answers, kernel), answers, a, seed) for a in _ACQUISITIONS}
        path.write_text(json.dumps(found))
        last = " ".join(f"{found[a][-1]:.3f}" for a in _ACQUISITIONS)
        print(path.name, last, f"{time.process_time() - begun:.0f} CPU-s", flush=True)


def _mean(values: np.ndarray) -> str:
    error = f" ± {values.std(ddof=1) / np.sqrt(values.size):.4f}" if values.size > 1 else ""
    return f"{values.mean():.3f}{error}"


def _rows(work: Path) -> Iterator[str]:
    yield "| data | system | draws | before | information | entropy | random | less random | less entropy | thesis |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, system in itertools.product(DATA, SYSTEMS):
        paths = sorted(work.glob(f"{name}-{system.replace(' ', '_')}-*.json"))
        if not paths:
            continue
        draws = [json.loads(path.read_text()) for path in paths]
        last = {a: np.array([draw[a][-1] for draw in draws]) for a in _ACQUISITIONS}
        before = np.array([draw["random"][0] for draw in draws])
        cells = [_mean(before), *(_mean(last[a]) for a in _ACQUISITIONS)]
        cells += [_mean(last["information"] - last[a]) for a in ("random", "entropy")]
        thesis = " / ".join(map(str, _THESIS[name].get(system, ())))
        yield f"| {name} | {system} | {len(draws)} | {' | '.join(cells)} | {thesis} |"


def main() -> None:
    """Ask and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--draws", type=int, default=25)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--write", action="store_true", help="write what is there, and compute nothing")
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    numpyro.enable_x64()
    if not arguments.write:
        _compute(work, arguments.draws, arguments.minutes)
    lines = [
        "# Preference elicitation",
        "",
        f"Share of wrong answers of {_NUM_USERS} people after {_NUM_QUERIES} questions to each: mean over draws ± its "
        "standard error; differences are paired. The last column is table 6.3 of Houlsby (2014), in the same order.",
        "",
        *_rows(work),
    ]
    remarks = work / "remarks.md"
    if remarks.exists():
        lines += ["", remarks.read_text().strip()]
    write_report("elicitation", lines)


if __name__ == "__main__":
    main()
