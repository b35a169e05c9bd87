"""Ratings of MovieLens-100K with noise of their own: ``python -m benchmarks.matrices.ratings WORK`` writes a page.

Protocol of Houlsby (2014), section 7.4.1: users and items with ten ratings at least, four fifths to learn from, ten
components. Each fit is kept in the folder ``WORK``, so that a run that was ended goes on.
"""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import ndtr

from numpyro_ext.datasets import data_path
from numpyro_ext.infer import BilinearEP, BilinearVG
from numpyro_ext.models import heteroscedastic_ratings

from ..baselines.rating_types import RatingTypes
from ..harness import Study, blocks, mean_and_error, table

_LEVELS, _RANK, _FEWEST, _TOL, _DRAWS = 5, 10, 10, 1e-3, 100
_SYSTEMS: dict[str, tuple[dict[str, Any], float, float]] = {
    "HOMF": ({"heteroscedastic": True, "learn_cuts": True}, -1.203, 0.895),
    "HOMF-NoB": ({"heteroscedastic": True, "learn_cuts": False}, -1.208, 0.895),
    "OMF": ({"heteroscedastic": False, "learn_cuts": True}, -1.234, 0.894),
    "OMF-NoB": ({"heteroscedastic": False, "learn_cuts": False}, -1.243, 0.895),
    "RBMF": ({}, -1.238, 0.898),
    "BMF": ({}, -1.277, 0.903),
    "BMM": ({}, -1.493, 1.077),
}
"""Options of the model, and the mean test log likelihood and the root mean squared error of the thesis."""


def read_ratings() -> np.ndarray:
    """Users, films and stars of MovieLens-100K, all from one."""
    with gzip.open(data_path("ml-100k", "ratings.csv.gz"), "rt") as file:
        return np.loadtxt(file, delimiter=",", skiprows=1, usecols=(0, 1, 2), dtype=int).T


def ratings() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, items and levels from zero, of users and items that have ten ratings at least."""
    users, items, levels = read_ratings()
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


def fit(seed: int, system: str) -> dict[str, Any]:
    """Test log likelihood and error of one system on one split."""
    sizes, train, test = split(seed)
    start = time.process_time()
    if not _SYSTEMS[system][0]:
        peer = types_of_users(sizes, train, seed) if system == "BMM" else gaussian_values(sizes, train, seed, system)
        chance, found = peer(test), {}
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


def types_of_users(
    sizes: dict[str, Any], train: list[np.ndarray], seed: int
) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Ten types of users with a table of levels for each item."""
    numbers = {"num_items": sizes["num_items"], "num_levels": _LEVELS, "num_types": _RANK}
    types = RatingTypes.fitted(*train, **numbers, seed=seed)
    share = types.shares(*train, sizes["num_users"])
    return lambda cells: types.levels(share[cells[0]], cells[1])


def normal_ratings(user: Any, item: Any, level: Any = None, *, heteroscedastic: bool, **sizes: int) -> None:
    """Levels as normal numbers around products: RBMF, with noise of users and items, or BMF, with one noise.

    Priors of components have means and variances of their own, as in HOMF, which are learned as points.
    """
    noise, vectors = [], []
    for side, number, index in (("user", sizes["num_users"], user), ("item", sizes["num_items"], item)):
        mean = numpyro.sample(f"{side}_mean", dist.Normal(0.0, 1.0).expand([sizes["rank"]]).to_event(1))
        variance = numpyro.sample(f"{side}_variance", dist.InverseGamma(5.0, 5.0).expand([sizes["rank"]]).to_event(1))
        with numpyro.plate(f"{side}s", number):
            vectors.append(numpyro.sample(side, dist.Normal(mean, jnp.sqrt(variance)).to_event(1))[index])
            if heteroscedastic:
                noise.append(numpyro.sample(f"{side}_noise", dist.InverseGamma(5.0, 5.0))[index])
    scale = jnp.sqrt(noise[0] * noise[1]) if noise else numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.sample("level", dist.Normal(jnp.sum(vectors[0] * vectors[1], axis=-1), scale), obs=level)


def gaussian_values(
    sizes: dict[str, Any], train: list[np.ndarray], seed: int, system: str
) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Chances of levels by ``BilinearVG`` on :func:`normal_ratings`, averaged over draws.

    A level's probability is that of the interval of half a step around it, and those at the ends have the tails.
    """
    centre = train[2].mean()
    numbers = {name: sizes[name] for name in ("num_users", "num_items", "rank")}
    engine = BilinearVG(normal_ratings, covariance="full", num_steps=300, num_restarts=0, progress_bar=False)
    values = (train[2] - centre).astype(np.float32)
    engine.run(jax.random.key(seed), *train[:2], values, **numbers, heteroscedastic=system == "RBMF")
    draws = {name: np.asarray(x) for name, x in engine.get_samples(num_samples=_DRAWS).items()}
    edges = np.arange(_LEVELS - 1) + 0.5 - centre

    def chance(cells: list[np.ndarray]) -> np.ndarray:
        user, item = cells[:2]
        total = np.zeros((user.size, _LEVELS))
        for k in range(_DRAWS):
            product = np.sum(draws["user"][k][user] * draws["item"][k][item], 1)
            is_shared = "noise" in draws
            scale = (
                draws["noise"][k] if is_shared else np.sqrt(draws["user_noise"][k][user] * draws["item_noise"][k][item])
            )
            below = ndtr((edges - product[:, None]) / np.reshape(scale, (-1, 1)))
            total += np.diff(np.pad(below, ((0, 0), (1, 1)), constant_values=((0.0, 0.0), (0.0, 1.0))), axis=1)
        return total / _DRAWS

    return chance


def _rows(kept: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
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
        scores = _in_words(values), gap, str(likelihood), _in_words(errors), str(error)
        yield system, len(found), *scores, f"{seconds.mean():.0f}", f"{load.mean():.0f}", steps, settled


def _in_words(values: np.ndarray, sign: str = "") -> str:
    return mean_and_error(values, sign, 4) if len(values) > 1 else f"{values[0]:{sign}.4f}"


def main() -> None:
    study = Study(__doc__, {system: partial(fit, system=system) for system in _SYSTEMS})
    found = study.run()
    lines = blocks(
        "# Ratings with noise of people and items",
        f"MovieLens-100K, users and items with {_FEWEST} ratings at least, rank {_RANK}, `BilinearEP` with "
        f"`damping=0.9, tol={_TOL:g}`. NoB: cut points that are not learned. RBMF and BMF: normal values, with and "
        "without noise of users and items, by `BilinearVG`. BMM: ten types of users. CPU "
        "seconds of a fit with reading and compilation, and load of the two cores. Differences to HOMF are paired.",
        table(
            "system | splits | test log likelihood | less HOMF | thesis | root mean squared error | thesis | "
            "CPU s | load | iterations | converged",
            _rows(found),
        ),
    )
    study.write("ratings", lines)


if __name__ == "__main__":
    main()
