r"""The expected log factor of one cell of a bilinear form, as a function of the vector of one side.

Given the other side, a cell is a function of the product of ``u`` with the vector :math:`w = M v + \alpha`, its
partner. Poisson counts with the rate :math:`e^\eta` have closed forms: terms linear in ``v`` alone tilt its mean to
:math:`b + B \beta`, and what is left is an exponential product. The other families that are here are integrated over
the distribution of their predictor, with no more than rounding and quadrature between them and the exact expectation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ....linalg.short_axes import as_matrices, diagonals, reduce_short
from ....potentials.base import Potential
from ....potentials.families.poisson import PoissonExpPotential
from ....potentials.integrals.products.bilinear_expectation import (
    ProductPredictor,
    expected_bilinear_log_density,
    expected_bilinear_value,
)
from ....potentials.integrals.products.exponential_product import (
    ProductExpectation,
    diagonal_product_expectation,
    product_expectation,
)


class Block(NamedTuple):
    """Independent Gaussian vectors of one side."""

    mean: Array
    """Shape ``(num, size)``."""
    covariance: Array | None
    """Shape ``(num, size, size)``, or ``(num, size)`` where the components are independent, or ``None`` for points."""

    @property
    def is_diagonal(self) -> bool:
        """True if components are independent, as those of points are."""
        return self.covariance is None or self.covariance.ndim == 2

    @property
    def variance(self) -> Array:
        """Variance of each component, shape ``(num, size)``; zero for points."""
        return jnp.zeros_like(self.mean) if self.covariance is None else diagonals(self.covariance)

    @property
    def matrices(self) -> Array:
        """Covariance of each vector, shape ``(num, size, size)``; zero for points."""
        return as_matrices(jnp.zeros_like(self.mean) if self.covariance is None else self.covariance)


class Coefficients(NamedTuple):
    """Coefficients of the product and of the linear terms, as one side sees them; ``None`` for what there is not."""

    pairs: Array | None
    """Coefficients of the products of the first components, ``(..., k)``."""
    matrix: Array | None
    """Coefficients of all products of components, ``(..., size, other_size)``."""
    own_linear: Array | None
    other_linear: Array | None


class Partner(NamedTuple):
    """The vector that multiplies ``u`` in a cell, and scalars beside the product."""

    shift: Array
    """Shift of the log expectation of the exponential of the predictor, ``(n,)``."""
    mean_shift: Array
    """Shift of the mean of the predictor, ``(n,)``."""
    mean: Array
    """Shape ``(n, size)``."""
    tilted: Array
    """Mean under the tilt of the linear terms."""
    root: Array | None
    """Root of the covariance, ``(n, size, r)``, or ``(n, size)`` where that is diagonal; ``None`` for a point."""
    linear: Array | None
    """The linear terms as multiples of the columns of the root, ``(n, r)``; ``None`` where there are none."""
    variance: Array | None
    """Variance of what else is in the linear terms, ``(n,)``."""


def diagonal_partner(
    coefficients: Coefficients, size: int, mean: Array, variance: Array | None, root: Array | None = None
) -> Partner:
    """The partners of vectors with independent components, if products are of single components.

    :param Coefficients coefficients: of the cells, or shared by all vectors.
    :param int size: of the vectors that the partners multiply.
    :param mean: of the vectors, shape ``(n, other_size)``.
    :param variance: of their components; ``None`` for points.
    :param root: not used.
    """
    pairs, _, own_linear, other_linear = coefficients
    assert pairs is not None
    k = pairs.shape[-1]
    tilted, shift, mean_shift = mean, jnp.zeros(mean.shape[:1], mean.dtype), jnp.zeros(mean.shape[:1], mean.dtype)
    deviation = None if variance is None else jnp.sqrt(variance)
    linear, rest = None, None
    if other_linear is not None:
        mean_shift = shift = jnp.sum(other_linear * mean, -1)
        if variance is not None and deviation is not None:
            shift = mean_shift + 0.5 * jnp.sum(other_linear**2 * variance, -1)
            tilted = mean + variance * other_linear
            weights = other_linear * deviation
            linear = jnp.pad(weights[:, :k], [(0, 0), (0, size - k)])
            rest = jnp.sum(weights[:, k:] ** 2, -1)

    def push(x: Array, linear: Array | None) -> Array:
        own = jnp.pad(pairs * x[:, :k], [(0, 0), (0, size - k)])
        return own if linear is None else own + linear

    root = None if deviation is None else push(deviation, None)
    return Partner(shift, mean_shift, push(mean, own_linear), push(tilted, own_linear), root, linear, rest)


def full_partner(
    coefficients: Coefficients, size: int, mean: Array, covariance: Array | None, root: Array | None = None
) -> Partner:
    """The partners of vectors with any covariance; arguments as for :func:`diagonal_partner`.

    :param root: lower triangular root of the covariance.
    """
    pairs, matrix, own_linear, other_linear = coefficients
    tilted, shift, mean_shift = mean, jnp.zeros(mean.shape[:1], mean.dtype), jnp.zeros(mean.shape[:1], mean.dtype)
    # A root is lower triangular: that of the paired components is its upper left corner.
    k = mean.shape[-1] if pairs is None else pairs.shape[-1]
    linear, rest = None, None
    if other_linear is not None:
        mean_shift = shift = jnp.sum(other_linear * mean, -1)
        if covariance is not None:
            pushed = (covariance @ jnp.broadcast_to(other_linear, mean.shape)[..., None])[..., 0]
            shift = mean_shift + 0.5 * jnp.sum(other_linear * pushed, -1)
            tilted = mean + pushed
        if root is not None:
            weights = jnp.sum(root * jnp.broadcast_to(other_linear, mean.shape)[..., None], axis=-2)
            linear, rest = weights[:, :k], jnp.sum(weights[:, k:] ** 2, -1)

    def push(x: Array) -> Array:
        """Each column of ``(n, other_size, r)`` as the side sees it."""
        if pairs is None:
            assert matrix is not None
            return matrix @ x
        return jnp.pad(pairs[:, :, None] * x[:, :k], [(0, 0), (0, size - k), (0, 0)])

    def push_mean(x: Array) -> Array:
        own = push(x[..., None])[..., 0]
        return own if own_linear is None else own + own_linear

    own_root = None if root is None else push(root[:, :, :k])
    return Partner(shift, mean_shift, push_mean(mean), push_mean(tilted), own_root, linear, rest)


class Pairing(NamedTuple):
    """The distributions of the two vectors that cells touch."""

    mean: Array
    """Mean of ``u``, shape ``(n, size)``."""
    covariance: Array | None
    """Shape ``(n, size, size)``, or variances ``(n, size)`` where everything is diagonal."""
    partner: Partner
    is_diagonal: bool

    def exponential_product(self) -> ProductExpectation:
        """The same as :func:`product_expectation`, without factorisations where one side is a point."""
        mean, covariance, other, root = self.mean, self.covariance, self.partner.tilted, self.partner.root
        if self.is_diagonal:
            zeros = jnp.zeros_like(mean)
            variance = zeros if root is None else root**2
            return diagonal_product_expectation(mean, zeros if covariance is None else covariance, other, variance)
        if covariance is not None and root is not None:
            return product_expectation(mean, covariance, other, root)
        value = jnp.sum(mean * other, -1)
        if root is not None:
            white = jnp.einsum("cir,ci->cr", root, mean)
            spread = root @ root.swapaxes(-1, -2)
            value += 0.5 * jnp.sum(white**2, -1)
            return ProductExpectation(value, other + jnp.einsum("cir,cr->ci", root, white), spread)
        if covariance is not None:
            value += 0.5 * jnp.einsum("ci,cij,cj->c", other, covariance, other)
        return ProductExpectation(value, other, jnp.zeros((*mean.shape, mean.shape[-1]), mean.dtype))

    def predictor(self, offset: Array) -> ProductPredictor:
        """The distribution of the predictors."""
        partner = self.partner
        constant = offset + partner.mean_shift
        return ProductPredictor(
            constant, self.mean, self.covariance, partner.mean, partner.root, partner.linear, partner.variance
        )


class CellTerms(NamedTuple):
    """Expectations of the weighted log factors, with their slopes."""

    value: Array
    """Expectation, shape ``(n,)``."""
    slope: Array
    """With respect to the mean of ``u``, shape ``(n, size)``."""
    precision: Array
    """Minus twice the slope with respect to its covariance, ``(n, size, size)``, or the diagonal of that."""


class PoissonCounts(NamedTuple):
    r"""Poisson counts with a rate proportional to :math:`e^\eta`; arrays of shape ``(n,)``."""

    counts: Array
    log_scale: Array
    """Log exposure less log count (less zero, for a count of zero)."""
    constant: Array

    def expectations(
        self, offset: Array, weight: Array, pairing: Pairing, found: ProductExpectation
    ) -> tuple[Array, Array]:
        """Weighted expected log factors and rates, zero where there is no factor."""
        partner, counts = pairing.partner, self.counts
        log_ratio = offset + partner.mean_shift + reduce_short(jnp.add, pairing.mean * partner.mean) + self.log_scale
        growth = jnp.expm1(offset + partner.shift + found.log_value + self.log_scale)
        is_zero, is_used = counts <= 0.0, weight > 0.0
        safe = jnp.where(is_zero, 1.0, counts)
        excess = jnp.where(is_zero, growth + 1.0, safe * growth)
        value = weight * (counts * log_ratio - excess + self.constant)
        rate = weight * safe * (growth + 1.0)
        return jnp.where(is_used, value, 0.0), jnp.where(is_used, rate, 0.0)


class Factors(NamedTuple):
    """The log factors of cells: of one of two kinds, the other is ``None``."""

    poisson: PoissonCounts | None
    potential: Potential | None
    """Any other, with a leading axis for the cells in its arrays."""

    @classmethod
    def of(cls, potential: Potential, dtype: jnp.dtype) -> Factors:
        """Factors of a potential."""
        if not isinstance(potential, PoissonExpPotential):
            return cls(None, potential)
        count = jnp.asarray(potential.count, dtype)
        safe = jnp.where(count > 0.0, count, 1.0)
        log_scale = jnp.broadcast_to(jnp.log(potential.exposure) - jnp.log(safe), count.shape)
        # The log probability of a count at its own rate: what is then left of the factor does not cancel.
        constant = PoissonExpPotential(count).log_density(jnp.log(safe)) + jnp.where(count > 0.0, 0.0, 1.0)
        return cls(PoissonCounts(count, log_scale, constant), None)

    def values(self, offset: Array, weight: Array, pairing: Pairing) -> Array:
        """Weighted expectations, shape ``(n,)``; minus infinity where there is none."""
        if self.poisson is not None:
            return self.poisson.expectations(offset, weight, pairing, pairing.exponential_product())[0]
        assert self.potential is not None
        return weight * expected_bilinear_value(self.potential, pairing.predictor(offset))

    def terms(self, offset: Array, weight: Array, pairing: Pairing, *, with_matrix: bool) -> CellTerms:
        """Weighted expectations with their slopes.

        :param bool with_matrix: whether more than the diagonal of the precision is wanted.
        """
        if self.poisson is not None:
            expectation = pairing.exponential_product()
            value, rate = self.poisson.expectations(offset, weight, pairing, expectation)
            mean, spread = expectation.mean, expectation.covariance
            slope = (weight * self.poisson.counts)[:, None] * pairing.partner.mean - rate[:, None] * mean
            if with_matrix:
                spread = as_matrices(spread)
                return CellTerms(value, slope, rate[:, None, None] * (spread + mean[:, :, None] * mean[:, None, :]))
            return CellTerms(value, slope, rate[:, None] * (mean**2 + diagonals(spread)))
        assert self.potential is not None
        predictor = pairing.predictor(offset)
        found = expected_bilinear_log_density(self.potential, predictor)
        precision = found.precision if with_matrix else diagonals(found.precision)
        if with_matrix and predictor.is_certain:
            # Points have no covariance that would say whether components are apart.
            other = predictor.partner
            second = self.potential.derivatives(predictor.constant + jnp.sum(predictor.mean * other, -1))[2]
            precision = -second[:, None, None] * other[:, :, None] * other[:, None, :]
        scale = weight.reshape(-1, *(1,) * (precision.ndim - 1))
        return CellTerms(weight * found.value, weight[:, None] * found.slope, scale * precision)
