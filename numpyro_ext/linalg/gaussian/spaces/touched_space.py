r"""Conditioning many independent blocks of which rows touch a part only, as people do who compare a few items each.

Rows :math:`h = M z` see quantities :math:`z = S e` of the unknowns: the utilities that a person compares, or the rows
themselves where there are fewer of them. Within a block :math:`z \sim N(0, C)`, and sites of precision :math:`\tau` and
shift :math:`\nu` make

.. math:: L = M^T \mathrm{diag}(\tau) M, \quad t = M^T \nu, \quad
    a = (I + L C)^{-1} t, \quad E[z] = C a, \quad \mathrm{cov}(z) = (I + C L)^{-1} C.

Of differences of pairs :math:`L` is a Laplacian, so pairs count linearly. Neither :math:`C` nor :math:`L` is inverted
or factorised: both may be singular. The unknowns follow from :math:`z` by the regression of the prior (Ko 2017, section
3.2), with :math:`K` the covariance of all unknowns and :math:`G = (I + L C)^{-1} L`,

.. math:: E[e] = K S^T a, \qquad \mathrm{cov}(e) = K - K S^T G S K,

whether rows touch them or not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from ...cholesky import safe_sqrt
from ...frozen_pytree import frozen_pytree
from ..block_diagonal import BlockDiagonal, quadratic_form
from ..design import DenseDesign, Design, SparseRows
from ..marginals import ConditionedGaussian, Marginals, NotSequential, cavity_ratio
from ..pivoted_blocks import condition_blocks, gains_of_blocks
from ..prior import PriorBlock
from .one_block import OneBlock

_LARGEST_BATCH = 2_000_000
"""Numbers of the matrices that are gathered at a time, one for each row of a map."""


@frozen_pytree
class Touched:
    """Quantities that the rows of independent blocks touch, blocks of nearly equal size padded to one shape.

    Quantities stand bucket after bucket, block after block; those of padding are zero.
    """

    rows: SparseRows
    """:math:`M`, from quantities to rows: a row sees quantities of one block."""
    quantities: SparseRows
    """:math:`S`, from unknowns to quantities."""
    columns: tuple[Array, ...]
    """For each bucket the unknowns of the quantities of its blocks, shape ``(blocks, n)``, padded with
    ``num_columns``."""
    home: Array
    """The block of each unknown, counted over buckets, minus one where rows touch none; shape ``(num_columns,)``."""
    shapes: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    """For each bucket the number of its blocks and of the quantities of each."""

    def split(self, values: Array) -> list[Array]:
        """Values ``(..., num_quantities)`` by bucket, ``(..., blocks, quantities)``."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = jnp.split(values, ends, axis=-1)
        return [part.reshape(*values.shape[:-1], *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def by_bucket(self, values: Array) -> list[Array]:
        """Values ``(num_quantities, k)`` by bucket, ``(blocks, quantities, k)``."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = zip(jnp.split(values, ends), self.shapes, strict=True)
        return [part.reshape(*shape, values.shape[1]) for part, shape in parts]

    def pairs(self) -> tuple[Array, Array]:
        """Places of the pairs of the quantities of rows in the matrices of all blocks, flat: that of the first
        quantity, and what to add for the second."""
        starts, places, before = [], [], 0
        for blocks, size in self.shapes:
            starts.append(before + size * jnp.arange(blocks * size))
            places.append(jnp.arange(blocks * size) % size)
            before += blocks * size**2
        return jnp.concatenate(starts)[self.rows.columns], jnp.concatenate(places)[self.rows.columns]


@frozen_pytree
class TouchedSpace(OneBlock):
    r"""Quantities of many blocks; coordinates are :math:`a`, all quantities behind each other, ``(1, num_quantities)``.

    >>> from numpyro_ext.linalg.gaussian.prior import CovariancePrior
    >>> prior = (CovariancePrior(jnp.array([[[1.0, 0.5, 0.5], [0.5, 1.0, 0.5], [0.5, 0.5, 1.0]]]), count=2),)
    >>> both = SparseRows(jnp.array([[0], [1], [3], [5]]), jnp.ones((4, 1)), 6)
    >>> rows = SparseRows(jnp.array([[0, 1], [2, 3]]), jnp.array([[1.0, -1.0], [1.0, -1.0]]), 4)
    >>> columns, home = jnp.array([[0, 1], [3, 5]]), jnp.array([0, 0, 0, 1, 1, 1])
    >>> space = TouchedSpace.build(prior, Touched(rows, both, (columns,), home, ((2, 2),)))
    >>> print(abs(space.condition(jnp.ones(2), jnp.array([1.0, 2.0])).unknowns().round(3)))
    [0.25 0.25 0.   0.5  0.   0.5 ]
    """

    prior: tuple[PriorBlock, ...]
    touched: Touched
    entries: tuple[tuple[Array, Array], ...]
    """For each bucket the entries of :math:`S`: where they are among the unknowns of their block, and their numbers,
    both of shape ``(blocks, quantities, k)``."""
    covariance: tuple[Array, ...]
    """:math:`C` of each bucket, zero at padding; shape ``(blocks, quantities, quantities)``."""

    @classmethod
    def build(cls, prior: tuple[PriorBlock, ...], touched: Touched) -> TouchedSpace:
        """Form the covariances of the quantities; all priors must be proper."""
        whole, quantities = _covariance(prior), touched.quantities
        position = jnp.zeros((quantities.num_columns,), jnp.int32)
        for columns in touched.columns:
            places = jnp.broadcast_to(jnp.arange(columns.shape[1], dtype=jnp.int32), columns.shape)
            position = position.at[columns].set(places, mode="drop")
        entries = zip(
            touched.by_bucket(position[quantities.columns]), touched.by_bucket(quantities.values), strict=True
        )

        @jax.checkpoint  # what is gathered takes more than what comes out
        def of_block(places: Array, values: Array, columns: Array) -> Array:
            local = jnp.zeros((len(values), len(columns)), values.dtype)
            local = local.at[jnp.arange(len(values))[:, None], places].add(values)
            return local @ whole.take(columns[None])[0] @ local.T

        found = tuple(entries)
        covariance = [_one_by_one(of_block, *parts, c) for parts, c in zip(found, touched.columns, strict=True)]
        return cls(prior, touched, found, tuple(covariance))

    @property
    def rows(self) -> Array:
        """Rows of the one whole."""
        return jnp.arange(self.touched.rows.num_rows)[None]

    def predictor(self, coordinates: Array) -> Array:
        """:math:`h = M C a` of shape ``(num_rows,)``."""
        return self.touched.rows.matvec(self._times_covariance(coordinates[0]))

    def unknowns(self, coordinates: Array) -> Array:
        """:math:`e = K S^T a` of shape ``(..., num_columns)`` for ``a`` of shape ``(..., 1, num_quantities)``."""
        return _covariance(self.prior).apply(self.touched.quantities.rmatvec(coordinates[..., 0, :]))

    def inner(self, a: Array, b: Array) -> Array:
        return a[0] @ self._times_covariance(b[0])

    def zeros(self) -> Array:
        return jnp.zeros((1, self.touched.quantities.num_rows), self.covariance[0].dtype)

    def _times_covariance(self, a: Array) -> Array:
        parts = zip(self.covariance, self.touched.split(a), strict=True)
        return jnp.concatenate([jnp.einsum("bij,bj->bi", matrix, part).reshape(-1) for matrix, part in parts])

    def condition(self, site_precision: Array, site_shift: Array) -> TouchedPosterior:
        r"""Cost: the cube of the quantities of each block, and a constant for each row.

        :param jax.Array site_precision: :math:`\tau`, not negative, shape ``(num_rows,)``.
        """
        touched, values = self.touched, self.touched.rows.values
        first, second = touched.pairs()
        numbers = np.cumsum([0, *(blocks * size**2 for blocks, size in touched.shapes)])
        terms = site_precision[:, None, None] * values[:, :, None] * values[:, None, :]
        flat = jnp.zeros((int(numbers[-1]),), terms.dtype).at[first[:, :, None] + second[:, None, :]].add(terms)
        precision = [
            flat[start:end].reshape(blocks, size, size)
            for start, end, (blocks, size) in zip(numbers, numbers[1:], touched.shapes, strict=False)
        ]
        shift = touched.split(touched.rows.rmatvec(site_shift))
        found = [condition_blocks(*parts) for parts in zip(self.covariance, precision, shift, strict=True)]
        coordinates = jnp.concatenate([solved.reshape(-1) for _, solved, _ in found])[None]
        return TouchedPosterior(
            self,
            site_precision,
            site_shift,
            tuple(precision),
            -sum((jnp.sum(half_log) for half_log, _, _ in found), jnp.zeros((), terms.dtype)),
            tuple(covariance for _, _, covariance in found),
            coordinates,
        )


@frozen_pytree
class TouchedPosterior(ConditionedGaussian, NotSequential):
    """The Gaussian of :meth:`TouchedSpace.condition`; arrays of a bucket have shape ``(blocks, quantities, ...)``."""

    space: TouchedSpace
    site_precision: Array
    site_shift: Array
    precision: tuple[Array, ...]
    """:math:`L` of each bucket."""
    log_ratio: Array
    r""":math:`-\frac12 \log|I + L C|`."""
    covariance: tuple[Array, ...]
    """Covariance of the quantities."""
    coordinates: Array

    def marginals(self) -> Marginals:
        rows = self.space.touched.rows
        mean = self.space.predictor(self.coordinates)
        flat = jnp.concatenate([matrix.reshape(-1) for matrix in self.covariance])
        first, second = self.space.touched.pairs()
        pairs = flat[first[:, :, None] + second[:, None, :]]
        variance = jnp.einsum("rk,rkl,rl->r", rows.values, pairs, rows.values)
        log_partition = 0.5 * self.site_shift @ mean + self.log_volume()
        return Marginals(mean, variance, cavity_ratio(self.site_precision, variance), log_partition)

    def log_volume(self) -> Array:
        r""":math:`-\frac12 \log|I + L C|`, the log ratio of posterior to prior volume."""
        return self.log_ratio

    def unknowns(self) -> Array:
        return self.space.unknowns(self.coordinates)

    def map_variance(self, design: Design) -> Array:
        prior = _covariance(self.space.prior)
        if isinstance(design, DenseDesign):
            return quadratic_form(design, prior) - self._removed(design.matrix, _row_by_row)
        return quadratic_form(design, prior) - self._removed_from_sparse(design)

    def map_covariance(self, design: Design) -> Array:
        matrix = design.to_dense()
        prior = _covariance(self.space.prior).apply(matrix) @ matrix.T
        return prior - self._removed(matrix, _all_with_all)

    def covariance_of(self, design: SparseRows, used: Array) -> Array:
        """Posterior covariance of ``J e``, for a design ``J`` on a few unknowns alone.

        :param SparseRows design: between the unknowns ``used``, shape ``(m,)``, and the rows of ``J``.
        """
        prior, matrix = _covariance(self.space.prior), design.to_dense()
        total = matrix @ prior.take(used[None])[0] @ matrix.T
        num_blocks, before = sum(len(columns) for columns in self.space.touched.columns), 0
        home = self.space.touched.home[used]
        is_asked = jnp.zeros((num_blocks,), bool).at[jnp.where(home < 0, num_blocks, home)].set(True, mode="drop")
        buckets = zip(self._gains(), self.space.touched.columns, self.space.entries, strict=True)
        for gain, columns, entries in buckets:

            def remove(
                block: Array, total: Array, gain: Array = gain, columns: Array = columns, entries: Any = entries
            ) -> Array:
                seen = matrix @ prior.entries(used[:, None], columns[block][None])
                seen = _touched(seen, *(part[block] for part in entries))
                return total - seen @ gain[block] @ seen.T

            def visit(block: Array, total: Array, remove: Any = remove, before: int = before) -> Array:
                return lax.cond(is_asked[before + block], remove, lambda block, total: total, block, total)

            total = lax.fori_loop(0, len(columns), visit, total)
            before += len(columns)
        return total

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Exact draws of the unknowns, shape ``(num_samples, num_columns)``: draws from the prior, corrected by what
        its sites miss, without a root of anything but the prior."""
        space, rows = self.space, self.space.touched.rows
        keys = random.split(rng_key)
        dtype = rows.values.dtype
        scale = BlockDiagonal(tuple(block.scale_part() for block in space.prior))
        draw = scale.apply(random.normal(keys[0], (num_samples, space.touched.quantities.num_columns), dtype))
        seen = rows.matvec(space.touched.quantities.matvec(draw))
        noise = safe_sqrt(self.site_precision) * random.normal(keys[1], seen.shape, dtype)
        missed = space.touched.split(rows.rmatvec(self.site_shift + noise - self.site_precision * seen))
        coordinates = jnp.concatenate(
            [
                (part - jnp.einsum("bij,bjk,...bk->...bi", gains_of_blocks(prior, precision), prior, part)).reshape(
                    num_samples, -1
                )
                for prior, precision, part in zip(space.covariance, self.precision, missed, strict=True)
            ],
            -1,
        )
        return draw + space.unknowns(coordinates[:, None])

    def _gains(self) -> list[Array]:
        """:math:`G` of each block, bucket by bucket."""
        return [gains_of_blocks(*parts) for parts in zip(self.space.covariance, self.precision, strict=True)]

    def _removed(self, matrix: Array, product: Callable[[Array, Array], Array]) -> Array:
        """Part of the prior moments of the rows of a dense matrix that the sites remove."""
        touched = self.space.touched
        seen = touched.split(touched.quantities.matvec(_covariance(self.space.prior).apply(matrix)))
        return sum(map(product, seen, self._gains()), jnp.zeros((), matrix.dtype))

    def _removed_from_sparse(self, design: SparseRows) -> Array:
        """The same of the variances of sparse rows: of their blocks one after the other, mostly one."""
        home = jnp.where(design.values != 0.0, self.space.touched.home[design.columns], -1)
        prior, gains = _covariance(self.space.prior), self._gains()

        def remove(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            home, total = carry
            block = jnp.max(home, axis=1)
            is_here = (home == block[:, None]) & (home >= 0)
            weights = jnp.where(is_here, design.values, 0.0)
            before = 0
            for gain, columns, entries in zip(gains, self.space.touched.columns, self.space.entries, strict=True):
                number = jnp.clip(block - before, 0, len(columns) - 1)
                is_inside = (block >= before) & (block < before + len(columns))
                inside = jnp.where(is_inside[:, None], weights, 0.0)
                before += len(columns)

                def variance(
                    row: tuple[Array, ...], gain: Array = gain, columns: Array = columns, entries: Any = entries
                ) -> Array:
                    number, places, weights = row
                    seen = prior.entries(columns[number][:, None], places) @ weights
                    seen = _touched(seen, *(part[number] for part in entries))
                    return seen @ gain[number] @ seen

                most = (
                    gain.shape[-1] * (gain.shape[-1] + entries[0].shape[-1]) + columns.shape[1] * design.values.shape[1]
                )
                size = max(1, _LARGEST_BATCH // max(1, most))
                total = total + lax.map(variance, (number, design.columns, inside), batch_size=size)
            return jnp.where(is_here, -1, home), total

        start = home, jnp.zeros((design.num_rows,), design.values.dtype)
        _, total = lax.while_loop(lambda carry: jnp.any(carry[0] >= 0), remove, start)
        return total


def _touched(seen: Array, places: Array, values: Array) -> Array:
    """Quantities of a block, ``(..., quantities)``, from what is seen of its unknowns, ``(..., n)``."""
    return jnp.sum(seen.at[..., places].get(mode="clip") * values, axis=-1)


def _one_by_one(function: Callable[..., Array], *parts: Array) -> Array:
    """A function of the arrays of each block, one after the other: see :mod:`~numpyro_ext.linalg.cholesky`."""
    return lax.map(lambda block: function(*block), parts)


def _row_by_row(seen: Array, gain: Array) -> Array:
    return jnp.einsum("rbi,bij,rbj->r", seen, gain, seen)


def _all_with_all(seen: Array, gain: Array) -> Array:
    return jnp.einsum("rbi,bij,sbj->rs", seen, gain, seen)


def _covariance(prior: tuple[PriorBlock, ...]) -> BlockDiagonal:
    return BlockDiagonal(tuple(block.covariance_part() for block in prior))
