"""The form of bilinear models: predictors affine in each of two Gaussian blocks when the other is held,
and zeros in pairs of a row and a column that are not listed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import gammaln, xlogy

from ...linalg.cholesky import cholesky, solve_lower
from ...linalg.short_axes import as_matrices, diagonals
from ...potentials.base import Potential

_LOG_2PI = math.log(2.0 * math.pi)


class GaussianSide(NamedTuple):
    """The prior of one block: independent Gaussian vectors, one per row (or per column)."""

    mean: Array
    """Shape ``(num, size)``."""
    precision: Array
    """Shape ``(num, size)`` if all components are independent, else ``(num, size, size)``."""
    weight: Array | None = None
    """Shape ``(num,)``: zero for vectors that only fill up an array, else one; ``None`` where all are used."""

    def log_density(self, x: Array) -> Array:
        """Log density of each vector of ``x``, shape ``(num, size)``, as an array of shape ``(num,)``."""
        residual = x - self.mean
        value = -0.5 * (self.quadratic(residual) - self.log_determinant() + x.shape[-1] * _LOG_2PI)
        return self.weighted(value)

    def weighted(self, values: Array) -> Array:
        """Values of the vectors, shape ``(num,)``, times their weights."""
        return values if self.weight is None else self.weight * values

    def quadratic(self, residual: Array) -> Array:
        """The square of each vector in the norm of the precision, shape ``(num,)``."""
        return jnp.sum(residual * self.apply(residual), -1)

    def apply(self, x: Array) -> Array:
        """Precision times each vector."""
        if self.precision.ndim == 2:
            return self.precision * x
        return jnp.einsum("eij,ej->ei", self.precision, x)

    def log_determinant(self) -> Array:
        """Log determinant of each precision, shape ``(num,)``; nan where one is not positive definite."""
        if self.precision.ndim == 2:
            return jnp.sum(jnp.log(self.precision), -1)
        diagonal = jnp.diagonal(cholesky(self.precision), axis1=-2, axis2=-1)
        return 2.0 * jnp.sum(jnp.log(diagonal), -1)

    @property
    def matrices(self) -> Array:
        """Precision of each vector, shape ``(num, size, size)``."""
        return as_matrices(self.precision)

    @property
    def diagonal(self) -> Array:
        """Diagonal of each precision, shape ``(num, size)``."""
        return diagonals(self.precision)

    def touched(self, x: Array) -> Array:
        """Quantities that cells see of the vectors: themselves."""
        return x


class CoupledSide(NamedTuple):
    r"""The prior of a block whose vectors depend on each other, independently by component, and of which a cell may
    touch several: it sees a combination of them with fixed weights.

    Component ``j`` of all vectors is :math:`\mu_j + s_j \odot R_{g(j)} z_j` with independent standard normal
    ``z_j``. Roots are lower triangular, and held once where components share them.
    """

    mean: Array
    """Shape ``(num, size)``."""
    scale: Array
    """Shape ``(num, size)``."""
    root: Array
    """Shape ``(num_groups, num, num)``."""
    group: Array
    """Number of each component's root, shape ``(size,)``."""
    places: Array
    """Vectors in each combination that occurs, shape ``(num_combinations, k)``."""
    weight: Array
    """Their weights, zero for padding, of the same shape."""

    def touched(self, x: Array) -> Array:
        """The combinations of vectors ``x`` of shape ``(num, size)``, which cells see in the place of vectors."""
        total = jnp.zeros((self.places.shape[0], x.shape[1]), x.dtype)
        for slot in range(self.places.shape[1]):
            total += self.weight[:, slot, None] * x[self.places[:, slot]]
        return total

    def colour(self, white: Array) -> Array:
        """Vectors from their standard normal coordinates, both of shape ``(num, size)``."""
        return self.mean + self.scale * jnp.einsum("dij,jd->id", self.root[self.group], white)

    def log_density(self, x: Array) -> Array:
        """Log density of each component of the vectors ``x``, shape ``(size,)``."""
        residual = ((x - self.mean) / self.scale).T
        white = solve_lower(self.root[self.group], residual[..., None])[..., 0]
        return 0.5 * (self.log_determinant() - jnp.sum(white**2, -1) - x.shape[0] * _LOG_2PI)

    def log_determinant(self) -> Array:
        """Log determinant of the precision of each component, shape ``(size,)``; nan for what is no covariance."""
        diagonal = jnp.diagonal(self.root, axis1=-2, axis2=-1)
        return -2.0 * (jnp.sum(jnp.log(diagonal), -1)[self.group] + jnp.sum(jnp.log(self.scale), 0))


