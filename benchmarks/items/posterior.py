"""Posterior of items with priors beside NUTS: ``python -m benchmarks.items.posterior`` writes the table.

Two-parameter logistic items with the priors of ``item_response``. NUTS runs over the items alone, with people summed
out on 61 nodes by three lines that share nothing with the engine. Verbal aggression (in two answers) is below
``NUMPYRO_EXT_DATA``; the other data are drawn from the priors. More than ten CPU-minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.diagnostics import effective_sample_size

from numpyro_ext.datasets.external import data_path
from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.models import item_response

from ..harness import blocks, cpu_seconds, make_nuts, run_chains, table, write_report

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


def _fitted_moments(engine: AdaptiveQuadrature, response: np.ndarray) -> Any:
    engine.run(jax.random.key(0), response)
    return _moments(engine)


def _rows() -> Iterator[Iterable[Any]]:
    for name, response in _answers().items():
        sampler = make_nuts(_items, _NUM_WARMUP, _NUM_SAMPLES, num_chains=_NUM_CHAINS)
        chains = run_chains(sampler, 0, response)
        engine = AdaptiveQuadrature(partial(item_response, family="2pl", priors=True), progress_bar=False)
        found, own = cpu_seconds(_fitted_moments, engine, response)
        ended = f"{own:.1f}", f"{chains.seconds:.0f}", bool(engine.diagnostics.converged)
        for site in _SITES:
            exact = chains.draws[site].reshape(-1, response.shape[1])
            error = 1.0 / np.sqrt(np.min(effective_sample_size(chains.draws[site])))
            draws = np.asarray(engine.get_samples()[site])
            for answer, (mean, sd) in {"`hyper`": found[site], "`get_samples`": (draws.mean(0), draws.std(0))}.items():
                off, wide = np.abs(mean - exact.mean(0)) / exact.std(0), 100 * np.abs(sd / exact.std(0) - 1.0)
                gaps = [f"{off.max():.3f}", f"{_rms(off):.3f}", f"{wide.max():.1f} %", f"{_rms(wide):.1f} %"]
                yield name, f"`{site}`", answer, *gaps, f"{error:.3f}", *ended


def _moments(engine: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {site: (np.asarray(engine.hyper[site].mean), np.asarray(engine.hyper[site].sd)) for site in _SITES}


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def main() -> None:
    """Fit, sample and write."""
    numpyro.enable_x64()
    heads = (
        "data | site | answer | mean, largest | mean | sd, largest | sd | error of NUTS | seconds | of NUTS | converged"
    )
    lines = blocks(
        "# Posterior of items with priors beside NUTS",
        f"Two-parameter logistic items with priors; NUTS over the items alone, people summed out on {len(_NODES)} "
        f"nodes, {_NUM_CHAINS} chains of {_NUM_SAMPLES} draws. Differences of means in posterior standard deviations, "
        "and relative ones of these, over items: the largest and the root mean square. The standard error of a mean of "
        "NUTS is that of the item with the fewest effective draws; that of a standard deviation is 0.7 times as "
        "large. CPU-seconds of both with compilation; the engine's are those until means and deviations are known.",
        table(f"{heads} | converged", _rows()),
    )
    write_report("item-posterior", lines)


if __name__ == "__main__":
    main()
