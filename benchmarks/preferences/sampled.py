"""Loadings, means and scales of sushi integrated by NUTS on the evidence of EP, for ``held_out``.

BilinearVG integrates loadings by a lower bound, which takes them for certain, or away; here the utilities of the people
alone are integrated by expectation propagation, and what all people share is sampled.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from numpyro_ext.infer import BilinearVG, marginalize

from ..harness import blocks, cpu_seconds, make_nuts, tables, verdict
from .pairs import BITS, mean_and_error, ordered, sushi_pairs
from .sushi import at_a_point, start_of, systems_table

_RANK, _NUM_USERS = 2, 200
_BY_BOUND, _SAMPLED = "V and b integrated, BilinearVG", "V, b and scales integrated, own process, NUTS on EP"
_NUM_WARMUP, _NUM_SAMPLES, _MOST_ROUNDS, _NUM_FIELDS = 200, 400, 4, 2
"""Draws of the chain: before, then so many at a time while its scales have not mixed; and utilities for every other."""
_SCALES = "scale", "mean_scale", "sigma"
_NUM_LOOKED_AT = 2
"""Draws on which this and other ways to integrate were tried before it was run on all, with the priors it has here."""


def integrated(user: Any, first: Any, second: Any, won: Any = None, *, num_users: int, num_items: int) -> None:
    """Shared tastes whose loadings and means have priors."""
    with numpyro.plate("items", num_items):
        V = numpyro.sample("V", dist.Normal(0.0, 0.5).expand([_RANK]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("users", num_users):
        taste = numpyro.sample("taste", dist.Normal(0.0, 1.0).expand([_RANK]).to_event(1))
    difference = b[first] - b[second] + jnp.sum(taste[user] * (V[first] - V[second]), axis=-1)
    with numpyro.plate("comparisons", len(user)):
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(difference)), obs=won)


def with_priors(user: Any, first: Any, second: Any, won: Any = None, *, num_users: int, kernel: Any, rank: int) -> None:
    """The model of GPVU, all its parameters with priors."""
    num_items = len(kernel)
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    mean_scale = numpyro.sample("mean_scale", dist.HalfNormal(3.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(3.0))
    V = scale * numpyro.sample("V", dist.Normal(0.0, 1.0).expand([num_items, rank]).to_event(2))
    b = mean_scale * numpyro.sample("b", dist.Normal(0.0, 1.0).expand([num_items]).to_event(1))
    with numpyro.plate("users", num_users):
        f = numpyro.sample("utility", dist.MultivariateNormal(b, V @ V.T + sigma**2 * kernel))
    with numpyro.plate("comparisons", len(user)):
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(f[user, first] - f[user, second])), obs=won)


def _sampled(train: np.ndarray, parts: tuple[np.ndarray, ...], kernel: np.ndarray, seed: int) -> dict[str, float]:
    marginal = marginalize(with_priors, field="utility", tol=1e-4)
    sampler = make_nuts(marginal, _NUM_WARMUP, _NUM_SAMPLES, max_tree_depth=6)
    given: dict[str, Any] = {"num_users": _NUM_USERS, "kernel": kernel, "rank": _RANK}
    rounds: list[dict[str, np.ndarray]] = []
    is_sound, rng_key = False, jax.random.key(seed)
    while not is_sound and len(rounds) < _MOST_ROUNDS:
        sampler.run(rng_key, *ordered(train), **given, extra_fields=("diverging",))
        rounds.append({name: np.asarray(values) for name, values in sampler.get_samples().items()})
        sampler.post_warmup_state = sampler.last_state
        rng_key = sampler.last_state.rng_key
        draws = {name: np.concatenate([each[name] for each in rounds]) for name in rounds[0]}
        worst = max(float(split_gelman_rubin(draws[name][None])) for name in _SCALES)
        is_sound = worst < 1.05 and not np.any(np.asarray(sampler.get_extra_fields()["diverging"]))
    thinned = {name: values[:: 2 * len(rounds)] for name, values in draws.items()}
    fields = [marginal.recover(jax.random.key(number), thinned)["utility"] for number in range(_NUM_FIELDS)]
    f = np.concatenate([np.asarray(field) for field in fields])
    losses = []
    for part in parts:
        user, winner, loser = part.T
        probability = np.mean(np.asarray(norm.cdf(f[:, user, winner] - f[:, user, loser])), axis=0)
        losses.append(float(-np.mean(np.log(probability)) / BITS))
    return {
        "loss": losses[0],
        "validation": losses[1],
        "converged": float(is_sound),
        "rounds": len(rounds),
        "effective": min(float(effective_sample_size(draws[name][None])) for name in _SCALES),
        **{name: float(np.mean(draws[name])) for name in _SCALES},
    }


def _by_bound(train: np.ndarray, parts: tuple[np.ndarray, ...], num_items: int) -> dict[str, float]:
    families = {"users": "full", "items": "component"}
    engine = BilinearVG(integrated, covariance=families, num_restarts=0, tol=1e-5, progress_bar=False)
    given: dict[str, Any] = {"num_users": _NUM_USERS, "num_items": num_items}
    engine.run(jax.random.key(0), *ordered(train), **given)
    losses = [float(-np.mean(engine.log_predictive(*ordered(part), **given)["won"]) / BITS) for part in parts]
    return {
        "loss": losses[0],
        "validation": losses[1],
        "evidence": float(engine.log_evidence),
        "converged": float(engine.diagnostics.converged),
    }


def sushi_a_sampled(seed: int) -> dict[str, Any]:
    """The people and pairs of ``sushi_a``: point estimates, and what all share integrated by a bound or by sampling."""
    parts, K = sushi_pairs(seed)
    train, *others = parts
    systems = {"GPitem": (K, 0), "VU, D = 2": (np.eye(len(K)), 2), "GPVU, D = 2": (K, 2)}
    found: dict[str, Any] = {
        name: at_a_point(parts, kernel, start_of(kernel, seed, rank)) for name, (kernel, rank) in systems.items()
    }
    for name, run in {
        _BY_BOUND: lambda: _by_bound(train, others, len(K)),
        _SAMPLED: lambda: _sampled(train, others, K, seed),
    }.items():
        values, seconds = cpu_seconds(run)
        found[name] = values | {"seconds": seconds}
    return found


def page(draws: list[dict[str, Any]]) -> list[str]:
    """Losses of all systems, and what was asked of those that integrate."""

    def less(name: str, other: str, key: str = "loss") -> np.ndarray:
        return np.array([draw[name][key] - draw[other][key] for draw in draws])

    def said(name: str) -> str:
        from_item = less(name, "GPitem")
        both = mean_and_error(0.5 * (from_item + less(name, "GPitem", "validation")))
        more = f"{tables.mean_and_error(from_item, digits=4)}; with the validation pairs {both}"
        if name == _SAMPLED and len(draws) > _NUM_LOOKED_AT + 1:
            more += f"; without the first {_NUM_LOOKED_AT} draws {mean_and_error(from_item[_NUM_LOOKED_AT:])}"
        below = ", ".join(
            f"{verdict(less(name, other).mean() <= -0.03)} against {other.partition(',')[0]} "
            f"({mean_and_error(less(name, other))})"
            for other in ("VU, D = 2", "GPVU, D = 2")
        )
        return (
            f"- {name}: not above GPitem in the paired mean {verdict(from_item.mean() <= 0.0)} ({more}); at least 0.03 "
            f"below point estimates of the same D {below}."
        )

    means = {key: np.mean([draw[_SAMPLED][key] for draw in draws]) for key in _SCALES}
    of_item = np.median([draw["GPitem"]["sigma"] for draw in draws])
    effective = [draw[_SAMPLED]["effective"] for draw in draws]
    seconds = ", ".join(f"{name} {np.median([draw[name]['seconds'] for draw in draws]):.0f}" for name in draws[0])
    return blocks(
        "# Held-out comparisons: loadings, means and scales sampled",
        "Losses are mean negative log probabilities in bits; a constant has 1.",
        f"Sushi A, 200 people, 3 + 1 pairs, {len(draws)} draws, those of the table of Sushi A; D = {_RANK}.",
        systems_table(draws, "GPitem"),
        "What was asked:",
        map(said, (_BY_BOUND, _SAMPLED)),
        "On the validation pairs, which chose nothing here, the loss of the sampled model less that of GPitem is "
        f"{mean_and_error(less(_SAMPLED, 'GPitem', 'validation'))}.",
        "By BilinearVG V has the prior N(0, 0.5²) and b N(0, 1). Sampled are V, b, their scales and σ, by NUTS on the "
        f"evidence of EP (`marginalize`), one chain of {_NUM_WARMUP} + {_NUM_SAMPLES} draws, or up to {_MOST_ROUNDS} "
        "times as many until it is converged: the scale of V under a half-normal prior of scale 1, those of b and of "
        "the own process, σ, under half-normal ones of scale 3. Their posterior means are "
        f"{means['scale']:.2g}, {means['mean_scale']:.2g} and {means['sigma']:.2g} in the mean "
        f"over draws (GPitem has σ = {of_item:.2g}, the median); the least "
        f"effective number of draws of these is {min(effective):.0f} to {max(effective):.0f}. Converged are chains "
        "without a divergence whose scales have a split R̂ below 1.05. Predictions are those of "
        f"{_NUM_SAMPLES // 2 * _NUM_FIELDS} draws of the utilities. No test pair chose anything; other ways to "
        f"integrate were tried on the first {_NUM_LOOKED_AT} draws. CPU-s, medians of the draws: {seconds}.",
    )
