r"""Sparse coefficients whose scales follow the states of a forest: densities and moments under Gaussians.

.. math::
    t(s) = \sum_\delta P(\delta) \prod_j t_{\delta_j}(s_j), \qquad P(\delta) = \prod_{j \text{ root}} P(\delta_j)
        \prod_{j \text{ not root}} P(\delta_j \mid \delta_{\rho(j)}),

with two components :math:`t_0` ("low") and :math:`t_1` ("high") whose scales, and whose probabilities, are shared
within the groups of the forest. For Gaussian cavities the whole tree is one factor with exact tilted moments: given the
states the coefficients are independent, so one-dimensional moments per node and state and one sum-product suffice.

**References**

1. Crouse, M. S., Nowak, R. D. and Baraniuk, R. G. (1998), *Wavelet-based statistical signal processing using hidden
   Markov models*, IEEE Transactions on Signal Processing 46, 886-902.
2. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL, section 2.2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ...linalg.saved_names import saved_as
from ..base import Potential
from ..moments import TiltedMoments
from .forest import Forest, SumProduct, log_partition, sum_product


@saved_as("TreeParameters")
class TreeParameters(NamedTuple):
    """Components and probabilities of each group of a forest."""

    low: Potential
    """Component of state 0: a potential whose fields are scalars or of shape ``(num_groups,)``."""
    high: Potential
    """Component of state 1."""
    root_probability: Array
    """Probability that a root is in state 1. Shape ``(num_groups,)``."""
    transition: Array
    """Probability of state 1 given that the parent is in state 0 and 1. Shape ``(num_groups, 2)``, by child's group."""


class TreeMoments(NamedTuple):
    """Moments of the density that is proportional to the tree times independent Gaussians."""

    log_z: Array
    """Log of the integral of the product, a scalar."""
    mean: Array
    """Shape ``(num_nodes,)``, as all that follows."""
    variance: Array
    site_precision: Array
    """Inverse of the variance minus that of the Gaussian factor."""
    site_shift: Array
    """Precision times mean, minus that of the Gaussian factor."""
    marginals: Array
    """Probability of state 1."""
    pair_marginals: Array
    """Joint probability of the states of parent and node. Shape ``(num_nodes, 2, 2)``; zero for roots."""


def log_density(forest: Forest, parameters: TreeParameters, s: ArrayLike) -> Array:
    """Log density of coefficients with the states summed out, a scalar; linear time, differentiable.

    :param Forest forest: the forest.
    :param TreeParameters parameters: components and probabilities.
    :param ArrayLike s: coefficients, of shape ``(num_nodes,)``.

    **Example:**

    >>> from numpyro_ext.potentials import LaplacePotential
    >>> forest = Forest.from_parents([-1, 0])
    >>> narrow, wide = LaplacePotential(0.0, jnp.full(2, 0.1)), LaplacePotential(0.0, jnp.full(2, 1.0))
    >>> tree = TreeParameters(narrow, wide, jnp.full(2, 0.5), jnp.array([[0.1, 0.9], [0.1, 0.9]]))
    >>> print(log_density(forest, tree, jnp.array([0.05, 2.0])))
    -3.699
    """
    return log_partition(forest, log_evidence(forest, parameters, s), *log_probabilities(forest, parameters))


def log_evidence(forest: Forest, parameters: TreeParameters, s: ArrayLike) -> Array:
    """Log densities of coefficients under each of the two components, of shape ``(num_nodes, 2)``."""
    low, high = components_of_nodes(forest, parameters)
    return jnp.stack(jnp.broadcast_arrays(low.log_density(s), high.log_density(s)), axis=-1)


def state_posterior(forest: Forest, parameters: TreeParameters, evidence: ArrayLike) -> SumProduct:
    """Sum-product with the probabilities of the groups.

    :param Forest forest: the forest.
    :param TreeParameters parameters: only the probabilities are used.
    :param ArrayLike evidence: log evidence of each node's states, of shape ``(num_nodes, 2)``; for coefficients
        that are known it is :func:`log_evidence`.
    """
    return sum_product(forest, evidence, *log_probabilities(forest, parameters))


