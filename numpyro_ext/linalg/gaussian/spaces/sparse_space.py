"""Conditioning a Gaussian on sites in the space of unknowns with a sparse precision: maps, walks, surfaces, meshes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...cholesky import LARGEST_DENSE, cholesky, half_log_determinant, solve_lower
from ...frozen_pytree import frozen_pytree
from ...sparse_cholesky import SparseFactor, multiply
from ...sparse_cholesky.primitive import factorise_and_solve, white_noise
from ...sparse_krylov import Estimate, KrylovFactor
from ...sums_by_index import sums_by_index
from ..design import DenseDesign, Design, SparseRows, by_dense_rows
from ..marginals import ConditionedGaussian, Marginals, NotSequential, cavity_ratio
from ..prior import CovariancePrior, DiagonalPrior, FlatPrior, PrecisionPrior, PriorBlock
from ..sparse_layout import SparseLayout, dense_entries, look_up, quadratic_of_pairs, row_pairs
from ..sparse_prior import SparsePrecisionPrior
from .one_block import OneBlock

_ROUNDING = 1e3
"""Rounding errors of a variance, in those of one operation, that may be left where a constraint takes all of it."""


class _OnlyParallel(NotSequential):
    """A space, or a posterior in it, of too many unknowns for updates of single rows."""

    def sequential_row(self, i: int | Array) -> Array:
        raise ValueError(
            "The sequential schedule needs the covariance of all unknowns, which sparse fields do not form: ask for "
            "schedule='parallel'."
        )


@frozen_pytree
class SparseSpace(_OnlyParallel, OneBlock):
    r"""Unknowns :math:`e = s \circ w` with a sparse posterior precision, seen through sparse rows :math:`h = A e`.

    The scale :math:`s` makes independent unknowns white, so that theirs may go to zero; it is one for all others.
    Conditioning costs one sparse factorisation, variances one selected inverse: nothing has the shape of all pairs of
    unknowns. Where the layout has an elimination, conjugate gradients and Krylov spaces stand in for the factor
    (:mod:`numpyro_ext.linalg.sparse_krylov`): log volumes and variances are then estimates. What unknowns are
    orthogonal to is taken out by kriging (Rue and Held 2005, section 2.3.3).

    A precision that is flat along what its unknowns are orthogonal to may leave :math:`H = P + X^T T X` singular.
    Then :math:`H + c S S^T` is factorised, where :math:`S` picks as many unknowns as there are directions; what that
    adds is taken off again, exactly, on the subspace.

    >>> import numpy as np
    >>> from numpyro_ext.linalg.gaussian.sparse_layout import find_layout
    >>> rows = SparseRows(jnp.array([[0], [0], [1]]), jnp.ones((3, 1)), 2)
    >>> layout = find_layout([None], [2], np.array([[0], [0], [1]]), np.ones((3, 1), bool))
    >>> space = SparseSpace.build((DiagonalPrior(jnp.ones(2)),), rows, layout)
    >>> posterior = space.condition(jnp.ones(3), jnp.array([1.0, 2.0, 3.0]))
    >>> print(posterior.unknowns().round(3), posterior.marginals().variance.round(3))
    [1.  1.5] [0.333 0.333 0.5  ]
    """

    rows_of_unknowns: SparseRows
    """:math:`A`."""
    layout: SparseLayout
    scale: Array
    """:math:`s`, shape ``(N,)``."""
    precision: Array
    """:math:`P`, the prior precision of :math:`w`, at the entries of the pattern."""
    half_log_determinant: Array
    """Half the log determinant of the prior precision on its support, with the constant of flat directions."""
    directions: Array
    """Directions that unknowns are orthogonal to, shape ``(N, k)``."""
    anchored: Array
    """Unknowns that :math:`S` picks, shape ``(m,)``."""
    anchors: Array
    """Numbers that are added to the precision there, shape ``(m,)``."""

    @classmethod
    def build(cls, prior: tuple[PriorBlock, ...], design: SparseRows, layout: SparseLayout) -> SparseSpace:
        """Place the numbers of the prior among the entries of the posterior precision."""
        dtype = design.values.dtype
        scales, entries, directions, anchored, anchors = [], [], [], [], []
        total, start, size = jnp.zeros((), dtype), 0, design.num_columns
        for block in prior:
            ones = jnp.ones((block.size,), dtype)
            scales.append(jnp.sqrt(block.variance) if isinstance(block, DiagonalPrior) else ones)
            if isinstance(block, SparsePrecisionPrior):
                entries.append(block.values)
                total += 0.5 * (block.log_determinant() + block.num_flat * math.log(2.0 * math.pi))
                if block.is_constrained and block.directions is not None:
                    padding = (start, size - start - block.size), (0, 0)
                    directions.append(jnp.pad(block.directions, padding))
                    if block.pivots is not None:
                        anchored.append(start + block.pivots)
                        anchors.append(jnp.broadcast_to(block.anchor(), block.pivots.shape))
            elif isinstance(block, FlatPrior):
                entries.append(0.0 * ones)
                total += 0.5 * block.size * math.log(2.0 * math.pi)
            elif isinstance(block, CovariancePrior | PrecisionPrior):
                found, log_determinant = dense_entries(block)
                entries.append(found)
                total += log_determinant
            else:
                entries.append(ones)
            start += block.size
        return cls(
            design,
            layout,
            jnp.concatenate(scales),
            jnp.zeros((layout.pattern.num_entries,), dtype)
            .at[layout.prior_slots]
            .add(jnp.concatenate(entries).astype(dtype)),
            total,
            jnp.concatenate(directions, axis=1).astype(dtype) if directions else jnp.zeros((size, 0), dtype),
            jnp.concatenate(anchored) if anchored else jnp.zeros((0,), jnp.int32),
            jnp.concatenate(anchors).astype(dtype) if anchors else jnp.zeros((0,), dtype),
        )

    @property
    def design(self) -> SparseRows:
        """:math:`X`, of the coordinates :math:`w`."""
        return self.rows_of_unknowns.scale_columns(self.scale)

    def predictor(self, coordinates: Array) -> Array:
        """Predictors of shape ``(num_rows,)`` for coordinates :math:`w` of shape ``(1, N)``."""
        return self.rows_of_unknowns.matvec(self.unknowns(coordinates))

    def pulled(self, of_rows: Array) -> Array:
        r""":math:`X^T \nu`, shape ``(N,)``, for numbers of shape ``(num_rows,)``."""
        rows = self.rows_of_unknowns
        return self.scale * sums_by_index(rows.values * of_rows[:, None], rows.columns, rows.num_columns)

    def unknowns(self, coordinates: Array) -> Array:
        """:math:`e` of shape ``(..., N)`` for ``w`` of shape ``(..., 1, N)``."""
        return self.scale * coordinates[..., 0, :]

    def inner(self, a: Array, b: Array) -> Array:
        return a[0] @ self._times_prior(b)

    def joint_gradient(self, coordinates: Array, slope: Array) -> Array:
        """Gradient of a log joint density at coordinates, both of shape ``(1, N)``, from the slopes of its factors."""
        return (self.pulled(slope) - self._times_prior(coordinates))[None]

    def _times_prior(self, coordinates: Array) -> Array:
        return multiply(self.layout.prior, self.precision[self.layout.prior_slots], coordinates[0])

    def zeros(self) -> Array:
        return jnp.zeros_like(self.scale)[None]

    @property
    def is_iterative(self) -> bool:
        """True if log volumes are estimates by probes, each as dear as many means."""
        return self.layout.elimination is not None

    @jax.jit  # traced once for all that condition
    def condition(
        self, site_precision: Array, site_shift: Array, held: SparseFactor | None = None, near: Array | None = None
    ) -> SparsePosterior:
        """Posterior under sites; see :meth:`.GaussianSpace.condition`.

        :param SparseFactor held: factor for these precisions, where it is at hand; see :meth:`.SparseFactor.held`.
        :param jax.Array near: coordinates near the mean, from which iterations start; factors need none.
        """
        pattern = self.layout.pattern
        # scales of entries and not of rows, whose products then have no derivative by them
        scales = self.scale[pattern.rows] * self.scale[pattern.columns]
        values = self.precision + scales * self.layout.gram(self.rows_of_unknowns, site_precision)
        if self.anchored.size:
            values = values.at[jnp.asarray(pattern.diagonal)[self.anchored]].add(self.anchors)
        shift = self.pulled(site_shift)
        number = self.directions.shape[1]
        if not number:
            factor, mean = self._factor_and_solution(values, shift, held, near)
            none, zero = jnp.zeros((shift.size, 0), shift.dtype), jnp.zeros((), shift.dtype)
            return SparsePosterior(self, site_precision, factor, shift, mean[None], none, none, none[:0], zero)
        root = jnp.sqrt(self.anchors)
        picked = jnp.zeros((shift.size, root.size), shift.dtype).at[self.anchored, jnp.arange(root.size)].set(root)
        sides = jnp.concatenate([shift[:, None], self.directions, picked], axis=1)
        factor, solved = self._factor_and_solution(values, sides, held)
        mean, along, anchored = solved[:, 0], solved[:, 1 : 1 + number], solved[:, 1 + number :]
        # the covariance without what is along the directions is inv(H) - removed removed^T
        along_root = cholesky(self.directions.T @ along)
        removed = solve_lower(along_root, along.T).T

        def conditioned(x: Array) -> Array:
            return x - removed @ solve_lower(along_root, self.directions.T @ x)

        half = half_log_determinant(along_root)
        mean = conditioned(mean[:, None])[:, 0]
        added = conditioned(anchored)
        if root.size:
            rest = jnp.eye(root.size, dtype=root.dtype) - root[:, None] * added[self.anchored]
            rest_root = cholesky(rest)
            half += half_log_determinant(rest_root)
            added = solve_lower(rest_root, added.T).T
            mean += added @ solve_lower(rest_root, (root * mean[self.anchored])[:, None])[:, 0]
        # rounding along the directions would be seen by rows that do not see it of the prior
        mean -= self.directions @ (self.directions.T @ mean)
        return SparsePosterior(self, site_precision, factor, shift, mean[None], removed, added, along_root, half)

    def _factor_and_solution(
        self, values: Array, sides: Array, held: SparseFactor | None, near: Array | None = None
    ) -> tuple[SparseFactor | KrylovFactor, Array]:
        """Factor of the precision of given entries, or one that is held, and solutions of its equations."""
        if held is not None:
            known = held.held(values)
            return known, known.solve(sides)
        if self.layout.elimination is None:
            return factorise_and_solve(self.layout.pattern, values, sides)
        iterated = KrylovFactor(values, self.layout.elimination)
        return iterated, iterated.solve(sides) if near is None else iterated.solve_near(sides, near[0])


@frozen_pytree
class SparsePosterior(ConditionedGaussian, _OnlyParallel):
    """The Gaussian of :meth:`SparseSpace.condition`.

    The covariance of :math:`w` is ``inv(H + c S S^T) - removed removed^T + added added^T``.
    """

    space: SparseSpace
    site_precision: Array
    """Shape ``(num_rows,)``."""
    factor: SparseFactor | KrylovFactor
    shift: Array
    r""":math:`X^T \nu`, shape ``(N,)``."""
    coordinates: Array
    """Mean of :math:`w`, shape ``(1, N)``."""
    removed: Array
    """Shape ``(N, k)``."""
    added: Array
    """Shape ``(N, m)``."""
    along_root: Array
    """Cholesky factor of the covariance along the directions before it was removed, shape ``(k, k)``."""
    half_along: Array
    """Contribution of the directions to half the log determinant of the posterior precision."""

    def unknowns(self) -> Array:
        return self.space.unknowns(self.coordinates)

    @jax.jit  # traced once for all that condition
    def marginals(self) -> Marginals:
        variance = self.row_variance()
        log_partition = 0.5 * self.shift @ self.coordinates[0] + self.log_volume()
        ratio = cavity_ratio(self.site_precision, variance)
        return Marginals(self.space.predictor(self.coordinates), variance, ratio, log_partition)

    def at_mode(self, coordinates: Array, site_shift: Array) -> SparsePosterior:
        """The same Gaussian about another mean, the mode of factors whose sites have these shifts."""
        shift = self.space.pulled(site_shift)
        return dataclasses.replace(self, coordinates=coordinates, shift=shift)

    def row_variance(self) -> Array:
        """Variances of the predictors, shape ``(num_rows,)``."""
        design = self.space.design
        return self._corrected(self.space.layout.quadratic(design, self._inverse), design)

    def log_volume(self) -> Array:
        r""":math:`\frac12 \log|P| - \frac12 \log|H|`, the precisions before and after conditioning on their supports,
        where :math:`|P|` counts :math:`2 \pi` for a flat direction."""
        return self.space.half_log_determinant - self.half_along - 0.5 * self.factor.log_determinant

    def estimated_log_volume(self) -> tuple[Array, Estimate]:
        """:meth:`log_volume` by probes, and how far it may be trusted."""
        assert isinstance(self.factor, KrylovFactor)  # as of all spaces that are iterative
        found = self.factor.estimate()
        return self.space.half_log_determinant - self.half_along - 0.5 * found.log_determinant, found

    def covariance_product(self, gradient: Array) -> Array:
        """Posterior covariance of the coordinates times a gradient in them; both of shape ``(1, size)``."""
        solved, x = self.factor.solve(gradient[0]), gradient[0]
        return (solved - self.removed @ (self.removed.T @ x) + self.added @ (self.added.T @ x))[None]

    def distance_to_mean(self, gradient: Array) -> tuple[Array, Array]:
        """Distance to the point where a gradient in the coordinates vanishes, in posterior standard deviations, and the
        relative residual of the solution that says so."""
        step = self.covariance_product(gradient)[0]
        assert isinstance(self.factor, KrylovFactor)  # as in :meth:`estimated_log_volume`
        left = gradient[0] - self.factor.multiply(step)
        size = jnp.linalg.norm(gradient)
        residual = jnp.linalg.norm(left) / jnp.where(size > 0.0, size, 1.0)
        return jnp.sqrt(jnp.maximum(gradient[0] @ step, 0.0)), residual

    def map_variance(self, design: Design) -> Array:
        """Posterior variance of ``J e`` for a design ``J``, shape ``(rows of J,)``.

        From the selected inverse where rows touch pairs of unknowns that rows of the model touch too, or that are
        neighbours; else by one solve for each row.
        """
        design = design.scale_columns(self.space.scale)
        if isinstance(design, DenseDesign) or design.columns.shape[1] ** 2 > self.space.scale.size:
            return self._variance_by_solves(design)
        first, second = row_pairs(design.columns.shape[1])
        inverse, pattern = self._inverse, self.space.layout.pattern
        if first.size == 1:  # the whole diagonal is in every pattern
            entries = inverse[jnp.asarray(pattern.diagonal)[design.columns]]
            return self._corrected(quadratic_of_pairs(design, jnp.where(design.values != 0, entries, 0.0)), design)
        i, j = design.columns[:, first], design.columns[:, second]
        slots, is_found = look_up(pattern, jnp.maximum(i, j), jnp.minimum(i, j))
        is_needed = (design.values[:, first] != 0) & (design.values[:, second] != 0)

        def selected() -> Array:
            entries = jnp.where(is_needed, inverse[slots], 0.0)
            return self._corrected(quadratic_of_pairs(design, entries), design)

        all_found = jnp.all(is_found | ~is_needed)
        return lax.cond(all_found, selected, lambda: self._variance_by_solves(design))

    def map_covariance(self, design: Design) -> Array:
        """Posterior covariance of ``J e`` for a design ``J``, shape ``(rows of J, rows of J)``, by solves.

        :raises ValueError: if there are too many rows for a matrix of all their pairs.
        """
        if design.num_rows > LARGEST_DENSE:
            raise ValueError(
                f"the joint covariance of {design.num_rows} quantities of a sparse field is not formed: variances "
                f"need none, and of up to {LARGEST_DENSE} quantities it is found by solves. Ask for fewer at once."
            )
        matrix = design.scale_columns(self.space.scale).to_dense()
        removed, added = matrix @ self.removed, matrix @ self.added
        return matrix @ self.factor.solve(matrix.T) - removed @ removed.T + added @ added.T

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Exact draws of the unknowns by a triangular solve, shape ``(num_samples, num_columns)``."""
        size = self.shift.size
        shapes = (size, num_samples), (self.added.shape[1], num_samples)
        noise, further = white_noise(rng_key, self.shift.dtype, *shapes)
        draws = self.factor.half_solve(noise)
        if self.removed.shape[1]:
            directions = self.space.directions
            along = solve_lower(self.along_root, directions.T @ draws)
            draws += jnp.hstack([self.removed, self.added]) @ jnp.vstack([-along, further])
            draws -= directions @ (directions.T @ draws)
        return self.space.unknowns((self.coordinates + draws.T)[:, None])

    def from_white(self, white: Array) -> Array:
        """Unknowns made of as many standard normal numbers, one to one; both of shape ``(num_columns,)``.

        :raises ValueError: of unknowns that are conditioned on sums of zero, which have fewer dimensions.
        """
        if self.removed.shape[1]:
            raise ValueError("Unknowns that add up to zero are not made of as many independent numbers.")
        return self.space.unknowns(self.coordinates + self.factor.half_solve(white))

    @functools.cached_property
    def _inverse(self) -> Array:
        """Entries of ``inv(H + c S S^T)`` at the pattern, computed once for all that is asked of one posterior."""
        return self.factor.selected_inverse()

    def _corrected(self, variance: Array, design: SparseRows | DenseDesign) -> Array:
        """Variances of rows, from those without the low-rank parts of the covariance."""
        rounding = _ROUNDING * jnp.finfo(variance.dtype).eps * variance
        for part, sign in ((self.removed, -1.0), (self.added, 1.0)):
            if part.shape[1]:
                variance = variance + sign * jnp.sum(design.matvec(part.T) ** 2, axis=0)
        if isinstance(self.factor, KrylovFactor) and isinstance(design, SparseRows):
            # no estimate is below the variance given all unknowns but one
            least = 1.0 / self.factor.values[self.space.layout.pattern.diagonal]
            squared = design.squared()
            variance = jnp.maximum(variance, jnp.max(squared.values * least[squared.columns], axis=1))
        # an island of one node is constrained to zero: what rounding leaves of its variance has either sign
        return jnp.where(jnp.abs(variance) < rounding, 0.0, variance) if self.removed.shape[1] else variance

    def over_rows(self, design: Design, function: Callable[..., object], *others: Array) -> Any:
        """Function of the covariances of quantities with all predictors, for some quantities at a time.

        :param Design design: of the quantities, ``R`` rows.
        :param function: of covariances ``(r, num_rows)``, and of the rows of ``others``, to arrays of ``r`` rows.
        :param others: arrays of ``R`` rows.
        :return: what the function returns, of ``R`` rows.

        Cost: a solve for each row, and memory for the covariances of 64 of them.
        """
        design = design.scale_columns(self.space.scale)

        def of(matrix: Array, rows: Array) -> Any:
            removed, added = (matrix @ part @ part.T for part in (self.removed, self.added))
            with_unknowns = self.factor.solve(matrix.T).T - removed + added
            of_rows = (other.at[rows].get(mode="clip") for other in others)
            return function(self.space.design.matvec(with_unknowns), *of_rows)

        return by_dense_rows(design, of)

    def _variance_by_solves(self, design: Design) -> Array:
        found = by_dense_rows(design, lambda matrix, _: jnp.sum(matrix * self.factor.solve(matrix.T).T, axis=1))
        return self._corrected(found, design)
