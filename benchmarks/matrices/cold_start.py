"""Newcomers to MovieLens-100K asked ten questions: ``python -m benchmarks.matrices.cold_start WORK`` writes a page.

Protocol of Houlsby (2014), section 7.4.2: 943 users and the 1000 films with most ratings. A quarter of the users (or
films), with 14 ratings at least, are newcomers: one rating known, three held out. All others are fitted once for each
draw, and the ratings of the newcomers are divided several times. Each draw is kept in the folder ``WORK``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax import random

from numpyro_ext.design import (
    cold_start,
    empirical_entropy,
    expected_information_gain,
    predictive_entropy,
    random_scores,
)
from numpyro_ext.infer import BilinearEP
from numpyro_ext.models import heteroscedastic_ratings

from ..baselines.rating_types import RatingTypes, entropy
from ..harness import Study, blocks, mean_and_error, table
from .ratings import ratings

_DIVISIONS, _NUM_ITEMS, _LEAST, _JUDGED, _JUDGE_DRAWS = 5, 1000, 14, (0, 5), 4000
_SIZES = {"rank": 10, "num_levels": 5}
_NUM_QUERIES = 10
_THESIS = {
    "HOMF-U": (-918, -928, -926, -920),
    "OMF-U": (-926, -927, -929, -926),
    "BMM-U": (-989, -1001, -997, -988),
    "HOMF-I": (-1085, -1103, -1095, -1099),
    "OMF-I": (-1110, -1112, -1111, -1113),
    "BMM-I": (-1160, -1186, -1171, -1170),
}
"""Summed test log likelihood after ten queries of the first four strategies."""
_RULES = ("100 draws", "20 points", "mode")


def cells() -> list[np.ndarray]:
    """Users, films and levels from zero."""
    user, item, level = ratings()
    popular = np.argsort(-np.bincount(item), kind="stable")[:_NUM_ITEMS]
    kept = np.isin(item, popular)
    return [*(np.unique(x[kept], return_inverse=True)[1] for x in (user, item)), level[kept]]


def chosen(index: np.ndarray, seed: int) -> np.ndarray:
    """Numbers of the newcomers."""
    number = np.bincount(index)
    able = np.flatnonzero(number >= _LEAST)
    return np.sort(np.random.default_rng(seed).permutation(able)[: round(0.25 * number.size)])


def fitted(system: str, side: int, seed: int, folder: Path | None) -> BilinearEP:
    """The fit of all others, from the folder of fits if it has it."""
    path = None if folder is None else folder / f"{system}-{'UI'[side]}-{seed}.npz"
    model = partial(heteroscedastic_ratings, heteroscedastic=system == "HOMF")
    if path is not None and path.exists():
        return BilinearEP.load(path, model)
    data = cells()
    is_known = ~np.isin(data[side], chosen(data[side], seed))
    known = [x[is_known] for x in data]
    known[side] = np.unique(known[side], return_inverse=True)[1]
    engine = BilinearEP(model, damping=0.9, tol=1e-3, num_steps=300, progress_bar=False)
    numbers = {"num_users": int(known[0].max()) + 1, "num_items": int(known[1].max()) + 1}
    engine.run(random.key(seed), *known, **numbers, **_SIZES)
    if path is not None:
        engine.save(path)
    return engine


class _Judge:
    """The information gain by draws, which is asked for, and what is lost by it and by cheaper rules."""

    def __init__(self) -> None:
        self.lost: dict[str, list[float]] = {rule: [] for rule in _RULES}
        self._step = 0

    def __call__(self, source: Any, *, rng_key: Any) -> dict[str, np.ndarray]:
        found = expected_information_gain(source, rng_key=rng_key)
        if self._step in _JUDGED:
            (name,) = found
            scores = [found[name]]
            for method in ("sigma-points", "mode"):
                scores.append(expected_information_gain(source, method=method, rng_key=rng_key)[name])
            self._compare(source._people, np.isfinite(found[name]), scores, rng_key)
        self._step += 1
        return found

    def _compare(self, people: Any, is_candidate: np.ndarray, scores: list[np.ndarray], rng_key: Any) -> None:
        size = people.met.prior.mean.shape[1]
        white = random.normal(random.fold_in(rng_key, 99), (_JUDGE_DRAWS, size))
        truth = np.where(is_candidate, np.asarray(people.information(white)), -np.inf)
        person = np.asarray(people.met.person)
        for rule, score in zip(_RULES, scores, strict=True):
            for one in range(len(people.chosen)):
                mine = person == one
                best = truth[mine].max()
                self.lost[rule].append(float((best - truth[mine][np.argmax(score[mine])]) / best))


def learn(system: str, side: int, study: Callable[[], Study], seed: int) -> dict[str, Any]:
    """Curves of one fit."""
    engine, data = fitted(system, side, seed, study().options.fits), cells()
    newcomers = chosen(data[side], seed)
    mine = np.isin(data[side], newcomers)
    own = [x[mine] for x in data]
    own[side] = np.searchsorted(newcomers, own[side])
    strategies = {
        "information, 100 draws": expected_information_gain,
        "entropy": predictive_entropy,
        "entropy of frequencies": empirical_entropy,
        "random": random_scores,
        "information, 20 points": partial(expected_information_gain, method="sigma-points"),
        "information at the mode": partial(expected_information_gain, method="mode"),
    }
    options: dict[str, Any] = {("num_users", "num_items")[side]: newcomers.size}
    ask = partial(cold_start, engine, own, new=("tastes", "traits")[side], share=None, show_progress=False, **options)
    curves = ask(acquisitions=strategies, num_repeats=_DIVISIONS, rng_key=random.key(seed))
    judge = _Judge()
    ask(acquisitions={"judged": judge}, num_queries=max(_JUDGED) + 1, rng_key=random.key(100 + seed))
    return {
        "strategies": list(strategies),
        "log_likelihood": curves["log_likelihood"].values.tolist(),
        "error": curves["error"].values.tolist(),
        "seconds_of": curves["seconds"].isel(query=slice(1, None)).median(("query", "repeat")).values.tolist(),
        "lost": judge.lost,
        "steps": int(engine.diagnostics.num_steps),
        "converged": bool(engine.diagnostics.converged),
        "newcomers": int(newcomers.size),
        "ratings": int(mine.sum()),
        "load": os.getloadavg()[1],
    }


def learn_types(side: int, seed: int) -> dict[str, Any]:
    """Curves of ten types of people (or of films), on the same divisions of the ratings as :func:`learn`."""
    data = cells()
    newcomers = chosen(data[side], seed)
    mine = np.isin(data[side], newcomers)
    person, other, level = (x[mine] for x in (data[side], data[1 - side], data[2]))
    person = np.searchsorted(newcomers, person)
    known = [x[~mine] for x in (np.unique(data[side], return_inverse=True)[1], data[1 - side], data[2])]
    known[0] = np.unique(known[0], return_inverse=True)[1]
    sizes = {"num_items": int(data[1 - side].max()) + 1, "num_levels": 5, "num_types": 10}
    types = RatingTypes.fitted(*known, **sizes, seed=seed)
    counts = np.zeros((sizes["num_items"], 5))
    np.add.at(counts, (known[1], known[2]), 1.0)
    frequency = entropy(counts / np.maximum(counts.sum(1, keepdims=True), 1.0))[other]
    strategies: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "information": lambda share: types.information(share, other),
        "entropy": lambda share: entropy(types.levels(share, other)),
        "entropy of frequencies": lambda share: frequency,
        "random": lambda share: np.zeros(len(share)),
    }
    curves = np.zeros((3, len(strategies), _NUM_QUERIES + 1, _DIVISIONS))
    for repeat, key in enumerate(random.split(random.key(seed), _DIVISIONS)):
        order = np.lexsort((np.asarray(random.uniform(random.split(key, 3)[0], person.shape)), person))
        rank = np.empty(person.size, int)
        rank[order] = np.arange(person.size) - np.searchsorted(person[order], person[order])
        is_held_out = (rank >= 1) & (rank < 4)
        for number, score in enumerate(strategies.values()):
            rng, is_used = np.random.default_rng((seed, repeat, number)), rank < 1
            for step in range(_NUM_QUERIES + 1):
                began = time.process_time()
                share = types.shares(person[is_used], other[is_used], level[is_used], newcomers.size)[person]
                found, truth = types.levels(share[is_held_out], other[is_held_out]), level[is_held_out]
                curves[0, number, step, repeat] = np.sum(np.log(found[np.arange(truth.size), truth]))
                curves[1, number, step, repeat] = np.sqrt(np.mean((found @ np.arange(5) - truth) ** 2))
                values = np.where(is_used | is_held_out, -np.inf, score(share))
                order = np.lexsort((rng.random(values.size), values, person))
                last = np.searchsorted(person[order], np.arange(newcomers.size), side="right") - 1
                is_used[order[last]] = True
                curves[2, number, step, repeat] = time.process_time() - began
    return {
        "strategies": list(strategies),
        "log_likelihood": curves[0].tolist(),
        "error": curves[1].tolist(),
        "seconds_of": np.median(curves[2], (1, 2)).tolist(),
        "newcomers": int(newcomers.size),
        "ratings": int(mine.sum()),
    }


def dense_round(study: Callable[[], Study], seed: int) -> dict[str, Any]:
    """CPU-seconds of a round in which 235 newcomers could be asked about each of 1000 films."""
    engine = fitted("HOMF", 0, seed, study().options.fits)
    user, item = np.divmod(np.arange(235 * _NUM_ITEMS), _NUM_ITEMS)
    level = np.random.default_rng(seed).integers(0, 5, user.size)
    curves = cold_start(
        engine,
        (user, item, level),
        new="tastes",
        share=None,
        num_users=235,
        num_queries=4,
        acquisitions={"information": expected_information_gain},
        show_progress=False,
    )
    return {"seconds": curves["seconds"].values.reshape(-1)[2:].tolist(), "load": os.getloadavg()[0]}


def _rows(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name, thesis in _THESIS.items():
        if kept := found[name]:
            values, errors = (np.concatenate([one[key] for one in kept], 2) for key in ("log_likelihood", "error"))
            seconds = np.mean([one["seconds_of"] for one in kept], 0)
            for number, strategy in enumerate(kept[0]["strategies"]):
                gap = mean_and_error((values[number] - values[0]).mean(0), "+") if number else ""
                target = thesis[number] if number < len(thesis) else ""
                error = mean_and_error(errors[number, -1], digits=3)
                score = values.shape[2], mean_and_error(values[number, -1]), target
                yield name, strategy, *score, error, gap, f"{seconds[number]:.2f}"


def _losses(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name, kept in found.items():
        if kept and "lost" in kept[0]:
            lost = (np.concatenate([one["lost"][rule] for one in kept]) for rule in _RULES)
            ended = (f"{one['steps']}{'' if one['converged'] else ' (not settled)'}" for one in kept)
            sizes = kept[0]["newcomers"], kept[0]["ratings"]
            yield name, *(mean_and_error(x, digits=3) for x in lost), ", ".join(ended), *sizes


def main() -> None:
    """Compute what is not kept, and write the tables."""
    sides = [(system, side) for side in range(2) for system in ("HOMF", "OMF")]
    experiments = {f"{system}-{'UI'[side]}": partial(learn, system, side, lambda: study) for system, side in sides}
    experiments |= {f"BMM-{'UI'[side]}": partial(learn_types, side) for side in range(2)}
    experiments["round"] = partial(dense_round, lambda: study)
    study = Study(__doc__, experiments, draws={**dict.fromkeys(experiments, 2), "round": 1})
    study.parser.add_argument("--fits", type=Path, help="folder that keeps the fits of all others")
    found = study.run()
    rounds = [f"{min(one['seconds']):.2f} CPU s, load {one['load']:.0f}" for one in found["round"]]
    lines = blocks(
        "# Newcomers: ten questions each",
        table(
            "system and side | strategy | curves | log likelihood after 10 | thesis | root mean squared error | area, "
            "less that of information | CPU s a round",
            _rows(found),
        ),
        table(
            f"system and side | {' | '.join(f'lost by {rule}' for rule in _RULES)} | iterations | newcomers | ratings",
            _losses(found),
        ),
        f"A round of 235 newcomers and 1000 films each: {', '.join(rounds)}.",
    )
    study.write("newcomers", lines)


if __name__ == "__main__":
    main()
