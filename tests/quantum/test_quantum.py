"""States and measurements against reference values, closed forms and each other."""

import json
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qutip
from jax import random
from numpyro.infer import Predictive
from scipy.special import digamma
from scipy.stats import kstest, maxwell

from numpyro_ext.models import quantum_tomography
from numpyro_ext.quantum import (
    axis_measurements,
    bloch_vector,
    born_probabilities,
    checked_measurements,
    checked_state,
    density_matrix,
    fidelity,
    imperfect,
    linear_inversion,
    maximum_likelihood,
    mutually_unbiased_bases,
    pauli_bases,
    separable_bases,
    standard_separable_bases,
    symmetric_informationally_complete,
    uniform_bloch_vector,
)

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "active_quantum.json").read_text())
QUBITS, PAIRS = (
    [np.array(state["re"]) + 1j * np.array(state["im"]) for state in REFERENCE[name]]
    for name in ("qubit_states", "two_qubit_states")
)


def test_fidelities():
    for i, j, expected in REFERENCE["qubit_fidelity"]:
        assert fidelity(QUBITS[i], QUBITS[j]) == pytest.approx(expected, abs=1e-10)
    for i, j, expected in REFERENCE["two_qubit_fidelity"]:
        is_low = min(np.linalg.matrix_rank(PAIRS[k], tol=1e-10) for k in (i, j)) < 4
        assert fidelity(PAIRS[i], PAIRS[j]) == pytest.approx(expected, abs=1e-7 if is_low else 1e-10)
        assert fidelity(PAIRS[j], PAIRS[i]) == pytest.approx(expected, abs=1e-7)
    pure = density_matrix(amplitudes=[1, 1j, 0.5, 0])
    assert fidelity(pure, PAIRS[0]) == pytest.approx(np.trace(pure @ PAIRS[0]).real, abs=1e-7)


def test_states_of_qutip():
    """Another library, on states and measurements at random."""
    for dimension, seed in ((2, 0), (3, 1), (4, 2)):
        states = [qutip.rand_dm(dimension, seed=seed + 10 * k) for k in range(2)]
        ours = [jnp.asarray(state.full()) for state in states]
        assert fidelity(*ours) == pytest.approx(qutip.fidelity(*states) ** 2, abs=1e-8)  # theirs is the root
        unitary = qutip.rand_unitary(dimension, seed=seed)
        basis = [(unitary * qutip.basis(dimension, k)).proj() for k in range(dimension)]
        expected = [qutip.expect(operator, states[0]) for operator in basis]
        operators = checked_measurements(np.array([operator.full() for operator in basis]))
        np.testing.assert_allclose(born_probabilities(operators, ours[0]), expected, atol=1e-12)
    bloch = [
        qutip.expect(sigma, qutip.rand_dm(2, seed=5)) for sigma in (qutip.sigmax(), qutip.sigmay(), qutip.sigmaz())
    ]
    np.testing.assert_allclose(bloch_vector(qutip.rand_dm(2, seed=5).full()), bloch, atol=1e-12)


def test_probabilities():
    four = mutually_unbiased_bases(4)
    np.testing.assert_allclose(
        born_probabilities(four, PAIRS[0]), REFERENCE["mub4_born_probs_state0"], atol=1e-10, rtol=0
    )
    sic = symmetric_informationally_complete()
    np.testing.assert_allclose(
        born_probabilities(sic, QUBITS[0])[0], REFERENCE["sic_born_probs_state0"], atol=1e-10, rtol=0
    )
    along = np.array(REFERENCE["sic_bloch"])
    np.testing.assert_allclose(bloch_vector(2.0 * np.asarray(sic[0])), along, atol=1e-10)


@pytest.mark.parametrize("dimension", [2, 3, 4, 5, 7])
def test_bases_that_are_mutually_unbiased(dimension):
    bases = checked_measurements(mutually_unbiased_bases(dimension))
    assert bases.shape == (dimension + 1, dimension, dimension, dimension)
    overlap = jnp.einsum("agij,bhji->abgh", bases, bases).real
    for a in range(dimension + 1):
        np.testing.assert_allclose(overlap[a, a], np.eye(dimension), atol=1e-12)
        for b in range(a):
            np.testing.assert_allclose(overlap[a, b], 1.0 / dimension, atol=1e-12)


def test_other_families():
    assert checked_measurements(standard_separable_bases()).shape == (9, 4, 4, 4)
    assert checked_measurements(separable_bases()).shape == (81, 4, 4, 4)
    assert checked_measurements(symmetric_informationally_complete()).shape == (1, 4, 2, 2)
    corners = symmetric_informationally_complete()[0]
    for a, b in combinations(range(4), 2):
        assert np.trace(corners[a] @ corners[b]).real == pytest.approx(1 / 12)
    product = density_matrix(amplitudes=np.kron([1, 0], [1, 1]))  # up, and along x
    z_and_x = standard_separable_bases()[6]
    np.testing.assert_allclose(born_probabilities(z_and_x, product), [1, 0, 0, 0], atol=1e-12)


