"""Held-out comparisons of people: ``python -m benchmarks.preferences_table WORK`` writes the table.

``WORK`` is a folder that keeps what was found, one file for each draw, so that a run that was ended goes on;
``--only sushi_a`` (or another experiment) computes that one alone and writes no table. The data are those of
``load_sushi`` and ``load_best_worst_pairs``. About an hour.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import scipy.optimize

from numpyro_ext.datasets import load_best_worst_pairs, load_sushi
from numpyro_ext.infer import BilinearEP, collaborative_em
from numpyro_ext.infer.collaborative.component_analysis import prior_gradient
from numpyro_ext.infer.collaborative.em import _Problem
from numpyro_ext.infer.collaborative.pairs import checked_pairs
from numpyro_ext.infer.collaborative.user_inference import SharedPrior
from numpyro_ext.models import preference_factorization

from .results_table import write_report

__all__ = ["EXPERIMENTS", "main"]

_BITS = np.log(2.0)
_NUM_STEPS = 150
_SCALES = 0.03, 0.1, 0.3


def kernel_of(features: np.ndarray, psi: float, alpha: float = 0.1) -> np.ndarray:
    """Covariance of items by their features, with a share of noise."""
    squares = np.sum((features[:, None] - features) ** 2, axis=-1)
    return np.asarray(np.exp(-squares / psi) + alpha * np.eye(len(features)))


def drawn_pairs(rankings: np.ndarray, counts: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """Different pairs of each person's ranking, in so many parts, with columns user, winner and loser.

    Which places are compared is drawn once for all seeds and then shuffled by person, so that as many people have as
    many different items in each draw, and the fits of all draws share their compiled programs.
    """
    num_users, length = rankings.shape
    design, rng = np.random.default_rng(0), np.random.default_rng(seed)
    every = np.array(list(itertools.combinations(range(length), 2)))
    parts: list[list[tuple[int, int, int]]] = [[] for _ in counts]
    for user in range(num_users):
        chosen = every[design.choice(len(every), sum(counts), replace=False)]
        places = np.sort(rng.permutation(length)[chosen], axis=1)
        ends = np.cumsum(counts)
        for part, start, end in zip(parts, ends - counts, ends, strict=True):
            part += [(user, rankings[user, i], rankings[user, j]) for i, j in places[start:end]]
    return [np.array(part) for part in parts]


def loss(fit: Any, test: np.ndarray) -> float:
    """Mean negative log probability of what was preferred, in bits."""
    return float(-np.mean(fit.log_predictive(*test.T)) / _BITS)


def integrated_loss(train: np.ndarray, test: np.ndarray, num_users: int, K: np.ndarray, rank: int) -> dict[str, float]:
    """Of tastes and mean utility with priors, by BilinearEP."""
    given: dict[str, Any] = {"num_users": num_users, "kernel": K, "rank": rank}
    engine = BilinearEP(preference_factorization, tol=1e-3, progress_bar=False)
    engine.run(jax.random.key(0), *train.T, np.ones(len(train), int), **given)
    log_probability = engine.log_predictive(*test.T, np.ones(len(test), int), **given)["won"]
    return {
        "loss": float(-np.mean(log_probability) / _BITS),
        "evidence": float(engine.log_evidence),
        "converged": float(engine.diagnostics.converged),
    }


def learned_kernel(
    train: np.ndarray, features: np.ndarray, num_users: int, start: SharedPrior, psi: float, alpha: float
) -> tuple[Any, float, float]:
    """GPVU with the length and the noise of its kernel learned by the evidence, beside all else.

    The kernel has a unit diagonal, so that noise without end is that of items without features.
    """
    squares = jnp.asarray(np.sum((features[:, None] - features) ** 2, axis=-1))
    (size, rank), found = start.loadings.shape, checked_pairs(train, num_users, len(features))[0]
    problem = _Problem(found, "ep", 200, 1e-9, None, jax.random.key(0), size)

    def kernel(logs: Any) -> Any:
        psi, alpha = jnp.exp(logs)
        return (jnp.exp(-squares / psi) + alpha * jnp.eye(size)) / (1.0 + alpha)

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        b, V, log_variance, logs = x[:size], x[size:-3].reshape(size, rank), x[-3], jnp.asarray(x[-2:])
        K, pull = jax.vjp(kernel, logs)
        prior = SharedPrior(jnp.asarray(b), jnp.asarray(V), jnp.exp(log_variance), K)
        at = problem.expect(prior)
        of_mean, of_loadings, of_variance = prior_gradient(prior, at.shift, at.curvature)
        (of_logs,) = pull(-0.5 * prior.variance * at.curvature)
        parts = of_mean, of_loadings.reshape(-1), (of_variance * prior.variance)[None], of_logs
        return -at.objective, -np.concatenate([np.asarray(part) for part in parts])

    first = np.concatenate(
        [start.mean, np.ravel(start.loadings), [np.log(start.variance)], np.log([psi, alpha])]
    ).astype(float)
    bounds = [(None, None)] * (first.size - 2) + [(np.log(0.1), np.log(1e3)), (np.log(1e-3), np.log(1e5))]
    options = {"maxfun": 120, "ftol": 1e-6}
    end = scipy.optimize.minimize(evaluate, first, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    psi, alpha = (float(value) for value in np.exp(end.x[-2:]))
    values = {"b": end.x[:size], "V": end.x[size:-3].reshape(size, rank), "sigma": np.exp(0.5 * end.x[-3])}
    K = np.asarray(kernel(jnp.asarray(end.x[-2:])))
    return collaborative_em(train, K, rank, init_values=values, num_users=num_users, num_steps=0), psi, alpha


def sushi_a(seed: int) -> dict[str, Any]:
    """200 people, three pairs each, one more to choose the rank and the number of iterations by, and one held out."""
    data = load_sushi("a")
    rankings = data.rankings[np.random.default_rng(1000 + seed).permutation(5000)[:200]]
    train, test, validation = drawn_pairs(rankings, (3, 1, 1), seed)
    K, eye = kernel_of(data.item_features, 10.0), np.eye(10)
    found: dict[str, Any] = {}
    # To the gradient loadings of zero stay zero: all ranks are fits of one shape, which is compiled once.
    start = np.asarray(jnp.linalg.cholesky(K) @ (0.3 * jax.random.normal(jax.random.key(seed), (10, 2))))
    white = np.linalg.solve(np.linalg.cholesky(K), start)
    systems = {"GPitem": (K, 0), "VU, D = 1": (eye, 1), "VU, D = 2": (eye, 2), "GPVU, D = 1": (K, 1)}
    for name, (kernel, rank) in (systems | {"GPVU, D = 2": (K, 2)}).items():
        V = (start if kernel is K else white) * (np.arange(2) < rank)
        options: Any = {"num_users": 200, "num_steps": _NUM_STEPS, "progress_bar": False}
        fit = collaborative_em(train, kernel, 2, init_values={"V": V}, **options)
        found[name] = {
            "loss": loss(fit, test),
            "evidence": float(fit.objective_trace[-1]),
            "converged": float(fit.converged),
            "validation": loss(fit, validation),
        }
    for rank in (1, 2):
        path = []
        values: Any = {"V": start[:, :rank]}
        for num_steps in (1, 2, 4, 8, 16, 32):
            options: Any = {"accelerator": "none", "num_steps": num_steps, "tol": 0.0, "progress_bar": False}
            fit = collaborative_em(train, K, rank, init_values=values, num_users=200, **options)
            path.append((loss(fit, validation), loss(fit, test), num_steps))
            values = fit.parameters
        chosen = min(path)
        found[f"GPVU by EM, stopped on validation, D = {rank}"] = {"loss": chosen[1], "validation": chosen[0]}
    both = [found[f"GPVU by EM, stopped on validation, D = {rank}"] for rank in (1, 2)]
    found["GPVU by EM, D and iterations on validation"] = min(both, key=lambda each: float(each["validation"]))
    for method, name in (("jaakkola", "GPVU-JK, D = 2"), ("laplace", "GPVU-LP, D = 2")):
        options = {"method": method, "num_users": 200, "num_steps": 40, "progress_bar": False}
        fit = collaborative_em(train, K, 2, init_values={"V": start}, **options)
        found[name] = {"loss": loss(fit, test), "converged": float(fit.converged)}
    fit = collaborative_em(train, K, 0, method="laplace", num_users=200, num_steps=40, progress_bar=False)
    found["GPitem-LP"] = {"loss": loss(fit, test), "converged": float(fit.converged)}
    return found


def sushi_a_integrated(seed: int) -> dict[str, Any]:
    """The people and pairs of :func:`sushi_a`, with the scale of the kernel that has the largest evidence."""
    data = load_sushi("a")
    rankings = data.rankings[np.random.default_rng(1000 + seed).permutation(5000)[:200]]
    train, test, _ = drawn_pairs(rankings, (3, 1, 1), seed)
    K = kernel_of(data.item_features, 10.0)
    tried = {str(scale): integrated_loss(train, test, 200, scale * K, 2) for scale in _SCALES}
    scale, chosen = max(tried.items(), key=lambda item: float(item[1]["evidence"]))
    return {"V and b integrated, D = 2": {**chosen, "scale": float(scale)}, "tried": tried}


def sushi_a_many(seed: int) -> dict[str, Any]:
    """1000 people, ten pairs each and two held out."""
    data = load_sushi("a")
    rankings = data.rankings[np.random.default_rng(2000 + seed).permutation(5000)[:1000]]
    train, test = drawn_pairs(rankings, (10, 2), seed)
    return _with_learned_kernel(train, test, data.item_features, 1000, rank=2)


def sushi_b(seed: int) -> dict[str, Any]:
    """All 5000 people, ten pairs of set B each and one held out."""
    data = load_sushi("b")
    train, test = drawn_pairs(data.rankings, (10, 1), seed)
    return _with_learned_kernel(train, test, data.item_features, 5000, rank=2)


def _with_learned_kernel(
    train: np.ndarray, test: np.ndarray, features: np.ndarray, num_users: int, rank: int
) -> dict[str, Any]:
    size = len(features)
    K = kernel_of(features, 10.0)
    white = 0.3 * np.asarray(jax.random.normal(jax.random.key(0), (size, rank)))
    found, fits = {}, {}
    for name, kernel, V in (
        ("GPitem", K, 0 * white),
        ("VU", np.eye(size), white),
        ("GPVU", K, np.linalg.cholesky(K) @ white),
    ):
        options: Any = {"num_users": num_users, "num_steps": _NUM_STEPS, "progress_bar": False}
        fit = collaborative_em(train, kernel, rank, init_values={"V": V}, **options)
        fits[name] = fit
        found[name] = {
            "loss": loss(fit, test),
            "evidence": float(fit.objective_trace[-1]),
            "converged": float(fit.converged),
        }
    ends = [
        learned_kernel(train, features, num_users, fits[name].prior, *at)
        for name, at in (("GPVU", (10.0, 0.1)), ("VU", (10.0, 10.0)))
    ]
    fit, psi, alpha = max(ends, key=lambda end: float(end[0].objective_trace[-1]))
    found["GPVU, kernel learned"] = {
        "loss": loss(fit, test),
        "evidence": float(fit.objective_trace[-1]),
        "psi": psi,
        "alpha": alpha,
    }
    return found


def movielens(seed: int) -> dict[str, Any]:
    """Best against worst films, at random at most fifty pairs of a user in each iteration."""
    return _movielens(seed, num_pairs_per_user=50, num_steps=20)


def movielens_all(seed: int) -> dict[str, Any]:
    """Best against worst films, all pairs."""
    return _movielens(seed, num_pairs_per_user=None, num_steps=15)


def _split(seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Four pairs of each user held out; users with fewer than eight are left out."""
    data = load_best_worst_pairs()
    pairs = data.pairs[np.random.default_rng(seed).permutation(len(data.pairs))]
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    counts = np.bincount(pairs[:, 0], minlength=data.num_users)
    place = np.arange(len(pairs)) - np.searchsorted(pairs[:, 0], pairs[:, 0])
    enough = counts[pairs[:, 0]] >= 8
    return data, pairs[enough & (place >= 4)], pairs[enough & (place < 4)]


