"""Posteriors of states by SMC and NUTS, against sums that are exact; adaptive choices of measurements."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS
from scipy.special import gammaln

from numpyro_ext.design import SequentialDesign, draws_of, expected_information_gain
from numpyro_ext.infer import SMC
from numpyro_ext.models import quantum_tomography
from numpyro_ext.quantum import axis_measurements, born_probabilities, density_matrix, pauli_bases
from numpyro_ext.structure import ModelStructureError

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "active_quantum.json").read_text())
CASES = ("hs_posterior", "hs_posterior_oblique", "hs_posterior_noisy")


def arguments(name):
    case = REFERENCE[name]
    counts = jnp.stack([jnp.array(case["n_plus"]), jnp.array(case["n_minus"])], -1)
    noise = {}
    if name.endswith("noisy"):
        noise = {"dark_rates": tuple(case["lambda_d"]), "efficiencies": tuple(case["eta"])}
    return case, axis_measurements(case["directions"]), counts, noise


def check(case, source, query, noise, bloch, effective, weights=None):
    """Moments and information within four standard errors."""
    weights = np.full(len(bloch), 1.0 / len(bloch)) if weights is None else np.asarray(weights)
    mean, second = np.array(case["bloch_mean"]), np.array(case["bloch_second_moment"])
    deviation = np.sqrt(np.diag(second) - mean**2)
    assert np.all(np.abs(weights @ bloch - mean) < 4.0 * deviation / np.sqrt(effective))
    found = np.einsum("s,sa,sb->ab", weights, bloch, bloch)
    spread = np.sqrt(np.einsum("s,sab->ab", weights, (np.einsum("sa,sb->sab", bloch, bloch) - found) ** 2))
    assert np.all(np.abs(found - second) < 4.0 * spread / np.sqrt(effective))
    gain = expected_information_gain(source, axis_measurements(query), **noise)["shot"]
    # Information is the mean divergence of the outcome given a state from the outcome; lost photons make it smaller.
    chance = np.clip(0.5 * (1.0 + bloch @ np.array(query).T), 1e-9, 1.0 - 1e-9)
    mixed = weights @ chance
    divergence = chance * np.log(chance / mixed) + (1.0 - chance) * np.log((1.0 - chance) / (1.0 - mixed))
    spread = np.sqrt(weights @ (divergence - weights @ divergence) ** 2)
    # its bias is at most half a nat over the draws that it is made of
    assert np.all(np.abs(gain - case["BALD_nats"]) < 4.0 * spread / np.sqrt(effective) + 0.5 / effective)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_posteriors_by_particles(name):
    case, settings, counts, noise = arguments(name)
    smc = SMC(quantum_tomography, num_particles=2000, watch="state", progress_bar=False)
    smc.run(random.key(0), settings, counts, **noise)
    assert smc.diagnostics.converged
    # the reference is of shots in their order
    orders = sum(gammaln(row.sum() + 1) - gammaln(row + 1).sum() for row in np.asarray(counts))
    evidence = smc.log_evidence
    assert abs(evidence - orders - case["log_evidence"]) < 3.5 * evidence.standard_error < 0.4
    bloch = np.asarray(smc.particles["bloch"])
    check(case, smc, case["query_dirs"], noise, bloch, smc.effective_sample_size / 2.0, smc.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_posteriors_by_nuts(name):
    case, settings, counts, noise = arguments(name)
    mcmc = MCMC(NUTS(quantum_tomography), num_warmup=1000, num_samples=8000, progress_bar=False)
    mcmc.run(random.key(0), settings, counts, **noise)
    bloch = np.asarray(mcmc.get_samples()["bloch"])
    check(case, draws_of(mcmc), case["query_dirs"], noise, bloch, 2000.0)


def test_detectors_without_a_source_are_refused_within_a_model_too():
    smc = SMC(quantum_tomography, num_particles=400, progress_bar=False)
    for noise, words in (({"source_rate": 0.0}, "Without a source"), ({"efficiencies": 1.5}, "at most one")):
        with pytest.raises(ModelStructureError, match=words):
            smc.run(random.key(0), pauli_bases(), np.ones((3, 2), int), dark_rates=0.1, **noise)


@pytest.mark.thorough
def test_an_adaptive_experiment_nears_the_state():
    """Twenty lines: the state, the loop, and the error at its end."""
    generator = np.random.default_rng(0)
    truth = density_matrix(bloch=np.array([1.0, 2.0, -2.0]) / 3.0)
    angles = generator.normal(size=(40, 3))
    settings = jnp.concatenate([pauli_bases(), axis_measurements(angles)])
    p = np.asarray(born_probabilities(settings, truth))

    def enter(arguments, place, outcome):
        arguments["counts"] = arguments["counts"].at[place].add(outcome)
        return arguments

    def infidelity(smc):
        bloch = np.asarray(smc.weights @ smc.particles["bloch"])
        return 0.5 * (1.0 - bloch @ np.array([1.0, 2.0, -2.0]) / 3.0)

    smc = SMC(quantum_tomography, num_particles=500, watch="state", progress_bar=False)
    smc.run(random.key(0), settings, jnp.zeros((43, 2), int))
    design = SequentialDesign(smc, candidates=(settings,), enter=enter, test=infidelity)
    for _ in range(12):
        place = design.propose()
        design.observe(place, generator.multinomial(20, p[place] / p[place].sum()))
    assert int(smc._args[1].sum()) == 240
    history = design.history
    assert float(history["test"][-1]) < 0.3 * float(history["test"][0])
    assert float(history["test"][-1]) < 0.05
