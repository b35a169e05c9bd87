"""Point estimates of a state from counts: what tomography did before it asked for a posterior."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ..compilation.pytree import PyTree
from .measurements import born_probabilities, checked_measurements

_SMALLEST = 1e-30


def _checked(measurements: ArrayLike, counts: ArrayLike) -> tuple[Array, Array]:
    operators, seen = jnp.asarray(measurements), jnp.asarray(counts, float)
    if seen.shape != operators.shape[:-2]:
        raise ValueError(
            f"The counts have the shape {seen.shape}; these measurements have outcomes of shape {operators.shape[:-2]}."
        )
    if not bool(jnp.all(seen >= 0.0) & (jnp.sum(seen) > 0.0)):
        raise ValueError("Counts are not negative, and some are above zero.")
    return operators, seen


def linear_inversion(measurements: ArrayLike, counts: ArrayLike) -> Array:
    """The Hermitian matrix of trace one whose probabilities are nearest to the frequencies, by weighted least squares.

    It may have negative eigenvalues: then it is no state, and :func:`maximum_likelihood` should be taken.

    :param measurements: ``(settings, outcomes, D, D)``.
    :param counts: ``(settings, outcomes)``; settings without counts do not enter.
    :return: ``(D, D)``.
    :raises ValueError: for counts of another shape, or settings that do not determine the state.

    >>> from numpyro_ext.quantum import bloch_vector, pauli_bases
    >>> print(bloch_vector(linear_inversion(pauli_bases(), [[5, 5], [6, 4], [9, 1]])).round(2))
    [0.  0.2 0.8]
    """
    operators, seen = _checked(measurements, counts)
    total = np.asarray(seen.sum(-1))
    used = total > 0
    dimension = operators.shape[-1]
    basis = _hermitian_basis(dimension)
    rows = np.einsum("sgij,kji->sgk", np.asarray(operators)[used], basis).real
    frequencies = np.asarray(seen)[used] / total[used, None]
    weights = np.sqrt(total[used])[:, None]
    design = (rows * weights[..., None]).reshape(-1, len(basis))
    # the first element of the basis carries the trace
    target = (weights * (frequencies - rows[..., 0] / np.sqrt(dimension))).reshape(-1)
    found, _, rank, _ = np.linalg.lstsq(design[:, 1:], target, rcond=None)
    if rank < len(basis) - 1:
        raise ValueError(
            f"The settings with counts determine {rank} of the {len(basis) - 1} numbers of a state of dimension "
            f"{dimension}: measure more of them."
        )
    coefficients = np.concatenate([[1.0 / np.sqrt(dimension)], found])
    return jnp.asarray(np.einsum("k,kij->ij", coefficients, basis))


def _hermitian_basis(dimension: int) -> np.ndarray:
    """Orthonormal Hermitian matrices, the multiple of the identity first."""
    found = [np.eye(dimension, dtype=complex) / np.sqrt(dimension)]
    for i in range(dimension):
        for j in range(i + 1, dimension):
            real, imaginary = np.zeros((2, dimension, dimension), complex)
            real[i, j] = real[j, i] = np.sqrt(0.5)
            imaginary[i, j], imaginary[j, i] = -1j * np.sqrt(0.5), 1j * np.sqrt(0.5)
            found += [real, imaginary]
    for k in range(1, dimension):
        diagonal = np.zeros(dimension)
        diagonal[:k], diagonal[k] = 1.0, -k
        found.append(np.diag(diagonal / np.sqrt(k * (k + 1.0))).astype(complex))
    return np.stack(found)


def maximum_likelihood(
    measurements: ArrayLike, counts: ArrayLike, *, num_steps: int = 2000, tol: float = 1e-9
) -> Array:
    r"""The state of largest likelihood, by the diluted iteration of Řeháček, Hradil, Knill and Lvovsky (2007).

    :math:`\rho \leftarrow (I + \epsilon R) \rho (I + \epsilon R)`, normalised, where :math:`R = \sum n_\gamma
    M_\gamma / p_\gamma / n`; the step is halved where it does not raise the likelihood, so that it always does. The
    likelihood is concave, so this is the maximum.

    :param measurements: ``(settings, outcomes, D, D)``.
    :param counts: ``(settings, outcomes)``.
    :param int num_steps: at most.
    :param float tol: change of the state at which to stop.
    :return: ``(D, D)``.
    :raises ValueError: for counts of another shape, and operators that do not sum to one: of imperfect detectors take
        the posterior.

    >>> from numpyro_ext.quantum import bloch_vector, pauli_bases
    >>> print(bloch_vector(maximum_likelihood(pauli_bases(), [[5, 5], [6, 4], [9, 1]])).round(2))
    [0.  0.2 0.8]
    """
    operators, seen = _checked(checked_measurements(measurements), counts)
    total, identity = jnp.sum(seen), jnp.eye(operators.shape[-1])
    start = (identity / operators.shape[-1]).astype(jnp.result_type(operators, complex))

    def log_likelihood(state: Array) -> Array:
        p = born_probabilities(operators, state)
        return jnp.sum(jnp.where(seen > 0.0, seen * jnp.log(jnp.maximum(p, _SMALLEST)), 0.0))

    def goes_on(carry: Any) -> Any:
        count, _, _, change, _ = carry
        return (count < num_steps) & (change > tol)

    def advance(carry: PyTree) -> PyTree:
        count, state, epsilon, _, level = carry
        p = jnp.maximum(born_probabilities(operators, state), _SMALLEST)
        r = jnp.einsum("sg,sgij->ij", jnp.where(seen > 0.0, seen / p, 0.0), operators) / total
        step = identity + epsilon * r
        new = step @ state @ jnp.conj(step.T)
        new = new / jnp.trace(new).real
        above = log_likelihood(new)
        is_up = above >= level
        change = jnp.where(is_up, jnp.max(jnp.abs(new - state)), 1.0)
        return (
            count + 1,
            jnp.where(is_up, new, state),
            jnp.where(is_up, 2.0 * epsilon, 0.25 * epsilon),
            jnp.where(epsilon < 1e-12, 0.0, change),
            jnp.where(is_up, above, level),
        )

    first = (jnp.zeros((), int), start, jnp.asarray(1.0), jnp.asarray(jnp.inf), log_likelihood(start))
    return lax.while_loop(goes_on, advance, first)[1]
