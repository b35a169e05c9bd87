"""Comparisons of films, for ``held_out``."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from numpyro_ext.datasets import load_best_worst_pairs
from numpyro_ext.infer import collaborative_em

from ..harness import table_head
from .pairs import held_out, kernel_of, mean_and_error

STEPS_OF_FILMS = 10
MOST_PAIRS = 50
_GENRES = {"Action": 1, "Comedy": 5}
_NUM_LOVERS, _NUM_HELD_OUT, _NUM_SHOWN = 20, 100, (0, 1, 3, 10, 30, 100)


def movielens(seed: int) -> dict[str, Any]:
    """Best against worst films of MovieLens 100K: four pairs of each user who has more are held out, in nats.

    Each iteration of EM takes at most 50 random pairs of a user, and so do the posteriors that predict. No setting is
    chosen by data: rank and kernel are the thesis', and both systems make as many iterations, with the same pairs.
    """
    data = load_best_worst_pairs()
    train, test = held_out(data.pairs, 4, seed)
    K = kernel_of(data.item_features, 1.0)
    counts = np.bincount(train[:, 0], minlength=data.num_users)
    taken = int(np.minimum(counts, MOST_PAIRS).sum())
    sizes = {"users": int(np.sum(counts > 0)), "pairs": len(train), "taken": taken, "tests": len(test)}
    found: dict[str, Any] = {"counts": sizes}
    for name, covariance in (("GPVU-EP", "factor"), ("NPCA-EP", "free")):
        options: Any = {"covariance": covariance, "num_users": data.num_users, "num_pairs_per_user": MOST_PAIRS}
        options |= {"progress_bar": False, "rng_key": jax.random.key(seed)}
        fit, seconds = None, 0.0
        for stage in (1, 2):
            start = time.process_time()
            # While the prior moves, posteriors need not be exact.
            moving = options | {"num_steps": STEPS_OF_FILMS, "inference_tol": 1e-2}
            moving |= {"rng_key": jax.random.fold_in(options["rng_key"], stage)}
            fit = collaborative_em(train, K, 30, init=fit, **moving)
            seconds += time.process_time() - start
            end = collaborative_em(train, K, 30, init=fit, num_steps=0, **options)
            found[f"{name}, {stage * STEPS_OF_FILMS} iterations"] = {
                "loss": float(-end.log_predictive(*test.T).mean()),
                "stranger": float(-end.log_predictive(None, *test[:, 1:].T).mean()),
                "evidence": float(end.objective_trace[-1]),
                "seconds": seconds,
            }
    return found


def films(draws: list[dict[str, Any]]) -> list[str]:
    lines = ["# Best against worst films: MovieLens 100K", "", "Losses are in nats, where a constant has 0.693."]
    lines += [
        "",
        *table_head("seed | users | pairs for training | taken in each iteration | test pairs"),
    ]
    for number, draw in enumerate(draws):
        sizes = draw.pop("counts")
        lines.append(
            f"| {number} | " + " | ".join(f"{sizes[key]}" for key in ("users", "pairs", "taken", "tests")) + " |"
        )
    lines += ["", *table_head("system | loss | of the same people as strangers | by seed | log evidence | CPU-s")]
    for name in draws[0]:
        of = [draw[name] for draw in draws]
        each = ", ".join(f"{one['loss']:.3f}" for one in of)
        means = [np.mean([one[key] for one in of]) for key in ("evidence", "seconds")]
        losses, strangers = (mean_and_error(one[key] for one in of) for key in ("loss", "stranger"))
        lines.append(f"| {name} | {losses} | {strangers} | {each} | {means[0]:.0f} | {means[1]:.0f} |")
    names = [name for name in draws[0] if f"{2 * STEPS_OF_FILMS} " in name]
    wins = sum(draw[names[0]]["loss"] < draw[names[1]]["loss"] for draw in draws)
    ours = float(np.mean([draw[names[0]]["loss"] for draw in draws]))
    lines += ["", f"After {2 * STEPS_OF_FILMS} iterations GPVU-EP is below NPCA-EP on {wins} of {len(draws)} seeds."]
    lines += [f"The loss of GPVU-EP is {ours / 0.483 - 1.0:+.1%} from the 0.483 of Ko (2017), where it may be 10 %."]
    return lines


def lover_pairs(loved: np.ndarray, num_train: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Pairs of one who prefers any film of a genre: for training, held out, and others to which it says nothing.

    :param loved: whether each film is of the genre; minus one where it is to be left out.
    :return: each with the columns winner and loser. No film is in pairs of two kinds, and unrelated ones, of two films
        without the genre, are in random order.
    """
    with_it, without = (rng.permutation(np.flatnonzero(loved == value)) for value in (1, 0))
    half, third = len(with_it) // 2, len(without) // 3
    sides = (with_it[:half], without[:third]), (with_it[half:], without[third : 2 * third])
    numbers = num_train, _NUM_HELD_OUT
    found = [np.stack([rng.choice(one, n) for one in side], 1) for side, n in zip(sides, numbers, strict=True)]
    return *found, np.stack([rng.permutation(without[2 * third :])[:2] for _ in range(_NUM_HELD_OUT)])


