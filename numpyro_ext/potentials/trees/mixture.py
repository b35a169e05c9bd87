r"""Sparse coefficients whose scales follow the states of a forest: densities, moments under Gaussians, learning.

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

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ...linalg.saved_names import saved_as
from ..base import Potential, TiltedMoments
from ..families.gaussian import GaussianPotential
from ..families.laplace import LaplacePotential
from ..families.student_t import StudentTPotential
from .forest import Forest, SumProduct, log_partition, sum_product

__all__ = [
    "TreeMoments",
    "TreeParameters",
    "components_of_nodes",
    "em_step",
    "initial_parameters",
    "log_density",
    "log_evidence",
    "log_probabilities",
    "m_step",
    "sample_states",
    "state_posterior",
    "tilted_moments",
]

# The power of the scale in which the complete-data log density is linear, up to a log: what makes its update closed.
# For Student's t the data are completed by the precision of the Gaussian that it is a mixture of.
_POWERS = {LaplacePotential: 1.0, GaussianPotential: 2.0, StudentTPotential: 2.0}
_PROBABILITY_MARGIN = 1e-4


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


@jax.jit
def em_step(
    forest: Forest,
    parameters: TreeParameters,
    mean: ArrayLike,
    variance: ArrayLike,
    margin: ArrayLike = _PROBABILITY_MARGIN,
) -> tuple[TreeParameters, TreeMoments]:
    r"""One step of expectation-maximisation on ``tilted_moments(forest, parameters, mean, variance).log_z``.

    The expectations are exact: the absolute value (Laplace), the square (Gaussian) or the weighted square (Student's
    t) of a coefficient given its state and the data. By Fisher's identity each is the derivative of the
    log evidence of a node and state in the log scale, plus one, in units of the scale's power. No step lowers
    ``log_z``, but where a probability meets its margin.

    Cost: about twice that of :func:`tilted_moments`.

    :param Forest forest: the forest.
    :param TreeParameters parameters: components and probabilities; what no node of a group speaks of is kept.
    :param ArrayLike mean: means of the Gaussians, of shape ``(num_nodes,)``.
    :param ArrayLike variance: their variances, which broadcast to ``(num_nodes,)``.
    :param ArrayLike margin: how far the new probabilities keep from zero and one; those that are there stay.
    :return: the new parameters, and the moments under the *old* ones.
    """
    mean, variance = _cavity(forest, mean, variance)
    low, high = components_of_nodes(forest, parameters)
    (low_moments, low_slope), (high_moments, high_slope) = (
        _with_scale_slope(lambda c: c.tilted_moments(mean, variance), component) for component in (low, high)
    )
    tree = _mix(forest, parameters, low_moments, high_moments, mean, variance)

    def rescaled(component: Potential, weight: Array, slope: Array) -> Potential:
        average = _group_mean(forest, weight, jnp.maximum(1.0 + slope, 0.0), jnp.ones(()))
        return _scaled(component, average ** (1.0 / _power(component)))

    new = TreeParameters(
        rescaled(parameters.low, 1.0 - tree.marginals, low_slope.log_z),
        rescaled(parameters.high, tree.marginals, high_slope.log_z),
        *_new_probabilities(forest, parameters, tree, margin),
    )
    return new, tree


@jax.jit
def m_step(
    forest: Forest,
    parameters: TreeParameters,
    marginals: ArrayLike,
    pair_marginals: ArrayLike,
    second_moment: ArrayLike,
    margin: ArrayLike = _PROBABILITY_MARGIN,
) -> TreeParameters:
    r"""Parameters that maximise the bound of structured mean field for fixed states and second moments.

    The expected log density of a component is replaced by the log density at the root of the second moment (Ko 2017,
    eqs. (2.119)-(2.136)). Closed forms but for the scale of Student's t, which is found by Newton's method.

    :param Forest forest: the forest.
    :param TreeParameters parameters: families of the components (and their degrees of freedom); what no node of a
        group speaks of is kept.
    :param ArrayLike marginals: probability of state 1, of shape ``(num_nodes,)``.
    :param ArrayLike pair_marginals: joint probability of the states of parent and node, ``(num_nodes, 2, 2)``.
    :param ArrayLike second_moment: variance plus squared mean of each coefficient, of shape ``(num_nodes,)``.
    :param ArrayLike margin: how far the new probabilities keep from zero and one; those that are there stay.
    :return: the new parameters.
    """
    marginals, pairs, squared = map(jnp.asarray, (marginals, pair_marginals, second_moment))
    distance = jnp.sqrt(squared)
    states = SumProduct(jnp.zeros(()), marginals, pairs)
    return TreeParameters(
        _fit_scale(forest, parameters.low, 1.0 - marginals, distance),
        _fit_scale(forest, parameters.high, marginals, distance),
        *_new_probabilities(forest, parameters, states, margin),
    )


def initial_parameters(
    forest: Forest,
    coefficients: ArrayLike,
    noise_variance: ArrayLike = 0.0,
    low: type[Potential] = LaplacePotential,
    high: type[Potential] = LaplacePotential,
    df: float = 3.0,
) -> TreeParameters:
    """Where learning may start: scales a fifth and twice the root mean square of each group, states that persist.

    :param Forest forest: the forest.
    :param ArrayLike coefficients: coefficients of the raw data, of shape ``(num_nodes,)``.
    :param ArrayLike noise_variance: variance of the noise in these, which is taken off.
    :param type low: family of the low component: :class:`LaplacePotential`, :class:`GaussianPotential` or
        :class:`StudentTPotential`.
    :param type high: family of the high component.
    :param float df: degrees of freedom where a family has them.
    """
    squared = jnp.square(jnp.asarray(coefficients))
    total = _group_mean(forest, jnp.ones_like(squared), squared, jnp.zeros(()))
    floor = 1e-3 * total + jnp.finfo(total.dtype).tiny ** 0.5
    root_mean_square = jnp.sqrt(jnp.maximum(total - jnp.max(jnp.asarray(noise_variance)), floor))
    ones = jnp.ones_like(total)

    def component(family: type[Potential], factor: float) -> Potential:
        _power_of(family)
        arguments: list[Any] = [jnp.zeros_like(ones[0]), factor * root_mean_square]
        return family(*arguments, *([jnp.full_like(ones[0], df)] if family is StudentTPotential else []))

    return TreeParameters(
        component(low, 0.2), component(high, 2.0), 0.5 * ones, jnp.stack([0.1 * ones, 0.8 * ones], axis=-1)
    )


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


def _per_node(forest: Forest, component: Potential) -> Potential:
    """The component with the parameters of each node's group."""
    return jax.tree.map(lambda x: jnp.asarray(x)[forest.groups] if jnp.ndim(x) else x, component)


