"""Models of many people's preferences: ``python -m benchmarks.preferences.models WORK`` writes the table.

The protocol of table 6.1 of Houlsby (2014): 100 people answer so many of all pairs of items and are tested on the
others; errors are shares of wrong answers. ``WORK`` keeps one file for each draw, so that a run that was ended goes on;
``--draws`` says how many there are at most, ``--minutes`` when to begin no other. Three quarters
of an hour for 25 draws.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.infer import EP, BilinearEP
from numpyro_ext.models import joint_preference_gp, preference_factorization

from ..harness import table_head, write_report
from ..harness.repeats import begin, keep, kept_draws, parser_of_draws
from .pairs import mean_and_error
from .people import DATA, NUM_USERS, People, all_pairs, alone, shared_moments

_NUM_ASKED = {"synthetic": 30, "sushi": 20, "jura": 15}
_NUM_WITH_ALL = 4
"""Draws of the systems that were not asked for, which say what the rank and a shared utility change."""
_LENGTHS = -1.5, -0.5, 0.0, 0.5, 1.5
"""Logarithms of the lengths of users and items, of the surface."""
_THESIS = {
    "synthetic": {"CPU": 0.162, "CP": 0.18, "BI": 0.175, "BO": 0.157, "SU": 0.226},
    "sushi": {"CPU": 0.171, "CP": 0.163, "BI": 0.16, "BO": 0.266, "SU": 0.187},
    "jura": {"CPU": 0.159, "CP": 0.153, "BI": 0.153, "BO": 0.254, "SU": 0.181},
}


def asked_of(people: People, name: str) -> np.ndarray:
    """Which pairs each person is asked: the same in all draws of people, so that their fits share their programs."""
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


def _error(engine: Any, test: list[np.ndarray], given: dict[str, Any]) -> float:
    return float(np.mean(np.asarray(engine.log_predictive(*test, **given)["won"]) < np.log(0.5)))


def by_moments(fit: Callable[..., Callable[..., Any]]) -> Callable[[People, np.ndarray], dict[str, float]]:
    """Of a method that finds moments of the differences of all pairs."""

    def found(people: People, asked: np.ndarray) -> dict[str, float]:
        mean, _ = fit(people.answers, people.kernel)(asked)
        return {"error": float(np.mean((mean > 0)[~asked] != (people.answers == 1)[~asked]))}

    return found


def joint(people: People, asked: np.ndarray) -> dict[str, float]:
    """One Gaussian process on people and items (Bonilla et al. 2010), of unit variance."""
    train, test = _parts(people, asked)
    engine = EP(joint_preference_gp, hyper_values={"scale": 1.0}, tol=1e-3, progress_bar=False)
    given: dict[str, Any] = {"kernel": people.kernel, "user_kernel": people.user_kernel}
    engine.run(jax.random.key(0), *train, **given)
    return {"error": _error(engine, test, given), "evidence": float(engine.log_evidence)}


def _joint_with_scale(
    user: Any, first: Any, second: Any, won: Any = None, *, kernel: np.ndarray, user_kernel: np.ndarray
) -> None:
    size = numpyro.param("size", 2.0, constraint=dist.constraints.positive)
    joint_preference_gp(user, first, second, won, kernel=size**2 * kernel, user_kernel=user_kernel)


def joint_with_scale(people: People, asked: np.ndarray) -> dict[str, float]:
    """The same, its standard deviation by the evidence."""
    train, test = _parts(people, asked)
    engine = EP(_joint_with_scale, hyper_values={"scale": 1.0}, tol=1e-2, progress_bar=False)
    given: dict[str, Any] = {"kernel": people.kernel, "user_kernel": people.user_kernel}
    engine.run(jax.random.key(0), *train, **given)
    ended = {"evidence": float(engine.log_evidence), "converged": float(engine.diagnostics.converged)}
    return {"error": _error(engine, test, given), "scale": float(engine.hyper["size"].value), **ended}


def factorised(
    rank: int, with_users: bool = False, shared: bool = False
) -> Callable[[People, np.ndarray], dict[str, float]]:
    """Products of weights of the people and processes on the items (Houlsby et al. 2012)."""

    def found(people: People, asked: np.ndarray) -> dict[str, float]:
        train, test = _parts(people, asked)
        engine = BilinearEP(preference_factorization, tol=1e-3, num_steps=200, progress_bar=False)
        given: dict[str, Any] = {"num_users": NUM_USERS, "kernel": people.kernel, "rank": rank, "shared": shared}
        given |= {"user_kernel": people.user_kernel} if with_users else {}
        engine.run(jax.random.key(0), *train, **given)
        ended = {"evidence": float(engine.log_evidence), "converged": float(engine.diagnostics.converged)}
        return {"error": _error(engine, test, given), **ended}

    return found


SYSTEMS: dict[str, Callable[[People, np.ndarray], dict[str, float]]] = {
    "CPU": factorised(20, with_users=True),
    "CP": factorised(20),
    "CP, D = 5": factorised(5),
    "CP, D = 5, shared utility": factorised(5, shared=True),
    "BI": by_moments(shared_moments),
    "BO": joint,
    "BO, scale learned": joint_with_scale,
    "SU": by_moments(alone),
}
_NOT_ASKED = "CP, D = 5", "CP, D = 5, shared utility"


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


def _compute(work: Path, num_draws: int, num_surfaces: int, minutes: float) -> None:
    end = time.monotonic() + 60.0 * minutes

    def all_systems(name: str, seed: int) -> dict[str, Any]:
        people = shuffled(DATA[name](seed), seed)
        found = {}
        for system, fit in SYSTEMS.items():
            if seed >= _NUM_WITH_ALL and system in _NOT_ASKED:
                continue
            begun = time.process_time()
            found[system] = fit(people, asked_of(people, name)) | {"seconds": time.process_time() - begun}
        return found

    for seed in range(num_draws):
        for name in DATA:
            keep(work / f"{name}-{seed}.json", functools.partial(all_systems, name, seed), end)
        if seed < num_surfaces:
            keep(work / f"surface-{seed}.json", functools.partial(surface, seed), end)


def _rows(work: Path) -> Iterator[str]:
    yield from table_head(
        "data | system | draws | error | less that of SU, paired | thesis | within 0.03 | converged | CPU-s"
    )
    for name in DATA:
        all_draws = kept_draws(work, name)
        for system in SYSTEMS if all_draws else ():
            draws = [draw for draw in all_draws if system in draw]
            of = [draw[system] for draw in draws]
            paired = mean_and_error(each["error"] - draw["SU"]["error"] for each, draw in zip(of, draws, strict=True))
            thesis = _THESIS[name].get(system.partition(", scale")[0])
            error = np.mean([each["error"] for each in of])
            is_near = "" if thesis is None else "yes" if abs(error - thesis) <= 0.03 else "no"
            ended = f"{sum(each['converged'] for each in of):.0f}" if "converged" in of[0] else ""
            seconds = f"{np.median([each['seconds'] for each in of]):.1f}"
            cells = [name, system, str(len(of)), mean_and_error(each["error"] for each in of), paired]
            yield f"| {' | '.join([*cells, '' if thesis is None else f'{thesis:g}', is_near, ended, seconds])} |"


def _scales(work: Path) -> str:
    found = {name: [draw["BO, scale learned"]["scale"] for draw in kept_draws(work, name)] for name in DATA}
    return ", ".join(
        f"{np.median(of):.2g} ({name}, {min(of):.2g} to {max(of):.2g})" for name, of in found.items() if of
    )


def _targets(work: Path) -> Iterator[str]:
    """What was asked of the means, and whether it is so."""
    errors = {
        name: {
            system: np.array([draw[system]["error"] for draw in draws])
            for system in SYSTEMS
            if system not in _NOT_ASKED
        }
        for name in DATA
        if (draws := kept_draws(work, name))
    }

    def said(what: str, is_met: bool, *differences: np.ndarray) -> str:
        of = ", ".join(mean_and_error(each) for each in differences)
        return f"- {what}: {'**met**' if is_met else '**missed**'} ({of})."

    for name, of in errors.items():
        for system in ("BI", "CP"):
            less = of[system] - of["SU"]
            yield said(f"{name}: {system} below SU", less.mean() < 0.0, less)
        less = of["CPU"] - of["CP"]
        below = name == "synthetic"
        what = f"{name}: CPU {'below' if below else 'not below'} CP"
        yield said(what, (less.mean() < 0.0) == below, less)
        for system in ("BO", "BO, scale learned"):
            others = [of[system] - of[other] for other in ("CPU", "CP", "BI", "SU")]
            if name == "synthetic":
                what = f"{name}: {system}: best (less CPU, CP, BI, SU)"
                yield said(what, all(x.mean() <= 0.0 for x in others), *others)
            if name == "sushi":
                what = f"{name}: {system}: last (less CPU, CP, BI, SU)"
                yield said(what, all(x.mean() >= 0.0 for x in others), *others)


def _surfaces(work: Path) -> Iterator[str]:
    """The first surface, and of all of them where the maximum is."""
    places = []
    for seed, fits in enumerate(kept_draws(work, "surface")):
        table = np.array(fits["evidence"])
        users, items = np.unravel_index(np.nanargmax(table), table.shape)
        places.append((_LENGTHS[users], _LENGTHS[items]))
        if seed:
            continue
        yield "Log evidence of CPU with D = 5 on the first draw of the synthetic people, less its maximum (fig. 6.2):"
        yield ""
        yield from table_head("log length of users | " + " | ".join(f"of items {x:g}" for x in _LENGTHS))
        for length, row in zip(_LENGTHS, table - np.nanmax(table), strict=True):
            yield f"| {length:g} | " + " | ".join(f"{value:.1f}" for value in row) + " |"
        yield ""
    if places:
        converged = np.mean([fits["converged"] for fits in kept_draws(work, "surface")])
        are_met = [set(place) <= {0.0, 0.5} for place in places]
        verdict = "**met**" if all(are_met) else "**missed**"
        yield (
            f"Maximum at log lengths in {{0, 0.5}}, which are 0 in truth: {verdict}, "
            f"true of {sum(are_met)} of {len(are_met)} draws; maxima (users, items) at "
            + ", ".join(f"({users:g}, {items:g})" for users, items in places)
            + f". Of the fits {converged:.0%} were at 1e-3 after 200 iterations."
        )
        yield ""


def main() -> None:
    """Fit and write."""
    parser = parser_of_draws(__doc__)
    parser.add_argument("--surfaces", type=int, default=1)
    arguments = begin(parser)
    work: Path = arguments.work
    if not arguments.write:
        _compute(work, arguments.draws, arguments.surfaces, arguments.minutes)
    asked = ", ".join(f"{number} ({name})" for name, number in _NUM_ASKED.items())
    lines = [
        "# Models of many people's preferences",
        "",
        f"Share of wrong answers of {NUM_USERS} people, each trained on so many pairs: {asked}; all others are tests. "
        "Means over draws ± standard errors; table 6.1 of Houlsby (2014).",
        "",
        *_rows(work),
        "",
        "SU are processes of each person alone, BI utilities whose mean and covariance all share (EM), BO one process "
        "on people and items, CP products of D = 20 weights and processes on the items (BilinearEP, at most 200 "
        "iterations to 1e-3), CPU the same with processes on the people. All kernels have unit variance and the median "
        "length (one for the synthetic people, of whom it is known), and nothing was chosen by data, but for the scale "
        f"of the last BO, its standard deviation, which has the largest evidence: {_scales(work)}. CPU-s are medians "
        f"of the draws, of which the first of each run compiles. D = 5 in the first {_NUM_WITH_ALL} draws only.",
        "",
        *_surfaces(work),
        "What was asked (differences in brackets):",
        "",
        *_targets(work),
    ]
    write_report("preference-models", lines, script="preferences.models", remarks=work / "remarks.md")


if __name__ == "__main__":
    main()
