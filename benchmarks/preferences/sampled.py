"""Loadings, means and scales of sushi sampled by NUTS on the evidence of EP, which integrates utilities of people."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from numpyro_ext.infer import marginalize

from ..harness import make_nuts
from .pairs import BITS, ordered

RANK, NUM_USERS = 2, 200
_NUM_WARMUP, _NUM_SAMPLES, _MOST_ROUNDS, _NUM_FIELDS = 200, 400, 4, 2
"""Draws of the chain: before, then so many at a time while its scales have not mixed; and utilities for every other."""
SCALES = "scale", "mean_scale", "sigma"
"""Scales: that of V has a half-normal prior of scale 1, those of b and of the own process one of scale 3."""


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


def by_nuts(train: np.ndarray, parts: list[np.ndarray], kernel: np.ndarray, seed: int) -> dict[str, float]:
    """Losses on test and validation pairs; converged are chains without a divergence whose scales have mixed."""
    marginal = marginalize(with_priors, field="utility", tol=1e-4)
    sampler = make_nuts(marginal, _NUM_WARMUP, _NUM_SAMPLES, max_tree_depth=6)
    given: dict[str, Any] = {"num_users": NUM_USERS, "kernel": kernel, "rank": RANK}
    rounds: list[dict[str, np.ndarray]] = []
    is_sound, rng_key = False, jax.random.key(seed)
    while not is_sound and len(rounds) < _MOST_ROUNDS:
        sampler.run(rng_key, *ordered(train), **given, extra_fields=("diverging",))
        rounds.append({name: np.asarray(values) for name, values in sampler.get_samples().items()})
        sampler.post_warmup_state = sampler.last_state
        rng_key = sampler.last_state.rng_key
        draws = {name: np.concatenate([each[name] for each in rounds]) for name in rounds[0]}
        worst = max(float(split_gelman_rubin(draws[name][None])) for name in SCALES)
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
        "effective": min(float(effective_sample_size(draws[name][None])) for name in SCALES),
        **{name: float(np.mean(draws[name])) for name in SCALES},
    }
