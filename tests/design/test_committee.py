"""Scores of committees against reference values, and how they are biased."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.design import committee_information, nested_information
from numpyro_ext.design.outcomes import committee
from tests.tiers import thorough

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "active_bald_core.json").read_text())
COMMITTEE, FOCUSED = REFERENCE["discrete_committee"], REFERENCE["focused_discrete"]
LOG_P = jnp.log(jnp.array(COMMITTEE["p"]))


@pytest.mark.parametrize("kind", ["uniform", "weighted"])
def test_scores_are_the_reference_values(kind):
    weights = None if kind == "uniform" else jnp.array(COMMITTEE["weights"])
    expected = COMMITTEE[kind]
    mean = committee.mixture(LOG_P, weights)
    votes = committee.vote_fractions(LOG_P, weights)
    found = {
        "bald_nats": committee_information(LOG_P, weights),
        "mes_nats": committee.entropy(mean),
        "mean_cond_entropy_nats": jnp.average(committee.entropy(LOG_P), axis=0, weights=weights),
        "least_confidence": committee.least_confidence(mean),
        "margin": -committee.margin(mean),
        "gini": committee.gini(mean),
        "vote_entropy_nats": committee.entropy(jnp.log(votes)),
        "variation_ratio": 1.0 - jnp.max(votes),
        "bald_delta_corrected_nats": committee_information(LOG_P, weights, bias_correction="delta"),
    }
    if kind == "uniform":
        found["bald_jackknife_nats"] = committee_information(LOG_P, bias_correction="jackknife")
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=0.0, atol=1e-10, err_msg=name)
    np.testing.assert_allclose(found["bald_nats"], found["mes_nats"] - found["mean_cond_entropy_nats"], atol=1e-13)
    assert float(committee_information(LOG_P[:1])) == 0.0


def test_the_chain_rule_holds_with_a_nuisance():
    joint, outcomes = np.array(FOCUSED["p_theta_phi"]), np.array(FOCUSED["p_y_given"])
    full = committee_information(jnp.log(outcomes.reshape(12, 3)), joint.reshape(-1))
    np.testing.assert_allclose(full, FOCUSED["U_full_nats"], atol=1e-10)
    given_theta = np.einsum("tp,tpy->ty", joint, outcomes) / joint.sum(1)[:, None]
    theta = committee_information(jnp.log(given_theta), joint.sum(1))
    np.testing.assert_allclose(theta, FOCUSED["U_theta_nats"], atol=1e-10)
    np.testing.assert_allclose(full - theta, FOCUSED["I_phi_y_given_theta_nats"], atol=1e-10)
    # Inner members of equal weight, each repeated as often as it weighs.
    inner = jnp.log(jnp.stack([jnp.stack([p, p, q]) for p, q in zip(outcomes[:, 0], outcomes[:, 1], strict=True)]))
    averaged = np.log((2.0 * outcomes[:, 0] + outcomes[:, 1]) / 3.0)
    np.testing.assert_allclose(nested_information(inner), committee_information(averaged), atol=1e-13)
    with pytest.raises(ValueError, match=r"\(members, inner members, \.\.\., outcomes\); got \(2, 2\)"):
        nested_information(np.log(np.full((2, 2), 0.5)))


@pytest.mark.thorough
def test_the_bias_of_few_members_and_its_corrections():
    """Dirichlet members: what a sample of them says on average, against one of very many."""
    concentration = np.array([1.0, 2.0, 0.7])
    rng = np.random.default_rng(0)
    mean = concentration / concentration.sum()
    leading = -0.5 * np.sum((1.0 - mean) / (1.0 + concentration.sum()))

    def errors(size, number, correction):
        """Of members' information, whose mean divergence from the true mixture has the same expectation but no bias."""
        members = rng.dirichlet(concentration, (number, size))
        found = jax.vmap(partial(committee_information, bias_correction=correction))(jnp.log(jnp.asarray(members)))
        return np.asarray(found) - np.mean(np.sum(members * np.log(members / mean), -1), -1)

    for size in (50, 200):
        slope = size * errors(size, 4000, "none")
        assert abs(slope.mean() - leading) < 3.0 * slope.std() / np.sqrt(len(slope))
    for correction in ("delta", "jackknife"):
        left = errors(10, 8000, correction)
        assert abs(left.mean()) + 3.0 * left.std() / np.sqrt(len(left)) < 0.003


@pytest.mark.parametrize("correction", ["none", "delta", *thorough("jackknife")])
def test_corrections_within_jit(correction):
    """They asked for the value of a number of members."""
    found = partial(committee_information, bias_correction=correction)
    weights = jnp.array(COMMITTEE["weights"])
    np.testing.assert_allclose(jax.jit(found)(LOG_P, weights), found(LOG_P, weights), atol=1e-12)


def test_members_without_weight_are_refused():
    with pytest.raises(ValueError, match="nor all zero"):
        committee_information(LOG_P, jnp.zeros(7))
    with pytest.raises(ValueError, match="There are 7 members"):
        committee_information(LOG_P, jnp.ones(6))
    with pytest.raises(ValueError, match="effective sample size above one"):
        committee_information(LOG_P[:1], bias_correction="jackknife")


def test_what_cannot_happen_counts_for_nothing():
    p = jnp.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    expected = -0.75 * np.log(0.75) - 0.25 * np.log(0.25) - 0.5 * np.log(2.0)
    np.testing.assert_allclose(committee_information(jnp.log(p)), expected, atol=1e-14)
