"""Loadings and means of sushi integrated by BilinearVG, for ``preferences_table``, against their point estimates."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm

from numpyro_ext.datasets import load_sushi
from numpyro_ext.infer import EP, BilinearVG, VariationalGaussian, collaborative_em

from .preferences_pairs import BITS, drawn_pairs, kernel_of, loss, mean_and_error
from .preferences_sushi import systems_table

__all__ = [
    "integrated",
    "integrated_report",
    "mean_integrated",
    "pairs_of",
    "point_estimates",
    "sushi_a_by_vg",
    "sushi_a_without_tastes",
]

_RANK = 2
_ALONE, _WITH_OWN, _LEARNED = (
    "V and b integrated",
    "V and b integrated, own process",
    "V and b integrated, own process, all scales by the bound",
)
_BY_EP, _BY_BOUND = "b integrated, own process, no V, EP", "b integrated, own process, no V, variational bound"
_FIXED = {"scale": 0.5, "mean_scale": 1.0}
"""Standard deviations of the loadings and of the means, which the issue names."""


def integrated(
    user: Any, first: Any, second: Any, won: Any = None, *, num_users: int, kernel: Any, has_own: bool
) -> None:
    """Shared tastes whose loadings and means have priors, with a process of each person's own or without."""
    positive, num_items = dist.constraints.positive, len(kernel)
    scale = numpyro.param("scale", 0.5, constraint=positive)
    mean_scale = numpyro.param("mean_scale", 1.0, constraint=positive)
    with numpyro.plate("items", num_items):
        V = numpyro.sample("V", dist.Normal(0.0, scale).expand([_RANK]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, mean_scale))
    with numpyro.plate("users", num_users):
        taste = numpyro.sample("taste", dist.Normal(0.0, 1.0).expand([_RANK]).to_event(1))
        if has_own:
            sigma = numpyro.param("sigma", 1.0, constraint=positive)
            own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(num_items), sigma**2 * kernel))
    difference = b[first] - b[second] + jnp.sum(taste[user] * (V[first] - V[second]), axis=-1)
    if has_own:
        difference += own[user, first] - own[user, second]
    with numpyro.plate("comparisons", len(user)):
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(difference)), obs=won)


def mean_integrated(user: Any, first: Any, second: Any, won: Any = None, *, num_users: int, kernel: Any) -> None:
    """The same without tastes: one Gaussian field, which EP and VariationalGaussian take too."""
    positive, num_items = dist.constraints.positive, len(kernel)
    mean_scale = numpyro.param("mean_scale", 1.0, constraint=positive)
    sigma = numpyro.param("sigma", 1.0, constraint=positive)
    b = numpyro.sample("b", dist.Normal(0.0, mean_scale).expand([num_items]).to_event(1))
    with numpyro.plate("users", num_users):
        own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(num_items), sigma**2 * kernel))
    f = b + own
    with numpyro.plate("comparisons", len(user)):
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(f[user, first] - f[user, second])), obs=won)


