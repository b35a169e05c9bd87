"""Measurements: families of bases and other settings, the probabilities of their outcomes, imperfect detectors."""

from __future__ import annotations

from functools import reduce
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .states import PAULI, is_concrete

_TOLERANCE = 1e-5
_TWO_QUBIT_GROUPS = (("ZI", "IZ"), ("XI", "IX"), ("YI", "IY"), ("XY", "YZ"), ("YX", "ZY"))
"""Pairs of commuting operators whose joint eigenbases are mutually unbiased."""
_NAMED = dict(zip("IXYZ", [np.eye(2), *PAULI], strict=True))


def born_probabilities(measurements: ArrayLike, state: ArrayLike) -> Array:
    r"""Probabilities of the outcomes, :math:`\operatorname{tr} M_\gamma \rho` over their sum.

    The sum is one for measurements; of what :func:`imperfect` makes of them it is the rate of the clicks.

    :param measurements: ``(..., outcomes, D, D)``; all settings at once, or some of them.
    :param state: one density matrix, ``(D, D)``.
    :return: ``(..., outcomes)``, positive.
    :raises ValueError: for other shapes, as of swapped arguments.

    >>> from numpyro_ext.quantum import density_matrix, pauli_bases
    >>> print(born_probabilities(pauli_bases(), density_matrix(bloch=[0, 0, 0.5])).round(2))
    [[0.5  0.5 ]
     [0.5  0.5 ]
     [0.75 0.25]]
    """
    operators, rho = jnp.asarray(measurements), jnp.asarray(state)
    if rho.ndim != 2 or operators.ndim < 3 or operators.shape[-2:] != rho.shape:
        raise ValueError(
            "born_probabilities(measurements, state) takes operators of shape (..., outcomes, D, D) and one density "
            f"matrix (D, D), in this order; these have the shapes {operators.shape} and {rho.shape}."
        )
    # of Hermitian matrices, as one real product: complex ones of small matrices are slow
    size = operators.shape[-1] ** 2
    flat = operators.reshape(*operators.shape[:-2], size)
    found = jnp.concatenate([flat.real, flat.imag], -1) @ jnp.concatenate([rho.real.ravel(), rho.imag.ravel()])
    found = jnp.maximum(found, jnp.finfo(found.dtype).tiny)  # rounding of zeros
    return found / jnp.sum(found, axis=-1, keepdims=True)


def imperfect(
    measurements: ArrayLike,
    *,
    dark_rates: ArrayLike = 0.0,
    efficiencies: ArrayLike = 1.0,
    source_rate: ArrayLike = 1.0,
) -> Array:
    r"""Measurements by detectors that miss and that click in the dark (Houlsby 2014, eqs. 4.8 and 4.9 together).

    Photons arrive as a Poisson process, detector :math:`\gamma` sees a share :math:`\eta_\gamma` of those of its
    outcome, and clicks by itself at the rate :math:`\lambda_\gamma`, so that a click is of :math:`\gamma` with
    probability proportional to :math:`\lambda_s \eta_\gamma \operatorname{tr} M_\gamma \rho + \lambda_\gamma`. As
    states have trace one this is linear: :math:`\lambda_s \eta_\gamma M_\gamma + \lambda_\gamma I`, which
    :func:`born_probabilities` normalises. Only ratios of the rates matter.

    :param measurements: ``(..., outcomes, D, D)``.
    :param dark_rates: of each detector, for all settings ``(outcomes,)`` or each of them ``(..., outcomes)``.
    :param efficiencies: the same, between zero and one.
    :param source_rate: of the photons.
    :return: operators of the shape of the measurements.
    :raises ValueError: for rates and efficiencies outside their range, and a dark rate without a source.

    >>> from numpyro_ext.quantum import density_matrix, pauli_bases
    >>> up = density_matrix(bloch=[0, 0, 1])
    >>> print(born_probabilities(imperfect(pauli_bases(), dark_rates=[0.0, 0.25]), up)[2])
    [0.8 0.2]
    """
    # as given: arrays that are made while a model is traced have no values
    if all(is_concrete(value) for value in (dark_rates, efficiencies, source_rate)):
        if not np.all(np.asarray(dark_rates) >= 0.0):
            raise ValueError(f"Dark rates are not negative, got {dark_rates}.")
        if not np.all((np.asarray(efficiencies) > 0.0) & (np.asarray(efficiencies) <= 1.0)):
            raise ValueError(f"Efficiencies are above zero and at most one, got {efficiencies}.")
        if not np.all(np.asarray(source_rate) > 0.0):
            raise ValueError(f"Without a source ({source_rate=}) all clicks are dark, and tell nothing: give its rate.")
    operators = jnp.asarray(measurements)
    dark, kept, source = (jnp.asarray(value, float) for value in (dark_rates, efficiencies, source_rate))
    identity = jnp.eye(operators.shape[-1])
    return (source * kept)[..., None, None] * operators + dark[..., None, None] * identity


