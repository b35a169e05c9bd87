"""Comparisons of sushi, for ``held_out``: few people, a kernel that is learned, and many people."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.datasets import load_sushi
from numpyro_ext.infer import EP, BilinearEP, collaborative_em
from numpyro_ext.models import collaborative_preferences, preference_factorization

from ..harness import table_head
from .pairs import BITS, asked, drawn_pairs, kernel_of, loss, mean_and_error

_NUM_STEPS = 150
_SCALES = 0.03, 0.1, 0.3
_SCALES_OF_B = 1.0, 3.0, 10.0


def integrated_loss(train: np.ndarray, test: np.ndarray, num_users: int, K: np.ndarray, rank: int) -> dict[str, float]:
    """Of tastes and mean utility with priors, by BilinearEP."""
    given: dict[str, Any] = {"num_users": num_users, "kernel": K, "rank": rank}
    engine = BilinearEP(preference_factorization, tol=1e-3, progress_bar=False)
    engine.run(jax.random.key(0), *train.T, np.ones(len(train), int), **given)
    log_probability = engine.log_predictive(*test.T, np.ones(len(test), int), **given)["won"]
    return {
        "loss": float(-np.mean(log_probability) / BITS),
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


def preferences_with_kernel(
    user: Any, first: Any, second: Any, won: Any = None, *, num_users: int, squares: Any, rank: int
) -> None:
    """Shared tastes, with the scale of the kernel of the items' features and its share of noise learned."""
    psi = numpyro.param("psi", 10.0, constraint=dist.constraints.positive)
    alpha = numpyro.param("alpha", 0.1, constraint=dist.constraints.positive)
    kernel = jnp.exp(-squares / psi) + alpha * jnp.eye(len(squares))
    collaborative_preferences(user, first, second, won, num_users=num_users, kernel=kernel, rank=rank)


def sushi_a_learned(seed: int) -> dict[str, Any]:
    """1000 people, ten pairs each and two held out: the kernel of the features learned, against none.

    With next to no scale the kernel is that of VU, so the evidence cannot be below its own. One search starts there, at
    what VU has learned, the other at ψ = 10, and the one with the larger evidence counts.
    """
    data = load_sushi("a")
    rankings = data.rankings[np.random.default_rng(2000 + seed).permutation(5000)[:1000]]
    train, test = drawn_pairs(rankings, (10, 2), seed)
    squares = np.sum((data.item_features[:, None] - data.item_features) ** 2, axis=-1)

    def found(model: Any, start: dict[str, Any], **kernel: Any) -> tuple[dict[str, float], dict[str, Any]]:
        given: dict[str, Any] = {"num_users": len(rankings), "rank": 2, **kernel}
        engine = EP(model, init_values=start, progress_bar=False)
        engine.run(jax.random.key(seed), *train.T, np.ones(len(train), int), **given)
        log_probability = engine.log_predictive(*test.T, np.ones(len(test), int), **given)["won"]
        hyper = engine.hyper
        numbers = {key: float(hyper[key].value) for key in ("psi", "alpha", "sigma") if key in hyper}
        numbers |= {"loss": float(-np.mean(log_probability) / BITS), "evidence": float(engine.log_evidence)}
        learned = {name: value.value for name, value in hyper.items()}
        return numbers | {"converged": float(engine.diagnostics.converged)}, learned

    own, learned = found(collaborative_preferences, {}, kernel=np.eye(len(squares)))
    alpha = 0.1
    same = {**learned, "psi": 0.02, "alpha": alpha, "sigma": learned["sigma"] / np.sqrt(1.0 + alpha)}
    ends = [found(preferences_with_kernel, start, squares=squares)[0] for start in (same, {"psi": 10.0})]
    return {"VU, D = 2": own, "GPVU, D = 2": max(ends, key=lambda end: end["evidence"])}