def lovers_of_genres(seed: int) -> dict[str, Any]:
    """People who prefer films of one genre to all others, folded in with more and more of their pairs."""
    data = load_best_worst_pairs()
    options: Any = {"num_users": data.num_users, "num_pairs_per_user": MOST_PAIRS, "inference_tol": 1e-2}
    options |= {"num_steps": 2 * STEPS_OF_FILMS, "rng_key": jax.random.key(seed), "progress_bar": False}
    fit = collaborative_em(data.pairs, kernel_of(data.item_features, 1.0), 30, **options)
    is_known = np.bincount(data.pairs[:, 1:].ravel(), minlength=data.num_items) >= MOST_PAIRS
    rng, found = np.random.default_rng(seed), {}
    for genre, column in _GENRES.items():
        loved = np.where(is_known, data.item_features[:, column], -1.0)
        people = [lover_pairs(loved, max(_NUM_SHOWN), rng) for _ in range(_NUM_LOVERS)]
        by_number: dict[str, dict[str, list[float]]] = {}
        for number in _NUM_SHOWN:
            shown = [np.c_[np.full(number, user), train[:number]] for user, (train, _, _) in enumerate(people)]
            known = fit.fold_in(np.concatenate(shown), _NUM_LOVERS) if number else None
            of: dict[str, list[float]] = {"favoured": [], "unrelated": [], "moved": []}
            for user, (_, held, unrelated) in enumerate(people):
                stranger = fit.predict(None, *unrelated.T).probability
                favoured, others = (
                    fit.predict(None, *pairs.T) if known is None else known.predict(np.full(len(pairs), user), *pairs.T)
                    for pairs in (held, unrelated)
                )
                of["favoured"].append(float(favoured.probability.mean()))
                of["unrelated"].append(float(others.probability.mean()))
                of["moved"].append(float(np.abs(others.probability - stranger).mean()))
            by_number[str(number)] = of
        found[genre] = by_number
    return found


def lovers(draws: list[dict[str, Any]]) -> list[str]:
    """What is written of them."""
    lines = ["# Lovers of a genre among the films of MovieLens 100K", ""]
    lines += table_head("genre | pairs shown | P(favoured film wins) | P(first of an unrelated pair wins) | moved by")
    said = []
    for genre in draws[0]:
        means: dict[str, list[float]] = {"favoured": [], "unrelated": []}
        for number, of in draws[0][genre].items():
            cells = [mean_and_error(of[key]) for key in ("favoured", "unrelated", "moved")]
            lines.append(f"| {genre} | {number} | {' | '.join(cells)} |")
            for key, each in means.items():
                each.append(float(np.mean(of[key])))
        rises = all(np.diff(means["favoured"]) > 0.0)
        away = max(abs(np.array(means["unrelated"]) - 0.5))
        first, last = means["favoured"][0], means["favoured"][-1]
        said += [
            f"- {genre}: the probability of held-out favoured films rises {'**met**' if rises else '**missed**'}, "
            f"from {first:.2f} to {last:.2f}; unrelated pairs stay within 0.05 of 1/2 in the mean "
            f"{'**met**' if away <= 0.05 else '**missed**'}, {away:.3f} at most."
        ]
    return [
        *lines,
        "",
        f"Means over {_NUM_LOVERS} simulated people ± standard errors, {_NUM_HELD_OUT} pairs of each kind for each; "
        "folded in to GPVU-EP with D = 30 after 20 iterations on all users. They prefer each film of the genre to each "
        "without it; held-out pairs have no film that was shown, unrelated pairs are two films without the genre in "
        "random order. The last column is the mean absolute difference from what is said of a stranger.",
        "",
        "What was asked:",
        "",
        *said,
    ]