@jax.jit
def tilted_moments(forest: Forest, parameters: TreeParameters, mean: ArrayLike, variance: ArrayLike) -> TreeMoments:
    r"""Exact moments of :math:`t(s) \prod_j N(s_j \mid \mu_j, v_j)`.

    With :math:`N(y_j \mid s_j, v_j)` read as the density of data, this is the posterior of coefficients observed in
    independent Gaussian noise, and ``log_z`` is its log evidence.

    Cost: linear; two tilted moments per node (closed forms, or quadrature for Student's t) and one sum-product.

    :param Forest forest: the forest.
    :param TreeParameters parameters: components and probabilities.
    :param ArrayLike mean: means :math:`\mu` of the Gaussians, of shape ``(num_nodes,)``.
    :param ArrayLike variance: variances :math:`v`, which broadcast to ``(num_nodes,)``.
    :return: log integral, moments, site parameters, state probabilities.
    """
    mean, variance = _cavity(forest, mean, variance)
    low, high = components_of_nodes(forest, parameters)
    moments = low.tilted_moments(mean, variance), high.tilted_moments(mean, variance)
    return _mix(forest, parameters, moments[0], moments[1], mean, variance)


def sample_states(key: Array, forest: Forest, root_probability: Array, transition: Array) -> Array:
    """Draw states from the roots down.

    The states given data are a Markov forest too: with the ``pair_marginals`` of a posterior its transitions are
    ``pair_marginals[:, :, 1] / pair_marginals.sum(-1)``.

    :param Array key: random key.
    :param Forest forest: the forest.
    :param Array root_probability: probability of state 1 for roots, of shape ``(num_nodes,)``.
    :param Array transition: probability of state 1 given the parent's state, of shape ``(num_nodes, 2)``.
    :return: whether a node is in state 1, of shape ``(num_nodes,)``.
    """
    uniform = jax.random.uniform(key, (forest.num_nodes,), transition.dtype)
    states: list[Array] = []
    start = 0
    for level in forest.levels:
        nodes = forest.order[start : start + level.size]
        if not states:
            probability = root_probability[nodes]
        else:
            parent = states[-1][forest.parents_in_order[start : start + level.size]]
            probability = jnp.where(parent, transition[nodes, 1], transition[nodes, 0])
        states.append(uniform[nodes] < probability)
        start += level.size
    return jnp.concatenate(states)[forest.positions]


def _cavity(forest: Forest, mean: ArrayLike, variance: ArrayLike) -> tuple[Array, Array]:
    mean = jnp.asarray(mean)
    if mean.shape != (forest.num_nodes,):
        raise ValueError(f"mean has the shape {mean.shape}; for this forest it must be {(forest.num_nodes,)}.")
    dtype = jnp.result_type(mean, variance, float)
    return mean.astype(dtype), jnp.broadcast_to(jnp.asarray(variance, dtype), mean.shape)


def _mix(
    forest: Forest, parameters: TreeParameters, low: TiltedMoments, high: TiltedMoments, mean: Array, variance: Array
) -> TreeMoments:
    """Moments of the mixture over states, from those of the two components (law of total variance)."""
    states = state_posterior(forest, parameters, jnp.stack([low.log_z, high.log_z], axis=-1))
    p, q = states.marginals, 1.0 - states.marginals
    gap = high.mean - low.mean
    within, between = q * low.variance + p * high.variance, p * q * jnp.square(gap)
    total = within + between
    # Sums of what the components say, because differences of inverse variances lose the digits of a weak factor.
    precision = q * low.variance * low.site_precision + p * high.variance * high.site_precision - between / variance
    shift = q * low.variance * low.site_shift + p * high.variance * high.site_shift - between * mean / variance
    return TreeMoments(
        log_z=states.log_partition,
        mean=low.mean + p * gap,
        variance=total,
        site_precision=precision / total,
        site_shift=shift / total,
        marginals=p,
        pair_marginals=states.pair_marginals,
    )


def per_node(forest: Forest, component: Potential) -> Potential:
    """The component with the parameters of each node's group."""
    return jax.tree.map(lambda x: jnp.asarray(x)[forest.groups] if jnp.ndim(x) else x, component)


def components_of_nodes(forest: Forest, parameters: TreeParameters) -> tuple[Potential, Potential]:
    """The low and the high component with the parameters of each node's group."""
    return per_node(forest, parameters.low), per_node(forest, parameters.high)


def _log(probability: Array) -> Array:
    """Logarithm with a finite derivative where the probability is zero."""
    positive = probability > 0.0
    return jnp.where(positive, jnp.log(jnp.where(positive, probability, 1.0)), -jnp.inf)


def log_probabilities(forest: Forest, parameters: TreeParameters) -> tuple[Array, Array]:
    """Log probabilities of the states per node: as roots ``(num_nodes, 2)``, given the parent ``(num_nodes, 2, 2)``."""
    root, transition = jnp.asarray(parameters.root_probability), jnp.asarray(parameters.transition)
    log_root = jnp.stack([_log(1.0 - root), _log(root)], axis=-1)
    log_transition = jnp.stack([_log(1.0 - transition), _log(transition)], axis=-1)
    return log_root[forest.groups], log_transition[forest.groups]
