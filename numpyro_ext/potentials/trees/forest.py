r"""Two-state Markov trees: sums and marginals over all assignments of a forest in linear time, in the log domain.

Each node of a forest has a state, 0 ("low") or 1 ("high"). With :math:`\ell_{j}(d)` the log evidence of node :math:`j`
in state :math:`d` and :math:`\rho(j)` its parent, the partition function is

.. math::
    Z = \sum_\delta \prod_{j \text{ root}} P_j(\delta_j) \prod_{j \text{ not root}} P_j(\delta_j \mid \delta_{\rho(j)})
        \prod_j e^{\ell_j(\delta_j)}.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ...linalg.frozen_pytree import frozen_pytree
from ...linalg.saved_names import saved_as


@saved_as("Level")
class Level(NamedTuple):
    """Nodes of one depth, in the order by depth, where siblings stand together."""

    size: int
    num_parents: int
    """Nodes on the level above that have children, if these stand before the others; else the size of that level."""
    num_children: int
    """Number of children of each of these; zero if not all have as many or do not stand before the others."""


@saved_as("Forest")
@frozen_pytree
class Forest:
    """Rooted trees over ``num_nodes`` nodes, each of which belongs to a group that shares parameters.

    Made by :meth:`from_parents` or :func:`wavelet_forest`. The nodes keep the numbers that the user gave them; beside
    these the forest holds an order by depth, in which all the work on one depth is one vectorised operation.
    """

    parents: Array
    """Parent of each node, -1 for roots. Shape ``(num_nodes,)``."""
    groups: Array
    """Group of each node. Shape ``(num_nodes,)``."""
    order: Array
    """Node at each position of the order by depth."""
    positions: Array
    """Position of each node in the order by depth."""
    parents_in_order: Array
    """Position of the parent *within its level*, for each position; -1 for roots."""
    num_groups: int = dataclasses.field(metadata={"static": True})
    levels: tuple[Level, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_parents(cls, parents: ArrayLike, groups: ArrayLike | None = None) -> Forest:
        """Forest of a parent array, in which the nodes may stand in any order.

        Cost: linear in the number of nodes but for sorting. An operation on the forest is compiled level by level, so
        that very deep trees (hundreds of levels) take long to compile.

        :param ArrayLike parents: parent of each node, -1 for roots. Integers of shape ``(num_nodes,)``.
        :param ArrayLike groups: index of the group of each node, from 0. Default: the depth (0 for roots).
        :return: the forest.
        :raises ValueError: if a parent is not a node, or if following the parents leads round in a circle.

        **Example:**

        >>> forest = Forest.from_parents([-1, 0, 0, 1])
        >>> forest.num_nodes, forest.num_levels
        (4, 3)
        """
        parents = _concrete_integers(parents, "parents")
        num_nodes = parents.size
        if num_nodes == 0:
            raise ValueError("A forest needs at least one node; the parent array is empty.")
        wrong = np.flatnonzero((parents < -1) | (parents >= num_nodes))
        if wrong.size:
            node = wrong[0]
            raise ValueError(
                f"Node {node} has the parent {parents[node]}, which is not a node: parents must lie between 0 and "
                f"{num_nodes - 1}, or be -1 for a root."
            )
        depth = _depths(parents)
        if groups is None:
            groups = depth
        groups = _concrete_integers(groups, "groups")
        if groups.shape != parents.shape:
            raise ValueError(f"There are {num_nodes} nodes but {groups.size} groups: give one group per node.")
        if groups.min() < 0:
            raise ValueError(f"Groups are numbered from 0; node {groups.argmin()} has the group {groups.min()}.")

        num_children = np.bincount(parents[parents >= 0], minlength=num_nodes)
        members = np.split(np.argsort(depth, kind="stable"), np.cumsum(np.bincount(depth))[:-1])
        # Isolated nodes last, so that those with children are not scattered among them.
        members[0] = members[0][np.lexsort((groups[members[0]], num_children[members[0]] == 0))]
        rank = np.full(num_nodes, -1)
        levels = [Level(members[0].size, 0, 0)]
        for i, nodes in enumerate(members):
            if i > 0:
                members[i] = nodes[np.argsort(rank[parents[nodes]], kind="stable")]
                levels.append(_level(members[i].size, num_children[members[i - 1]]))
            rank[members[i]] = np.arange(nodes.size)
        order = np.concatenate(members)
        positions = np.empty(num_nodes, int)
        positions[order] = np.arange(num_nodes)
        above = parents[order]
        return cls(
            parents=jnp.asarray(parents, jnp.int32),
            groups=jnp.asarray(groups, jnp.int32),
            order=jnp.asarray(order, jnp.int32),
            positions=jnp.asarray(positions, jnp.int32),
            parents_in_order=jnp.asarray(np.where(above < 0, -1, rank[above]), jnp.int32),
            num_groups=int(groups.max()) + 1,
            levels=tuple(levels),
        )

    @property
    def num_nodes(self) -> int:
        return sum(level.size for level in self.levels)

    @property
    def num_levels(self) -> int:
        """Number of nodes on the longest path from a root to a leaf."""
        return len(self.levels)

    @property
    def is_root(self) -> Array:
        """Mask of the nodes without a parent. Shape ``(num_nodes,)``."""
        return self.parents < 0


class SumProduct(NamedTuple):
    """Outcome of :func:`sum_product`."""

    log_partition: Array
    """Log of the sum over all assignments, a scalar."""
    marginals: Array
    """Probability that a node is in the high state. Shape ``(num_nodes,)``."""
    pair_marginals: Array
    """Joint probability of the states of parent and node. Shape ``(num_nodes, 2, 2)``; zero for roots."""


@jax.jit
def sum_product(forest: Forest, log_evidence: ArrayLike, log_root: ArrayLike, log_transition: ArrayLike) -> SumProduct:
    """Log partition function, marginals and pair marginals of a two-state Markov forest.

    Messages run from the leaves to the roots; those from the roots to the leaves are their derivatives, since the
    derivative of the log partition function with respect to a log factor is the probability of that factor's state.

    Cost: linear in the number of nodes, one vectorised operation per level.

    :param Forest forest: the forest.
    :param ArrayLike log_evidence: log evidence of each state, of shape ``(num_nodes, 2)``.
    :param ArrayLike log_root: log probability of each state of a root, of shape ``(2,)`` or ``(num_nodes, 2)``;
        entries of nodes with a parent are not used.
    :param ArrayLike log_transition: log probability of a node's state (last axis) given its parent's (the axis before),
        of shape ``(2, 2)`` or ``(num_nodes, 2, 2)``; entries of roots are not used.
    :return: log partition function, marginals, pair marginals.

    **Example:**

    A child that copies its parent, with evidence for the high state in the child only:

    >>> forest = Forest.from_parents([-1, 0])
    >>> log_copy = jnp.log(jnp.array([[0.9, 0.1], [0.1, 0.9]]))
    >>> evidence = jnp.array([[0.0, 0.0], [0.0, 2.0]])
    >>> print(sum_product(forest, evidence, jnp.log(jnp.array([0.5, 0.5])), log_copy).marginals[1])
    0.881

    **References**

    1. Crouse, M. S., Nowak, R. D. and Baraniuk, R. G. (1998), *Wavelet-based statistical signal processing using
       hidden Markov models*, IEEE Transactions on Signal Processing 46, 886-902.
    2. Darwiche, A. (2003), *A differential approach to inference in Bayesian networks*, Journal of the ACM 50, 280-305
       (marginals as derivatives).
    """
    factors = _in_order(forest, log_evidence, log_root, log_transition)
    value, (evidence_slope, _, transition_slope) = jax.value_and_grad(_upward, argnums=(1, 2, 3))(forest, *factors)
    pairs = transition_slope[..., forest.positions]
    marginals = jnp.clip(evidence_slope[1][forest.positions], 0.0, 1.0)
    return SumProduct(value, marginals, jnp.moveaxis(pairs, -1, 0))


@jax.jit
def log_partition(forest: Forest, log_evidence: ArrayLike, log_root: ArrayLike, log_transition: ArrayLike) -> Array:
    """The first result of :func:`sum_product` alone, at half the cost; differentiable in its three last arguments."""
    return _upward(forest, *_in_order(forest, log_evidence, log_root, log_transition))


def _in_order(
    forest: Forest, log_evidence: ArrayLike, log_root: ArrayLike, log_transition: ArrayLike
) -> tuple[Array, Array, Array]:
    """The factors with the nodes on the last axis, in the order by depth; those of the roots for roots only."""
    evidence = jnp.asarray(log_evidence)
    evidence = evidence.astype(jnp.result_type(evidence, float))
    n = forest.num_nodes
    if evidence.shape != (n, 2):
        raise ValueError(f"log_evidence has the shape {evidence.shape}; for this forest it must be {(n, 2)}.")

    def take(name: str, factor: ArrayLike, nodes: Array, states: tuple[int, ...]) -> Array:
        factor = jnp.asarray(factor, evidence.dtype)
        if factor.shape == states:
            return jnp.broadcast_to(factor[..., None], (*states, nodes.size))
        if factor.shape != (n, *states):
            raise ValueError(f"{name} has the shape {factor.shape}; it must be {states} or {(n, *states)}.")
        return jnp.moveaxis(factor[nodes], 0, -1)

    roots = forest.order[: forest.levels[0].size]
    return (
        evidence[forest.order].T,
        take("log_root", log_root, roots, (2,)),
        take("log_transition", log_transition, forest.order, (2, 2)),
    )


def _upward(forest: Forest, evidence: Array, root: Array, transition: Array) -> Array:
    """Log partition function from factors in the order by depth: messages from the deepest level to the roots."""
    ends = np.cumsum([level.size for level in forest.levels])[:-1].tolist()
    evidences, transitions = jnp.split(evidence, ends, axis=-1), jnp.split(transition, ends, axis=-1)
    parents = jnp.split(forest.parents_in_order, ends)
    belief = evidences[-1]
    for i in range(len(ends), 0, -1):
        joint = transitions[i] + belief
        message = jnp.logaddexp(joint[:, 0], joint[:, 1])
        belief = evidences[i - 1] + _sum_children(message, forest.levels[i], forest.levels[i - 1].size, parents[i])
    joint = root + belief
    return jnp.sum(jnp.logaddexp(joint[0], joint[1]))


def _sum_children(message: Array, level: Level, num_above: int, parents: Array) -> Array:
    """Sum of the messages of a level, of shape ``(2, size)``, over the children of each node above."""
    if level.num_children == 0:
        total = jax.ops.segment_sum(message.T, parents, num_above, indices_are_sorted=True)
        return total.T
    total = jnp.sum(message.reshape(2, level.num_parents, level.num_children), axis=-1)
    return jnp.pad(total, ((0, 0), (0, num_above - level.num_parents)))


def _level(size: int, num_children: np.ndarray) -> Level:
    """Level below nodes with the given numbers of children, as far as it is regular."""
    num_parents = int(np.count_nonzero(num_children))
    each = int(num_children.max())
    if np.all(num_children[:num_parents] == each):
        return Level(size, num_parents, each)
    return Level(size, num_children.size, 0)


def _depths(parents: np.ndarray) -> np.ndarray:
    """Number of ancestors of each node, by doubling the steps up."""
    ancestor = parents
    depth = (ancestor >= 0).astype(np.int64)
    for _ in range(math.ceil(math.log2(parents.size + 1))):
        has = ancestor >= 0
        depth = depth + np.where(has, depth[ancestor], 0)
        ancestor = np.where(has, ancestor[ancestor], -1)
    circular = np.flatnonzero(ancestor >= 0)
    if circular.size:
        raise ValueError(
            f"The parent array is not a forest: from node {circular[0]} the parents lead round in a circle. Every "
            "node must reach a root, whose parent is -1."
        )
    return depth


def _concrete_integers(values: ArrayLike, name: str) -> np.ndarray:
    if isinstance(values, jax.core.Tracer):
        raise ValueError(f"A forest is made from concrete {name}; these are traced. Make it outside of the model.")
    array = np.asarray(values)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise ValueError(f"{name} must be a vector of integers; got the shape {array.shape} and type {array.dtype}.")
    return array.astype(np.int64)


class _WaveletLayout(Protocol):
    @property
    def shape_of_signal(self) -> tuple[int, ...]: ...
    @property
    def num_levels(self) -> int: ...


def wavelet_forest(transform: _WaveletLayout, per_orientation: bool = False, num_copies: int = 1) -> Forest:
    r"""The forest over the coefficients of a wavelet transform in which a coefficient is the parent of the finer ones.

    A detail coefficient has :math:`2^d` children in :math:`d` dimensions: those of the same orientation and place, one
    level finer. The coarsest details are roots, and the scaling coefficients are isolated.

    :param transform: the transform: its attributes ``shape_of_signal`` and ``num_levels`` are used.
    :param bool per_orientation: whether each of the :math:`2^d - 1` orientations of a level is a group of its own.
        Groups are numbered from 0, the scaling coefficients, through the levels from coarse to fine; within a level the
        orientation is a binary number, with one digit per axis that says whether it was differenced.
    :param int num_copies: repeat the forest, with the same groups, for the coefficients in as many bases.
    :return: the forest; nodes are numbered as the coefficients are, in row-major order of the array.

    **References**

    1. Crouse, M. S., Nowak, R. D. and Baraniuk, R. G. (1998), *Wavelet-based statistical signal processing using
       hidden Markov models*, IEEE Transactions on Signal Processing 46, 886-902.
    """
    shape, num_levels = tuple(transform.shape_of_signal), transform.num_levels
    coordinates = np.indices(shape).reshape(len(shape), -1)
    sides = np.array(shape)[:, None]
    num_orientations = 2 ** len(shape) - 1
    parents = np.asarray(np.ravel_multi_index(tuple(coordinates // 2), shape))
    groups = np.zeros(parents.size, np.int64)
    for level in range(num_levels, 0, -1):
        inside = np.all(coordinates < sides >> (level - 1), axis=0)
        halves = coordinates >= sides >> level
        orientation = np.zeros_like(groups)
        for half in halves:
            orientation = 2 * orientation + half
        is_new = inside & (orientation > 0)
        first = 1 + (num_levels - level) * (num_orientations if per_orientation else 1)
        groups[is_new] = first + (orientation[is_new] - 1 if per_orientation else 0)
        if level == num_levels:
            parents[inside] = -1
    if num_levels == 0:
        parents[:] = -1
    starts = np.arange(num_copies)[:, None] * parents.size
    parents = np.where(parents < 0, -1, starts + parents).reshape(-1)
    return Forest.from_parents(parents, np.tile(groups, num_copies))
