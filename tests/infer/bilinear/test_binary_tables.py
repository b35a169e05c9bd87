"""Bounds of logistic factors in tables of another program, and a small binary matrix under NUTS."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from scipy.special import expit

from numpyro_ext.infer.bilinear.algorithms.background import even_zero
from numpyro_ext.models import binary_factorization
from numpyro_ext.potentials.bounds.logistic import BoundedPotential, JaakkolaBound
from numpyro_ext.potentials.families.binary import LogitPotential
from tests.infer.bilinear.bilinear_forms import REFERENCE

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")


def table(name):
    with (REFERENCE / name).open() as file:
        rows = list(csv.DictReader(file))
    return {column: np.array([float(row[column]) for row in rows]) for column in rows[0]}


@needs_float64
def test_parabolas_of_the_table():
    """At given tangents: those of a zero, and of a one by symmetry."""
    t = table("hm_jaakkola_bound.csv")
    found = even_zero(jnp.asarray(t["xi"] ** 2))
    np.testing.assert_allclose(found.at(jnp.asarray(t["a"])) + t["x"] * t["a"], t["log_tau"], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.curvature, -2.0 * t["lambda_xi"], rtol=1e-12)


@needs_float64
def test_expectations_of_the_table():
    """At the best tangents, below the exact expectations."""
    t = table("hm_expected_bound.csv")
    potential = BoundedPotential(LogitPotential(jnp.asarray(t["x"].astype(int))), JaakkolaBound())
    found = potential.expected_log_density(jnp.asarray(t["mu"]), jnp.asarray(t["s2"])).value
    np.testing.assert_allclose(found, t["alpha"], rtol=1e-10)
    exact = LogitPotential(jnp.asarray(t["x"].astype(int))).expected_log_density(t["mu"], t["s2"]).value
    np.testing.assert_allclose(exact, t["E_log_lik_exact"], rtol=1e-10)
    assert np.all(found <= exact)


@needs_float64
@pytest.mark.slow
def test_a_small_matrix_by_sampling():
    """Chances of a one in all cells without biases, within four standard errors of another sampler's."""
    known, expected = (json.loads((REFERENCE / f"hm_sibm_small{n}.json").read_text()) for n in ("", "_mcmc"))
    x = np.array(known["X"])
    rows, cols = np.divmod(np.arange(x.size), x.shape[1])
    model = handlers.condition(binary_factorization, {"b": jnp.zeros(x.shape[0]), "g": jnp.zeros(x.shape[1])})
    mcmc = MCMC(
        NUTS(model), num_warmup=500, num_samples=4000, num_chains=2, progress_bar=False, chain_method="sequential"
    )
    mcmc.run(random.key(0), rows, cols, x.ravel(), num_rows=x.shape[0], num_cols=x.shape[1], rank=known["D"])
    draws = mcmc.get_samples(group_by_chain=True)
    chance = expit(np.einsum("csik,csjk->csij", draws["u"], draws["v"]) + draws["z"][..., None, None])
    variance = chance.var((0, 1)) / effective_sample_size(chance) + np.array(expected["p_x1_se"]) ** 2
    assert np.all(np.abs(chance.mean((0, 1)) - expected["p_x1"]) < 4.0 * np.sqrt(variance))
