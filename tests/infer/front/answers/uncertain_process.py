"""A Gaussian process on nine points whose length, scale and noise are unknown, with sums over a fine grid of these."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

CASE = json.loads((Path(__file__).parents[3] / "reference" / "active_mgp.json").read_text())["gpr_1d_n9"]
EXACT = CASE["true_posterior_quadrature"]
X, Y, X_NEW = (np.array(CASE[name]) for name in ("X", "y", "X_star"))
SEEN = np.arange(len(X) + len(X_NEW)) < len(X)
DATA = np.concatenate([X, X_NEW])[:, 0], np.concatenate([Y, np.zeros(len(X_NEW))]), SEEN


def process(x, y=None, seen=True):
    prior = dist.Normal(jnp.array(CASE["prior_mean"]), jnp.array(CASE["prior_sd"]))
    log_length, log_scale, log_noise = numpyro.sample("xi", prior.to_event(1))
    kernel = jnp.exp(2.0 * log_scale - 0.5 * jnp.square((x[:, None] - x) / jnp.exp(log_length)))
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, kernel + 1e-10 * jnp.eye(x.size)))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(f, jnp.exp(log_noise)), obs=y)
