"""Items of published data with their priors, against NUTS over the items with people summed out on a fine grid."""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

from numpyro_ext.datasets import data_path
from numpyro_ext.datasets.external import DATA_VARIABLE
from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.models import item_response

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} names no downloaded data"),
]
SITES = ("discrimination", "intercept")
NODES = np.linspace(-7.0, 7.0, 61)


def _verbal_aggression() -> np.ndarray:
    table = pd.read_csv(data_path("irt", "verbagg_long.csv.gz"))
    table["code"] = (table["r2"] == "Y").astype(int)
    return table.pivot(index="id", columns="item", values="code").to_numpy()


def _items_alone(response):
    """Two-parameter logistic items with the priors of ``item_response``, sharing no code with it or the engine."""
    with numpyro.plate("items", response.shape[1]):
        slopes = numpyro.sample("discrimination", dist.LogNormal(0.0, 0.5))
        intercepts = numpyro.sample("intercept", dist.Normal(0.0, 3.0))
    logits = slopes[:, None] * NODES + intercepts[:, None]
    joint = response @ logits - jnp.sum(jax.nn.softplus(logits), axis=0) - 0.5 * NODES**2
    numpyro.factor("people", jnp.sum(jax.nn.logsumexp(joint, axis=1)))


def test_means_and_standard_deviations_of_items_are_those_of_nuts():
    y = _verbal_aggression()
    engine = AdaptiveQuadrature(partial(item_response, family="2pl", priors=True), progress_bar=False)
    engine.run(random.key(0), y)
    assert engine.diagnostics.converged
    chains = MCMC(
        NUTS(_items_alone, init_strategy=numpyro.infer.init_to_median),
        num_warmup=500,
        num_samples=2500,
        num_chains=4,
        chain_method="sequential",
        progress_bar=False,
    )
    chains.run(random.key(1), jnp.asarray(y, float))
    by_chain = chains.get_samples(group_by_chain=True)
    samples = engine.get_samples()
    report = engine.hyper
    for name in SITES:
        draws = np.asarray(by_chain[name])
        # Errors of the reference are below a quarter of what is allowed: 0.016 standard deviations, 1.1 % of these.
        assert np.min(effective_sample_size(draws)) > 4000
        mean, spread = draws.mean((0, 1)), draws.std((0, 1))
        site = report[name]
        for value, error in ((site.mean, site.sd), (samples[name].mean(0), samples[name].std(0))):
            assert np.max(np.abs(value - mean) / spread) < 0.1
            np.testing.assert_allclose(error, spread, rtol=0.05)
