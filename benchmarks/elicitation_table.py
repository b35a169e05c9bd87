"""Which pair to ask each person next: ``python -m benchmarks.elicitation_table WORK`` writes the table.

The protocol of Houlsby (2014), section 6.5: of the 45 pairs of ten items each person has answered 5, may be asked 35,
and is tested on 5; ten questions, one to each person in each round, by information (BALD), by the entropy of the
answer, or at random. ``WORK`` keeps one file for each draw, so that a run that was ended goes on; ``--draws`` says how
many there are at most, ``--minutes`` when to begin no other. The sushi are those of ``load_sushi``. Five minutes.
"""

from __future__ import annotations

import argparse
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

from numpyro_ext.datasets import load_sushi
from numpyro_ext.infer import EP
from numpyro_ext.potentials import ProbitPotential
from numpyro_ext.potentials.information import expected_information, predictive_entropy

from .results_table import write_report

__all__ = ["main"]

_NUM_USERS, _NUM_ITEMS = 100, 10
_NUM_FIRST, _NUM_POOL, _NUM_QUERIES = 5, 35, 10
_PAIRS = np.array(list(itertools.combinations(range(_NUM_ITEMS), 2)))
_ACQUISITIONS = "information", "entropy", "random"
_THESIS = {
    "synthetic": {"alone": (0.249, 0.259, 0.268), "shared moments": ("0.153 / 0.16 / 0.173 (CP)",)},
    "sushi": {"alone": (0.179, 0.197, 0.212), "shared moments": ("0.144 / 0.151 / 0.176 (CP)",)},
}


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
    g = (W @ H.T)[:, _PAIRS[:, 0]] - (W @ H.T)[:, _PAIRS[:, 1]]
    return (g + rng.standard_normal(g.shape) > 0).astype(int), _kernel(items, 1.0)


def sushi(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of people who ranked ten kinds of sushi."""
    data = load_sushi("a")
    rankings = data.rankings[np.random.default_rng(1000 + seed).permutation(len(data.rankings))[:_NUM_USERS]]
    places = np.argsort(rankings, axis=1)
    answers = (places[:, _PAIRS[:, 0]] < places[:, _PAIRS[:, 1]]).astype(int)
    return answers, _kernel(np.asarray(data.item_features))


Moments = tuple[np.ndarray, np.ndarray]
"""Mean and variance of the difference of utilities, shape ``(users, pairs)``."""


def _person(mean: Array, kernel: Array, won: Array | None = None, asked: Any = True) -> None:
    f = numpyro.sample("f", dist.MultivariateNormal(mean, kernel))
    with handlers.mask(mask=asked):
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(f[_PAIRS[:, 0]] - f[_PAIRS[:, 1]])), obs=won)
    with handlers.mask(mask=False):  # looked at only
        numpyro.sample("utility", dist.Normal(f, 1.0), obs=jnp.zeros(_NUM_ITEMS))


@functools.cache
def _all_people() -> Callable[..., tuple[Array, ...]]:
    """Fits of all people, given a mean and a covariance, as one program."""
    names, no = ("mean", "kernel", "won", "asked"), jnp.zeros(len(_PAIRS), int)
    example = jnp.zeros(_NUM_ITEMS), jnp.eye(_NUM_ITEMS), no, no == 0
    program = EP(_person).program(*example, changing=names)

    def one(*arrays: Array) -> tuple[Array, ...]:
        given = dict(zip(names, arrays, strict=True))
        found = program.predictors(given, program.fit(given, program.init(given)))
        return *found["won"], *found["utility"]

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0)))


def _people(answers: np.ndarray) -> Callable[..., tuple[np.ndarray, ...]]:
    """Means and variances of pairs and of utilities, as a function of mean, covariance and what has been asked."""

    def fit(mean: np.ndarray, kernel: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, ...]:
        found = _all_people()(jnp.asarray(mean), jnp.asarray(kernel), jnp.asarray(answers), jnp.asarray(asked))
        return tuple(map(np.asarray, found))

    return fit


def alone(answers: np.ndarray, kernel: np.ndarray) -> Callable[[np.ndarray], Moments]:
    """Each person by a Gaussian process of their own."""
    people = _people(answers)
    return lambda asked: people(np.zeros(_NUM_ITEMS), kernel, asked)[:2]


def shared_moments(answers: np.ndarray, kernel: np.ndarray) -> Callable[[np.ndarray], Moments]:
    """Utilities whose mean and covariance all people share, by expectation maximisation (Birlutiu et al. 2013)."""
    people = _people(answers)
    mean, covariance, is_first = np.zeros(_NUM_ITEMS), kernel, True
    first, second = _PAIRS.T

    def moments(asked: np.ndarray) -> Moments:
        nonlocal mean, covariance, is_first
        for _ in range(20 if is_first else 5):
            _, of_pairs, means, variances = people(mean, covariance, asked)
            each = np.zeros((len(means), _NUM_ITEMS, _NUM_ITEMS))
            each[:, first, second] = 0.5 * (variances[:, first] + variances[:, second] - of_pairs)
            each += np.swapaxes(each, 1, 2) + variances[:, :, None] * np.eye(_NUM_ITEMS)
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
    asked[people, order[:, :_NUM_FIRST]] = True
    pool = np.zeros(answers.shape, bool)
    pool[people, order[:, _NUM_FIRST : _NUM_FIRST + _NUM_POOL]] = True
    tests = order[:, _NUM_FIRST + _NUM_POOL :]
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


DATA: dict[str, Callable[[int], tuple[np.ndarray, np.ndarray]]] = {"synthetic": synthetic, "sushi": sushi}
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
