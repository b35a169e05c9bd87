"""Vector factors in the clothes of scalar ones: directions in which their sites are independent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from .base import Potential, potential
from .elementwise import TemperedPotential
from .moments import ExpectedLogDensity, TiltedMoments
from .vector import VectorPotential


def row_directions(dimension: int) -> np.ndarray:
    """The rows that one vector factor has: each of its predictors, then each difference of two of them.

    :param int dimension: ``K``, the number of predictors.
    :return: for each of the ``K (K + 1) / 2`` rows the predictor that is added and the one that is subtracted, ``-1``
        for none.
    """
    units = [(k, -1) for k in range(dimension)]
    return np.array(units + [(j, k) for j in range(dimension) for k in range(j + 1, dimension)])


@potential
class VectorRows(Potential):
    r"""Factors of ``K`` predictors, laid out as ``K (K + 1) / 2`` rows each: see :func:`row_directions`.

    The matrices :math:`a_r a_r^T` of the rows :math:`\eta_k` and :math:`\eta_j - \eta_k` are a basis of the symmetric
    matrices. So the covariance of the ``K`` predictors is known from the variances of the rows, and any Gaussian site
    with a :math:`K \times K` precision is a product of scalar sites on the rows. Algorithms that work with one number
    per row treat vector factors unchanged; for softmax all these precisions are non-negative.

    Values stand on the first row of each factor, with zero on the others.

    :param VectorPotential base: the factors.
    """

    base: VectorPotential

    @property
    def is_log_concave(self) -> bool:  # type: ignore[override]
        return self.base.is_log_concave

    @property
    def num_rows(self) -> int:
        """Rows of one factor."""
        return self.base.dimension * (self.base.dimension + 1) // 2

    def log_density(self, eta: ArrayLike) -> Array:
        return self.on_first_row(self.base.log_density(self._predictors(eta)))

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        """Value, slope and curvature of rows: the Hessian is the sum of curvatures times :math:`a_r a_r^T`."""
        value, gradient, hessian = self.base.derivatives(self._predictors(eta))
        return self.on_first_row(value), self._on_units(gradient), self._weights(hessian)

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        """Gaussian expectations from the moments of the rows, which must be those of one joint Gaussian."""
        value, slope, matrix = self.base.expected_log_density(*self.joint_moments(mean, variance))
        return ExpectedLogDensity(self.on_first_row(value), self._on_units(slope), self._weights(matrix))

    def joint_moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[Array, Array]:
        """Means ``(n, K)`` and covariances ``(n, K, K)`` of the predictors, from the moments of the rows."""
        size = self.base.dimension
        rows = jnp.reshape(jnp.asarray(variance), (-1, self.num_rows))
        own = rows[:, :size]
        j, k = np.triu_indices(size, 1)
        cross = 0.5 * (own[:, j] + own[:, k] - rows[:, size:])
        covariance = jnp.zeros((rows.shape[0], size, size), rows.dtype)
        covariance = covariance.at[:, j, k].set(cross).at[:, k, j].set(cross)
        return self._predictors(mean), covariance.at[:, np.arange(size), np.arange(size)].set(own)

    def joint_site(self, precision: Array, shift: Array) -> tuple[Array, Array]:
        """Precisions ``(n, K, K)`` and shifts ``(n, K)`` of the sites that scalar ones on the rows make together."""
        directions = self._directions(precision.dtype)
        rows, shifts = (jnp.reshape(part, (-1, self.num_rows)) for part in (precision, shift))
        return jnp.einsum("nr,ri,rj->nij", rows, directions, directions), shifts @ directions

    def row_sites(self, precision: Array, shift: Array) -> tuple[Array, Array]:
        """Scalar sites on the rows that make these joint ones: the inverse of :meth:`joint_site`."""
        return self._weights(precision), self._on_units(shift)

    def to_rows(self, of_factor: Array) -> Array:
        """Repeat a factor's value for all of its rows."""
        return jnp.repeat(of_factor, self.num_rows)

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        """:raises NotImplementedError: always; those of :attr:`base` belong to all rows of a factor together."""
        raise NotImplementedError("Rows of one factor have no tilted moments of their own: ask the base.")

    def log_normaliser(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> Array:
        cavity = self.joint_moments(mean, variance)
        if isinstance(power, int | float) and power == 1:
            return self.on_first_row(self.base.log_normaliser(*cavity))
        return self.on_first_row(self.base.tilted_moments(*cavity, self.of_factors(power)).log_z)

    def _directions(self, dtype: DTypeLike) -> Array:
        plus, minus = row_directions(self.base.dimension).T
        identity = np.eye(self.base.dimension)
        return jnp.asarray(identity[plus] - np.where(minus[:, None] < 0, 0.0, identity[minus]), dtype)

    def _predictors(self, rows: ArrayLike) -> Array:
        return jnp.reshape(jnp.asarray(rows), (-1, self.num_rows))[:, : self.base.dimension]

    def on_first_row(self, value: Array) -> Array:
        """Put a factor's value on its first row, zero on the others."""
        return jnp.pad(value[:, None], ((0, 0), (0, self.num_rows - 1))).reshape(-1)

    def of_factors(self, of_rows: ArrayLike) -> Array:
        """Numbers of factors, from one for all or those of their rows, which are the same for all rows of a factor."""
        of_rows = jnp.asarray(of_rows)
        return jnp.reshape(of_rows, (-1, self.num_rows))[:, 0] if of_rows.ndim else of_rows

    def _on_units(self, gradient: Array) -> Array:
        return jnp.pad(gradient, ((0, 0), (0, self.num_rows - self.base.dimension))).reshape(-1)

    def _weights(self, matrix: Array) -> Array:
        r"""The numbers :math:`w_r` with :math:`\sum_r w_r a_r a_r^T` equal to a symmetric matrix."""
        j, k = np.triu_indices(self.base.dimension, 1)
        return jnp.concatenate([jnp.sum(matrix, axis=-1), -matrix[:, j, k]], axis=-1).reshape(-1)


def vector_factors(potential: Potential) -> tuple[VectorRows, Array | float | None] | None:
    """The factors of several predictors behind a potential, and the weights of their rows; ``None`` where each factor
    has one predictor.

    :return: the factors, and exponents, ``None`` where all are one: see :meth:`VectorRows.of_factors`.
    """
    if isinstance(potential, VectorRows):
        return potential, None
    if isinstance(potential, TemperedPotential) and isinstance(potential.base, VectorRows):
        return potential.base, potential.weight
    return None


def has_vector_factors(potentials: Iterable[Potential]) -> bool:
    """True if some of these have factors of several predictors."""
    return any(vector_factors(potential) is not None for potential in potentials)


def in_brief(potentials: Iterable[Potential]) -> tuple[Potential, ...] | None:
    """The same factors with tilted moments by quick rules alone, which are nan where these do not serve; ``None`` where
    there are no others. See :meth:`VectorPotential.in_brief`."""
    before = tuple(potentials)
    found = tuple(map(_in_brief, before))
    return found if any(new is not old for new, old in zip(found, before, strict=True)) else None


def _in_brief(factors: Potential) -> Potential:
    if isinstance(factors, VectorRows):
        quick = factors.base.in_brief()
        return factors if quick is factors.base else dataclasses.replace(factors, base=quick)
    if isinstance(factors, TemperedPotential):
        base = _in_brief(factors.base)
        return factors if base is factors.base else dataclasses.replace(factors, base=base)
    return factors