def test_bloch_vectors_there_and_back():
    r = np.array([[0.1, -0.5, 0.3], [0.0, 0.0, 1.0]])
    np.testing.assert_allclose(bloch_vector(density_matrix(bloch=r)), r, atol=1e-14)
    along = axis_measurements([[3, 0, 0]])
    np.testing.assert_allclose(born_probabilities(along, density_matrix(bloch=r[0])), [[0.55, 0.45]])


def test_detectors_that_miss_and_click_in_the_dark():
    case = REFERENCE["hs_posterior_noisy"]
    operators = imperfect(
        axis_measurements(case["directions"]),
        dark_rates=case["lambda_d"],
        efficiencies=case["eta"],
        source_rate=case["lambda_s"],
    )
    p = born_probabilities(pauli_bases(), QUBITS[0])[0]
    expected = np.array(case["eta"]) * p + np.array(case["lambda_d"])
    same = imperfect(pauli_bases(), dark_rates=case["lambda_d"], efficiencies=case["eta"])
    np.testing.assert_allclose(born_probabilities(same, QUBITS[0])[0], expected / expected.sum(), rtol=1e-12)
    assert operators.shape == (4, 2, 2, 2)


def weighed_particles():
    """Importance weights of particles by counts along axes, as the reference has them."""
    case = REFERENCE["sis"]
    states = density_matrix(bloch=case["particles_bloch"])
    return case, states


def test_weights_and_information_of_particles():
    case, states = weighed_particles()
    weights = np.full(len(states), 1.0 / len(states))
    for step in case["steps"]:
        setting = axis_measurements(step["direction"])[0]
        p = np.array([born_probabilities(setting, state) for state in states])
        weights = weights * p[:, 0] ** step["n_plus"] * p[:, 1] ** step["n_minus"]
        weights /= weights.sum()
        np.testing.assert_allclose(weights, step["weights"], atol=1e-10)
    mean = np.einsum("s,sij->ij", weights, states)
    np.testing.assert_allclose(bloch_vector(mean), case["mean_bloch"], atol=1e-10)
    from numpyro_ext.design.outcomes.committee import committee_information, entropy, mixture

    settings = axis_measurements(case["query_dirs"])
    log_p = jnp.log(jnp.stack([born_probabilities(settings, state) for state in states]))
    np.testing.assert_allclose(committee_information(log_p, jnp.asarray(weights)), case["BALD_nats"], atol=1e-10)
    np.testing.assert_allclose(entropy(mixture(log_p, jnp.asarray(weights))), case["MES_nats"], atol=1e-10)


@pytest.mark.parametrize("case", REFERENCE["prior_closed_forms"], ids=lambda case: f"D{case['D']}K{case['K']}")
def test_priors(case):
    """Purity and the information of the first query, whose outcomes are Dirichlet(K, ..., K)."""
    dimension, rank = case["D"], case["K"]
    measurements = mutually_unbiased_bases(dimension)
    draws = prior_states(measurements, num_samples=20_000, prior="induced", rank=rank)
    purity = np.einsum("sij,sji->s", draws, draws).real
    assert abs(purity.mean() - case["mean_purity"]) < 5.0 * purity.std() / np.sqrt(20_000) + 1e-12
    expected = np.log(dimension) - digamma(dimension * rank + 1) + digamma(rank + 1)
    assert expected == pytest.approx(case["first_projective_query_U_nats"], abs=1e-12)
    for setting in np.asarray(measurements):
        p = np.einsum("gij,sji->sg", setting, draws).real.clip(1e-300)
        told = np.log(dimension) + np.sum(p * np.log(p), -1)
        assert abs(told.mean() - expected) < 5.0 * told.std() / np.sqrt(20_000)


def prior_states(measurements, num_samples, **prior):
    predictive = Predictive(quantum_tomography, num_samples=num_samples, return_sites=["state"])
    parts = np.asarray(predictive(random.key(0), measurements, **prior)["state"])
    return parts[:, 0] + 1j * parts[:, 1]


@pytest.mark.thorough
def test_bures_states():
    """Of a qubit the squared length of the Bloch vector is Beta(3/2, 1/2); the mean purity is that of closed forms."""
    states = prior_states(pauli_bases(), 20_000, prior="bures")
    squared = np.sum(np.asarray(bloch_vector(states)) ** 2, -1)
    mean, variance = 0.75, 0.75 * 0.25 / 3.0
    assert abs(squared.mean() - mean) < 5.0 * np.sqrt(variance / 20_000)
    assert abs(squared.var() / variance - 1.0) < 0.05
    states = prior_states(mutually_unbiased_bases(3), 20_000, prior="bures")
    purity = np.einsum("sij,sji->s", states, states).real
    # (5 D^2 + 1) / (2 D (D^2 + 2)), Sommers and Zyczkowski 2004
    assert abs(purity.mean() - 46.0 / 66.0) < 5.0 * purity.std() / np.sqrt(20_000)