Side = GaussianSide | CoupledSide


class Common(NamedTuple):
    """Gaussian unknowns that all cells see, such as an intercept: they add ``coefficients @ z`` to the predictors."""

    prior: GaussianSide
    """Prior of the unknowns, as a side of one vector."""
    coefficients: Array
    """Shape ``(num_cells, size)``."""


class Bilinear(NamedTuple):
    r"""Vectors :math:`u_r` and :math:`v_s` with independent Gaussian priors, and cells ``c`` with predictors

    .. math:: \eta_c = o_c + u_{r(c)}^\top M_c v_{s(c)} + \alpha_c^\top u_{r(c)} + \beta_c^\top v_{s(c)}.

    Every cell has a log-concave factor of its predictor, such as that of a Poisson count with a rate proportional to
    :math:`e^{\eta_c}`. Arrays with a leading axis of length one are the same for all cells. Everything is an array: a
    form passes through ``jit``, ``vmap`` and ``grad``. Of a :class:`CoupledSide` cells touch combinations of vectors,
    which then stand in the place of the vectors in all that follows.
    """

    rows: Side
    columns: Side
    row_index: Array
    """:math:`r(c)`, shape ``(num_cells,)``."""
    column_index: Array
    """:math:`s(c)`, shape ``(num_cells,)``."""
    coupling: Array
    """:math:`M_c`: shape ``(1 or num_cells, k)`` if it is diagonal on the first ``k`` components of both vectors and
    zero elsewhere, else ``(1 or num_cells, row_size, column_size)``."""
    row_linear: Array
    """:math:`\\alpha_c`, shape ``(1 or num_cells, row_size)``, or ``(1, 0)`` where there are no such terms."""
    column_linear: Array
    """:math:`\\beta_c`, shape ``(1 or num_cells, column_size)`` or ``(1, 0)``."""
    offset: Array
    """:math:`o_c`, shape ``(num_cells,)``."""
    potential: Potential
    """The factors of the cells, which have the first axis of its arrays."""
    weight: Array
    """Power of each factor, shape ``(num_cells,)``."""
    log_constant: Array
    """Terms of the log density that depend on no vector."""
    row_order: Array
    """Cells in the order of their rows, shape ``(num_cells,)``."""
    column_order: Array
    """Cells in the order of their columns."""
    background: Background | None = None
    """Zeros in other pairs of a row and a column; ``None`` where these are missing."""
    common: Common | None = None
    """Unknowns that all cells see, where these have a posterior and are no hyperparameters."""

    @property
    def num_cells(self) -> int:
        return self.offset.shape[0]

    @property
    def is_paired(self) -> bool:
        """True if the product is a sum of products of single components."""
        return self.coupling.ndim == 2

    def transposed(self) -> Bilinear:
        """The same model with rows and columns exchanged."""
        background = self.background
        if background is not None and background.selection is not None:
            background = background._replace(selection=Selection(*background.selection[::-1]))
        return self._replace(
            rows=self.columns,
            columns=self.rows,
            row_index=self.column_index,
            column_index=self.row_index,
            coupling=self.coupling if self.is_paired else self.coupling.swapaxes(-1, -2),
            row_linear=self.column_linear,
            column_linear=self.row_linear,
            row_order=self.column_order,
            column_order=self.row_order,
            background=background,
        )

    def predictor(self, u: Array, v: Array, z: Array | None = None) -> Array:
        """:math:`\\eta` of all cells at vectors ``u`` and ``v``, each of shape ``(num, size)``.

        :param z: common unknowns, shape ``(size,)``, where there are any.
        """
        own, other = self.rows.touched(u)[self.row_index], self.columns.touched(v)[self.column_index]
        if self.is_paired:
            k = self.coupling.shape[-1]
            product = jnp.sum(self.coupling * own[:, :k] * other[:, :k], -1)
        else:
            product = jnp.sum(own * (self.coupling @ other[:, :, None])[..., 0], -1)
        eta = self.offset + product
        for linear, vectors in ((self.row_linear, own), (self.column_linear, other)):
            if linear.shape[-1]:
                eta += jnp.sum(linear * vectors, -1)
        return eta if self.common is None or z is None else eta + self.common.coefficients @ z

    def log_density(
        self, u: Array, v: Array, z: Array | None = None, shares: tuple[Array, Array] | None = None
    ) -> Array:
        """Joint log density of the vectors and the data.

        :param z: common unknowns, where there are any.
        :param shares: probabilities with which rows and columns are selected, where pairs are censored.
        """
        factors = self.weight * self.potential.log_density(self.predictor(u, v, z))
        prior = jnp.sum(self.rows.log_density(u)) + jnp.sum(self.columns.log_density(v))
        value = self.log_constant + prior + jnp.sum(factors)
        if self.background is None:
            return value
        exposure, selection = self.background
        if selection is None:
            listed = jnp.sum(jax.nn.softplus(self.predictor(u, v, z)))
            return value - exposure * (jnp.sum(self._over_pairs(u, v, z, jax.nn.softplus, jnp.sum)) - listed)
        assert shares is not None
        rows, columns = shares
        log_columns = jnp.log(columns)
        censored = self._over_pairs(u, v, z, lambda eta: log_columns - jax.nn.softplus(eta), jax.nn.logsumexp)
        value += exposure * jax.nn.logsumexp(jnp.log(rows) + censored)
        return value + selection.log_density(shares, self.listed_counts())

    def listed_counts(self) -> tuple[Array, Array]:
        """Sums of the weights of the cells of each row and of each column."""
        sides = (self.row_index, self.rows.mean), (self.column_index, self.columns.mean)
        rows, columns = (jnp.zeros(len(mean), self.weight.dtype).at[i].add(self.weight) for i, mean in sides)
        return rows, columns

    def _over_pairs(
        self,
        u: Array,
        v: Array,
        z: Array | None,
        function: Callable[[Array], Array],
        reduce: Callable[[Array], Array],
    ) -> Array:
        """For each row ``reduce(function(predictors of all of its pairs))``, row by row."""
        columns = jnp.arange(v.shape[0])

        def of_row(row: Array) -> Array:
            return reduce(function(self.predictor_of_pairs(u, v, z, jnp.full_like(columns, row), columns)))

        return jax.lax.map(of_row, jnp.arange(u.shape[0]))

    def predictor_of_pairs(self, u: Array, v: Array, z: Array | None, rows: Array, columns: Array) -> Array:
        """Predictors of any pairs of a row and a column, where all cells have the same coefficients and offset."""
        shift = self.offset[0]
        if self.common is not None and z is not None:
            shift = shift + self.common.coefficients[0] @ z
        offset = jnp.broadcast_to(shift, rows.shape)
        return self._replace(row_index=rows, column_index=columns, offset=offset).predictor(u, v)


