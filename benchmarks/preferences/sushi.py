"""Comparisons of sushi, for ``held_out``: few people, by points of what they share and with it integrated out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm

from numpyro_ext.infer import BilinearEP, BilinearVG
from numpyro_ext.models import preference_factorization

from ..harness import blocks, cpu_seconds, table, verdict
from .pairs import BITS, em, loss, mean_and_error, ordered, run_engine, sushi_pairs
from .sampled import NUM_USERS, RANK, SCALES, by_nuts

_NUM_STEPS = 150
_SCALES = 0.03, 0.1, 0.3


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
