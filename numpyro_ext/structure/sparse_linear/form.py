"""The form of sparse linear models: coefficients with a product or forest prior, seen through a linear operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array

from ...linalg.operators.operator import LinearOperator

if TYPE_CHECKING:
    from ...potentials.trees.forest import Forest
    from ...potentials.trees.mixture import TreeParameters


class SparseLinear(NamedTuple):
    r"""Coefficients ``s`` with a product or forest prior, seen through a linear operator with Gaussian noise:

    .. math:: y = X s + \text{offset} + N(0, \text{noise variance}).

    Everything is an array or a container of arrays: a form can be passed through ``jit``, ``vmap`` and ``grad``.
    """

    operator: LinearOperator
    """:math:`X`, of shape ``(num_rows, num_columns)``, with the synthesis of the signal and the selection of rows."""
    observed: Array
    """:math:`y - \\text{offset}`, of shape ``(num_rows,)``."""
    noise_variance: Array
    """Shape ``()`` or ``(num_rows,)``."""
    forest: Forest
    """The states of the prior; all of them roots where the prior is a product."""
    prior: TreeParameters
    """Components and transitions per group; one component only where the prior has no states."""
    analysis: LinearOperator | None = None
    """A tight frame :math:`B`, of shape ``(num_coefficients, num_columns)``, where the prior is that of ``B s``."""
    weight: Array | float = 1.0
    """The power of the prior."""

    @property
    def num_rows(self) -> int:
        return self.operator.shape[0]

    @property
    def num_columns(self) -> int:
        return self.operator.shape[1]

    @property
    def num_coefficients(self) -> int:
        return self.forest.num_nodes

    def coefficients(self, s: Array) -> Array:
        """Coefficients that have the prior, shape ``(num_coefficients,)``: ``B s``, or ``s`` itself."""
        return s if self.analysis is None else self.analysis @ s

    def log_likelihood(self, s: Array) -> Array:
        """Log density of the data given coefficients ``s`` of shape ``(num_columns,)``."""
        variance = jnp.broadcast_to(self.noise_variance, self.observed.shape)
        residual = self.observed - self.operator @ s
        return -0.5 * jnp.sum(jnp.square(residual) / variance + jnp.log(2.0 * jnp.pi * variance))

    def log_density(self, s: Array) -> Array:
        """Joint log density of coefficients ``s`` of shape ``(num_columns,)`` and the data, states summed out."""
        from ...potentials.trees.mixture import log_density

        return self.log_likelihood(s) + self.weight * log_density(self.forest, self.prior, self.coefficients(s))