def pairs_of(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training, test and validation pairs as in ``sushi_a``, and the kernel."""
    data = load_sushi("a")
    rankings = data.rankings[np.random.default_rng(1000 + seed).permutation(5000)[:200]]
    train, test, validation = drawn_pairs(rankings, (3, 1, 1), seed)
    return train, test, validation, kernel_of(data.item_features, 10.0)


def _fitted(engine: Any, train: np.ndarray, parts: tuple[np.ndarray, ...], given: dict[str, Any]) -> dict[str, Any]:
    begun = time.process_time()
    engine.run(jax.random.key(0), *train.T, np.ones(len(train), int), **given)
    losses = [
        float(-np.mean(engine.log_predictive(*part.T, np.ones(len(part), int), **given)["won"]) / BITS)
        for part in parts
    ]
    return {
        "loss": losses[0],
        "validation": losses[1],
        "evidence": float(engine.log_evidence),
        "converged": float(engine.diagnostics.converged),
        "scales": {key: float(site.value) for key, site in engine.hyper.items()},
        "seconds": time.process_time() - begun,
    }


def sushi_a_without_tastes(seed: int) -> dict[str, Any]:
    """What is left where the bound prunes all tastes, by EP and by the bound without a split into two sides."""
    train, test, validation, K = pairs_of(seed)
    given = {"num_users": 200, "kernel": K}
    return {
        name: _fitted(engine(mean_integrated, progress_bar=False), train, (test, validation), given)
        for name, engine in ((_BY_EP, EP), (_BY_BOUND, VariationalGaussian))
    }


def point_estimates(
    train: np.ndarray, parts: tuple[np.ndarray, np.ndarray], K: np.ndarray, seed: int
) -> dict[str, Any]:
    """GPitem, and loadings at a point, with losses on pairs of the test and of the validation; starts as in sushi_a."""
    found: dict[str, Any] = {}
    white = 0.3 * np.asarray(jax.random.normal(jax.random.key(seed), (10, _RANK)))
    for name, kernel, rank in (("GPitem", K, 0), ("VU, D = 2", np.eye(10), 2), ("GPVU, D = 2", K, 2)):
        begun, V = time.process_time(), np.linalg.cholesky(kernel) @ white * (np.arange(_RANK) < rank)
        options: Any = {"num_users": 200, "num_steps": 150, "progress_bar": False}
        fit = collaborative_em(train, kernel, _RANK, init_values={"V": V}, **options)
        found[name] = {
            "loss": loss(fit, parts[0]),
            "validation": loss(fit, parts[1]),
            "evidence": float(fit.objective_trace[-1]),
            "converged": float(fit.converged),
            "sigma": float(np.sqrt(fit.prior.variance)),
            "seconds": time.process_time() - begun,
        }
    return found


def sushi_a_by_vg(seed: int) -> dict[str, Any]:
    """The people and pairs of ``sushi_a``: point estimates, and lower bounds with priors that are given or learned."""
    train, test, validation, K = pairs_of(seed)
    found = point_estimates(train, (test, validation), K, seed)
    kinds = {_ALONE: (False, _FIXED), _WITH_OWN: (True, _FIXED), _LEARNED: (True, {})}
    for name, (has_own, values) in kinds.items():
        engine = BilinearVG(
            integrated,
            covariance={"users": "full", "items": "component"},
            hyper_values=values,
            num_restarts=0,
            tol=1e-5,
            progress_bar=False,
        )
        given = {"num_users": 200, "kernel": K, "has_own": has_own}
        found[name] = _fitted(engine, train, (test, validation), given)
    tried = [found[name] for name in kinds]
    found["of these three, by the validation pair"] = {
        key: min(tried, key=lambda each: float(each["validation"]))[key] for key in ("loss", "evidence", "converged")
    }
    found["of these three, by the bound"] = {
        key: max(tried, key=lambda each: float(each["evidence"]))[key] for key in ("loss", "evidence", "converged")
    }
    return found


def integrated_report(draws: list[dict[str, Any]]) -> list[str]:
    """What is written of the draws."""
    lines = ["# Held-out comparisons: loadings and means integrated by BilinearVG", ""]
    lines += ["Losses are mean negative log probabilities in bits; a constant has 1.", ""]
    lines += [f"Sushi A, 200 people, 3 + 1 pairs, {len(draws)} draws, those of the table of Sushi A; D = {_RANK}.", ""]
    lines += [*systems_table(draws, "GPitem"), ""]
    lines += ["| system | scale of V | of b | of the own process, σ | CPU-s |", "|---|---|---|---|---|"]
    for name in (_ALONE, _WITH_OWN, _LEARNED, _BY_EP, _BY_BOUND):
        scales = [draw[name]["scales"] for draw in draws]
        cells = [
            f"{np.median([each[key] for each in scales]):.2g}" if key in scales[0] else ""
            for key in ("scale", "mean_scale", "sigma")
        ]
        seconds = np.mean([draw[name]["seconds"] for draw in draws])
        lines.append(f"| {name} | {' | '.join(cells)} | {seconds:.0f} |")
    sigma = np.median([draw["GPitem"]["sigma"] for draw in draws])
    lines += ["", f"Medians of the draws, compilation within the seconds. GPitem has σ = {sigma:.2g}.", ""]
    by_ep, by_bound = (np.array([draw[name]["loss"] for draw in draws]) for name in (_BY_EP, _BY_BOUND))
    learned, item = (np.array([draw[name]["loss"] for draw in draws]) for name in (_LEARNED, "GPitem"))
    lines += [
        "The model with its own process but without tastes is one Gaussian field, which other engines take. Losses, "
        f"paired: by VariationalGaussian less by BilinearVG, all scales learned, {mean_and_error(by_bound - learned)}; "
        f"by EP less that of GPitem {mean_and_error(by_ep - item)}; "
        f"by VariationalGaussian less by EP {mean_and_error(by_bound - by_ep)}.",
        "",
    ]
    lines += ["What was asked:", ""]
    for name in (_ALONE, _WITH_OWN, _LEARNED, "of these three, by the validation pair", "of these three, by the bound"):
        differences = {
            other: np.array([draw[name]["loss"] - draw[other]["loss"] for draw in draws])
            for other in ("GPitem", "VU, D = 2", "GPVU, D = 2")
        }
        is_below = differences["GPitem"].mean() <= 0.0
        lines.append(
            f"- {name}: not above GPitem in the paired mean {'**met**' if is_below else '**missed**'} "
            f"({mean_and_error(differences['GPitem'])}); at least 0.03 below point estimates of the same D "
            + ", ".join(
                f"{'**met**' if differences[other].mean() <= -0.03 else '**missed**'} against {other.split(',')[0]} "
                f"({mean_and_error(differences[other])})"
                for other in ("VU, D = 2", "GPVU, D = 2")
            )
            + "."
        )
    lines += [
        "",
        "V and b have the priors N(0, 0.5²) and N(0, 1) where nothing else is said; the own process is σ² times the "
        "kernel of the features with ψ = 10 and α = 0.1, its σ by the bound; one start, to 1e-5. The evidence of the "
        "first three is that of EP at its maximum in the parameters, "
        "of the others a lower bound with V and b integrated.",
    ]
    return lines
