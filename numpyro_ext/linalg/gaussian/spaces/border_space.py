r"""Conditioning blocks of unknowns that are independent given a few shared ones, by elimination block after block.

Groups of observations share their common coefficients, and nothing else. With whitened unknowns :math:`w_b` of block
:math:`b` and :math:`w_0` of the border, the posterior precision is an arrow (:mod:`~..border.arrow`), whose Cholesky
factor exists exactly when the posterior is proper, whatever the signs of the site precisions. In the posterior
:math:`w_0` has the covariance :math:`S^{-1}`, and :math:`w_b = m_b - R_b^{-T} V_b (w_0 - m_0) + R_b^{-T} \xi_b` with
independent :math:`\xi_b` of variance one.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from ...cholesky import inverse_lower, solve_lower
from ...frozen_pytree import frozen_pytree
from ..block_diagonal import BlockCovariance, BlockDiagonal, Repeated, column_home, quadratic_form
from ..border.arrow import ArrowFactor, ArrowMatrix
from ..border.rows import BorderEntries, BorderMatrix, BorderRows
from ..design import DenseDesign, Design, SparseRows
from ..marginals import NotSequential, WhitenedPosterior
from ..prior import PriorBlock
from .coefficient_space import WhitenedPrior
from .one_block import OneBlock

_MOST_NUMBERS = 10_000_000
"""Numbers of the largest matrix of some rows with the unknowns of the border."""


class Border(NamedTuple):
    """Unknowns in blocks that are independent, and touched by different rows, given those of the border."""

    columns: Array
    """The unknowns of each block, shape ``(num_blocks, n)``, padded with ``num_columns``."""
    shared: Array
    """The unknowns of the border, shape ``(p,)``; together with the blocks all unknowns, each once."""
    slots: Array
    """Entries of each row that are in its block and not in the border, shape ``(num_rows, k)``, padded with the
    number of entries of a row."""
    shared_slots: Array | None = None
    """Entries of each row that are in the border, padded likewise, where the border is wide and rows see a few of its
    unknowns; ``None`` where its coefficients are to be a matrix."""
    met: Array | None = None
    """Places in the border of the unknowns of it that each block meets, ascending, shape ``(num_blocks, w)``, padded
    with ``p``, where these are few; with each unknown those that the prior couples to it."""
    listed: Array | None = None
    """Places of the entries ``shared_slots`` in the lists of their blocks, of the same shape."""


@frozen_pytree
class BorderSpace(OneBlock):
    """Unknowns in independent blocks with a border, in whitened coordinates.

    Coordinates are one vector: block after block, padding included, then those of the border.

    >>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
    >>> prior = (DiagonalPrior(jnp.ones(3)),)
    >>> design = SparseRows(jnp.array([[0, 2], [1, 2]]), jnp.ones((2, 2)), 3)
    >>> border = Border(jnp.array([[0], [1]]), jnp.array([2]), jnp.array([[0], [0]]))
    >>> posterior = BorderSpace.build(prior, design, border).condition(jnp.ones(2), jnp.array([1.0, 3.0]))
    >>> print(posterior.unknowns(), posterior.row_variance())
    [0. 1. 1.] [0.625 0.625]
    """

    design: SparseRows
    border: Border
    home: Array
    """Block of every unknown and its position there, shape ``(2, num_columns)``; zeros for those of the border."""
    is_local: Array
    """One for unknowns in blocks and zero for those of the border, shape ``(num_columns,)``."""
    entries: Array
    """Unknowns of the entries of each row in its block, shape ``(num_rows, k)``."""
    values: Array
    """Their coefficients, zero at padding."""
    by_border: BorderRows
    """Coefficients of the rows in the unknowns of the border."""
    factor: Array
    """From whitened unknowns of a block to its unknowns, shape ``(b, n, n)``."""
    precision: Array
    """Prior precision of the whitened unknowns of a block, one on the diagonal at padding; shape ``(b, n, n)``."""
    shared_factor: BlockDiagonal
    """The same of the border, of one part."""
    shared_precision: BlockDiagonal
    half_log_determinant: Array
    """Half the log determinant of the precision, with the constant of the flat unknowns."""

    @classmethod
    def build(
        cls, prior: tuple[PriorBlock, ...], design: SparseRows, border: Border, by_last: Array | None = None
    ) -> BorderSpace:
        """Whiten the prior, no block of which lies both in blocks and in the border, and cut the rows in two.

        :param jax.Array by_last: coefficients of the last unknowns of the border, of which the design has no entries,
            shape ``(num_rows, q)``.
        """
        columns, shared, slots, shared_slots, met, listed = border
        num_columns, dtype = design.num_columns, design.values.dtype
        whitened = WhitenedPrior.build(prior, dtype)
        is_padding = (columns == num_columns).astype(dtype)
        precision = whitened.precision.take(columns) + is_padding[:, :, None] * jnp.eye(columns.shape[1], dtype=dtype)
        shared_factor = whitened.factor.at(shared)
        is_local = jnp.ones((num_columns,), dtype).at[shared].set(0.0)
        place = jnp.full((num_columns,), shared.size).at[shared].set(jnp.arange(shared.size))
        entries, values = _entries(design, slots)
        by_border: BorderRows
        if shared_slots is not None and by_last is None:
            shared_entries, shared_values = _entries(design, shared_slots)
            # padding stands at an entry of a block, which has no place in the border
            rows = SparseRows(jnp.minimum(place[shared_entries], shared.size - 1), shared_values, shared.size)
            (factor,) = shared_factor.parts
            assert not isinstance(factor, Repeated)  # as of one block
            by_border = BorderEntries(rows, factor if factor.ndim == 1 else factor[0], met, listed)
        else:
            matrix = jnp.zeros((design.num_rows, shared.size), dtype)
            at = jnp.arange(design.num_rows)[:, None], place[design.columns]
            matrix = matrix.at[at].add(design.values, mode="drop")
            if by_last is not None:
                matrix = matrix.at[:, matrix.shape[1] - by_last.shape[1] :].add(by_last)
            by_border = BorderMatrix(shared_factor.apply_transpose(matrix))
        return cls(
            design,
            border,
            column_home(columns, num_columns),
            is_local,
            entries,
            values,
            by_border,
            whitened.factor.take(columns),
            precision,
            shared_factor,
            whitened.precision.at(shared),
            whitened.half_log_determinant,
        )

    def predictor(self, coordinates: Array) -> Array:
        local, shared = self.split(coordinates[0])
        block, position = self.places()
        local = jnp.einsum("bij,bj->bi", self.factor, local)[block, position]
        return jnp.sum(self.values * local, -1) + self.by_border.predictor(shared)

    def unknowns(self, coordinates: Array) -> Array:
        """Unknowns of shape ``(..., num_columns)`` for coordinates of shape ``(..., 1, size)``."""
        local, shared = self.split(coordinates[..., 0, :])
        return self.from_parts(jnp.einsum("bij,...bj->...bi", self.factor, local), self.shared_factor.apply(shared))

    def inner(self, a: Array, b: Array) -> Array:
        (local_a, shared_a), (local_b, shared_b) = self.split(a[0]), self.split(b[0])
        own = jnp.einsum("bi,bij,bj->", local_a, self.precision, local_b)
        return own + shared_a @ self.shared_precision.apply(shared_b)

    def zeros(self) -> Array:
        return jnp.zeros((1, self.precision[..., 0].size + self.border.shared.size), self.factor.dtype)

    def split(self, coordinates: Array) -> tuple[Array, Array]:
        """Coordinates ``(..., size)`` of the blocks, ``(..., b, n)``, and of the border, ``(..., p)``."""
        local, shared = jnp.split(coordinates, [self.precision[..., 0].size], axis=-1)
        return local.reshape(*local.shape[:-1], *self.precision.shape[:2]), shared

    def from_parts(self, local: Array, shared: Array) -> Array:
        """Values ``(..., b, n)`` and ``(..., p)`` at all unknowns, ``(..., num_columns)``."""
        out = jnp.zeros((*shared.shape[:-1], self.design.num_columns), shared.dtype)
        return out.at[..., self.border.columns].set(local, mode="drop").at[..., self.border.shared].set(shared)

    def places(self) -> tuple[Array, Array]:
        """Block of each row, ``(num_rows, 1)``, and the positions of its entries there, ``(num_rows, k)``."""
        return self.home[0][self.entries[:, :1]], self.home[1][self.entries]

    def condition(self, site_precision: Array, site_shift: Array, held: ArrowFactor | None = None) -> BorderPosterior:
        r"""Posterior under sites; see :meth:`.GaussianSpace.condition`.

        Cost: :math:`n^3 + n p (n + p)` for each block, less where it meets little of the border, and :math:`p^3`; for
        each row :math:`p^2`, or the square of its entries where the border is wide.

        :param ArrowFactor held: factor for these precisions, where it is at hand; see :meth:`.ArrowFactor.held`.
        """
        block, position = self.places()
        weighted = site_precision[:, None] * self.values
        gram = jnp.zeros_like(self.precision)
        pairs = weighted[:, :, None] * self.values[:, None, :]
        gram = gram.at[block[:, :, None], position[:, :, None], position[:, None, :]].add(pairs)
        transpose = self.factor.mT
        cross = self.by_border.cross(weighted, (block, position), self.precision)
        matrix = ArrowMatrix(
            self.precision + transpose @ gram @ self.factor,
            cross.of(transpose @ cross.values),
            self.shared_precision.to_dense() + self.by_border.gram_lower(site_precision),
        )
        factor = ArrowFactor.build(matrix) if held is None else held.held(matrix)
        pulled = jnp.zeros(self.precision.shape[:2], self.factor.dtype)
        pulled = pulled.at[block, position].add(self.values * site_shift[:, None])
        side = (transpose @ pulled[..., None])[..., 0], self.by_border.shift(site_shift)
        local, shared, half_square = factor.solution(*side)
        return BorderPosterior(self, site_precision, factor, half_square, _joined(local, shared))


@frozen_pytree
class BorderPosterior(WhitenedPosterior, NotSequential):
    """The Gaussian of :meth:`BorderSpace.condition`."""

    space: BorderSpace
    site_precision: Array
    factor: ArrowFactor
    """Factor of the precision of the whitened unknowns."""
    half_square: Array
    coordinates: Array
    """Shape ``(1, size)``."""

    def half_square_of_mean(self) -> Array:
        return self.half_square

    def at_mode(self, coordinates: Array, site_shift: Array) -> BorderPosterior:
        """The same Gaussian about another mean, the mode of factors whose sites have these shifts."""
        square = self.space.inner(coordinates, coordinates)
        square += jnp.sum(self.site_precision * self.space.predictor(coordinates) ** 2)
        return dataclasses.replace(self, coordinates=coordinates, half_square=0.5 * square)

    def row_variance(self) -> Array:
        space = self.space
        return space.by_border.row_variance(space.values, space.places(), self.factor, space.factor)

    def covariance_product(self, gradient: Array) -> Array:
        """Posterior covariance of the coordinates times a gradient in them; both of shape ``(1, size)``.

        Cost: triangular solves with the factor at hand.
        """
        return _joined(*self.factor.solve(*self.space.split(gradient[0])))

    def log_volume(self) -> Array:
        return self.space.half_log_determinant - self.factor.half_log_determinant()

    def map_variance(self, design: Design, by_last: Array | None = None, most_numbers: int = _MOST_NUMBERS) -> Array:
        """Posterior variance of ``J e`` for a design ``J``, shape ``(rows of J,)``; see :meth:`BorderSpace.build`.

        :param int most_numbers: of a matrix of rows with the border; more rows are taken some at a time.
        """
        if by_last is None and isinstance(design, SparseRows) and design.columns.shape[1] == 1:
            return design.values[:, 0] ** 2 * self._variances()[design.columns[:, 0]]
        given = self._moves()
        size = max(1, most_numbers // max(1, len(self.factor.schur)))
        if by_last is not None or isinstance(design, DenseDesign) or design.num_rows <= size:
            return self._variance(given, design, by_last)

        def some(rows: tuple[Array, Array]) -> Array:
            return self._variance(given, SparseRows(*rows, design.num_columns), None)

        missing = -design.num_rows % size
        parts = [jnp.pad(x, ((0, missing), (0, 0))) for x in (design.columns, design.values)]
        found: Array = jax.lax.map(some, tuple(x.reshape(-1, size, x.shape[1]) for x in parts))
        return found.reshape(-1)[: design.num_rows]

    def map_covariance(self, design: Design, by_last: Array | None = None) -> Array:
        covariance, local, moved = self._parts(self._moves(), design, by_last)
        white = solve_lower(self.factor.schur, moved.T)
        return covariance.map_covariance(local) + white.T @ white

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Exact draws of the unknowns by triangular solves, shape ``(num_samples, num_columns)``."""
        keys = random.split(rng_key)
        shape, dtype = self.space.precision.shape[:2], self.coordinates.dtype
        shared = random.normal(keys[0], (len(self.factor.schur), num_samples), dtype)
        return self._colour(random.normal(keys[1], (*shape, num_samples), dtype), shared)

    def from_white(self, white: Array) -> Array:
        """Unknowns made of as many standard normal numbers, one to one; both of shape ``(num_columns,)``."""
        columns, shared = self.space.border.columns, self.space.border.shared
        return self._colour(white.at[columns].get(mode="fill", fill_value=0.0)[..., None], white[shared][:, None])[0]

    def _colour(self, local: Array, shared: Array) -> Array:
        local, shared = self.factor.colour(local, shared)
        local = jnp.moveaxis(local, -1, 0)
        deviation = jnp.concatenate([local.reshape(len(local), -1), shared.T], -1)
        return self.space.unknowns(self.coordinates + deviation[:, None])

    def _variances(self) -> Array:
        """Variances of all unknowns, shape ``(num_columns,)``, from the inverse where the precision has entries."""
        space, inverse = self.space, self.factor.inverse()
        local = jnp.sum((space.factor @ inverse.local) * space.factor, axis=-1)
        if isinstance(space.by_border, BorderEntries):
            return space.from_parts(local, jnp.diagonal(space.by_border.covariance(inverse.shared)))
        factor = space.shared_factor.to_dense()
        return space.from_parts(local, jnp.sum((factor @ inverse.shared) * factor, axis=-1))

    def _moves(self) -> tuple[BlockCovariance, Array]:
        """The covariance given the border, and how unknowns move with its whitened unknowns, ``(p, num_columns)``."""
        space = self.space
        root = solve_lower(self.factor.factor, space.factor.mT).mT
        slope = root @ self.factor.gain.dense()
        blocks = BlockCovariance(root @ root.mT, space.border.columns, space.home)
        return blocks, space.from_parts(-jnp.moveaxis(slope, -1, 0), space.shared_factor.to_dense().T)

    def _parts(
        self, given: tuple[BlockCovariance, Array], design: Design, by_last: Array | None
    ) -> tuple[BlockCovariance, Design, Array]:
        """The covariance given the border, the entries of a design in the blocks, and how its rows move with the
        whitened unknowns of the border, shape ``(rows of J, p)``."""
        space, (blocks, moved) = self.space, given
        local: Design
        if isinstance(design, DenseDesign):
            local, moved = DenseDesign(design.matrix * space.is_local), design.matvec(moved).T
        else:
            values = design.values * space.is_local[design.columns]
            local = SparseRows(design.columns, values, design.num_columns)
            # one unknown of the border after the other: all at once would take as many numbers as entries times these
            moved = jax.lax.map(design.matvec, moved).T
        if by_last is not None:
            factor = space.shared_factor.to_dense()
            moved = moved + by_last @ factor[len(factor) - by_last.shape[1] :]
        return blocks, local, moved

    def _variance(self, given: tuple[BlockCovariance, Array], design: Design, by_last: Array | None) -> Array:
        covariance, local, moved = self._parts(given, design, by_last)
        return quadratic_form(local, covariance) + self._variance_by_border(moved)

    def _variance_by_border(self, moved: Array) -> Array:
        return jnp.sum((moved @ inverse_lower(self.factor.schur).T) ** 2, axis=-1)


def _joined(local: Array, shared: Array) -> Array:
    """Coordinates ``(1, size)`` of parts ``(b, n)`` and ``(p,)``."""
    return jnp.concatenate([local.reshape(-1), shared])[None]


def _entries(design: SparseRows, slots: Array) -> tuple[Array, Array]:
    """Columns and values of some entries of each row, by their places in it; zero values at padding."""
    is_entry = slots < design.columns.shape[1]
    at = jnp.arange(design.num_rows)[:, None], jnp.where(is_entry, slots, 0)
    return design.columns[at], jnp.where(is_entry, design.values[at], 0.0)
