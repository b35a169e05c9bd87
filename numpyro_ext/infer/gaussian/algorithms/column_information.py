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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["Columns", "LogProbabilities", "second_derivatives"]


class Columns(NamedTuple):
    """Parameters of columns and blocks, as functions of hyperparameters."""

    slopes: tuple[Array, ...]
    """Slopes of the predictors of each family, shape ``(G,)`` each."""
    offsets: tuple[Array, ...]
    """Predictors at the node zero, shape ``(G,)`` each."""
    parameters: tuple[tuple[Array, ...], ...]
    """Other parameters of the factors of each family, shape ``(G, ...)`` each."""
    shift: Array
    """Location of each block, shape ``(B,)``."""
    variance: Array
    """Prior variance of each block, shape ``(B,)``."""


LogProbabilities = Callable[[Array, tuple[Array, ...]], Array]
"""Log probabilities ``(K, G, Q)`` of the outcomes of a family, from predictors ``(G, Q)`` and its parameters."""


class _Scores(NamedTuple):
    """Derivatives of the log probabilities of one family, by the predictor and by each parameter."""

    first: Array
    """Shape ``(K, Q, G, m)``."""
    second: Array
    """Shape ``(K, Q, G, m, m)``."""


def second_derivatives(
    columns_fn: Callable[[Array], Columns],
    values: Array,
    nodes: Array,
    weights: Array,
    labels: tuple[Array, ...],
    observed: tuple[Array, ...] | None,
    log_probabilities: tuple[LogProbabilities, ...],
    *,
    has_prior_parameters: bool,
    stride: int = 1,
) -> tuple[Array, Array]:
    """Second derivatives of the log evidence with respect to hyperparameters, as the sum of two arrays ``(d, d)``:
    those of complete data, and what is lost as unknowns are not known.

    :param columns_fn: parameters of the columns at hyperparameters.
    :param values: hyperparameters, unconstrained, shape ``(d,)``.
    :param nodes: shape ``(Q,)``.
    :param weights: posterior masses of the nodes, shape ``(B, Q)``.
    :param labels: outcomes of each family, shape ``(B, G)`` each.
    :param observed: masks of these, if there are gaps.
    :param log_probabilities: of the outcomes of each family.
    :param bool has_prior_parameters: whether locations and variances of blocks depend on hyperparameters.
    :param int stride: every how many-th block the second sum is estimated from.
    """
    columns = columns_fn(values)
    jacobian = jax.jacfwd(columns_fn)(values)
    parts = [_scores(columns, k, nodes, function) for k, function in enumerate(log_probabilities)]
    # derivatives of the parameters of columns: of the predictor at the node zero, by the node, and of the others
    level = [_flat(jacobian, k) for k in range(len(labels))]
    by_node = [jnp.zeros_like(j).at[:, 0].set(jacobian.slopes[k]) for k, j in enumerate(level)]
    total = jnp.zeros((values.size, values.size), values.dtype)
    linear = []
    for k, part in enumerate(parts):
        mask = jnp.ones_like(labels[k], weights.dtype) if observed is None else observed[k].astype(weights.dtype)
        is_outcome = (labels[k][:, None, :] == jnp.arange(part.first.shape[0])[:, None]) * mask[:, None, :]
        counts = jnp.einsum("bkg,bq->kqg", is_outcome, weights)
        bend = jnp.einsum("kqg,kqgij->qgij", counts, part.second)
        for power, (left, right) in enumerate(((level[k], level[k]), (level[k], by_node[k]), (by_node[k], by_node[k]))):
            moment = jnp.einsum("q,qgij->gij", nodes**power, bend)
            term = jnp.einsum("gid,gij,gje->de", left, moment, right)
            total += term + term.T if power == 1 else term
        slope = jnp.einsum("kqg,kqgi->qgi", counts, part.first)
        linear.append((jnp.sum(slope, axis=0), nodes @ slope[:, :, 0]))
    prior = _prior_scores(columns, nodes)
    prior_jacobian = jnp.stack([jacobian.shift, jacobian.variance], axis=1)  # (B, 2, d)
    if has_prior_parameters:
        bend = jnp.einsum("bq,bqij->bij", weights, prior.second)
        total += jnp.einsum("bid,bij,bje->de", prior_jacobian, bend, prior_jacobian)

    def held(x: Array) -> Array:
        """The expected log density as a linear function of the parameters of columns."""
        found, sum_ = columns_fn(x), jnp.zeros((), x.dtype)
        for k, (of_level, of_slope) in enumerate(linear):
            sum_ += jnp.sum(of_level * _level(found, k)) + jnp.sum(of_slope * found.slopes[k])
        if has_prior_parameters:
            slope = lax.stop_gradient(jnp.einsum("bq,bqi->bi", weights, prior.first))
            sum_ += jnp.sum(slope[:, 0] * found.shift + slope[:, 1] * found.variance)
        return sum_

    total += jax.hessian(held)(values)
    some = slice(None, None, stride)
    chosen = None
    if has_prior_parameters:
        chosen = _Scores(prior.first[some], prior.second[some])
    missing = _missing(
        parts,
        level,
        by_node,
        chosen,
        prior_jacobian[some],
        nodes,
        weights[some],
        tuple(label[some] for label in labels),
        None if observed is None else tuple(mask[some] for mask in observed),
    )
    return total, weights.shape[0] / weights[some].shape[0] * missing


