"""Ratings of MovieLens-100K with noise of their own: ``python -m benchmarks.ratings_table WORK`` prints the table.

Protocol of Houlsby (2014), section 7.4.1: users and items with ten ratings at least, four fifths to learn from, ten
components. Each fit is kept in the folder ``WORK``, so that a run that was ended goes on.
"""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from numpyro_ext.datasets import data_path
from numpyro_ext.infer import BilinearEP
from numpyro_ext.models import heteroscedastic_ratings

from .harness import Study, kept_draws, mean_and_error, table_head

_LEVELS, _RANK, _FEWEST, _TOL = 5, 10, 10, 1e-3
_SYSTEMS: dict[str, tuple[dict[str, Any], float, float]] = {
    "HOMF": ({"heteroscedastic": True, "learn_cuts": True}, -1.203, 0.895),
    "HOMF-NoB": ({"heteroscedastic": True, "learn_cuts": False}, -1.208, 0.895),
    "OMF": ({"heteroscedastic": False, "learn_cuts": True}, -1.234, 0.894),
    "OMF-NoB": ({"heteroscedastic": False, "learn_cuts": False}, -1.243, 0.895),
    "BMM": ({}, -1.493, 1.077),
}
"""Options of the model, and the mean test log likelihood and the root mean squared error of the thesis."""


def ratings() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, items and levels from zero, of users and items that have ten ratings at least."""
    with gzip.open(data_path("ml-100k", "ratings.csv.gz"), "rt") as file:
        users, items, levels = np.loadtxt(file, delimiter=",", skiprows=1, usecols=(0, 1, 2), dtype=int).T
    while True:
        is_kept = (np.bincount(users)[users] >= _FEWEST) & (np.bincount(items)[items] >= _FEWEST)
        if is_kept.all():
            break
        users, items, levels = (x[is_kept] for x in (users, items, levels))
    users, items = (np.unique(x, return_inverse=True)[1] for x in (users, items))
    return users, items, levels - 1


def split(seed: int) -> tuple[dict[str, Any], list[np.ndarray], list[np.ndarray]]:
    """Sizes, and users, items and levels to learn from and to test."""
    user, item, level = ratings()
    order = np.random.default_rng(seed).permutation(user.size)
    train, test = np.split(order, [round(0.8 * user.size)])
    sizes = {"num_users": int(user.max()) + 1, "num_items": int(item.max()) + 1, "rank": _RANK, "num_levels": _LEVELS}
    return sizes, [x[train] for x in (user, item, level)], [x[test] for x in (user, item, level)]


def fit(system: str, seed: int) -> dict[str, Any]:
    """Test log likelihood and error of one system on one split."""
    sizes, train, test = split(seed)
    start = time.process_time()
    if system == "BMM":
        chance, found = rating_types(sizes, train, seed)(test), {}
    else:
        flags = _SYSTEMS[system][0]
        engine = BilinearEP(heteroscedastic_ratings, damping=0.9, tol=_TOL, num_steps=200, progress_bar=False)
        engine.run(jax.random.key(seed), *train, **sizes, **flags)
        found = {"seconds": time.process_time() - start}
        levels = [np.full(test[0].size, k) for k in range(_LEVELS)]
        scores = [engine.log_predictive(*test[:2], level, **sizes, **flags)["rating"] for level in levels]
        chance = np.exp(np.stack([np.asarray(score) for score in scores], 1))
        found |= {"iterations": int(engine.diagnostics.num_steps), "converged": bool(engine.diagnostics.converged)}
    score = np.log(chance[np.arange(test[2].size), test[2]])
    error = np.sqrt(np.mean((chance @ np.arange(_LEVELS) - test[2]) ** 2))
    return {
        "log_likelihood": float(score.mean()),
        "error": float(error),
        "seconds": time.process_time() - start,
        "load": os.getloadavg()[1],
        **found,
    }


def rating_types(sizes: dict[str, Any], train: list[np.ndarray], seed: int) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Ten types of users with a table of levels for each item, at the mode by expectation maximisation; priors are
    Dirichlet with one observation more in each place than a flat one."""
    user, item, level = train
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.ones(_RANK), sizes["num_users"])
    for _ in range(200):
        table = np.ones((sizes["num_items"], _LEVELS, _RANK))
        np.add.at(table, (item, level), share[user])
        table /= table.sum(1, keepdims=True)
        log_share = np.tile(np.log((share.sum(0) + 1.0) / (share.shape[0] + _RANK)), (share.shape[0], 1))
        np.add.at(log_share, user, np.log(table[item, level]))
        share = np.exp(log_share - log_share.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
    return lambda cells: np.einsum("cj,clj->cl", share[cells[0]], table[cells[1]])


def report(work: Path) -> list[str]:
    """The table of what is kept."""
    kept = {system: kept_draws(work, system) for system in _SYSTEMS}
    lines = [
        f"MovieLens-100K, users and items with {_FEWEST} ratings at least, rank {_RANK}, `BilinearEP` with "
        f"`damping=0.9, tol={_TOL:g}`. NoB: cut points that are not learned. BMM: ten types of users. CPU "
        "seconds of a fit with reading and compilation, and load of the two cores. Differences to HOMF are paired.",
        "",
        *table_head(
            "system | splits | test log likelihood | less HOMF | thesis | root mean squared error | thesis | "
            "CPU s | load | iterations | converged"
        ),
    ]
    best = np.array([found["log_likelihood"] for found in kept["HOMF"]])
    for system, (_, likelihood, error) in _SYSTEMS.items():
        found = kept[system]
        if not found:
            continue
        values, errors, seconds, load = (
            np.array([one[name] for one in found]) for name in ("log_likelihood", "error", "seconds", "load")
        )
        gap = _in_words(values - best[: len(values)], "+") if len(best) >= len(values) else ""
        steps = ", ".join(str(one["iterations"]) for one in found if "iterations" in one)
        settled = f"{sum(one['converged'] for one in found)} of {len(found)}" if steps else ""
        lines.append(
            f"| {system} | {len(found)} | {_in_words(values)} | {gap} | {likelihood} | "
            f"{_in_words(errors)} | {error} | {seconds.mean():.0f} | {load.mean():.0f} | {steps} | "
            f"{settled} |"
        )
    return lines


def _in_words(values: np.ndarray, sign: str = "") -> str:
    return mean_and_error(values, sign, 4) if len(values) > 1 else f"{values[0]:{sign}.4f}"


def main() -> None:
    """Compute what is not kept, and print the table."""
    study = Study(__doc__, {system: partial(fit, system) for system in _SYSTEMS})
    study.run()
    print("\n".join(report(study.work)))


if __name__ == "__main__":
    main()