def checked_measurements(measurements: ArrayLike) -> Array:
    """Settings of a measurement, if they are such: positive operators that sum to one.

    :param measurements: ``(..., outcomes, D, D)``.
    :return: a complex array; one without values (inside a traced function) is not checked.
    :raises ValueError: if they are not; the message says which setting.

    >>> checked_measurements(symmetric_informationally_complete()).shape
    (1, 4, 2, 2)
    """
    if not is_concrete(measurements):
        return jnp.asarray(measurements)
    operators = np.asarray(measurements)
    if operators.ndim < 3 or operators.shape[-1] != operators.shape[-2]:
        raise ValueError(f"Measurements have the shape (..., outcomes, D, D), and these have {operators.shape}.")
    if not np.isfinite(operators).all():
        raise ValueError("The measurements hold values that are not finite.")
    flat = operators.reshape(-1, *operators.shape[-3:])
    hermitian = np.abs(flat - np.conj(np.swapaxes(flat, -1, -2))).max((1, 2, 3))
    least = np.linalg.eigvalsh(flat).min((1, 2))
    total = np.abs(flat.sum(1) - np.eye(flat.shape[-1])).max((1, 2))
    for number in range(len(flat)):
        if hermitian[number] > _TOLERANCE:
            raise ValueError(f"An operator of setting {number} is not Hermitian (by {hermitian[number]:.2g}).")
        if least[number] < -_TOLERANCE:
            raise ValueError(f"An operator of setting {number} is not positive: eigenvalue {least[number]:.2g}.")
        if total[number] > _TOLERANCE:
            raise ValueError(
                f"The operators of setting {number} do not sum to one (by {total[number]:.2g}): an outcome is missing, "
                "or the elements are those of vectors and not of projectors."
            )
    return jnp.asarray(operators)


def axis_measurements(axes: ArrayLike) -> Array:
    r"""Projections of a qubit along axes: outcomes with the operators :math:`\tfrac12 (1 \pm n \cdot \sigma)`.

    :param axes: ``(settings, 3)``, of any length.
    :return: ``(settings, 2, 2, 2)``.
    :raises ValueError: for an axis of length zero.
    """
    vectors = jnp.atleast_2d(jnp.asarray(axes, float))
    length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    if is_concrete(length) and not bool(jnp.all(length > 0.0)):
        raise ValueError("An axis has the length zero.")
    return _projections(vectors, length)


@jax.jit
def _projections(vectors: Array, length: Array) -> Array:
    along = jnp.einsum("sa,aij->sij", vectors / length, jnp.asarray(PAULI))
    return 0.5 * (jnp.eye(2) + jnp.stack([along, -along], axis=1))


def pauli_bases() -> Array:
    """The three projections of a qubit along x, y and z, which are mutually unbiased: ``(3, 2, 2, 2)``."""
    return axis_measurements(np.eye(3))