def _missing(
    parts: list[_Scores],
    level: list[Array],
    by_node: list[Array],
    prior: _Scores | None,
    prior_jacobian: Array,
    nodes: Array,
    weights: Array,
    labels: tuple[Array, ...],
    observed: tuple[Array, ...] | None,
) -> Array:
    """Covariance of the derivatives under the posterior of each block, summed over blocks, shape ``(d, d)``."""
    size = level[0].shape[-1]
    flat_level, flat_node = (jnp.concatenate([j.reshape(-1, size) for j in of]) for of in (level, by_node))
    num_blocks, width = weights.shape[0], flat_level.shape[0]

    def scores_at(q: Array) -> Array:
        """Derivatives of the log density of each block at one node, by the parameters of columns, shape ``(B, Gm)``."""
        found = []
        for k, part in enumerate(parts):
            table = part.first[:, q]  # (K, G, m)
            score = jnp.broadcast_to(table[0], (num_blocks, *table.shape[1:]))
            for outcome in range(1, table.shape[0]):
                score = jnp.where((labels[k] == outcome)[:, :, None], table[outcome], score)
            if observed is not None:
                score = jnp.where(observed[k][:, :, None], score, 0.0)
            found.append(score.reshape(num_blocks, -1))
        return jnp.concatenate(found, axis=1)

    num_prior = 0 if prior is None else 2

    def step(carry: tuple[Array, ...], q: Array) -> tuple[tuple[Array, ...], None]:
        products, means, slopes, crossed = carry
        node, score, mass = nodes[q], scores_at(q), weights[:, q, None]
        weighted = mass * score
        product = weighted.T @ score
        products = products + jnp.stack([product, node * product, node**2 * product])
        means, slopes = means + weighted, slopes + node * weighted
        if prior is not None:
            of_prior = prior.first[:, q]  # (B, 2)
            cross = of_prior.T[:, :, None] * weighted
            crossed = crossed + jnp.stack([cross, node * cross])
        return (products, means, slopes, crossed), None

    zeros = jnp.zeros((num_blocks, width), weights.dtype)
    start: tuple[Array, ...] = (
        jnp.zeros((3, width, width), weights.dtype),
        zeros,
        zeros,
        jnp.zeros((2, num_prior, num_blocks, width), weights.dtype),
    )
    (products, means, slopes, crossed), _ = lax.scan(step, start, jnp.arange(nodes.size))
    cross = flat_level.T @ products[1] @ flat_node
    total = flat_level.T @ products[0] @ flat_level + cross + cross.T + flat_node.T @ products[2] @ flat_node
    mean = means @ flat_level + slopes @ flat_node
    if prior is not None:
        mean += jnp.einsum("bq,bqi,bid->bd", weights, prior.first, prior_jacobian)
        both = jnp.einsum("bq,bqi,bqj->bij", weights, prior.first, prior.first)
        total += jnp.einsum("bid,bij,bje->de", prior_jacobian, both, prior_jacobian)
        of_columns = crossed[0] @ flat_level + crossed[1] @ flat_node  # (2, B, d)
        term = jnp.einsum("ibd,bie->de", of_columns, prior_jacobian)
        total += term + term.T
    return total - mean.T @ mean


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
    eta = columns.slopes[k][:, None] * nodes + columns.offsets[k][:, None]
    parameters = columns.parameters[k]
    sizes = [math.prod(part.shape[1:]) for part in parameters]

    def moved(steps: Array) -> Array:
        """Log probabilities where the parameters of all columns have moved alike."""
        changed, start = [], 1
        for part, size in zip(parameters, sizes, strict=True):
            changed.append(part + steps[start : start + size].reshape(part.shape[1:]))
            start += size
        return log_probabilities(eta + steps[0], tuple(changed))

    zero = jnp.zeros((1 + sum(sizes),), eta.dtype)
    first = jax.jacfwd(moved)(zero)
    second = jax.jacfwd(jax.jacfwd(moved))(zero)
    return _Scores(jnp.swapaxes(first, 1, 2), jnp.swapaxes(second, 1, 2))


def _prior_scores(columns: Columns, nodes: Array) -> _Scores:
    """Derivatives of the log density of the prior at the nodes by location and variance, ``(B, Q, 2)``."""
    away = nodes - columns.shift[:, None]
    variance = columns.variance[:, None]
    first = jnp.stack([away / variance, 0.5 * (away**2 / variance - 1.0) / variance], axis=-1)
    mixed = -away / variance**2
    both = (0.5 - away**2 / variance) / variance**2
    rows = [[-1.0 / variance * jnp.ones_like(away), mixed], [mixed, both]]
    second = jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)
    return _Scores(first, second)
