"""Sparse coefficients whose scales persist along the branches of trees: the prior of wavelet coefficients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample
from numpyro.util import is_prng_key

from ..potentials.base import Potential
from ..potentials.families.gaussian import GaussianPotential
from ..potentials.families.laplace import LaplacePotential
from ..potentials.families.student_t import StudentTPotential
from ..potentials.trees.forest import Forest, SumProduct
from ..potentials.trees.mixture import TreeParameters, log_density, log_evidence, sample_states, state_posterior

Tree = TypeVar("Tree")


class HiddenMarkovTree(Distribution):
    r"""Coefficients on the nodes of a forest, each in a low or a high state that its children tend to share.

    .. math::
        p(s) = \sum_\delta P(\delta) \prod_j p_{\delta_j}(s_j), \qquad P(\delta) = \prod_{j \text{ root}} P(\delta_j)
        \prod_{j \text{ not root}} P(\delta_j \mid \delta_{\rho(j)})

    The states are summed out by messages from the leaves to the roots, so that the log density is exact, takes time
    linear in the number of nodes, and is differentiable in values and parameters: the same model runs under NUTS, SVI
    and the engines that use the tree.

    Parameters are shared by the nodes of a group of the forest. Scalars hold for all groups; the last axis of a vector
    runs over the groups, and axes before it are batch axes.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.distributions import HiddenMarkovTree
        >>> from numpyro_ext.potentials import Forest
        >>> forest = Forest.from_parents([-1, 0, 0])
        >>> tree = HiddenMarkovTree(forest, dist.Laplace(0.0, 0.1), dist.Laplace(0.0, 2.0))
        >>> print(tree.log_prob(jnp.array([0.05, -0.1, 1.5])))
        -3.3104
        >>> print(tree.state_probabilities(jnp.array([0.05, -0.1, 1.5])))
        [0.176 0.072 1.   ]

    **References**

    1. Crouse, M. S., Nowak, R. D. and Baraniuk, R. G. (1998), *Wavelet-based statistical signal processing using
       hidden Markov models*, IEEE Transactions on Signal Processing 46, 886-902.

    :param Forest forest: the forest (:meth:`~numpyro_ext.potentials.Forest.from_parents`,
        :func:`~numpyro_ext.potentials.wavelet_forest`).
    :param Distribution low: distribution of a coefficient in the low state: ``Laplace``, ``Normal`` or ``StudentT``.
    :param Distribution high: the same for the high state.
    :param root_probability: probability that a node without parent is in the high state.
    :param transition: probabilities of the high state given that the parent is low and that it is high, on the last
        axis; the axis before it, if there is one, runs over the groups (of the child).
    """

    arg_constraints = {"root_probability": constraints.unit_interval, "transition": constraints.unit_interval}
    support = constraints.real_vector
    pytree_data_fields = ("forest", "low", "high", "root_probability", "transition")

    def __init__(
        self,
        forest: Forest,
        low: Distribution,
        high: Distribution,
        root_probability: ArrayLike = 0.5,
        transition: ArrayLike | Sequence[object] = (0.1, 0.8),
        *,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(forest, Forest):
            raise TypeError(
                "HiddenMarkovTree needs a Forest: Forest.from_parents(parents) or wavelet_forest(transform); got "
                f"{type(forest).__name__}."
            )
        groups = forest.num_groups
        self.forest = forest
        self.low, self.high = low, high
        self.root_probability = jnp.asarray(root_probability, float)
        self.transition = jnp.asarray(transition, float)
        if jnp.shape(self.transition)[-1:] != (2,):
            raise ValueError(
                "HiddenMarkovTree: the last axis of transition holds the probabilities of the high state given a low "
                f"and a high parent; it must have 2 entries, but the shape is {jnp.shape(self.transition)}."
            )
        shapes = {
            "low": _potential("low", low)[1],
            "high": _potential("high", high)[1],
            "root_probability": jnp.shape(self.root_probability),
            "transition": jnp.shape(self.transition)[:-1],
        }
        for name, shape in shapes.items():
            if shape and shape[-1] not in (1, groups):
                raise ValueError(
                    f"HiddenMarkovTree: the forest has {groups} groups of nodes, but {name} has parameters for "
                    f"{shape[-1]}. Give one value for each group, or one for all."
                )
        for name in ("root_probability", "transition"):
            value = getattr(self, name)
            if not isinstance(value, jax.core.Tracer) and not np.all(
                (np.asarray(value) >= 0) & (np.asarray(value) <= 1)
            ):
                raise ValueError(f"HiddenMarkovTree: {name} must hold probabilities, between 0 and 1; got {value}.")
        batch_shape = lax.broadcast_shapes(*(shape[:-1] for shape in shapes.values()))
        super().__init__(batch_shape=batch_shape, event_shape=(forest.num_nodes,), validate_args=validate_args)

    @property
    def parameters(self) -> TreeParameters:
        """Components and probabilities of each group, with the shape ``batch_shape + (num_groups,)``."""
        shape = (*self.batch_shape, self.forest.num_groups)

        def component(name: str) -> Potential:
            potential, _ = _potential(name, getattr(self, name))
            return jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x, float), shape), potential)

        return TreeParameters(
            component("low"),
            component("high"),
            jnp.broadcast_to(self.root_probability, shape),
            jnp.broadcast_to(self.transition, (*shape, 2)),
        )

    def _map(self, function: Callable[[TreeParameters, Array], Tree], value: Array, *, axes: int) -> Tree:
        """A function of the parameters and of ``axes`` axes of a value, over all axes before these."""
        lead = lax.broadcast_shapes(value.shape[: value.ndim - axes], self.batch_shape)
        value = jnp.broadcast_to(value, lead + value.shape[value.ndim - axes :])
        if lead == ():
            return function(self.parameters, value)
        flat = value.reshape(-1, *value.shape[len(lead) :])
        if self.batch_shape == ():
            found = jax.vmap(function, (None, 0))(self.parameters, flat)
        else:
            skip = len(self.batch_shape)
            parameters = jax.tree.map(
                lambda x: jnp.broadcast_to(x, lead + x.shape[skip:]).reshape(-1, *x.shape[skip:]), self.parameters
            )
            found = jax.vmap(function)(parameters, flat)
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), found)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        value = jnp.asarray(value)
        return self._map(lambda parameters, s: log_density(self.forest, parameters, s), value, axes=1)

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        if key is None or not is_prng_key(key):
            raise TypeError(f"HiddenMarkovTree.sample needs a random key as made by jax.random.key; got {key!r}.")
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # of jax.random.PRNGKey, whose arrays have an axis more
            key = random.wrap_key_data(key)
        keys = random.split(key, sample_shape + self.batch_shape)
        return self._map(self._sample_one, keys, axes=0)

    def _sample_one(self, parameters: TreeParameters, key: Array) -> Array:
        groups = self.forest.groups
        key_states, key_low, key_high = random.split(key, 3)
        states = sample_states(
            key_states, self.forest, parameters.root_probability[groups], parameters.transition[groups]
        )
        draws = [_draw(k, c, groups) for k, c in ((key_low, parameters.low), (key_high, parameters.high))]
        return jnp.where(states, draws[1], draws[0])

    def state_probabilities(self, value: ArrayLike) -> Array:
        """Posterior probability of the high state of each node given the coefficients, of the shape of ``value``."""
        return self._states(jnp.asarray(value)).marginals

    def pair_probabilities(self, value: ArrayLike) -> Array:
        """Posterior probability of the states of a node's parent and of the node, on two more axes; zero for roots."""
        return self._states(jnp.asarray(value)).pair_marginals

    def _states(self, value: Array) -> SumProduct:
        def one(parameters: TreeParameters, s: Array) -> SumProduct:
            return state_posterior(self.forest, parameters, log_evidence(self.forest, parameters, s))

        return self._map(one, value, axes=1)

    def _moments(self) -> tuple[Array, Array]:
        def one(parameters: TreeParameters, nothing: Array) -> tuple[Array, Array]:
            p = state_posterior(self.forest, parameters, jnp.zeros((self.forest.num_nodes, 2)) + nothing).marginals
            (m0, v0), (m1, v1) = (
                tuple(x[self.forest.groups] for x in _location_and_variance(c)) for c in parameters[:2]
            )
            return m0 + p * (m1 - m0), v0 + p * (v1 - v0) + p * (1.0 - p) * jnp.square(m1 - m0)

        return self._map(one, jnp.zeros(self.batch_shape), axes=0)

    @property
    def mean(self) -> Array:
        return self._moments()[0]

    @property
    def variance(self) -> Array:
        return self._moments()[1]


