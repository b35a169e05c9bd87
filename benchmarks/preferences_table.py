"""Held-out comparisons of people: ``python -m benchmarks.preferences_table WORK`` writes the table.

``WORK`` is a folder that keeps what was found, one file for each draw, so that a run that was ended goes on;
``--only sushi_a`` (or another experiment) computes that one alone and writes no table. The data are those of
``load_sushi``. Some ten minutes.
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

from numpyro_ext.datasets import load_sushi
from numpyro_ext.infer import BilinearEP, collaborative_em
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


EXPERIMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "sushi_a": (sushi_a, 10),
    "sushi_a_integrated": (sushi_a_integrated, 10),
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
    draws = [
        draw | each for draw, each in zip(_found(work, "sushi_a"), _found(work, "sushi_a_integrated"), strict=True)
    ]
    for draw in draws:
        draw.pop("tried")
    lines = ["# Held-out comparisons", "", "Losses are mean negative log probabilities in bits; a constant has 1."]
    lines += ["", f"## Sushi A, 200 people, 3 + 1 pairs, {len(draws)} draws", "", *_systems(draws, "GPitem")]
    remarks = work / "remarks.md"
    if remarks.exists():
        lines += ["", remarks.read_text().strip()]
    write_report("preferences", lines)


if __name__ == "__main__":
    main()
