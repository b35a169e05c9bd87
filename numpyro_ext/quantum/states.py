"""States: density matrices, their Bloch vectors, and how near two of them are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import erf
from jax.typing import ArrayLike

PAULI = np.array([[[0, 1], [1, 0]], [[0, -1j], [1j, 0]], [[1, 0], [0, -1]]])
"""The matrices of Pauli: x, y, z."""
_TOLERANCE = 1e-6
_LEAST_PRECISE = 1e-3
"""Tolerance of single precision: square roots of what rounding leaves of zeros."""
_NEAR_ZERO = 0.3
"""Distance below which a series takes the place of differences."""


def density_matrix(
    *, bloch: ArrayLike | None = None, amplitudes: ArrayLike | None = None, factor: ArrayLike | None = None
) -> Array:
    r"""The density matrix of a state that is told in one of three ways.

    :param bloch: Bloch vectors of qubits, ``(..., 3)``: :math:`\tfrac12 (1 + r \cdot \sigma)`.
    :param amplitudes: of pure states :math:`|\psi\rangle\langle\psi|`, ``(..., D)``, of any length.
    :param factor: matrices :math:`A` of shape ``(..., D, K)``: :math:`A A^\dagger / \operatorname{tr} A A^\dagger`.
        With independent standard complex normal elements the state has the induced measure of dimension :math:`K`
        (Życzkowski and Sommers 2001): Haar for ``K = 1``, Hilbert-Schmidt for ``K = D``.
    :return: complex, ``(..., D, D)``, of trace one.
    :raises TypeError: unless one of the three is given.
    :raises ValueError: for Bloch vectors that are longer than one.

    >>> print(density_matrix(bloch=[0, 0, 1]).real)
    [[1. 0.]
     [0. 0.]]
    """
    given = [value for value in (bloch, amplitudes, factor) if value is not None]
    if len(given) != 1:
        raise TypeError("Give one of bloch=, amplitudes= and factor=.")
    if bloch is not None:
        vector = jnp.asarray(bloch, float)
        if vector.shape[-1:] != (3,):
            raise ValueError(f"Bloch vectors have three elements, and these have the shape {vector.shape}.")
        if is_concrete(bloch) and not isinstance(vector, jax.core.Tracer):
            longest = float(np.max(np.linalg.norm(np.asarray(vector), axis=-1), initial=0.0))
            if longest > 1.0 + _LEAST_PRECISE:
                raise ValueError(f"A Bloch vector is at most one long, and one of these is {longest:.4g}: no state.")
        return 0.5 * (jnp.eye(2) + jnp.einsum("...a,aij->...ij", vector, jnp.asarray(PAULI)))
    found = jnp.asarray(amplitudes)[..., None] if factor is None else jnp.asarray(factor)
    product = found @ jnp.conj(jnp.swapaxes(found, -1, -2))
    trace = jnp.trace(product, axis1=-2, axis2=-1).real
    return product / trace[..., None, None]


def bloch_vector(state: ArrayLike) -> Array:
    r"""The Bloch vector :math:`r_a = \operatorname{tr} \sigma_a \rho` of qubits.

    :param state: density matrices, ``(..., 2, 2)``.
    :return: ``(..., 3)``.
    :raises ValueError: for states that are no qubits.

    >>> print(bloch_vector(density_matrix(amplitudes=[1, 1j])))
    [0. 1. 0.]
    """
    matrix = jnp.asarray(state)
    if matrix.shape[-2:] != (2, 2):
        raise ValueError(f"Qubits are matrices of shape (2, 2), and this one is {matrix.shape[-2:]}.")
    return jnp.einsum("aij,...ji->...a", jnp.asarray(PAULI), matrix).real


def fidelity(state: ArrayLike, other: ArrayLike) -> Array:
    r"""The fidelity :math:`(\operatorname{tr} \sqrt{\sqrt\rho\, \tau \sqrt\rho})^2` (Jozsa 1994), between zero and one.

    It is the squared sum of the singular values of :math:`\sqrt\rho \sqrt\tau`, so no root is taken of a product that
    rounding has made negative; of qubits :math:`\operatorname{tr} \rho\tau + 2 \sqrt{\det\rho \det\tau}`. Where a
    state is of low rank, what rounding leaves of its zeros enters by its square root: 1e-8 in double precision.

    :param state: density matrices, ``(..., D, D)``.
    :param other: the same.
    :return: of the batch shape.
    :raises ValueError: for matrices of other shapes or other traces than one.

    >>> up, right = density_matrix(bloch=[0, 0, 1]), density_matrix(bloch=[1, 0, 0])
    >>> print(fidelity(up, up).round(6), fidelity(up, right).round(6))
    1.0 0.5
    """
    rho, tau = jnp.asarray(state), jnp.asarray(other)
    if rho.shape[-2:] != tau.shape[-2:] or rho.shape[-1] != rho.shape[-2]:
        raise ValueError(f"States of one dimension are compared; these are {rho.shape[-2:]} and {tau.shape[-2:]}.")
    for given in (state, other):
        if is_concrete(given):
            trace = np.trace(np.asarray(given), axis1=-2, axis2=-1).real
            if np.size(trace) and np.abs(trace - 1.0).max() > _LEAST_PRECISE:
                raise ValueError(f"A state has trace one; that of one of these is {np.ravel(trace)[0]:.6g}.")
    if rho.shape[-1] == 2:
        overlap = jnp.einsum("...ij,...ji->...", rho, tau).real
        determinants = [jnp.maximum(_determinant(matrix), 0.0) for matrix in (rho, tau)]
        return overlap + 2.0 * jnp.sqrt(determinants[0] * determinants[1])
    product = _root(rho) @ _root(tau)
    return jnp.square(jnp.sum(jnp.linalg.svd(product, compute_uv=False), axis=-1))


def _determinant(matrix: Array) -> Array:
    return (matrix[..., 0, 0] * matrix[..., 1, 1]).real - jnp.square(jnp.abs(matrix[..., 0, 1]))


def _root(matrix: Array) -> Array:
    values, vectors = jnp.linalg.eigh(matrix)
    return (vectors * jnp.sqrt(jnp.maximum(values, 0.0))[..., None, :]) @ jnp.conj(jnp.swapaxes(vectors, -1, -2))


def haar_unitary(ginibre: ArrayLike) -> Array:
    r"""A unitary matrix from one of independent standard complex normal elements, Haar distributed (Mezzadri 2007).

    :param ginibre: complex, ``(..., D, D)``.
    """
    q, r = jnp.linalg.qr(jnp.asarray(ginibre))
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    return q * (diagonal / jnp.abs(diagonal))[..., None, :]


def uniform_bloch_vector(normals: ArrayLike) -> Array:
    r"""A vector uniform in the unit ball from three standard normal numbers: along them, smooth, and one to one.

    Its length is :math:`F^{1/3}`, where :math:`F` is the distribution function of the length of the normals (that of
    Maxwell). Uniform Bloch vectors are those of the Hilbert-Schmidt measure (Życzkowski and Sommers 2001).

    :param normals: ``(..., 3)``.
    :return: ``(..., 3)``.

    >>> print(uniform_bloch_vector([0.0, 0.0, 9.0]).round(6), uniform_bloch_vector([0.0, 0.0, 0.0]))
    [0. 0. 1.] [0. 0. 0.]
    """
    z = jnp.asarray(normals, float)
    square = 0.5 * jnp.sum(jnp.square(z), axis=-1, keepdims=True)
    # F / a^3 with a^2 = square
    k = np.arange(12)
    series = (-1.0) ** k / (np.cumprod(np.maximum(k, 1.0)) * (2.0 * k + 3.0))
    near = jnp.polyval(jnp.asarray(series[::-1], z.dtype), jnp.minimum(square, _NEAR_ZERO))
    far_square = jnp.maximum(square, _NEAR_ZERO)
    a = jnp.sqrt(far_square)
    far = (0.25 * np.sqrt(np.pi) * erf(a) - 0.5 * a * jnp.exp(-far_square)) / (a * far_square)
    ratio = jnp.where(square < _NEAR_ZERO, near, far) * (4.0 / np.sqrt(np.pi))
    return jnp.cbrt(ratio) * z / np.sqrt(2.0)


def checked_state(state: ArrayLike) -> np.ndarray:
    """A state, if it is one.

    :param state: ``(..., D, D)``.
    :return: a complex array.
    :raises ValueError: if it is not Hermitian, not positive, or its trace is not one; the message says by how much.

    >>> checked_state([[0.5, 0.0], [0.0, 0.5]]).shape
    (2, 2)
    """
    matrix = np.asarray(state)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"A state is a square matrix, and this one has the shape {matrix.shape}.")
    tolerance = _LEAST_PRECISE if matrix.dtype in (np.complex64, np.float32) else _TOLERANCE
    if not np.isfinite(matrix).all():
        raise ValueError("The state holds values that are not finite.")
    gap = float(np.abs(matrix - np.conj(np.swapaxes(matrix, -1, -2))).max())
    if gap > tolerance:
        raise ValueError(f"A state is Hermitian; this matrix differs from its adjoint by {gap:.2g}.")
    least = float(np.linalg.eigvalsh(matrix).min())
    if least < -tolerance:
        raise ValueError(f"A state is positive; this matrix has the eigenvalue {least:.2g}.")
    trace = np.trace(matrix, axis1=-2, axis2=-1).real
    if np.abs(trace - 1.0).max() > tolerance:
        raise ValueError(f"A state has trace one; here it is {np.ravel(trace)[0]:.6g}.")
    return matrix


def is_concrete(value: object) -> bool:
    """True if an array has values, so that it can be checked."""
    return not isinstance(value, jax.core.Tracer)