def order_cells(form: Bilinear) -> Bilinear:
    """The form with its cells ordered by rows and by columns, which sums over them rely on."""
    row_order, column_order = jnp.argsort(form.row_index), jnp.argsort(form.column_index)
    return form._replace(row_order=row_order, column_order=column_order)


class Selection(NamedTuple):
    """Dirichlet priors of the probabilities with which rows and columns are selected."""

    rows: Array
    """Concentrations, shape ``(num_rows,)``."""
    columns: Array
    """Shape ``(num_columns,)``."""

    def log_density(self, shares: tuple[Array, Array], counts: tuple[Array, Array]) -> Array:
        """Log density of the probabilities of rows and columns, and of those of the pairs that were selected.

        :param shares: probabilities of rows and of columns.
        :param counts: how often each row and each column was selected.
        """
        total = jnp.zeros(())
        for prior, share, count in zip(self, shares, counts, strict=True):
            constant = gammaln(jnp.sum(prior)) - jnp.sum(gammaln(prior))
            total += constant + jnp.sum(xlogy(prior - 1.0 + count, share))
        return total


class Background(NamedTuple):
    """Zeros in pairs of a row and a column, which have the coefficients and the offset that all cells share."""

    exposure: Array
    """Minus the log probability of a zero over the softplus of its predictor, for pairs that are no cells: the exposure
    of Poisson counts with that rate, one for Bernoulli outcomes. With a selection the number of censored pairs."""
    selection: Selection | None = None
    """Priors of the probabilities with which pairs were selected, where zeros are pairs that were censored."""
