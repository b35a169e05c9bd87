"""Comparisons of sushi, for ``held_out``: few people, a kernel that is learned, and many people."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm

from numpyro_ext.datasets import load_sushi
from numpyro_ext.infer import EP, BilinearEP, BilinearVG
from numpyro_ext.models import collaborative_preferences, preference_factorization

from ..harness import blocks, cpu_seconds, table, verdict
from .pairs import (
    BITS,
    drawn_pairs,
    em,
    kernel_of,
    loss,
    mean_and_error,
    ordered,
    run_engine,
    share_met,
    sushi_pairs,
    sushi_users,
)
from .sampled import NUM_USERS, RANK, SCALES, by_nuts

_NUM_STEPS = 150
_SCALES = 0.03, 0.1, 0.3
_SCALES_OF_B = 1.0, 3.0, 10.0


def at_a_point(parts: list[np.ndarray], kernel: np.ndarray, V: np.ndarray) -> dict[str, float]:
    """Figures of loadings that maximise the evidence of EP, from a start whose columns of zeros stay zero."""
    train, test, validation = parts
    fit, seconds = cpu_seconds(lambda: em(train, kernel, 2, init_values={"V": V}, num_users=200, num_steps=_NUM_STEPS))
    return {
        "loss": loss(fit, test),
        "validation": loss(fit, validation),
        "evidence": float(fit.objective_trace[-1]),
        "converged": float(fit.converged),
        "sigma": float(np.sqrt(fit.prior.variance)),
        "seconds": seconds,
    }


def start_of(kernel: np.ndarray, seed: int, rank: int = 2) -> np.ndarray:
    """Loadings to start from; all ranks are fits of one shape, which is compiled once."""
    white = 0.3 * np.asarray(jax.random.normal(jax.random.key(seed), (len(kernel), 2)))
    return np.linalg.cholesky(kernel) @ white * (np.arange(2) < rank)


def sushi_a(seed: int) -> dict[str, Any]:
    """200 people, three pairs each, one held out and one for validation, which chooses nothing: points of loadings."""
    parts, K = sushi_pairs(seed)
    eye = np.eye(len(K))
    systems = {"GPitem": (K, 0), "VU, D = 1": (eye, 1), "VU, D = 2": (eye, 2), "GPVU, D = 1": (K, 1)}
    systems["GPVU, D = 2"] = K, 2
    return {name: at_a_point(parts, kernel, start_of(kernel, seed, rank)) for name, (kernel, rank) in systems.items()}


def integrated(user: Any, first: Any, second: Any, won: Any = None, *, num_users: int, num_items: int) -> None:
    """Shared tastes whose loadings and means have priors."""
    with numpyro.plate("items", num_items):
        V = numpyro.sample("V", dist.Normal(0.0, 0.5).expand([RANK]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("users", num_users):
        taste = numpyro.sample("taste", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
    difference = b[first] - b[second] + jnp.sum(taste[user] * (V[first] - V[second]), axis=-1)
    with numpyro.plate("comparisons", len(user)):
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(difference)), obs=won)


def _by_bound(train: np.ndarray, parts: list[np.ndarray], num_items: int) -> dict[str, float]:
    families = {"users": "full", "items": "component"}
    engine = BilinearVG(integrated, covariance=families, num_restarts=0, tol=1e-5, progress_bar=False)
    given: dict[str, Any] = {"num_users": NUM_USERS, "num_items": num_items}
    engine.run(jax.random.key(0), *ordered(train), **given)
    losses = [float(-np.mean(engine.log_predictive(*ordered(part), **given)["won"]) / BITS) for part in parts]
    ended = {"evidence": float(engine.log_evidence), "converged": float(engine.diagnostics.converged)}
    return {"loss": losses[0], "validation": losses[1], **ended}


def _by_messages(train: np.ndarray, test: np.ndarray, K: np.ndarray) -> dict[str, float]:
    """The scale of the kernel is that with the largest evidence."""

    def found(scale: float) -> dict[str, float]:
        engine = BilinearEP(preference_factorization, tol=1e-3, progress_bar=False)
        return run_engine(engine, train, test, num_users=NUM_USERS, kernel=scale * K, rank=RANK) | {"scale": scale}

    return max(map(found, _SCALES), key=lambda each: each["evidence"])


_BY_BOUND, _SAMPLED = "V and b integrated, BilinearVG", "V, b and scales integrated, own process, NUTS on EP"


def sushi_a_integrated(seed: int) -> dict[str, Any]:
    """The people and pairs of :func:`sushi_a`; what all share is integrated by messages, a bound, or sampling."""
    (train, *others), K = sushi_pairs(seed)
    ways = {
        "V and b integrated, BilinearEP": lambda: _by_messages(train, others[0], K),
        _BY_BOUND: lambda: _by_bound(train, others, len(K)),
        _SAMPLED: lambda: by_nuts(train, others, K, seed),
    }
    found = {}
    for name, run in ways.items():
        values, seconds = cpu_seconds(run)
        found[name] = values | {"seconds": seconds}
    return found


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
    users = sushi_users(2000 + seed, 1000)
    train, test = drawn_pairs(data.rankings[users], (10, 2), seed)
    squares = np.sum((data.item_features[:, None] - data.item_features) ** 2, axis=-1)

    def found(model: Any, start: dict[str, Any], **kernel: Any) -> tuple[dict[str, float], dict[str, Any]]:
        engine = EP(model, init_values=start, progress_bar=False)
        numbers = run_engine(engine, train, test, seed, num_users=len(users), rank=2, **kernel)
        learned = {name: value.value for name, value in engine.hyper.items()}
        return numbers | {key: float(learned[key]) for key in ("psi", "alpha", "sigma") if key in learned}, learned

    own, learned = found(collaborative_preferences, {}, kernel=np.eye(len(squares)))
    alpha = 0.1
    same = {**learned, "psi": 0.02, "alpha": alpha, "sigma": learned["sigma"] / np.sqrt(1.0 + alpha)}
    ends = [found(preferences_with_kernel, start, squares=squares)[0] for start in (same, {"psi": 10.0})]
    return {"VU, D = 2": own, "GPVU, D = 2": max(ends, key=lambda end: end["evidence"])}


def sushi_b(seed: int) -> dict[str, Any]:
    """All 5000 people and ten of 100 items each, ten pairs for training and one held out; ψ by the evidence."""
    data = load_sushi("b")
    train, test = drawn_pairs(data.rankings, (10, 1), seed)
    options = {"num_users": len(data.rankings), "num_steps": _NUM_STEPS, "inference_tol": 1e-6}

    def found(kernel: np.ndarray, **numbers: float) -> dict[str, float]:
        start = {"V": start_of(kernel, seed)}
        fit, seconds = cpu_seconds(lambda: em(train, kernel, 2, init_values=start, **options))
        ended = {"evidence": float(fit.objective_trace[-1]), "converged": float(fit.converged)}
        return numbers | ended | {"seconds": seconds, "loss": loss(fit, test)}

    tried = [found(kernel_of(data.item_features, psi), psi=psi) for psi in _SCALES_OF_B]
    chosen = max(tried, key=lambda each: each["evidence"])
    return {"VU, D = 2": found(np.eye(data.num_items)), "GPVU, D = 2": chosen, "GPVU, D = 2, ψ = 10": tried[-1]}


def systems_table(draws: list[dict[str, Any]], against: str) -> list[str]:
    """Losses, alone and less that of one system, log evidences and convergence."""

    def row(name: str) -> tuple[str, ...]:
        of = [draw[name] for draw in draws]
        paired = mean_and_error(each["loss"] - draw[against]["loss"] for each, draw in zip(of, draws, strict=True))
        evidence = f"{np.mean([each['evidence'] for each in of]):.1f}" if "evidence" in of[0] else ""
        ended = f"{sum(each['converged'] for each in of):.0f} of {len(of)}" if "converged" in of[0] else ""
        return name, mean_and_error(each["loss"] for each in of), paired, evidence, ended

    return table(f"system | loss, bits | less that of {against}, paired | evidence | converged", map(row, draws[0]))


def few_persons(draws: list[dict[str, Any]]) -> list[str]:
    """Losses of all systems, and what was asked of those that integrate."""

    def less(name: str, other: str) -> np.ndarray:
        return np.array([draw[name]["loss"] - draw[other]["loss"] for draw in draws])

    def said(name: str) -> str:
        from_item = less(name, "GPitem")
        below = ", ".join(
            f"{verdict(less(name, other).mean() <= -0.03)} against {other} ({mean_and_error(less(name, other))})"
            for other in ("VU, D = 2", "GPVU, D = 2")
        )
        return (
            f"- {name}: not above GPitem in the paired mean {verdict(from_item.mean() <= 0.0)} "
            f"({mean_and_error(from_item)}); at least 0.03 below point estimates of the same D {below}."
        )

    scales = ", ".join(f"{np.mean([draw[_SAMPLED][key] for draw in draws]):.2g} ({key})" for key in SCALES)
    effective = [draw[_SAMPLED]["effective"] for draw in draws]
    seconds = ", ".join(f"{name} {np.median([draw[name]['seconds'] for draw in draws]):.0f}" for name in draws[0])
    return blocks(
        "# Held-out comparisons",
        "Losses are mean negative log probabilities in bits; a constant has 1. "
        f"Sushi A, {NUM_USERS} people, 3 + 1 pairs, {len(draws)} draws.",
        systems_table(draws, "GPitem"),
        "What was asked:",
        map(said, (_BY_BOUND, _SAMPLED)),
        f"Scales that are sampled have the means {scales}, and {min(effective):.0f} to {max(effective):.0f} effective "
        f"draws at least. CPU-s, medians of the draws: {seconds}.",
    )


_COMPARED = "evidence", "loss"
_OF_TWO = "VU has no features of the items, GPVU a kernel of them; means of the items and two shared tastes; EP."


def _of_two(draws: list[dict[str, Any]], **others: str) -> list[str]:
    """VU and GPVU, the systems of each draw, in turn; ``others`` are headers of further numbers by their keys."""
    heads = " | ".join(["draw", "system", "loss, bits", "log evidence", "converged", *others.values()])
    lines = table(
        heads,
        (
            (draw, name, f"{found['loss']:.4f}", f"{found['evidence']:.3f}", bool(found["converged"]),
             *(found.get(key) for key in others))
            for draw, systems in enumerate(draws)
            for name, found in systems.items()
        ),
    )  # fmt: skip
    vu, gpvu, *_ = draws[0]
    paired = mean_and_error(draw[gpvu]["loss"] - draw[vu]["loss"] for draw in draws)
    return [*lines, "", f"Loss of {gpvu} less that of {vu}, paired: {paired}.", ""]


def learned_kernel(draws: list[dict[str, Any]]) -> list[str]:
    vu, gpvu = draws[0]
    evidence, losses = (np.array([[draw[s][key] for s in (gpvu, vu)] for draw in draws]).T for key in _COMPARED)
    return blocks(
        "# Held-out comparisons: a kernel that is learned",
        f"Sushi A, 1000 people, 10 + 2 pairs, {len(draws)} draws; ψ and α by the evidence. {_OF_TWO}",
        [
            *_of_two(draws, psi="ψ", alpha="α", sigma="σ"),
            share_met(f"Evidence of {gpvu} at least that of {vu}", evidence[0] >= evidence[1]),
            share_met(f"Its loss at most that of {vu} + 0.005", losses[0] <= losses[1] + 0.005),
        ],
    )


def many_persons(draws: list[dict[str, Any]]) -> list[str]:
    losses = {name: np.array([draw[name]["loss"] for draw in draws]) for name in draws[0]}
    vu, *others = losses
    return blocks(
        "# Held-out comparisons: Sushi B",
        f"5000 people, 100 items, 10 + 1 pairs, {len(draws)} draws; of ψ 1, 3 and 10 are tried, α = 0.1. {_OF_TWO}",
        [
            *_of_two(draws, psi="ψ", seconds="CPU-s"),
            *(share_met(f"Loss of {name} at most that of {vu}", losses[name] <= losses[vu]) for name in others),
        ],
    )
