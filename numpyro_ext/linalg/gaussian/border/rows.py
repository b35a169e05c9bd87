r"""Coefficients of rows in the unknowns of a border: a matrix where the border is narrow, entries where it is wide.

Both answer the same questions about whitened unknowns :math:`w_0` of the border, :math:`e_0 = F w_0`. A matrix costs
``p^2`` operations and ``p`` numbers a row. Entries cost as many as their pairs, and what :mod:`.coupling` says of the
blocks, whatever the number of rows: crossed effects of thousands of levels need these.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ...cholesky import from_lower, inverse_lower, solve_lower
from ...frozen_pytree import frozen_pytree
from ..design import SparseRows
from ..row_pairs import add_in_turn, gram_lower, sum_pairs
from .arrow import ArrowFactor
from .coupling import Coupling


@frozen_pytree
class BorderMatrix:
    """Rows of a narrow border, which see all of its unknowns."""

    matrix: Array
    """Coefficients in the whitened unknowns, shape ``(num_rows, p)``."""

    def predictor(self, shared: Array) -> Array:
        """Part of the predictors by whitened unknowns of the border, shape ``(num_rows,)``."""
        return self.matrix @ shared

    def gram_lower(self, precision: Array) -> Array:
        """Precision of the whitened unknowns by sites of the rows, shape ``(p, p)``: its lower triangle at least."""
        return (self.matrix * precision[:, None]).T @ self.matrix

    def shift(self, shift: Array) -> Array:
        """Shift of the whitened unknowns by those of the rows, shape ``(p,)``."""
        return self.matrix.T @ shift

    def cross(self, weighted: Array, at: tuple[Array, Array], like: Array) -> Coupling:
        """Sums over rows of local entries times coefficients in the border.

        :param weighted: local entries times site precisions, shape ``(num_rows, k)``.
        :param at: block and position of each local entry.
        :param like: an array whose first axes are those of the blocks and of the positions in them.
        """
        seen = weighted[..., None] * self.matrix[:, None]
        size = self.matrix.shape[1]
        return Coupling(jnp.zeros((*like.shape[:2], size), seen.dtype).at[at].add(seen), None, size)

    def row_variance(self, values: Array, at: tuple[Array, Array], posterior: ArrowFactor, local: Array) -> Array:
        """Variances of the predictors, shape ``(num_rows,)``.

        :param values: local entries, shape ``(num_rows, k)``.
        :param at: block and position of each.
        :param posterior: factor of the precision of whitened unknowns.
        :param local: from whitened unknowns of the blocks to unknowns, shape ``(b, n, n)``.
        """
        block, position = at
        root = solve_lower(posterior.factor, local.mT).mT
        covariance, slope = root @ root.mT, root @ posterior.gain.values
        pairs = covariance[block[:, :, None], position[:, :, None], position[:, None, :]]
        own = jnp.einsum("rk,rkl,rl->r", values, pairs, values)
        moved = self.matrix - jnp.einsum("rk,rkp->rp", values, slope[block, position])
        return own + jnp.sum((moved @ inverse_lower(posterior.schur).T) ** 2, axis=-1)


@frozen_pytree
class BorderEntries:
    """Rows of a wide border, which see a few of its unknowns each."""

    rows: SparseRows
    """Entries among the unknowns of the border; of ``p`` columns."""
    factor: Array
    """From whitened unknowns to unknowns: ``(p,)`` where it is diagonal, else ``(p, p)``."""
    met: Array | None = None
    """Unknowns of the border that each block meets, ``(b, w)``, padded with ``p``, where they are few."""
    listed: Array | None = None
    """Places of the entries in these lists, of the shape of the entries."""

    def predictor(self, shared: Array) -> Array:
        """Part of the predictors by whitened unknowns of the border, shape ``(num_rows,)``."""
        unknowns = self.factor * shared if self.factor.ndim == 1 else self.factor @ shared
        return self.rows.matvec(unknowns)

    def gram_lower(self, precision: Array) -> Array:
        """Precision of the whitened unknowns by sites of the rows, shape ``(p, p)``: its lower triangle at least."""
        lower = gram_lower(self.rows, precision)
        return self._between(lower if self.factor.ndim == 1 else from_lower(lower), self.factor.T)

    def shift(self, shift: Array) -> Array:
        """Shift of the whitened unknowns by those of the rows, shape ``(p,)``."""
        return self._times(self.rows.rmatvec(shift))

    def cross(self, weighted: Array, at: tuple[Array, Array], like: Array) -> Coupling:
        """Sums over rows of local entries times coefficients in the border; see :class:`BorderMatrix`."""
        block, position = jnp.broadcast_arrays(*at)
        size = self.rows.num_columns
        width = size if self.met is None else self.met.shape[1]
        total = jnp.zeros((*like.shape[:2], width), weighted.dtype)

        def add(total: Array, places: Array, values: Array) -> Array:
            return total.at[block, position, places[:, None]].add(weighted * values[:, None])

        # one entry of the border of all rows after the other: nothing is made that is as large as all pairs
        total = add_in_turn(add, total, (self.places.T, self.rows.values.T), self.places.size)
        return Coupling(self._of_whitened(total), self.met, size)

    def row_variance(self, values: Array, at: tuple[Array, Array], posterior: ArrowFactor, local: Array) -> Array:
        """Variances of the predictors, shape ``(num_rows,)``; see :class:`BorderMatrix`.

        They are gathered from the covariance of unknowns that meet in a row: sums with signs, where the matrix has sums
        of squares, at a cost that does not grow with rows times border.
        """
        block, position = jnp.broadcast_arrays(*at)
        covariance = posterior.inverse()
        blocks = local @ covariance.local @ local.mT
        cross = self._of_unknowns(local @ covariance.cross.values)
        whole = self.covariance(covariance.shared)
        pairs = blocks[block[:, :, None], position[:, :, None], position[:, None, :]]
        total = jnp.einsum("rk,rkl,rl->r", values, pairs, values)
        for places, own in zip(self.places.T, self.rows.values.T, strict=True):
            total += 2.0 * own * jnp.sum(values * cross[block, position, places[:, None]], axis=-1)
        return total + sum_pairs(self.rows.columns, self.rows.values, lambda i, j: whole[i, j])

    @property
    def places(self) -> Array:
        """Places of the entries among the unknowns of the border that their block meets, shape ``(num_rows, k)``."""
        return self.rows.columns if self.listed is None else self.listed

    def _times(self, x: Array) -> Array:
        """Products ``x F`` along the last axis: from coefficients in unknowns to those in whitened ones."""
        return x * self.factor if self.factor.ndim == 1 else x @ self.factor

    def covariance(self, of_whitened: Array) -> Array:
        """Covariance of the unknowns of the border, from that of the whitened ones; both of shape ``(p, p)``."""
        return self._between(of_whitened, self.factor)

    def _between(self, matrix: Array, factor: Array) -> Array:
        return matrix * (factor[:, None] * factor) if factor.ndim == 1 else factor @ matrix @ factor.T

    def _of_whitened(self, x: Array) -> Array:
        """:meth:`_times` of coefficients of the blocks in what they meet, shape ``(b, n, w)``."""
        return self._times(x) if self.met is None else self._among_met(x, is_transposed=False)

    def _of_unknowns(self, x: Array) -> Array:
        """Coefficients of the blocks in unknowns of the border, of those in whitened ones."""
        if self.met is not None:
            return self._among_met(x, is_transposed=True)
        return x * self.factor if self.factor.ndim == 1 else x @ self.factor.T

    def _among_met(self, x: Array, *, is_transposed: bool) -> Array:
        # what the prior couples is met together
        assert self.met is not None
        if self.factor.ndim == 1:
            return x * self.factor[self.met][:, None]
        factor = self.factor.at[self.met[:, :, None], self.met[:, None, :]].get(mode="fill", fill_value=0.0)
        return x @ (factor.mT if is_transposed else factor)


BorderRows = BorderMatrix | BorderEntries
