r"""Quadrature of blocks of one unknown whose factors differ in their outcomes alone, on nodes that all blocks share.

The answers of people to the items of a test are of this kind. At ``Q`` nodes of the trait the log probabilities of the
``K`` outcomes of ``G`` items are a table of ``G K Q`` numbers, which is made once. The log likelihoods of all people at
all nodes are one product of a matrix of zeros and ones with this table, and the gradient is one more:

.. math:: \log p(y_b) = \log \int \exp\Big( \sum_{g, k} [y_{bg} = k] \log p_{gk}(\theta) \Big)
    N(\theta \mid \delta_b, v_b) \, d\theta

with a shift :math:`\delta_b` and a variance :math:`v_b` that may differ between blocks (latent regression). Two
unknowns have the same prior in all blocks, with any covariance :math:`L L^T`: nodes are those of
:math:`L^{-1} \theta`, and slopes are times :math:`L`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .....linalg.cholesky import cholesky
from .....linalg.gaussian.prior import CovariancePrior, DiagonalPrior
from .....structure.latent_gaussian import BlockKinds, LatentGaussian, MoreBlocks
from ..algorithm import Algorithm
from ..fit_info import FitInfo
from .block_nodes import BlockNodes, Grid, grid_of
from .column_factors import factors_of, has_rows, parameters_of, slopes_of, starts_of_families, weights_of
from .column_information import (
    Columns,
    LogProbabilities,
    Slopes,
    complete_derivatives,
    missing_derivatives,
    predictors,
)
from .column_sums import (
    LARGEST_CHUNK,
    Blocks,
    Expected,
    expected,
    expected_log_density,
    joint_log_density,
    kinds_of,
    log_sums,
    of_blocks,
    one_of_each_kind,
    total,
)
from .node_posterior import NodePosterior


class ColumnsOfFamily(NamedTuple):
    """Columns of one family of factors."""

    first: int
    """First column, among those of all families."""
    number: int
    num_outcomes: int


@dataclass(frozen=True)
class SharedColumns(Algorithm):
    """Quadrature on shared nodes, for forms of which :func:`find_shared_columns` says that they have them.

    :param int num_nodes: nodes, on each axis of blocks of two unknowns.
    :param families: columns of each family of factors.
    :param bool has_gaps: whether observations are masked.
    :param bool has_shift: whether the locations of the unknowns differ between blocks.
    :param bool has_prior_parameters: whether priors of the unknowns depend on hyperparameters.
    :param int num_kinds: blocks of ``form.kinds``, where equal ones are counted once, or more are like them.
    :param int largest_chunk: numbers of blocks at nodes that are held at a time.
    :param bool is_ragged: whether blocks have no rows in some columns.
    :param bool has_weights: whether factors have weights, by ``handlers.scale``.
    """

    num_nodes: int
    families: tuple[ColumnsOfFamily, ...]
    has_gaps: bool
    has_shift: bool
    has_prior_parameters: bool
    num_kinds: int | None = None
    largest_chunk: int = LARGEST_CHUNK
    is_ragged: bool = False
    has_weights: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"quadrature: {self.num_nodes} nodes an axis that all blocks share, one table for all factors of a column",
        )

    @property
    def is_exact_for_gaussian(self) -> bool:
        return True

    @property
    def sees_all_modes(self) -> bool:
        return True

    def init(self, form: LatentGaussian) -> Grid:
        return grid_of(*self._priors(form))

    def solve(self, form: LatentGaussian, state: Grid, *, num_steps: int, tol: float) -> tuple[Grid, FitInfo]:
        del state, tol
        grid = grid_of(*self._priors(form))
        trace = jnp.full((num_steps,), jnp.nan, form.offset.dtype)
        is_found = jnp.all(jnp.isfinite(grid.first) & jnp.isfinite(grid.last))
        zero = jnp.zeros((), form.offset.dtype)
        return grid, FitInfo(is_found, jnp.asarray(1, int), trace, zero, jnp.zeros((form.num_rows,), bool))

    def log_evidence(self, form: LatentGaussian, state: Grid) -> Array:
        return form.log_constant + total(form, self._log_sums(form, state, self.num_nodes)[:, 0])

    def solve_and_hold(
        self, form: LatentGaussian, state: Grid, *, num_steps: int, tol: float
    ) -> tuple[Grid, FitInfo, Expected]:
        """The grid, the evidence there, and what the gradient needs, so that this takes no more passes over blocks."""
        grid, info = self.solve(form, state, num_steps=num_steps, tol=tol)
        evidence, found = self._expected(form, grid)
        if not self.has_prior_parameters:
            found = found._replace(first=jnp.zeros((0,)), second=jnp.zeros((0,)))
        return grid, info._replace(objective=form.log_constant + total(form, evidence)), found

    solved_evidence = log_evidence

    def held_evidence(self, form: LatentGaussian, state: Grid, held: Expected) -> Array:
        """The log density of complete data as it is expected: its gradient is that of the log evidence."""
        value = form.log_constant + expected_log_density(self.tables(form, state.nodes(self.num_nodes)), held)
        if self.has_prior_parameters:
            shift, variance = self._priors(form)
            moved = shift - lax.stop_gradient(shift)
            square = held.second - 2.0 * moved * held.first + moved**2
            value -= 0.5 * total(form, square / variance + jnp.log(2.0 * jnp.pi * variance))
        return value

    def nodes_of(self, form: LatentGaussian) -> int:
        """Nodes of the form."""
        del form
        return self.num_nodes

    def block_log_evidence(self, form: LatentGaussian, state: Grid, num_nodes: int) -> Array:
        """Log evidence of each block, shape ``(B,)``, with any number of nodes."""
        return of_blocks(form, self._log_sums(form, state, num_nodes))[:, 0]

    def with_finer_rule(self, form: LatentGaussian, state: Grid) -> tuple[Array, Array]:
        """Log evidence of each block, shape ``(B,)``, by the rule and by a finer one: of blocks of one unknown with a
        node between any two."""
        if state.first.ndim:
            coarse, fine = (self.block_log_evidence(form, state, n) for n in (self.num_nodes, 3 * self.num_nodes // 2))
            return coarse, fine
        found = of_blocks(form, self._log_sums(form, state, 2 * self.num_nodes - 1, (2, 1)))
        return found[:, 0], found[:, 1]

    def posterior(self, form: LatentGaussian, state: Grid) -> NodePosterior:
        form = form if isinstance(form.kinds, BlockKinds) else form._replace(kinds=None)
        blocks, nodes = self.blocks(form), state.nodes(self.num_nodes, is_whole=True)
        terms = of_blocks(form, joint_log_density(self.tables(form, nodes), blocks, nodes))
        shift = of_blocks(form, blocks.shift.reshape(len(blocks.shift), -1))
        scale = jnp.broadcast_to(self._scale(form), (*shift.shape, shift.shape[1]))
        ones = jnp.ones_like(shift)
        lattices = BlockNodes(-shift, scale, state.first * ones, state.last * ones)
        return NodePosterior(form, lattices, terms.T, self.num_nodes)

    def _log_sums(self, form: LatentGaussian, state: Grid, num_nodes: int, strides: tuple[int, ...] = (1,)) -> Array:
        """Log evidence of each kind of blocks by every node, every second one, ...; see :func:`log_sums`."""
        nodes, log_step = state.nodes(num_nodes), state.log_step(num_nodes)
        return log_sums(self.tables(form, nodes), self.blocks(form), nodes, log_step, strides, self.largest_chunk)

    def _expected(self, form: LatentGaussian, state: Grid) -> tuple[Array, Expected]:
        nodes = state.nodes(self.num_nodes)
        log_step = state.log_step(self.num_nodes)
        return expected(self.tables(form, nodes), self.blocks(form), nodes, log_step, self.largest_chunk)

    # Parts of the form

    def columns(self, form: LatentGaussian) -> Columns:
        """Lines and other parameters of the columns, those of the first block, and priors of the blocks."""
        rows = self._first_rows(form)
        slope, offset = self._slopes(form), form.offset[rows]
        parts = [slice(family.first, family.first + family.number) for family in self.families]
        parameters = []
        for number, (part, potential) in enumerate(zip(parts, factors_of(form), strict=True)):
            own = rows[part] - starts_of_families(form)[number]
            parameters.append(tuple(_at_rows(potential, own).values()))
        slopes, offsets = tuple(slope[part] for part in parts), tuple(offset[part] for part in parts)
        return Columns(slopes, offsets, tuple(parameters), *self._own_priors(form))

    def log_probabilities(self, form: LatentGaussian) -> tuple[LogProbabilities, ...]:
        """Log probabilities of the outcomes of each family as functions of predictors and parameters."""
        families = zip(factors_of(form), self.families, strict=True)
        return tuple(partial(_log_probabilities, potential, family.num_outcomes) for potential, family in families)

    def tables(self, form: LatentGaussian, nodes: Array) -> tuple[Array, ...]:
        """Log probabilities of the outcomes of each family, shape ``(K, G, Q)`` each."""
        columns, found = self.columns(form), []
        for number, function in enumerate(self.log_probabilities(form)):
            eta = predictors(columns, number, nodes)
            table = function(eta, columns.parameters[number])
            # zero times minus infinity is not a number
            found.append(jnp.maximum(table, 0.25 * jnp.finfo(table.dtype).min))
        return tuple(found)

    def numbers_in_evaluation(self, form: LatentGaussian) -> int:
        num_indicators = sum(family.number * (family.num_outcomes - 1) for family in self.families)
        return (self.num_kinds or form.blocks.rows.shape[0]) * (self.num_nodes + num_indicators)

    @property
    def has_second_derivatives(self) -> bool:
        return True

    def complete_derivatives(
        self, form_fn: Callable[[Array], LatentGaussian], values: Array, state: Grid, held: Expected
    ) -> tuple[Array, Slopes]:
        form = form_fn(values)
        kinds = kinds_of(form)
        # where locations differ, they are made of the predictors of all blocks in all columns
        num_rows = one_of_each_kind(form, form.blocks.rows).size
        return complete_derivatives(
            lambda x: self.columns(form_fn(x)),
            values,
            state.nodes(self.num_nodes),
            None if kinds is None else kinds.number,
            held,
            self.log_probabilities(form),
            _weights(form),
            has_prior_parameters=self.has_prior_parameters,
            num_directions=self.largest_chunk // num_rows,
        )

    def missing_derivatives(
        self, form: LatentGaussian, state: Grid, held: Expected, slopes: Slopes, *, is_rough: bool | Array
    ) -> Array:
        del held
        nodes = state.nodes(self.num_nodes)
        tables, blocks = self.tables(form, nodes), self.blocks(form)
        return missing_derivatives(slopes, nodes, self.num_nodes, tables, blocks, _weights(form), is_rough=is_rough)

    def blocks(self, form: LatentGaussian) -> Blocks:
        """Outcomes and priors of all blocks, or of one of each kind."""
        if isinstance(form.kinds, MoreBlocks):
            return Blocks(form.kinds.labels, form.kinds.observed, *self._priors(form))
        counted = self._counted(form) if self.has_gaps or self.has_weights else None
        kinds = kinds_of(form)
        return Blocks(self._labels(form), counted, *self._priors(form), None if kinds is None else kinds.number)

    def _labels(self, form: LatentGaussian) -> tuple[Array, ...]:
        """Outcomes of each family, shape ``(B, G)`` each."""
        found = []
        factors = factors_of(form)
        for number, family in enumerate(self.families):
            potential = factors[number]
            outcomes = potential.outcomes()
            assert outcomes is not None  # as the families were found by
            size = form.observed[number].shape[0]
            values = jnp.broadcast_to(jnp.asarray(getattr(potential, outcomes.field)), (size,))
            found.append(values[self._rows(form, number, family)].astype(int))
        return tuple(found)

    def _counted(self, form: LatentGaussian) -> tuple[Array, ...]:
        """Masks of the outcomes of each family, or their weights, which are zero at gaps, shape ``(B, G)`` each."""
        found, weights = [], weights_of(form)
        for number, family in enumerate(self.families):
            rows = self._rows(form, number, family)
            observed = form.observed[number]
            # padding is past the end of all families
            counted = observed[rows] & (rows < form.num_rows - starts_of_families(form)[number])
            if self.has_weights:
                weight = jnp.broadcast_to(jnp.asarray(weights[number], form.offset.dtype), observed.shape)
                counted = jnp.where(counted, weight[rows], 0.0)
            found.append(counted)
        return tuple(found)

    def _first_rows(self, form: LatentGaussian) -> Array:
        """A row of each column, those of the first block where it has all, shape ``(P,)``."""
        return jnp.min(form.blocks.rows, axis=0) if self.is_ragged else form.blocks.rows[0]

    def _rows(self, form: LatentGaussian, number: int, family: ColumnsOfFamily) -> Array:
        part = slice(family.first, family.first + family.number)
        return one_of_each_kind(form, form.blocks.rows)[:, part] - starts_of_families(form)[number]

    def _slopes(self, form: LatentGaussian) -> Array:
        """Derivatives of the predictors of the first block by the coordinates of the nodes, shape ``(P, D)``."""
        found: Array = slopes_of(form.design, self._first_rows(form)[None], form.blocks.columns[:1], jnp)[
            0
        ] @ self._scale(form)
        return found

    def _scale(self, form: LatentGaussian) -> Array:
        """Derivatives of the unknowns of a block by the coordinates of the nodes, shape ``(D, D)``."""
        columns = form.blocks.columns[0]
        if columns.size == 1:
            return jnp.ones((1, 1), form.offset.dtype)
        if isinstance(form.prior[0], CovariancePrior):
            return cholesky(form.prior[0].covariance[0])
        return jnp.diag(jnp.sqrt(jnp.concatenate([variance_of(block) for block in form.prior])[columns]))

    def _priors(self, form: LatentGaussian) -> tuple[Array, Array]:
        """Location and variance of the coordinates of each block, shapes ``(B,)``; of two unknowns ``(B, D)``."""
        shift, variance = self._own_priors(form)
        if not isinstance(form.kinds, MoreBlocks):
            return shift, variance
        weights = form.kinds.weights
        if weights is not None:
            return weights @ shift, weights @ variance
        shape = (form.kinds.size, *shift.shape[1:])
        return jnp.broadcast_to(shift, shape), jnp.broadcast_to(variance, shape)

    def _own_priors(self, form: LatentGaussian) -> tuple[Array, Array]:
        """The same of the blocks of the form, of those alone that more blocks are sums of."""
        columns, rows = one_of_each_kind(form, form.blocks.columns), one_of_each_kind(form, form.blocks.rows)
        if isinstance(form.kinds, MoreBlocks):
            number = 1 if form.kinds.weights is None else form.kinds.weights.shape[1]
            columns, rows = columns[:number], rows[:number]
        if columns.shape[1] > 1:
            return jnp.zeros(columns.shape, form.offset.dtype), jnp.ones(columns.shape, form.offset.dtype)
        variance = jnp.concatenate([variance_of(block) for block in form.prior])[columns[:, 0]]
        if not self.has_shift:
            return jnp.zeros_like(variance), variance
        slope, offset = self._slopes(form)[:, 0], form.offset[form.blocks.rows[0]]
        away = (form.offset[rows] - offset) @ slope
        square = jnp.sum(slope**2)
        return away / jnp.where(square > 0.0, square, 1.0), variance


def _weights(form: LatentGaussian) -> Array | None:
    """Weights of the priors of the first blocks in those of more blocks, if the form has such."""
    return form.kinds.weights if isinstance(form.kinds, MoreBlocks) else None


def variance_of(block: Any) -> Array:
    """Variances of the unknowns of a prior block, which is diagonal."""
    assert isinstance(block, DiagonalPrior)  # as find_shared_columns has seen to
    return block.variance


def _log_probabilities(potential: Any, num_outcomes: int, eta: Array, parameters: tuple[Array, ...]) -> Array:
    """Log probability of each outcome of the factors of some columns, shape ``(K, G, Q)``.

    :param potential: the factors of all rows.
    :param int num_outcomes: how many.
    :param eta: predictors, shape ``(G, Q)``.
    :param parameters: of the columns, in the order of the fields.
    """
    field = potential.outcomes().field
    labels = jnp.zeros(eta.shape[:1], jnp.asarray(getattr(potential, field)).dtype)
    changes = dict(zip(parameters_of(potential), parameters, strict=True))
    return _table(dataclasses.replace(potential, **changes, **{field: labels}), eta, num_outcomes)


@partial(jax.jit, static_argnums=2)  # traced once for all programs
def _table(factors: Any, eta: Array, num_outcomes: int) -> Array:
    """Log probability of each outcome of factors that have some other one, shape ``(K, G, Q)``."""
    field = factors.outcomes().field

    def of(outcome: Array) -> Array:
        label = jnp.full_like(getattr(factors, field), outcome)
        return jax.vmap(dataclasses.replace(factors, **{field: label}).log_density, in_axes=1, out_axes=1)(eta)

    return jax.vmap(of)(jnp.arange(num_outcomes))


def _at_rows(potential: object, rows: Array) -> dict[str, Array]:
    """Parameters of the factors of some rows, each with the rows as its first axis, by name."""
    found = {}
    for name, value in parameters_of(potential).items():
        of_each = has_rows(potential, value)
        found[name] = value[rows] if of_each else jnp.broadcast_to(value, (rows.shape[0], *value.shape))
    return found
