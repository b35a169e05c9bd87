"""Posterior of items with priors beside NUTS: ``python -m benchmarks.items.posterior`` writes the table.

Two-parameter logistic items with the priors of ``item_response``. NUTS runs over the items alone, with people summed
out on 61 nodes by three lines that share nothing with the engine. Verbal aggression (in two answers) is below
``NUMPYRO_EXT_DATA``; the other data are drawn from the priors. More than ten CPU-minutes.
"""

from __future__ import annotations

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

from numpyro_ext.datasets.external import data_path
from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.models import item_response

from ..harness import table_head, write_report

__all__ = ["main"]

_NODES = np.linspace(-8.0, 8.0, 61)
_NUM_CHAINS, _NUM_WARMUP, _NUM_SAMPLES = 4, 300, 1000
_SITES = ("discrimination", "intercept")


def _items(response: np.ndarray) -> None:
    """Items of which all people are summed out."""
    with numpyro.plate("items", response.shape[1]):
        a = numpyro.sample("discrimination", dist.LogNormal(0, 0.5))
        d = numpyro.sample("intercept", dist.Normal(0, 3))
    logits = a[:, None] * _NODES + d[:, None]
    joint = response @ logits - jnp.sum(jax.nn.softplus(logits), axis=0) + dist.Normal().log_prob(_NODES)
    numpyro.factor("people", jnp.sum(jax.nn.logsumexp(joint, axis=1)))


def _answers() -> dict[str, np.ndarray]:
    table = pd.read_csv(data_path("irt", "verbagg_long.csv.gz"))
    table["code"] = (table["r2"] == "Y").astype(int)
    found = {"verbal aggression, 316 x 24": table.pivot(index="id", columns="item", values="code").to_numpy()}
    for seed in (0, 1):
        r = np.random.default_rng(seed)
        slope, intercept, trait = np.exp(0.5 * r.normal(size=20)), 3.0 * r.normal(size=20), r.normal(size=(200, 1))
        simulated = (r.random((200, 20)) < 1.0 / (1.0 + np.exp(-slope * trait - intercept))).astype(int)
        found[f"simulated, 200 x 20, seed {seed}"] = simulated
    return found


def _rows(name: str, response: np.ndarray) -> list[str]:
    start = time.process_time()
    sampler = MCMC(
        NUTS(_items),
        num_warmup=_NUM_WARMUP,
        num_samples=_NUM_SAMPLES,
        num_chains=_NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    sampler.run(jax.random.key(0), response)
    chains = {site: np.asarray(draws) for site, draws in sampler.get_samples(group_by_chain=True).items()}
    seconds, rows = time.process_time() - start, []
    start = time.process_time()
    engine = AdaptiveQuadrature(partial(item_response, family="2pl", priors=True), progress_bar=False)
    engine.run(jax.random.key(0), response)
    estimates = {site: (np.asarray(engine.hyper[site].mean), np.asarray(engine.hyper[site].sd)) for site in _SITES}
    own = time.process_time() - start
    draws = engine.get_samples()
    for site in _SITES:
        exact = chains[site].reshape(-1, response.shape[1])
        mean, sd = exact.mean(0), exact.std(0)
        error = 1.0 / np.sqrt(np.min(effective_sample_size(chains[site])))
        of_draws = np.asarray(draws[site])
        for source, (own_mean, own_sd) in {
            "`hyper`": estimates[site],
            "`get_samples`": (of_draws.mean(0), of_draws.std(0)),
        }.items():
            off, wide = np.abs(own_mean - mean) / sd, np.abs(own_sd / sd - 1.0)
            rows.append(
                f"| {name} | `{site}` | {source} | {off.max():.3f} | {np.sqrt(np.mean(off**2)):.3f} "
                f"| {100 * wide.max():.1f} % | {100 * np.sqrt(np.mean(wide**2)):.1f} % | {error:.3f} "
                f"| {own:.1f} | {seconds:.0f} | {'yes' if engine.diagnostics.converged else 'no'} |"
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Fit, sample and write."""
    numpyro.enable_x64()
    rows = [row for name, response in _answers().items() for row in _rows(name, response)]
    lines = [
        "# Posterior of items with priors beside NUTS",
        "",
        f"Two-parameter logistic items with priors; NUTS over the items alone, people summed out on {len(_NODES)} "
        f"nodes, {_NUM_CHAINS} chains of {_NUM_SAMPLES} draws. Differences of means in posterior standard deviations, "
        "and relative ones of these, over items: the largest and the root mean square. The standard error of a mean of "
        "NUTS is that of the item with the fewest effective draws; that of a standard deviation is 0.7 times as "
        "large. CPU-seconds of both with compilation; the engine's are those until means and deviations are known.",
        "",
        *table_head(
            "data | site | answer | mean, largest | mean | sd, largest | sd | error of NUTS | seconds | of NUTS "
            "| converged"
        ),
        *rows,
    ]
    write_report("item-posterior", lines, script="items.posterior")


if __name__ == "__main__":
    main()
