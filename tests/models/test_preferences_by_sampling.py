"""Preference factorisation under NUTS against an independent sampler of the same posterior."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from scipy.stats import norm

from numpyro_ext.models import preference_factorization

FOLDER = Path(__file__).parents[1] / "reference"
PROBLEM, POSTERIOR = (json.loads((FOLDER / f"{n}.json").read_text()) for n in ("hm_cp_epvb_small", "hm_cp_small_mcmc"))


def _kernel(x, length):
    x = np.asarray(x)
    return np.exp(-0.5 * np.sum((x[:, None] - x) ** 2, -1) / length**2) + 1e-5 * np.eye(len(x))


@pytest.mark.slow
def test_nuts_agrees_with_elliptical_slices():
    """The probabilities of all pairs, seen and unseen, within four standard errors of both samplers together."""
    pairs, y = np.asarray(PROBLEM["pairs"]), np.array(PROBLEM["Y"], float)
    user, pair = np.nonzero(np.array(PROBLEM["mask"]))
    arguments = user, *pairs[pair].T, (y[user, pair] > 0).astype(int)
    options = {
        "num_users": len(y),
        "kernel": _kernel(PROBLEM["items"], 1.0),
        "user_kernel": _kernel(PROBLEM["user_features"], 1.5),
        "rank": PROBLEM["D"],
        "shared": False,
    }
    mcmc = MCMC(
        NUTS(preference_factorization),
        num_warmup=1000,
        num_samples=4000,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *arguments, **options)
    draws = mcmc.get_samples(group_by_chain=True)
    weights, tastes = np.asarray(draws["weights"]), np.asarray(draws["tastes"])
    ahead = tastes[..., pairs[:, 0]] - tastes[..., pairs[:, 1]]
    wins = norm.cdf(np.einsum("cndu,cndp->cnup", weights, ahead))
    own_error = wins.std((0, 1)) / np.sqrt(effective_sample_size(wins))
    gap = np.abs(wins.mean((0, 1)) - np.array(POSTERIOR["p_pos"]))
    assert own_error.max() < 0.02
    assert np.all(gap <= 4.0 * np.hypot(own_error, np.array(POSTERIOR["p_pos_se"]))), (gap / own_error).max()
