"""Comparisons of films that a person, or nobody, has compared before, for ``held_out``."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from numpyro_ext.datasets import load_best_worst_pairs
from numpyro_ext.infer.collaborative.fit import CollaborativeFit

from ..harness import blocks, cpu_seconds, table, verdict
from .films import MOST_PAIRS, STEPS, SYSTEMS, learned, settled
from .pairs import kernel_of, mean_and_error

_SHARE_OF_NEW, _MOST_TESTS = 0.1, 2
_BOTH, _ONE = "by likeness alone", "by likeness, tastes and means too"


def split_by_films(pairs: np.ndarray, is_new: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs for training, pairs of films that the person does not compare there, and pairs with a new film.

    :param pairs: columns user, winner and loser: all pairs of a best and a worst film of each user.
    :param is_new: of each film, whether no pair for training may have it.
    :return: the three parts. Of a user at most two pairs are in either test, without a film in common in the first.
    """
    rng = np.random.default_rng(seed)
    train, unseen_by_one, with_new = [], [], []
    for user in np.unique(pairs[:, 0]):
        mine = pairs[pairs[:, 0] == user]
        has_new = is_new[mine[:, 1:]].any(1)
        known, others = mine[~has_new], mine[has_new]
        best, worst = (rng.permutation(np.unique(known[:, side])) for side in (1, 2))
        # one film of either side is left for training at least
        count = max(min(_MOST_TESTS, len(best) - 1, len(worst) - 1), 0)
        kept = known[~np.isin(known[:, 1:], [best[:count], worst[:count]]).any(1)]
        if not len(kept):
            continue
        train.append(kept)
        unseen_by_one.append(np.stack([np.full(count, user), best[:count], worst[:count]], 1))
        with_new.append(rng.permutation(others)[:_MOST_TESTS])
    return np.concatenate(train), np.concatenate(unseen_by_one), np.concatenate(with_new)


def _with_interpolated_tastes(fit: CollaborativeFit, cross: np.ndarray) -> CollaborativeFit:
    """New films whose loadings and means are what the kernel says of them, given those of the known ones."""
    mean, loadings, variance, kernel = fit.prior
    size, new = cross.shape[1], len(cross)
    weights = np.linalg.solve(np.asarray(kernel)[:size, :size], cross.T).T
    centre = mean[:size].mean()
    mean = mean.at[size:].set(centre + weights @ (mean[:size] - centre))
    loadings = loadings.at[size : size + new].set(weights @ loadings[:size])
    return fit._replace(prior=fit.prior._replace(mean=mean, loadings=loadings))


def unseen_films(seed: int) -> dict[str, Any]:
    """MovieLens 100K with a tenth of the films held out from all, and others from each person, in nats.

    Settings are those of :func:`~.films.movielens`: nothing is chosen by data.
    """
    data = load_best_worst_pairs()
    is_new = np.random.default_rng(1000 + seed).random(data.num_items) < _SHARE_OF_NEW
    train, by_one, with_new = split_by_films(data.pairs, is_new, seed)
    order = np.r_[np.flatnonzero(~is_new), np.flatnonzero(is_new)]
    size = int(np.sum(~is_new))
    place = np.argsort(order)
    for part in (train, by_one, with_new):
        part[:, 1:] = place[part[:, 1:]]
    K = kernel_of(data.item_features[order], 1.0)
    found: dict[str, Any] = {
        "counts": {
            "users": len(np.unique(train[:, 0])),
            "pairs": len(train),
            "by_one": len(by_one),
            "with_new": len(with_new),
            "both_new": int(np.sum((with_new[:, 1:] >= size).all(1))),
        }
    }
    known = K[:size, :size]
    for name, covariance in SYSTEMS.items():
        options: Any = {"covariance": covariance, "num_users": data.num_users}
        fit, seconds = cpu_seconds(learned, train, known, 2 * STEPS, jax.random.key(seed), **options)
        fit = settled(train, known, fit, seed, **options)
        found[name] = {"seconds": seconds, "by_one": _losses(fit, by_one)}
        if covariance == "factor":
            more = fit.add_items(K[size:, :size], K[size:, size:])
            found[name][_BOTH] = _losses(more, with_new)
            found[name][_ONE] = _losses(_with_interpolated_tastes(more, K[size:, :size]), with_new)
    return found


def _losses(fit: CollaborativeFit, test: np.ndarray) -> list[float]:
    return [float(-fit.log_predictive(user, *test[:, 1:].T).mean()) for user in (test[:, 0], None)]


def page(draws: list[dict[str, Any]]) -> list[str]:
    """Losses of films that were compared by others, or by nobody."""
    losses = {name: {key: np.array([draw[name][key] for draw in draws]) for key in draws[0][name]} for name in SYSTEMS}

    def row(name: str, key: str, films: str) -> tuple[str, ...]:
        own, strangers = losses[name][key].T
        each, seconds = ", ".join(f"{loss:.3f}" for loss in own), losses[name]["seconds"].mean()
        return name, films, mean_and_error(own), mean_and_error(strangers), each, f"{seconds:.0f}"

    ours, theirs = (losses[name]["by_one"][:, 0] for name in SYSTEMS)
    alone, tastes_too = (np.all(losses["GPVU-EP"][key][:, 0] < np.log(2.0)) for key in (_BOTH, _ONE))
    ratio = float(ours.mean() / 0.483 - 1.0)
    return blocks(
        "# Films that were not compared: MovieLens 100K",
        "Losses are in nats, where a constant has 0.693.",
        table(
            "seed | users | pairs for training | pairs of films that the person does not compare | "
            "pairs with a new film | of these of two",
            ((number, *draw["counts"].values()) for number, draw in enumerate(draws)),
        ),
        table(
            "system | films | loss | of the same people as strangers | by seed | CPU-s of the fit",
            [
                *(row(name, "by_one", "compared by others") for name in SYSTEMS),
                *(row("GPVU-EP", key, f"new to all, {key}") for key in (_BOTH, _ONE)),
            ],
        ),
        "Films that the person does not compare: GPVU-EP is below NPCA-EP on "
        f"{np.sum(ours < theirs)} of {len(draws)} seeds (by {mean_and_error(theirs - ours)}); its loss is {ratio:+.1%} "
        f"from the 0.483 of Ko (2017): within 10 % {verdict(abs(ratio) <= 0.1)}.",
        f"New films: GPVU-EP below a constant {verdict(alone)} by likeness alone, {verdict(tastes_too)} where tastes "
        "and means follow likeness too.",
        "A tenth of the films, drawn at random, is in no pair for training, nor are two best and two worst films of "
        f"each person ({_MOST_TESTS} test pairs of each kind at most). Kernel of the genres with ψ = 1 and α = 0.1, "
        f"D = 30, {2 * STEPS} iterations of EM with at most {MOST_PAIRS} random pairs of a user, as in the table of "
        "best against worst films. A new film has no loadings and the mean of all others "
        "(`CollaborativeFit.add_items`), or those that the kernel interpolates. NPCA-EP has a covariance of the films "
        "that it saw and none of others.",
    )
