"""Models of many people's preferences: ``python -m benchmarks.preferences.models WORK`` writes the table.

The protocol of table 6.1 of Houlsby (2014): 100 people answer so many of all pairs of items and are tested on the
others; errors are shares of wrong answers. Three quarters of an hour for 25 draws.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.infer import EP, BilinearEP
from numpyro_ext.models import joint_preference_gp, preference_factorization

from ..harness import Study, blocks, cpu_seconds, table, verdict
from .pairs import mean_and_error
from .people import DATA, NUM_USERS, People, all_pairs, alone, shared_moments

_NUM_ASKED = {"synthetic": 30, "sushi": 20, "jura": 15}
_LENGTHS = -1.5, -0.5, 0.0, 0.5, 1.5
"""Logarithms of the lengths of users and items, of the surface."""
_THESIS = {
    "synthetic": {"CPU": 0.162, "CP": 0.18, "BI": 0.175, "BO": 0.157, "SU": 0.226},
    "sushi": {"CPU": 0.171, "CP": 0.163, "BI": 0.16, "BO": 0.266, "SU": 0.187},
    "jura": {"CPU": 0.159, "CP": 0.153, "BI": 0.153, "BO": 0.254, "SU": 0.181},
}


def asked_of(people: People, name: str) -> np.ndarray:
    """Pairs that each person is asked: the same in all draws of people, so that their fits share their programs."""
    order = np.argsort(np.random.default_rng(7).random(people.answers.shape), axis=1)
    asked = np.zeros(people.answers.shape, bool)
    np.put_along_axis(asked, order[:, : _NUM_ASKED[name]], True, axis=1)
    return asked


def shuffled(people: People, seed: int) -> People:
    """The same with the items in another order, so that other pairs are asked."""
    num_items = len(people.kernel)
    order = np.random.default_rng(3000 + seed).permutation(num_items)
    outcome = np.zeros((len(people.answers), num_items, num_items), int)
    first, second = all_pairs(num_items).T
    outcome[:, first, second], outcome[:, second, first] = people.answers, 1 - people.answers
    outcome = outcome[:, order[:, None], order]
    return people._replace(answers=outcome[:, first, second], kernel=people.kernel[np.ix_(order, order)])


def _parts(people: People, asked: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Arguments of the models for training and for the test."""
    first, second = all_pairs(len(people.kernel)).T
    found = []
    for chosen in (asked, ~asked):
        user, pair = np.nonzero(chosen)
        found.append([user, first[pair], second[pair], people.answers[user, pair]])
    return found[0], found[1]


def _tested(engine: Any, people: People, asked: np.ndarray, with_users: bool = False, **given: Any) -> dict[str, float]:
    """Share of wrong answers of an engine, its log evidence and whether it converged."""
    train, test = _parts(people, asked)
    given |= {"kernel": people.kernel} | ({"user_kernel": people.user_kernel} if with_users else {})
    engine.run(jax.random.key(0), *train, **given)
    wrong = np.asarray(engine.log_predictive(*test, **given)["won"]) < np.log(0.5)
    ended = {"evidence": float(engine.log_evidence), "converged": float(engine.diagnostics.converged)}
    return {"error": float(np.mean(wrong)), **ended}


def by_moments(fit: Callable[..., Callable[..., Any]]) -> Callable[[People, np.ndarray], dict[str, float]]:
    """Share of wrong answers of a method that finds moments of the differences of all pairs."""

    def found(people: People, asked: np.ndarray) -> dict[str, float]:
        mean, _ = fit(people.answers, people.kernel)(asked)
        return {"error": float(np.mean((mean > 0)[~asked] != (people.answers == 1)[~asked]))}

    return found


def joint(people: People, asked: np.ndarray) -> dict[str, float]:
    """One Gaussian process on people and items (Bonilla et al. 2010), of unit variance."""
    engine = EP(joint_preference_gp, hyper_values={"scale": 1.0}, tol=1e-3, progress_bar=False)
    return _tested(engine, people, asked, with_users=True)


def _joint_with_scale(
    user: Any, first: Any, second: Any, won: Any = None, *, kernel: np.ndarray, user_kernel: np.ndarray
) -> None:
    size = numpyro.param("size", 2.0, constraint=dist.constraints.positive)
    joint_preference_gp(user, first, second, won, kernel=size**2 * kernel, user_kernel=user_kernel)


def joint_with_scale(people: People, asked: np.ndarray) -> dict[str, float]:
    """The same, its standard deviation by the evidence."""
    engine = EP(_joint_with_scale, hyper_values={"scale": 1.0}, tol=1e-2, progress_bar=False)
    found = _tested(engine, people, asked, with_users=True)
    return found | {"scale": float(engine.hyper["size"].value)}


def factorised(rank: int, with_users: bool = False) -> Callable[[People, np.ndarray], dict[str, float]]:
    """Products of weights of the people and processes on the items (Houlsby et al. 2012)."""

    def found(people: People, asked: np.ndarray) -> dict[str, float]:
        engine = BilinearEP(preference_factorization, tol=1e-3, num_steps=200, progress_bar=False)
        return _tested(engine, people, asked, with_users, num_users=NUM_USERS, rank=rank)

    return found


