"""Ratings of MovieLens-100K with noise of their own: ``python -m benchmarks.ratings_table WORK`` writes the table.

Protocol of Houlsby (2014), section 7.4.1: users and items with ten ratings at least, four fifths to learn from, ten
components. Each fit is kept in the folder ``WORK``, so that a run that was ended goes on.
"""

from __future__ import annotations

import gzip
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from numpyro_ext.datasets import data_path
from numpyro_ext.infer import BilinearEP
from numpyro_ext.models import heteroscedastic_ratings

from .repeats import begin, keep, kept_draws, mean_and_error, parser_of_draws
from .results_table import table_head, write_report

_LEVELS, _RANK, _FEWEST = 5, 10, 10
_SYSTEMS: dict[str, tuple[dict[str, bool], float, float]] = {
    "HOMF": ({"heteroscedastic": True, "learn_cuts": True}, -1.203, 0.895),
    "HOMF-NoB": ({"heteroscedastic": True, "learn_cuts": False}, -1.208, 0.895),
    "OMF": ({"heteroscedastic": False, "learn_cuts": True}, -1.234, 0.894),
    "OMF-NoB": ({"heteroscedastic": False, "learn_cuts": False}, -1.243, 0.895),
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


def fit(system: str, seed: int) -> dict[str, Any]:
    """Test log likelihood and error of one system on one split."""
    flags: dict[str, Any] = dict(_SYSTEMS[system][0])
    user, item, level = ratings()
    order = np.random.default_rng(seed).permutation(user.size)
    train, test = np.split(order, [round(0.8 * user.size)])
    sizes: dict[str, Any] = {
        "num_users": int(user.max()) + 1,
        "num_items": int(item.max()) + 1,
        "rank": _RANK,
        "num_levels": _LEVELS,
    }
    engine = BilinearEP(heteroscedastic_ratings, damping=0.9, num_steps=200, progress_bar=False)
    start = time.process_time()
    engine.run(jax.random.key(seed), user[train], item[train], level[train], **sizes, **flags)
    seconds = time.process_time() - start
    score = engine.log_predictive(user[test], item[test], level[test], **sizes, **flags)["rating"]
    mean = engine.predictive_mean(user[test], item[test], **sizes, **flags)["rating"]
    found = engine.diagnostics
    return {
        "log_likelihood": float(score.mean()),
        "error": float(np.sqrt(np.mean(np.square(np.asarray(mean) - level[test])))),
        "seconds": seconds,
        "iterations": int(found.num_steps),
        "converged": bool(found.converged),
        "num_train": train.size,
        "num_test": test.size,
        "sizes": sizes,
    }


def report(work: Path) -> list[str]:
    """The table of what is kept."""
    kept = {system: kept_draws(work, system) for system in _SYSTEMS}
    some = next(found[0] for found in kept.values() if found)
    sizes = some["sizes"]
    lines = [
        "# Ratings with noise of people and items",
        "",
        f"MovieLens-100K: {sizes['num_users']} users and {sizes['num_items']} items with {_FEWEST} ratings at least, "
        f"{some['num_train']} ratings to learn from and {some['num_test']} to test, rank {_RANK}, `BilinearEP` with "
        "`damping=0.9`. NoB: cut points that are not learned. Means and standard errors over splits; CPU seconds of a "
        "fit with its compilation. The differences to HOMF are paired by split.",
        "",
        *table_head(
            "system | splits | test log likelihood | less HOMF | thesis | root mean squared error | thesis | "
            "CPU s | iterations | converged"
        ),
    ]
    best = np.array([found["log_likelihood"] for found in kept["HOMF"]])
    for system, (_, likelihood, error) in _SYSTEMS.items():
        found = kept[system]
        if not found:
            lines.append(f"| {system} | 0 | not run | | {likelihood} | | {error} | | | |")
            continue
        values = np.array([one["log_likelihood"] for one in found])
        number = min(len(values), len(best))
        gap = mean_and_error(values[:number] - best[:number], "+", 4) if system != "HOMF" and number else ""
        errors = np.array([one["error"] for one in found])
        lines.append(
            f"| {system} | {len(found)} | {mean_and_error(values, digits=4)} | {gap} | {likelihood} | "
            f"{mean_and_error(errors, digits=4)} | {error} | {np.mean([one['seconds'] for one in found]):.0f} | "
            f"{np.mean([one['iterations'] for one in found]):.0f} | "
            f"{sum(one['converged'] for one in found)} of {len(found)} |"
        )
    if kept["HOMF"]:
        seconds = float(np.mean([one["seconds"] for one in kept["HOMF"]]))
        verdict = "met" if seconds <= 360.0 else "missed"
        lines += ["", f"A fit of HOMF: {seconds:.0f} CPU s. Target: 3 minutes on 2 cores, {verdict}."]
    return lines


def main() -> None:
    """Compute what is not kept, and write the table."""
    arguments = begin(parser_of_draws(__doc__, draws=5))
    end = time.monotonic() + 60.0 * arguments.minutes
    for seed in range(0 if arguments.write else arguments.draws):
        for system in ("HOMF", "OMF", "HOMF-NoB", "OMF-NoB"):
            keep(arguments.work / f"{system}-{seed}.json", partial(fit, system, seed), end)
    write_report("ratings", report(arguments.work), "ratings_table WORK", remarks=arguments.work / "remarks.md")


if __name__ == "__main__":
    main()