def components_of_nodes(forest: Forest, parameters: TreeParameters) -> tuple[Potential, Potential]:
    """The low and the high component with the parameters of each node's group."""
    return _per_node(forest, parameters.low), _per_node(forest, parameters.high)


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


def _group_sum(forest: Forest, values: Array) -> Array:
    return jax.ops.segment_sum(values, forest.groups, forest.num_groups)


def _group_mean(forest: Forest, weights: Array, values: Array, otherwise: Array) -> Array:
    """Weighted mean of the values of each group, or ``otherwise`` where the weights vanish."""
    total, weight = _group_sum(forest, weights * values), _group_sum(forest, weights)
    present = weight > 1e3 * jnp.finfo(weight.dtype).tiny
    return jnp.where(present, total / jnp.where(present, weight, 1.0), otherwise)


def _new_probabilities(
    forest: Forest, parameters: TreeParameters, states: SumProduct | TreeMoments, margin: ArrayLike
) -> tuple[Array, Array]:
    """Average probabilities of roots, and of states given the parent's, in each group; those of zero and one stay."""
    is_root = forest.is_root.astype(states.marginals.dtype)
    root = _group_mean(forest, is_root, states.marginals, jnp.asarray(parameters.root_probability))
    joint = _group_sum(forest, states.pair_marginals)
    parent = jnp.sum(joint, axis=-1)
    present = parent > 1e3 * jnp.finfo(parent.dtype).tiny
    transition = jnp.where(present, joint[..., 1] / jnp.where(present, parent, 1.0), parameters.transition)
    return _inside(root, parameters.root_probability, margin), _inside(transition, parameters.transition, margin)


def _inside(probability: Array, old: ArrayLike, margin: ArrayLike) -> Array:
    """Kept from zero and one, unless it was there: such a state is excluded by the model, as in a factorial prior."""
    old = jnp.asarray(old)
    return jnp.where((old == 0.0) | (old == 1.0), old, jnp.clip(probability, margin, 1.0 - margin))


def _power_of(family: type[Potential]) -> float:
    if family not in _POWERS:
        known = ", ".join(sorted(f.__name__ for f in _POWERS))
        raise ValueError(f"The scale of a component can be learned for {known}; not for {family.__name__}.")
    return _POWERS[family]


def _power(component: Potential) -> float:
    return _power_of(type(component))


def _scaled(component: Any, factor: Array) -> Any:
    """The component with its scale multiplied."""
    return dataclasses.replace(component, scale=component.scale * factor)


def _with_scale_slope(function: Any, component: Potential) -> tuple[Any, Any]:
    """A function of a component, and its derivative in the log of the scale."""
    _power(component)
    scale = jnp.asarray(component.scale)  # type: ignore[attr-defined]
    return jax.jvp(lambda x: function(dataclasses.replace(component, scale=x)), (scale,), (scale,))  # type: ignore[type-var]


def _fit_scale(forest: Forest, component: Potential, weights: Array, distance: Array) -> Potential:
    """Scales that maximise the weighted log density of each group at given distances from zero."""
    power = _power(component)

    def log_ratio(log_factor: Array) -> Array:
        """Log of the mean of distance over scale to the power; the root is the maximum."""
        nodes = _per_node(forest, _scaled(component, jnp.exp(log_factor)))
        _, slope = _with_scale_slope(lambda c: c.log_density(distance), nodes)
        return jnp.log(jnp.maximum(_group_mean(forest, weights, 1.0 + slope, jnp.ones(())), 1e-30))

    log_factor = jnp.zeros(forest.num_groups, distance.dtype)
    log_factor = log_factor + log_ratio(log_factor) / power
    if isinstance(component, StudentTPotential):
        tolerance = 8.0 * jnp.finfo(distance.dtype).eps

        def newton(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            i, log_factor, _ = state
            value, slope = jax.jvp(log_ratio, (log_factor,), (jnp.ones_like(log_factor),))
            # The slope lies between -2 and 0; far from the maximum it may be flat.
            step = jnp.clip(-value / jnp.minimum(slope, -1e-3), -3.0, 3.0)
            return i + 1, log_factor + step, jnp.max(jnp.abs(step))

        start = (jnp.zeros((), jnp.int32), log_factor, jnp.full((), jnp.inf, distance.dtype))
        _, log_factor, _ = jax.lax.while_loop(lambda state: (state[0] < 60) & (state[2] > tolerance), newton, start)
    return _scaled(component, jnp.exp(log_factor))