SYSTEMS: dict[str, Callable[[People, np.ndarray], dict[str, float]]] = {
    "CPU": factorised(20, with_users=True),
    "CP": factorised(20),
    "BI": by_moments(shared_moments),
    "BO": joint,
    "BO, scale learned": joint_with_scale,
    "SU": by_moments(alone),
}


def surface(seed: int) -> dict[str, Any]:
    """Log evidence by the lengths of users (rows) and items, of which the synthetic people have one and one."""
    people = shuffled(DATA["synthetic"](seed), seed)
    asked, found = asked_of(people, "synthetic"), factorised(5, with_users=True)

    def of_length(kernel: np.ndarray, log_length: float) -> np.ndarray:
        noise = (kernel[0, 0] - 1.0) * np.eye(len(kernel))
        return np.asarray((kernel - noise) ** np.exp(-2.0 * log_length) + noise)

    def fit(users: float, items: float) -> dict[str, float]:
        kernels = {
            "user_kernel": of_length(people.user_kernel, users),
            "kernel": of_length(people.kernel, items),
        }
        return found(people._replace(**kernels), asked)

    fits = [[fit(users, items) for items in _LENGTHS] for users in _LENGTHS]
    return {key: [[each[key] for each in row] for row in fits] for key in ("evidence", "converged")}


def all_systems(seed: int, name: str) -> dict[str, dict[str, float]]:
    """Errors of all systems on one draw, and CPU-seconds."""
    people, found = shuffled(DATA[name](seed), seed), {}
    for system, fit in SYSTEMS.items():
        values, seconds = cpu_seconds(fit, people, asked_of(people, name))
        found[system] = values | {"seconds": seconds}
    return found


def _rows(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name, system in itertools.product(DATA, SYSTEMS):
        draws = found[name]
        if not draws:
            continue
        of = [draw[system] for draw in draws]
        error = np.array([each["error"] for each in of])
        paired = error - [draw["SU"]["error"] for draw in draws]
        thesis = _THESIS[name].get(system.partition(", scale")[0])
        is_near = None if thesis is None else abs(error.mean() - thesis) <= 0.03
        ended = f"{sum(each['converged'] for each in of):.0f}" if "converged" in of[0] else ""
        seconds = f"{np.median([each['seconds'] for each in of]):.1f}"
        yield name, system, len(of), mean_and_error(error), mean_and_error(paired), thesis, is_near, ended, seconds


def _scales(found: dict[str, list[Any]]) -> str:
    scales = {name: [draw["BO, scale learned"]["scale"] for draw in found[name]] for name in DATA}
    return ", ".join(
        f"{np.median(of):.2g} ({name}, {min(of):.2g} to {max(of):.2g})" for name, of in scales.items() if of
    )


def _surfaces(found: list[dict[str, Any]]) -> list[str]:
    """The first surface, and of all of them where the maximum is."""
    if not found:
        return []
    tables = [np.array(fits["evidence"]) for fits in found]
    places = [np.unravel_index(np.nanargmax(each), each.shape) for each in tables]
    maxima = [(_LENGTHS[users], _LENGTHS[items]) for users, items in places]
    are_met = [set(place) <= {0.0, 0.5} for place in maxima]
    converged = np.mean([fits["converged"] for fits in found])
    rows = zip(_LENGTHS, tables[0] - np.nanmax(tables[0]), strict=True)
    return blocks(
        "Log evidence of CPU with D = 5 on the first draw of the synthetic people, less its maximum (fig. 6.2):",
        table(
            "log length of users | " + " | ".join(f"of items {x:g}" for x in _LENGTHS),
            ((f"{length:g}", *(f"{value:.1f}" for value in row)) for length, row in rows),
        ),
        f"Maximum at log lengths in {{0, 0.5}}, which are 0 in truth: {verdict(all(are_met))}, true of {sum(are_met)} "
        f"of {len(are_met)} draws; maxima (users, items) at "
        + ", ".join(f"({users:g}, {items:g})" for users, items in maxima)
        + f". Of the fits {converged:.0%} were at 1e-3 after 200 iterations.",
    )


def main() -> None:
    """Fit and write."""
    experiments = {name: functools.partial(all_systems, name=name) for name in DATA}
    study = Study(__doc__, experiments | {"surface": surface}, draws=dict.fromkeys(DATA, 25) | {"surface": 1})
    found = study.run()
    asked = ", ".join(f"{number} ({name})" for name, number in _NUM_ASKED.items())
    lines = blocks(
        "# Models of many people's preferences",
        f"Share of wrong answers of {NUM_USERS} people, each trained on so many pairs: {asked}; all others are tests. "
        "Means over draws ± standard errors; table 6.1 of Houlsby (2014).",
        table(
            "data | system | draws | error | less that of SU, paired | thesis | within 0.03 | converged | CPU-s",
            _rows(found),
        ),
        "SU are processes of each person alone, BI utilities whose mean and covariance all share (EM), BO one process "
        "on people and items, CP products of D = 20 weights and processes on the items (BilinearEP, at most 200 "
        "iterations to 1e-3), CPU the same with processes on the people. All kernels have unit variance and the median "
        "length (one for the synthetic people, of whom it is known), and nothing was chosen by data, but for the scale "
        f"of the last BO, its standard deviation, which has the largest evidence: {_scales(found)}. CPU-s are medians "
        "of the draws, of which the first of each run compiles.",
        _surfaces(found["surface"]),
    )
    study.write("preference-models", lines)


if __name__ == "__main__":
    main()
