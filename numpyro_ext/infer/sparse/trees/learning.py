"""Learning the parameters of a tree's prior from the posterior: what is needed of it, and the objective."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from ....potentials.trees.forest import Forest, SumProduct
from ....potentials.trees.mixture import (
    TreeParameters,
    log_evidence,
    log_probabilities,
    state_posterior,
)
from ....structure.sparse_linear.form import SparseLinear

# Second moments are kept above this fraction of their initial mean: without variances they go to zero.
FLOOR = 1e-12


class _State(Protocol):
    @property
    def mean(self) -> Array: ...
    @property
    def second_moment(self) -> Array: ...
    @property
    def fitted_variance(self) -> Array: ...


class Statistics(NamedTuple):
    """Expected statistics from which parameters of prior and noise are learned."""

    second_moment: Array
    """Second moments of the coefficients, of shape ``(num_coefficients,)``."""
    states: SumProduct
    """Marginals and pair marginals of the states."""
    squared_residual: Array
    """Expectation of :math:`(y - X s)_i^2`, of shape ``(m,)``."""


def states_given(form: SparseLinear, second_moment: Array) -> SumProduct:
    """The tree over the states at these second moments of the coefficients, of shape ``(n,)``."""
    return state_posterior(form.forest, form.prior, log_evidence(form.forest, form.prior, jnp.sqrt(second_moment)))


def statistics(form: SparseLinear, state: _State) -> Statistics:
    """Compute the statistics at ``state``: one sum-product and one product with the operator."""
    residual = form.observed - form.operator @ state.mean
    return Statistics(
        state.second_moment, states_given(form, state.second_moment), jnp.square(residual) + state.fitted_variance
    )


def expected_log_joint(
    forest: Forest, prior: TreeParameters, noise_variance: Array, statistics: Statistics, weight: Array | float = 1.0
) -> Array:
    """Bound as a function of the parameters of prior and noise while the posterior is held, up to a constant.

    Cost: linear, no product with the operator.

    :param Forest forest: the forest.
    :param TreeParameters prior: parameters to be judged.
    :param noise_variance: to be judged, of shape ``()`` or ``(m,)``.
    :param Statistics statistics: of the posterior.
    :param weight: the power of the prior.
    :return: a scalar.
    """
    q = statistics.states.marginals
    weights = jnp.stack([1.0 - q, q], axis=-1)
    evidence = log_evidence(forest, prior, jnp.sqrt(statistics.second_moment))
    log_root, log_transition = log_probabilities(forest, prior)
    total = _weighted_sum(weights, evidence)
    total += _weighted_sum(jnp.where(forest.is_root[:, None], weights, 0.0), log_root)
    total += _weighted_sum(statistics.states.pair_marginals, log_transition)
    variance = jnp.broadcast_to(noise_variance, statistics.squared_residual.shape)
    return weight * total - 0.5 * jnp.sum(statistics.squared_residual / variance + jnp.log(2.0 * jnp.pi * variance))


def _weighted_sum(weights: Array, logs: Array) -> Array:
    """Sum of weighted logarithms; where a state has no weight its logarithm may be infinite."""
    present = weights > 0.0
    return jnp.sum(weights * jnp.where(present, logs, 0.0))