def _movielens(seed: int, num_pairs_per_user: int | None, num_steps: int) -> dict[str, Any]:
    data, train, test = _split(seed)
    K = kernel_of(data.item_features, 1.0)
    found: dict[str, Any] = {"users": len(np.unique(train[:, 0])), "train": len(train), "test": len(test)}
    for name, covariance in (("NPCA", "free"), ("GPVU", "factor")):
        start = time.process_time()
        fit = collaborative_em(
            train,
            K,
            30,
            covariance=covariance,
            accelerator="none",
            num_users=data.num_users,
            num_pairs_per_user=num_pairs_per_user,
            num_steps=num_steps,
            num_inference_steps=50,
            inference_tol=1e-5,
            rng_key=jax.random.key(seed),
            progress_bar=False,
        )
        # Users are known by all of their pairs, also where parameters were learned from a part of them.
        known = fit.fold_in(train, data.num_users) if num_pairs_per_user else fit
        nats = -known.log_predictive(*test.T)
        found[name] = {"loss": float(nats.mean()), "seconds": time.process_time() - start}
        if name == "GPVU":
            found["genres"] = _genre_lovers(fit, data.item_features, seed)
    return found


def _genre_lovers(fit: Any, genres: np.ndarray, seed: int) -> dict[str, Any]:
    """What is predicted for people who always prefer films of one genre, after so many of their answers."""
    rng, num_people, found = np.random.default_rng(seed), 20, {}
    for name, column in (("Action", 1), ("Comedy", 5)):
        inside, outside = np.flatnonzero(genres[:, column] == 1), np.flatnonzero(genres[:, column] == 0)
        people = np.arange(num_people)
        answers = [
            np.stack([people, rng.choice(inside, num_people), rng.choice(outside, num_people)]) for _ in range(40)
        ]
        who = np.repeat(people, 100)
        held_out = rng.choice(inside, who.size), rng.choice(outside, who.size)
        unrelated = rng.choice(outside, (2, who.size))
        for count in (0, 1, 3, 10, 40):
            if count:
                known, asked = fit.fold_in(np.concatenate(answers[:count], axis=1).T, num_people), who
            else:
                known, asked = fit, None
            found[f"{name}, {count}"] = [
                float(known.predict(asked, *items).probability.mean()) for items in (held_out, tuple(unrelated))
            ]
    return found


EXPERIMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "sushi_a": (sushi_a, 10),
    "sushi_a_integrated": (sushi_a_integrated, 10),
    "sushi_a_many": (sushi_a_many, 3),
    "sushi_b": (sushi_b, 1),
    "movielens": (movielens, 5),
    "movielens_all": (movielens_all, 1),
}


def _found(work: Path, name: str) -> list[dict[str, Any]]:
    paths = sorted(work.glob(f"{name}-[0-9]*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [json.loads(path.read_text()) for path in paths]


def _compute(work: Path, name: str) -> None:
    experiment, num_draws = EXPERIMENTS[name]
    for seed in range(num_draws):
        path = work / f"{name}-{seed}.json"
        if not path.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # fits that did not converge are counted
                start = time.process_time()
                path.write_text(json.dumps(experiment(seed)))
            print(path.name, f"{time.process_time() - start:.0f} CPU-s", flush=True)


def _mean(values: Any) -> str:
    array = np.asarray(list(values), float)
    error = f" ± {array.std(ddof=1) / np.sqrt(array.size):.3f}" if array.size > 1 else ""
    return f"{array.mean():.3f}{error}"


def _systems(draws: list[dict[str, Any]], against: str) -> Iterator[str]:
    yield f"| system | loss, bits | less that of {against}, paired | evidence | converged |"
    yield "|---|---|---|---|---|"
    for name in draws[0]:
        of = [draw[name] for draw in draws]
        paired = _mean(each["loss"] - draw[against]["loss"] for each, draw in zip(of, draws, strict=True))
        evidence = f"{np.mean([each['evidence'] for each in of]):.1f}" if "evidence" in of[0] else ""
        ended = f"{sum(each['converged'] for each in of):.0f} of {len(of)}" if "converged" in of[0] else ""
        yield f"| {name} | {_mean(each['loss'] for each in of)} | {paired} | {evidence} | {ended} |"


def _sushi_lines(draws: list[dict[str, Any]], title: str, against: str) -> list[str]:
    lines = ["", f"## {title}, {len(draws)} draw{'s' if len(draws) > 1 else ''}", "", *_systems(draws, against)]
    learned = [draw["GPVU, kernel learned"] for draw in draws if "GPVU, kernel learned" in draw]
    if learned:
        pairs = ", ".join(f"{each['psi']:.3g} and {each['alpha']:.3g}" for each in learned)
        lines += ["", f"Learned ψ and α of each draw: {pairs}."]
    return lines


def _movielens_lines(draws: list[dict[str, Any]], title: str) -> list[str]:
    first = draws[0]
    lines = ["", f"## {title}", "", f"{first['users']} users, {first['train']} pairs, {first['test']} held out.", ""]
    lines += ["| seed | GPVU, nats | NPCA, nats | GPVU less NPCA | CPU-seconds |", "|---|---|---|---|---|"]
    for seed, each in enumerate(draws):
        ours, theirs = each["GPVU"], each["NPCA"]
        lines.append(
            f"| {seed} | {ours['loss']:.4f} | {theirs['loss']:.4f} | {ours['loss'] - theirs['loss']:+.4f} "
            f"| {ours['seconds']:.0f}, {theirs['seconds']:.0f} |"
        )
    lines += ["", "Simulated people who prefer one genre (mean over seeds, 20 people, 100 held-out pairs each):", ""]
    lines += ["| genre, answers | pairs of the genre | unrelated pairs |", "|---|---|---|"]
    for name in first["genres"]:
        both = np.mean([each["genres"][name] for each in draws], axis=0)
        lines.append(f"| {name} | {both[0]:.3f} | {both[1]:.3f} |")
    return lines


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", choices=tuple(EXPERIMENTS))
    parser.add_argument("--write", action="store_true", help="write what is there, and compute nothing")
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    numpyro.enable_x64()
    for name in () if arguments.write else (arguments.only,) if arguments.only else EXPERIMENTS:
        _compute(work, name)
    if arguments.only:
        return
    titles = {
        "sushi_a": ("Sushi A, 200 people, 3 + 1 pairs", "GPitem"),
        "sushi_a_many": ("Sushi A, 1000 people, 10 + 2 pairs, D = 2", "VU"),
        "sushi_b": ("Sushi B, 5000 people, 10 + 1 pairs, D = 2", "VU"),
        "movielens": ("MovieLens 100K, at most 50 pairs of a user in each of 20 iterations, D = 30", ""),
        "movielens_all": ("MovieLens 100K, all pairs, 15 iterations, D = 30", ""),
    }
    lines = [
        "# Held-out comparisons",
        "",
        "Losses are mean negative log probabilities; a constant has 1 bit, 0.693 nats.",
    ]
    for name, (title, against) in titles.items():
        draws = _found(work, name)
        if name == "sushi_a":
            integrated = _found(work, "sushi_a_integrated")
            draws = [draw | each for draw, each in zip(draws, integrated, strict=False)]
            for draw in draws:
                draw.pop("tried")
        if draws:
            lines += _sushi_lines(draws, title, against) if against else _movielens_lines(draws, title)
    remarks = work / "remarks.md"
    if remarks.exists():
        lines += ["", remarks.read_text().strip()]
    write_report("preferences", lines)


if __name__ == "__main__":
    main()
