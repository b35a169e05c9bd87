r"""Closed-form learning of the parameters of a tree's prior, as the sources have it; the engines climb by gradients.

Expectation-maximisation with exact expectations (Crouse, Nowak and Baraniuk 1998), and the updates of structured mean
field (Ko 2017, eqs. (2.119)-(2.136)).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_ext.infer.sparse.trees.learning import FLOOR, states_given
from numpyro_ext.potentials.base import Potential
from numpyro_ext.potentials.families.gaussian import GaussianPotential
from numpyro_ext.potentials.families.laplace import LaplacePotential
from numpyro_ext.potentials.families.student_t import StudentTPotential
from numpyro_ext.potentials.trees.forest import Forest, SumProduct
from numpyro_ext.potentials.trees.mixture import (
    TreeMoments,
    TreeParameters,
    components_of_nodes,
    per_node,
    tilted_moments,
)
from numpyro_ext.structure.sparse_linear.form import SparseLinear

# The power of the scale in which the complete-data log density is linear, up to a log: what makes its update closed.
# For Student's t the data are completed by the precision of the Gaussian that it is a mixture of.
_POWERS = {LaplacePotential: 1.0, GaussianPotential: 2.0, StudentTPotential: 2.0}
_PROBABILITY_MARGIN = 1e-4


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
    mean, variance = jnp.asarray(mean), jnp.asarray(variance)
    tree = tilted_moments(forest, parameters, mean, variance)
    variance = jnp.broadcast_to(variance, tree.mean.shape)
    low, high = components_of_nodes(forest, parameters)
    low_slope, high_slope = (
        _with_scale_slope(lambda c: c.tilted_moments(mean, variance), component)[1] for component in (low, high)
    )

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
    """Parameters to begin at: scales a fifth and twice the root mean square of each group, states that persist.

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


def learn_prior(form: SparseLinear, state: Any) -> SparseLinear:
    """The form with the parameters of the prior that maximise the bound at ``state``, in closed form.

    Ko (2017), eqs. (2.126)-(2.136).
    """
    states = states_given(form, state.second_moment)
    prior = m_step(form.forest, form.prior, states.marginals, states.pair_marginals, state.second_moment)
    return form._replace(prior=prior)


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
        nodes = per_node(forest, _scaled(component, jnp.exp(log_factor)))
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
