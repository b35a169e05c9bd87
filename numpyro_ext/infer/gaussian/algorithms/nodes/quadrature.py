"""Exact integration of latent Gaussian models whose unknowns fall into small independent blocks, by quadrature.

Given the hyperparameters, the evidence is a product of one integral for each block, of as many dimensions as the block
has unknowns. A lattice of nodes is laid over the density of each (:mod:`.block_nodes`). At one place of all lattices
the predictors of all rows are one product with the design, whatever the factors are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .....structure.latent_gaussian import LatentGaussian
from ..algorithm import Algorithm
from ..fit_info import FitInfo
from .block_nodes import BlockNodes, block_log_density, find_nodes, first_nodes, lattice, log_constant
from .node_posterior import NodePosterior

DEFAULT_NODES = (49, 31, 19)
"""Nodes of each axis of blocks of one, two and three unknowns."""
_LARGEST_BATCH = 2_000_000
"""Predictors at which factors are evaluated at a time."""


@dataclass(frozen=True)
class Quadrature(Algorithm):
    """Quadrature over each block, the algorithm of :class:`~numpyro_ext.infer.AdaptiveQuadrature`.

    :param int num_nodes: nodes of each axis; by default 49, 31 or 19 for blocks of one, two or three unknowns.
    """

    num_nodes: int | None = None

    def nodes_of(self, form: LatentGaussian) -> int:
        """Nodes of each axis of the blocks of a form."""
        return self.num_nodes or DEFAULT_NODES[form.blocks.columns.shape[1] - 1]

    @property
    def is_exact_for_gaussian(self) -> bool:
        return True

    @property
    def sees_all_modes(self) -> bool:
        return True

    def init(self, form: LatentGaussian) -> BlockNodes:
        return first_nodes(form)

    def solve(self, form: LatentGaussian, state: BlockNodes, *, num_steps: int, tol: float) -> tuple[Any, FitInfo]:
        del tol  # where nodes stand does not change an integral
        nodes, is_found, count = find_nodes(form, state)
        trace = jnp.full((num_steps,), jnp.nan, form.offset.dtype)
        zero = jnp.zeros((), form.offset.dtype)
        return nodes, FitInfo(jnp.all(is_found), count, trace, zero, jnp.zeros((form.num_rows,), bool))

    def log_evidence(self, form: LatentGaussian, state: BlockNodes) -> Array:
        return log_constant(form) + jnp.sum(self.block_log_evidence(form, state, self.nodes_of(form)))

    def block_log_evidence(self, form: LatentGaussian, state: BlockNodes, num_nodes: int) -> Array:
        """Log evidence of each block, but for a constant of all, shape ``(B,)``, with any number of nodes an axis."""
        terms = node_log_density(form, state, num_nodes)
        return jax.nn.logsumexp(terms, axis=0) + state.log_cell(num_nodes)

    def with_finer_rule(self, form: LatentGaussian, state: BlockNodes) -> tuple[Array, Array]:
        """Log evidence of each block as of :meth:`block_log_evidence`, by the rule and by one of more nodes an axis."""
        number, dimension = self.nodes_of(form), form.blocks.columns.shape[1]
        if dimension > 1:
            coarse, fine = (self.block_log_evidence(form, state, n) for n in (number, 3 * number // 2))
            return coarse, fine
        finer = 2 * number - 1
        terms, log_cell = node_log_density(form, state, finer), state.log_cell(finer)
        # every second node is one of the rule
        coarse, fine = (jax.nn.logsumexp(terms[::stride], axis=0) + log_cell + math.log(stride) for stride in (2, 1))
        return coarse, fine

    def posterior(self, form: LatentGaussian, state: BlockNodes) -> NodePosterior:
        num_nodes = self.nodes_of(form)
        return NodePosterior(form, state, node_log_density(form, state, num_nodes), num_nodes)


def node_log_density(form: LatentGaussian, nodes: BlockNodes, num_nodes: int) -> Array:
    """Log density of every block at its nodes, up to :func:`~.block_nodes.log_constant`.

    :param LatentGaussian form: at given hyperparameters.
    :param BlockNodes nodes: the lattices.
    :param int num_nodes: of each axis.
    :return: of shape ``(num_nodes ** D, B)``, the last axis of a lattice fastest. Cost: as many evaluations of all
        factors; memory is that of a batch of them.
    """
    places = jnp.asarray(lattice(num_nodes, nodes.center.shape[1]), nodes.center.dtype)
    batch_size = min(len(places), max(1, _LARGEST_BATCH // max(1, form.num_rows)))

    @jax.checkpoint  # what a gradient needs of the factors is computed again, and not kept for all nodes
    def at(place: Array) -> Array:
        return block_log_density(form, nodes.at(place))

    return lax.map(at, places, batch_size=batch_size)
