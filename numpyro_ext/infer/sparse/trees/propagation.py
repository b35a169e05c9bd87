r"""Expectation propagation for sparse linear models in which the whole prior, a forest of states, is one factor.

For Gaussian cavities :math:`N(s_j \mid \mu_j, v_j)` the tilted moments of the forest are exact
(:func:`~numpyro_ext.potentials.trees.mixture.tilted_moments`). Where :math:`X^T N^{-1} X` is diagonal the likelihood of
the coefficients is a product of such Gaussians: the cavities are known, and posterior and evidence exact. Elsewhere the
factor is replaced by Gaussian sites :math:`\exp(-\tfrac12 \pi_j s_j^2 + \beta_j s_j)` until the moments agree.

**References**

1. Crouse, M. S., Nowak, R. D. and Baraniuk, R. G. (1998), *Wavelet-based statistical signal processing using hidden
   Markov models*, IEEE Transactions on Signal Processing 46, 886-902.
2. Minka, T. P. (2001), *Expectation propagation for approximate Bayesian inference*, UAI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....compilation.pytree import PyTree
from ....linalg.cholesky import cholesky, cholesky_solve, half_log_determinant, inverse_lower
from ....linalg.operators.operator import LinearOperator
from ....linalg.solvers.posterior_precision import gram_diagonal
from ....potentials.trees.chunks import FOREST_COSTS, ForestCosts, sum_over_trees
from ....potentials.trees.forest import Forest, log_partition
from ....potentials.trees.mixture import (
    TreeParameters,
    components_of_nodes,
    log_probabilities,
    state_posterior,
    tilted_moments,
)
from ....structure.sparse_linear.form import SparseLinear

_NUM_SIGNS = 8
_ROW_STRIDE = 64
"""Distance of the rows of a large forest that speak for the noise in the units of the search."""
_LARGEST_DAMPING = 0.98


class Cavity(NamedTuple):
    """Independent Gaussians over the coefficients."""

    mean: Array
    variance: Array


class Sample(NamedTuple):
    """Some of the parts that a large forest is taken in, whose trees are drawn."""

    num_parts: Array
    share: Array
    """Share of all trees that these are."""


class Projection(NamedTuple):
    r"""The data as Gaussians over single coefficients, for a noise of average variance one."""

    mean: Array
    """Least squares coefficients, of shape ``(n,)``."""
    gram: Array
    """The diagonal of :math:`X^T R^{-1} X`, with :math:`R` the noise variances over their average."""
    residual: Array
    r"""Squared distance of the data from the range of :math:`X`, in the metric :math:`R^{-1}`."""
    log_relative: Array
    r""":math:`\log |R|`."""


def project(operator: LinearOperator, observed: Array, noise_variance: Array) -> Projection:
    """Least squares where the columns of the operator are orthogonal in the metric of the noise.

    Cost: two products with the operator and two with its adjoint.
    """
    relative = jnp.broadcast_to(noise_variance / jnp.mean(noise_variance), observed.shape)
    gram = gram_diagonal(operator, relative, True)
    mean = operator.rmatvec(observed / relative) / gram
    residual = observed - operator.matvec(mean)
    return Projection(mean, gram, jnp.sum(jnp.square(residual) / relative), jnp.sum(jnp.log(relative)))


def exact_cavity(projection: Projection, noise_variance: Array) -> Cavity:
    """Cavity of each coefficient, from the data alone."""
    return Cavity(projection.mean, jnp.mean(noise_variance) / projection.gram)


def exact_log_evidence(
    forest: Forest,
    prior: TreeParameters,
    projection: Projection,
    noise_variance: Array,
    num_rows: int,
    sample: Sample | None = None,
    costs: ForestCosts = FOREST_COSTS,
) -> Array:
    """Log density of the data, the part outside the range of the operator included; differentiable.

    :param Sample sample: the share of it that some of the trees have, if these are a sample of all.
    :param ForestCosts costs: by which a large forest is taken in parts.
    """
    scale = jnp.mean(noise_variance)
    cavity = exact_cavity(projection, noise_variance)
    # The part outside the range less what the cavities have of their own, of which most would cancel.
    rest = (num_rows - cavity.mean.size) * jnp.log(2.0 * jnp.pi * scale) + jnp.sum(jnp.log(projection.gram))
    rest += projection.log_relative + projection.residual / scale
    rest = rest if sample is None else sample.share * rest
    return _log_normaliser(forest, prior, cavity, sample, costs) - 0.5 * rest


def _log_normaliser(
    forest: Forest,
    prior: TreeParameters,
    cavity: Cavity,
    sample: Sample | None = None,
    costs: ForestCosts = FOREST_COSTS,
) -> Array:
    def of(trees: Forest, prior: TreeParameters, *cavity: Array) -> Array:
        evidence = _node_evidence(trees, prior, Cavity(*cavity))
        return log_partition(trees, evidence, *log_probabilities(trees, prior))

    mean, variance = cavity
    nodes = mean, jnp.broadcast_to(variance, mean.shape)
    limit = None if sample is None else sample.num_parts
    return sum_over_trees(of, forest, prior, *nodes, limit=limit, costs=costs)


def _node_evidence(forest: Forest, prior: TreeParameters, cavity: Cavity) -> Array:
    parts = [c.log_normaliser(*cavity) for c in components_of_nodes(forest, prior)]
    return jnp.stack(jnp.broadcast_arrays(*parts), axis=-1)


def gradient_scales(
    forest: Forest,
    parameters_fn: Callable[[Array], tuple[TreeParameters, Array]],
    values: Array,
    cavity: Cavity,
    sample: Sample | None = None,
    costs: ForestCosts = FOREST_COSTS,
) -> Array:
    """Root of the sum over nodes of the squared derivative of the log evidence, for each parameter.

    With parameters in units of its inverse the search is much better conditioned: groups of a wavelet forest have from
    a few to some ten thousand nodes. By Fisher's identity the derivative is a sum over nodes with fixed probabilities
    of the states; random signs of its terms give the sum of squares as an expectation. A noise variance counts with
    its Fisher information.

    :param parameters_fn: from the vector of parameters to the prior and the noise variances of shape ``(m,)``.
    :param values: the vector, of shape ``(d,)``.
    :param Cavity cavity: Gaussians over the coefficients.
    :param Sample sample: of the trees, as in :func:`exact_log_evidence`.
    :param ForestCosts costs: by which a large forest is taken in parts.
    """
    prior, _ = parameters_fn(values)
    held = jax.lax.stop_gradient(prior)
    stride = 1 if sample is None else _ROW_STRIDE

    def gradients(trees: Forest, values: Array, mean: Array, variance: Array, signs: Array) -> Array:
        if sample is not None:  # then they are numbers of nodes, and signs are drawn for those of the sample alone
            signs = jax.random.rademacher(jax.random.fold_in(key, signs[0]), (signs.size, _NUM_SIGNS), jnp.int8)
        cavity = Cavity(mean, variance)
        states = state_posterior(trees, held, _node_evidence(trees, held, cavity))
        marginals = jnp.stack([1.0 - states.marginals, states.marginals], axis=-1)

        def signed(values: Array, signs: Array) -> Array:
            prior, _ = parameters_fn(values)
            log_root, log_transition = log_probabilities(trees, prior)
            root = jnp.where(trees.is_root[:, None] & (marginals > 0.0), marginals * log_root, 0.0)
            pairs = jnp.where(states.pair_marginals > 0.0, states.pair_marginals * log_transition, 0.0)
            evidence = marginals * _node_evidence(trees, prior, cavity)
            return signs @ (jnp.sum(evidence + root, axis=-1) + jnp.sum(pairs, (1, 2)))

        return jax.lax.map(lambda s: jax.grad(signed)(values, s), signs.T.astype(mean.dtype))

    def of_noise(signs: Array) -> Array:
        def signed(values: Array) -> Array:
            return signs.astype(values.dtype) @ jnp.log(parameters_fn(values)[1][::stride]) / jnp.sqrt(2.0)

        return jax.grad(signed)(values)

    mean, variance = cavity
    key, num_rows = jax.random.key(0), jax.eval_shape(parameters_fn, values)[1].size
    num_nodes = mean.size if sample is None else 0
    signs = jax.random.rademacher(key, (_NUM_SIGNS, num_nodes + -(-num_rows // stride)), jnp.int8)
    last = signs[:, :num_nodes].T if sample is None else jnp.arange(mean.size)
    nodes = mean, jnp.broadcast_to(variance, mean.shape), last
    noise = jax.lax.map(of_noise, signs[:, num_nodes:])
    if sample is None:
        total = sum_over_trees(gradients, forest, values, *nodes, costs=costs) + noise
    else:
        total = sum_over_trees(gradients, forest, values, *nodes, limit=sample.num_parts, costs=costs)
        total += jnp.sqrt(stride * sample.share) * noise
    return jnp.sqrt(jnp.mean(jnp.square(total), axis=0))


# Expectation propagation


class State(NamedTuple):
    """Gaussian sites in place of the prior."""

    precision: Array
    shift: Array


class SolveInfo(NamedTuple):
    """End of an iteration."""

    converged: Array
    num_steps: Array
    max_change: Array
    """Largest difference between the moments of the Gaussian and of the tilted density, relative to the former's."""
    objective: Array


