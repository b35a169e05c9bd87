"""Learning the parameters of a tree's prior: from the posterior, and where a search for them starts."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ...potentials.trees.forest import Forest, SumProduct
from ...potentials.trees.mixture import (
    TreeParameters,
    em_step,
    log_evidence,
    log_probabilities,
    m_step,
    state_posterior,
    tilted_moments,
)
from ...structure.sparse_linear.form import SparseLinear

__all__ = [
    "FLOOR",
    "Statistics",
    "expected_log_joint",
    "fit_prior",
    "fit_prior_to_noisy",
    "learn_prior",
    "states_given",
    "statistics",
]

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
    """What parameters of prior and noise are learned from."""

    second_moment: Array
    """Of the coefficients, of shape ``(num_coefficients,)``."""
    states: SumProduct
    """Marginals and pair marginals of the states."""
    squared_residual: Array
    """Expectation of :math:`(y - X s)_i^2`, of shape ``(m,)``."""


def states_given(form: SparseLinear, second_moment: Array) -> SumProduct:
    """The tree over the states at these second moments of the coefficients, of shape ``(n,)``."""
    return state_posterior(form.forest, form.prior, log_evidence(form.forest, form.prior, jnp.sqrt(second_moment)))


def statistics(form: SparseLinear, state: _State) -> Statistics:
    """What parameters are learned from, at ``state``: one sum-product and one product with the operator."""
    residual = form.observed - form.operator @ state.mean
    return Statistics(
        state.second_moment, states_given(form, state.second_moment), jnp.square(residual) + state.fitted_variance
    )


def learn_prior(form: SparseLinear, state: _State) -> SparseLinear:
    """The form with the parameters of the prior that maximise the bound at ``state``, in closed form.

    Ko (2017), eqs. (2.126)-(2.136).
    """
    states = states_given(form, state.second_moment)
    prior = m_step(form.forest, form.prior, states.marginals, states.pair_marginals, state.second_moment)
    return form._replace(prior=prior)


def expected_log_joint(
    forest: Forest, prior: TreeParameters, noise_variance: Array, statistics: Statistics, weight: Array | float = 1.0
) -> Array:
    """What the bound says of the parameters of prior and noise while the posterior is held, up to a constant.

    Its maximum over free parameters of the prior is that of :func:`learn_prior`. Cost: linear, no product with the
    operator.

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
    """Where a state has no weight its logarithm may be infinite."""
    present = weights > 0.0
    return jnp.sum(weights * jnp.where(present, logs, 0.0))


def fit_prior(form: SparseLinear, coefficients: Array, num_steps: int = 10) -> TreeParameters:
    """Start for the parameters of the prior: fitted to coefficients of the raw data as if these were exact.

    After Crouse, Nowak and Baraniuk (1998).

    :param SparseLinear form: the model; the families of its components stay.
    :param coefficients: of shape ``(n,)``.
    :param int num_steps: steps of expectation-maximisation.
    """
    squared = jnp.square(coefficients)
    squared = jnp.maximum(squared, FLOOR * jnp.mean(squared))

    def advance(_: int, prior: TreeParameters) -> TreeParameters:
        states = states_given(form._replace(prior=prior), squared)
        return m_step(form.forest, prior, states.marginals, states.pair_marginals, squared)

    return lax.fori_loop(0, num_steps, advance, jax.tree.map(lambda x: jnp.asarray(x, squared.dtype), form.prior))


def fit_prior_to_noisy(
    form: SparseLinear, coefficients: Array, variance: ArrayLike, num_exact_steps: int = 10, num_steps: int = 5
) -> tuple[TreeParameters, Array]:
    """Start for the parameters and for the second moments, from coefficients with independent Gaussian errors.

    With such data the posterior of the tree is exact, and so is expectation-maximisation. Its second moments have the
    sparsity of the states, which those of raw coefficients hide in the noise: from these, learning may end where both
    components are one.

    :param SparseLinear form: the model; the families of its components stay.
    :param coefficients: of shape ``(n,)``.
    :param variance: of their errors, which broadcasts to ``(n,)``.
    :param int num_exact_steps: steps of exact expectation-maximisation.
    :param int num_steps: steps of the bound's own, for the second moments that these end with.
    :return: the parameters; and second moments of shape ``(n,)``, for the first field of the state of :func:`init`.
    """
    dtype = coefficients.dtype
    start = jax.tree.map(lambda x: jnp.asarray(x, dtype), form.prior)
    exact = lax.fori_loop(
        0, num_exact_steps, lambda _, prior: em_step(form.forest, prior, coefficients, variance)[0], start
    )
    moments = tilted_moments(form.forest, exact, coefficients, variance)
    second_moment = jnp.square(moments.mean) + moments.variance
    return fit_prior(form._replace(prior=exact), jnp.sqrt(second_moment), num_steps), second_moment