def _potential(name: str, component: object) -> tuple[Potential, tuple[int, ...]]:
    """A component as a factor of its argument, and the shape of its parameters."""
    shape: tuple[int, ...] = getattr(component, "batch_shape", ())
    if isinstance(component, dist.ExpandedDistribution):
        component = component.base_dist
    if isinstance(component, dist.Laplace):
        return LaplacePotential(component.loc, component.scale), shape
    if isinstance(component, dist.Normal):
        return GaussianPotential(component.loc, component.scale), shape
    if isinstance(component, dist.StudentT):
        return StudentTPotential(component.loc, component.scale, component.df), shape
    raise ValueError(
        f"HiddenMarkovTree: the component {name} must be a Laplace, Normal or StudentT distribution; got "
        f"{type(component).__name__}."
    )


def _location(component: Any) -> Array:
    return jnp.asarray(component.location if isinstance(component, LaplacePotential) else component.observation)


def _draw(key: Array, component: Any, groups: Array) -> Array:
    """One value per node."""
    location, scale = _location(component)[groups], jnp.asarray(component.scale)[groups]
    if isinstance(component, StudentTPotential):
        standard = random.t(key, jnp.asarray(component.df)[groups], groups.shape, scale.dtype)
    else:
        draw = random.laplace if isinstance(component, LaplacePotential) else random.normal
        standard = draw(key, groups.shape, scale.dtype)
    return location + scale * standard


def _location_and_variance(component: Any) -> tuple[Array, Array]:
    """Location and variance of each group; the variance of a Student-t may be infinite."""
    squared = jnp.square(component.scale)
    if isinstance(component, LaplacePotential):
        squared = 2.0 * squared
    if isinstance(component, StudentTPotential):
        finite = component.df > 2.0
        ratio = jnp.where(finite, component.df / jnp.where(finite, component.df - 2.0, 1.0), jnp.inf)
        squared = squared * ratio
    return _location(component), squared