class GaussianMoments(NamedTuple):
    """The Gaussian that data and sites make."""

    factor: Array
    """Cholesky factor of the precision."""
    mean: Array
    variance: Array
    cavity: Cavity
    is_proper: Array


def init(form: SparseLinear) -> State:
    """Sites with about the second moments of the prior, seen through wide Gaussians."""
    scale: Any = form.prior.high
    width = 100.0 * jnp.max(jnp.square(scale.scale))
    zeros = jnp.zeros((form.num_columns,), form.observed.dtype)
    moments = tilted_moments(form.forest, form.prior, zeros, jnp.full_like(zeros, width))
    return State(1.0 / moments.variance, zeros)


class _Likelihood(NamedTuple):
    precision: Array
    shift: Array
    log_constant: Array


def _likelihood(form: SparseLinear) -> _Likelihood:
    matrix = form.operator.materialise()
    noise = jnp.broadcast_to(form.noise_variance, form.observed.shape)
    weighted = matrix / noise[:, None]
    constant = -0.5 * jnp.sum(jnp.log(2.0 * jnp.pi * noise) + jnp.square(form.observed) / noise)
    return _Likelihood(matrix.T @ weighted, weighted.T @ form.observed, constant)


def gaussian(form: SparseLinear, state: State) -> GaussianMoments:
    """The Gaussian of data and sites, and its cavities. Cost: one Cholesky factorisation and one inverse."""
    return _gaussian(_likelihood(form), state)


