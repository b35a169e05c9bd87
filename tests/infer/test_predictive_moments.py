"""A Gaussian process whose scales and noise are unknown, against sums over a fine grid of its hyperparameters."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_ext.infer import INLA

CASE = json.loads((Path(__file__).parents[1] / "reference" / "active_mgp.json").read_text())["gpr_1d_n9"]
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


@pytest.mark.parametrize("options, tol", [({}, 1e-2), ({"grid_step": 1.0, "log_density_drop": 14.0}, 1e-3)])
def test_lattices_converge_to_the_exact_mixture(options, tol):
    """The posterior of the hyperparameters has a tail that is far heavier than the Gaussian at its mode."""
    engine = INLA(process, integrate="grid", **options)
    engine.run(jax.random.key(0), *DATA)
    f = engine.posterior["f"]
    np.testing.assert_allclose(float(engine.log_evidence), EXACT["log_evidence"], atol=0.15 * tol)
    np.testing.assert_allclose(f.variance[~SEEN], EXACT["var_f"], rtol=tol)
    np.testing.assert_allclose(f.mean[~SEEN], EXACT["mean"], atol=0.2 * tol)
    np.testing.assert_allclose(engine.hyper["xi"].mean, EXACT["xi_mean"], atol=0.2 * tol)
