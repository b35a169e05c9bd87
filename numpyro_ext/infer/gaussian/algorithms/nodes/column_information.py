r"""Second derivatives of the evidence of shared columns, without differences (Louis 1982).

The log evidence of a block is the logarithm of a sum over nodes. With :math:`u_{bq}` the derivative of the log density
of a block and its data at a node, and :math:`w_{bq}` the posterior mass of the node, the second derivatives are

.. math:: \sum_{b, q} w_{bq} \nabla^2 \log p(y_b, \theta_q)
    + \sum_b \Big( \sum_q w_{bq} u_{bq} u_{bq}^T - \bar u_b \bar u_b^T \Big).

The first sum is that of complete data: with the unknowns known, columns are regressions of their own. It is negative
definite for the usual likelihoods, and a metric for a search. The second is what the data lose as unknowns are not
known. Derivatives are taken of what a column is made of, its line :math:`\eta = \alpha + \beta \theta` and the other
parameters of its factors, and carried over to the hyperparameters: no array is as large as blocks times columns times
hyperparameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .block_nodes import inner_lattice
from .column_sums import Blocks, Expected, joint_log_density, leaning_of, outcomes_of

_BLOCKS_AT_A_TIME = 250
"""Blocks whose second moments are summed at a time; as many are a sample of all for a rough estimate."""
_NO_MASS = 1e-14
"""Posterior mass at which a node is left out of second moments."""


class Columns(NamedTuple):
    """Parameters of columns and blocks, as functions of hyperparameters."""

    slopes: tuple[Array, ...]
    """Slopes of the predictors of each family, shape ``(G, D)`` each."""
    offsets: tuple[Array, ...]
    """Predictors at the node zero, shape ``(G,)`` each."""
    parameters: tuple[tuple[Array, ...], ...]
    """Other parameters of the factors of each family, shape ``(G, ...)`` each."""
    shift: Array
    """Location of each block, shape ``(B,)``, or ``(B, D)``; of the first ``r`` where others are sums of these."""
    variance: Array
    """Prior variance of each block, like it."""


LogProbabilities = Callable[[Array, tuple[Array, ...]], Array]
"""Log probabilities ``(K, G, Q)`` of the outcomes of a family, from predictors ``(G, Q)`` and its parameters."""


class _Scores(NamedTuple):
    """Derivatives of the log probabilities of one family, by the predictor and by each parameter; or of priors."""

    first: Array
    """Shape ``(K, Q, G, m)``."""
    second: Array
    """Shape ``(K, Q, G, m, m)``."""


class Slopes(NamedTuple):
    """First derivatives of the log density of a block and its data, as the second sum is made of them."""

    tables: list[Array]
    """Derivatives of the log probabilities of each family by the parameters of columns, shape ``(K, Q, G, m)`` each."""
    by_all: list[Array]
    """Derivatives of the parameters of columns by hyperparameters, and what each coordinate of the node adds to them,
    shape ``(Gm, d)`` each."""
    prior: Array | None
    """Derivatives of location and variance of each block by hyperparameters, where they depend on these, shape
    ``(B, 2, d)``, or those of the first, ``(r, 2, d)``, of which others are sums."""


def complete_derivatives(
    columns_fn: Callable[[Array], Columns],
    values: Array,
    nodes: Array,
    number: Array | None,
    found: Expected,
    log_probabilities: tuple[LogProbabilities, ...],
    weights: Array | None,
    *,
    has_prior_parameters: bool,
    num_directions: int,
) -> tuple[Array, Slopes]:
    """The first of the two sums, that of complete data, shape ``(d, d)``, and first derivatives for the second.

    :param columns_fn: parameters of the columns at hyperparameters.
    :param values: hyperparameters, unconstrained, shape ``(d,)``.
    :param nodes: shape ``(Q,)``, or ``(Q, D)``.
    :param number: how many blocks each stands for, as in :class:`Blocks`.
    :param Expected found: what is expected of complete data.
    :param log_probabilities: of the outcomes of each family.
    :param weights: of the priors of the first blocks in those of each block, shape ``(B, r)``; ``None`` if the columns
        have those of all.
    :param bool has_prior_parameters: whether locations and variances of blocks depend on hyperparameters.
    :param int num_directions: directions in which derivatives are taken at once, or one at least.
    """
    columns, powers = columns_fn(values), _powers(nodes)
    parts = [_scores(columns, k, nodes, function) for k, function in enumerate(log_probabilities)]
    prior = None
    if has_prior_parameters:
        variance = columns.variance if weights is None else weights @ columns.variance
        prior = _expected_prior_scores(variance, found, number)
        of_own = prior.first if weights is None else weights.T @ prior.first
    bends, linear = [], []
    for k, part in enumerate(parts):
        outcomes = found.outcomes[k].reshape(-1, part.first.shape[2], len(nodes)).swapaxes(1, 2)  # (K - 1, Q, G)
        # the first outcome is what all others are counted from
        counts = jnp.concatenate([found.answers[k].T[None] - jnp.sum(outcomes, axis=0), outcomes])
        bends.append(jnp.einsum("kqg,kqgij->qgij", counts, part.second))
        slope = jnp.einsum("kqg,kqgi->qgi", counts, part.first)
        linear.append((jnp.sum(slope, axis=0), slope[:, :, 0].T @ powers[:, 1:]))

    def held(x: Array) -> Array:
        """The expected log density as a linear function of the parameters of columns."""
        moved, sum_ = columns_fn(x), jnp.zeros((), x.dtype)
        for k, (of_level, of_slope) in enumerate(linear):
            sum_ += jnp.sum(of_level * _level(moved, k)) + jnp.sum(of_slope * moved.slopes[k])
        if prior is not None:
            sum_ += jnp.sum(of_own[:, 0] * moved.shift + of_own[:, 1] * moved.variance)
        return sum_

    total, jacobian = _jacobian(lambda x: (jax.grad(held)(x), columns_fn(x)), values, num_directions)
    # derivatives of the parameters of columns: of the predictor at the node zero, by the node, and of the others
    level = [_flat(jacobian, k) for k in range(len(parts))]
    by_power = [
        [j, *(jnp.zeros_like(j).at[:, 0].set(jacobian.slopes[k][:, axis]) for axis in range(powers.shape[1] - 1))]
        for k, j in enumerate(level)
    ]
    for k, bend in enumerate(bends):
        for a, b in _pairs(powers):
            moment = jnp.einsum("q,qgij->gij", powers[:, a] * powers[:, b], bend)
            term = jnp.einsum("gid,gij,gje->de", by_power[k][a], moment, by_power[k][b])
            total += term if a == b else term + term.T
    prior_jacobian = None
    if prior is not None:
        prior_jacobian = jnp.stack([jacobian.shift, jacobian.variance], axis=1)  # (B, 2, d)
        if weights is None:
            total += jnp.einsum("bid,bij,bje->de", prior_jacobian, prior.second, prior_jacobian)
        else:
            second = jnp.einsum("br,bij,bs->risj", weights, prior.second, weights)
            total += jnp.einsum("rid,risj,sje->de", prior_jacobian, second, prior_jacobian)
    by_all = [jnp.concatenate([j.reshape(-1, values.size) for j in of]) for of in zip(*by_power, strict=True)]
    return total, Slopes([part.first for part in parts], by_all, prior_jacobian)


def missing_derivatives(
    slopes: Slopes,
    nodes: Array,
    num_nodes: int,
    tables: tuple[Array, ...],
    blocks: Blocks,
    weights: Array | None,
    *,
    is_rough: bool | Array,
) -> Array:
    """The second of the two sums, what is lost as unknowns are not known, shape ``(d, d)``.

    :param Slopes slopes: from :func:`complete_derivatives`.
    :param nodes: shape ``(Q,)``, or ``(Q, D)``.
    :param int num_nodes: nodes of each axis.
    :param tables: log probabilities of the outcomes of each family, shape ``(K, G, Q)`` each.
    :param Blocks blocks: the blocks.
    :param weights: as for :func:`complete_derivatives`.
    :param is_rough: whether it is estimated from a few hundred blocks, at every second node of each axis.
    """
    places_on_axis = np.rint(inner_lattice(num_nodes, _powers(nodes).shape[1] - 1) * (num_nodes - 1)).astype(int)
    is_left_out = is_rough & np.any((places_on_axis - num_nodes // 2) % 2, axis=1)
    counts = jnp.ones((len(blocks.shift),), nodes.dtype) if blocks.number is None else blocks.number

    def with_masses(places: Array, number: Array) -> _Blocks:
        own: Blocks = jax.tree.map(lambda x: x[places], blocks)
        own_jacobian = slopes.prior
        if own_jacobian is not None:
            if weights is None:
                own_jacobian = own_jacobian[places]
            else:
                own_jacobian = jnp.einsum("br,rid->bid", weights[places], own_jacobian)
        terms = jnp.where(is_left_out, -jnp.inf, joint_log_density(tables, own, nodes))
        masses = jax.nn.softmax(terms, axis=1) * number[:, None]
        first = None if own_jacobian is None else _prior_slopes(nodes - own.shift[:, None], own.variance[:, None])
        return _Blocks(masses, number, own.labels, own.counted, first, own_jacobian)

    leaning = leaning_of(tables, blocks, nodes, num_nodes)
    return _missing(with_masses, leaning, counts, slopes.tables, slopes.by_all, _powers(nodes), is_rough)


def _jacobian(function: Callable[[Array], Any], values: Array, at_a_time: int) -> Any:
    """Derivatives on the last axis, in so many directions at a time, or at least in one."""
    if at_a_time >= values.size:
        return jax.jacfwd(function)(values)
    _, push = jax.linearize(function, values)
    found = lax.map(push, jnp.eye(values.size, dtype=values.dtype), batch_size=max(1, at_a_time))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), found)


class _Blocks(NamedTuple):
    """Arrays with a row for each of some blocks."""

    weights: Array
    """Posterior masses of the nodes, times the number of blocks that each stands for, shape ``(B, Q)``."""
    number: Array
    """This number, shape ``(B,)``."""
    labels: tuple[Array, ...]
    counted: tuple[Array, ...] | None
    prior: Array | None
    """Derivatives of the log density of the prior at the nodes, by location and variance, shape ``(B, Q, 2)``."""
    prior_jacobian: Array | None
    """Derivatives of location and variance by hyperparameters, shape ``(B, 2, d)``."""


def _missing(
    with_masses: Callable[[Array, Array], _Blocks],
    leaning: Array,
    counts: Array,
    tables: list[Array],
    by_all: list[Array],
    powers: Array,
    is_rough: bool | Array,
) -> Array:
    """Covariance of the derivatives under the posterior of each block, summed over blocks, shape ``(d, d)``.

    Blocks are taken nearly in the order of their posterior means, some hundred at a time: most nodes have no mass in
    any of these, and are left out.

    :param with_masses: from places of blocks and how many each stands for to these blocks.
    :param leaning: what blocks are ordered by, shape ``(B,)``.
    :param counts: how many each of them stands for, shape ``(B,)``.
    :param tables: derivatives of the log probabilities of each family, shape ``(K, Q, G, m)`` each.
    :param by_all: derivatives of the parameters of columns by hyperparameters, and what each coordinate of the node
        adds to them, shape ``(Gm, d)`` each.
    :param powers: one and the coordinates of the nodes, shape ``(Q, 1 + D)``.
    """
    number = leaning.size
    size = min(number, _BLOCKS_AT_A_TIME)
    num_chunks = -(-number // size)
    order = jnp.concatenate([jnp.argsort(leaning), jnp.full((num_chunks * size - number,), number)])
    order = order.reshape(num_chunks, size)
    spread = np.arange(size) * (number // size)  # a sample of all
    order = order.at[0].set(jnp.where(is_rough, spread, order[0]))
    of_outcome, is_apart = _outcomes_apart(tables)

    def chunk(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        places = order[index]
        # one past the end is the last block, which counts nothing then
        places = jnp.minimum(places, number - 1)
        own = with_masses(places, jnp.where(order[index] < number, counts[places], 0.0))
        products, lost = _products(tables, by_all, powers, own, of_outcome, is_apart)
        return carry[0] + products, carry[1] + lost

    width, dimension = by_all[0].shape
    dtype = powers.dtype
    start = jnp.zeros((len(_pairs(powers)), width, width), dtype), jnp.zeros((dimension, dimension), dtype)
    count = jnp.where(is_rough, 1, num_chunks)
    products, lost = lax.fori_loop(0, count, chunk, start)
    total = lost
    for (a, b), product in zip(_pairs(powers), products, strict=True):
        term = by_all[a].T @ product @ by_all[b]
        total += term if a == b else term + term.T
    return jnp.where(is_rough, jnp.sum(counts) / jnp.sum(counts[spread]), 1.0) * total


def _outcomes_apart(tables: list[Array]) -> tuple[list[Array], Array]:
    """Terms that each outcome adds to the derivatives of the first, shape ``(K, G, m)`` for each family, and whether
    they are the same at all nodes, as in exponential families with natural parameters linear in those of columns."""
    added = [table - table[:1] for table in tables]
    middle = [each[:, each.shape[1] // 2] for each in added]
    rounding = 16.0 * jnp.finfo(tables[0].dtype).eps
    pairs = [(each, at[:, None]) for each, at in zip(added, middle, strict=True)]
    is_apart = [jnp.all(jnp.abs(each - at) <= rounding * jnp.maximum(1.0, jnp.abs(at))) for each, at in pairs]
    return middle, jnp.all(jnp.stack(is_apart))


def _products(
    tables: list[Array], by_all: list[Array], powers: Array, blocks: _Blocks, of_outcome: list[Array], is_apart: Array
) -> tuple[Array, Array]:
    """Sums over some blocks: second moments of the derivatives by the parameters of columns, times products of two
    powers, ``(..., Gm, Gm)``, and what is to be added to these in the coordinates of hyperparameters, ``(d, d)``.

    Where outcomes add the same at all nodes (``is_apart``) and all are seen, the sums over blocks come first.
    """
    weights, (width, dimension) = blocks.weights, by_all[0].shape

    def of_outcomes(values: list[Array]) -> Array:
        return outcomes_of(values, blocks.labels, blocks.counted, len(weights))

    def step(q: Array, products: Array) -> Array:
        score = of_outcomes([table[:, q, None] for table in tables])
        product = (weights[:, q, None] * score).T @ score
        return products + jnp.stack([powers[q, a] * powers[q, b] * product for a, b in _pairs(powers)])

    def in_sum(masses: Array) -> Array:
        """Sum over nodes of the derivatives by hyperparameters with other masses, shape ``(B, d)``."""
        total = jnp.zeros((len(masses), dimension), masses.dtype)
        for a, by in enumerate(by_all):
            sums = [jnp.einsum("bq,kqgm->kbgm", masses * powers[:, a], table) for table in tables]
            total += of_outcomes(sums) @ by
        return total

    def node_by_node() -> Array:
        has_mass = jnp.any(weights > _NO_MASS, axis=0)
        last = has_mass.size - jnp.argmax(has_mass[::-1])
        start = jnp.zeros((len(_pairs(powers)), width, width), weights.dtype)

        def next_node(q: Array, found: Array) -> Array:
            return lax.cond(has_mass[q], step, lambda _, same: same, q, found)

        return lax.fori_loop(jnp.argmax(has_mass), last, next_node, start)

    def blocks_first() -> Array:
        own = of_outcomes([each[:, None] for each in of_outcome])  # (B, Gm)
        first = jnp.concatenate([table[0].reshape(len(powers), -1) for table in tables], axis=1)  # (Q, Gm)
        by_node = own.T @ weights + 0.5 * jnp.sum(weights, axis=0) * first.T
        found = []
        for a, b in _pairs(powers):
            power = powers[:, a] * powers[:, b]
            mixed = (by_node * power) @ first
            found.append(own.T @ ((weights @ power)[:, None] * own) + mixed + mixed.T)
        return jnp.stack(found)

    products = node_by_node() if blocks.counted is not None else lax.cond(is_apart, blocks_first, node_by_node)
    mean = in_sum(weights)
    lost = jnp.zeros((dimension, dimension), weights.dtype)
    if blocks.prior is not None and blocks.prior_jacobian is not None:
        mean += jnp.einsum("bq,bqi,bid->bd", weights, blocks.prior, blocks.prior_jacobian)
        both = jnp.einsum("bq,bqi,bqj->bij", weights, blocks.prior, blocks.prior)
        lost += jnp.einsum("bid,bij,bje->de", blocks.prior_jacobian, both, blocks.prior_jacobian)
        of_columns = jnp.stack([in_sum(weights * blocks.prior[:, :, i]) for i in range(2)])  # (2, B, d)
        term = jnp.einsum("ibd,bie->de", of_columns, blocks.prior_jacobian)
        lost += term + term.T
    return products, lost - mean.T @ (mean / jnp.maximum(blocks.number, 1.0)[:, None])


def predictors(columns: Columns, k: int, nodes: Array) -> Array:
    """Predictors of the columns of a family at the nodes, shape ``(G, Q)``."""
    return columns.slopes[k] @ nodes.reshape(len(nodes), -1).T + columns.offsets[k][:, None]


def _powers(nodes: Array) -> Array:
    """One and the coordinates of each node, shape ``(Q, 1 + D)``."""
    return jnp.concatenate([jnp.ones((len(nodes), 1), nodes.dtype), nodes.reshape(len(nodes), -1)], axis=1)


def _pairs(powers: Array) -> list[tuple[int, int]]:
    """Pairs of powers in the order of their products."""
    return [(a, b) for a in range(powers.shape[1]) for b in range(a, powers.shape[1])]


def _level(columns: Columns, k: int) -> Array:
    """Offset and parameters of each column of a family, shape ``(G, m)``."""
    offset = columns.offsets[k]
    return jnp.concatenate([part.reshape(offset.shape[0], -1) for part in (offset, *columns.parameters[k])], axis=1)


def _flat(jacobian: Columns, k: int) -> Array:
    """Derivatives of :func:`_level`, shape ``(G, m, d)``."""
    offset = jacobian.offsets[k]
    parts = (offset, *jacobian.parameters[k])
    return jnp.concatenate([part.reshape(offset.shape[0], -1, offset.shape[-1]) for part in parts], axis=1)


def _scores(columns: Columns, k: int, nodes: Array, log_probabilities: LogProbabilities) -> _Scores:
    eta = predictors(columns, k, nodes)
    parameters = columns.parameters[k]
    sizes = [math.prod(part.shape[1:]) for part in parameters]

    def moved(steps: Array) -> Array:
        """Log probabilities where the parameters of all columns have moved alike."""
        changed, start = [], 1
        for part, size in zip(parameters, sizes, strict=True):
            changed.append(part + steps[start : start + size].reshape(part.shape[1:]))
            start += size
        return log_probabilities(eta + steps[0], tuple(changed))

    def once(steps: Array) -> tuple[Array, Array]:
        found = jax.jacfwd(moved)(steps)
        return found, found

    second, first = jax.jacfwd(once, has_aux=True)(jnp.zeros((1 + sum(sizes),), eta.dtype))
    return _Scores(jnp.swapaxes(first, 1, 2), jnp.swapaxes(second, 1, 2))


def _prior_slopes(away: Array, variance: Array) -> Array:
    """Derivatives of the log density of the prior by location and variance, at distances from the location."""
    return jnp.stack([away / variance, 0.5 * (away**2 / variance - 1.0) / variance], axis=-1)


def _expected_prior_scores(variance: Array, found: Expected, number: Array | None) -> _Scores:
    """The same as they are expected, ``(B, 2)``, and second derivatives, ``(B, 2, 2)``, times the number of blocks."""
    first = [found.first / variance, 0.5 * (found.second / variance - 1.0) / variance]
    mixed = -found.first / variance**2
    rows = [[-1.0 / variance, mixed], [mixed, (0.5 - found.second / variance) / variance**2]]
    second = jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)
    counts = jnp.ones_like(found.first) if number is None else number
    return _Scores(jnp.stack(first, axis=-1) * counts[:, None], second * counts[:, None, None])