def _gaussian(likelihood: _Likelihood, state: State) -> GaussianMoments:
    factor = cholesky(likelihood.precision + jnp.diag(state.precision))
    variance = jnp.sum(jnp.square(inverse_lower(factor)), axis=0)
    mean = cholesky_solve(factor, likelihood.shift + state.shift)
    # A cavity precision is the difference of two numbers; where nothing of it is left the cavity is wide.
    precision = jnp.maximum(1.0 / variance - state.precision, jnp.finfo(mean.dtype).eps ** 0.5 / variance)
    is_proper = jnp.all(jnp.isfinite(variance)) & jnp.all(jnp.isfinite(mean))
    cavity = Cavity((mean / variance - state.shift) / precision, 1.0 / precision)
    return GaussianMoments(factor, mean, variance, cavity, is_proper)


def solve(
    form: SparseLinear, state: State, *, num_steps: int, tol: float, damping: float = 0.0
) -> tuple[State, SolveInfo]:
    """Replace all sites at a time by those of the tilted moments until these agree with the moments of the Gaussian.

    A step that leaves no proper Gaussian is not taken; damping is then halved towards one, as it is while the
    disagreement grows, and relaxes otherwise.

    Cost: per step one Cholesky factorisation and one inverse in the number of coefficients.

    :param SparseLinear form: the model.
    :param State state: where to start.
    :param int num_steps: steps at most.
    :param float tol: largest disagreement of moments at convergence.
    :param float damping: least fraction of the old sites that is kept.
    """
    likelihood = _likelihood(form)

    def target(moments: GaussianMoments) -> tuple[State, Array]:
        tilted = tilted_moments(form.forest, form.prior, *moments.cavity)
        change = jnp.maximum(
            jnp.max(jnp.abs(tilted.mean - moments.mean) / jnp.sqrt(moments.variance)),
            jnp.max(jnp.abs(tilted.variance / moments.variance - 1.0)),
        )
        return State(tilted.site_precision, tilted.site_shift), change

    def unfinished(carry: tuple[Array, State, State, Array, Array]) -> Array:
        step, _, _, change, _ = carry
        return (step < num_steps) & (change > tol)

    def advance(carry: PyTree) -> PyTree:
        step, old, new, change, kept = carry
        trial = jax.tree.map(lambda x, y: kept * x + (1.0 - kept) * y, old, new)
        moments = _gaussian(likelihood, trial)
        wanted, disagreement = target(moments)
        sites_finite = jnp.all(jnp.isfinite(wanted.precision)) & jnp.all(jnp.isfinite(wanted.shift))
        usable = moments.is_proper & sites_finite & jnp.isfinite(disagreement)
        grows = ~usable | (disagreement > change)
        kept = jnp.where(grows, jnp.minimum(0.5 * (1.0 + kept), _LARGEST_DAMPING), jnp.maximum(0.9 * kept, damping))

        def choose(x: object, y: object) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(usable, a, b), x, y)

        return step + 1, choose(trial, old), choose(wanted, new), choose(disagreement, change), kept

    first, change = target(_gaussian(likelihood, state))
    dtype = form.observed.dtype
    start = (jnp.zeros((), jnp.int32), state, first, change, jnp.asarray(damping, dtype))
    steps, state, _, change, _ = jax.lax.while_loop(unfinished, advance, start)
    return state, SolveInfo(change <= tol, steps, change, _log_evidence(form, likelihood, state))


def log_evidence(form: SparseLinear, state: State) -> Array:
    """Log evidence of expectation propagation; its gradient with the sites held is exact at the fixed point."""
    return _log_evidence(form, _likelihood(form), state)


def _log_evidence(form: SparseLinear, likelihood: _Likelihood, state: State) -> Array:
    moments = _gaussian(likelihood, state)
    mean, variance = jax.lax.stop_gradient(moments.cavity)
    shift = likelihood.shift + state.shift
    half_log_2_pi = 0.5 * form.num_columns * jnp.log(2.0 * jnp.pi)
    joint = likelihood.log_constant + 0.5 * shift @ moments.mean - half_log_determinant(moments.factor) + half_log_2_pi
    # Of the cavities with the sites in place of the factor.
    total = 1.0 / variance + state.precision
    exponent = jnp.square(mean / variance + state.shift) / total - jnp.square(mean) / variance
    sites = 0.5 * jnp.sum(exponent - jnp.log(variance * total))
    return joint + _log_normaliser(form.forest, form.prior, Cavity(mean, variance)) - sites