def _joint_eigenbasis(generators: tuple[str, ...]) -> np.ndarray:
    """Projectors on the joint eigenspaces of commuting products of Pauli matrices; signs (+,+), (+,-), (-,+), (-,-)."""
    matrices = [reduce(np.kron, (_NAMED[letter] for letter in word)) for word in generators]
    identity = np.eye(len(matrices[0]))
    signs = product((1, -1), repeat=len(generators))
    return np.stack(
        [reduce(np.matmul, (0.5 * (identity + s * m) for s, m in zip(g, matrices, strict=True))) for g in signs]
    )


def mutually_unbiased_bases(dimension: int) -> Array:
    r"""A complete set of bases of which each tells nothing about the outcomes of another (Wootters and Fields 1989).

    Projectors of different bases have :math:`\operatorname{tr} P Q = 1 / D`. Of two qubits the first three bases are
    products and the other two entangled.

    :param int dimension: :math:`D`: 2, 4 or an odd prime.
    :return: ``(D + 1, D, D, D)``.
    :raises ValueError: for other dimensions.

    >>> mutually_unbiased_bases(3).shape
    (4, 3, 3, 3)
    """
    if dimension == 2:
        return pauli_bases()
    if dimension == 4:
        return jnp.asarray(np.stack([_joint_eigenbasis(group) for group in _TWO_QUBIT_GROUPS]))
    if dimension < 2 or any(dimension % k == 0 for k in range(2, int(dimension**0.5) + 1)):
        raise ValueError(f"Mutually unbiased bases are made here for dimensions 2, 4 and odd primes, not {dimension}.")
    n = np.arange(dimension)
    bases = [np.eye(dimension, dtype=complex)]
    for k in range(dimension):
        phase = n[None, :] * n[:, None] + k * n[None, :] ** 2  # vectors in rows
        bases.append(np.exp(2j * np.pi * phase / dimension) / np.sqrt(dimension))
    vectors = np.stack(bases)
    return jnp.asarray(np.einsum("bvi,bvj->bvij", vectors, vectors.conj()))


def _products(settings: ArrayLike, num_parts: int) -> Array:
    """All products of local settings, ``(settings ** parts, outcomes ** parts, D, D)``."""
    local = np.asarray(settings)
    found = []
    for chosen in product(range(len(local)), repeat=num_parts):
        outcomes = product(range(local.shape[1]), repeat=num_parts)
        found.append([reduce(np.kron, (local[s, o] for s, o in zip(chosen, signs, strict=True))) for signs in outcomes])
    return jnp.asarray(np.array(found))


def standard_separable_bases(num_qubits: int = 2) -> Array:
    """Products of Pauli bases, ``(3 ** n, 2 ** n, 2 ** n, 2 ** n)``: standard separable tomography.

    :param int num_qubits: :math:`n`.
    """
    return _products(pauli_bases(), num_qubits)


def separable_bases(num_qubits: int = 2) -> Array:
    """Products of projections along nine axes of each qubit: the coordinates and their bisectors, 81 for two qubits.

    :param int num_qubits: :math:`n`.
    :return: ``(9 ** n, 2 ** n, 2 ** n, 2 ** n)``.
    """
    unit = np.eye(3)
    bisectors = [unit[i] + sign * unit[j] for i in range(3) for j in range(i + 1, 3) for sign in (1, -1)]
    return _products(axis_measurements(np.concatenate([unit, np.stack(bisectors)])), num_qubits)


def symmetric_informationally_complete() -> Array:
    """The measurement of a qubit with four outcomes along the corners of a tetrahedron, one of them z.

    :return: ``(1, 4, 2, 2)``.
    """
    root = np.sqrt(2.0)
    corners = np.array([[0, 0, 3], [2 * root, 0, -1], [-root, np.sqrt(6.0), -1], [-root, -np.sqrt(6.0), -1]]) / 3.0
    along = np.einsum("sa,aij->sij", corners, PAULI)
    return jnp.asarray(0.25 * (np.eye(2) + along))[None]
