"""The state of a quantum system, from counts of outcomes of measurements."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike

from numpyro_ext.quantum import (
    bloch_vector,
    born_probabilities,
    checked_measurements,
    density_matrix,
    haar_unitary,
    imperfect,
    uniform_bloch_vector,
)

__all__ = ["quantum_state", "quantum_tomography"]


def quantum_state(dimension: int, prior: str = "hilbert-schmidt", rank: int | None = None) -> Array:
    r"""A random density matrix, as a part of a model: Gaussian sites, and a state that is deterministic in them.

    A qubit uniform in the Bloch ball (Hilbert-Schmidt) has the site ``normals``, three standard normal numbers that its
    Bloch vector is one to one with. All others have ``amplitudes``, real and imaginary parts of a matrix :math:`A` of
    shape ``(2, D, K)``, and ``rotation`` for Bures; their state is :math:`A A^\dagger / \operatorname{tr} A A^\dagger`.
    Amplitudes are not identified (:math:`A` and :math:`A U` are one state), so look at the deterministic ``state``,
    real and imaginary parts ``(2, D, D)`` of the density matrix, and at ``bloch`` for qubits.

    :param int dimension: :math:`D`.
    :param str prior: ``"haar"``, pure states; ``"hilbert-schmidt"``, uniform in the Bloch ball for a qubit;
        ``"induced"``, by ``rank`` :math:`K`; ``"bures"``, :math:`\rho \propto (I + V) A A^\dagger (I + V^\dagger)` with
        :math:`V` Haar, which favours states near to pure ones.
    :param rank: :math:`K` of the induced measure: lower ones favour pure states.
    :return: the state, complex, ``(D, D)``.
    :raises ValueError: for an unknown prior, or a rank where there is none.
    """
    ranks = {"haar": 1, "hilbert-schmidt": dimension, "bures": dimension, "induced": rank}
    if prior not in ranks:
        raise ValueError(f"prior must be one of {', '.join(map(repr, ranks))}, got {prior!r}.")
    is_number = isinstance(rank, int | np.integer) and rank >= 1
    if (rank is not None) != (prior == "induced") or (rank is not None and not is_number):
        raise ValueError(f"rank= is a number from 1 on, of prior='induced' alone; got prior={prior!r}, rank={rank!r}.")
    if dimension == 2 and prior == "hilbert-schmidt":
        normals = numpyro.sample("normals", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        bloch = numpyro.deterministic("bloch", uniform_bloch_vector(normals))
        state = density_matrix(bloch=bloch)
        numpyro.deterministic("state", jnp.stack([state.real, state.imag]))
        return state
    parts = numpyro.sample("amplitudes", dist.Normal(0.0, 1.0).expand([2, dimension, ranks[prior]]).to_event(3))
    factor = parts[0] + 1j * parts[1]
    if prior == "bures":
        turn = numpyro.sample("rotation", dist.Normal(0.0, 1.0).expand([2, dimension, dimension]).to_event(3))
        factor = factor + haar_unitary(turn[0] + 1j * turn[1]) @ factor
    state = density_matrix(factor=factor)
    numpyro.deterministic("state", jnp.stack([state.real, state.imag]))
    if dimension == 2:
        numpyro.deterministic("bloch", bloch_vector(state))
    return state


def quantum_tomography(
    measurements: ArrayLike,
    counts: ArrayLike | None = None,
    *,
    prior: str = "hilbert-schmidt",
    rank: int | None = None,
    dark_rates: ArrayLike = 0.0,
    efficiencies: ArrayLike = 1.0,
    source_rate: ArrayLike = 1.0,
) -> None:
    r"""Tomography of a quantum state (Houlsby 2014, chapter 4): ``counts`` of the outcomes of each setting.

    Sites: those of :func:`quantum_state`, and ``counts`` given :math:`\operatorname{tr} M_\gamma \rho`. Without counts
    there is ``shot`` in their place, the outcome of one further shot of each setting: the candidates of an adaptive
    experiment. Detectors may be imperfect (:func:`~numpyro_ext.quantum.imperfect`), then and in the counts alike.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_ext.design import expected_information_gain
        >>> from numpyro_ext.infer import SMC
        >>> from numpyro_ext.models import quantum_tomography
        >>> from numpyro_ext.quantum import pauli_bases
        >>> smc = SMC(quantum_tomography, watch="state", progress_bar=False)
        >>> smc.run(random.key(0), pauli_bases(), jnp.array([[5, 5], [12, 3], [0, 0]]))
        >>> gain = expected_information_gain(smc, pauli_bases())["shot"]
        >>> print(gain.argmax(), smc.get_samples()["bloch"].shape)
        2 (1000, 3)

    :param measurements: operators of the outcomes of each setting, ``(settings, outcomes, D, D)``.
    :param counts: how often each came, integers ``(settings, outcomes)``.
    :param str prior: of the state, as for :func:`quantum_state`.
    :param rank: of the induced prior.
    :param dark_rates: of the detectors.
    :param efficiencies: of the detectors.
    :param source_rate: of the photons.
    :raises ValueError: for operators that are no measurement, counts of another shape, and rates outside their range.
    """
    operators = checked_measurements(measurements)
    if operators.ndim != 4:
        raise ValueError(f"Measurements have the shape (settings, outcomes, D, D), and these have {operators.shape}.")
    state = quantum_state(operators.shape[-1], prior, rank)
    clicks = imperfect(operators, dark_rates=dark_rates, efficiencies=efficiencies, source_rate=source_rate)
    probabilities = born_probabilities(clicks, state)
    with numpyro.plate("settings", operators.shape[0]):
        if counts is None:
            numpyro.sample("shot", dist.Categorical(probs=probabilities))
            return
        seen = jnp.asarray(counts)
        if seen.shape != operators.shape[:2]:
            outcomes = operators.shape[:2]
            raise ValueError(f"The counts have the shape {seen.shape}; these settings have outcomes {outcomes}.")
        if not isinstance(counts, jax.core.Tracer) and np.any((np.asarray(counts) < 0) | (np.asarray(counts) % 1 != 0)):
            raise ValueError("The counts must be numbers of shots, 0, 1, 2 and so on: frequencies have no likelihood.")
        numpyro.sample("counts", dist.Multinomial(total_count=jnp.sum(seen, -1), probs=probabilities), obs=seen)
