"""The table of Sushi A of Ko (2017), section 3.4, with and without mean utilities, for ``held_out``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.datasets import data_path, load_sushi
from numpyro_ext.infer import EP
from numpyro_ext.linalg import pair_covariance

from ..harness import blocks, table
from .pairs import BITS, along_em, kernel_of, mean_and_error, sushi_pairs, sushi_users
from .people import features_of_people
from .sushi import start_of

_STEPS = 1, 1, 2, 4, 8, 16
"""Iterations of EM after each of which the validation pairs are asked."""
_THESIS = {
    "GPVU-EP": 0.798,
    "GPVU-JK": 0.854,
    "VU-EP": 0.856,
    "GPitem-EP": 0.875,
    "GPfull": 0.897,
    "GPitem-LP": 0.910,
}
_NUM_USERS, _NUM_ITEMS = 200, 10


def _joint_process(covariance: Any, first: Any, second: Any, won: Any, seen: Any, *, with_mean: bool) -> None:
    """Differences of one process on people and items; its scale, and the mean of each item where asked, learned."""
    size = numpyro.param("size", 1.0, constraint=dist.constraints.positive)
    b = numpyro.param("b", jnp.zeros(_NUM_ITEMS)) if with_mean else jnp.zeros(_NUM_ITEMS)
    g = numpyro.sample("g", dist.MultivariateNormal(b[first] - b[second], size**2 * covariance))
    with handlers.mask(mask=seen):
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(g)), obs=won)


def _by_validation(parts: list[np.ndarray], seed: int, with_mean: bool) -> dict[str, dict[str, float]]:
    """Each system after the iterations, and with the rank, that the validation pairs choose."""
    K, eye = kernel_of(load_sushi("a").item_features, 10.0), np.eye(_NUM_ITEMS)
    systems: dict[str, tuple[np.ndarray, tuple[int, ...], str]] = {
        "GPVU-EP": (K, (1, 2), "ep"),
        "GPVU-JK": (K, (1, 2), "jaakkola"),
        "VU-EP": (eye, (1, 2), "ep"),
        "GPitem-EP": (K, (0,), "ep"),
        "GPitem-LP": (K, (0,), "laplace"),
    }
    found = {}
    for name, (kernel, ranks, method) in systems.items():
        options: Any = {"method": method, "learn_mean": with_mean, "num_users": _NUM_USERS}
        start = start_of(kernel, seed)
        tried = [each for rank in ranks for each in along_em(parts, kernel, start[:, :rank], _STEPS, **options)]
        _, chosen, rank, count = min(tried)
        found[name] = {"loss": chosen, "rank": float(rank), "iterations": float(count)}
    return found


def _all_features(train: np.ndarray, test: np.ndarray, users: np.ndarray, with_mean: bool) -> dict[str, float]:
    """Loss by kernels on the features of people and items; the field is that of the pairs that are asked or tests."""
    both, seen = np.concatenate([train, test]), np.arange(len(train) + len(test)) < len(train)
    known = np.loadtxt(data_path("sushi", "sushi3.udata"))[users]
    of_people = kernel_of(features_of_people(known), 10.0)[np.ix_(both[:, 0], both[:, 0])]
    of_pairs = pair_covariance(kernel_of(load_sushi("a").item_features, 10.0), both[:, 1:], jitter=0.0)
    covariance = of_people * of_pairs + 1e-6 * np.eye(len(both))
    engine = EP(_joint_process, progress_bar=False)
    engine.run(jax.random.key(0), covariance, *both[:, 1:].T, np.ones(len(both), int), seen, with_mean=with_mean)
    found = norm.logcdf(
        np.asarray(engine.posterior["g"].mean) / np.sqrt(1.0 + np.asarray(engine.posterior["g"].variance))
    )
    size = float(engine.hyper["size"].value)
    ended = float(engine.diagnostics.converged)
    return {"loss": float(-np.mean(np.asarray(found)[~seen]) / BITS), "size": size, "converged": ended}


def sushi_a_thesis(seed: int) -> dict[str, Any]:
    """200 people, three pairs each, one more to choose the rank and the number of iterations by, and one held out."""
    (parts, _), users = sushi_pairs(seed), sushi_users(1000 + seed)
    found: dict[str, Any] = {}
    for with_mean, end in ((True, ""), (False, ", no b")):
        found |= {name + end: each for name, each in _by_validation(parts, seed, with_mean).items()}
        found["GPfull" + end] = _all_features(parts[0], parts[1], users, with_mean)
    return found


def page(draws: list[dict[str, Any]]) -> list[str]:
    """The table of the thesis beside its own, and paired differences."""

    def row(name: str) -> Iterator[str]:
        yield from (name, f"{_THESIS[name]:.3f}")
        for end in ("", ", no b"):
            each = [draw[name + end] for draw in draws]
            yield mean_and_error(one["loss"] for one in each)
            for key in ("rank", "iterations"):
                yield f"{np.median([one[key] for one in each]):.0f}" if key in each[0] else ""

    def paired(first: str, second: str) -> Iterator[str]:
        yield f"{first} less {second}"
        for end in ("", ", no b"):
            yield mean_and_error(draw[first + end]["loss"] - draw[second + end]["loss"] for draw in draws)

    orders = [
        ("GPVU-EP", "VU-EP"),
        ("VU-EP", "GPitem-EP"),
        ("GPVU-EP", "GPitem-EP"),
        ("GPitem-EP", "GPfull"),
        ("GPVU-EP", "GPVU-JK"),
        ("GPitem-EP", "GPitem-LP"),
    ]
    return blocks(
        "# Held-out comparisons: the table of the thesis",
        f"Sushi A, {_NUM_USERS} people, 3 + 1 pairs, {len(draws)} draws. Losses are mean negative log probabilities in "
        "bits; a constant has 1. Errors are standard errors over draws; D and iterations are medians.",
        table("system | thesis | with b | D | iterations | without b | D | iterations", map(row, _THESIS)),
        "Paired differences; in the thesis all are negative:",
        table(" | with b | without b", (paired(*pair) for pair in orders)),
    )