def sushi_b(seed: int) -> dict[str, Any]:
    """All 5000 people and ten of 100 items each, ten pairs for training and one held out; ψ by the evidence."""
    data = load_sushi("b")
    train, test = drawn_pairs(data.rankings, (10, 1), seed)
    size, options = data.num_items, {"num_users": len(data.rankings), "num_steps": _NUM_STEPS, "inference_tol": 1e-6}
    white = 0.3 * np.asarray(jax.random.normal(jax.random.key(seed), (size, 2)))

    def found(kernel: np.ndarray, **numbers: float) -> dict[str, float]:
        begun, V = time.process_time(), np.linalg.cholesky(kernel) @ white
        fit = collaborative_em(train, kernel, 2, init_values={"V": V}, progress_bar=False, **options)
        numbers |= {"evidence": float(fit.objective_trace[-1]), "converged": float(fit.converged)}
        return numbers | {"seconds": time.process_time() - begun, "loss": loss(fit, test)}

    tried = [found(kernel_of(data.item_features, psi), psi=psi) for psi in _SCALES_OF_B]
    chosen = max(tried, key=lambda each: each["evidence"])
    return {"VU, D = 2": found(np.eye(size)), "GPVU, D = 2": chosen, "GPVU, D = 2, ψ = 10": tried[-1]}


def systems_table(draws: list[dict[str, Any]], against: str) -> Iterator[str]:
    yield from table_head(f"system | loss, bits | less that of {against}, paired | evidence | converged")
    for name in draws[0]:
        of = [draw[name] for draw in draws]
        paired = mean_and_error(each["loss"] - draw[against]["loss"] for each, draw in zip(of, draws, strict=True))
        evidence = f"{np.mean([each['evidence'] for each in of]):.1f}" if "evidence" in of[0] else ""
        ended = f"{sum(each['converged'] for each in of):.0f} of {len(of)}" if "converged" in of[0] else ""
        yield f"| {name} | {mean_and_error(each['loss'] for each in of)} | {paired} | {evidence} | {ended} |"


def few_persons(draws: list[dict[str, Any]]) -> list[str]:
    for draw in draws:
        draw.pop("tried")
    lines = ["# Held-out comparisons", "", "Losses are mean negative log probabilities in bits; a constant has 1."]
    return [*lines, "", f"## Sushi A, 200 people, 3 + 1 pairs, {len(draws)} draws", "", *systems_table(draws, "GPitem")]


_OF_TWO = "VU has no features of the items, GPVU a kernel of them; means of the items and two shared tastes; EP."


def _of_two(draws: list[dict[str, Any]], **others: str) -> list[str]:
    """VU and GPVU, the systems of each draw, in turn; ``others`` are headers of further numbers by their keys."""
    lines = table_head(" | ".join(["draw", "system", "loss, bits", "log evidence", "converged", *others.values()]))
    for number, draw in enumerate(draws):
        for name, found in draw.items():
            last = ["yes" if found["converged"] else "no"]
            last += [f"{found[key]:.3g}" if key in found else "" for key in others]
            cells = [str(number), name, f"{found['loss']:.4f}", f"{found['evidence']:.3f}", *last]
            lines.append(f"| {' | '.join(cells)} |")
    vu, gpvu, *_ = draws[0]
    paired = mean_and_error(draw[gpvu]["loss"] - draw[vu]["loss"] for draw in draws)
    return [*lines, "", f"Loss of {gpvu} less that of {vu}, paired: {paired}.", ""]


def learned_kernel(draws: list[dict[str, Any]]) -> list[str]:
    vu, gpvu = draws[0]
    pairs = [(draw[gpvu], draw[vu]) for draw in draws]
    return [
        "# Held-out comparisons: a kernel that is learned",
        "",
        f"Sushi A, 1000 people, 10 + 2 pairs, {len(draws)} draws; ψ and α by the evidence. {_OF_TWO}",
        "",
        *_of_two(draws, psi="ψ", alpha="α", sigma="σ"),
        asked(f"Evidence of {gpvu} at least that of {vu}", (one["evidence"] >= two["evidence"] for one, two in pairs)),
        asked(f"Its loss at most that of {vu} + 0.005", (one["loss"] <= two["loss"] + 0.005 for one, two in pairs)),
    ]


def many_persons(draws: list[dict[str, Any]]) -> list[str]:
    vu, *others = draws[0]
    return [
        "# Held-out comparisons: Sushi B",
        "",
        f"5000 people, 100 items, 10 + 1 pairs, {len(draws)} draws; of ψ 1, 3 and 10 are tried, α = 0.1. {_OF_TWO}",
        "",
        *_of_two(draws, psi="ψ", seconds="CPU-s"),
        *(asked(f"Loss of {n} at most that of {vu}", (d[n]["loss"] <= d[vu]["loss"] for d in draws)) for n in others),
    ]