def test_estimators():
    generator = np.random.default_rng(0)
    state = PAIRS[0]
    settings = standard_separable_bases()
    p = np.asarray(born_probabilities(settings, state))
    exact = p * 1e6
    np.testing.assert_allclose(linear_inversion(settings, exact), state, atol=1e-10)
    np.testing.assert_allclose(maximum_likelihood(settings, exact, num_steps=20_000), state, atol=1e-4)
    counts = np.stack([generator.multinomial(200, row / row.sum()) for row in p])
    found = checked_state(maximum_likelihood(settings, counts))

    def log_likelihood(rho):
        return np.sum(counts * np.log(np.asarray(born_probabilities(settings, rho))))

    # no state beside it is likelier
    for _ in range(20):
        factor = generator.normal(size=(2, 4, 4))
        other = density_matrix(factor=factor[0] + 1j * factor[1])
        assert log_likelihood(0.99 * found + 0.01 * np.asarray(other)) < log_likelihood(found) + 1e-6
    with pytest.raises(ValueError, match="determine 1 of the 3 numbers"):
        linear_inversion(pauli_bases(), [[5, 5], [0, 0], [0, 0]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: checked_measurements(0.9 * pauli_bases()), "setting 0 do not sum to one"),
        (lambda: checked_measurements(jnp.stack([2 * jnp.eye(2), -jnp.eye(2)])), "not positive: eigenvalue -1"),
        (lambda: checked_measurements(np.array([[[0, 1], [0, 0]], [[1, -1], [0, 1]]])), "not Hermitian"),
        (lambda: checked_measurements([[1, 0], [0, 1]]), "shape"),
        (lambda: checked_state([[1.0, 0.0], [0.0, 1.0]]), "trace one; here it is 2"),
        (lambda: checked_state([[1.5, 0.0], [0.0, -0.5]]), "eigenvalue -0.5"),
        (lambda: checked_state([[0.5, 1.0], [0.0, 0.5]]), "differs from its adjoint by 1"),
        (lambda: checked_state([[np.nan, 0.0], [0.0, 0.5]]), "not finite"),
        (lambda: imperfect(pauli_bases(), dark_rates=0.1, source_rate=0), "Without a source"),
        (lambda: density_matrix(bloch=[[0, 0, 1], [0, 1.2, 0]]), "at most one long"),
        (lambda: imperfect(pauli_bases(), dark_rates=-0.1), "not negative"),
        (lambda: imperfect(pauli_bases(), efficiencies=[1, 1.2]), "at most one"),
        (lambda: mutually_unbiased_bases(6), "dimensions 2, 4 and odd primes, not 6"),
        (lambda: axis_measurements([0, 0, 0]), "length zero"),
        (lambda: density_matrix(bloch=[0, 0, 1], amplitudes=[1, 0]), "one of bloch"),
        (lambda: density_matrix(bloch=[0, 1]), "three elements"),
        (lambda: bloch_vector(np.eye(4) / 4), "Qubits"),
        (lambda: fidelity(np.eye(4) / 4, np.eye(2) / 2), "one dimension"),
        (lambda: fidelity(np.eye(2), np.eye(2) / 2), "trace one; that of one of these is 2"),
        (lambda: born_probabilities(np.eye(2) / 2, pauli_bases()), "in this order; these have the shapes"),
        (lambda: maximum_likelihood(pauli_bases(), [[1, 2]]), r"shape \(1, 2\)"),
        (lambda: maximum_likelihood(pauli_bases(), np.zeros((3, 2))), "above zero"),
        (lambda: prior_states(pauli_bases(), 2, prior="uniform"), "prior must be one of"),
        (lambda: prior_states(pauli_bases(), 2, rank=2), "prior='induced' alone"),
        (lambda: prior_states(pauli_bases(), 2, prior="induced", rank=0), "from 1 on"),
        (lambda: prior_states(pauli_bases(), 2, counts=[[1, 2]]), r"shape \(1, 2\)"),
        (lambda: prior_states(pauli_bases(), 2, counts=np.full((3, 2), 0.5)), "must be numbers of shots"),
        (lambda: prior_states(pauli_bases(), 2, counts=np.full((3, 2), -1)), "must be numbers of shots"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_uniform_bloch_vectors():
    """Lengths by SciPy's distribution of Maxwell; smooth at zero and where the series ends; uniform in the ball."""
    normals = np.random.default_rng(0).normal(size=(400, 3)) * np.linspace(1e-3, 3.0, 400)[:, None]
    found = np.asarray(uniform_bloch_vector(normals))
    lengths = np.linalg.norm(normals, axis=-1)
    expected = np.cbrt(maxwell.cdf(lengths))
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), expected, rtol=1e-12)
    np.testing.assert_allclose(found, expected[:, None] * normals / lengths[:, None], rtol=1e-11)
    slope = jax.jacfwd(uniform_bloch_vector)(jnp.zeros(3))
    np.testing.assert_allclose(slope, np.eye(3) * np.cbrt(np.sqrt(2.0 / np.pi) / 3.0), atol=1e-12)
    states = prior_states(pauli_bases(), 20_000, prior="hilbert-schmidt")
    assert kstest(np.linalg.norm(np.asarray(bloch_vector(states)), axis=-1) ** 3, "uniform").pvalue > 1e-3
